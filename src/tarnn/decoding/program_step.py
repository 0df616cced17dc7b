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
from jaxtyping import Float, Int
from torch import Tensor

from tarnn.decoding.caches import check_room, longer, widened
from tarnn.decoding.state_check import UnfitState, check_state, tensors_of
from tarnn.models.inputs import check_length
from tarnn.models.state import ModelState
from tarnn.ops import KVCache, State as LayerState
from tarnn.ops.softmax.cache import RowCaches
from tarnn.program.runtime import Runtime, whole
from tarnn.program.state import new_state, tensors_of as tensors_by_row
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
    """Step by the runtime of a model's program, on states as models make them, or as the runtime does.

    num_outputs: logits or parameters per token. new_row: one row's state of each layer.
    """

    def __init__(self, model: Any, runtime: Runtime):
        self.model, self.runtime = model, runtime
        self.weights, self.num_outputs, self.nbytes = runtime.weights, runtime.num_outputs, runtime.nbytes
        self.new_row = one_row(runtime)
        self._narrow = any(x.dtype != torch.float32 for x in model.parameters())
        self._caches = [i for i, x in enumerate(self.new_row) if isinstance(x, KVCache)]
        # the last state; replaced as a whole, as several threads may look at it
        self._known = Known(0, (), None, [], [])

    def new_state(self, rows: int, capacity: int = 0, cache_dtype: torch.dtype | None = None) -> ModelState:
        """Make the state before the first token, in which rows have keys and values of their own (`RowCaches`)."""
        return self.runtime.new_state(rows, capacity, cache_dtype)

    def __call__(
        self, token_ids: Int[Tensor, " b"], state: State, *, inplace: bool = False
    ) -> tuple[Float[Tensor, "b p"], State]:
        """One token per row, (b,): (parameters or logits (b, p) float32; the state after it).

        Raises ValueError for anything but whole numbers (b,), for a token that is not in the vocabulary, beyond the
        model's last position, and UnfitState for a state that is not of this model's kind; nothing is written then.
        """
        state = self.widened(state if inplace else state.clone())
        ids = whole(token_ids)
        state, known = self._prepared(state, len(ids), 1)
        out = torch.empty(len(ids), self.num_outputs, device="cpu")
        self._run(ids, state, known.by_row, out)
        return out, self._after(state, known, 1)

    def check(self, state: ModelState) -> None:
        """Raise UnfitState for anything but the state of one row, as this model makes it."""
        check_state(state, self.new_row, 1)

    def over(self, state: ModelState, parameters: Float[Tensor, "b p"]) -> Callable[[Int[Tensor, " b"]], None]:
        """One token per row, again and again in the same memory: a function of tokens (b,), int64 and contiguous.

        It writes into this state and these parameters, as `__call__` does in place; the state is looked at here, once. Where rows
        have caches of their own (`RowCaches`), their positions count the keys: a step raises ValueError where one is full, and
        writes nothing. Raises UnfitState as a step does, and ValueError for a `KVCache`, whose length would have to be counted.
        """
        if any(isinstance(x, KVCache) for x in state.layers):
            raise ValueError(
                "a state with one length for all rows of a key/value cache changes with each token; call the step with each new "
                "state, or give each row a cache of its own: RowCaches."
            )
        tensors = self._prepared(state, len(state.position), 0)[1].by_row

        def step(token_ids: Tensor) -> None:
            self._run(token_ids, state, tensors, parameters)

        return step

    def prefill(
        self,
        token_ids: Int[Tensor, "b t"],
        state: State,
        attention_mask: Tensor | None = None,
        *,
        inplace: bool = False,
        every: bool = False,
    ) -> tuple[Float[Tensor, "b p"] | Float[Tensor, "b t p"], State]:
        """Read tokens (b, t): (parameters or logits (b, p) after each row's last token, float32; the state after it).

        To the last bit what t steps give, in any number of pieces. attention_mask (b, t): 0 for padding, anywhere; a row has one
        token at least. every: parameters after each token, (b, t, p), zeros at padding. Memory is that of `runtime.ROWS` tokens,
        whatever t is.

        Raises ValueError as a step does; nothing is written then.
        """
        state = self.widened(state if inplace else state.clone())
        ids, real = check_tokens(token_ids, attention_mask, self.runtime.vocab_size)
        b, t = ids.shape
        check_state(state, self.new_row, b)
        check_room(state, t)
        counts = torch.full((b,), t) if real is None else real.sum(-1)
        if real is not None and any(isinstance(x, RowCaches) for x in state.layers):
            raise ValueError("rows with caches of their own take no masks; read each by itself.")
        self._check_length(state.position + counts - 1)
        state, known = self._prepared(state, b, t, None if real is None else counts)
        out = self.runtime.read(ids, real, state, known.by_row, every=every)
        return out, self._after(state, known, t)

    def widened(self, state: State) -> State:
        """Return a state of a model in 16 bits as the step keeps it: the last inputs in float32, keys and values not in float16.

        Steps and prompts take either; a state that is written in place, by `over`, has to be one of these. Other states: itself.
        """
        if not self._narrow or state.layers is self._known.layers:
            return state
        return replace(state, layers=tuple(map(widened, state.layers)))

    def _prepared(self, state: State, rows: int, slots: int, counts: Tensor | None = None) -> tuple[State, Known]:
        """Return the state with each row's keys in one piece, and what is known of it.

        slots: how much longer caches become; counts: tokens of each row among them, None: as many.
        """
        known, position = self._known, state.position
        fits = known.rows == rows == len(position) and position.dtype == torch.int64 and position.is_contiguous()
        if not (fits and (state.layers is known.layers or _same_tensors(state.layers, known.tensors))):
            check_state(state, self.new_row, rows)
            fits = False
        starts = self._first_slots(state, slots, counts) if self._caches else None
        if fits and starts == known.starts:
            return state, known
        if starts is not None:
            moved = (in_one_piece(x, position.tolist(), starts) if isinstance(x, KVCache) else x for x in state.layers)
            state = replace(state, layers=tuple(moved))
        by_row = tensors_by_row(in_views(state, starts), self.runtime.program)
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


def in_views(state: ModelState, starts: list[int] | None) -> ModelState:
    """Give each row views of the cache that all rows share, from its first key on; None: there is no such cache."""
    if starts is None:
        return state

    def of_rows(layer: LayerState) -> LayerState:
        if not isinstance(layer, KVCache):
            return layer
        return RowCaches(tuple(map(KVCache, views_of(layer.k, starts), views_of(layer.v, starts))))

    return replace(state, layers=tuple(map(of_rows, state.layers)))


def views_of(x: Tensor, starts: list[int]) -> list[Tensor]:
    """Return keys or values of each row (1, g, capacity, d) from its first one on.

    A view is as long as the row, so its end lies in what follows the row, which nothing reads or writes: `check_room` sees to it.
    """
    shape, strides, width = (1, *x.shape[1:]), x.stride(), x.shape[3]
    return [
        x.as_strided(shape, strides, x.storage_offset() + i * strides[0] + start * width)
        for i, start in enumerate(starts)
    ]
