"""Follow one parameter through the calls that hand it on, by reading the source: how many files does it pass, how often back?

python scripts/walk.py                                              `q` from linear_attention
python scripts/walk.py tarnn.ops.delta.op:delta_rule:q --stays      another one, each stay printed

Branches are walked one after the other, in the order of the source. A function is entered once. A callee that is chosen at run
time (a method of an unknown object, a function in a table) is not followed.
"""

import argparse
import ast
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src"
START = "tarnn.ops:linear_attention:q"
FACTS = {"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda"}  # whoever gets these gets no tensor
Function = ast.FunctionDef | ast.ClassDef


class Stay(NamedTuple):
    """A visit to one file, and the functions entered in it."""

    module: str
    functions: tuple[str, ...]


@cache
def tree_of(module: str) -> ast.Module | None:
    """Parse a module of tarnn; None for any other."""
    base = SOURCE / module.replace(".", "/")
    path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.exists()), None)
    return ast.parse(path.read_text()) if path else None


@cache
def imports_of(module: str) -> dict[str, tuple[str, str]]:
    """Return the names that a module imports: name → (module, name there; "" for a module itself)."""
    names = {}
    for node in ast.walk(tree_of(module) or ast.Module([], [])):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "tarnn":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                home = (whole, "") if tree_of(whole) else (str(node.module), alias.name)
                names[alias.asname or alias.name] = home
    return names


@cache
def find(module: str, name: str) -> tuple[str, Function] | None:
    """Find the definition that a name of a module means, through imports and lazy packages."""
    tree = tree_of(module)
    for node in tree.body if tree else ():
        if isinstance(node, Function) and node.name == name:
            return module, node
    home = imports_of(module).get(name)
    return find(*home) if home and home[1] and home != (module, name) else None


def callee_of(module: str, call: ast.Call) -> tuple[str, ast.FunctionDef] | None:
    """Resolve `f(…)` and `module.f(…)` to a function of tarnn; a class stands for its constructor."""
    match call.func:
        case ast.Name(id=name):
            found = find(module, name)
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            home = imports_of(module).get(owner, ("", ""))
            found = find(home[0] if not home[1] else "", name)
        case _:
            found = None
    if found and isinstance(found[1], ast.ClassDef):
        makers = [n for n in found[1].body if isinstance(n, ast.FunctionDef) and n.name in ("__init__", "__new__")]
        return (found[0], makers[0]) if makers else None
    return found  # type: ignore[return-value]


def mentions(node: ast.AST, names: set[str]) -> bool:
    """Tell whether an expression uses one of these names for more than its shape, dtype or device."""
    if isinstance(node, ast.Attribute) and node.attr in FACTS:
        return False
    if isinstance(node, ast.Name):
        return node.id in names
    return any(mentions(part, names) for part in ast.iter_child_nodes(node))


def handed_to(call: ast.Call, function: ast.FunctionDef, names: set[str]) -> set[str]:
    """Return the parameters of a function that get a followed name."""
    arguments = function.args
    places = [a.arg for a in arguments.posonlyargs + arguments.args if a.arg not in ("self", "cls")]
    handed = {place for place, value in zip(places, call.args, strict=False) if mentions(value, names)}
    handed |= {str(keyword.arg) for keyword in call.keywords if keyword.arg and mentions(keyword.value, names)}
    rest = any(mentions(value, names) for value in call.args[len(places) :] if arguments.vararg)
    return handed | ({arguments.vararg.arg} if rest and arguments.vararg else set())


def walk(module: str, function: ast.FunctionDef, names: set[str], entered: set[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield (module, function) at each entrance, and again at each return to a function that goes on."""
    entered.add(function)
    yield module, function.name
    names = set(names)
    for node in in_order(function.body):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value and mentions(node.value, names):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        if not isinstance(node, ast.Call):
            continue
        if (found := callee_of(module, node)) and found[1] not in entered:
            home, callee = found
            if handed := handed_to(node, callee, names):
                yield from walk(home, callee, handed, entered)


def in_order(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of statements in the order of evaluation: parts before the whole."""

    def parts(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            yield from parts(child)
        yield node

    for statement in body:
        yield from parts(statement)


def stays(start: str) -> list[Stay]:
    """Return the visits of a parameter, given as "module:function:parameter"."""
    module, name, parameter = start.split(":")
    found = find(module, name)
    if not found or not isinstance(found[1], ast.FunctionDef):
        raise SystemExit(f"walk: no function {name!r} in {module}")
    visits: list[Stay] = []
    for home, function in walk(*found, {parameter}, set()):
        if visits and visits[-1].module == home:
            visits[-1] = Stay(home, (*visits[-1].functions, function))
        else:
            visits.append(Stay(home, (function,)))
    return visits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", nargs="?", default=START, help=f"MODULE:FUNCTION:PARAMETER, {START} by default")
    parser.add_argument("--stays", action="store_true", help="print each stay, with the functions entered in it")
    options = parser.parse_args()
    visits = stays(options.start)
    files = {stay.module for stay in visits}
    if options.stays:
        for number, (module, functions) in enumerate(visits, 1):
            print(f"{number:4} {module:40} {', '.join(functions)}")
    moves = [(a.module, b.module) for a, b in pairwise(visits)]
    print(f"{len(visits)} stays in {len(files)} files, {len(moves) + 1 - len(files)} returns to a file already left")


if __name__ == "__main__":
    main()
