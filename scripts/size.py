"""Count the lines of src/tarnn by room: all of them, and code without comments, docstrings, blank lines and imports.

python scripts/size.py                   this checkout
python scripts/size.py --at cab8410      another revision, read from git
python scripts/size.py --check           compare this checkout with the budget in pyproject.toml
"""

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = "src/tarnn"
SUFFIXES = {".py", ".cpp", ".h"}
PAGES = {"javascript": ("src", {".js", ".html", ".css"})}  # places of the budget that are no folders
LONG = 300  # lines of a file, above which it is listed
EMPTY = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    files: int = 0
    lines: int = 0
    code: int = 0
    imports: int = 0
    skips: int = 0  # of the formatter

    def __add__(self, other: "Size") -> "Size":  # type: ignore[override]
        return Size(*map(sum, zip(self, other, strict=True)))


def lines_of(nodes: list[ast.stmt]) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def size_of(text: str) -> Size:
    """Count one file. A line is code if a token stands on it that belongs to no comment, docstring or import."""
    tree = list(ast.walk(ast.parse(text)))
    bodies = (node.body for node in tree if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    docstrings = [body[0] for body in bodies if body and is_text(body[0])]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    occupied = {line for token in tokens if token.type not in EMPTY for line in range(token.start[0], token.end[0] + 1)}
    imports = lines_of([node for node in tree if isinstance(node, ast.Import | ast.ImportFrom)])
    code = occupied - lines_of(docstrings) - imports
    return Size(1, text.count("\n"), len(code), len(imports), text.count("# fmt: skip"))


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def checkout() -> dict[str, str]:
    """Read the working tree: path under src/tarnn → text."""
    folder = ROOT / SOURCE
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))}


def revision(name: str) -> dict[str, str]:
    """Read a revision: path under src/tarnn → text."""
    command = ["git", "-C", str(ROOT), "archive", name, SOURCE]
    packed = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = [member for member in archive if member.name.endswith(".py")]
        texts = {member.name: archive.extractfile(member) for member in members}
        return {name.removeprefix(f"{SOURCE}/"): file.read().decode() for name, file in texts.items() if file}


def by_room(sizes: dict[str, Size]) -> dict[str, Size]:
    """Add the sizes of files up by folder of src/tarnn."""
    rooms: dict[str, Size] = {}
    for path, size in sizes.items():
        room = path.split("/")[0] if "/" in path else "(top level)"
        rooms[room] = rooms.get(room, Size()) + size
    return rooms


def report(texts: dict[str, str]) -> str:
    """Return the table of rooms, then the files that are too long."""
    sizes = {path: size_of(text) for path, text in texts.items()}
    rooms = by_room(sizes)
    rows = [*sorted(rooms.items()), ("all", sum(sizes.values(), Size()))]
    table = [f"{'room':14}{'files':>7}{'lines':>8}{'code':>8}{'imports':>9}{'fmt: skip':>11}"]
    table += [f"{room:14}{s.files:7}{s.lines:8,}{s.code:8,}{s.imports:9,}{s.skips:11}" for room, s in rows]
    long = [f"  {size.lines:4} {path}" for path, size in sizes.items() if size.lines > LONG]
    return "\n".join([*table, "", f"{len(long)} files above {LONG} lines" + ":" * bool(long), *sorted(long)[::-1]])


def lines_outside(folder: Path, place: str) -> int:
    """Count the lines of a file, or of the Python and C++ files that git knows in a folder; or those of PAGES."""
    where, suffixes = PAGES.get(place, (place, SUFFIXES))
    listed = subprocess.run(["git", "-C", str(folder), "ls-files", where], capture_output=True, text=True, check=True)
    paths = [folder / name for name in listed.stdout.splitlines() if name == where or Path(name).suffix in suffixes]
    return sum(path.read_text().count("\n") for path in paths if path.exists())


def over_budget(budget: dict, texts: dict[str, str], outside: dict[str, int]) -> list[str]:
    """Compare sizes with `[tool.tarnn.budget]`; return a sentence for each that exceeds it, or has none."""
    rooms = by_room({path: size_of(text) for path, text in texts.items()})
    whole = sum(rooms.values(), Size())
    found = [(f"src/tarnn, {unit}", budget["src"][unit], getattr(whole, unit)) for unit in ("lines", "code", "files")]
    found += [(f"src/tarnn/{room}, lines", budget["rooms"].get(room, 0), size.lines) for room, size in rooms.items()]
    found += [(f"{place}, lines", budget["outside"][place], lines) for place, lines in outside.items()]
    return [
        f"{what}: {size:,}, of {allowed:,} in pyproject.toml. Delete {size - allowed:,}, or raise the number in this "
        "commit, and give the reason in its body."
        for what, allowed, size in found
        if size > allowed
    ]


def check() -> int:
    """Print what exceeds the budget; return the exit code."""
    budget = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["tarnn"]["budget"]
    outside = {place: lines_outside(ROOT, place) for place in budget["outside"]}
    over = over_budget(budget, checkout(), outside)
    print("\n".join(over) or "all sizes are within the budget")
    return bool(over)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", metavar="REVISION", help="a revision of git; this checkout by default")
    parser.add_argument("--check", action="store_true", help="fail where a size exceeds the budget in pyproject.toml")
    options = parser.parse_args()
    if options.check:
        sys.exit(check())
    print(report(checkout() if options.at is None else revision(options.at)))


if __name__ == "__main__":
    main()
