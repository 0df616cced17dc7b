"""The rows that are being written: the leading slice of one state, on which the fused step works in place."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from tarnn.models.images import ImageModel
from tarnn.models.state import ModelState
from tarnn.ops import KVCache, NoState
from tarnn.ops.softmax.rows import RowCaches
from tarnn.serving.model import ServedModel
from tarnn.serving.snapshot import Snapshot


class Pool:
    """States of up to `max_rows` sequences, of which the first `num_rows` are in use.

    A row that leaves is replaced by the last, so that those in use stay together. Each row of a softmax layer has a cache of its
    own, as long as its sequence may become.
    """

    def __init__(self, model: ServedModel, max_rows: int):
        self.num_rows = 0
        self._step = model.step
        state = new_state(model, max_rows)
        self._softmax = [i for i, layer in enumerate(state.layers) if isinstance(layer, KVCache)]
        self._leaves, self._spec = pytree.tree_flatten(without_caches(state))
        self._rows = [[x[i : i + 1] for x in self._leaves] for i in range(max_rows)]
        self._caches: list[list[KVCache]] = []  # of each row in use, one for each softmax layer
        self._steps: dict[int, Callable[[Tensor], None]] = {}  # for each number of rows
        self._parameters = torch.zeros(max_rows, model.step.num_outputs)
        self._parameters_of = [self._parameters[:n] for n in range(max_rows + 1)]

    @property
    def parameters(self) -> Float[Tensor, "b p"]:
        """What the model has put out last for the rows in use: a view."""
        return self._parameters_of[self.num_rows]

    def add(self, snapshot: Snapshot, room: int) -> None:
        """A sequence goes on from here, in a row behind the others. room: the tokens that it will read at most."""
        row, layers = self.num_rows, snapshot.state.layers
        if self._softmax:
            self._caches.append([x.resized(x.length + room) for x in layers if isinstance(x, KVCache)])
            self._steps.clear()
        torch._foreach_copy_(self._rows[row], pytree.tree_leaves(without_caches(snapshot.state)))
        self._parameters[row] = snapshot.logits[0]
        self.num_rows += 1

    def remove(self, row: int) -> None:
        """The last row takes this one's place."""
        last = self.num_rows - 1
        if row != last:
            torch._foreach_copy_(self._rows[row], self._rows[last])
            self._parameters[row] = self._parameters[last]
        if self._softmax:
            self._caches[row] = self._caches[last]
            self._caches.pop()
            self._steps.clear()
        self.num_rows = last

    def clear(self) -> None:
        """All leave."""
        self.num_rows = 0
        self._caches.clear()
        self._steps.clear()

    def snapshot(self, row: int, tokens: Int[np.ndarray, " t"], proven: bool = True) -> Snapshot:
        """A copy of a row, which has read these tokens. proven: as of a snapshot."""
        state = pytree.tree_unflatten([x.clone() for x in self._rows[row]], self._spec)
        if self._softmax:
            length = int(state.position[0])
            state = self._with_caches(state, [replace(x, length=length).resized(length) for x in self._caches[row]])
        return Snapshot(state, self._parameters[row : row + 1].clone(), tokens, proven)

    def step(self, ids: Int[Tensor, " b"]) -> None:
        """Each row in use reads a token."""
        if self.num_rows not in self._steps:
            self._steps[self.num_rows] = self._step.over(self._state(), self.parameters)
        self._steps[self.num_rows](ids)

    def _state(self) -> ModelState:
        """Of the rows in use: views."""
        n = self.num_rows
        state = pytree.tree_unflatten([x[:n] for x in self._leaves], self._spec)
        if not self._softmax:
            return state
        lengths = state.position.tolist()
        rows = [[replace(x, length=n) for x in caches] for n, caches in zip(lengths, self._caches)]
        return self._with_caches(state, [RowCaches(of_layer) for of_layer in zip(*rows)])

    def _with_caches(self, state: ModelState, caches: list[Any]) -> ModelState:
        layers = list(state.layers)
        for i, cache in zip(self._softmax, caches):
            layers[i] = cache
        return replace(state, layers=tuple(layers))


def new_state(
    model: ServedModel, num_rows: int, class_label: int | None = None, capacity: int | None = None
) -> ModelState:
    """The state before the first token. class_label: of all rows, for models of images that have classes. capacity: of caches."""
    made: Any = model.model
    if isinstance(made, ImageModel):
        labels = torch.full((num_rows,), class_label or 0) if made.config.num_classes else None
        return made.new_state(num_rows, capacity or 0, class_labels=labels)
    return made.new_state(num_rows, capacity or 0)


def with_room(state: ModelState, capacity: int) -> ModelState:
    """A copy whose caches hold so many tokens, or what is there, if that is more."""
    layers = tuple(x.resized(max(capacity, x.length)) if isinstance(x, KVCache) else x.clone() for x in state.layers)
    return replace(state, layers=layers, position=state.position.clone())


def without_caches(state: ModelState) -> ModelState:
    """The state with nothing in the place of each cache."""
    return replace(state, layers=tuple(NoState() if isinstance(x, KVCache) else x for x in state.layers))
