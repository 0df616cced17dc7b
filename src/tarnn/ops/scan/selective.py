"""The selective scan of Mamba: n numbers per channel, whose decay and input depend on the token."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tarnn.kernels.selective_scan import Call, Gradients, Outputs
from tarnn.ops.checks import check_tensors
from tarnn.ops.operators import with_operator
from tarnn.ops.registration import Op
from tarnn.ops.scan.arguments import check_inputs, check_one_token, checked_state
from tarnn.ops.scan.state import ScanState
from tarnn.other_names import SCAN, names_ours

_scan = Op("selective_scan", Call, Outputs, Gradients, ("o", "h"))
with_operator(_scan, "selective_scan")


@names_ours(SCAN)
def selective_scan(
    x: Float[Tensor, "b t c"],
    dt: Float[Tensor, "b t c"],
    A: Float[Tensor, "c n"],
    B: Float[Tensor, "b t n"],
    C: Float[Tensor, "b t n"],
    D: Float[Tensor, " c"] | None = None,
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
    state: ScanState | None = None,
    return_state: bool = False,
) -> Float[Tensor, "b t c"] | tuple[Float[Tensor, "b t c"], ScanState]:
    """Mamba's recurrence: every channel has n numbers h, and all channels share B and C.

        h_i = e^(dt_i A) ⊙ h_(i − 1) + dt_i x_i B_iᵀ          (c, n)
        o_i = h_i C_i + D ⊙ x_i                               (c,)

    Args:
        x: (b, t, c), any strides, as all others; float32, bfloat16, float16 or float64.
        dt: > 0, (b, t, c): behind softplus, with its bias.
        A: < 0, (c, n): in checkpoints −exp(A_log).
        B, C: (b, t, n).
        D: (c,), or None for no such term. The types may differ; the result has that of x. Signs of dt and A are not checked,
            since that would read the data.
        key_mask: bool (b, t), True = there. A masked token is absent: h passes it as it is, and its output is zero. So
            padding may stand on either side, and anything in it.
        cu_seqlens: int (r + 1,): the row (b = 1) holds r sequences end to end, each of which begins with its own state.
        state: continues a sequence, by any number of tokens: scan(x ++ y) = scan(x), then scan(y, state), also in gradients.
        return_state: return (o, state).

    Returns o (b, t, c) in the type of x, and the last h as a `ScanState`. A gate is the caller's: o · silu(z). Autocast changes
    nothing: h is float32, float64 for float64 inputs. Kept for backward: the inputs, and on a CPU one state in 64 tokens; never a
    state per token. Twice differentiable.

    Raises ValueError or TypeError where shapes, types or options don't fit.

    Gu and Dao 2023, algorithm 2 (arXiv 2312.00752).

    >>> x, BC = torch.ones(1, 5, 3), torch.ones(1, 5, 2)
    >>> selective_scan(x, x, -torch.ones(3, 2), BC, BC).shape
    torch.Size([1, 5, 3])
    """
    o, h = _scan(_call(x, dt, A, B, C, D, key_mask, cu_seqlens, state), with_state=return_state)[:2]
    return (o, ScanState(h)) if return_state else o


@names_ours(SCAN)
def selective_scan_step(
    x: Float[Tensor, "b 1 c"],
    dt: Float[Tensor, "b 1 c"],
    A: Float[Tensor, "c n"],
    B: Float[Tensor, "b 1 n"],
    C: Float[Tensor, "b 1 n"],
    D: Float[Tensor, " c"] | None = None,
    *,
    state: ScanState | None = None,
    inplace: bool = False,
) -> tuple[Float[Tensor, "b 1 c"], ScanState]:
    """One token more of `selective_scan`: o (b, 1, c) and the new state.

    `state=None` starts a sequence. The given state stays as it was unless `inplace=True`, which writes into its tensor (for loops
    without gradients) and returns it.
    """
    check_one_token(x, state, inplace, "selective_scan")
    o, h = _scan.step(_call(x, dt, A, B, C, D, None, None, state), inplace=inplace)[:2]
    return o, state if inplace and state is not None else ScanState(h)


def _call(x, dt, A, B, C, D, key_mask, cu_seqlens, state) -> Call:
    inputs = {
        name: tensor for name, tensor in zip(["x", "dt", "A", "B", "C", "D"], (x, dt, A, B, C, D)) if tensor is not None
    }
    check_tensors(**inputs)
    expected = "x and dt (b, t, c), A (c, n), B and C (b, t, n), D (c,)"
    check_inputs(expected, _fits(x, dt, A, B, C, D), inputs, key_mask, cu_seqlens)
    call = Call(x, dt, A, B, C, D, None, key_mask, cu_seqlens)
    return call._replace(h=checked_state(state, call.state_shape, x))


def _fits(x, dt, A, B, C, D) -> bool:
    if x.ndim != 3 or A.ndim != 2 or dt.shape != x.shape or A.shape[0] != x.shape[2]:
        return False
    shared = (*x.shape[:2], A.shape[1])
    return B.shape == shared and C.shape == shared and (D is None or D.shape == x.shape[2:])
