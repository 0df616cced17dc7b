"""Threads of OpenMP: as many as a container's quota has processors, and a short spin while they wait for work.

cgroups limit the time of processors, and torch, which counts cores, does not detect it. With more threads than that, all
of them stand still for the rest of each period (usually 100 ms) once its time is used up.

torch's threads wait between parallel operations. By default they spin: about a millisecond with GCC's OpenMP (libgomp, in
torch's packages for Linux), 200 with LLVM's and Intel's. If another program wants the core, a spinning thread takes it
from the very thread that it waits for, and two threads are many times slower than one. A short spin costs next to nothing
on a quiet machine (docs/decisions/2026-11-22-a-short-spin.md).
"""

import math
import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

THREAD_CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by which a user says how many
ROOT = Path("/")


def stay_within_quota(environment: MutableMapping[str, str] = os.environ, root: Path = ROOT) -> None:
    """Ask for as many threads as the quota has processors, rounded up, where torch would take more and the user has chosen
    nothing. OpenMP reads it once, when torch is loaded: call it before."""
    if (
        "torch" in sys.modules
        or any(name in environment for name in THREAD_CHOICES)
        or (quota := processors(root)) is None
    ):
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


SHORT = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}  # libgomp: turns of its loop; LLVM's and Intel's: milliseconds
WAIT_CHOICES = ("OMP_WAIT_POLICY", *SHORT)  # by which a user says how threads wait


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Ask for a short spin, unless the user has chosen something. OpenMP reads it once, when torch is loaded: call it before."""
    if "torch" not in sys.modules and not any(name in environment for name in WAIT_CHOICES):
        environment.update(SHORT)


def described(environment: Mapping[str, str] = os.environ) -> str:
    """Return the settings, as "GOMP_SPINCOUNT=1000, KMP_BLOCKTIME=1"; "OpenMP's default" if there are none."""
    return (
        ", ".join(f"{name}={environment[name]}" for name in WAIT_CHOICES if name in environment) or "OpenMP's default"
    )
