"""Sliding window + sinks: the attention of recent hybrid models, and the exact part of tarnn's hybrid attention."""

from typing import Any

from torch import Tensor

from experiments.baselines.interface import Baseline
from tarnn import hybrid_attention
from tarnn.attention import register


@register("baselines.window")
class WindowAndSinks(Baseline):
    """Softmax attention to the keys at a distance of less than `window` and to the first `sinks` tokens; O(t·window).

    Xiao et al. 2023 (arXiv 2309.17453). This row is tarnn's own op, `hybrid_attention` without features.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, *, causal: bool, window: int = 128, sinks: int = 4, **options: Any
    ):
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        self.window, self.sinks = window, sinks

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        mask = None if real.all() else real
        return hybrid_attention(q, k, v, causal=self.causal, window=self.window, sinks=self.sinks, key_mask=mask)
