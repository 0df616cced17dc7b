"""Both scans: the diagonal one of RG-LRU, HGRN and minGRU, and Mamba's, which has n numbers per channel."""

from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tarnn.kernels.diagonal_scan import Call as DiagonalCall
from tarnn.kernels.selective_scan import Call as SelectiveCall
from tarnn.ops.checks import check_kind, check_masks, check_state, check_step, check_tensors, shapes
from tarnn.ops.operators import with_operator
from tarnn.ops.registration import Op
from tarnn.ops.states import ScanState
from tarnn.ops.validated import skip_repeated_checks

diagonal = Op("diagonal_scan", DiagonalCall, DiagonalCall.outputs, DiagonalCall.gradients, ("o", "h"))
with_operator(diagonal, "diagonal_scan")


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
    o, h = diagonal(_diagonal_call(x, log_decay, key_mask, cu_seqlens, state), with_state=return_state)[:2]
    return (o, ScanState(h)) if return_state else o


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
    check_step("diagonal_scan", x, 3, ScanState, state, inplace)
    o, h = diagonal.step(_diagonal_call(x, log_decay, None, None, state), inplace=inplace)[:2]
    return o, state if inplace and state is not None else ScanState(h)


@skip_repeated_checks
def _diagonal_call(x, log_decay, key_mask, cu_seqlens, state) -> DiagonalCall:
    inputs = {"x": x, "log_decay": log_decay}
    check_tensors(**inputs)
    fits = x.ndim == 3 and log_decay.shape == x.shape
    _check_inputs("x and log_decay (b, t, c)", fits, inputs, key_mask, cu_seqlens)
    return _continued(DiagonalCall(x, log_decay, None, key_mask, cu_seqlens), state)


selective = Op("selective_scan", SelectiveCall, SelectiveCall.outputs, SelectiveCall.gradients, ("o", "h"))
with_operator(selective, "selective_scan")


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
        dt: > 0, (b, t, c): after softplus, with its bias.
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
    o, h = selective(_selective_call(x, dt, A, B, C, D, key_mask, cu_seqlens, state), with_state=return_state)[:2]
    return (o, ScanState(h)) if return_state else o


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
    check_step("selective_scan", x, 3, ScanState, state, inplace)
    o, h = selective.step(_selective_call(x, dt, A, B, C, D, None, None, state), inplace=inplace)[:2]
    return o, state if inplace and state is not None else ScanState(h)


@skip_repeated_checks
def _selective_call(x, dt, A, B, C, D, key_mask, cu_seqlens, state) -> SelectiveCall:
    inputs = {
        name: tensor for name, tensor in zip(["x", "dt", "A", "B", "C", "D"], (x, dt, A, B, C, D)) if tensor is not None
    }
    check_tensors(**inputs)
    expected = "x and dt (b, t, c), A (c, n), B and C (b, t, n), D (c,)"
    _check_inputs(expected, _fits(x, dt, A, B, C, D), inputs, key_mask, cu_seqlens)
    return _continued(SelectiveCall(x, dt, A, B, C, D, None, key_mask, cu_seqlens), state)


def _fits(x, dt, A, B, C, D) -> bool:
    if x.ndim != 3 or A.ndim != 2 or dt.shape != x.shape or A.shape[0] != x.shape[2]:
        return False
    shared = (*x.shape[:2], A.shape[1])
    return B.shape == shared and C.shape == shared and (D is None or D.shape == x.shape[2:])


# --- arguments


def _check_inputs(
    expected: str, fits: bool, inputs: dict[str, Tensor], key_mask: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Raise unless the inputs, the first of which is x (b, t, c), are of the expected shapes, floating and on one device, and a
    mask and the bounds of packed sequences fit them."""
    x = inputs["x"]
    if not fits:
        raise ValueError(f"a scan takes {expected}; got {shapes(**inputs)}.")
    for name, tensor in inputs.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be of a floating type; got {tensor.dtype}. Cast it first.")
        if tensor.device != x.device:
            raise ValueError(f"all inputs must be on one device; got x on {x.device} and {name} on {tensor.device}.")
    b, t, _ = x.shape
    check_masks(key_mask, cu_seqlens, b, t, t, "t")


def _continued(call: Any, state: ScanState | None) -> Any:
    """Return the call that goes on from a state; errors for one that doesn't fit."""
    if state is None:
        return call
    check_kind(state, ScanState, "a scan")
    check_state("h", state.h, call.state_shape, call.dtype, call.x.device)
    return call._replace(h=state.h)
