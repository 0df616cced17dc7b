"""What every experiment writes: a table, a picture, and the numbers with what they were made with."""

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import tarnn

RESULTS = Path(__file__).parent / "results"


def write(folder: Path, name: str, facts: dict[str, Any], table: str) -> list[Path]:
    """`name`.json and `name`.md in `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({**provenance(), **facts}, indent=1) + "\n")
    (folder / f"{name}.md").write_text(table)
    return [folder / f"{name}.json", folder / f"{name}.md"]


def provenance() -> dict[str, Any]:
    """Versions and the command, less the paths in it, which are this machine's affair."""
    words = [Path(x).name if "/" in x else x for x in sys.argv[1:]]
    return {
        "command": " ".join(["python", f"experiments/{Path(sys.argv[0]).name}", *words]),
        "versions": {
            "tarnn": tarnn.__version__, "torch": torch.__version__, "python": platform.python_version(),
        },
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def markdown(header: list[str], rows: list[list[Any]]) -> str:
    """A table; the first column to the left, numbers to the right."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
