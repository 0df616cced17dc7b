"""A delta rule of low rank: the recurrence of RWKV-7, with a short convolution in place of its token shift."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize, silu

from experiments.baselines.interface import Baseline
from tarnn.attention import register
from tarnn.ops import low_rank_delta_rule, short_convolution


@register("baselines.low_rank_delta")
class LowRankDelta(Baseline):
    """S ← (Diag(e^w) − (κ ⊙ α) κᵀ) S + κ vᵀ, o = W (norm(Sᵀq) ⊙ silu(gate)), with κ = k / |k|, w ≤ 0 and α in 0…1.

    Each channel of each token has its own decay w and its own strength α of what is taken back. q, k and v come from a short
    convolution of `kernel` tokens with silu. The recurrence is tarnn's own op. For decoders.
    Peng et al. 2025, eq. 17 (arXiv 2503.14456).
    """

    decoder_only = True

    def __init__(self, hidden_size: int, num_heads: int, *, causal: bool, kernel: int = 4, **options: Any):
        super().__init__(hidden_size, num_heads, causal=causal, **{**options, "qk_norm": False})
        width = num_heads * self.head_dim
        self.conv = nn.Parameter(torch.randn(3, width, kernel) / kernel)
        self.decay_proj, self.alpha_proj = nn.Linear(hidden_size, width), nn.Linear(hidden_size, width)
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.norm = nn.RMSNorm(self.head_dim, eps=1e-6)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        q, k, v = (
            self.heads(short_convolution(y.transpose(1, 2).flatten(2), weight, activation="silu"), self.num_heads)
            for y, weight in zip((q, k, v), self.conv)
        )
        direction = normalize(k, dim=-1)
        decay, alpha, gate = (
            self.heads(p(x), self.num_heads) for p in (self.decay_proj, self.alpha_proj, self.gate_proj)
        )
        log_decay = logsigmoid(decay + 4.0)  # at first a state keeps 98 % per token
        o = low_rank_delta_rule(q, direction, v, -direction, direction * alpha.sigmoid(), log_decay=log_decay)
        return self.norm(o) * silu(gate)
