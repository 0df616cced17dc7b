"""Which process a conversation belongs to."""

import math
from collections.abc import Sequence
from hashlib import blake2b

IMBALANCE = 1.25  # a process takes at most so many times its share, before conversations go to the next one
SLACK = 3  # requests beyond that, so that a few conversations stay where they are


def owners(key: bytes, count: int) -> list[int]:
    """All processes, the one whose conversation this is first. Another count moves as few conversations as can be.

    Rendezvous hashing: each process draws a number from the key and its own, and the largest goes first.
    """
    return sorted(range(count), key=lambda index: blake2b(key, salt=index.to_bytes(8)).digest(), reverse=True)


def choose(key: bytes, loads: Sequence[int]) -> int:
    """The first of the owners that has not far more to do than the others; loads: requests in each process."""
    bound = math.ceil(IMBALANCE * (sum(loads) + 1) / len(loads)) + SLACK
    return next(index for index in owners(key, len(loads)) if loads[index] < bound)
