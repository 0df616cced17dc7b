"""Lines about what happens, for whoever wants to read them."""

from collections.abc import Callable

Log = Callable[[str], None]  # takes one line


def silent(_: str) -> None:
    """The log of a command that is to be quiet."""
