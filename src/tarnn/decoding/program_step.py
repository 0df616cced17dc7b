"""The step of a program on states as models make them: one key/value cache for all rows, with padding in it or without.

A program's runtime takes each row's keys and values by themselves, as many as the row has seen tokens. Here they are views of the
memory that all rows share. With padding, each row's keys lie at the end of what is used of its cache:

    row of 5 tokens    k k k k k . .
    row of 3 tokens    – – k k k . .      its view begins at its first key

so a step of the model can go on, and so can one of the program, at any token.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import is_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tarnn.decoding.caches import check_room, longer, widened
from tarnn.decoding.state_check import UnfitState, check_state, tensors_of
from tarnn.models.inputs import check_length
from tarnn.models.state import ModelState
from tarnn.ops import KVCache, State as LayerState
from tarnn.ops.softmax.cache import RowCaches
from tarnn.program.runtime import Runtime, whole
from tarnn.program.state import new_state
from tarnn.program.tokens import check_tokens

State = TypeVar("State", bound=ModelState)


class Known(NamedTuple):
    """A checked state: its rows and layers, where rows' keys begin, its tensors, and these as the runtime takes them."""

    rows: int
    layers: tuple[LayerState, ...]
    starts: list[int] | None
    tensors: list[Tensor]
    by_row: list[Tensor]


class ProgramStep:
    """Step by the runtime of a model's program, on states as `FusedStep` takes them."""

    def __init__(self, model: Any, runtime: Runtime):
        self.model, self.runtime = model, runtime
        self.expected = one_row(runtime)
        self._narrow = any(x.dtype != torch.float32 for x in model.parameters())
        self._caches = [i for i, x in enumerate(self.expected) if isinstance(x, KVCache)]
        self._known = Known(
            0, (), None, [], []
        )  # the last state; replaced as a whole, as several threads may look at it

    def __call__(self, token_ids: Tensor, state: State, *, inplace: bool = False) -> tuple[Tensor, State]:
        state = self.widened(state if inplace else state.clone())
        ids = whole(token_ids)
        state, known = self._prepared(state, len(ids), 1)
        out = torch.empty(len(ids), self.runtime.num_outputs)
        self._run(ids, state, known.by_row, out)
        return out, self._after(state, known, 1)

    def over(self, state: ModelState, parameters: Tensor) -> Callable[[Tensor], None]:
        tensors = self._prepared(state, len(state.position), 0)[1].by_row

        def step(token_ids: Tensor) -> None:
            self._run(token_ids, state, tensors, parameters)

        return step

    def prefill(
        self, token_ids: Tensor, state: State, attention_mask: Tensor | None, *, inplace: bool, every: bool
    ) -> tuple[Tensor, State]:
        state = self.widened(state if inplace else state.clone())
        ids, real = check_tokens(token_ids, attention_mask, self.runtime.vocab_size)
        b, t = ids.shape
        check_state(state, self.expected, b)
        check_room(state, t)
        counts = torch.full((b,), t) if real is None else real.sum(-1)
        if real is not None and any(isinstance(x, RowCaches) for x in state.layers):
            raise ValueError("rows with caches of their own take no masks; read each by itself.")
        self._check_length(state.position + counts - 1)
        state, known = self._prepared(state, b, t, None if real is None else counts)
        out = self.runtime.read(ids, real, state, known.by_row, every=every)
        return out, self._after(state, known, t)

    def widened(self, state: State) -> State:
        return replace(state, layers=tuple(map(widened, state.layers))) if self._narrow else state

    def _prepared(self, state: State, rows: int, slots: int, counts: Tensor | None = None) -> tuple[State, Known]:
        """Return the state with each row's keys in one piece, and what is known of it.

        slots: how much longer caches become; counts: tokens of each row among them, None: as many.
        """
        known, position = self._known, state.position
        fits = known.rows == rows == len(position) and position.dtype == torch.int64 and position.is_contiguous()
        if not (fits and (state.layers is known.layers or _same_tensors(state.layers, known.tensors))):
            check_state(state, self.expected, rows)
            fits = False
        starts = self._first_slots(state, slots, counts) if self._caches else None
        if fits and starts == known.starts:
            return state, known
        if starts is not None:
            moved = (in_one_piece(x, position.tolist(), starts) if isinstance(x, KVCache) else x for x in state.layers)
            state = replace(state, layers=tuple(moved))
        by_row = self._by_row(state.layers, starts)
        tensors = [x for layer in state.layers for x in tensors_of(layer)]
        self._known = known = Known(rows, state.layers, starts, tensors, by_row)
        return state, known

    def _first_slots(self, state: ModelState, slots: int, counts: Tensor | None) -> list[int] | None:
        """Where each row's keys begin in caches that all rows share; None without such. ValueError for caches without room."""
        check_room(state, slots)
        lengths = {x.length for i in self._caches if isinstance(x := state.layers[i], KVCache)}
        if not lengths:
            return None
        if len(lengths) > 1:
            raise UnfitState("the caches of a state's layers differ in length.")
        end = lengths.pop() + slots
        ends = (state.position + (slots if counts is None else counts)).tolist()
        return [end - x for x in ends]

    def _by_row(self, layers: Sequence[LayerState], starts: list[int] | None) -> list[Tensor]:
        tensors: list[Tensor] = []
        for spec in self.runtime.program.states:
            layer = layers[spec.layer]
            if isinstance(layer, RowCaches):
                tensors += [getattr(x, spec.name) for x in layer.rows]
            elif isinstance(layer, KVCache) and starts is not None:
                tensors += views_of(getattr(layer, spec.name), starts)
            else:
                tensors.append(getattr(layer, spec.name))
        return tensors

    def _after(self, state: State, known: Known, slots: int) -> State:
        if not self._caches:
            return state
        state = replace(state, layers=longer(state.layers, slots))
        self._known = known._replace(layers=state.layers)
        return state

    def _run(self, ids: Tensor, state: ModelState, tensors: list[Tensor], out: Tensor) -> None:
        try:
            self.runtime.run(ids, state, tensors, out)
        except ValueError:
            self._check_length(state.position)
            raise

    def _check_length(self, positions: Tensor) -> None:
        if self.runtime.program.limit is not None and len(positions):
            check_length(self.model.config, 1, int(positions.max()))


