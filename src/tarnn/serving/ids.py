"""Ids that clients are given: nobody guesses one, and each belongs to the process that drew it."""

import secrets
from collections.abc import Callable


class Ids:
    """Draws ids. `own`: whether requests with an id come to this process; where several serve together, each draws its own."""

    def __init__(self) -> None:
        self.own: Callable[[str], bool] = lambda id: True

    def new(self, kind: str) -> str:
        while not self.own(id := f"{kind}_{secrets.token_hex(16)}"):
            pass
        return id


IDS = Ids()
