"""Pages of the API: which names there are. Their texts are the docstrings, which Sphinx reads."""

import ast
import importlib
import inspect
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("ops", "attention", "feature_maps", "models", "parallel")  # packages whose names are public
MEMBERS = "   :members:\n   :special-members: __call__\n"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def entry(home: str, name: str, with_module: bool) -> str:
    """Return the directive that documents one name."""
    thing = getattr(importlib.import_module(home), name)
    kind = "autoclass" if inspect.isclass(thing) else "autofunction" if callable(thing) else "autodata"
    body = f".. {kind}:: {home}.{name}\n" + (MEMBERS if kind == "autoclass" else "")
    place = f"From `{home}`.\n\n" if with_module else ""
    return f"## {name}\n\n{place}```{{eval-rst}}\n{body}```\n"


def names_in_guides(pages: list[Path]) -> dict[str, set[str]]:
    """Collect what the guides' code imports: module → names."""
    used: dict[str, set[str]] = {}
    for page in pages:
        for block in FENCE.findall(page.read_text(encoding="utf-8")):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tarnn."):
                    used.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    return used


def first_sentence(thing: object) -> str:
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0].rstrip(":.") + "."


def api_pages(guides: list[Path]) -> dict[str, str]:
    """Return the pages by name: `tarnn`, one per public package, and one of what guides import from deeper modules."""
    top = importlib.import_module("tarnn")
    kinds = {name: inspect.isclass(getattr(top, name)) for name in top.__all__}
    functions, classes = (
        [("tarnn", name) for name in top.__all__ if kinds[name] == wanted] for wanted in (False, True)
    )
    pages = {
        "tarnn": page("tarnn", first_sentence(top) + " Functions; [classes](tarnn.classes.md).", functions),
        "tarnn.classes": page("tarnn: classes", "Layers, feature maps, models and states, in `tarnn` itself.", classes),
    }
    for room in ROOMS:
        package = importlib.import_module(f"tarnn.{room}")
        own = [(package.__name__, name) for name in package.__all__ if name not in top.__all__]
        shared = ", ".join(f"[`{name}`]({home_of(name, kinds)})" for name in package.__all__ if name in top.__all__)
        also = f"\n\nAlso here, and in `tarnn` itself: {shared}." if shared else ""
        pages[f"tarnn.{room}"] = page(package.__name__, first_sentence(package) + also, own)
    known = {"tarnn", *(f"tarnn.{room}" for room in ROOMS)}
    deeper = names_in_guides(guides)
    public = set(top.__all__).union(*(importlib.import_module(f"tarnn.{room}").__all__ for room in ROOMS))
    rest = [(home, name) for home in sorted(deeper) if home not in known for name in sorted(deeper[home] - public)]
    pages["more"] = page("More modules", "Names that the guides import from other modules.", rest, with_module=True)
    return pages


def home_of(name: str, classes: dict[str, bool]) -> str:
    return f"tarnn{'.classes' * classes[name]}.md#{name.lower()}"


def page(title: str, intro: str, names: list[tuple[str, str]], *, with_module: bool = False) -> str:
    head = f"`{title}`" if title.startswith("tarnn") else title
    return "\n".join([f"# {head}\n\n{intro}\n", *(entry(home, name, with_module) for home, name in names)])


def index(pages: dict[str, str]) -> str:
    """Return the page that lists the others."""
    listed = "\n".join(f"* [`{name}`]({name}.md): {text.splitlines()[2]}" for name, text in pages.items())
    names = "\n".join(pages)
    intro = (
        "All of it is made from docstrings. Shapes stand in annotations: `Float[Tensor, 'b h t d']` is a tensor of "
        "floating-point numbers with four axes, whose letters are those of [the notation](../../docs/notation.md)."
    )
    return f"# The API\n\n{intro}\n\n{listed}\n\n```{{toctree}}\n:hidden:\n{names}\n```\n"
