"""Mamba's selective scan: whole sequences, one token, and a sequence that goes on, which transformers starts from nothing."""

import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from tarnn.huggingface.patching.first_state import first_state
from tarnn.huggingface.patching.in_place import may_write
from tarnn.huggingface.patching.packed import bounds_of, end_to_end
from tarnn.huggingface.patching.undo import recording, remembered
from tarnn.huggingface.versions import cache_in
from tarnn.ops.scan.op import selective_scan, selective_scan_step
from tarnn.ops.states import ScanState

_PAST: ContextVar[Iterator[Tensor] | None] = ContextVar("past", default=None)  # the states of a layer's scans, in order


def scan_layer(original: Callable) -> Callable:
    """The forward of a layer whose scan goes on from the cache's state. transformers gives it the state for one token alone."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        past, cache = None, args[0] if args else cache_in(kwargs)
        if cache is not None and hidden_states.shape[1] > 1 and hidden_states.device.type == "cpu":
            past = cache.get_recurrent_state(self.layer_idx, state_idx=0)
        if past is None:
            return original(self, hidden_states, *args, **kwargs)
        if torch.compiler.is_compiling():
            raise ValueError("several tokens that continue a cache are not compiled: compile one token, and prompts.")
        states = iter([past] if past.ndim == 3 else past.unbind(1))  # (b, c, n) for each head
        token = _PAST.set(states)
        try:
            return original(self, hidden_states, *args, **kwargs)
        finally:
            _PAST.reset(token)

    return forward


def scan_sequences(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """hidden_states, dt, z (b, c, t), A (c, n), B, C (b, n, t), D, delta_bias (c,): y (b, c, t), and the state (b, c, n)."""
    bounds, states = bounds_of(kwargs), None if torch.compiler.is_compiling() else _PAST.get()
    dt = _time_steps(dt.transpose(1, 2), delta_bias, delta_softplus)
    inputs: tuple[Tensor, ...] = (hidden_states.transpose(1, 2), dt, B.transpose(1, 2), C.transpose(1, 2))
    if bounds is not None:
        inputs = tuple(end_to_end(x) for x in inputs)
    h = first_state(len(dt), bounds, *A.shape) if states is None else next(states).float()
    state = None if h is None else ScanState(h)
    y, after = _scan(inputs, A, D, state, bounds)
    y = _gated(y.transpose(1, 2).reshape(hidden_states.shape) if bounds is not None else y.transpose(1, 2), z)
    return (y, after.h) if return_last_state else y


def scan_token(
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
    """state (b, c, n), which moves on, hidden_states, dt, z (b, c), B, C (b, n), D, dt_bias (c,): y (b, c)."""
    dt = _time_steps(dt, dt_bias, dt_softplus)
    x, dt, B, C = (y[:, None] for y in (hidden_states, dt, B, C))
    h = state.float()
    inplace = h is state and may_write(h) and recording() is None
    if recording() is None:
        y, after = selective_scan_step(x, dt, A, B, C, D, state=ScanState(h), inplace=inplace)
    else:
        y, after = _scan((x, dt, B, C), A, D, ScanState(h))
    if not inplace:
        state.copy_(after.h)
    return _gated(y[:, 0], z).to(hidden_states.dtype)


def _scan(
    inputs: tuple[Tensor, ...], A: Tensor, D: Tensor | None, state: ScanState | None, bounds: Tensor | None = None
) -> Any:
    """x, dt (b, t, c), B, C (b, t, n): y (b, t, c), and the state after."""

    def run(inputs: tuple[Tensor, ...], state: ScanState | None) -> Any:
        x, dt, B, C = inputs
        return selective_scan(x, dt, A, B, C, D, cu_seqlens=bounds, state=state, return_state=True)

    return remembered(run, inputs, state, lambda state: state.h, time=1)


def _time_steps(dt: Tensor, bias: Tensor | None, with_softplus: bool) -> Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return softplus(dt) if with_softplus else dt


def _gated(y: Tensor, z: Tensor | None) -> Tensor:
    return y if z is None else y * silu(z)
