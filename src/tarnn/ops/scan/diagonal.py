"""The diagonal scan, h ← e^log_decay ⊙ h + x: the recurrence of RG-LRU, HGRN and minGRU."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tarnn.kernels.diagonal_scan import Call, Gradients, Outputs
from tarnn.ops.checks import check_tensors
from tarnn.ops.operators import with_operator
from tarnn.ops.registration import Op
from tarnn.ops.scan.arguments import check_inputs, check_one_token, checked_state
from tarnn.ops.scan.state import ScanState
from tarnn.other_names import SCAN, names_ours

_scan = Op("diagonal_scan", Call, Outputs, Gradients, ("o", "h"))
with_operator(_scan, "diagonal_scan")


@names_ours(SCAN)
def diagonal_scan(
    x: Float[Tensor, "b t c"],
    log_decay: Float[Tensor, "b t c"],
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
    state: ScanState | None = None,
    return_state: bool = False,
) -> Float[Tensor, "b t c"] | tuple[Float[Tensor, "b t c"], ScanState]:
    """A linear recurrence in each channel, on its own:

        h_i = e^log_decay_i ⊙ h_(i − 1) + x_i

    Griffin's RG-LRU is log_decay = −8 r softplus(Λ) and x = √(1 − e^(2 log_decay)) ⊙ (i ⊙ input), with gates r and i.

    Args:
        x: (b, t, c), any strides, float32, bfloat16, float16 or float64.
        log_decay: ≤ 0, (b, t, c), of any floating type: of h before token i is added. −∞ forgets all, 0 nothing. That it is ≤ 0
            is not checked, since that would read the data.
        key_mask: bool (b, t), True = there. A masked token is absent: h passes it as it is, and its output is zero. So
            padding may stand on either side, and anything in it.
        cu_seqlens: int (n + 1,): the row (b = 1) holds n sequences end to end, each of which begins with its own state.
        state: continues a sequence: scan(x ++ y) = scan(x), then scan(y, state), also in gradients.
        return_state: return (o, state).

    Returns all h_i, (b, t, c) in the type of x, and the last as a `ScanState`. Autocast changes nothing: h is float32, float64
    for float64 inputs. Kept for backward: x, log_decay, and on a CPU one state in 64 tokens. Twice differentiable.

    Raises ValueError or TypeError where shapes, types or options don't fit.

    De et al. 2024, eq. 4 (arXiv 2402.19427).

    >>> diagonal_scan(torch.ones(1, 3, 1), torch.full((1, 3, 1), 0.5).log()).flatten().tolist()
    [1.0, 1.5, 1.75]
    """
    o, h = _scan(_call(x, log_decay, key_mask, cu_seqlens, state), with_state=return_state)[:2]
    return (o, ScanState(h)) if return_state else o


@names_ours(SCAN)
def diagonal_scan_step(
    x: Float[Tensor, "b 1 c"],
    log_decay: Float[Tensor, "b 1 c"],
    *,
    state: ScanState | None = None,
    inplace: bool = False,
) -> tuple[Float[Tensor, "b 1 c"], ScanState]:
    """One token more of `diagonal_scan`: o (b, 1, c) and the new state.

    `state=None` starts a sequence. The given state stays as it was unless `inplace=True`, which writes into its tensor (for loops
    without gradients) and returns it.
    """
    check_one_token(x, state, inplace, "diagonal_scan")
    o, h = _scan.step(_call(x, log_decay, None, None, state), inplace=inplace)[:2]
    return o, state if inplace and state is not None else ScanState(h)


def _call(x, log_decay, key_mask, cu_seqlens, state) -> Call:
    inputs = {"x": x, "log_decay": log_decay}
    check_tensors(**inputs)
    fits = x.ndim == 3 and log_decay.shape == x.shape
    check_inputs("x and log_decay (b, t, c)", fits, inputs, key_mask, cu_seqlens)
    call = Call(x, log_decay, None, key_mask, cu_seqlens)
    return call._replace(h=checked_state(state, call.state_shape, x))
