"""A program: a model as data. Instructions read and write registers; each register holds some numbers of every token.

A register has `heads` × `width` numbers per token. It is written once. A view of some of its channels costs nothing.
What an instruction remembers from token to token is declared as a state: name, shape per row, type, and whether it grows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Number = float | int | str | bool | tuple[float, ...]


@dataclass(frozen=True)
class View:
    """Channels `offset` to offset + heads·width of a register, as so many heads side by side."""

    register: int
    offset: int
    heads: int
    width: int

    @property
    def size(self) -> int:
        """Numbers per token."""
        return self.heads * self.width

    @property
    def as_row(self) -> "View":
        """All numbers as one head, as products read them."""
        return View(self.register, self.offset, 1, self.size)


@dataclass(frozen=True)
class StateSpec:
    """One tensor of the state: (rows, *shape), with `shape[axis]` growing by one per token if there is an axis `grows`.

    layer, kind, name: the tensor is the field `name` of the `layer`-th part of a `ModelState`, whose class is called `kind`.
    fill: the value of every number before the first token.
    """

    layer: int
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    grows: int | None = None
    fill: float = 0.0


@dataclass(frozen=True, eq=False)
class Instruction:
    """One operation of a kind of `KINDS`.

    inputs: views of registers, in the order of the function that recorded it; outputs: the registers it writes. weights:
    tensors by role, as they lie in the checkpoint (any floating type). numbers: options by name. states: indices into
    the program's states.
    """

    kind: str
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, Number] = field(default_factory=dict)
    states: tuple[int, ...] = ()

    def __repr__(self) -> str:
        def views(some: tuple[View, ...]) -> str:
            return ", ".join(f"r{x.register}[{x.offset}:{x.offset + x.size}]({x.heads}×{x.width})" for x in some)

        weights = {name: tuple(x.shape) for name, x in self.weights.items()}
        return f"{views(self.outputs)} = {self.kind}({views(self.inputs)}) {weights or ''} {dict(self.numbers) or ''}"


@dataclass(frozen=True, eq=False)
class Program:
    """A model: instructions in their order, the size of each register per token, and the states.

    The last instruction is the head; its output is the logits (or parameters). layers: the kinds of the parts of its
    `ModelState`, those without a tensor as well. limit: positions from 0 to below it, None: any.
    facts: what the program's family says of the model besides (vocabulary, end ids …), plain data.
    """

    instructions: tuple[Instruction, ...]
    registers: tuple[int, ...]
    states: tuple[StateSpec, ...]
    layers: tuple[str, ...] = ()
    limit: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_outputs(self) -> int:
        """Numbers that the head puts out per token."""
        return self.instructions[-1].outputs[0].size

    def weights(self) -> Iterator[Tensor]:
        """All tensors of the instructions."""
        for instruction in self.instructions:
            yield from instruction.weights.values()
