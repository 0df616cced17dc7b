"""Decays of the state: before a token is added, the state is scaled by e^log_decay, log_decay ≤ 0.

Each is a module x (b, t, hidden) → log_decay for g key/value heads, as the op takes it, float32 at least.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from tarnn.attention.registry import DECAYS
from tarnn.numerics import widen


def retention(num_heads: int) -> Float[Tensor, " g"]:
    """log γ_g with γ_g = 1 − 2^(−5 − g), g = 0 …: the first head remembers about 32 tokens, each next one twice as many.

    RetNet (Sun et al. 2023, eq. 8, arXiv 2307.08621).
    """
    # on the CPU: for arithmetic on the meta device, where models are made without data, torch imports its compiler, 1.5 s
    head = torch.arange(num_heads, dtype=torch.float64, device="cpu")
    return torch.log1p(-torch.exp2(-5.0 - head)).float()


@DECAYS.register("head")
class HeadDecay(nn.Module):
    """A fixed factor per head, whatever the input: log_decay (g,). Heads differ in how far back they see.

    `log_decay` is a buffer, saved with the model and not trained; other slopes may be copied into it.
    """

    log_decay: Tensor

    def __init__(self, num_heads: int):
        super().__init__()
        self.register_buffer("log_decay", retention(num_heads).to(torch.get_default_device()))

    def forward(self, x: Float[Tensor, "b t hidden"]) -> Float[Tensor, " g"]:
        return widen(self.log_decay)

    def extra_repr(self) -> str:
        return str(len(self.log_decay))


@DECAYS.register("token")
class TokenDecay(nn.Module):
    """A learned gate per token and per head: log_decay = −softplus(W x + bias), (b, g, t).

    The scalar gate of Mamba-2 (arXiv 2405.21060) and, but for its write gate, RFA's (arXiv 2103.02143).
    The bias starts so that x = 0 decays as in `HeadDecay`; both_sides (an encoder): so that heads remember from 1 to 150 tokens.
    """

    def __init__(self, hidden_size: int, num_heads: int, both_sides: bool = False):
        super().__init__()
        self.both_sides = both_sides
        self.gate = nn.Linear(hidden_size, num_heads, bias=False)
        self.bias = nn.Parameter(self.initial_bias(num_heads).to(torch.get_default_device()))

    def initial_bias(self, num_heads: int) -> Float[Tensor, " g"]:
        """log(e^s − 1) for RetNet's slopes s, so that softplus gives s; or for slopes from log 2 to 0.007."""
        if self.both_sides:
            return torch.linspace(0.0, -5.0, num_heads, device="cpu")
        return torch.log(torch.expm1(-retention(num_heads)))

    def forward(self, x: Float[Tensor, "b t hidden"]) -> Float[Tensor, "b g t"]:
        # contiguous: torch.compile takes the gradient's layout from softplus's input, PyTorch from the gradient that comes back
        return -softplus((widen(self.gate(x)) + widen(self.bias)).mT.contiguous())


@DECAYS.register("channel")
class ChannelDecay(nn.Module):
    """A learned gate per token, head and feature: log_decay = log σ(W₂ W₁ x + b) / 16, (b, g, t, f).

    GLA's gate, W₁ of rank 16 (Yang et al. 2023, section 4.4, arXiv 2312.06635); the division by 16 keeps the
    factors near 1.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_features: int, rank: int = 16):
        super().__init__()
        self.num_heads = num_heads
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, num_heads * num_features)

    def forward(self, x: Float[Tensor, "b t hidden"]) -> Float[Tensor, "b g t f"]:
        gate = logsigmoid(widen(self.up(self.down(x)))) / 16
        return gate.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
