"""Which of tarnn's files imports what from which other: read from their source, for the rules of the house."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "tarnn"


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}


class Import(NamedTuple):
    """`from module import name`; the name of a file, or of the whole package, is ""."""

    module: str
    name: str


def nodes(tree: ast.AST, *, for_types: bool = False) -> Iterator[ast.AST]:
    """All nodes of a file but those under `if TYPE_CHECKING:`, or those alone."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from ast.walk(child) if for_types else ()
        else:
            yield from () if for_types else (child,)
            yield from nodes(child, for_types=for_types)


@cache
def imports(module: str, *, for_types: bool = False) -> tuple[Import, ...]:
    """What a file imports from tarnn, in functions too, as it stands there."""
    here = []
    for node in nodes(TREES[module], for_types=for_types):
        if isinstance(node, ast.Import):
            names = [Import(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import, which no rule reads"
            names = [Import(str(node.module), alias.name) for alias in node.names]
        else:
            continue
        for home, name in names:
            if f"{home}.{name}" in FILES:
                here.append(Import(f"{home}.{name}", ""))
            elif home.split(".")[0] == "tarnn":
                here.append(Import(home, name))
    return tuple(here)


FACES = {  # where the names of packages come from that load them on first use; "*": all others
    module: {name: home for home, name in imports(module, for_types=True)}
    for module, path in FILES.items()
    if path.name == "__init__.py"
}


def home_of(module: str, name: str) -> str:
    """The file that `from module import name` means."""
    names = FACES.get(module, {})
    return names.get(name, names.get("*", module) if name else module)


@cache
def loads_by_name(module: str) -> set[str]:
    """Return the files whose names stand in a file as texts, to be imported when they are needed."""
    texts = {node.value for node in nodes(TREES[module]) if isinstance(node, ast.Constant) and node.value in FILES}
    return texts - {module, module.rpartition(".")[0], "tarnn"}  # a package that names itself gathers its own files


@cache
def arrows(module: str) -> set[str]:
    """Return the files that a file imports, by a statement or by a name in a text."""
    return {home_of(home, name) for home, name in imports(module)} | loads_by_name(module) - {module}


def room_of(module: str) -> str:
    """The folder of a file, or its own name at the top level."""
    return module.split(".")[1] if "." in module else "tarnn"


@cache
def re_exports(module: str) -> set[str]:
    """The names that a file imports although it is no package that gathers those of its own files."""
    package = f"{module}." if FILES[module].name == "__init__.py" else "\0"
    return {name for home, name in imports(module) if name and not home.startswith(package)}
