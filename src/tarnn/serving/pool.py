"""The rows that are being written: the leading slice of one state, on which the fused step works in place."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from tarnn.models.state import ModelState
from tarnn.ops import KVCache, State
from tarnn.serving.caches import PoolCaches, grows, without_caches
from tarnn.serving.model import ServedModel
from tarnn.serving.plain_memory import copies
from tarnn.serving.snapshot import Snapshot


class Pool:
    """States of up to `max_rows` sequences, of which the first `num_rows` are in use.

    A row that leaves is replaced by the last, so that those in use stay together. logits: those that the model computed last for
    each row, (max_rows, vocab_size). Of hybrids, each row has key/value caches of its own.
    """

    def __init__(self, model: ServedModel, max_rows: int):
        self.num_rows = 0
        self._step = model.step
        state = new_state(model, max_rows, capacity=0)
        self._caches = PoolCaches(model.model.config.max_position_embeddings) if grows(state) else None
        self._grows = [isinstance(x, KVCache) for x in state.layers]
        self._leaves, self._spec = pytree.tree_flatten(without_caches(state))
        self._steps: dict[int, Callable[[Tensor], None]] = {}
        self._rows = [[x[i : i + 1] for x in self._leaves] for i in range(max_rows)]
        self.logits = torch.zeros(max_rows, model.step.num_outputs)
        self._logits_of = [self.logits[:n] for n in range(max_rows + 1)]

    def add(self, snapshot: Snapshot) -> None:
        """A sequence goes on from here, in a row behind the others."""
        row = self.num_rows
        torch._foreach_copy_(self._rows[row], pytree.tree_leaves(without_caches(snapshot.state)))
        self.logits[row] = snapshot.logits[0]
        self.num_rows += 1
        if self._caches is not None:
            self._caches.add(snapshot.state)
            self._steps.clear()

    def remove(self, row: int) -> None:
        """The last row takes this one's place."""
        last = self.num_rows - 1
        if row != last:
            torch._foreach_copy_(self._rows[row], self._rows[last])
            self.logits[row] = self.logits[last]
        self.num_rows = last
        if self._caches is not None:
            self._caches.remove(row)
            self._steps.clear()

    def clear(self) -> None:
        """All rows leave."""
        self.num_rows = 0
        if self._caches is not None:
            self._caches.clear()
            self._steps.clear()

    def snapshot(self, row: int, tokens: Int[np.ndarray, " t"], proven: bool = True) -> Snapshot:
        """A copy of a row, which has read these tokens. proven: as of a snapshot."""
        *leaves, logits = copies([*self._rows[row], self.logits[row : row + 1]])
        state = pytree.tree_unflatten(leaves, self._spec)
        if self._caches is not None:
            state = self._with(self._caches.of_row(row), state)
        return Snapshot(state, logits, tokens, proven)

    def step(self, ids: Int[Tensor, " b"]) -> None:
        """Each row in use reads a token."""
        n, caches = self.num_rows, self._caches
        if caches is not None and caches.grow():
            self._steps.clear()
        if n not in self._steps:
            state = pytree.tree_unflatten([x[:n] for x in self._leaves], self._spec)
            if caches is not None:
                state = self._with(caches.of_pool(), state)
            self._steps[n] = self._step.over(state, self.logits[:n])
        self._steps[n](ids)
        if caches is not None:
            caches.count()

    def _with(self, caches: Sequence[State], state: ModelState) -> ModelState:
        """The state with these in the places of its caches."""
        each = iter(caches)
        return replace(state, layers=tuple(next(each) if has else x for has, x in zip(self._grows, state.layers)))

    def logits_now(self) -> Float[Tensor, "b v"]:
        """Return the last logits of the rows in use: a view."""
        return self._logits_of[self.num_rows]


def new_state(model: ServedModel, num_rows: int, *, capacity: int = 0) -> ModelState:
    """Return the state before the first token. capacity: tokens that its caches have room for."""
    state: ModelState = model.model.new_state(num_rows, capacity)
    return state
