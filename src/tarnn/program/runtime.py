"""A program that runs: one call of a compiled kernel for a token of each row, or for a prompt.

Kernels go through the phases of the packed program (csrc/runtime). A row's bits depend on its own tokens alone: not on other
rows, on the number of threads, or on the pieces in which a prompt is read.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import add, le
from typing import NamedTuple, TypeVar, cast
from weakref import finalize

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.graph import increment_version

from tarnn.kernels.cpu import library
from tarnn.models.state import ModelState
from tarnn.ops import KVCache, State
from tarnn.program.extra import extra_rows
from tarnn.program.instructions import Program
from tarnn.program.packing import VERSION, Packed, pack
from tarnn.program.pending import MOST_ROWS, Pending, logged, read_again
from tarnn.program.state import advanced, by_row, check_state, lengths_of, new_state, tensors_of
from tarnn.program.tokens import check_tokens, rows_of

AnyState = TypeVar("AnyState", bound=ModelState)
ROWS = 2**10  # tokens that one call of the kernel reads


class Checked(NamedTuple):
    """A state that was checked: its layers and their tensors, and of each row how many keys it has, and has room for."""

    layers: tuple[State, ...] = ()
    tensors: Sequence[Tensor] = ()
    lengths: Sequence[int] = ()
    room: Sequence[int] = ()

    def fits(self, state: ModelState, counts: Sequence[int]) -> bool:
        """Say whether a state is this one, and takes so many tokens of each row; False: it has to be checked."""
        position = state.position
        if state.layers is not self.layers or position.shape != (len(counts),) or position.dtype != torch.int64:
            return False
        if not self.lengths:
            return True
        return position.tolist() == self.lengths and all(map(le, map(add, self.lengths, counts), self.room))


class Unavailable(RuntimeError):
    """Why programs can't run compiled here: one sentence, without its full stop."""


class OtherVersion(Unavailable):
    """The compiled kernels are of another version than this package: they would have to be compiled again."""


def check_kernels() -> None:
    """Raise Unavailable where the compiled kernels can't run programs."""
    if not library.available():
        raise Unavailable(f"the compiled kernels can't be used: {library.status().why}")
    if (version := getattr(torch.ops.tarnn_cpu, "program_version", int)()) != VERSION:
        raise OtherVersion(
            f"the compiled kernels read programs of version {version}, and this package writes version {VERSION}: compile them "
            "again (make install)"
        )


