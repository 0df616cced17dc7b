"""The delta rule: one function for every device, decay, mask and state."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tarnn.kernels.delta import Call, Gradients, Outputs
from tarnn.ops.delta.arguments import make_call
from tarnn.ops.delta.state import DeltaState
from tarnn.ops.operators import with_operator
from tarnn.ops.registration import Op
from tarnn.other_names import DELTA, names_ours

compute = Op("delta", Call, Outputs, Gradients, ("o", "S"))
with_operator(compute, "delta_rule")


@names_ours(DELTA)
def delta_rule(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g t d"],
    v: Float[Tensor, "b m t e"],
    beta: Float[Tensor, "b n t"],
    *,
    log_decay: Float[Tensor, "..."] | None = None,
    normalize_qk: bool | float = False,
    scale: float | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " rows_plus_1"] | None = None,
    state: DeltaState | None = None,
    return_state: bool = False,
) -> Float[Tensor, "b heads t e"] | tuple[Float[Tensor, "b heads t e"], DeltaState]:
    """A memory that each token corrects: the state first fades, then moves what it answers to k towards v, by β,

        S ← e^log_decay S          S ← S + β k (v − Sᵀk)ᵀ          o = scale·Sᵀq

    which is S ← (I − β k kᵀ) e^log_decay S + β k vᵀ. Time and memory are linear in t. It is DeltaNet without a decay, gated
    DeltaNet (Qwen3-Next, Qwen3.5, OLMo-hybrid) with one per token, Kimi's delta attention with one per channel.

    Args:
        q, k, v: (b, h, t, d), (b, g, t, d), (b, m, t, e), one floating dtype, any strides. There is one state for each of
            n = max(g, m) heads. Either m is a multiple of g = h (grouped values: state j has the query and key of head
            j // (m/g)), or h is a multiple of g = m (query head i reads state i // (h/g)). Nothing is repeated in memory.
        beta: (b, n, t), from 0 (the token is not written) over 1 (what was there is replaced) to 2 (it is reflected).
        log_decay: ≤ 0, of the state before the token is written: (n,) per head, (b, n, t) per token, (b, n, t, d) per
            channel of the keys. −∞ forgets all. None: nothing fades.
        normalize_qk: divide q and k by √(Σx² + 1e-6), over their channels; a number takes the place of 1e-6. The rule is
            stable where β·|k|² ≤ 2: keys that are not normalised must see to that themselves.
        scale: 1/√d by default.
        key_mask: bool (b, t), True = there. At a masked token S stays as it is: nothing is written, and no decay happens, on
            either side of a row. (transformers' own functions let padding on the right fade the state.)
        cu_seqlens: int (rows + 1,): the row (b = 1) holds sequences end to end, which don't see each other.
        state: continues a sequence: delta_rule(x ++ y) = delta_rule(x), then delta_rule(y, state), also in gradients.
        return_state: return (o, state).

    Returns o (b, max(h, m), t, e) in the dtype of q, and with `return_state` the `DeltaState` behind the last token.

    Precision: sums and states are float32, float64 for float64 inputs, whatever the dtype; β and log_decay are computed with
    in that precision too, so pass them as float32. Under autocast, q, k, v are cast first, β and log_decay are not. With β = 2
    and a key that repeats, rounding errors are kept and add up; below 2 they fade.

    Not finite: a NaN in a query shows in its own output, one in a key, a value, β or a decay in all outputs of its head from
    its token on. Outputs before it stay as they are, to the bit. At masked tokens anything may stand.

    Cut at multiples of 64, a prompt gives the same bits as its pieces, each continued from the state behind the one before.

    Kept for backward: q, k, v, β, log_decay, and one state in 256 tokens. Twice differentiable.

    Raises ValueError or TypeError where shapes, dtypes or options don't fit; on a CPU also for β outside 0…2 and for a
    log_decay above 0, unless the call is traced.

    Schlag et al. 2021, eq. 23–25 (arXiv 2102.11174); Yang et al. 2024 (arXiv 2406.06484, 2412.06464); Kimi Team 2025
    (arXiv 2510.26692).

    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> beta, log_decay = torch.rand(1, 2, 5), -torch.rand(1, 2, 5)
    >>> delta_rule(q, k, v, beta, log_decay=log_decay, normalize_qk=True).shape
    torch.Size([1, 2, 5, 4])
    """
    call = make_call(q, k, v, beta, log_decay, normalize_qk, scale, key_mask, cu_seqlens, state)
    outputs = compute(call, with_state=return_state)
    return (outputs.o, DeltaState(outputs.S)) if return_state else outputs.o
