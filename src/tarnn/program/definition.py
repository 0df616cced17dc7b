"""The definition of programs: an interpreter in plain PyTorch, any floating dtype and device, with no thought of speed.

    states = new_states(program, rows=2, dtype=torch.float64)
    outputs, states = run(program, ids, states, positions=[0, 0], dtype=torch.float64)

Every instruction is one function of a table: `OF_TOKENS` ones compute all tokens of all rows at once, `RECURRENT` ones go
through the tokens of one row in their order. Compiled runtimes are tested against these in float64.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tarnn.program.experts_definition import experts, route
from tarnn.program.instructions import Program, StateSpec, View
from tarnn.program.recurrent import RECURRENT, Recurrent, RowState
from tarnn.program.row_wise import ROW_WISE, Call, Outputs, Tokens

OF_TOKENS = ROW_WISE | {"route": route, "experts": experts}


def new_states(
    program: Program, rows: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> list[RowState]:
    """Return the state of each row before its first token. dtype: of all but whole numbers."""

    def new(spec: StateSpec) -> Tensor:
        kind = dtype if spec.dtype.is_floating_point else spec.dtype
        return torch.full(spec.shape, spec.fill, dtype=kind, device=device)

    return [tuple(map(new, program.states)) for _ in range(rows)]


@torch.no_grad()
def run(
    program: Program,
    ids: Int[Tensor, "b t"] | Sequence[Int[Tensor, " t"]],
    states: Sequence[RowState],
    *,
    positions: Sequence[int],
    extra: Float[Tensor, "b t n"] | Sequence[Float[Tensor, "t n"]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "b t o"] | list[Float[Tensor, "t o"]], list[RowState]]:
    """Compute the outputs at each token and the states behind the last; the given states stay as they are.

    ids: a row of tokens per sequence, or a list of rows of any lengths. positions: of each row's first token. extra: what
    `embed` adds per token. dtype: of all numbers; float32 frequencies give angles rounded to float32 in any.
    """
    sequences = list(ids)
    _check(program, sequences, states, positions)
    tokens = Tokens.of(sequences, positions, extra, dtype)
    rows = [list(x) for x in states]
    registers: dict[int, Tensor] = {}
    last_read = {view.register: i for i, x in enumerate(program.instructions) for view in x.inputs}
    for i, instruction in enumerate(program.instructions):
        inputs = [_read(registers, view) for view in instruction.inputs]
        call = Call(instruction, tokens)
        recurrent = RECURRENT.get(instruction.kind)
        outputs = over_rows(recurrent, call, inputs, rows) if recurrent else OF_TOKENS[instruction.kind](call, *inputs)
        for view, x in zip(instruction.outputs, outputs, strict=True):
            _write(program, registers, view, x.reshape(len(tokens.ids), view.size))
        for view in instruction.inputs:
            if last_read[view.register] == i:
                registers.pop(view.register, None)
    out = registers[program.instructions[-1].outputs[0].register].split(tokens.lengths)
    return torch.stack(out) if isinstance(ids, Tensor) else list(out), [tuple(x) for x in rows]


def over_rows(function: Recurrent, call: Call, inputs: Sequence[Tensor], rows: list[list[Tensor]]) -> Outputs:
    """Compute each row by itself, and put its new states into `rows`."""
    indices, outputs = call.instruction.states, []
    parts = zip(*(x.split(call.tokens.lengths) for x in inputs), strict=True)
    for row, of_row, positions in zip(rows, parts, call.tokens.positions.split(call.tokens.lengths), strict=True):
        here = replace(call, tokens=replace(call.tokens, positions=positions))
        out, new = function(here, tuple(row[i] for i in indices), *of_row)
        outputs.append(out)
        for i, x in zip(indices, new, strict=True):
            row[i] = x
    return tuple(torch.cat(x) for x in zip(*outputs, strict=True))


def _read(registers: dict[int, Tensor], view: View) -> Tensor:
    return registers[view.register][:, view.offset : view.offset + view.size].unflatten(1, (view.heads, view.width))


def _write(program: Program, registers: dict[int, Tensor], view: View, x: Tensor) -> None:
    """Put a register's numbers, or a part of them, where they are read."""
    size = program.registers[view.register]
    if view.size == size:
        registers[view.register] = x
    else:
        whole = registers.setdefault(view.register, x.new_zeros(len(x), size))
        whole[:, view.offset : view.offset + view.size] = x


def _check(program: Program, ids: Sequence[Tensor], states: Sequence[RowState], positions: Sequence[int]) -> None:
    if not len(ids) == len(states) == len(positions):
        raise ValueError(
            f"expected a state and a position per row; got {len(ids)} rows, {len(states)} states, {len(positions)} positions."
        )
    most = max((p + len(x) for p, x in zip(positions, ids, strict=True)), default=0)
    if program.limit is not None and most > program.limit:
        raise ValueError(f"this program has {program.limit:,} positions, and the tokens would end at {most:,}.")
