"""Hydra attention: as many heads as channels."""

from torch import Tensor
from torch.nn.functional import normalize

from experiments.baselines.interface import Baseline
from tarnn.attention import register


@register("baselines.hydra")
class HydraAttention(Baseline):
    """o_i = q_i/|q_i| ⊙ Σ_j k_j/|k_j| ⊙ v_j, where |·| is over the channels of all heads, and ⊙ is channel by channel.

    Linear attention with one channel per head, a cosine map, and no denominator: the sum grows with the number of keys. Time
    and memory O(t). Bolya et al. 2022, eq. 6–8 (arXiv 2209.07484).
    """

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        q, k, v = (y.transpose(1, 2).flatten(2) for y in (q, k, v))  # (b, t, h·d)
        written = normalize(k, dim=-1) * v  # 0 where a token is not real: v is
        sums = written.cumsum(1) if self.causal else written.sum(1, keepdim=True)
        return (normalize(q, dim=-1) * sums).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
