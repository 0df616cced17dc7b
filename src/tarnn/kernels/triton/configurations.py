"""The shipped configurations: sizes of tiles and numbers of warps by dtype, width and GPU. The length is no part of it."""

from typing import NamedTuple

import torch

CHUNK_WITH_CHANNELS = 16
MAX_WIDTH = 256  # features, head dim, value width: of tiles that have to fit on a processor


class Configuration(NamedTuple):
    """Positions of a chunk; columns of a state's tile that a program holds: features in BF, values in BE."""

    chunk: int
    forward_values: int  # BE where all features are held: in `state_sums`, `outputs`, `value_gradients`
    backward_features: int  # BF where all values are held: in `query_gradients`, `key_gradients`
    warps: int


def padded(width: int) -> int:
    """The side of a tile that holds so many columns."""
    return max(16, 1 << (width - 1).bit_length())


def configuration(dtype: torch.dtype, features: int, values: int, channels: bool) -> Configuration:
    """By the state's sides: a tile of it stays in registers, so wide heads are cut into blocks of columns."""
    chunk = CHUNK_WITH_CHANNELS if channels else 64 if dtype == torch.bfloat16 else 32
    held = 128 * 64 if max(features, values) > 64 else 64 * 64
    by = lambda other, width: max(16, min(padded(width), held // padded(other)))  # noqa: E731
    return Configuration(chunk, by(features, values), by(values, features), 4)


def stretch(length: int, programs: int, processors: int, chunk: int) -> int:
    """Positions of an item: all of a sequence where there are enough programs for the processors, else a share of it."""
    pieces = -(-processors // max(programs, 1))
    share = -(-length // pieces)
    return max(chunk, -(-share // chunk) * chunk)
