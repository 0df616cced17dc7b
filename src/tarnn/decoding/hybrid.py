"""Hybrid attention in the fused step: what a plan says of it beyond other attention, and its states."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.cpu.products import Block
from tarnn.ops.softmax.cache import KVCache
from tarnn.ops.state import State
from tarnn.ops.states import HybridState

REACHES = ("features", "window", "exact")  # of a key head, as csrc/model_step/stack.h has them
NO_END = 2**62


class Hybrid(NamedTuple):
    """The keys that each key head attends to: sinks and a window, and beyond them features, nothing, or all keys.

    The features of queries are those of `Attention`; heads are counted among those that reach features.
    """

    window: int
    sinks: int
    reach: tuple[str, ...]  # of each key head, one of `REACHES`
    far_until: int | None = None  # queries from this place on see no features
    log_features: bool = False  # features are logarithms, and each has a maximum of its own
    keys: Any = None  # the features of keys
    far_bias: Tensor | None = None  # (h,)  added to the log-weights of features

    @property
    def num_estimated(self) -> int:
        """How many key heads see features."""
        return self.reach.count("features")

    def write(self, block: Block) -> None:
        """Into the block of weights and its plan, before the features of queries and keys."""
        block.numbers(self.window + self.sinks, self.sinks)
        block.place(torch.tensor([NO_END if self.far_until is None else self.far_until]))
        block.numbers(self.log_features, *(REACHES.index(x) for x in self.reach))

    def new_states(self, d: int, num_features: int, rows: int, capacity: int, device: str = "cpu") -> tuple[State, ...]:
        """A state for each reach that there is, in the order of `REACHES`."""
        states: list[State] = []
        for reach in filter(self.reach.count, REACHES):
            cache = KVCache.empty(rows, self.reach.count(reach), capacity, d, dtype=torch.float32, device=device)
            if reach == "exact":
                states.append(cache)
                continue
            f, logs = (num_features, self.log_features) if reach == "features" else (0, False)
            rings: dict[str, Any] = {"window": self.window, "sinks": self.sinks, "log_features": logs}
            states.append(HybridState.zeros(cache.k, cache.v, f, **rings))
        return tuple(states)
