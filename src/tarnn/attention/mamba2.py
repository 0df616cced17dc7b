"""Mamba-2 as a module: linear attention whose keys and queries all heads share, after a short filter."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus

from tarnn.attention.filters import check_filter_width, initial_filters
from tarnn.attention.norm import RMSNorm
from tarnn.attention.recurrent import RecurrentAttention
from tarnn.attention.registry import register
from tarnn.feature_maps.elementwise import Identity
from tarnn.numerics import widen
from tarnn.ops import (
    ConvolutionState,
    LinearState,
    linear_attention,
    short_convolution,
    short_convolution_step,
    step as linear_step,
)
from tarnn.ops.elementwise import swiglu
from tarnn.ops.state import State

_IDENTITY = Identity()


@dataclass(frozen=True, eq=False, repr=False)
class Mamba2State(State):
    """A matrix per head, and the last inputs of the filters."""

    S: Float[Tensor, "b h n e"]  # float32 (float64 for float64 weights)
    tokens: Float[Tensor, "b p c"]  # p = width of the filters − 1


@register("mamba2")
class Mamba2Attention(RecurrentAttention):
    """Mamba-2 (Dao and Gu 2024, section 7, arXiv 2405.21060): each head forgets, and writes, by a time step of its own.

        v, k, q = silu(filter(W x))        Δ = softplus(W_Δ x + b),  one per head
        S ← e^(−Δ e^A) S + Δ k vᵀ          y = W_o norm((Sᵀq + D v) ⊙ silu(W_z x))

    One key and one query, of `state_size` numbers, are those of all heads; values and outputs have `head_dim` numbers per head.
    The paper's names: v is X, k is B, q is C. Parameters have the names and the order of its code.

    Arguments beyond `MultiHeadAttention`'s:

    state_size: the width of k and q (the paper's N, 64 to 128 there).
    filter_width: the width of the filters of v, k and q along time; 1: only silu.

    Causal self-attention only. It has its own decay, and takes no rotary positions: filters and decay know the order.
    """

    state_class = Mamba2State
    why_causal = "a Mamba-2 layer is a recurrence over its own input, from left to right"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool,
        head_dim: int | None = None,
        context_size: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        state_size: int = 64,
        filter_width: int = 4,
    ):
        super().__init__(
            hidden_size,
            num_heads,
            causal=causal,
            context_size=context_size,
            head_dim=head_dim,
            bias=bias,
            dropout=dropout,
        )
        check_filter_width(filter_width)
        if type(state_size) is not int or state_size < 1:
            raise ValueError(
                f"state_size, the width of keys and queries, is a positive whole number; got {state_size!r}."
            )
        del self.q_proj, self.k_proj, self.v_proj  # of one projection, since all but Δ is filtered or gates
        self.state_size, self.filter_width = state_size, filter_width
        width = num_heads * self.head_dim
        self.filtered = [width, state_size, state_size]  # v, k, q
        self.widths = [width, sum(self.filtered), num_heads]  # gate, what is filtered, Δ
        self.in_proj = nn.Linear(hidden_size, sum(self.widths), bias=bias)
        self.filters = nn.Parameter(torch.empty(self.widths[1], filter_width))
        self.filter_bias = nn.Parameter(torch.empty(self.widths[1]))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.norm = RMSNorm(width, eps=1e-5)
        for name, value in self.initial_weights().items():
            self.get_parameter(name).data.copy_(value)

    def initial_weights(self) -> dict[str, Tensor]:
        """Draw the parameters that are no projection, as the paper's code does: Δ from 0.001 to 0.1, A from 1 to 16."""
        heads = (self.num_heads,)
        dt = torch.exp(torch.empty(heads, device="cpu").uniform_(-6.907755, -2.302585))  # log 0.001, log 0.1
        return {
            "filters": initial_filters(*self.filters.shape),
            "filter_bias": torch.zeros(self.filter_bias.shape, device="cpu"),
            "dt_bias": dt + torch.log(-torch.expm1(-dt)),  # softplus gives dt
            "A_log": torch.empty(heads, device="cpu").uniform_(1, 16).log(),
            "D": torch.ones(heads, device="cpu"),
        }

    def read(
        self, x: Tensor, state: Mamba2State | None, *, return_state: bool, **places: Any
    ) -> tuple[Tensor, Mamba2State | None]:
        options: dict[str, Any] = {**places, "return_state": return_state}
        gate, inputs, dt = self._projected(x)
        before = None if state is None else ConvolutionState(state.tokens.to(inputs.dtype))
        outputs: Any = short_convolution(
            inputs, self.filters, self.filter_bias, activation="silu", state=before, **options
        )
        filtered, *filters = outputs if return_state else (outputs,)
        memory = None if state is None else _memory(state.S)
        o, *after = self._attend(*self._vectors(filtered), dt, state=memory, **options)
        y = self._output(o, gate)
        return y, Mamba2State(after[0].S, filters[0].tokens) if return_state else None

    def project(self, x: Tensor, source: Tensor, **places: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Make the filtered q, k and v of whole sequences."""
        inputs = self._projected(source)[1]
        filtered: Any = short_convolution(inputs, self.filters, self.filter_bias, activation="silu", **places)
        return self._vectors(filtered)

    def mix(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *, key_mask, cu_seqlens, state, return_state: bool, **_
    ) -> tuple[Any, ...]:
        options = {"key_mask": key_mask, "cu_seqlens": cu_seqlens, "state": state, "return_state": return_state}
        return self._attend(q, k, v, self._projected(x)[2], **options)

    def read_token(self, x: Tensor, state: Mamba2State, *, inplace: bool) -> tuple[Tensor, Mamba2State]:
        gate, inputs, dt = self._projected(x)
        before = ConvolutionState(state.tokens.to(inputs.dtype))
        filtered, filters = short_convolution_step(
            inputs, self.filters, self.filter_bias, activation="silu", state=before, inplace=inplace
        )
        q, k, v = self._vectors(filtered)
        dt, log_decay = self._time_steps(dt)
        o, memory = linear_step(
            q, k, v * dt[..., None].to(v.dtype), _IDENTITY, _memory(state.S),
            normalize=False, log_decay=log_decay, inplace=inplace,
        )  # fmt: skip
        y = self._output(self._with_skip(o, v), gate)
        return y, Mamba2State(memory.S, filters.tokens)

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.num_heads, self.state_size, self.head_dim), (self.filter_width - 1, self.widths[1])

    def _projected(self, x: Float[Tensor, "b t hidden"]) -> tuple[Tensor, ...]:
        """The gate, what is filtered, and Δ before its softplus."""
        return self.in_proj(x).split(self.widths, -1)

    def _vectors(self, filtered: Float[Tensor, "b t c"]) -> tuple[Tensor, Tensor, Tensor]:
        v, k, q = filtered.split(self.filtered, -1)
        return q[:, None], k[:, None], self.heads(v, self.num_heads)

    def _time_steps(self, dt: Float[Tensor, "b t h"]) -> tuple[Float[Tensor, "b h t"], Float[Tensor, "b h t"]]:
        """Δ, and the logarithm of the decay."""
        dt = softplus((widen(dt) + widen(self.dt_bias)).mT.contiguous())  # contiguous: as in `TokenDecay`
        return dt, -dt * widen(self.A_log).exp()[:, None]

    def _attend(
        self, q, k, v, dt: Float[Tensor, "b t h"], *, key_mask, return_state: bool, **options
    ) -> tuple[Any, ...]:
        """Return (o (b, h, t, e), the state after it if requested, else None)."""
        dt, log_decay = self._time_steps(dt)
        outputs: Any = linear_attention(
            q, k, v * dt[..., None].to(v.dtype), _IDENTITY,
            causal=True, normalize=False, log_decay=log_decay, key_mask=key_mask, return_state=return_state, **options,
        )  # fmt: skip
        o, *after = outputs if return_state else (outputs,)
        v = v if key_mask is None else v.masked_fill(~key_mask[:, None, :, None], 0.0)
        return self._with_skip(o, v), *after

    def _with_skip(self, o: Tensor, v: Tensor) -> Tensor:
        return o + v * self.D.to(v.dtype)[:, None, None]

    def _output(self, o: Float[Tensor, "b h t e"], gate: Float[Tensor, "b t c"]) -> Float[Tensor, "b t hidden"]:
        o = swiglu(gate, o.transpose(1, 2).flatten(2).to(gate.dtype))
        o = self.norm(o.to(self.norm.weight.dtype)).to(gate.dtype)  # in autocast, the weight's is more than that of o
        return self.dropout(self.o_proj(o))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, state_size={self.state_size}, filter_width={self.filter_width}"


def _memory(S: Float[Tensor, "b h n e"]) -> LinearState:
    """S as the op takes it, whose sum of keys nobody reads."""
    return LinearState(S, S.new_zeros(S.shape[:-1]))
