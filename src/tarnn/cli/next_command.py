"""The command that a report ends with: it works as typed."""

import shlex
from pathlib import Path

LONGEST = 40  # characters of an example in it


def next_command(command: str, folder: Path | str, example: str = "", *, is_path: bool = False) -> str:
    """`tarnn COMMAND FOLDER [EXAMPLE]`, quoted for a shell. A text is cut to its first words."""
    words = ["tarnn", command, str(folder)]
    if example and not is_path:
        example = " ".join(example.split())[:LONGEST].strip().lstrip("-")
    return shlex.join([*words, example] if example else words)
