"""From instructions to operations as the runtime has them: elementwise ones joined, functions in products, maps in attention.

An `Operation` has the kinds, integers and numbers of csrc/runtime/program.h, but still reads and writes registers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tarnn.numerics import default_eps
from tarnn.program.experts import SCORES, Expert
from tarnn.program.instructions import Instruction, Program, View
from tarnn.program.map_numbers import PLAIN, Numbers, hybrid_numbers, map_numbers, relative
from tarnn.program.recording import FUNCTIONS

IN_PRODUCTS = ("silu", "gelu", "gelu_tanh", "relu", "squared_relu")  # functions that a product's panels pass
IN_LINEAR = ("identity", "elu", "relu", "squared_relu", "exp")  # maps that linear attention computes itself
OTHERS = ("none", "same", "per_head", "channels", "all", "heads", "number")


@dataclass(eq=False)
class Operation:
    """One instruction of the runtime. products: matrices y = W x + bias of one input; in_turns: the panels of two take turns.

    function: of a product's outputs. experts: their matrices. vectors, integers, numbers: in the kind's order.
    """

    kind: str
    outputs: list[View]
    inputs: list[View]
    products: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    in_turns: bool = False
    exact: bool = False
    function: str = "identity"
    heads: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # matrices of each head
    experts: list[Expert] = field(default_factory=list)
    vectors: list[Tensor | None] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    states: tuple[int, ...] = ()


class Fusion:
    """The operations of a program in order. sizes: numbers per token of each register."""

    def __init__(self, program: Program):
        self.program = program
        self.sizes = list(program.registers)
        self.operations: list[Operation] = []
        self.angles: dict[Any, View] = {}
        self._uses = [0] * len(self.sizes)
        for instruction in program.instructions:
            for view in instruction.inputs:
                self._uses[view.register] += 1
        self._made: dict[int, Operation] = {}
        for instruction in program.instructions:
            getattr(self, f"_{instruction.kind}", self._plain)(instruction)

    def _put(self, operation: Operation) -> Operation:
        self.operations.append(operation)
        for view in operation.outputs:
            self._made[view.register] = operation
        return operation

    def _alone(self, view: View, kind: str) -> Operation | None:
        """The operation of this kind that writes a register which nothing but this view reads, whole."""
        made = self._made.get(view.register)
        whole = view.offset == 0 and view.size == self.sizes[view.register] and self._uses[view.register] == 1
        alone = made is not None and [x.size for x in made.outputs] == [view.size]
        return made if made is not None and made.kind == kind and whole and alone else None

    def _redirect(self, operation: Operation, output: View) -> None:
        """Let an operation write another register instead of its own."""
        del self._made[operation.outputs[0].register]
        operation.outputs = [output]
        self._made[output.register] = operation

    def _plain(self, x: Instruction) -> None:
        self._put(Operation(x.kind, list(x.outputs), list(x.inputs), states=x.states))

    def _embed(self, x: Instruction) -> None:
        self._put(Operation("embed", list(x.outputs), [], integers=[1 if "places" in x.weights else -1]))
        self.operations[-1].numbers = [float(x.numbers["scale"])]  # type: ignore[arg-type]

    def _product(self, x: Instruction) -> None:
        exact = bool(x.numbers["exact"])
        products = matrices_of(x.weights["weight"], x.weights.get("bias"))
        self._put(Operation("product", list(x.outputs), list(x.inputs), products, exact=exact))

    def _head(self, x: Instruction) -> None:
        self._put(Operation("head", list(x.outputs), list(x.inputs), [(x.weights["weight"], x.weights.get("bias"))]))
        self.operations[-1].numbers = [float(x.numbers["softcap"])]  # type: ignore[arg-type]

    def _head_product(self, x: Instruction) -> None:
        heads = x.weights["weight"], x.weights.get("bias")
        self._put(Operation("head_product", list(x.outputs), list(x.inputs), heads=[heads]))

    def _route(self, x: Instruction) -> None:
        n = x.numbers
        made = Operation("route", list(x.outputs), list(x.inputs), vectors=[x.weights.get("bias")])
        integers = [n["k"], SCORES.index(str(n["scores"])), n["groups"], n["groups_kept"], n["normalize"]]
        made.integers = [int(i) for i in integers]  # type: ignore[arg-type]
        made.numbers = [float(n[name]) for name in ("eps", "scale")]  # type: ignore[arg-type]
        self._put(made)

    def _experts(self, x: Instruction) -> None:
        w, n = x.weights, int(x.numbers["experts"])  # type: ignore[arg-type]
        made = Operation("experts", list(x.outputs), list(x.inputs))
        made.experts = [Expert(w.get(f"gate.{i}"), w[f"up.{i}"], w[f"down.{i}"]) for i in range(n)]
        made.integers = [FUNCTIONS.index(str(x.numbers["function"])), int(bool(x.numbers["gated"]))]
        self._put(made)

    def _norm(self, x: Instruction) -> None:
        kind = ("rms", "layer", "l2", "length").index(x.numbers["kind"])
        whole = x.inputs[0].heads == 1 and x.inputs[0].size == self.sizes[x.inputs[0].register]
        vectors = [x.weights.get(name) for name in ("gain", "bias")]
        numbers = [float(x.numbers["eps"]), 1.0]  # type: ignore[arg-type]
        made = Operation("norm", list(x.outputs), list(x.inputs), vectors=vectors, numbers=numbers)
        made.integers = [kind, int(whole)]
        self._put(made)

    def _rotate(self, x: Instruction) -> None:
        frequencies = x.weights["frequencies"]
        key = frequencies.dtype, *frequencies.tolist()
        if key not in self.angles:
            self.sizes.append(2 * len(frequencies))
            self._uses.append(2)
            self.angles[key] = View(len(self.sizes) - 1, 0, 1, 2 * len(frequencies))
            made = Operation("angles", [self.angles[key]], [], integers=[int(frequencies.dtype == torch.float32)])
            made.numbers = frequencies.double().tolist()
            self._put(made)
        turned = Operation("rotate", list(x.outputs), [x.inputs[0], self.angles[key]])
        turned.integers = [len(frequencies), int(bool(x.numbers["interleaved"]))]
        self._put(turned)

    def _apply(self, x: Instruction) -> None:
        function = str(x.numbers["function"])
        product = self._alone(x.inputs[0], "product")
        if product is not None and function in IN_PRODUCTS and product.function == "identity" and not product.exact:
            product.function = function
            return self._redirect(product, x.outputs[0])
        self._put(_combine(x.outputs[0], x.inputs[0], function))

    def _clamp(self, x: Instruction) -> None:
        numbers = [float(x.numbers[name]) for name in ("least", "most")]  # type: ignore[arg-type]
        self._put(Operation("clamp", list(x.outputs), list(x.inputs), numbers=numbers))

    def _add(self, x: Instruction) -> None:
        self._binary(x, "add")

    def _mul(self, x: Instruction) -> None:
        if not (self._fold_pair(x) or self._fold_scale(x)):
            self._binary(x, "mul")

    def _fold_pair(self, x: Instruction) -> bool:
        """f(W₁ x) ⊙ W₂ x: one product."""
        if len(x.inputs) != 2:
            return False
        pair = [self._alone(view, "product") for view in x.inputs]
        gate, up = pair if pair[1] is not None and pair[1].function == "identity" else pair[::-1]
        if gate is None or up is None or up.function != "identity" or gate is up or gate.in_turns or up.in_turns:
            return False
        alike = gate.inputs == up.inputs and gate.outputs[0].size == up.outputs[0].size
        if not alike or gate.exact or up.exact or len(gate.products) + len(up.products) > 2:
            return False
        self.operations.remove(up)
        self.operations.remove(gate)
        self._redirect(gate, x.outputs[0])
        gate.products += up.products
        gate.in_turns = True
        self.operations.append(gate)
        return True

    def _fold_scale(self, x: Instruction) -> bool:
        """A norm without a gain times a number: one norm."""
        norm = self._alone(x.inputs[0], "norm")
        if norm is None or "number" not in x.numbers or any(v is not None for v in norm.vectors):
            return False
        norm.numbers[1] *= float(x.numbers["number"])  # type: ignore[arg-type]
        self._redirect(norm, x.outputs[0])
        return True

    def _binary(self, x: Instruction, operation: str) -> None:
        made = _combine(x.outputs[0], x.inputs[0], "identity")
        made.integers[1] = ("none", "add", "mul").index(operation)
        a = x.inputs[0]
        if len(x.inputs) == 2:
            b = x.inputs[1]
            if b.size == a.size:
                made.inputs.append(View(b.register, b.offset, a.heads, a.width))
                made.integers[3] = OTHERS.index("same")
            elif b.size == a.heads:
                made.inputs.append(View(b.register, b.offset, a.heads, 1))
                made.integers[3] = OTHERS.index("per_head")
            else:  # one number per token: all heads are one
                made.outputs, made.inputs = [y.as_row for y in made.outputs], [a.as_row, b.as_row]
                made.integers[3] = OTHERS.index("per_head")
        elif "number" in x.numbers:
            made.integers[3], made.numbers = OTHERS.index("number"), [float(x.numbers["number"])]  # type: ignore[arg-type]
        else:
            made.integers[3], vector = _vector(x.weights["weight"], a.heads, a.width)
            made.vectors = [vector]
        for i in range(len(made.inputs)):
            self._absorb(made, i)
        self._put(made)

    def _absorb(self, made: Operation, i: int) -> None:
        """Take a function of an input into the operation."""
        before = self._alone(made.inputs[i], "combine")
        if before is None or before.integers[1] or before.inputs[0].size != made.inputs[i].size:
            return
        view = made.inputs[i]
        self.operations.remove(before)
        made.integers[2 * i] = before.integers[0]
        made.inputs[i] = View(before.inputs[0].register, before.inputs[0].offset, view.heads, view.width)

    def _mix(self, x: Instruction) -> None:
        vectors: list[Tensor | None] = list(x.weights["mixtures"])
        self._put(Operation("mix", list(x.outputs), list(x.inputs), vectors=vectors, states=x.states))

    def _filter(self, x: Instruction) -> None:
        taps = x.weights["taps"]
        channels, width = taps.shape
        weights = torch.nn.functional.pad(taps.float().mT, (0, -channels % 64)).flatten()
        made = Operation("filter", list(x.outputs), list(x.inputs), vectors=[weights, x.weights.get("bias")])
        made.integers = [width, channels, 0, FUNCTIONS.index(str(x.numbers["function"]))]
        made.states = x.states
        self._put(made)

    def _softmax(self, x: Instruction) -> None:
        numbers = [relative(float(x.numbers["scale"]) * x.inputs[0].width ** 0.5)]  # type: ignore[arg-type]
        self._put(Operation("softmax", list(x.outputs), list(x.inputs), numbers=numbers, states=x.states))

    def _delta(self, x: Instruction) -> None:
        vectors = [x.weights["log_decay"]] if "log_decay" in x.weights else []
        self._put(Operation("delta", list(x.outputs), list(x.inputs), vectors=list(vectors), states=x.states))

    def _selective_scan(self, x: Instruction) -> None:
        u, n = x.inputs[0], x.inputs[2].width
        rates = (x.weights["A"].double() * math.log2(math.e)).float().view(u.heads, u.width, n).mT
        rates = torch.nn.functional.pad(rates, (0, -u.width % 64)).flatten()
        self._put(Operation(x.kind, list(x.outputs), list(x.inputs), vectors=[rates], states=x.states))

    def _diagonal_scan(self, x: Instruction) -> None:
        made = Operation(x.kind, list(x.outputs), list(x.inputs), states=x.states)
        made.integers = [int(bool(x.numbers["normalize"]))]
        self._put(made)

    def _features(self, x: Instruction) -> None:
        self._put(_numbered(x, map_numbers(x.numbers, x.weights)))

    def _hybrid(self, x: Instruction) -> None:
        sums = [state for i in x.states if (state := self.program.states[i]).name == "z"]
        self._put(_numbered(x, hybrid_numbers(x, max((state.shape[1] for state in sums), default=0))))

    def _linear(self, x: Instruction) -> None:
        inputs, n = list(x.inputs[:3]), x.numbers
        function = None if n["at_least_one"] else self._plain_map(inputs, weighted="k_scale" in n)
        integers = [
            0 if function is None else IN_LINEAR.index(function),
            int(bool(n["normalize"]) + bool(n["at_least_one"])),
        ]
        for name in ("decay", "q_scale", "k_scale"):
            dropped = name not in n or (function is not None and name != "decay")
            integers.append(-1 if dropped else len(inputs))
            if not dropped:
                inputs.append(x.inputs[int(n[name])])  # type: ignore[arg-type]
        integers.append(len(inputs) if "denominator" in n else -1)
        if "denominator" in n:
            at = int(n["denominator"])  # type: ignore[arg-type]
            inputs += x.inputs[at : at + 2]
        integers.append(int(bool(n["keep_z"])))
        made = Operation("linear", list(x.outputs), inputs, integers=integers, states=x.states)
        made.numbers = [float(n["eps"]) or default_eps(torch.float32)]  # type: ignore[arg-type]
        made.vectors = [x.weights["log_decay"]] if "log_decay" in x.weights else []
        self._put(made)

    def _plain_map(self, inputs: list[View], weighted: bool) -> str | None:
        """The map of q and k, if attention computes it: their features' operations go, and `inputs` are theirs."""
        made = [self._made.get(view.register) for view in inputs[:2]]
        if any(x is None or x.kind != "features" or not _is_plain(x) for x in made):
            return None
        q, k = made
        assert q is not None
        assert k is not None
        uses = sum(self._uses[x.register] for y in {id(q): q, id(k): k}.values() for x in y.outputs)
        exp = IN_LINEAR[q.integers[0]] == "exp"
        if q.integers[0] != k.integers[0] or uses > 4 or q is k or exp != weighted:
            return None
        for i, x in enumerate((q, k)):
            self.operations.remove(x)
            inputs[i] = x.inputs[0]
        return IN_LINEAR[q.integers[0]]


