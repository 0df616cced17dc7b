"""A layer that mixes what is near: each channel filtered along time, then the channels with each other."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tarnn.models.config import ModelConfig
from tarnn.ops import ConvolutionState, short_convolution, short_convolution_step


class Convolution(nn.Module):
    """y = W silu(bias + Σ_l weight_l x_(i − p + l)), `conv_kernel` numbers a channel.

    causal: over the last tokens, with a state; else as many on either side. Masked tokens are absent, and packed sequences don't
    see each other.
    """

    def __init__(self, config: ModelConfig, *, causal: bool):
        super().__init__()
        width = config.conv_kernel or 1
        self.causal = causal
        self.weight = nn.Parameter(torch.empty(config.hidden_size, width))
        self.bias = nn.Parameter(torch.empty(config.hidden_size))
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        for x in (self.weight, self.bias):
            nn.init.uniform_(x, -(width**-0.5), width**-0.5)  # as a Conv1d has it

    def forward(
        self,
        x: Float[Tensor, "b t hidden"],
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
    ) -> Float[Tensor, "b t hidden"]:
        """y. Arguments as in `MultiHeadAttention`."""
        y = short_convolution(
            x, self.weight, self.bias, causal=self.causal, activation="silu", key_mask=key_mask, cu_seqlens=cu_seqlens
        )
        return self.out_proj(y)

    def prefill(
        self,
        x: Float[Tensor, "b t hidden"],
        state: ConvolutionState | None,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t hidden"], ConvolutionState]:
        """y, on top of a state or of none, and the state after it."""
        y, after = short_convolution(
            x, self.weight, self.bias, activation="silu", key_mask=key_mask, state=state, return_state=True
        )
        return self.out_proj(y), after

    def step(
        self, x: Float[Tensor, "b 1 hidden"], state: ConvolutionState, *, inplace: bool = False
    ) -> tuple[Float[Tensor, "b 1 hidden"], ConvolutionState]:
        """One token: (y, the state after it)."""
        y, state = short_convolution_step(x, self.weight, self.bias, activation="silu", state=state, inplace=inplace)
        return self.out_proj(y), state

    def new_state(self, batch_size: int) -> ConvolutionState:
        """The state before the first token."""
        hidden, width = self.weight.shape
        return ConvolutionState.zeros(batch_size, width, hidden, dtype=self.weight.dtype, device=self.weight.device)

    def extra_repr(self) -> str:
        hidden, width = self.weight.shape
        return f"{hidden}, width={width}, causal={self.causal}"
