"""One layer of the backbone: attention and feed-forward, each with a norm and a residual."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from tarnn.attention.multihead import MultiHeadAttention
from tarnn.attention.norm import RMSNorm
from tarnn.models.build_layers import make_attention
from tarnn.models.config import ModelConfig
from tarnn.models.convolution import Convolution
from tarnn.ops import State
from tarnn.ops.elementwise import swiglu


class SwiGlu(nn.Module):
    """W₃ (silu(W₁ x) ⊙ W₂ x) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class PlainMlp(nn.Module):
    """W₂ f(W₁ x), f = gelu or relu²."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.squared = config.mlp == "squared_relu"
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up_proj(x)
        return self.down_proj(relu(x).square() if self.squared else gelu(x))


def make_norm(config: ModelConfig) -> nn.Module:
    kind = RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps)


class Block(nn.Module):
    """Attention, then feed-forward if the config has one, each f in x + f(norm x) (pre-norm) or norm(x + f(x)) (post-norm).

    With `conv_kernel` in the config a convolution comes before attention, in the same way.

    causal: for a decoder; False for an encoder. context_size: the width of another sequence that cross-attention,
    between the two, reads: a decoder that has an encoder.

    It runs by `prefill`, on top of its states or of none, and by `step`; `TarnnBlock` adds `forward`. Its states are that of
    the convolution, if it has one, and that of attention. All take `cross`, the arguments of the cross-attention:
    {"context": (b, s, context_size), "key_mask": (b, s)}, or {"state": …}, the state after that context.

    config.reversible: x (b, t, 2·hidden) holds two streams, (x₁, x₂) → (y₁ = x₁ + attention(norm x₂), x₂ + mlp(norm y₁)), which
    follow from what they become: see `models/reversible.py`.
    """

    def __init__(self, config: ModelConfig, layer: int, *, causal: bool = True, context_size: int | None = None):
        super().__init__()
        self.pre_norm, self.reversible = config.norm_position == "pre", config.reversible
        self.convolution: Convolution | None = None
        if config.conv_kernel is not None:
            self.convolution = Convolution(config, causal=causal)
            self.convolution_norm = make_norm(config)
        self.attention = make_attention(config, layer, causal=causal)
        self.attention_norm = make_norm(config)
        self.cross_attention: MultiHeadAttention | None = None
        if context_size is not None:
            self.cross_attention = make_attention(config, layer, causal=False, context_size=context_size)
            self.cross_norm = make_norm(config)
        self.mlp: SwiGlu | PlainMlp | None = None
        if config.mlp != "none":
            self.mlp = SwiGlu(config) if config.mlp == "swiglu" else PlainMlp(config)
            self.mlp_norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        for attention in filter(None, (self.attention, self.cross_attention)):
            attention.o_proj.adds_to_residual = True  # type: ignore[assignment]  # its weights start smaller
        others = (self.mlp and self.mlp.down_proj, self.convolution and self.convolution.out_proj)
        for projection in filter(None, others):
            projection.adds_to_residual = True  # type: ignore[assignment]

    def new_states(self, batch_size: int, **options: Any) -> tuple[State, ...]:
        """Make the states before the first token. options: of attention's `new_state`."""
        state = self.attention.new_state(batch_size, **options)
        return (state,) if self.convolution is None else (self.convolution.new_state(batch_size), state)

    def prefill(self, x: Tensor, *states, cross=None, **options) -> tuple[Any, ...]:
        """Read many tokens on top of states, or of none (None): (x, the states after them)."""
        x, y, states = self._read(x, *states, **options)
        return self._rest(x, y, cross), *states

    def step(self, x: Tensor, *states, cross=None, inplace: bool = False, **options) -> tuple[Any, ...]:
        """Read one token, x (b, 1, hidden): (x, the states after it)."""
        *filtered, state = states
        if self.convolution is not None:
            before = self._before(x, self.convolution_norm)
            y, *filtered = self.convolution.step(before, *filtered, inplace=inplace)
            x = self._join(x, y, self.convolution_norm)
        before = self._before(x, self.attention_norm)
        y, state = self.attention.step(before, state, inplace=inplace, **options)
        return self._rest(x, y, cross), *filtered, state

    def _read(self, x: Tensor, *states, key_mask=None, **options) -> tuple[Tensor, Tensor, tuple[State, ...]]:
        """Run convolution and attention on top of states: (the residual, attention's output, the states after)."""
        *filtered, state = states
        if self.convolution is not None:
            before = self._before(x, self.convolution_norm)
            y, *filtered = self.convolution.prefill(before, *filtered, key_mask=key_mask)
            x = self._join(x, y, self.convolution_norm)
        options |= {"key_mask": key_mask, "state": state, "return_state": True}
        y, state, *_ = self.attention(self._before(x, self.attention_norm), **options)
        return x, y, (*filtered, state)

    def _before(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Norm the input of a sublayer, if norms come before; of two streams, attention reads the second."""
        if self.reversible:
            x = x.chunk(2, -1)[1] if norm is self.attention_norm else x
            x = x.to(cast(Any, norm).weight.dtype)  # streams are wide
        return norm(x) if self.pre_norm else x

    def _join(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        """Add the output y of a sublayer to the residual."""
        x = x + self.dropout(y)
        return x if self.pre_norm else norm(x)

    def _rest(self, x: Tensor, y: Tensor, cross: Mapping[str, Any] | None) -> Tensor:
        """Run what follows attention, whose output is y."""
        if self.reversible:
            x, second = x.chunk(2, -1)
            x = self._join(x, y, self.attention_norm)
            y = cast(nn.Module, self.mlp)(self._before(x, self.mlp_norm))
            return torch.cat([x, self._join(second, y, self.mlp_norm)], -1)
        x = self._join(x, y, self.attention_norm)
        if self.cross_attention is not None:
            y = self.cross_attention(self._before(x, self.cross_norm), **cross or {})
            y = y[0] if isinstance(y, tuple) else y
            x = self._join(x, y, self.cross_norm)
        return x if self.mlp is None else self._join(x, self.mlp(self._before(x, self.mlp_norm)), self.mlp_norm)
