"""No attention at all: the lower bound of what attention can cost, a baseline for measurements."""

from typing import Any

from torch import Tensor

from tarnn.attention.multihead import MultiHeadAttention
from tarnn.attention.registry import register
from tarnn.ops import NoState

_NOTHING = NoState()


@register("none")
class NoAttention(MultiHeadAttention):
    """y_i = W_o W_v x_i: each position sees its own value only ("X (OPT)" of arXiv 2009.14794, fig. 3).

    With the signature of the others, so it can stand in any layer; q_proj and k_proj do not exist. A masked
    key is absent here too: its position yields zeros (before the output's bias). As cross attention it takes
    a context as long as x, and has no step. Its state is `NoState()`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        context_size: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__(
            hidden_size,
            num_heads,
            causal=causal,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            context_size=context_size,
            bias=bias,
            dropout=dropout,
        )
        del self.q_proj, self.k_proj

    def source(self, x: Tensor, context: Tensor | None, state) -> Tensor:
        return super().source(x, context, None)  # the state knows nothing of a context

    def project(self, x: Tensor, source: Tensor, **places: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Make values alone; x and the source take the places of queries and keys."""
        return x, source, self.heads(self.v_proj(source), self.num_kv_heads)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, key_mask, return_state: bool, **_) -> tuple[Any, ...]:
        if k.shape[:2] != x.shape[:2]:
            raise ValueError(
                "NoAttention gives each position its own value, so the context must be as long as x; "
                f"got x {tuple(x.shape)} and context {tuple(k.shape)}."
            )
        v = v if key_mask is None else v.masked_fill(~key_mask[:, None, :, None], 0.0)
        o = v.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        return (o, _NOTHING) if return_state else (o,)

    def mix_token(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: NoState, **_) -> tuple[Tensor, NoState]:
        return v.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1), state

    def new_state(self, batch_size: int, *, capacity: int | None = None, dtype=None, device=None) -> NoState:
        return _NOTHING
