"""Nyströmformer: softmax attention by way of a few landmarks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from experiments.baselines.interface import Baseline
from tarnn.attention import register


@register("baselines.nystrom")
class NystromAttention(Baseline):
    """o = softmax(q k̃ᵀ) A⁺ softmax(q̃ kᵀ) v + conv(v), A = softmax(q̃ k̃ᵀ); q̃ and k̃ are the means of segments of the sequence.

    All products are divided by √d. The inverse A⁺ is what an iteration has come to after six steps. With no more tokens
    than landmarks, and a converged inverse, it is softmax attention. For encoders. O(t·landmarks).
    Xiong et al. 2021, eq. 13–14 and algorithm 1 (arXiv 2102.03902).

    landmarks: segments, of almost equal numbers of tokens. conv_kernel: width, odd, of the filter of each head's values along
    time (the paper's skip connection); 0: none.
    """

    encoder_only = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool,
        landmarks: int = 64,
        iterations: int = 6,
        conv_kernel: int = 65,
        **options: Any,
    ):
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        self.landmarks, self.iterations = landmarks, iterations
        self.conv = nn.Parameter(torch.randn(num_heads, 1, conv_kernel, 1) / conv_kernel) if conv_kernel else None

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        segments = self.segments(real).to(q.dtype)[:, None]  # (b, 1, m, t)
        sizes = segments.sum(-1, keepdim=True)
        used = sizes > 0  # (b, 1, m, 1): rows of fewer tokens have fewer landmarks
        q_means, k_means = (segments @ y / sizes.clamp(min=1) for y in (q, k))  # (b, h, m, d)
        to_landmarks = softmax(q, k_means, used.mT)  # (b, h, t, m)
        between = softmax(q_means, k_means, used.mT)
        to_keys = softmax(q_means, k, real[:, None, None])  # (b, h, m, t)
        o = to_landmarks @ (self.inverse(between, used & used.mT) @ (to_keys @ v))
        if self.conv is not None:
            o = o + conv2d(v, self.conv, padding=(self.conv.shape[2] // 2, 0), groups=self.num_heads)
        return o

    def segments(self, real: Tensor) -> Tensor:
        """(b, m, t): whether a token belongs to a landmark. Each row's real tokens are divided in order."""
        rank, number = torch.arange(real.shape[1], device=real.device), real.sum(-1, keepdim=True)
        index = (rank * self.landmarks // number.clamp(min=1)).clamp(max=self.landmarks - 1)
        return ((index[..., None] == torch.arange(self.landmarks, device=real.device)) & real[..., None]).mT

    def inverse(self, a: Tensor, used: Tensor) -> Tensor:
        """The pseudo-inverse of a (b, h, m, m), by an iteration of third order; landmarks that are not used stand apart."""
        dtype, a = a.dtype, a.to(torch.promote_types(a.dtype, torch.float32)).masked_fill(~used, 0)
        one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        norms = a.sum(-1).amax(-1) * a.sum(-2).amax(-1)  # of rows and columns: together at least the squared norm
        z = torch.where(used, a.mT / norms.clamp(min=1e-9)[..., None, None], one)
        a = torch.where(used, a, one)
        for _ in range(self.iterations):
            az = a @ z
            z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
        return z.to(dtype)


def softmax(q: Tensor, k: Tensor, known: Tensor) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~known, torch.finfo(q.dtype).min).softmax(-1)
