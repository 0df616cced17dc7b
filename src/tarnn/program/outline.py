"""The outline of a program: all that its runtime and its states need, once its weights and phases are packed. It is JSON's data.

An outline is read back as a program of two instructions, the first and the last, beside the packed numbers that run.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tarnn.program.instructions import Instruction, Program, StateSpec, View
from tarnn.program.packing import NO_LIMIT, VERSION, Packed, has
from tarnn.program.state import CLASSES

TYPES = {"float32": torch.float32, "int64": torch.int64}  # of states
NAMES = {dtype: name for name, dtype in TYPES.items()}
MOST_NUMBERS = 2**40  # of one row of a state


def outline_of(program: Program) -> dict[str, Any]:
    """Return the outline of a program whose embedding adds no classes."""
    embed = program.instructions[0]
    assert "classes" not in embed.weights
    return {
        "width": embed.outputs[0].size,
        "numbers": dict(embed.numbers),
        "num_outputs": program.num_outputs,
        "limit": program.limit,
        "layers": list(program.layers),
        "states": [[x.layer, x.kind, x.name, list(x.shape), NAMES[x.dtype], x.grows, x.fill] for x in program.states],
        "facts": dict(program.facts),
    }


def without_weights(program: Program) -> Program:
    """Return what a runtime needs of a program that is packed: its first instruction, whose tables it shares, and its sizes."""
    embed, head = program.instructions[0], program.instructions[-1]
    return replace(program, instructions=(embed, replace(head, weights={})))


def program_of(outline: Mapping[str, Any], packed: Packed) -> Program:
    """Read an outline that anybody may have written. Raises ValueError, LookupError or TypeError for all but that of `packed`."""
    width, num_outputs, limit = (outline[x] for x in ("width", "num_outputs", "limit"))
    states = tuple(_state(len(outline["layers"]), *x) for x in outline["states"])
    if unknown := set(outline["layers"]) - set(CLASSES):
        raise ValueError(f"there are no states of the kind {min(unknown)!r:.60}")
    sizes = [(*_size(x), has(x)) for x in states]
    if [num_outputs, min(limit or NO_LIMIT, NO_LIMIT), sizes] != _numbers(packed):
        raise ValueError("its states are not those of its numbers")
    weights = dict(zip(("tokens", "places"), packed.tables, strict=False))
    row, out = View(0, 0, 1, int(width)), View(1, 0, 1, num_outputs)
    numbers = {"sinusoidal": int(outline["numbers"]["sinusoidal"]), "scale": float(outline["numbers"]["scale"])}
    embed = Instruction("embed", (), (row,), weights, numbers)
    layers, facts = tuple(outline["layers"]), dict(outline["facts"])
    return Program((embed, Instruction("head", (row,), (out,))), (row.size, num_outputs), states, layers, limit, facts)


def _state(
    num_layers: int, layer: int, kind: str, name: str, shape: list[int], dtype: str, grows: int | None, fill: float
) -> StateSpec:
    whole = [layer, *shape, *([] if grows is None else [grows])]
    if not all(type(x) is int and x >= 0 for x in whole) or layer >= num_layers or len(shape) > 8:
        raise ValueError(f"a state has the layer {layer!r:.20} and the shape {shape!r:.60}")
    if grows is not None and grows >= len(shape):
        raise ValueError(f"a state grows along axis {grows} of {len(shape)}")
    return StateSpec(layer, str(kind), str(name), tuple(shape), TYPES[dtype], grows, float(fill))


def _size(spec: StateSpec) -> tuple[int, int]:
    """Return the numbers of a row, or of a token of it, and the heads, as the packed numbers have them."""
    size = 1
    for axis, n in enumerate(spec.shape):
        size *= 1 if axis == spec.grows else n
    if size > MOST_NUMBERS:
        raise ValueError(f"a state has {size:,} numbers")
    return size, 1 if spec.grows is None else spec.shape[0]


def _numbers(packed: Packed) -> list[Any]:
    """Return how many outputs and positions the packed numbers tell of, and the sizes of their states."""
    numbers = packed.numbers.tolist()
    if numbers[0] != VERSION:
        raise ValueError(f"its program has version {numbers[0]}")
    slots = numbers[6]
    at = 7 + 2 * slots
    states = numbers[at + 1 : at + 1 + 3 * numbers[at]]
    return [*numbers[3:5], [*zip(*[iter(states)] * 3, strict=True)]]
