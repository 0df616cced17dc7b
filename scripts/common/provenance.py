"""What a figure was measured with: it is written beside every result."""

import os
import platform
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

import tarnn
from tarnn.cli.machine import processor
from tarnn.kernels.cpu import library


def provenance(script: str) -> dict[str, Any]:
    """Command, date, versions, machine, threads and kernels, as JSON. script: as `benchmarks/step.py`."""
    return {
        "command": command(script, sys.argv[1:]),
        "date": date.today().isoformat(),
        "versions": {"tarnn": tarnn.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {
            "cpu": processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": total_memory(),
            "system": f"{platform.system()} {platform.machine()}",
            "accelerator": str(torch.accelerator.current_accelerator(check_available=True) or "none"),
        },
        "threads": torch.get_num_threads(),
        "kernels": kernels(),
    }


def command(script: str, words: list[str]) -> str:
    """As anybody would type it: without where the results went, and of a path its name, which are this machine's affair."""
    words = [x for x in words if not x.startswith("--out=")]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return shlex.join(["python", script, *(Path(x).name if "/" in x else x for x in words)])


def total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def kernels() -> str:
    """Which kernels compute linear attention here, and why."""
    status = library.status()
    return f"{status.path}: {status.why}"
