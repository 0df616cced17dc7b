"""States on which the model works: of a prompt being read, and of all rows, the leading slice of one state."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from tarnn.decoding.caches import caches_of, copy_of
from tarnn.models.state import ModelState
from tarnn.ops import KVCache, NoState, State
from tarnn.ops.softmax.cache import RowCaches
from tarnn.serving.model import ServedModel
from tarnn.serving.request import Request
from tarnn.serving.snapshot import Snapshot, Tokens, copies
from tarnn.serving.stream import RequestQueue

EVERY = 1024  # tokens after which a state is kept
LEAST_ROOM = 256  # tokens more than a row has when its caches are made, or a quarter of those that it has


class Prefill:
    """A request whose prompt has been read up to `done`. tokens: what it begins from, and its prompt. proven: as of a snapshot.

    The state is its own from its first piece on; until then it is a snapshot that others may share, but for one from a store.
    """

    def __init__(self, queue: RequestQueue):
        self.queue = queue
        self.request: Request = queue.request
        begin = self.request.begin
        parts = [self.request.prompt] if begin is None else [begin.tokens, self.request.prompt]
        self.tokens: Tokens = np.concatenate(parts).astype(np.int32, copy=False)
        self.done = 0
        self._at: Snapshot | None = None
        self._state: ModelState | None = None
        self._begun = False
        self.proven = begin is None or begin.proven
        self._marks = self._places()

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done

    def start(self, found: Snapshot | None) -> None:
        """Begin from `found`, a state of a beginning of the tokens, or from the request's own, whichever is deeper."""
        begin = None if self.request.begin is None else replace(self.request.begin, alone=False)
        best = max((x for x in (begin, found) if x is not None), key=lambda x: len(x.tokens), default=None)
        self._at, self._begun = best, True
        self.done = self.queue.num_cached = 0 if best is None else len(best.tokens)

    @property
    def begun(self) -> bool:
        return self._begun

    def read(self, model: ServedModel, most: int) -> Iterator[Snapshot]:
        """Read up to `most` tokens; yield where it is at each place on the way whose state is worth keeping.

        What is yielded holds until the next piece is read: whoever keeps it takes a copy.
        """
        if self._state is None:
            room = room_for(len(self.tokens), model.model.config.max_position_embeddings)
            self._state = new_state(model, 1, capacity=room) if self._at is None else owned(self._at, room)
        end = min(self.done + most, len(self.tokens))
        while self.done < end:
            while self._marks and self._marks[-1] <= self.done:
                self._marks.pop()
            stop = min(end, self._marks[-1] if self._marks else end)
            ids = torch.from_numpy(self.tokens[self.done : stop].astype(np.int64))[None]
            logits, self._state = model.step.prefill(ids, self._state, inplace=True)
            self.done = stop
            self._at = Snapshot(self._state, logits, self.tokens[:stop], self.proven, alone=True)
            if self._marks and stop == self._marks[-1]:
                yield self._at

    def end(self) -> Snapshot:
        """Return the state at the end of the prompt; nothing is read after that."""
        assert self._at is not None
        return self._at

    def _places(self) -> list[int]:
        """Return places before the prompt's end whose states are worth keeping, the last one first."""
        length = len(self.tokens)
        places = {*range(EVERY, length, EVERY), *self.request.boundaries}
        return sorted((x for x in places if 0 < x < length), reverse=True)


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
        self._grows = [x.grows for x in state.layers]
        self._by_row = any(isinstance(x, RowCaches) for x in state.layers)
        self._leaves, self._spec = pytree.tree_flatten(without_caches(state))
        self._steps: dict[int, Callable[[Tensor], None]] = {}
        self._rows = [[x[i : i + 1] for x in self._leaves] for i in range(max_rows)]
        self.logits = torch.zeros(max_rows, model.step.num_outputs)
        self._logits_of = [self.logits[:n] for n in range(max_rows + 1)]

    def add(self, snapshot: Snapshot) -> None:
        """Add a row that goes on from a snapshot."""
        row = self.num_rows
        torch._foreach_copy_(self._rows[row], pytree.tree_leaves(without_caches(snapshot.state)))
        self.logits[row] = snapshot.logits[0]
        self.num_rows += 1
        if self._caches is not None:
            self._caches.add(snapshot)
            self._steps.clear()

    def remove(self, row: int) -> None:
        """Remove a row, whose place the last one takes."""
        last = self.num_rows - 1
        if row != last:
            torch._foreach_copy_(self._rows[row], self._rows[last])
            self.logits[row] = self.logits[last]
        self.num_rows = last
        if self._caches is not None:
            self._caches.remove(row)
            self._steps.clear()

    def clear(self) -> None:
        """Remove all rows."""
        self.num_rows = 0
        if self._caches is not None:
            self._caches.clear()
            self._steps.clear()

    def snapshot(self, row: int, tokens: Int[np.ndarray, " t"], proven: bool = True) -> Snapshot:
        """Return a row, which has read these tokens. proven: see Snapshot.

        It is a copy but for the keys, to which no step writes again. Nothing may be written behind them before the row has left.
        """
        *leaves, logits = copies([*self._rows[row], self.logits[row : row + 1]])
        state = pytree.tree_unflatten(leaves, self._spec)
        if self._caches is not None:
            caches = self._caches.of_row(row)
            state = self._with([RowCaches((x,)) for x in caches] if self._by_row else caches, state)
        return Snapshot(state, logits, tokens, proven)

    def step(self, ids: Int[Tensor, " b"]) -> None:
        """Let each row in use read a token."""
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
        """Put these caches into a state without any."""
        each = iter(caches)
        return replace(state, layers=tuple(next(each) if has else x for has, x in zip(self._grows, state.layers)))

    def logits_now(self) -> Float[Tensor, "b v"]:
        """Return the last logits of the rows in use: a view."""
        return self._logits_of[self.num_rows]


