"""xLSTM's matrix memory as linear attention: log-weights are its input gates, decays its forget gates.

The model's `eps` (1e-6), which transformers adds to a denominator that is never 0, is left out.
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tarnn.feature_maps.elementwise import Identity
from tarnn.huggingface.patching.packed import bounds_of, end_to_end, silent_model_with_packed_rows
from tarnn.ops.linear.op import linear_attention, step
from tarnn.ops.states import LinearState

_IDENTITY = Identity()
_REAL: ContextVar[Tensor | None] = ContextVar("real", default=None)  # (b, t): where there is no padding


def mlstm_model(original: Callable) -> Callable:
    """The forward of the text model: packed rows are found, and its layers learn where there is padding.

    transformers' xLSTM takes no mask, and computes padding as if it were text.
    """
    inner, names = silent_model_with_packed_rows(original), tuple(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        call = dict(zip(names, args, strict=False)) | kwargs
        x = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
        if attention_mask is None or torch.compiler.is_compiling() or x is None:
            return inner(self, *args, **kwargs)
        real = attention_mask[:, -x.shape[1] :].bool()
        if real.all():
            return inner(self, *args, **kwargs)
        if self.training and self.is_gradient_checkpointing:
            raise ValueError(
                f"{type(self).__name__} does not tell its layers of padding, and gradient checkpointing calls them again later. "
                "Turn gradient checkpointing off."
            )
        token = _REAL.set(real)
        try:
            return inner(self, *args, **kwargs)
        finally:
            _REAL.reset(token)

    return forward


def mlstm_backend(original: Callable) -> Callable:
    """The recurrence (b, h, t, d), (b, h, t, e) → (b, h, t, e), and the states C (b, h, d, e), n (b, h, d), m (b, h, 1)."""

    @functools.wraps(original)
    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        igate: Tensor,
        fgate: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool | None = None,
        mode: str | None = None,
    ) -> Any:
        states = (c_initial, n_initial, m_initial)
        if query.device.type != "cpu":
            return original(self, query, key, value, igate, fgate, *states, return_last_states, mode)
        bounds, real = (None, None) if torch.compiler.is_compiling() else (bounds_of({}), _REAL.get())
        inputs: tuple[Tensor, ...] = (
            query * query.shape[-1] ** -0.5,
            key,
            value,
            logsigmoid(fgate.float()),
            igate.float(),
        )
        if bounds is not None:
            inputs = tuple(end_to_end(x.transpose(1, 2)).transpose(1, 2) for x in inputs)
        q, k, v, log_decay, weight = inputs
        state = None
        if c_initial is not None and n_initial is not None and m_initial is not None:
            state = LinearState(c_initial.float(), n_initial.float(), m_initial.float()[..., 0])
        options: dict[str, Any] = {"normalize": "at_least_one", "log_decay": log_decay, "key_log_weight": weight}
        if q.shape[2] == 1 and state is not None and real is None:
            o, after = step(q, k, v, _IDENTITY, state, **options)
        else:
            o, after = linear_attention(
                q,
                k,
                v,
                _IDENTITY,
                causal=True,
                key_mask=real,
                cu_seqlens=bounds,
                state=state,
                return_state=True,
                **options,
            )
        if bounds is not None:
            o = o.transpose(1, 2).reshape(value.transpose(1, 2).shape).transpose(1, 2)
        mode = self.config.mode if mode is None else mode
        wanted = self.config.return_last_states if return_last_states is None else return_last_states
        if "train" in mode and not wanted:
            return o
        assert after.M is not None
        return o, (after.S, after.z, after.M[..., None])

    return forward
