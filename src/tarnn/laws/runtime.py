"""A model by the runtime of its program, as `tarnn.load` runs it; and by the program's definition."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tarnn.decoding.opened import Opened
from tarnn.errors import UserError
from tarnn.laws.report import Result
from tarnn.laws.ways import FACTOR, LOGITS, STATE, Runner, Stages, alone, compared, difference, first_above, rounding
from tarnn.models.state import ModelState
from tarnn.program.definition import new_states, run
from tarnn.program.extra import extra_rows
from tarnn.program.instructions import Program
from tarnn.program.runtime import Runtime
from tarnn.program.state import tensors_of


class Running(Runner):
    """Run an opened model, whose step is the runtime of a program. Compiled programs promise the same bits in all ways."""

    def __init__(self, opened: Opened):
        runtime: Any = getattr(opened.step, "runtime", opened.step)
        if not isinstance(runtime, Runtime):
            raise UserError(f"there is no program of this {opened.architecture}: {'; '.join(opened.about)}.")
        self.runtime, self.program = runtime, runtime.program
        self.name, self.exact = f"tarnn's runtime: {'; '.join(opened.about)}", hasattr(runtime, "packed")
        self.vocab_size, self.limit = opened.config
        self.pad_id = opened.pad_id if opened.pad_id < self.vocab_size else 0

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
    b, t = ids.shape
    extra = extra_rows(program, torch.arange(t).repeat(b), None)
    extra = None if extra is None else extra.view(b, t, -1)
    logits, after = run(program, ids, new_states(program, b, dtype=dtype), positions=[0] * b, extra=extra, dtype=dtype)
    return (states_of(program, after, [t] * b) if states else {}) | {LOGITS: list(logits)}


def first_unlike(program: Program, outputs: dict[str, Tensor], limits: dict[str, float], ids: Tensor) -> str | None:
    """Return the first layer of another model whose output (t, width) for these tokens is in no register of a program.

    The program is cut behind each instruction in turn, which is slow: it runs where something is wrong already.
    """

    def gives(end: int, x: Tensor, limit: float) -> bool:
        cut = replace(program, instructions=program.instructions[:end])
        if sum(view.size for view in cut.instructions[-1].outputs) != x.shape[1]:
            return False
        out = run(cut, ids, new_states(program, 1), positions=[0])[0][0]
        return float(difference([out], [x]).max()) <= limit

    ends = iter(range(2, len(program.instructions) + 1))  # each layer is looked for behind the one before
    names = (name for name, x in outputs.items() if not any(gives(end, x, limits.get(name, 0.0)) for end in ends))
    return next(names, None)


def against_definition(running: Running, saved: torch.dtype, law: str, rows: list[Tensor]) -> Result:
    """Compare a runtime with its program's definition in float64. saved: the type of the weights before they were packed."""
    weights = running.runtime.weights
    if weights != "float32" and (weights, saved) != ("bfloat16", torch.bfloat16):
        raise UserError(f"{weights} rounds the weights; `tarnn eval` measures what that costs.")
    ids = torch.stack(rows)
    single, exact = (defined(running.program, ids, x, states=True) for x in (torch.float32, torch.float64))
    with running.watched():
        ours = running.whole(ids)
    limits = {name: FACTOR * float(difference(single[name], x).max()) for name, x in exact.items()}
    why = f"of at most {limits[LOGITS]:.1e}, by rounding"
    return compared(law, ours, exact, limits[LOGITS], lambda: first_above(ours, exact, limits), why)


def against_forward(
    forward: Callable[[], Runner], running: Callable[[], Running], law: str, rows: list[Tensor]
) -> Result:
    """Compare a runtime with a live model; what differs is looked for in the outputs of its layers."""
    ours, model = running(), forward()
    ours.room = len(rows[0])
    limit = rounding(model, rows)[0][LOGITS]

    def first() -> str | None:
        with model.watched():
            stages, limits = alone(model, rows[:1]), rounding(model, rows)[0]
        outputs = {name: x[0] for name, x in stages.items() if name.rpartition(".")[2].isdigit()}
        return first_unlike(ours.program, outputs, limits, rows[0][None])

    return compared(law, alone(ours, rows), alone(model, rows), limit, first, f"of at most {limit:.1e}, by rounding")
