"""The base class of layers that are a recurrence of their own: causal self-attention whose state has one size."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tarnn.attention.multihead import MultiHeadAttention
from tarnn.numerics import wide
from tarnn.ops import State


class RecurrentAttention(MultiHeadAttention):
    """Attention that reads its input from left to right, with a state of constant size.

    Rotary positions mean nothing to it. Its state is small, so `forward` makes a new one, whatever `inplace` says.
    """

    why_causal: ClassVar[str]
    """Why it is causal: the first half of the constructor's error."""
    state_class: ClassVar[type[Any]]
    """Made of the matrices and of what is kept of the last inputs."""
    state_shapes: Callable[[], tuple[tuple[int, ...], tuple[int, ...]]]
    """state_shapes(): the shapes of both, for one row."""
    read: Callable[..., tuple[Tensor, Any]]
    """read(x, state, *, key_mask, cu_seqlens, return_state): (y, the state after these tokens; without return_state anything)."""
    read_token: Callable[..., tuple[Tensor, Any]]
    """read_token(x, state, *, inplace): (y, the state after this token)."""

    def __init__(self, hidden_size: int, num_heads: int, *, causal: bool, context_size: int | None, **options: Any):
        if not causal or context_size is not None:
            raise ValueError(
                f'{self.why_causal}; take attention = "linear" or "softmax" for encoders and for cross attention.'
            )
        super().__init__(hidden_size, num_heads, causal=True, **options)

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "b t hidden"],
        context: Tensor | None = None,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
        positions: Int[Tensor, "#b t"] | None = None,
        rotation: Any = None,
        state: State | None = None,
        return_state: bool = False,
        inplace: bool = False,
    ) -> Any:
        """As in `MultiHeadAttention`. Positions say nothing here, and a state is small, so a new one is made."""
        x = self.source(x, context, state)
        y, after = self.read(x, state, key_mask=key_mask, cu_seqlens=cu_seqlens, return_state=return_state)
        return (y, after) if return_state else y

    def step(
        self,
        x: Float[Tensor, "b 1 hidden"],
        state: Any,
        *,
        positions: Int[Tensor, "#b 1"] | None = None,
        rotation: Any = None,
        inplace: bool = False,
    ) -> tuple[Float[Tensor, "b 1 hidden"], Any]:
        self.check_token(x)
        return self.read_token(x, state, inplace=inplace)

    def new_state(self, batch_size: int, *, capacity: int | None = None, dtype=None, device=None) -> Any:
        """The state before the first token, whatever the capacity: last inputs in `dtype`, by default the weights', and the
        matrices in float32, or float64 for that."""
        weight = self.o_proj.weight
        matrices, inputs = self.state_shapes()
        kept = torch.zeros(batch_size, *inputs, dtype=dtype or weight.dtype, device=device or weight.device)
        return self.state_class(kept.new_zeros(batch_size, *matrices, dtype=wide(kept.dtype)), kept)