class Runtime:
    """A packed program, opened.

        runtime = Runtime(program, weights="int8")
        logits, state = runtime.prefill(prompt_ids, runtime.new_state(1, room))
        logits, state = runtime(token_ids, state)

    weights: float32 | bfloat16 | int8 | int4, how the matrices of products are kept; sums and states are float32. With int8 and
    int4 the rows that a product reads become bytes too; the head is int8 then, a small one bfloat16, and exact products keep
    their digits. Several threads may call it at once, each with a state of its own. packed: the program as `pack` returned it
    before; only its outline is read then.

    Raises Unavailable, a RuntimeError, where the kernels can't be used, and ValueError for an unknown format.
    """

    def __init__(self, program: Program, weights: str = "float32", packed: Packed | None = None):
        check_kernels()
        self.program, self.weights = program, weights
        with torch.no_grad():
            self.packed: Packed = pack(program, weights) if packed is None else packed
        self.handle = torch.ops.tarnn_cpu.program_open(*self.packed)
        finalize(self, torch.ops.tarnn_cpu.program_close, self.handle)
        self.num_outputs = program.num_outputs
        self.vocab_size = len(self.packed.tables[0])
        self._checked = Checked()  # the last state; replaced as a whole, so that threads don't mix them

    @property
    def nbytes(self) -> int:
        """The bytes of the packed program, its tables included."""
        return sum(x.nbytes for x in (self.packed.numbers, self.packed.block, *self.packed.tables))

    @property
    def num_phases(self) -> int:
        """Phases that a call goes through."""
        return int(torch.ops.tarnn_cpu.program_phases(self.handle))

    @property
    def can_undo(self) -> bool:
        """Whether the kernel can keep tokens out of all states of this program; else a pass works on a copy of them."""
        return bool(torch.ops.tarnn_cpu.program_log_width(self.handle) >= 0)

    def new_state(self, rows: int, capacity: int = 0, cache_dtype: torch.dtype | None = None) -> ModelState:
        """Make the state before the first token. capacity: tokens that each row's keys and values have room for."""
        return new_state(self.program, rows, capacity, cache_dtype=cache_dtype or torch.float32)

    def check(self, state: ModelState) -> None:
        """Raise ValueError for anything but the state of one row, as this program makes it."""
        check_state(_by_row(state), self.program, 1)

    def __call__(
        self, token_ids: Int[Tensor, " b"], state: AnyState, *, inplace: bool = False
    ) -> tuple[Float[Tensor, "b p"], AnyState]:
        """One token per row, (b,): (logits (b, p) float32; the state after it).

        Raises ValueError for anything but tokens of the vocabulary, beyond the last position, and for a state of another kind;
        nothing is written then.
        """
        ids = whole(token_ids)
        state = _by_row(state if inplace else state.clone())
        counts = [1] * len(ids)
        checked = self._check(state, counts)
        logits = torch.empty(len(ids), self.num_outputs)
        self.run(ids, state, checked.tensors, logits)
        return logits, self._after(state, checked, counts)

    def prefill(
        self,
        token_ids: Int[Tensor, "b t"],
        state: AnyState,
        attention_mask: Tensor | None = None,
        *,
        inplace: bool = False,
        every: bool = False,
    ) -> tuple[Float[Tensor, "b p"] | Float[Tensor, "b t p"], AnyState]:
        """Read tokens (b, t): (logits (b, p) after each row's last token; the state after it), to the bit what t steps give.

        attention_mask (b, t): 0 for padding, anywhere; a row has one token at least. every: logits after each token, (b, t, p),
        zeros at padding. Memory is that of `ROWS` tokens, whatever t is. Raises ValueError as a step does.
        """
        ids, real = check_tokens(token_ids, attention_mask, self.vocab_size)
        b, t = ids.shape
        state = _by_row(state if inplace else state.clone())
        counts = [t] * b if real is None else real.sum(-1).tolist()
        checked = self._check(state, counts)
        self._check_length(state.position + torch.tensor(counts))
        out = self.read(ids, real, state, checked.tensors, every=every)
        return out, self._after(state, checked, counts)

    def verify(self, token_ids: Int[Tensor, "b t"], state: ModelState, *, inplace: bool = False) -> Pending:
        """Read tokens (b, t) of which only the first of each row may stay: logits after each, and what accepts them.

        The logits, and the state after `accept`, are to the bit what steps give. Raises ValueError as `prefill` does.
        """
        ids, _ = check_tokens(token_ids, None, self.vocab_size)
        if ids.shape[1] > MOST_ROWS:
            raise ValueError(f"a pass verifies at most {MOST_ROWS} tokens of a row; got {ids.shape[1]}.")
        state = _by_row(state if inplace else state.clone())
        if not self.can_undo:
            return read_again(self, ids, state)
        counts = [ids.shape[1]] * len(ids)
        checked = self._check(state, counts)
        self._check_length(state.position + ids.shape[1])
        rows = rows_of(ids, None)
        extra = self._extra(state, rows.positions(state.position), rows.sequences)
        after = partial(self._after, state, checked)
        return logged(self, ids, state, checked.tensors, extra, after)

    def with_hidden(
        self, token_ids: Int[Tensor, " t"], state: AnyState, beside: Float[Tensor, "t m"] | None = None
    ) -> tuple[Float[Tensor, "1 p"], Float[Tensor, "t n"], AnyState]:
        """Read tokens of one row, in place: (logits after the last one; what the head reads of each; the state after them).

        beside: rows that are added to the tokens (`embed(rows=True)`). Memory is that of t tokens. Raises as a step does.
        """
        ids, _ = check_tokens(token_ids[None], None, self.vocab_size)
        state, counts, rows = _by_row(state), [ids.shape[1]], rows_of(ids, None)
        checked = self._check(state, counts)
        self._check_length(state.position + counts[0])
        extra = self._extra(state, rows.positions(state.position), rows.sequences) if beside is None else beside
        out = torch.empty(1, self.num_outputs)
        hidden = torch.empty(counts[0], self.program.instructions[-1].inputs[0].size)
        self._run(rows.ids, state, checked.tensors, out, extra, rows.starts, hidden=hidden)
        return out, hidden, self._after(state, checked, counts)

    def over(self, state: ModelState, logits: Float[Tensor, "b p"]) -> Callable[[Int[Tensor, " b"]], None]:
        """One token per row, again and again in the same memory: a function of tokens (b,), int64 and contiguous.

        It writes into this state and these logits; the state is looked at here, once. Positions count the keys: a step raises
        ValueError where a cache is full, and writes nothing.
        """
        if any(isinstance(x, KVCache) for x in state.layers):
            raise ValueError(
                "a state whose rows share a key/value cache changes with each token; give each its own: RowCaches."
            )
        tensors = self._check(state, [0] * len(state.position)).tensors

        def step(token_ids: Tensor) -> None:
            self.run(token_ids, state, tensors, logits)

        return step

    def run(self, ids: Tensor, state: ModelState, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Read one token of each row into `out`. tensors: those of the state, by row, which nobody checks here."""
        self._run(ids, state, tensors, out, self._extra(state, state.position))

    def read(
        self, ids: Tensor, real: Tensor | None, state: ModelState, tensors: Sequence[Tensor], *, every: bool = False
    ) -> Tensor:
        """Read checked tokens (b, t), of which those that are `real` count: what `prefill` returns. tensors: as in `run`."""
        b, t = ids.shape
        last = torch.empty(b, self.num_outputs)
        logits = torch.zeros(b, t, self.num_outputs) if every else None
        for start in range(0, t, piece := max(1, ROWS // max(b, 1))):
            part = slice(start, start + piece)
            rows = rows_of(ids[:, part], None if real is None else real[:, part])
            out = last if logits is None else last.new_empty(len(rows.ids), self.num_outputs)
            keep = None if logits is not None or bool((rows.starts.diff() > 0).all()) else last.clone()
            extra = self._extra(state, rows.positions(state.position), rows.sequences)
            self._run(rows.ids, state, tensors, out, extra, rows.starts, every)
            if logits is not None:
                logits[:, part][rows.real] = out
            elif keep is not None:  # a row that had no token here keeps what its last one gave
                last = torch.where((rows.starts.diff() > 0)[:, None], last, keep)
        return last if logits is None else logits

    def _check(self, state: ModelState, counts: Sequence[int]) -> Checked:
        """Return what is known of a state; ValueError where the kernel can't write it, or `counts` tokens have no room.

        A state that goes on from the last one is known by the identity of its layers.
        """
        if (checked := self._checked).fits(state, counts):  # read once, as another thread may replace it
            return checked
        check_state(state, self.program, len(counts), counts)
        return Checked(state.layers, tensors_of(state, self.program), *lengths_of(state))

    def _after(self, state: AnyState, checked: Checked, counts: Sequence[int]) -> AnyState:
        if checked.lengths:
            state = cast(AnyState, advanced(state, counts))
            checked = checked._replace(layers=state.layers, lengths=[*map(add, checked.lengths, counts)])
        self._checked = checked
        return state

    def _run(
        self,
        ids: Tensor,
        state: ModelState,
        tensors: Sequence[Tensor],
        out: Tensor,
        extra: Tensor | None,
        starts: Tensor | None = None,
        every: bool = False,
        hidden: Tensor | None = None,
    ) -> None:
        try:
            torch.ops.tarnn_cpu.program_run(
                self.handle, ids, state.position, starts, tensors, extra, every, out, hidden
            )
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[0]) from error
        increment_version((state.position, *tensors))  # so that autograd sees what was written

    def _extra(self, state: ModelState, positions: Tensor, sequences: Tensor | None = None) -> Tensor | None:
        """Rows that are added to the embeddings: each sequence's class, and positions by a formula. sequences: of each token."""
        condition = getattr(state, "condition", None)
        if condition is not None and sequences is not None:
            condition = condition[sequences]
        if self.program.instructions[0].numbers["sinusoidal"]:
            self._check_length(positions + 1)
        return extra_rows(self.program, positions, condition)

    def _check_length(self, ends: Tensor) -> None:
        limit = self.program.limit
        if limit is not None and ends.numel() and int(ends.max()) > limit:
            raise ValueError(f"this model has {limit:,} positions; a sequence would have {int(ends.max()):,}.")


def _by_row(state: AnyState) -> AnyState:
    return cast(AnyState, by_row(state)) if any(isinstance(x, KVCache) for x in state.layers) else state


def whole(token_ids: Tensor) -> Tensor:
    """Tokens (b,) as the kernel reads them: int64, in a row."""
    if token_ids.ndim != 1 or token_ids.is_floating_point() or token_ids.dtype == torch.bool:
        raise ValueError(
            f"a step takes token ids (b,), whole numbers; got {tuple(token_ids.shape)} of {token_ids.dtype}."
        )
    return token_ids.long().contiguous()
