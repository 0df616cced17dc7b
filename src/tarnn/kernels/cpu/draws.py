"""Tokens of many rows of logits by a compiled kernel (csrc/draws): one call for all of them."""

import torch
from torch import Tensor


def run(
    logits: Tensor,
    numbers: Tensor,
    whole: Tensor,
    counts: Tensor | None,
    had: Tensor | None,
    bias: Tensor | None,
    tokens: Tensor,
    logprobs: Tensor | None = None,
    likeliest: Tensor | None = None,
    likeliest_logprobs: Tensor | None = None,
) -> None:
    """Write a token of each row of logits (b, v), float32, into `tokens` (b,), int64.

    The tables, of b rows or more, are those of `decoding.draws.RowSampling`. logprobs (b,), likeliest (b, k) int64 and
    likeliest_logprobs (b, k): None where no row wants logarithms. All contiguous, on the CPU.
    """
    torch.ops.tarnn_cpu.draw(logits, numbers, whole, counts, had, bias, tokens, logprobs, likeliest, likeliest_logprobs)
