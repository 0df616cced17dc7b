"""Each call is checked: what tarnn does to check a repeated one only once is left out."""

from collections.abc import Callable
from typing import Any


def skip_repeated_checks(checked: Callable[..., Any]) -> Callable[..., Any]:
    return checked
