"""Draw the token of a row in float64, slowly: the definition of the compiled kernel in csrc/draws.

    x = logits, less likely where a token was had (penalties), plus a bias
    e_i = exp((x_i − max x) / temperature), 0 where a filter drops the token
    the token is the first i with e_0 + … + e_i > u·Σ e, u uniform in [0, 1)

The filters are those of `samplers`, in their order: top-k with whatever ties with the k-th; top-p of what is left, where of
equals the first is kept first; min-p, relative to the likeliest.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tarnn.decoding.philox import uniform

Logits = Float[np.ndarray, " v"]


class Way(NamedTuple):
    """How one row draws. position: of the token in its answer.

    counts (v,), how often each token was written, had (v,), whether it was written or read, and bias (v,): None where they
    don't matter.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int
    position: int
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    counts: Int[np.ndarray, " v"] | None = None
    had: np.ndarray | None = None
    bias: Logits | None = None


def drawn(logits: Logits, way: Way) -> int:
    """The token; −1 where the logits are no distribution: one is NaN or +∞, or all are −∞."""
    scores = penalized(logits, way)
    if not (np.isfinite(top := scores.max()) and is_distribution(logits)):
        return -1
    if way.temperature == 0:
        return int(scores.argmax())
    parts = np.exp((scores - top) / way.temperature) * kept(scores, way)
    sums = parts.cumsum()
    above = sums > uniform(way.seed, way.choice, way.position) * sums[-1]
    return int(above.argmax())


def is_distribution(logits: Logits) -> bool:
    return bool(np.isfinite(logits.max()))


def penalized(logits: Logits, way: Way) -> Logits:
    """The logits that are drawn from, float64."""
    scores = logits.astype(np.float64)
    if way.had is not None:
        less = np.where(scores < 0, scores * way.repetition_penalty, scores / way.repetition_penalty)
        scores = np.where(way.had, less, scores)
    if way.counts is not None:
        scores = scores - way.frequency_penalty * way.counts - way.presence_penalty * (way.counts > 0)
    return scores if way.bias is None else scores + way.bias


def kept(scores: Logits, way: Way) -> np.ndarray:
    """Which tokens the filters leave, bool (v,)."""
    left = np.ones(len(scores), bool)
    if 0 < way.top_k < len(scores):
        left &= scores >= np.sort(scores)[-way.top_k]
    parts = np.exp((scores - scores.max()) / way.temperature) * left
    if way.top_p < 1:
        order = np.argsort(-parts, kind="stable")
        more_likely = np.append(0.0, parts[order].cumsum()[:-1])
        left[order[more_likely >= way.top_p * parts.sum()]] = False
    return left & (parts >= way.min_p)


def logarithms(logits: Logits) -> Logits:
    """Natural logarithms of the probabilities at temperature 1, without penalties, float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    return wide - np.log(np.exp(wide).sum())


def likeliest(logits: Logits, k: int) -> Int[np.ndarray, " k"]:
    """The k likeliest tokens, the first of equals first."""
    return np.argsort(-logits, kind="stable")[:k]