def matrices_of(weight: Tensor, bias: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """The matrices of a product, one behind the other: several where a view of the weights has more than two axes."""
    if weight.ndim == 2:
        return [(weight, bias)]
    inner = weight.shape[1:-1].numel()
    parts = bias.split(inner) if bias is not None else [None] * len(weight)
    return [x for w, b in zip(weight, parts, strict=True) for x in matrices_of(w, b)]


def _numbered(x: Instruction, made: Numbers) -> Operation:
    views = list(x.outputs), list(x.inputs)
    return Operation(x.kind, *views, **made._asdict(), states=x.states)


def _is_plain(x: Operation) -> bool:
    plain = x.numbers == PLAIN and x.integers[0] < len(IN_LINEAR)
    return plain and not x.heads and not x.integers[3]


def _combine(output: View, a: View, function: str) -> Operation:
    return Operation("combine", [output], [a], integers=[FUNCTIONS.index(function), 0, 0, 0], numbers=[0.0])


def _vector(w: Tensor, heads: int, width: int) -> tuple[int, Tensor]:
    """How a weight that broadcasts against (heads, width) is kept: the kind of `OTHERS`, and its numbers."""
    shape: Sequence[int] = (
        torch.broadcast_shapes(w.shape, (heads, width)) if w.numel() != heads * width else (heads, width)
    )
    assert tuple(shape)[-2:] == (heads, width)
    if w.numel() == heads * width:
        return OTHERS.index("all"), w.flatten()
    if w.numel() == width and (w.ndim == 1 or w.shape[-1] == width):
        return OTHERS.index("channels"), w.flatten()
    if w.numel() == heads:
        return OTHERS.index("heads"), w.flatten()
    return OTHERS.index("channels"), w.flatten().expand(width)