def _same_tensors(layers: Sequence[LayerState], known: list[Tensor]) -> bool:
    tensors = [x for layer in layers for x in tensors_of(layer)]
    return len(tensors) == len(known) and all(map(is_, tensors, known))


def one_row(runtime: Runtime) -> list[LayerState]:
    """Make each layer's state of one row, as models make it."""
    layers = new_state(runtime.program, 1, 1).layers
    return [x.rows[0] if isinstance(x, RowCaches) else x for x in layers]


def in_one_piece(cache: KVCache, positions: list[int], starts: list[int]) -> KVCache:
    """Move each row's keys to where a view from its `starts` has them in one piece.

    A mask has all else. Raises UnfitState for a row that has not as many keys as it has seen tokens.
    """
    length, mask = cache.length, cache.mask
    if mask is None and any(x != length for x in positions):
        raise UnfitState(
            f"rows have as many keys as they have seen tokens; got {length} keys at positions {positions}."
        )
    if mask is None and not any(starts):
        return cache
    cache = with_slack(cache, max(starts))
    for i, (n, start) in enumerate(zip(positions, starts, strict=True)):
        kept = torch.arange(length) if mask is None else mask[i, :length].nonzero()[:, 0]
        if len(kept) != n:
            raise UnfitState(f"rows have as many keys as they have seen tokens; got {len(kept)} keys at position {n}.")
        if n and kept.tolist() != list(range(start, start + n)):
            for x in (cache.k, cache.v):
                x[i, :, start : start + n] = x[i, :, kept]
    return replace(cache, mask=torch.arange(cache.capacity) >= torch.tensor(starts)[:, None])


def with_slack(cache: KVCache, slots: int) -> KVCache:
    """Return the cache, or a copy, in memory that goes on behind it for so many keys of one head."""
    return replace(cache, k=_with_slack(cache.k, slots), v=_with_slack(cache.v, slots))


def _with_slack(x: Tensor, slots: int) -> Tensor:
    needed = (x.storage_offset() + x.numel() + slots * x.shape[3]) * x.itemsize
    if x.untyped_storage().nbytes() >= needed:
        return x
    return x.new_zeros(x.numel() + slots * x.shape[3])[: x.numel()].view(x.shape).copy_(x)


def views_of(x: Tensor, starts: list[int]) -> list[Tensor]:
    """Return keys or values of each row (1, g, capacity, d) from its first one on.

    A view is as long as the row, so its end lies in what follows the row, which nothing reads or writes: `check_room` sees to it.
    """
    shape, strides, width = (1, *x.shape[1:]), x.stride(), x.shape[3]
    return [
        x.as_strided(shape, strides, x.storage_offset() + i * strides[0] + start * width)
        for i, start in enumerate(starts)
    ]
