"""Linformer: keys and values of all positions are projected to a few."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from experiments.baselines.interface import Baseline
from tarnn.attention import register

SHARED = ("none", "heads", "keys and values")


@register("baselines.linformer")
class Linformer(Baseline):
    """o = softmax(q (E k)ᵀ/√d) F v, where E and F (projected, length) are learned and mix positions. O(t·projected).

    For encoders, and for sequences up to the length that it was made for; a shorter one has the first columns of E and F.
    Wang et al. 2020, eq. 7 (arXiv 2006.04768).

    length: of the longest sequence. projected: the number of keys and values that are left.
    shared: "none": E and F for each head; "heads": one E and one F for all heads; "keys and values": E = F for all heads.
    (The paper's fourth way, one E for all layers, is no matter of one layer.)
    """

    encoder_only = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool,
        length: int = 1024,
        projected: int = 128,
        shared: str = "heads",
        **options: Any,
    ):
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        if shared not in SHARED:
            raise ValueError(f"shared must be one of {', '.join(map(repr, SHARED))}; got {shared!r}.")
        self.length, shape = length, (num_heads if shared == "none" else 1, projected, length)
        self.E = nn.Parameter(torch.randn(shape) / projected**0.5)
        self.F = self.E if shared == "keys and values" else nn.Parameter(torch.randn(shape) / projected**0.5)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        t = x.shape[1]
        if t > self.length:
            raise ValueError(
                f"this Linformer was made for up to {self.length} tokens; got {t}. Pass length={t} or more."
            )
        return scaled_dot_product_attention(q, self.E[..., :t] @ k, self.F[..., :t] @ v)
