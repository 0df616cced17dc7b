"""The sentences with which tarnn refuses or warns, collected from its code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tarnn"
SHORTEST = 25  # characters: less is no sentence
RAISED = re.compile(r"\w*(Error|State|Refusal|Warning|bad|gone|taken|refused|full|missing)")


def sentence(node: ast.AST) -> str | None:
    """Return a text as a reader meets it, with ‹names› where values stand; None for what is computed elsewhere."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(x.value) if isinstance(x, ast.Constant) else value(x.value) for x in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (sentence(node.left) or "…") + (sentence(node.right) or "…")
    return None


def value(node: ast.AST) -> str:
    """Name a value in a sentence, if its expression is a name."""
    words = ast.unparse(node)
    return f"‹{words.rpartition('.')[2].strip('_')}›" if re.fullmatch(r"[\w.]+", words) else "…"


def sentences(path: Path) -> Iterator[str]:
    """Yield what a file raises or warns."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if (isinstance(node, ast.Raise) and RAISED.fullmatch(name)) or name in ("warn", "warning"):
            text = next((x for x in map(sentence, call.args) if x and len(x) >= SHORTEST), None)
            if text:
                yield " ".join(text.split())


def collected() -> dict[str, list[str]]:
    """Return all sentences by room: cli, conversion …"""
    rooms: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        room = place.parts[0] if len(place.parts) > 1 else "tarnn"
        rooms.setdefault(room, set()).update(sentences(path))
    return {room: sorted(texts, key=str.lower) for room, texts in sorted(rooms.items()) if texts}


def refusals(explained: str) -> str:
    """Return the page: the sentences that are explained, then all of them. explained: docs/site/errors.md."""
    parts = [
        explained.strip(),
        "## All sentences",
        "Collected from the code. ‹…› stands for a name or a number of yours.",
    ]
    for room, texts in collected().items():
        listed = "\n".join(f"* {literal(text)}" for text in texts)
        parts.append(f"### {room}\n\n{listed}")
    return "\n\n".join(parts) + "\n"


def literal(text: str) -> str:
    """Escape what Markdown would read as a mark."""
    return re.sub(r"([\\`*_\[\]<>|#~{}$])", r"\\\1", text)
