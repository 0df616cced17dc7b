"""Memory that there is, asked before it is taken: a system that runs out of it ends the process without a word."""

import ctypes
from contextlib import suppress
from pathlib import Path

from tarnn.decoding.opened import Opened
from tarnn.errors import UserError
from tarnn.models.state import ModelState

PROC, GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}  # of a packed weight, without scales


def available_bytes(proc: Path = PROC, group: Path = GROUP) -> int | None:
    """Return the bytes that this process can still take, by the system and by its group's limit; None: not known."""
    found = []
    for line in _text(proc).splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    limit, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        files = [int(x.split()[1]) for x in _text(group / "memory.stat").splitlines() if x.startswith("file ")]
        found.append(max(0, int(limit) - int(used) + sum(files)))  # pages of files are given back
    return min(found, default=None)


def give_back_freed() -> None:
    """Return memory that was freed to the system, where glibc keeps it for later."""
    with suppress(OSError, AttributeError):  # another system, or another library
        ctypes.CDLL(None).malloc_trim(0)


def check_memory(num_bytes: float, what: str, remedy: str) -> None:
    """Raise UserError where so many bytes are more than there are."""
    free = available_bytes()
    if free is not None and num_bytes > free:
        raise UserError(f"{what} take {num_bytes / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are left. {remedy}")


def check_state(model: Opened, rows: int, num_tokens: int) -> None:
    """Raise UserError where states of so many rows and tokens have no room."""
    empty, one = (model.new_state(1, capacity) for capacity in (0, 1))
    if not isinstance(empty, ModelState):  # a cache that grows as it goes
        return
    size = rows * (empty.nbytes + num_tokens * (one.nbytes - empty.nbytes))
    of = f"{num_tokens:,} tokens" if rows == 1 else f"{rows:,} texts of {num_tokens:,} tokens"
    check_memory(size, f"the states of {of}", "Ask for less at once, or take a model whose state does not grow.")


def check_packing(num_parameters: int, weights: str) -> None:
    """Raise UserError where the packed weights of a model have no room."""
    smaller = [x for x in BYTES if BYTES[x] < BYTES[weights]]
    remedy = f"Keep them as {smaller[0]} (--weights {smaller[0]})." if smaller else "Take a smaller model."
    check_memory(num_parameters * BYTES[weights], f"{num_parameters:,} weights as {weights}", remedy)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
