"""A model by the runtime of its program, as `tarnn.load` runs it; and by the program's definition."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tarnn.decoding.opened import Opened
from tarnn.errors import UserError
from tarnn.laws.ways import LOGITS, STATE, Stages
from tarnn.models.state import ModelState
from tarnn.program.definition import new_states, run
from tarnn.program.extra import extra_rows
from tarnn.program.instructions import Program
from tarnn.program.recurrent import RowState
from tarnn.program.runtime import Runtime
from tarnn.program.state import tensors_of


class Running:
    """The `Runner` of an opened model, whose step is the runtime of a program."""

    special: frozenset[int] = frozenset()

    def __init__(self, opened: Opened, runtime: Runtime, name: str):
        self.runtime, self.program, self.name = runtime, runtime.program, name
        self.vocab_size, self.limit = opened.config
        self.pad_id = opened.pad_id if opened.pad_id < self.vocab_size else 0
        self.room, self.watching = 0, False  # tokens that states have room for

    @property
    def exact(self) -> bool:
        """Whether all ways give the same bits, as compiled programs promise."""
        return hasattr(self.runtime, "packed")

    def whole(self, ids: Tensor, mask: Tensor | None = None) -> Stages:
        return self.read(ids, None, mask)[0]

    def read(self, ids: Tensor, past: Any = None, mask: Tensor | None = None) -> tuple[Stages, Any]:
        state = self.runtime.new_state(len(ids), max(self.room, ids.shape[1])) if past is None else past
        if ids.shape[1] == 1 and past is not None:
            last, state = self.runtime(ids[:, 0], state)
            logits = last[:, None]
        else:
            new = None if mask is None else mask[:, -ids.shape[1] :]
            logits, state = self.runtime.prefill(ids, state, new, every=True)
        return self._states(state) | {LOGITS: list(logits)}, state

    def packed(self, rows: Sequence[Tensor], told: str) -> Stages:
        raise ValueError("the runtime takes each text as a row of its own.")

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.watching = True
        try:
            yield
        finally:
            self.watching = False

    def exactly(self, ids: Tensor) -> Stages:
        return defined(self.program, ids, torch.float64, states=self.watching)

    def _states(self, state: ModelState) -> Stages:
        if not self.watching:
            return {}
        rows = [state.select(torch.tensor([i])) for i in range(len(state.position))]
        parts = [[x[0] for x in tensors_of(row, self.program)] for row in rows]
        return states_of(self.program, parts, state.position.tolist())


def states_of(program: Program, rows: Sequence[Sequence[Tensor]], lengths: Sequence[int]) -> Stages:
    """Return each layer's state as a stage: for each row its numbers, of caches so many keys and values."""
    stages: Stages = {}
    for i, kind in enumerate(program.layers):
        specs = [(j, x) for j, x in enumerate(program.states) if x.layer == i]
        for row, n in zip(rows, lengths, strict=True) if specs else ():
            parts = [row[j] if x.grows is None else row[j].narrow(x.grows, 0, n) for j, x in specs]
            numbers = torch.cat([x.double().flatten() for x in parts])
            stages.setdefault(f"{STATE}layer {i} ({kind})", []).append(numbers[None])
    return stages


def defined(program: Program, ids: Tensor, dtype: torch.dtype, *, states: bool = False) -> Stages:
    """Compute rows by the program's definition. Raises UserError for a program without weights of its own."""
    if not program.instructions[-1].weights:
        raise UserError("a packed file has no weights that the definition could take.")
    before, (b, t) = new_states(program, len(ids), dtype=dtype), ids.shape
    extra = extra_rows(program, torch.arange(t).repeat(b), None)
    extra = None if extra is None else extra.view(b, t, -1)
    logits, after = run(program, ids, before, positions=[0] * b, extra=extra, dtype=dtype)
    kept = states_of(program, after, [t] * b) if states else {}
    return kept | {LOGITS: list(logits)}


def first_unlike(program: Program, outputs: dict[str, Tensor], limits: dict[str, float], ids: Tensor) -> str | None:
    """Return the first layer of another model whose output (t, width) for these tokens is in no register of a program.

    The program is cut behind each instruction in turn, which is slow: it runs where something is wrong already.
    """
    ends = iter(range(2, len(program.instructions) + 1))
    for name, x in outputs.items():
        for end in ends:
            cut = replace(program, instructions=program.instructions[:end])
            if sum(view.size for view in cut.instructions[-1].outputs) != x.shape[1]:
                continue
            states: list[RowState] = new_states(program, 1)
            out = run(cut, ids, states, positions=[0])[0][0]
            if out.shape == x.shape and float((out.double() - x.double()).abs().max()) <= limits.get(name, 0.0):
                break
        else:
            return name
    return None
