"""Amounts as people write them: bytes with a unit, times with a unit."""

import re

from tarnn.errors import UserError

BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
AMOUNT = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z]*)")


def num_bytes(text: str, option: str) -> int:
    """Read "500MB", "1.5 GiB" or a plain number as bytes. UserError names the option."""
    return int(amount(text, BYTES, f"{option} must be a number of bytes, such as 500MB or 20GB"))


def num_seconds(text: str, option: str) -> float:
    """Read "90s", "30m", "12h" or "7d" as seconds. UserError names the option."""
    return amount(text, SECONDS, f"{option} must be a time, such as 90s, 30m, 12h or 7d")


def amount(text: str, units: dict[str, int], expected: str) -> float:
    match = AMOUNT.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise UserError(f"{expected}; got {text!r:.40}.")
    return float(match[1]) * units[match[2].lower()]
