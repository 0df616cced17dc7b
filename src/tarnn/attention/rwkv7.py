"""The time mixing of RWKV-7: attention whose state obeys a delta rule of low rank."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from tarnn.attention.token_shift import token_shift
from tarnn.numerics import widen
from tarnn.ops import DeltaState, low_rank_delta_rule, low_rank_delta_step

DECAY = math.exp(-0.5)  # of the logarithm of a channel per token, at most
NORM_EPS = 64e-5


class Vectors(NamedTuple):
    """The vectors that RWKV-7 computes per token: per head, except the gate of the output."""

    r: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b h t d"]
    v: Float[Tensor, "b h t e"]
    direction: Float[Tensor, "b h t d"]  # κ̂
    alpha: Float[Tensor, "b h t d"]
    log_decay: Float[Tensor, "b h t d"]
    gate: Float[Tensor, "b t width"]


class Rwkv7TimeMixing(nn.Module):
    """RWKV-7's layer between tokens (Peng et al. 2025, section 4, arXiv 2503.14456). Parameters have its checkpoints' names.

    Each of r, w, k, v, a, g is made of its own mixture of a token's input and the one before. Per head, with κ̂ the normalised
    key and α = σ(a),

        S ← (Diag(e^(−0.607 σ(w))) − (κ̂ ⊙ α) κ̂ᵀ) S + k vᵀ        o = W (g ⊙ (norm(Sᵀr) + (Σ r ⊙ k ⊙ r_k) v))

    Layers after the first mix their values with those of the first.

    Args:
        ranks: of the products that make decay, α, gate and the mixture of values: "w", "a", "g" and, after the first
            layer, "v".
        head_dim: hidden_size / num_heads by default.
    """

    g1: Tensor
    g2: Tensor

    def __init__(self, hidden_size: int, num_heads: int, ranks: dict[str, int], head_dim: int | None = None):
        super().__init__()
        self.num_heads = num_heads
        width = num_heads * (hidden_size // num_heads if head_dim is None else head_dim)
        self.x_rwkvag = nn.Parameter(torch.empty(6, 1, hidden_size))
        for name, rank in ranks.items():
            if name != "g":
                self.register_parameter(f"{name}0", nn.Parameter(torch.empty(1, 1, width)))
            self.register_parameter(f"{name}1", nn.Parameter(torch.empty(rank, hidden_size)))
            self.register_parameter(f"{name}2", nn.Parameter(torch.empty(width, rank)))
        self.mixes_values = "v" in ranks
        self.k_k = nn.Parameter(torch.empty(1, 1, width))
        self.k_a = nn.Parameter(torch.empty(1, 1, width))
        self.r_k = nn.Parameter(torch.empty(num_heads, width // num_heads))
        self.receptance = nn.Linear(hidden_size, width, bias=False)
        self.key = nn.Linear(hidden_size, width, bias=False)
        self.value = nn.Linear(hidden_size, width, bias=False)
        self.output = nn.Linear(width, hidden_size, bias=False)
        self.ln_x = nn.GroupNorm(num_heads, width, eps=NORM_EPS)
        if not self.k_k.is_meta:
            for name, x in self.initial_weights().items():
                self.get_parameter(name).data.copy_(x)

    def initial_weights(self) -> dict[str, Tensor]:
        """Make the parameters of a layer that has learned nothing, but for its projections.

        Mixtures go from the token before, in the last channel, to each token's own; decays from 1,000 tokens to 9.
        """
        weights = {name: torch.zeros(x.shape, device="cpu") for name, x in self.named_parameters(recurse=False)}
        size, width = self.x_rwkvag.shape[-1], self.k_k.shape[-1]
        powers = torch.tensor([0.1, 0.45, 0.35, 0.35, 0.45, 0.1], device="cpu")  # of r, w, k, v, a, g
        weights["x_rwkvag"] += 1 - (torch.arange(size, device="cpu") / size) ** powers[:, None, None]
        weights["w0"] += torch.linspace(-6.5, -1.5, width, device="cpu")
        weights["k_k"] += 0.85
        weights["k_a"] += 1
        for name, x in weights.items():
            if name.endswith("2"):  # the other factor is zero: each product is its offset, the gate ½ Σ g₂
                nn.init.orthogonal_(x, gain=0.1)
        return weights

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
        """Return (y (b, t, hidden), S and the last inputs after, the values of the first layer).

        first_values: those that the first layer returned; None in the first layer itself.
        """
        before, last = token_shift(x, last, key_mask, cu_seqlens)
        vectors = self.vectors(x, before, first_values)
        o, S = self.mix(vectors, S, key_mask=key_mask, cu_seqlens=cu_seqlens, one_token=one_token)
        values = _merged(vectors.v) if first_values is None else first_values
        return self.finish(o, vectors, key_mask), S, last, values

    def vectors(
        self, x: Float[Tensor, "b t hidden"], before: Float[Tensor, "b t hidden"], first_values: Tensor | None = None
    ) -> Vectors:
        """Make them of the tokens' inputs and of those before."""
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
        r, k, v, alpha, log_decay = map(self._heads, (r, k, v, alpha, log_decay))
        return Vectors(r, k, v, direction, alpha, log_decay, gate)

    def mix(
        self,
        vectors: Vectors,
        S: Float[Tensor, "n h d e"],
        *,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        one_token: bool = False,
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence: what each token reads, (b, h, t, e), and S after it. inplace: of one token."""
        r, k, v, direction, alpha, log_decay, _ = vectors
        inputs, state = (r, k, v, -direction, direction * alpha), DeltaState(S)
        if one_token:
            o, state = low_rank_delta_step(*inputs, log_decay=log_decay, scale=1.0, state=state, inplace=inplace)
        else:
            o, state = low_rank_delta_rule(
                *inputs, log_decay=log_decay, scale=1.0, key_mask=key_mask, cu_seqlens=cu_seqlens,
                state=state, return_state=True,
            )  # fmt: skip
        return o, state.S

    def finish(
        self, o: Float[Tensor, "b h t d"], vectors: Vectors, key_mask: Tensor | None = None
    ) -> Float[Tensor, "b t hidden"]:
        """Norm what was read, add each real token's own value, gate and project."""
        bonus = (vectors.r * vectors.k * self.r_k[:, None]).sum(-1, keepdim=True) * vectors.v
        if key_mask is not None:
            bonus = bonus.masked_fill(~key_mask[:, None, :, None], 0.0)
        y = self.ln_x(_merged(o).flatten(0, 1)).view_as(vectors.gate) + _merged(bonus)
        return self.output(y * vectors.gate)

    def _low_rank(self, name: str, x: Tensor, between=lambda y: y) -> Tensor:
        """Offset and a product of rank r: x₀ + W₂ f(W₁ x)."""
        down, up, offset = (self.get_parameter(f"{name}{i}") for i in (1, 2, 0))
        return offset + linear(between(linear(x, down)), up)

    def _heads(self, x: Float[Tensor, "b t hidden"]) -> Float[Tensor, "b h t d"]:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _merged(x: Float[Tensor, "b h t e"]) -> Float[Tensor, "b t hidden"]:
    return x.transpose(1, 2).flatten(2)
