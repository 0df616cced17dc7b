"""Softmax attention to a window, to first tokens and to global tokens, as a module."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tarnn.attention.multihead import MultiHeadAttention
from tarnn.attention.registry import register
from tarnn.attention.rotary import Rotary, Rotation
from tarnn.ops import HybridState, hybrid_attention, hybrid_step
from tarnn.other_names import LAYER, names_ours


@register("window")
class WindowAttention(MultiHeadAttention):
    """Multi-head softmax attention to keys at a distance of less than `window`; time linear in t, a state of constant size.

    sinks: the first so many tokens are seen by all. global_tokens: places, such as [0], of tokens that are seen by all and
    see all (Beltagy et al. 2020, arXiv 2004.05150), for causal=False. `rotary` rotates q and k. Others as `MultiHeadAttention`.

    Raises ValueError for sizes that don't fit, for global tokens where attention is causal, and as cross attention.
    """

    @names_ours(LAYER)
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool,
        window: int = 128,
        sinks: int = 0,
        global_tokens: Sequence[int] = (),
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
        if not isinstance(global_tokens, list | tuple) or not all(type(x) is int and x >= 0 for x in global_tokens):
            raise ValueError(f"global_tokens are places from 0 on, such as [0]; got {global_tokens!r}.")
        if causal and global_tokens:
            raise ValueError(
                "a global token sees what comes after it, which causal attention may not know; pass causal=False, or sinks= for "
                "first tokens that all later ones see."
            )
        self.window, self.sinks, self.global_tokens = window, sinks, tuple(global_tokens)

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
        if self.global_tokens:
            options["global_tokens"] = torch.tensor(self.global_tokens, device=q.device)
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
        if self.global_tokens:
            parts.append(f"global_tokens={list(self.global_tokens)}")
        return ", ".join(parts) + ("" if self.rotary is None else f", rotary={self.rotary!r}")
