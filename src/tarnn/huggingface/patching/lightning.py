"""MiniMax's lightning attention: a layer of linear attention with a constant decay per head, and its cache's length."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tarnn.feature_maps.elementwise import Identity
from tarnn.huggingface.patching.packed import bounds_of, end_to_end, model_with_packed_rows
from tarnn.huggingface.versions import cache_in
from tarnn.ops.linear.op import linear_attention, step
from tarnn.ops.states import LinearState

_IDENTITY = Identity()


def lightning_layer(original: Callable) -> Callable:
    """The forward of a layer, on a CPU: (b, t, c) → (b, t, c), and the state (b, h, d, d) in float32."""

    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if hidden_states.device.type != "cpu":
            return original(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs)
        cache = args[0] if args else cache_in(kwargs)
        b, t, _ = hidden_states.shape
        qkv = self.act_fn(self.qkv_proj(hidden_states))
        if attention_mask is not None:
            qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
        inputs = qkv.view(b, t, self.num_attention_heads, 3 * self.head_dim).split(self.head_dim, dim=3)
        S = None if cache is None else cache.get_linear_cache(self.layer_idx)
        o, S = _attend(inputs, -self.slope_rate.view(-1), S, cache is not None, bounds_of(kwargs))
        o = self.norm(o.reshape(b, t, -1))
        o = self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * o)
        if cache is not None:
            cache.set_linear_cache(self.layer_idx, S)
        return o, S

    return forward


def _attend(
    inputs: tuple[Tensor, ...], log_decay: Tensor, S: Tensor | None, cached: bool, bounds: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """q, k, v (b, t, h, d): o (b, t, h, d), and the state where there is a cache."""
    shape = inputs[0].shape
    if bounds is not None:
        inputs = tuple(end_to_end(x) for x in inputs)
    q, k, v = (x.transpose(1, 2) for x in inputs)
    options: dict[str, Any] = {"normalize": False, "log_decay": log_decay.float()}
    state = None if S is None else LinearState(S.float(), S.new_zeros(S.shape[:-1], dtype=torch.float32))
    if shape[1] == 1 and state is not None:
        o, after = step(q, k, v, _IDENTITY, state, **options)
    else:
        o, after = linear_attention(
            q, k, v, _IDENTITY, causal=True, cu_seqlens=bounds, state=state, return_state=True, **options
        )
    return o.transpose(1, 2).reshape(shape), after.S if cached else None


def lightning_model(original: Callable) -> Callable:
    """The forward of the text model: packed rows are found, and its cache counts its tokens.

    transformers asks a cache's first layer how many tokens there are. In MiniMax that is a linear layer, which says 0: a second
    call without positions would begin at the first again, and its mask would leave out what the softmax layers hold.
    """
    inner, names = model_with_packed_rows(original), tuple(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = cache_in(dict(zip(names, args, strict=False)) | kwargs)
        kind: Any = type(held)
        if kind.__name__ == "MiniMaxCache":
            held.__class__ = _counting(kind)
        return inner(self, *args, **kwargs)

    return forward


@functools.cache
def _counting(kind: Any) -> type:
    """MiniMax's cache, asked for the first layer that has keys in the place of the first."""

    def get_seq_length(self: Any, layer_idx: int = 0) -> int:
        return kind.get_seq_length(self, _with_keys(self, layer_idx))

    def get_mask_sizes(self: Any, query_length: Any, layer_idx: int) -> tuple[int, int]:
        return kind.get_mask_sizes(self, query_length, _with_keys(self, layer_idx))

    return type("CountingMiniMaxCache", (kind,), {"get_seq_length": get_seq_length, "get_mask_sizes": get_mask_sizes})


def _with_keys(held: Any, layer_idx: int) -> int:
    return next((i for i, layer in enumerate(held.layers) if i >= layer_idx and layer.is_initialized), layer_idx)
