"""Text that comes with every CPython, so that there is something real to train on without a download."""

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from tarnn.errors import UserError

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def python_docs() -> Iterator[tuple[str, bytes]]:
    """The language reference and documentation in `pydoc_data.topics`, by name: about half a megabyte."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("this Python has no pydoc_data.topics, so no 'python-docs'; give a text of yours.") from None
    for name in sorted(topics):
        yield name, topics[name].encode()


def python_stdlib() -> Iterator[tuple[str, bytes]]:
    """The sources of the standard library without its tests, by path: about 12 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in sorted(root.rglob("*.py")) if NOT_LIBRARY.isdisjoint(p.relative_to(root).parts)]
    if not paths:
        raise UserError(f"this Python has no sources in {root}, so no 'python-stdlib'; give a text of yours.")
    for path in paths:
        if path.stat().st_size:
            yield str(path.relative_to(root)), path.read_bytes()


# name → a function that yields (name of the document, its bytes)
CORPORA: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {
    "python-docs": python_docs,
    "python-stdlib": python_stdlib,
}
