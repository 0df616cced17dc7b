"""Gated DeltaNet as a module: attention whose state each token corrects, after short filters."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from tarnn.attention.filters import check_filter_width, initial_filters
from tarnn.attention.recurrent import RecurrentAttention
from tarnn.attention.registry import register
from tarnn.numerics import widen
from tarnn.ops import ConvolutionState, DeltaState, delta_rule, delta_step, short_convolution, short_convolution_step
from tarnn.ops.state import State


@dataclass(frozen=True, eq=False, repr=False)
class GatedDeltaState(State):
    """A matrix per head, and the last inputs of the filters."""

    S: Float[Tensor, "b g d e"]  # float32 (float64 for float64 weights)
    tokens: Float[Tensor, "b p c"]  # p = width of the filters − 1


@register("gated_delta")
class GatedDeltaAttention(RecurrentAttention):
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): a memory that answers keys with values, and that tokens correct.

        q, k, v = silu(filter(W x)),  q and k of length 1,  β = σ(W_β x)
        S ← (I − β k kᵀ) e^log_decay S + β k vᵀ          y = W_o (norm(Sᵀq / √d) ⊙ silu(W_g x))

    Arguments beyond `MultiHeadAttention`'s:

    decay: a module x → log_decay (`tarnn.attention.decay`): a `TokenDecay` as in the paper, a `ChannelDecay` as in Kimi's
        attention (arXiv 2510.26692), or none, DeltaNet.
    filter_width: the width of the filters of q, k and v along time; 1: none.

    Causal self-attention only, since each token corrects what those before it wrote. It takes no rotary positions: filters and
    corrections know the order.
    """

    state_class = GatedDeltaState
    why_causal = "a delta rule corrects what earlier tokens wrote, so it needs causal self-attention"

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
        decay: nn.Module | None = None,
        filter_width: int = 4,
    ):
        super().__init__(
            hidden_size,
            num_heads,
            causal=causal,
            context_size=context_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=bias,
            dropout=dropout,
        )
        check_filter_width(filter_width)
        self.filter_width = filter_width
        self.widths = [x * self.head_dim for x in (num_heads, self.num_kv_heads, self.num_kv_heads)]
        self.filters = nn.Parameter(torch.empty(sum(self.widths), filter_width))
        self.filters.data.copy_(initial_filters(*self.filters.shape))
        self.beta_proj = nn.Linear(hidden_size, self.num_kv_heads, bias=bias)
        self.gate_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.norm = nn.RMSNorm(self.head_dim, eps=1e-6)
        self.decay = decay

    def initial_weights(self) -> dict[str, Tensor]:
        """Draw the parameters that are no projection."""
        return {"filters": initial_filters(*self.filters.shape)}

    def read(
        self, x: Tensor, state: GatedDeltaState | None, *, return_state: bool, **places: Any
    ) -> tuple[Tensor, GatedDeltaState | None]:
        options: dict[str, Any] = {**places, "return_state": return_state}
        inputs = self._inputs(x)
        filters = None if state is None else ConvolutionState(state.tokens.to(inputs.dtype))
        outputs: Any = short_convolution(inputs, self.filters, activation="silu", state=filters, **options)
        filtered, *filters_after = outputs if return_state else (outputs,)
        memory = None if state is None else DeltaState(state.S)
        o, *memory_after = self.mix(x, *self._vectors(filtered), state=memory, **options)
        y = self._output(x, o, inputs.dtype)
        return y, GatedDeltaState(memory_after[0].S, filters_after[0].tokens) if return_state else None

    def project(self, x: Tensor, source: Tensor, **places: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The filtered q, k and v of whole sequences."""
        filtered: Any = short_convolution(self._inputs(source), self.filters, activation="silu", **places)
        return self._vectors(filtered)

    def mix(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, key_mask, cu_seqlens, state, return_state: bool, **_
    ) -> tuple[Any, ...]:
        options = {"key_mask": key_mask, "cu_seqlens": cu_seqlens, "state": state, "return_state": return_state}
        outputs: Any = delta_rule(q, k, v, **self._gates(x), **options)
        return outputs if return_state else (outputs,)

    def read_token(self, x: Tensor, state: GatedDeltaState, *, inplace: bool) -> tuple[Tensor, GatedDeltaState]:
        inputs, memory = self._inputs(x), DeltaState(state.S)
        filters = ConvolutionState(state.tokens.to(inputs.dtype))
        filtered, filters = short_convolution_step(
            inputs, self.filters, activation="silu", state=filters, inplace=inplace
        )
        o, memory = delta_step(*self._vectors(filtered), **self._gates(x), state=memory, inplace=inplace)
        return self._output(x, o, inputs.dtype), GatedDeltaState(memory.S, filters.tokens)

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        channels, width = self.filters.shape
        return (self.num_kv_heads, self.head_dim, self.head_dim), (width - 1, channels)

    def _inputs(self, x: Float[Tensor, "b t hidden"]) -> Float[Tensor, "b t c"]:
        """Return the input of the filter: queries, keys and values side by side."""
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)

    def _vectors(self, filtered: Float[Tensor, "b t c"]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = filtered.split(self.widths, -1)
        return self.heads(q, self.num_heads), self.heads(k, self.num_kv_heads), self.heads(v, self.num_kv_heads)

    def _gates(self, x: Float[Tensor, "b t hidden"]) -> dict[str, Any]:
        """Return the delta rule's arguments per token that are no vectors: β and the log-decay."""
        beta = torch.sigmoid(widen(self.beta_proj(x))).mT
        return {"beta": beta, "log_decay": None if self.decay is None else self.decay(x), "normalize_qk": True}

    def _output(self, x: Tensor, o: Float[Tensor, "b h t d"], dtype: torch.dtype) -> Float[Tensor, "b t hidden"]:
        gate = silu(self.heads(self.gate_proj(x), self.num_heads))
        o = rms_norm(o, (self.head_dim,), self.norm.weight.to(o.dtype), self.norm.eps) * gate.to(o.dtype)
        return self.merge(o, dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, filter_width={self.filter_width}"
