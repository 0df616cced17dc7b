"""How sure an error rate is: intervals over utterances and over seeds."""

from typing import NamedTuple

import numpy as np

DRAWS = 10_000


class Interval(NamedTuple):
    mean: float
    low: float  # 2.5 % of the draws lie below
    high: float

    @property
    def decided(self) -> bool:
        """Whether all of it lies on one side of zero."""
        return self.low > 0 or self.high < 0


class Errors:
    """Edits of the same utterances by one method, (seeds, utterances); symbols: how many each utterance has.

    Intervals are a bootstrap: utterances and seeds are drawn again with replacement, 10,000 times. Two methods are compared
    on the same draws of utterances. With one seed the interval knows nothing of what another seed would do.
    """

    def __init__(self, edits: list[list[int]], symbols: list[int]):
        self.edits, self.symbols = np.array(edits, dtype=np.float64), np.array(symbols, dtype=np.float64)

    def rate(self) -> Interval:
        """Edits per symbol, in per cent."""
        return interval(self._mean(), self.draws(0))

    def above(self, other: "Errors") -> Interval:
        """By how many points this method errs more than another."""
        return interval(self._mean() - other._mean(), self.draws(0) - other.draws(1))

    def _mean(self) -> float:
        return float(100 * self.edits.sum(1).mean() / self.symbols.sum())

    def draws(self, stream: int) -> np.ndarray:
        """The rate in each draw, (draws,). stream: methods draw their seeds apart, and the utterances together."""
        seeds, utterances = self.edits.shape
        weights = np.random.default_rng(0).multinomial(utterances, np.full(utterances, 1 / utterances), DRAWS)
        chosen = np.random.default_rng([1, stream]).multinomial(seeds, np.full(seeds, 1 / seeds), DRAWS) / seeds
        return 100 * ((chosen @ self.edits) * weights).sum(1) / (weights @ self.symbols)


def interval(mean: float, draws: np.ndarray) -> Interval:
    low, high = np.percentile(draws, [2.5, 97.5])
    return Interval(mean, float(low), float(high))
