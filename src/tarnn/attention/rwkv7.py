"""The time mixing of RWKV-7: attention whose state obeys a delta rule of low rank."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from tarnn.attention.token_shift import token_shift
from tarnn.numerics import widen
from tarnn.ops import DeltaState, low_rank_delta_rule, low_rank_delta_step

DECAY = math.exp(-0.5)  # of the logarithm of a channel per token, at most
NORM_EPS = 64e-5


class Rwkv7TimeMixing(nn.Module):
    """RWKV-7's layer between tokens (Peng et al. 2025, section 4, arXiv 2503.14456). Parameters have its checkpoints' names.

    Each of r, w, k, v, a, g is made of its own mixture of a token's input and the one before. Per head, with κ̂ the normalised
    key and α = σ(a),

        S ← (Diag(e^(−0.607 σ(w))) − (κ̂ ⊙ α) κ̂ᵀ) S + k vᵀ        o = W (g ⊙ (norm(Sᵀr) + (Σ r ⊙ k ⊙ r_k) v))

    Layers behind the first mix their values with those of the first.

    Args:
        ranks: of the products that make decay, α, gate and the mixture of values: "w", "a", "g" and, behind the first
            layer, "v".
    """

    g1: Tensor
    g2: Tensor

    def __init__(self, hidden_size: int, num_heads: int, ranks: dict[str, int]):
        super().__init__()
        self.num_heads = num_heads
        self.x_rwkvag = nn.Parameter(torch.full((6, 1, hidden_size), 0.5))
        for name, rank in ranks.items():
            if name != "g":
                self.register_parameter(f"{name}0", nn.Parameter(torch.zeros(1, 1, hidden_size)))
            self.register_parameter(f"{name}1", nn.Parameter(torch.empty(rank, hidden_size)))
            self.register_parameter(f"{name}2", nn.Parameter(torch.empty(hidden_size, rank)))
            nn.init.orthogonal_(self.get_parameter(f"{name}1"), gain=0.1)
            nn.init.zeros_(self.get_parameter(f"{name}2"))
        self.mixes_values = "v" in ranks
        self.k_k = nn.Parameter(torch.ones(1, 1, hidden_size))
        self.k_a = nn.Parameter(torch.ones(1, 1, hidden_size))
        self.r_k = nn.Parameter(torch.zeros(num_heads, hidden_size // num_heads))
        self.receptance = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)
        self.ln_x = nn.GroupNorm(num_heads, hidden_size, eps=NORM_EPS)

    def forward(
        self,
        x: Float[Tensor, "b t hidden"],
        S: Float[Tensor, "n h d e"],
        last: Float[Tensor, "n hidden"],
        first_values: Float[Tensor, "b t hidden"] | None,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
        one_token: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (y (b, t, hidden), S and the last inputs behind, the values of the first layer).

        first_values: those that the first layer returned; None in the first layer itself.
        """
        before, last = token_shift(x, last, key_mask, cu_seqlens)
        mixed = x + (before - x) * self.x_rwkvag[:, None, 0, None]  # (6, b, t, hidden)
        x_r, x_w, x_k, x_v, x_a, x_g = mixed
        r, k, v = self.receptance(x_r), self.key(x_k), self.value(x_v)
        log_decay = -DECAY * torch.sigmoid(widen(self._low_rank("w", x_w, torch.tanh)))
        alpha = torch.sigmoid(self._low_rank("a", x_a))
        gate = linear(torch.sigmoid(linear(x_g, self.g1)), self.g2)
        direction = normalize(self._heads(k * self.k_k), dim=-1, eps=1e-12)
        k = k * (1 + (alpha - 1) * self.k_a)
        if first_values is not None:
            v = v + (first_values - v) * torch.sigmoid(self._low_rank("v", x_v))
        values = v if first_values is None else first_values
        r, k, v, alpha, log_decay = map(self._heads, (r, k, v, alpha, log_decay))
        inputs = (r, k, v, -direction, direction * alpha)
        if one_token:
            o, state = low_rank_delta_step(*inputs, log_decay=log_decay, scale=1.0, state=DeltaState(S))
        else:
            o, state = low_rank_delta_rule(
                *inputs, log_decay=log_decay, scale=1.0, key_mask=key_mask, cu_seqlens=cu_seqlens,
                state=DeltaState(S), return_state=True,
            )  # fmt: skip
        bonus = (r * k * self.r_k[:, None]).sum(-1, keepdim=True) * v
        y = self.ln_x(_merged(o).flatten(0, 1)).view_as(x) + _merged(bonus)
        return self.output(y * gate), state.S, last, values

    def _low_rank(self, name: str, x: Tensor, between=lambda y: y) -> Tensor:
        """Offset and a product of rank r: x₀ + W₂ f(W₁ x)."""
        down, up, offset = (self.get_parameter(f"{name}{i}") for i in (1, 2, 0))
        return offset + linear(between(linear(x, down)), up)

    def _heads(self, x: Float[Tensor, "b t hidden"]) -> Float[Tensor, "b h t d"]:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _merged(x: Float[Tensor, "b h t e"]) -> Float[Tensor, "b t hidden"]:
    return x.transpose(1, 2).flatten(2)
