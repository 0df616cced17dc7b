"""What a figure was measured with: it is written beside every result."""

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import tarnn


def provenance() -> dict[str, Any]:
    """Versions, machine, threads and the command, as JSON."""
    return {
        "command": command(sys.argv),
        "versions": {
            "tarnn": tarnn.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": total_memory(),
            "system": f"{platform.system()} {platform.machine()}",
            "accelerator": str(torch.accelerator.current_accelerator() or "none"),
        },
        "threads": torch.get_num_threads(),
    }


def command(argv: list[str]) -> str:
    """As anybody would type it: without where the results went, which is this machine's affair."""
    words = [x for x in argv[1:] if not x.startswith("--out=")]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return shlex.join(["python", f"benchmarks/{Path(argv[0]).name}", *words])


def cpu_name() -> str:
    """As Linux tells it; elsewhere what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def kernels() -> str:
    """Which kernels serve linear attention here, and why."""
    try:
        from tarnn.kernels.cpu import library
    except ImportError:
        return "plain PyTorch: this tarnn has no native kernels"
    status = library.status()
    return f"{status.path}: {status.why}"


def results_folder(whole: bool) -> Path:
    """Where results go: a whole run's beside the scripts, where they are committed; a partial one's never on top of them."""
    here = Path(__file__).parent
    return here / "results" if whole else here.parent / "runs" / "benchmarks"