class PoolCaches:
    """The caches of a pool's rows, a tuple per row: one for each layer of softmax. All rows read a token in each step.

    limit: tokens that a sequence can have at most; None: any number.
    """

    def __init__(self, limit: int | None):
        self._limit = limit
        self._rows: list[tuple[KVCache, ...]] = []
        self._began: list[int] = []  # how long a row would have been when nothing had been read yet
        self._steps = 0
        self._full_at = 0  # the step for which a row has no room

    def add(self, snapshot: Snapshot) -> None:
        caches = [cache for x in snapshot.state.layers for cache in caches_of(x)]
        if not snapshot.alone or caches[0].capacity == caches[0].length:
            caches = [x.resized(room_for(x.length, self._limit)) for x in caches]
        self._rows.append(tuple(caches))
        self._began.append(caches[0].length - self._steps)
        self._find_full()

    def remove(self, row: int) -> None:
        """Remove a row, whose place the last one takes."""
        self._rows[row], self._began[row] = self._rows[-1], self._began[-1]
        self._rows.pop()
        self._began.pop()
        self._find_full()

    def clear(self) -> None:
        self._rows.clear()
        self._began.clear()

    def count(self) -> None:
        """Count a token that all rows have read."""
        self._steps += 1

    def grow(self) -> bool:
        """Make room for a token in each row; return True if a cache was replaced."""
        if not self._rows or self._steps < self._full_at:
            return False
        for row, caches in enumerate(self._rows):
            length = self._length(row)
            if length >= caches[0].capacity:
                self._rows[row] = tuple(
                    replace(x, length=length).resized(room_for(length, self._limit)) for x in caches
                )
        self._find_full()
        return True

    def of_row(self, row: int) -> list[KVCache]:
        """Return a row's caches as they are now, in the memory of the row."""
        return [replace(x, length=self._length(row)) for x in self._rows[row]]

    def of_pool(self) -> list[State]:
        """Return for each layer the caches of all rows, as the fused step takes them."""
        rows = [[replace(x, length=self._length(i)) for x in caches] for i, caches in enumerate(self._rows)]
        return [RowCaches(tuple(of_layer)) for of_layer in zip(*rows)]

    def _length(self, row: int) -> int:
        return self._began[row] + self._steps

    def _find_full(self) -> None:
        self._full_at = min((x[0].capacity - began for x, began in zip(self._rows, self._began)), default=0)


def room_for(length: int, limit: int | None) -> int:
    """Return how many tokens a sequence's caches get room for. limit: tokens that it can have; None: any number."""
    more = length + max(LEAST_ROOM, length // 4)
    return more if limit is None else max(length, min(more, limit))


def owned(at: Snapshot, room: int) -> ModelState:
    """Return a state to be written to: a copy, but for caches that are nobody else's and have room."""
    if not at.alone or any(x.capacity < room for layer in at.state.layers for x in caches_of(layer)):
        return copy_of(at.state, room)
    layers = (x if x.grows else x.clone() for x in at.state.layers)
    return replace(at.state, layers=tuple(layers), position=at.state.position.clone())


def new_state(model: ServedModel, num_rows: int, *, capacity: int = 0) -> ModelState:
    """Return the state before the first token. capacity: tokens that its caches have room for."""
    state: ModelState = model.model.new_state(num_rows, capacity)
    return state


def grows(state: ModelState) -> bool:
    """Return True if the state has caches."""
    return any(x.grows for x in state.layers)


def without_caches(state: ModelState) -> ModelState:
    """Return the state without its caches."""
    return replace(state, layers=tuple(NoState() if x.grows else x for x in state.layers))
