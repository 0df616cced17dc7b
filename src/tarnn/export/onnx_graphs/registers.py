"""The registers of a program as values of a graph: (B, T, numbers), or (B, T, heads, width)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import TensorProto

from tarnn.export.onnx_graphs.graph import Graph, Port
from tarnn.program.instructions import Instruction, Program, View

BATCH, LENGTH = "batch_size", "sequence_length"


@dataclass
class Tracing:
    """A program that becomes a graph. one_token: T is 1. values: of each register, the parts that were written, by offset."""

    program: Program
    graph: Graph
    one_token: bool
    values: dict[int, dict[int, tuple[int, str]]] = field(default_factory=dict)

    @property
    def ids(self) -> str:
        """Tokens (B, T), an input."""
        return self.input("input_ids", TensorProto.INT64, BATCH, 1 if self.one_token else LENGTH)

    @property
    def positions(self) -> str:
        """The position of each token (B, T), an input that only some programs need."""
        return self.input("position_ids", TensorProto.INT64, BATCH, 1 if self.one_token else LENGTH)

    def input(self, name: str, kind: int, *shape: int | str) -> str:
        """Declare an input, once."""
        if name not in [port.name for port in self.graph.inputs]:
            self.graph.inputs.append(Port(name, kind, shape))
        return name

    def state(
        self, before: str, after: str, *shape: int | str, grown: tuple[int | str, ...] | None = None
    ) -> tuple[str, str]:
        """Declare a tensor of the state, as an input and as an output. grown: the output's shape, if it is another."""
        self.graph.outputs.append(Port(after, TensorProto.FLOAT, grown or shape))
        return self.input(before, TensorProto.FLOAT, *shape), after

    def rows(self, view: View) -> str:
        """Return the numbers of a view, (B, T, size)."""
        parts = self.values[view.register]
        if view.offset in parts and parts[view.offset][0] == view.size:
            return parts[view.offset][1]
        if len(parts) > 1:
            whole = self.graph.add("Concat", *(parts[i][1] for i in sorted(parts)), axis=-1)
            self.values[view.register] = parts = {0: (self.program.registers[view.register], whole)}
        return self.graph.sliced(parts[0][1], view.offset, view.offset + view.size)

    def heads(self, view: View) -> str:
        """Return the numbers of a view, (B, T, heads, width)."""
        return self.split(self.rows(view), view.heads, view.width)

    def split(self, x: str, heads: int, width: int) -> str:
        """View (B, T, heads·width) as heads."""
        return self.graph.reshape(x, 0, 0, heads, width)

    def joined(self, x: str, size: int) -> str:
        """View heads as (B, T, size)."""
        return self.graph.reshape(x, 0, 0, size)

    def write(self, instruction: Instruction, *values: str) -> None:
        """Put (B, T, size) where instructions read them."""
        for view, name in zip(instruction.outputs, values, strict=True):
            self.values.setdefault(view.register, {})[view.offset] = (view.size, name)

    def repeated(self, x: str, heads: int, width: int, times: int) -> str:
        """Repeat each head of (B, T, heads·width) for as many neighbours."""
        if times == 1:
            return x
        one = self.graph.reshape(x, 0, 0, heads, 1, width)
        many = self.graph.add("Expand", one, self.graph.constant([1, 1, 1, times, 1], np.int64))
        return self.joined(many, heads * times * width)

    def per_token(self, numbers: Sequence[float]) -> str:
        """Return the same numbers for each token, (B, T, n)."""
        ones = self.graph.constant([1], np.int64)
        shape = self.graph.add("Concat", self.graph.add("Shape", self.ids), ones, axis=0)
        return self.graph.add("Expand", self.graph.constant(np.asarray(numbers)[None, None]), shape)
