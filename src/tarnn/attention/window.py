"""Softmax attention to a window and to first tokens, as a module."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tarnn.attention.multihead import MultiHeadAttention
from tarnn.attention.registry import register
from tarnn.attention.rotary import Rotary, Rotation
from tarnn.ops import HybridState, hybrid_attention, hybrid_step


@register("window")
class WindowAttention(MultiHeadAttention):
    """Multi-head softmax attention to keys at a distance of less than `window`; time linear in t, a state of constant size.

    sinks: number of first tokens that all see. `rotary` rotates q and k. Others as `MultiHeadAttention`.

    Raises ValueError for sizes that don't fit, and as cross attention.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool,
        window: int = 128,
        sinks: int = 0,
        rotary: Rotary | None = None,
        **options: Any,
    ):
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        if self.context_size is not None:
            raise ValueError(
                'window attention is about distances within one sequence; for another sequence take cross_attention="softmax" '
                'or "linear".'
            )
        self.set_rotary(rotary, self.head_dim)
        if type(window) is not int or window < 1 or type(sinks) is not int or sinks < 0:
            raise ValueError(
                f"window and sinks are whole numbers of tokens, from 1 and from 0 on; got {window!r} and {sinks!r}."
            )
        self.window, self.sinks = window, sinks

    def mix(
        self,
        x: Float[Tensor, "b t hidden"],
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g t d"],
        v: Float[Tensor, "b g t e"],
        *,
        positions: Int[Tensor, "#b t"] | None,
        rotation: Rotation | None,
        inplace: bool,
        **options: Any,
    ) -> tuple[Any, ...]:
        """A state of a window is small, so a new one is made with `inplace` as well."""
        q, k = self.rotate(x, q, k, positions, rotation, options["state"])
        outputs = hybrid_attention(q, k, v, causal=self.causal, window=self.window, sinks=self.sinks, **options)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def mix_token(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: HybridState, *, positions, rotation, inplace: bool
    ) -> tuple[Tensor, HybridState]:
        q, k = self.rotate(x, q, k, positions, rotation, state)
        return hybrid_step(q, k, v, None, state, window=self.window, sinks=self.sinks, inplace=inplace)

    def new_state(self, batch_size: int, *, capacity: int | None = None, dtype=None, device=None) -> HybridState:
        """The state before the first token. Its size does not depend on `capacity`, its type is that of the weights (if they
        are quantised, `dtype`)."""
        weight = self.v_proj.weight
        k = torch.empty(
            (batch_size, self.num_kv_heads, 0, self.head_dim),
            dtype=weight.dtype if weight.is_floating_point() else dtype,
            device=weight.device if device is None else device,
        )
        return HybridState.zeros(k, k, 0, window=self.window, sinks=self.sinks)

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), f"window={self.window}, sinks={self.sinks}"]
        return ", ".join(parts) + ("" if self.rotary is None else f", rotary={self.rotary!r}")
