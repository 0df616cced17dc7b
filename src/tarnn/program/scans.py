"""Scans as instructions: states of channels that fade each by itself, as Mamba's and Griffin's."""

from jaxtyping import Float
from torch import Tensor

from tarnn.program.recording import LayerState, ProgramError, Register


def selective_scan(
    u: Register, dt: Register, B: Register, C: Register, A: Float[Tensor, "c n"], state: LayerState, *, name: str = "h"
) -> Register:
    """Scan as Mamba does: h[n, c] ← e^(dt_c A[c, n]) h[n, c] + dt_c u_c B_n, o_c = Σ_n C_n h[n, c], for each channel c.

    u, dt (heads, width): all channels c, in heads. B, C (heads, n): the channels of a head share them. A ≤ 0.
    """
    n = B.width
    fits = (u.heads, u.width) == (dt.heads, dt.width) and (B.heads, C.heads, C.width) == (u.heads, u.heads, n)
    if not fits or A.shape != (u.size, n):
        raise ProgramError(
            f"a selective scan of {u.heads} × {u.width} channels has steps {dt.heads} × {dt.width}, B {B.heads} × {n}, "
            f"C {C.heads} × {C.width} and rates {tuple(A.shape)}."
        )
    states = [state.add(name, n, u.size)]
    return u.record.add("selective_scan", (u, dt, B, C), [(u.heads, u.width)], {"A": A}, states=states)[0]


def diagonal_scan(
    x: Register, log_decay: Register, state: LayerState, *, normalize: bool = False, name: str = "h"
) -> Register:
    """Scan each channel: h ← e^a h + x, o = h; log_decay a ≤ 0.

    normalize: h ← e^a h + √(1 − e^2a) x, but for a sequence's first token, which enters as it is (RG-LRU).
    """
    if (x.heads, x.width) != (log_decay.heads, log_decay.width):
        raise ProgramError(
            f"a scan of {x.heads} × {x.width} channels has decays {log_decay.heads} × {log_decay.width}."
        )
    numbers, states = {"normalize": normalize}, [state.add(name, x.size)]
    return x.record.add("diagonal_scan", (x, log_decay), [(x.heads, x.width)], numbers=numbers, states=states)[0]
