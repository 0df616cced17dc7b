"""Feature maps as ONNX nodes; `tarnn.program.row_wise.features` is their definition."""

from collections.abc import Callable
from typing import cast

import numpy as np
import torch

from tarnn.export.onnx_graphs.graph import Graph
from tarnn.export.onnx_graphs.registers import Tracing
from tarnn.export.onnx_graphs.row_wise import FUNCTIONS, number, of_heads, trigonometry
from tarnn.program.instructions import Instruction

Map = Callable[[Tracing, Instruction, str], str]  # (B, T, heads, m) → the features


def features(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    """Compute φ of each head. The logarithm beside it is zero: maps that have another are refused."""
    g, view = trace.graph, x.inputs[0]
    y, omega = trace.heads(view), x.weights.get("omega")
    square = number(x, "square")
    u = y if omega is None else trace.split(of_heads(trace, x, y, omega), view.heads, omega.shape[1])
    if (bias := x.weights.get("bias")) is not None:
        u = g.add("Add", u, g.constant(bias.repeat_interleave(view.heads // len(bias), 0)))
    if square:
        norms = g.add("ReduceSumSquare", y, g.constant([-1], np.int64))
        u = g.add("Sub", u, g.add("Mul", norms, g.constant(square)))
    u = shifted(g, u, number(x, "offset"))
    phi = MAPS[str(x.numbers["function"])](trace, x, u)
    if (gain := number(x, "gain", 1.0)) != 1:
        phi = g.add("Mul", phi, g.constant(gain))
    phi = shifted(g, phi, number(x, "shift"))
    return trace.joined(phi, x.outputs[0].size), trace.per_token([0.0] * view.heads)


def shifted(g: Graph, x: str, by: float) -> str:
    return g.add("Add", x, g.constant(by)) if by else x


def waves(trace: Tracing, x: Instruction, u: str) -> str:
    g = trace.graph
    return g.add("Concat", g.add("Sin", u), g.add("Cos", u), axis=-1)


def halves(trace: Tracing, x: Instruction, u: str) -> str:
    g = trace.graph
    return g.add("Concat", g.add("Softmax", u), g.add("Softmax", g.add("Neg", u)), axis=-1)


def dpfp(trace: Tracing, x: Instruction, u: str) -> str:
    g, n = trace.graph, 2 * x.inputs[0].width
    r = g.add("Concat", g.add("Relu", u), g.add("Relu", g.add("Neg", u)), axis=-1)
    rolled = (
        g.add("Gather", r, g.constant(np.roll(np.arange(n), j), np.int64), axis=-1)
        for j in range(1, int(number(x, "number")) + 1)
    )
    return g.add("Concat", *(g.add("Mul", r, y) for y in rolled), axis=-1)


def pairs(trace: Tracing, x: Instruction, u: str) -> str:
    """Compute 1, u, u_i², u_i u_j, u, 1, each with a factor, those whose factor is zero left out but for squares and pairs."""
    g, d = trace.graph, x.inputs[0].width
    i, j = torch.triu_indices(d, d, 1)
    left, right = (g.add("Gather", u, g.constant(k, np.int64), axis=-1) for k in (i, j))
    one = g.add("Add", g.add("Mul", g.sliced(u, 0, 1), g.constant(0.0)), g.constant(1.0))
    parts = (one, u, g.add("Mul", u, u), g.add("Mul", left, right), u, one)
    factors = cast(tuple[float, ...], x.numbers["parts"])
    kept = [(f, y) for k, (f, y) in enumerate(zip(factors, parts, strict=True)) if f or k in (2, 3)]
    return g.add("Concat", *(g.add("Mul", y, g.constant(f)) for f, y in kept), axis=-1)


def cosformer(trace: Tracing, x: Instruction, u: str) -> str:
    g, y = trace.graph, trace.graph.add("Relu", u)
    frequency = torch.tensor([number(x, "number")], dtype=torch.float64)
    turns = (g.add("Unsqueeze", z, g.constant([2], np.int64)) for z in trigonometry(trace, frequency))
    return g.add("Concat", *(g.add("Mul", y, z) for z in turns), axis=-1)


def elu(trace: Tracing, x: Instruction, u: str) -> str:
    return shifted(trace.graph, trace.graph.add("Elu", u), 1.0)


def node(kind: str) -> Map:
    return lambda trace, x, u: trace.graph.add(kind, u)


def elementwise(name: str) -> Map:
    return lambda trace, x, u: FUNCTIONS[name](trace.graph, u)


MAPS: dict[str, Map] = {
    **{name: elementwise(name) for name in FUNCTIONS},
    "elu": elu,
    "abs": node("Abs"),
    "cos": node("Cos"),
    "plain_exp": node("Exp"),
    "waves": waves,
    "halves": halves,
    "log_softmax": node("LogSoftmax"),
    "dpfp": dpfp,
    "pairs": pairs,
    "cosformer": cosformer,
}
