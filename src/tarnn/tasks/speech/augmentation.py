"""Recordings drawn anew in every epoch: at another tempo, with parts masked, in batches of similar length.

What is drawn depends on the seed, the epoch and the example alone. So a run that was stopped goes on with the same draws,
and many processes share them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tarnn.data.examples import EpochSampler, PaddedRows
from tarnn.tasks.speech.ctc import places_needed

TEMPO = 0.1  # a recording becomes shorter or longer by at most this part
BLUR = 0.1  # of lengths, each time that they are sorted


def at_tempo(frames: np.ndarray, count: int) -> np.ndarray:
    """Stretch frames (t, n) to `count` frames: each is interpolated between the two nearest ones in time.

    Speed perturbation (Ko et al. 2015) of frames, not of samples: the pitch stays.
    """
    places = np.clip((np.arange(count) + 0.5) * len(frames) / count - 0.5, 0, len(frames) - 1)
    before = places.astype(np.int64)
    after = np.minimum(before + 1, len(frames) - 1)
    share = (places - before).astype(frames.dtype)[:, None]
    return frames[before] * (1 - share) + frames[after] * share


def masked(frames: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Set two stretches of time and a band of each frame's numbers to zero, which is their mean.

    SpecAugment (Park et al. 2019, arXiv 1904.08779) in small. A stretch has up to 20 frames and at most an eighth of all; the
    band has up to a fifth of the numbers.
    """
    frames, (count, numbers) = frames.copy(), frames.shape
    for _ in range(2):
        start, end = stretch(count, min(20, count // 8), draw)
        frames[start:end] = 0
    start, end = stretch(numbers, numbers // 5, draw)
    frames[:, start:end] = 0
    return frames


def stretch(count: int, longest: int, draw: np.random.Generator) -> tuple[int, int]:
    """Draw the start and the end of a stretch of 0 to `longest` among `count`."""
    width = int(draw.integers(0, longest + 1))
    start = int(draw.integers(0, count - width + 1))
    return start, start + width


class AugmentedRows(PaddedRows):
    """Rows with input_features and labels, whose frames differ from epoch to epoch. Number i + e·len(rows) is row i in epoch e.

    subsampling: frames per place. A recording is never made too short for its labels.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], fill: Mapping[str, float], subsampling: int, seed: int):
        super().__init__(rows, fill)
        self.subsampling, self.seed = subsampling, seed

    def __getitems__(self, index: Sequence[int]) -> dict[str, Tensor]:
        rows = [self.drawn(*divmod(int(i), len(self.rows))) for i in index]
        return PaddedRows(rows, self.fill).__getitems__(range(len(rows)))

    def drawn(self, epoch: int, i: int) -> dict[str, Any]:
        """Return row i as it is in this epoch."""
        row, draw = self.rows[i], np.random.default_rng([self.seed, epoch, i])
        frames = row["input_features"]
        least = (places_needed(row["labels"]) - 1) * self.subsampling + 1
        count = max(round(len(frames) * draw.uniform(1 - TEMPO, 1 + TEMPO)), min(least, len(frames)))
        return {**row, "input_features": masked(at_tempo(frames, count), draw)}


class SimilarLengths(EpochSampler):
    """The order of AugmentedRows: examples of similar length side by side, so that batches need little padding.

    lengths: of the rows. together: how many make a batch. Lengths are blurred anew in every epoch, so batches differ; their
    order is random.
    """

    def __init__(self, lengths: Sequence[int], num_samples: int, seed: int, together: int):
        super().__init__(len(lengths), num_samples, seed)
        self.lengths, self.together = np.asarray(lengths, dtype=np.float64), together

    def epoch(self, epoch: int) -> np.ndarray:
        draw, count = np.random.default_rng([self.seed, epoch]), self.num_examples
        order = np.argsort(self.lengths * draw.uniform(1 - BLUR, 1 + BLUR, count))
        order = np.roll(order, int(draw.integers(count)))  # else the first batch would be the shortest in every epoch
        first = -epoch * count % self.together  # what fills the last batch of the epoch before
        pieces = np.split(order, range(first, count, self.together))
        draw.shuffle(middle := pieces[1:-1])
        return np.concatenate([pieces[0], *middle, *pieces[1:][-1:]]) + epoch * count
