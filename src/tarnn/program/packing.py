"""A program packed for the compiled runtime: numbers that say what lies where, a block of weights, and tables outside of it.

csrc/runtime/reader.cpp reads the numbers in the order in which they are written here, and checks them.
"""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.cpu.products import FORMATS, WEIGHT_TYPES, Block, same_numbers
from tarnn.program.fusion import Fusion, Operation
from tarnn.program.instructions import Program, StateSpec, View
from tarnn.program.phases import Phases
from tarnn.program.recording import FUNCTIONS, ProgramError
from tarnn.program.slots import Slots

VERSION = 5  # of the numbers; csrc/runtime/program.h has the same
BYTES_OF = {"int8": 1, "bfloat16": 2}  # of a number of a rounded row
NO_LIMIT = 2**62
# outputs from which on a head is int8 beside int8 and int4 weights: few bytes are saved by smaller ones
LARGE_HEAD = 4096
NUMBERS, GROWS, COUNTS = 0, 1, 2  # what a state has, as csrc/runtime/program.h says
KINDS = [
    "nothing",
    "product",
    "filter",
    "softmax",
    "linear",
    "delta",
    "low_rank_delta",
    "mix",
    "head",
    "hybrid",
    "experts",
    "selective_scan",
    "diagonal_scan",
    "embed",
    "angles",
    "norm",
    "combine",
    "rotate",
    "features",
    "head_product",
    "to_bytes",
    "filter_rows",
    "clamp",
    "route",
    "concat",
]


class Packed(NamedTuple):
    """A packed program: int64 numbers, bytes, and the tables of tokens and positions."""

    numbers: Tensor
    block: Tensor
    tables: list[Tensor]


class Matrix(NamedTuple):
    """Products of one input that are one matrix: its operations, and the register that they write side by side."""

    operations: list[Operation]
    output: View

    @property
    def function(self) -> str:
        return self.operations[0].function

    @property
    def in_turns(self) -> bool:
        return self.operations[0].in_turns


