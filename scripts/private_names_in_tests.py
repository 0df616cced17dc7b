"""Print the private names of tarnn that tests use, by file: each holds a test to how something is written today.

python scripts/private_names_in_tests.py
"""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def private_names(tree: ast.Module) -> list[str]:
    """Attributes, imported names and names in strings, such as those that `monkeypatch.setattr` takes."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names += [name.name for name in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.append(node.value.rpartition(".")[2])
    return [
        name for name in names if name.strip("_") and name.startswith("_") and name[:2] != "__" and name.isidentifier()
    ]


def made(tree: ast.Module) -> set[str]:
    """The private functions, classes and fields of a file."""
    names = {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.ClassDef)}
    stored = {x for x in ast.walk(tree) if isinstance(x, ast.Attribute | ast.Name) and isinstance(x.ctx, ast.Store)}
    return names | {x.attr if isinstance(x, ast.Attribute) else x.id for x in stored}


def uses() -> dict[str, Counter[str]]:
    """File of tests → private names of tarnn's source in it, and how often."""
    trees = {
        room: {str(x.relative_to(ROOT)): ast.parse(x.read_text()) for x in sorted((ROOT / room).rglob("*.py"))}
        for room in ("src", "tests")
    }
    ours = set().union(*map(made, trees["src"].values()))
    found = {}
    for path, tree in trees["tests"].items():
        theirs = ours - made(tree)
        if names := Counter(name for name in private_names(tree) if name in theirs):
            found[path] = names
    return found


def main() -> None:
    found = uses()
    for path, names in found.items():
        print(f"{sum(names.values()):4d}  {path}: {', '.join(sorted(names))}")
    print(f"{sum(sum(names.values()) for names in found.values()):4d}  in all")


if __name__ == "__main__":
    main()
