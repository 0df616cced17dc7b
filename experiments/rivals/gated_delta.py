"""Gated DeltaNet: not a rival of 2020, but what linear attention has become."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from experiments.rivals.interface import Rival
from tarnn import delta_rule, short_convolution
from tarnn.attention import TokenDecay, register


@register("rivals.gated_delta")
class GatedDeltaNet(Rival):
    """S ← e^g S, S ← S + β k (v − Sᵀk)ᵀ, o = W (norm(Sᵀq) ⊙ silu(gate)); g and β are computed from each token.

    q, k and v come from a short convolution with silu; q and k have length 1. The recurrence is tarnn's own op. For decoders.
    Yang et al. 2024 (arXiv 2412.06464).

    kernel: tokens that the convolution sees.
    """

    decoder_only = True

    def __init__(self, hidden_size: int, num_heads: int, *, causal: bool, kernel: int = 4, **options: Any):
        super().__init__(hidden_size, num_heads, causal=causal, **{**options, "qk_norm": False})
        width = num_heads * self.head_dim
        self.conv = nn.Parameter(torch.randn(3, width, kernel) / kernel)
        self.beta_proj, self.decay = nn.Linear(hidden_size, num_heads), TokenDecay(hidden_size, num_heads)
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.norm = nn.RMSNorm(self.head_dim, eps=1e-6)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        q, k, v = (
            self.heads(short_convolution(y.transpose(1, 2).flatten(2), weight, activation="silu"), self.num_heads)
            for y, weight in zip((q, k, v), self.conv)
        )
        beta = self.beta_proj(x).sigmoid().mT.to(v.dtype)
        o = delta_rule(q, k, v, beta, log_decay=self.decay(x), normalize_qk=True)
        return self.norm(o) * silu(self.heads(self.gate_proj(x), self.num_heads))
