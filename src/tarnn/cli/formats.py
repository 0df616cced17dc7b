"""Texts of commands: the command that follows, the page of a model, amounts with units."""

import re
import shlex
from pathlib import Path

from tarnn.errors import UserError

LONGEST = 40  # characters of an example in it


def next_command(command: str, folder: Path | str, example: str = "", *, is_path: bool = False) -> str:
    """`tarnn COMMAND FOLDER [EXAMPLE]`, quoted for a shell. A text is cut to its first words."""
    words = ["tarnn", command, str(folder)]
    if example and not is_path:
        example = " ".join(example.split())[:LONGEST].strip().lstrip("-")
    return shlex.join([*words, example] if example else words)


LENGTHS = [1024, 4096, 16384, 65536]  # tokens, where nobody asks for others


def model_page(checkpoint: str, rows: dict[str, str], memory: list[dict[str, int]], limit: int | None = None) -> str:
    """memory: for each length its bytes, in the order of the table. limit: the model's positions, None: any number."""
    width = max(map(len, rows))
    lines = [checkpoint, *(f"  {name:{width}}  {value}" for name, value in rows.items())]
    if not memory:
        return "\n".join(lines)
    lines += ["", "memory to generate one sequence, bytes"]
    lines += [f"{'tokens':>12}{'state':>18}{'with weights':>18}{'softmax: cache':>18}{'with weights':>18}"]
    for row in memory:
        beyond = "  (beyond its positions)" if limit and row["length"] > limit else ""
        lines += [f"{row['length']:12,}" + "".join(f"{x:18,}" for x in list(row.values())[1:]) + beyond]
    return "\n".join(lines)


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
