"""How OpenMP's idle threads wait for work: they spin for a moment, then sleep.

torch's threads wait between parallel operations. By default they spin: about a millisecond with GCC's OpenMP (libgomp, in
torch's packages for Linux), 200 with LLVM's and Intel's. Where another program wants the core, a spinning thread takes it
from the very thread that it waits for, and two threads are many times slower than one. A short spin costs next to nothing
on a quiet machine (docs/decisions/2026-11-22-a-short-spin.md).
"""

import os
import sys
from collections.abc import Mapping, MutableMapping

SHORT = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}  # libgomp: turns of its loop; LLVM's and Intel's: milliseconds
CHOICES = ("OMP_WAIT_POLICY", *SHORT)  # by which a user says how threads wait


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Ask for a short spin, unless the user has chosen something. OpenMP reads it once, when torch is loaded: call it before."""
    if "torch" not in sys.modules and not any(name in environment for name in CHOICES):
        environment.update(SHORT)


def described(environment: Mapping[str, str] = os.environ) -> str:
    """Return the settings, as "GOMP_SPINCOUNT=1000, KMP_BLOCKTIME=1"; "OpenMP's default" if there are none."""
    return ", ".join(f"{name}={environment[name]}" for name in CHOICES if name in environment) or "OpenMP's default"
