"""The base class of attention layers: projections to heads and back, and the arguments of all kinds."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from tarnn.attention.norm import RMSNorm
from tarnn.attention.rotary import Rotary, Rotation
from tarnn.feature_maps.base import FeatureMap
from tarnn.ops import State
from tarnn.other_names import FORWARD, our_name


class MultiHeadAttention(nn.Module):
    """Projections of (b, t, hidden) to h query heads and g key/value heads, and of h heads back.

    What happens between them is a subclass's business: its `mix` and `mix_token`. `forward`, `step` and
    `new_state` have one signature for all kinds of attention, so that a model can put any kind into any layer.

    `qk_norm`: an RMSNorm of each query and key, with a gain per channel, before all else: products stay of a
    size whatever the projections grow to, and so does the sum that normalises (arXiv 2302.05442, 2405.09818).

    `dropout`: of the output y. (`nn.MultiheadAttention` drops weights, which linear attention never forms.)

    Cross attention: `forward(x, context, return_state=True)` reads the context once; then `step(x, state)`,
    or `forward(x, state=state)` without a context, attends to it again, and leaves the state as it is.
    """

    layer_type: ClassVar[str] = "tarnn_linear"
    """The layer of a transformers cache that holds its state: see `tarnn.huggingface.cache`."""
    has_weights: ClassVar[bool] = False
    """Whether `forward` takes return_weights=True, which makes it return (y, state, weights (b, h, t, s))."""
    rotary: Rotary | None = None
    mix: Callable[..., tuple[Any, ...]]
    """mix(x, q, k, v (b, g, s, e), *, key_mask, …): a tuple of o (b, h, t, e) and what `forward` returns after y. It takes
    all options of `forward`; o is linear in v, whose width is free."""
    mix_token: Callable[..., tuple[Tensor, Any]]
    """mix_token(x, q, k, v, state, *, positions, rotation, inplace): (o, the state after this token)."""
    new_state: Callable[..., State]
    """new_state(batch_size, *, capacity=None, dtype=None, device=None): the state that has seen nothing."""

    @classmethod
    def rotary_dim(cls, head_dim: int, feature_map: FeatureMap | None = None) -> int:
        """The width of the vectors that rotary positions rotate, for kinds that take `rotary`."""
        return head_dim

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
        qk_norm: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(
                "hidden_size must be a multiple of num_heads, or head_dim given; got hidden_size = "
                f"{hidden_size} and num_heads = {num_heads}."
            )
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads; got {num_heads} and {num_kv_heads}. "
                "num_kv_heads = num_heads is multi-head, 1 multi-query attention."
            )
        if context_size is not None and causal:
            raise ValueError("cross attention (context_size=) has no order of keys to be causal in; pass causal=False.")
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.context_size, self.causal = context_size, causal
        key_size = hidden_size if context_size is None else context_size
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(key_size, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(key_size, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.q_norm = RMSNorm(self.head_dim, eps=1e-6) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=1e-6) if qk_norm else None
        self.o_norm: nn.RMSNorm | None = None  # of each head's output

    def set_rotary(self, rotary: Rotary | None, width: int, vectors: str = "q and k") -> None:
        """Rotate vectors of this width. Raises ValueError if they have another, and in cross attention."""
        if rotary is not None and self.context_size is not None:
            raise ValueError(
                "rotary positions are about the distance of key and query; cross attention has no such thing."
            )
        if rotary is not None and rotary.dim != width:
            raise ValueError(f"rotary rotates {vectors}, so its dim must be their width, {width}; got {rotary.dim}.")
        self.rotary = rotary

    def rotate(
        self, x: Tensor, q: Tensor, k: Tensor, positions: Tensor | None, rotation: Rotation | None, state: State | None
    ) -> tuple[Tensor, Tensor]:
        """q and k at their positions, where the layer has rotary ones."""
        if self.rotary is None:
            return q, k
        rotation = self.rotary.of(positions, rotation, x, state)
        return rotation.apply(q), rotation.apply(k)

    def forward(
        self,
        x: Float[Tensor, "b t hidden"],
        context: Float[Tensor, "b s context"] | None = None,
        *,
        key_mask: Bool[Tensor, "b s"] | None = None,
        cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
        positions: Int[Tensor, "#b t"] | None = None,
        rotation: Rotation | None = None,
        state: State | None = None,
        return_state: bool = False,
        inplace: bool = False,
        **options: Any,
    ) -> Any:
        """y (b, t, hidden), or with `return_state` (y, the state after these tokens).

        x gives the queries; keys and values come from x too, or, where `context_size` was given (cross attention),
        from context. `key_mask`: True = attend. `cu_seqlens` bounds sequences packed into one row. `positions`: for
        rotary positions only (`rotation`: what a `Rotary` has made of them already, so that layers can share it).
        `state` is what earlier tokens left behind; it stays as it was, unless `inplace=True` lets its memory be used
        for the new one (which only the owner may ask for). options: those of one kind of attention.
        """
        for name in options:
            if instead := our_name(name, FORWARD):
                raise TypeError(
                    f"{type(self).__name__}() has no argument {name!r}. In its place tarnn takes {instead}."
                )
        q, k, v = self.project(x, self.source(x, context, state))
        o, *more = self.mix(
            x,
            q,
            k,
            v,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            positions=positions,
            rotation=rotation,
            state=state,
            return_state=return_state,
            inplace=inplace,
            **options,
        )
        y = self.merge(o, v.dtype)
        return (y, *more) if more else y

    def step(
        self,
        x: Float[Tensor, "b t hidden"],
        state: Any,
        *,
        positions: Int[Tensor, "#b 1"] | None = None,
        rotation: Rotation | None = None,
        inplace: bool = False,
    ) -> tuple[Float[Tensor, "b 1 hidden"], Any]:
        """One token: (y, the state after it). With `inplace` it is written into the given state's tensors.

        Raises ValueError where a step has no meaning: more than one token, or no causality.
        """
        self.check_token(x)
        if self.context_size is not None:  # reads what the context left behind; writes nothing
            return self(x, state=state), state
        if not self.causal:
            raise ValueError("attention to both sides has no step: a token also sees what comes after it. Use forward.")
        q, k, v = self.project(x, x)
        o, state = self.mix_token(x, q, k, v, state, positions=positions, rotation=rotation, inplace=inplace)
        return self.merge(o, v.dtype), state

    def check_token(self, x: Tensor) -> None:
        """Raise ValueError unless x is one token for each row."""
        if x.ndim != 3 or x.shape[1:] != (1, self.hidden_size):
            raise ValueError(
                f"step takes one token, (b, 1, hidden); got {tuple(x.shape)}, where hidden = {self.hidden_size}. For "
                "(b, hidden) pass x[:, None]; for more tokens use forward."
            )

    def source(self, x: Tensor, context: Tensor | None, state) -> Tensor:
        """The input of keys and values, (b, s, ·): x or the context. Raises ValueError if context is missing or not wanted."""
        if self.context_size is None:
            if context is not None:
                raise ValueError("this is self attention and takes no context; for cross attention pass context_size=.")
            return x
        if context is not None:
            return context
        if state is None:
            raise ValueError("cross attention needs a context, or the state that an earlier context left behind.")
        return x.new_zeros(x.shape[0], 0, self.context_size)  # no new keys: only the state is read

    def project(self, x: Tensor, source: Tensor, **places: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Make q (b, h, t, d) of x, k and v (b, g, s, d) of the source; with `qk_norm`, q and k are normed.

        places: key_mask and cu_seqlens, for kinds whose projections see other tokens.
        """
        q, k = self.q_proj(x), self.k_proj(source)
        q, k = self.heads(q, self.num_heads, self.q_norm), self.heads(k, self.num_kv_heads, self.k_norm)
        return q, k, self.heads(self.v_proj(source), self.num_kv_heads)

    @staticmethod
    def heads(x: Float[Tensor, "b t h_d"], num_heads: int, norm: nn.RMSNorm | None = None) -> Float[Tensor, "b h t d"]:
        """Split a projection's output into heads, and norm them: a view if there is no norm."""
        x = x.unflatten(-1, (num_heads, -1))
        if norm is not None:
            x = norm(x.to(norm.weight.dtype)).to(x.dtype)  # in autocast, the weight's is more than that of x
        return x.transpose(1, 2)

    def merge(self, o: Float[Tensor, "b h t d"], dtype: torch.dtype) -> Float[Tensor, "b t hidden"]:
        """Norm the heads if the layer has an `o_norm`, and project them back to the hidden size, in that type."""
        if self.o_norm is not None:
            o = rms_norm(o, (self.head_dim,), self.o_norm.weight.to(o.dtype), self.o_norm.eps)
        return self.dropout(self.o_proj(o.to(dtype).transpose(1, 2).flatten(2)))

    def extra_repr(self) -> str:
        parts = [f"{self.hidden_size}, num_heads={self.num_heads}, head_dim={self.head_dim}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        if self.context_size is not None:
            parts.append(f"context_size={self.context_size}")
        if self.q_norm is not None:
            parts.append("qk_norm=True")
        return ", ".join([*parts, f"causal={self.causal}"])
