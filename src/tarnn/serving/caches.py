"""Key/value caches of hybrids: of a sequence alone, with the room it needs; and of the rows of a pool, each with its own."""

from dataclasses import replace

from tarnn.models.state import ModelState
from tarnn.ops import KVCache, NoState, State
from tarnn.ops.softmax.rows import RowCaches

LEAST_ROOM = 256  # tokens more than a row has when its caches are made, or a quarter of those that it has


def grows(state: ModelState) -> bool:
    """Whether it has caches."""
    return any(isinstance(x, KVCache) for x in state.layers)


def copy_of(state: ModelState, capacity: int = 0) -> ModelState:
    """A copy of one sequence's state, whose caches hold what is there, or `capacity` tokens where those are more."""
    if not grows(state):
        return state.clone()
    layers = (x.resized(max(x.length, capacity)) if isinstance(x, KVCache) else x.clone() for x in state.layers)
    return replace(state, layers=tuple(layers), position=state.position.clone())


def without_caches(state: ModelState) -> ModelState:
    """All of it that does not grow."""
    return replace(state, layers=tuple(NoState() if isinstance(x, KVCache) else x for x in state.layers))


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

    def add(self, state: ModelState) -> None:
        caches = [x for x in state.layers if isinstance(x, KVCache)]
        self._rows.append(tuple(x.resized(self._room_for(x.length)) for x in caches))
        self._began.append(caches[0].length - self._steps)
        self._find_full()

    def remove(self, row: int) -> None:
        """The last row takes this one's place."""
        self._rows[row], self._began[row] = self._rows[-1], self._began[-1]
        self._rows.pop()
        self._began.pop()
        self._find_full()

    def clear(self) -> None:
        self._rows.clear()
        self._began.clear()

    def count(self) -> None:
        """All rows have read a token."""
        self._steps += 1

    def grow(self) -> bool:
        """Make room for a token in each row; whether some cache is another one now."""
        if not self._rows or self._steps < self._full_at:
            return False
        for row, caches in enumerate(self._rows):
            length = self._length(row)
            if length >= caches[0].capacity:
                self._rows[row] = tuple(replace(x, length=length).resized(self._room_for(length)) for x in caches)
        self._find_full()
        return True

    def of_row(self, row: int) -> list[KVCache]:
        """Copies of a row's caches, with room for what is there."""
        length = self._length(row)
        return [replace(x, length=length).resized(length) for x in self._rows[row]]

    def of_pool(self) -> list[State]:
        """What the fused step takes: for each layer the caches of all rows."""
        rows = [[replace(x, length=self._length(i)) for x in caches] for i, caches in enumerate(self._rows)]
        return [RowCaches(tuple(of_layer)) for of_layer in zip(*rows)]

    def _length(self, row: int) -> int:
        return self._began[row] + self._steps

    def _room_for(self, length: int) -> int:
        more = length + max(LEAST_ROOM, length // 4)
        return more if self._limit is None else max(length, min(more, self._limit))

    def _find_full(self) -> None:
        self._full_at = min((x[0].capacity - began for x, began in zip(self._rows, self._began)), default=0)
