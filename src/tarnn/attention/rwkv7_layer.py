"""RWKV-7's time mixing as a kind of attention, for any layer of a model."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from tarnn.attention.recurrent import RecurrentAttention
from tarnn.attention.registry import register
from tarnn.attention.rwkv7 import Rwkv7TimeMixing, Vectors
from tarnn.attention.token_shift import token_shift
from tarnn.ops.state import State


@dataclass(frozen=True, eq=False, repr=False)
class Rwkv7State(State):
    """A matrix per head, and the last input."""

    S: Float[Tensor, "n h d e"]  # float32 (float64 for float64 weights)
    last: Float[Tensor, "n hidden"]


@register("rwkv7")
class Rwkv7Attention(RecurrentAttention):
    """RWKV-7 (Peng et al. 2025, section 4, arXiv 2503.14456): a state under a delta rule whose rate each channel learns.

    `mixing`, a `Rwkv7TimeMixing`, has the formula and the parameters, with ranks as the paper derives them from the hidden
    size. It mixes each token's input with the one before. The model's feed-forward follows, where RWKV has its own.

    A layer sees its own input alone, so values are not mixed with those of the first layer, as those of RWKV's checkpoints are
    (`tarnn.models.rwkv`).

    Causal self-attention only. It has its own decay, takes no rotary positions, and its projections have no bias.
    """

    state_class = Rwkv7State
    why_causal = "an RWKV-7 layer is a recurrence over its own input, from left to right"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool,
        head_dim: int | None = None,
        context_size: int | None = None,
        dropout: float = 0.0,
    ):
        super().__init__(
            hidden_size, num_heads, causal=causal, context_size=context_size, head_dim=head_dim, dropout=dropout
        )
        del self.q_proj, self.k_proj, self.v_proj, self.o_proj
        self.mixing = Rwkv7TimeMixing(hidden_size, num_heads, low_ranks(hidden_size), self.head_dim)

    @property
    def o_proj(self) -> nn.Linear:  # type: ignore[override]
        """The projection back, under the name that all kinds of attention have."""
        return self.mixing.output

    def read(
        self, x: Tensor, state: Rwkv7State | None, *, return_state: bool, **places: Any
    ) -> tuple[Tensor, Rwkv7State | None]:
        state = self._before(x, places["cu_seqlens"]) if state is None else state
        y, S, last, _ = self.mixing(x, state.S, state.last, None, **places)
        return self.dropout(y), Rwkv7State(S, last)

    def project(self, x: Tensor, source: Tensor, **places: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Make r, k and v of whole sequences."""
        vectors = self._vectors(source, **places)
        return vectors.r, vectors.k, vectors.v

    def mix(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, key_mask, cu_seqlens, state, return_state: bool, **_
    ) -> tuple[Any, ...]:
        """Run the recurrence alone: norm, bonus and gate come after it."""
        vectors = self._vectors(x, key_mask, cu_seqlens)._replace(r=q, k=k, v=v)
        S = self._before(x, cu_seqlens, v.shape[-1]).S if state is None else state.S
        o, S = self.mixing.mix(vectors, S, key_mask=key_mask, cu_seqlens=cu_seqlens)
        return (o, S) if return_state else (o,)

    def read_token(self, x: Tensor, state: Rwkv7State, *, inplace: bool) -> tuple[Tensor, Rwkv7State]:
        vectors = self.mixing.vectors(x, state.last[:, None].to(x.dtype))
        o, S = self.mixing.mix(vectors, state.S, one_token=True, inplace=inplace)
        y = self.dropout(self.mixing.finish(o, vectors))
        last = state.last.copy_(x[:, 0]) if inplace else x[:, 0]
        return y, Rwkv7State(S, last)

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.num_heads, self.head_dim, self.head_dim), (self.hidden_size,)

    def _before(self, x: Tensor, cu_seqlens: Tensor | None, value_dim: int | None = None) -> Rwkv7State:
        """Make the state before the first token of these sequences, for values of another width if that is given."""
        rows = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
        state = self.new_state(rows, dtype=x.dtype, device=x.device)
        S = state.S if value_dim is None else state.S.new_zeros(*state.S.shape[:3], value_dim)
        return Rwkv7State(S, state.last)

    def _vectors(self, x: Tensor, key_mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Vectors:
        before, _ = token_shift(x, self._before(x, cu_seqlens).last, key_mask, cu_seqlens)
        return self.mixing.vectors(x, before)


def low_ranks(hidden_size: int) -> dict[str, int]:
    """Ranks of decay, α and gate, in 32s: 1.8 √C, 1.8 √C and 0.6 C^0.8 (Peng et al. 2025)."""
    in_32s = lambda x: max(32, round(x / 32) * 32)  # noqa: E731
    rank = in_32s(1.8 * hidden_size**0.5)
    return {"w": rank, "a": rank, "g": in_32s(0.6 * hidden_size**0.8)}
