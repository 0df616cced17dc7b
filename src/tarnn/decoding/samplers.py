"""Samplers: from the next token's logits to a token. Small closures, each `(b, vocab) -> (b, vocab)`.

The order and the arithmetic are those of `transformers`' own `generate` (temperature, top-k, top-p, min-p, then one
`torch.multinomial` over all rows), so the same seed draws the same tokens in both loops. `tarnn.load`, the commands and the
server draw the tokens of a text in another way, row by row: `tarnn.decoding.draws`.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

Warp = Callable[[Tensor], Tensor]
Sampler = Callable[[Tensor], Tensor]


def divide_by_temperature(value: float) -> Warp:
    """logits / value: below 1 sharpens the distribution, above 1 flattens it. value > 0."""
    if not value > 0:
        raise ValueError(f"temperature must be above 0 to divide by it; got {value}. Greedy choice is greedy().")
    return lambda logits: logits / value


def keep_top_k(k: int) -> Warp:
    """Keeps the k highest logits (and whatever ties with the k-th), −∞ elsewhere. k ≥ 1."""
    if k < 1:
        raise ValueError(f"top-k must be at least 1; got {k}")

    def warp(logits: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        kth = logits.topk(min(k, logits.shape[-1])).values[..., -1:]
        return logits.masked_fill(logits < kth, -torch.inf)

    return warp


def keep_top_p(p: float) -> Warp:
    """Keeps the fewest most likely tokens whose probabilities add up to at least p, −∞ elsewhere. 0 < p ≤ 1.

    Nucleus sampling (Holtzman et al., arXiv 1904.09751). Summed from the unlikely end in float32: a token
    goes when it and all that are less likely add up to at most 1 − p. The most likely one always stays.
    """
    if not 0 < p <= 1:
        raise ValueError(f"top-p must be above 0 and at most 1; got {p}")

    def warp(logits: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        ascending, index = logits.sort(dim=-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - p
        drop[..., -1] = False
        return logits.masked_fill(torch.zeros_like(drop).scatter(-1, index, drop), -torch.inf)

    return warp


def keep_min_p(p: float) -> Warp:
    """Keeps the tokens that are at least p times as likely as the most likely one, −∞ elsewhere. 0 ≤ p ≤ 1.

    Nguyen et al. 2024, arXiv 2407.01082.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"min-p must be from 0 (off) to 1; got {p}")

    def warp(logits: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        probabilities = logits.softmax(-1)
        return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), -torch.inf)

    return warp


def greedy() -> Sampler:
    """The most likely token of each row; the first of equals."""
    return lambda logits: refuse_nan(logits).argmax(-1)


def sampler(
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> Sampler:
    """Logits (b, vocab) to one token per row (b,), drawn at random.

    temperature = 0 is greedy choice; top_k = 0, top_p = 1 and min_p = 0 are off: the same as leaving them out. A
    `generator` seeded with s draws what `torch.manual_seed(s)` followed by `model.generate(do_sample=True)`
    draws; None takes torch's own. Raises ValueError for values out of range and for logits that are NaN.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (greedy) or above, and finite; got {temperature}")
    if top_k < 0:
        raise ValueError(f"top-k must be 0 (off) or above; got {top_k}")
    warps = [divide_by_temperature(temperature)] if temperature not in (0, 1) else []
    warps += [keep_top_k(top_k)] if top_k else []
    warps += [keep_top_p(top_p)] if top_p != 1 else []
    warps += [keep_min_p(min_p)] if min_p != 0 else []

    def draw(logits: Float[Tensor, "b v"]) -> Int[Tensor, " b"]:
        scores = logits.float()
        for warp in warps:
            scores = warp(scores)
        return torch.multinomial(refuse_nan(scores.softmax(-1)), 1, generator=generator).squeeze(-1)

    return draw if temperature else greedy()


def refuse_nan(scores: Tensor) -> Tensor:
    """`scores`, or ValueError: argmax would make some token or other of NaN, multinomial would abort."""
    if scores.isnan().any():
        raise ValueError(
            "the model's logits are NaN: its weights or its state have diverged. Check the checkpoint, or "
            "run it in float32."
        )
    return scores
