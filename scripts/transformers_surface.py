"""Print what src/tarnn touches of transformers, by file: imports, private names, and attributes that it replaces.

python scripts/transformers_surface.py
"""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "tarnn"
HOOKS = "huggingface/patching/families.py"
OF_TUPLES = ("_replace", "_asdict", "_fields")


def surface() -> dict[str, Counter[str]]:
    """File → what it touches, and how often: "import transformers.x.Name", "private _name", "replaces path"."""
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    own = {name for tree in trees.values() for name in made(tree)}
    found = {path: Counter(touches(tree, own)) for path, tree in trees.items()}
    found[HOOKS] += replaced()
    return {path: touched for path, touched in found.items() if touched}


def touches(tree: ast.Module, own: set[str]) -> list[str]:
    """What one file imports, and where it imports something, the private names that it uses and that are not our own."""
    imported = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
            imported += [f"import {node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            names = (name.name for name in node.names)
            imported += [f"import {name}" for name in names if name.partition(".")[0] == "transformers"]
    names = [x.attr for x in ast.walk(tree) if imported and isinstance(x, ast.Attribute) and x.attr not in own]
    return imported + [f"private {name}" for name in names if is_private(name)]


def made(tree: ast.Module) -> list[str]:
    """Names of functions and classes, and of attributes that are set on `self`."""
    nodes = list(ast.walk(tree))
    stored = [x for x in nodes if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)]
    fields = [x.target.id for x in nodes if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)]
    functions = [x.name for x in nodes if isinstance(x, ast.FunctionDef | ast.ClassDef)]
    return functions + fields + [x.attr for x in stored if getattr(x.value, "id", "") == "self"]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_TUPLES


def replaced() -> Counter[str]:
    """The functions and methods of transformers that `patch_transformers` replaces."""
    from tarnn.huggingface.patching.families import FAMILIES

    return Counter(f"replaces {family.module}.{hook.path}" for family in FAMILIES for hook in family.hooks)


def count() -> int:
    """How many places there are in all."""
    return sum(sum(touched.values()) for touched in surface().values())


def main() -> None:
    for path, touched in surface().items():
        print(f"{path} ({sum(touched.values())})")
        for what, times in sorted(touched.items()):
            print(f"    {what}{f' × {times}' * (times > 1)}")
    kinds = Counter(what.partition(" ")[0] for touched in surface().values() for what in touched.elements())
    print(f"\n{count()} places in {len(surface())} files: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()))


if __name__ == "__main__":
    main()
