"""What a figure was measured with: it is written beside every result."""

import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import tarnn


def provenance() -> dict[str, Any]:
    """Versions, machine, threads and the command, as JSON."""
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
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


def cpu_name() -> str:
    """As Linux tells it; elsewhere what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
