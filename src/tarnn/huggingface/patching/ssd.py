"""Mamba-2's recurrence as linear attention: queries C, keys B, values dt·x, decays dt·A, without a normaliser."""

from typing import Any

from torch import Tensor
from torch.nn.functional import silu, softplus

from tarnn.feature_maps.elementwise import Identity
from tarnn.huggingface.patching.first_state import first_state
from tarnn.huggingface.patching.in_place import may_write
from tarnn.huggingface.patching.packed import bounds_of, end_to_end
from tarnn.huggingface.patching.undo import recording, remembered
from tarnn.ops.linear.op import linear_attention, step
from tarnn.ops.states import LinearState

_IDENTITY = Identity()


def ssd_sequences(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """hidden_states (b, t, h, p), dt (b, t, h), A, D, dt_bias (h,), B, C (b, t, groups, n): y (b, t, h, p), states (b, h, p, n).

    The states are (b, h, n, p) in memory, as steps read them.
    """
    bounds = bounds_of(kwargs)
    dt = _time_steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)
    x = hidden_states.float()
    inputs: tuple[Tensor, ...] = (C.float(), B.float(), x * dt[..., None], dt * A.float())
    if bounds is not None:
        inputs = tuple(end_to_end(y) for y in inputs)
    if initial_states is None:
        S = first_state(len(x), bounds, x.shape[2], B.shape[3], x.shape[3])
        initial_states = None if S is None else S.mT
    state = None if initial_states is None else _state(initial_states)
    o, after = _attend(tuple(y.transpose(1, 2) for y in inputs), state, bounds)
    y = _with_skip(o.transpose(1, 2).reshape(x.shape), x, D, z).contiguous()  # layers view it
    return (y, _tensor(after)) if return_final_states else y


def ssd_token(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """state (b, h, p, n), which moves on, hidden_states (b, h, p), dt (b, h, p) and A (h, p, n) equal along p and n, B, C (b,
    groups, n), D (h, p): y (b, h, p)."""
    dt, A = dt[..., 0], A[:, 0, 0]
    dt = _time_steps(dt, None if dt_bias is None else dt_bias[..., 0], dt_softplus)
    x = hidden_states.float()
    q, k, v = C.float()[:, :, None], B.float()[:, :, None], (x * dt[..., None])[:, :, None]
    before, log_decay = _state(state), (dt * A.float())[:, :, None]
    inplace = before.S.data_ptr() == state.data_ptr() and may_write(before.S) and recording() is None
    if recording() is None:
        o, after = step(q, k, v, _IDENTITY, before, normalize=False, log_decay=log_decay, inplace=inplace)
    else:
        o, after = _attend((q, k, v, log_decay), before)
    if not inplace:
        state.copy_(_tensor(after))
    return _with_skip(o[:, :, 0], x, None if D is None else D[..., 0], z).to(hidden_states.dtype)


def not_fused(*args: Any, **kwargs: Any) -> None:
    """The answer of a layer's kernel for all of its forward where there is none: the layer goes on, function by function."""


def _time_steps(dt: Tensor, bias: Tensor | None, with_softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return (softplus(dt) if with_softplus else dt).float()


def _state(states: Tensor) -> LinearState:
    S = states.float().transpose(-1, -2)
    return LinearState(S, S.new_zeros(S.shape[:-1]))


def _tensor(state: LinearState) -> Tensor:
    return state.S.transpose(-1, -2)


def _attend(inputs: tuple[Tensor, ...], state: LinearState | None, bounds: Tensor | None = None) -> Any:
    """q, k (b, groups, t, n), v (b, h, t, p), log_decay (b, h, t): o (b, h, t, p), and the state after."""

    def run(inputs: tuple[Tensor, ...], state: LinearState | None) -> Any:
        q, k, v, log_decay = inputs
        options: dict[str, Any] = {"causal": True, "normalize": False, "cu_seqlens": bounds, "return_state": True}
        return linear_attention(q, k, v, _IDENTITY, log_decay=log_decay, state=state, **options)

    return remembered(run, inputs, state, _tensor)


def _with_skip(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    y = y if D is None else y + D[:, None] * x
    return y if z is None else y * silu(z)
