"""The processors that a container may use: cgroups limit their time, and torch, which counts cores, does not see it.

With more threads than that, all of them stand still for the rest of each period (usually 100 ms) once its time is used up.
"""

import math
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by which a user says how many
ROOT = Path("/")


def stay_within_quota(environment: MutableMapping[str, str] = os.environ, root: Path = ROOT) -> None:
    """Ask for as many threads as the quota has processors, rounded up, where torch would take more and the user has chosen
    nothing. OpenMP reads it once, when torch is loaded: call it before."""
    if "torch" in sys.modules or any(name in environment for name in CHOICES) or (quota := processors(root)) is None:
        return
    if (threads := max(1, math.ceil(quota))) < usual_threads(root):
        environment["OMP_NUM_THREADS"] = str(threads)


def usual_threads(root: Path = ROOT) -> int:
    """Threads that torch takes by default: one for each core, however many threads of hardware it has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores // 2 if read(root / "sys/devices/system/cpu/smt/active").strip() == "1" else cores


def processors(root: Path = ROOT) -> float | None:
    """The least quota of this process's group and of those around it, in processors; None: no limit (or no cgroups)."""
    quotas = []
    for line in read(root / "proc/self/cgroup").splitlines():
        _, kinds, group = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if kinds else "")
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if kinds else ("cpu.max",)
        inner = top / group.lstrip("/")
        for at in (inner, *inner.parents):
            numbers = " ".join(read(at / name) for name in names).split() if at.is_relative_to(top) else []
            if len(numbers) == 2 and all(number.isdigit() for number in numbers) and numbers[1] != "0":
                quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def read(file: Path) -> str:
    """The text of a file; nothing of one that isn't there."""
    try:
        return file.read_text()
    except OSError:
        return ""
