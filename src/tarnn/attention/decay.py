"""Decays of the state: log-factors ≤ 0 by which all that was seen before a token is scaled when it arrives.

Each is a module x (b, t, hidden) → log_decay for g key/value heads, as the op takes it. All start from
RetNet's spread of memories, from about 32 tokens in the first head to ever longer ones.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus


def retention(num_heads: int) -> Float[Tensor, " g"]:
    """log γ_g with γ_g = 1 − 2^(−5 − g), g = 0 … (RetNet, Sun et al. 2023, eq. 8, arXiv 2307.08621)."""
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(num_heads, dtype=torch.float64))).float()


class HeadDecay(nn.Module):
    """A fixed factor a head, whatever the input: log_decay (g,). Heads differ in how far back they see.

    `log_decay` may be replaced by other slopes; it is a buffer, saved with the model and not trained.
    """

    log_decay: Tensor

    def __init__(self, num_heads: int):
        super().__init__()
        self.register_buffer("log_decay", retention(num_heads))

    def forward(self, x: Float[Tensor, "b t hidden"]) -> Float[Tensor, " g"]:
        return self.log_decay.float()


class TokenDecay(nn.Module):
    """A learned gate a token and head: log_decay = −softplus(W x + b), (b, g, t), in float32.

    The scalar gate of Mamba-2 (arXiv 2405.21060) and, up to the write gate, of RFA (arXiv 2103.02143, eq. 8).
    b starts so that a zero input decays as `HeadDecay` does.
    """

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.gate = nn.Linear(hidden_size, num_heads)
        with torch.no_grad():
            self.gate.bias.copy_(self.start())

    def start(self) -> Float[Tensor, " g"]:
        """The bias at which softplus gives RetNet's slopes: log(e^s − 1) for a slope s."""
        return torch.log(torch.expm1(-retention(self.gate.out_features)))

    def forward(self, x: Float[Tensor, "b t hidden"]) -> Float[Tensor, "b g t"]:
        return -softplus(self.gate(x).float()).mT


class ChannelDecay(nn.Module):
    """A learned gate a token, head and feature: log_decay = log σ(W₂ W₁ x + b) / 16, (b, g, t, f), in float32.

    W₁ has rank 16. GLA's gate (Yang et al. 2023, eq. 3 and section 4.4, arXiv 2312.06635); the division by 16
    keeps the factors near 1.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_features: int, rank: int = 16):
        super().__init__()
        self.num_heads = num_heads
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, num_heads * num_features)

    def forward(self, x: Float[Tensor, "b t hidden"]) -> Float[Tensor, "b g t f"]:
        gate = logsigmoid(self.up(self.down(x)).float()) / 16
        return gate.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
