"""How long clients waited: histograms that cost less than the tokens they count."""

from bisect import bisect_left

FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
BETWEEN_TOKENS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Histogram:
    """Counts of values up to each of some bounds. For one thread: the loop's."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.sum = bounds, 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus has them: the bound, and how many values are at most as large."""
        total, pairs = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts):
            total += count
            pairs.append((bound, float(total)))
        return pairs


class Times:
    """first_tokens: seconds from a request's arrival to its first token; gaps: between two tokens of a text."""

    def __init__(self) -> None:
        self.first_tokens, self.gaps = Histogram(FIRST_TOKEN), Histogram(BETWEEN_TOKENS)
