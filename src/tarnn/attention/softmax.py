"""Softmax attention as a module: the baseline, with the same interface."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from tarnn.attention.multihead import MultiHeadAttention
from tarnn.attention.registry import register
from tarnn.attention.rotary import Rotary, Rotation
from tarnn.ops import KVCache, softmax_attention, softmax_step


@register("softmax")
class SoftmaxAttention(MultiHeadAttention):
    """Multi-head attention with weights exp(q_i·k_j/√d) / Σ_j exp(q_i·k_j/√d); its state is a `KVCache`.

    Vaswani et al. 2017, eq. 1 (arXiv 1706.03762). Arguments as `MultiHeadAttention`; `rotary` rotates q and k.
    A cache has the room that it was made with: `new_state` must be told its capacity.
    """

    layer_type = "tarnn_softmax"
    has_weights = True

    def __init__(self, hidden_size: int, num_heads: int, *, causal: bool, rotary: Rotary | None = None, **options: Any):
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        self.set_rotary(rotary, self.head_dim)

    def mix(
        self,
        x: Float[Tensor, "b t hidden"],
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
        *,
        positions: Int[Tensor, "#b t"] | None,
        rotation: Rotation | None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """With return_weights, return (o, the state, the weights (b, h, t, s))."""
        q, k = self.rotate(x, q, k, positions, rotation, options["state"])
        outputs = softmax_attention(q, k, v, causal=self.causal, **options)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def mix_token(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: KVCache, *, positions, rotation, inplace: bool
    ) -> tuple[Tensor, KVCache]:
        q, k = self.rotate(x, q, k, positions, rotation, state)
        return softmax_step(q, k, v, state, inplace=inplace)

    def new_state(self, batch_size: int, *, capacity: int | None = None, dtype=None, device=None) -> KVCache:
        """Make an empty cache of `dtype`, by default the type of the weights (if they are quantised, torch's default).

        Raises ValueError if its capacity, in tokens, is not given.
        """
        if capacity is None:
            raise ValueError("softmax attention keeps every key and value: say how many, capacity=.")
        weight = self.v_proj.weight
        return KVCache.empty(
            batch_size,
            self.num_kv_heads,
            capacity,
            self.head_dim,
            dtype=dtype or (weight.dtype if weight.is_floating_point() else None),
            device=weight.device if device is None else device,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.rotary is None else f", rotary={self.rotary!r}")
