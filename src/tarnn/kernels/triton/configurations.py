"""The shipped configurations: sizes of tiles and numbers of warps by dtype, width and GPU. The length is no part of it."""

from typing import NamedTuple

import torch

CHUNK_WITH_CHANNELS = 16
SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}  # KiB a block may take, by capability
MAX_WIDTH = 256  # of heads and features, of tiles that have to fit on a processor; wider values are taken in parts


class Configuration(NamedTuple):
    """Positions of a chunk; columns of a state's tile that a program holds: features in BF, values in BE."""

    chunk: int
    forward_values: int  # BE where all features are held: in `state_sums`, `outputs`, `value_gradients`
    backward_features: int  # BF where all values are held: in `query_gradients`, `key_gradients`
    warps: int
    stages: int  # loads that are under way at once


def padded(width: int) -> int:
    """The side of a tile that holds so many columns."""
    return max(16, 1 << (width - 1).bit_length())


def configuration(
    dtype: torch.dtype, features: int, values: int, shared: int, *, channels: bool, factors: bool, backward: bool
) -> Configuration:
    """By dtype, the state's sides and the GPU's shared memory, in KiB of a block; factors: of decays or log-weights.

    A tile of a state stays in registers, so wide heads are cut into blocks of columns, and float32, whose products are made
    of parts, into narrower ones. Found by what the compiler says of registers and spills (`benchmarks/gpu_resources.py`).
    """
    wide = max(features, values)
    narrow = dtype == torch.bfloat16
    # with factors, backward: or the weights of pairs, in parts beside a state, are spilled
    chunk = 32 if narrow or (wide <= 64 and not (backward and factors)) else 16
    if narrow and wide <= (64 if backward else 128) and not factors:
        chunk = 64
    held = 64 * (64 if wide <= 64 else 128) // (1 if narrow else 2)
    if backward and shared <= 160:  # Ada: with less of it in shared memory, more is in registers
        held //= 2
    by = lambda other, width: max(16, min(padded(width), held // padded(other)))  # noqa: E731
    return Configuration(
        CHUNK_WITH_CHANNELS if channels else chunk,
        by(features, values),
        by(values, features),
        4 if wide <= 64 else 8,
        2 if shared > 160 else 1,
    )


def values_at_once(dtype: torch.dtype, features: int) -> int:
    """Columns of v that a backward pass holds beside so many features; wider values are taken in parts."""
    return MAX_WIDTH if dtype == torch.bfloat16 or features <= 128 else 64


def stretch(length: int, programs: int, processors: int, chunk: int) -> int:
    """Positions of an item: all of a sequence where there are enough programs for the processors, else a share of it."""
    pieces = -(-processors // max(programs, 1))
    share = -(-length // pieces)
    return max(chunk, -(-share // chunk) * chunk)