class Packer:
    """Write one program. weights: one of `FORMATS`, how matrices are kept."""

    def __init__(self, program: Program, weights: str):
        if weights not in FORMATS:
            raise ValueError(f"weights must be one of {', '.join(FORMATS)}; got {weights!r}.")
        self.program, self.format = program, weights
        self.fusion = Fusion(program)
        self.phases = Phases(self.fusion).phases
        self.matrices: dict[int, list[Matrix]] = {}
        groups = self._group_products()
        self.slots = Slots(self.phases, self.fusion.sizes, groups)
        self.bytes_of: dict[tuple[int, View, str], int] = {}
        self._round_rows()
        self.block = Block(VERSION)

    def pack(self) -> Packed:
        """Return the program as the runtime opens it."""
        block, p = self.block, self.program
        embed = p.instructions[0]
        block.numbers(p.num_outputs, min(p.limit or NO_LIMIT, NO_LIMIT), bool(embed.numbers["extra"]))
        block.numbers(len(self.slots.slots))
        for slot in self.slots.slots:
            block.numbers(slot.kind, slot.width)
        block.numbers(len(p.states))
        for state in p.states:
            size = torch.Size(x for i, x in enumerate(state.shape) if i != state.grows).numel()
            block.numbers(size, state.shape[0] if state.grows is not None else 1, has(state))
        block.numbers(len(self.phases))
        for i, phase in enumerate(self.phases):
            self._write_spreading(i, phase.ops)
            block.numbers(phase.units)
            for some in (phase.before, phase.after, phase.rows):
                block.numbers(len(some))
                for x in some:
                    self._write(x)
        tables = [embed.weights[name] for name in ("tokens", "places") if name in embed.weights]
        return Packed(torch.tensor(block.plan), block.bytes(), [_table(x) for x in tables])

    def _format_of(self, x: Operation) -> str:
        """Return how its matrices are kept: exact ones lose nothing of the type in which the model has them."""
        if self.format == "float32" or not (x.exact or x.kind == "head"):
            return self.format
        if x.kind == "head":
            return "int8" if self.format != "bfloat16" and len(x.products[0][0]) >= LARGE_HEAD else "bfloat16"
        return "bfloat16" if x.products[0][0].dtype == torch.bfloat16 else "float32"

    def _group_products(self) -> dict[int, tuple[int, int]]:
        """Products of one input, kept alike, are one matrix, which writes a register of their outputs side by side.

        Weights that several products have are not put together with others, so that they are packed once.
        """
        groups: dict[int, tuple[int, int]] = {}
        uses = Counter(same_numbers(w) for x in self.fusion.operations for w, _ in x.products)
        for i, phase in enumerate(self.phases):
            found: dict[object, list[Operation]] = {}
            for x in phase.ops:
                if x.kind == "product":
                    view = x.inputs[0]
                    alone = id(x) if x.in_turns else None
                    shared = uses[same_numbers(x.products[0][0])] > 1
                    key = (
                        view.register,
                        view.offset,
                        view.size,
                        self._format_of(x),
                        self._rounding_of(x),
                        x.function,
                        alone,
                        shared,
                    )
                    found.setdefault(key, []).append(x)
            for operations in found.values():
                output = operations[0].outputs[0]
                operations.sort(key=lambda x: (x.outputs[0].register, x.outputs[0].offset))
                if len(operations) > 1:
                    total = sum(x.outputs[0].size for x in operations)
                    self.fusion.sizes.append(total)
                    output, at = View(len(self.fusion.sizes) - 1, 0, 1, total), 0
                    for x in operations:
                        groups.setdefault(x.outputs[0].register, (output.register, at))
                        at += x.outputs[0].size
                self.matrices.setdefault(i, []).append(Matrix(operations, output))
                if any(
                    sum(x.outputs[0].size for x in operations if x.outputs[0].register == r) != self.fusion.sizes[r]
                    for r in {x.outputs[0].register for x in operations}
                ):
                    raise ProgramError("products that write parts of one register read the same, and are kept alike")
        return groups

    def _round_rows(self) -> None:
        """Rows are rounded, as the products that read them want it, at the end of the phase that makes them."""
        home = {v.register: i for i, p in enumerate(self.phases) for x in p.all() for v in x.outputs}
        wanted: dict[tuple[View, str], list[int]] = {}
        for i, phase in enumerate(self.phases):
            for x in phase.ops:
                if x.kind in ("product", "head", "experts") and (rounding := self._rounding_of(x)):
                    wanted.setdefault((x.inputs[0].as_row, rounding), []).append(i)
        for (view, rounding), uses in sorted(wanted.items(), key=lambda item: home[item[0][0].register]):
            begin = home[view.register]
            slot = self.slots.new_bytes(view.size * BYTES_OF[rounding], begin, max(uses))
            integers = [FORMATS.index(rounding), slot]
            self.phases[begin].rows.append(Operation("to_bytes", [], [view], integers=integers))
            for i in uses:
                self.bytes_of[i, view, rounding] = slot

    def _rounding_of(self, x: Operation) -> str:
        """Return what its rows are rounded to: "int8" (levels), "bfloat16", or "" for exact products and those of floats."""
        if (format := self._format_of(x)) in ("int8", "int4"):
            return "int8"
        return "bfloat16" if format == self.format == "bfloat16" and not x.exact else ""

    def _bytes(self, phase: int, x: Operation) -> int:
        rounding = self._rounding_of(x)
        return self.bytes_of[phase, x.inputs[0].as_row, rounding] if rounding else -1

    def _write_spreading(self, phase: int, operations: list[Operation]) -> None:
        if not operations:
            return self._write(Operation("nothing", [], []))
        first = operations[0]
        if first.kind != "product":
            read = [self._bytes(phase, first)] if first.kind in ("head", "experts") else []
            return self._write(replace(first, integers=[*first.integers, *read]))
        matrices = self.matrices[phase]
        self._begin("product", [x.output for x in matrices], [x.operations[0].inputs[0] for x in matrices])
        self.block.numbers(len(matrices))
        for matrix in matrices:
            products = [product for x in matrix.operations for product in x.products]
            self.block.products(products, self._format_of(matrix.operations[0]), in_turns=matrix.in_turns)
        self.block.numbers(0, 3 * len(matrices))
        for matrix in matrices:
            self.block.numbers(FUNCTIONS.index(matrix.function), matrix.in_turns)
            self.block.numbers(self._bytes(phase, matrix.operations[0]))
        self.block.numbers(0, 0)

    def _begin(self, kind: str, outputs: list[View], inputs: list[View]) -> None:
        self.block.numbers(KINDS.index(kind), len(outputs), len(outputs) + len(inputs))
        for view in (*outputs, *inputs):
            self.block.numbers(*self.slots.place(view))

    def _write(self, x: Operation) -> None:
        block, integers = self.block, list(x.integers)
        if x.kind == "to_bytes":
            width = x.inputs[0].size * BYTES_OF[FORMATS[integers[0]]]
            block.numbers(KINDS.index(x.kind), 1, 2, integers.pop(), 0, 1, width)
            block.numbers(*self.slots.place(x.inputs[0]))
        else:
            self._begin(x.kind, x.outputs, x.inputs)
        block.numbers(1 if x.kind == "head" else len(x.heads) + 2 * len(x.experts))
        if x.kind == "head":
            block.matrix(*x.products[0], self._format_of(x))
        for heads in x.heads:
            block.heads(*heads)
        for expert in x.experts:
            block.products(
                [(w, None) for w in (expert.gate, expert.up) if w is not None],
                self.format,
                in_turns=expert.gate is not None,
            )
            block.matrix(expert.down, None, self.format)
        block.numbers(len(x.vectors))
        for vector in x.vectors:
            block.numbers(0 if vector is None else vector.numel())
            block.vector(vector)
        block.numbers(len(integers), *integers)
        block.numbers(len(x.numbers))
        if x.numbers:
            block.place(torch.tensor(x.numbers, dtype=torch.float64))
        block.numbers(len(x.states), *x.states)


def has(state: StateSpec) -> int:
    """Return what a state has: `NUMBERS`, `GROWS` or `COUNTS`."""
    return COUNTS if state.dtype == torch.int64 else NUMBERS if state.grows is None else GROWS


def _table(x: Tensor) -> Tensor:
    """A table as the runtime reads it: of a type of `WEIGHT_TYPES`, one row after the other."""
    return (x if x.dtype in WEIGHT_TYPES else x.float()).detach().contiguous()


def pack(program: Program, weights: str) -> Packed:
    """Pack a program. weights: float32 | bfloat16 | int8 | int4, how the matrices of products are kept; sums are float32."""
    return Packer(program, weights).pack()
