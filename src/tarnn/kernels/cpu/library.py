"""Load the library of compiled kernels, and say whether it can be used, and if not, why.

`libtarnn_cpu.so` lies beside this file where the package's build could compile `csrc/`. It is loaded when it is
first asked for, which registers `torch.ops.tarnn_cpu`. Seven variables of the environment are read, once:

TARNN_KERNELS   off: plain PyTorch computes.  required: an error where the compiled kernels can't be used.
TARNN_ISA       avx2, avx512 or avx512bf16 (x86-64) or baseline (elsewhere), rather than the richest of the processor.
TARNN_DOTS      only these of the processor's instructions for products with packed weights, with commas: vnni, avx_vnni,
                bfloat16, amx, sdot, usdot; none: no such instruction. For equal bits on different processors.
TARNN_LARGE_PAGES  off: results of 8 MB and more are not asked to lie in large pages (Linux; the request outlives them), and
                caches (tarnn.large_pages) neither.
TARNN_BYTES_A_THREAD  so many bytes of a layer are worth a thread of the runtime (262144; tests: 0).
TARNN_BLOCK_ROWS  rows of a prompt that the runtime reads at once (64 to 256, by the second level of cache; tests: 64).
TARNN_BINARY    another library to load: the sanitizers' (`tests/sanitize.sh`), or one with float64 (`tests/float64.sh`).
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from tarnn.kernels.contract import FixableRefusal

BINARY = Path(__file__).with_name("libtarnn_cpu.so")
PLAIN = "PyTorch"
ISAS = ("baseline", "avx2", "avx512", "avx512bf16")
DOTS = ("none", "vnni", "avx_vnni", "bfloat16", "amx", "sdot", "usdot")  # csrc/products/dots.h
NO_ISA = (
    "this processor lacks AVX2 or FMA, which the compiled kernels need on x86-64; where a virtual machine hides them, give it "
    "its host's type of processor"
)
REMEDY = (
    "install a C++ compiler (GCC 11 or newer, or Clang), then run `pip install --force-reinstall --no-deps .` in the clone "
    "of tarnn"
)


class Status(NamedTuple):
    path: str  # "compiled, avx512" and the like, or PLAIN
    why: str


_lock = threading.Lock()
_status: Status | None = None  # None until it is first asked for
_disabled = 0  # how many `disabled()` are open


def refusal() -> str | None:
    """Return why the compiled kernels can't compute the next call on a CPU, or None. Loads them, the first time."""
    path, why = _status if _status is not None and not _disabled else status()
    if path != PLAIN:
        return None
    sentence = f"Attention on the CPU runs in plain PyTorch, several times slower: {why}."
    return sentence if _disabled or os.environ.get("TARNN_KERNELS") == "off" else FixableRefusal(sentence)


def available() -> bool:
    """Return whether the compiled kernels can compute the next call on a CPU."""
    return refusal() is None


def status() -> Status:
    """Return the path that calls on a CPU take, and why. Loads the kernels, the first time; see `load` for errors."""
    global _status
    with _lock:
        if _status is None:
            _status = load()
    return Status(PLAIN, "switched off by tarnn.kernels.cpu.library.disabled()") if _disabled else _status


def multiplies_in_bfloat16() -> bool:
    """Return whether products of causal calls in bfloat16 have bfloat16 factors (and float32 sums)."""
    return status().path == "compiled, avx512bf16"


def computes_float64() -> bool:
    """Return whether the library has kernels for float64: not the installed one, but that of `tests/float64.sh`."""
    return available() and bool(getattr(torch.ops.tarnn_cpu, "float64", lambda: False)())


@contextmanager
def disabled() -> Iterator[None]:
    """Let plain PyTorch compute within, in every thread: for tests and benchmarks."""
    global _disabled
    _disabled += 1
    try:
        yield
    finally:
        _disabled -= 1


def load() -> Status:
    """Load the kernels as the environment says. ValueError for a setting that isn't known or can't be had."""
    asked, isa = setting("TARNN_KERNELS", ("off", "required")), setting("TARNN_ISA", ISAS)
    setting("TARNN_LARGE_PAGES", ("off", "on"))  # the library reads it, and the next one
    known_dots()
    if asked == "off":
        return Status(PLAIN, "switched off by TARNN_KERNELS=off")
    other = os.environ.get("TARNN_BINARY")
    if other and not Path(other).is_file():
        raise ValueError(f"TARNN_BINARY names the library of compiled kernels; there is no file {other!r}.")
    binary = Path(other) if other else BINARY
    if not binary.exists():
        why = f"no compiled kernels in this installation: {REMEDY}"
    else:
        try:
            torch.ops.load_library(binary)
        except OSError as error:
            why = f"the compiled kernels could not be loaded ({error}): {REMEDY}"
        else:
            found = use(isa)
            if found.path != PLAIN:
                return found
            why = found.why
    if asked == "required":
        raise ValueError(f"TARNN_KERNELS=required, but {why}.")
    return Status(PLAIN, why)


def setting(name: str, known: tuple[str, ...]) -> str:
    """Return the variable's value, "" where it isn't set; ValueError for one that isn't known."""
    value = os.environ.get(name, "")
    if value and value not in known:
        raise ValueError(f"{name} is {', '.join(known[:-1])} or {known[-1]}, or not set; got {value!r}.")
    return value


def known_dots() -> None:
    """Raise ValueError where TARNN_DOTS names what isn't known."""
    names = os.environ.get("TARNN_DOTS", "").split(",")
    if unknown := [x for x in names if x and x not in DOTS]:
        raise ValueError(f"TARNN_DOTS is some of {', '.join(DOTS)}, with commas, or not set; got {unknown[0]!r}.")


def use(asked: str) -> Status:
    """Return the status of the loaded library; ValueError where this processor or build can't do what is asked."""
    try:
        isa = torch.ops.tarnn_cpu.isa()
    except RuntimeError:
        if not asked:
            return Status(PLAIN, NO_ISA)
        raise ValueError(
            f"TARNN_ISA={asked}: this processor or this build of the kernels doesn't have it. Leave it unset."
        ) from None
    if asked:
        return Status(f"compiled, {isa}", f"TARNN_ISA={asked} asks for it")
    why = {
        "avx512bf16": "the processor has AVX-512 and its bfloat16 products",
        "avx512": "the processor has AVX-512",
        "avx2": "the processor has AVX2, and not all of AVX-512",
        "baseline": "the only one for this kind of processor",
    }
    return Status(f"compiled, {isa}", why[isa])
