"""Instructions that look at one token at a time, as ONNX nodes; `tarnn.program.row_wise` is their definition.

Each is a function of the tracing and an instruction that returns the value (B, T, size) of each output.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor

from tarnn.export.onnx_graphs.graph import Graph
from tarnn.export.onnx_graphs.registers import Tracing
from tarnn.program.instructions import Instruction


def number(x: Instruction, name: str, default: float = 0.0) -> float:
    """Return a number of an instruction."""
    return float(x.numbers.get(name, default))  # type: ignore[arg-type]


def trigonometry(trace: Tracing, frequencies: Tensor) -> tuple[str, str]:
    """Compute cosines and sines of position·frequency, (B, T, n). Angles are float64, so that none is off far into a text.

    float32 frequencies give float32 angles, as in `rotate`.
    """
    g = trace.graph
    positions = g.add("Unsqueeze", g.add("Cast", trace.positions, to=TensorProto.DOUBLE), g.constant([-1], np.int64))
    angles = g.add("Mul", positions, g.constant(frequencies, np.float64))
    if frequencies.dtype == torch.float32:
        angles = g.add("Cast", g.add("Cast", angles, to=TensorProto.FLOAT), to=TensorProto.DOUBLE)
    turns = g.add("Floor", g.add("Mul", angles, g.constant(0.5 / math.pi, np.float64)))
    angles = g.add("Sub", angles, g.add("Mul", turns, g.constant(2 * math.pi, np.float64)))
    angles = g.add("Cast", angles, to=TensorProto.FLOAT)
    return g.add("Cos", angles), g.add("Sin", angles)


def embed(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    g, tokens, width = trace.graph, x.weights["tokens"], x.outputs[0].size
    parts = [(0, tokens.shape[1], g.add("Gather", g.weight(tokens), trace.ids))]
    if number(x, "scale", 1.0) != 1:
        parts[0] = (*parts[0][:2], g.add("Mul", parts[0][2], g.constant(number(x, "scale"))))
    if "places" in x.weights:
        places = x.weights["places"]
        parts.append((width - places.shape[1], width, g.add("Gather", g.weight(places), trace.positions)))
    if channels := int(number(x, "sinusoidal")):
        frequencies = 10000.0 ** (torch.arange(0, channels, 2, dtype=torch.float64) / -channels)
        cos, sin = trigonometry(trace, frequencies)
        parts.append((width - channels, width, g.add("Concat", sin, cos, axis=-1)))
    padded = [
        y if (start, end) == (0, width) else g.add("Pad", y, g.constant([0, 0, start, 0, 0, width - end], np.int64))
        for start, end, y in parts
    ]
    total = padded[0]
    for y in padded[1:]:
        total = g.add("Add", total, y)
    return (total,)


def product(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    g = trace.graph
    y = g.add("MatMul", trace.rows(x.inputs[0]), g.weight(x.weights["weight"].flatten(0, -2).mT))
    return (g.add("Add", y, g.weight(x.weights["bias"])) if "bias" in x.weights else y,)


def head(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    """Compute the logits of each sequence's last token, (B, 1, v): the weights may be those of the embeddings."""
    g, rows = trace.graph, trace.rows(x.inputs[0])
    last = g.add("Gather", rows, g.constant(-1, np.int64), axis=1)
    bias = [g.weight(x.weights["bias"])] if "bias" in x.weights else []
    y = g.add("Gemm", last, g.weight(x.weights["weight"]), *bias, transB=1)
    if cap := number(x, "softcap"):
        y = g.add("Mul", g.add("Tanh", g.add("Div", y, g.constant(cap))), g.constant(cap))
    return (g.add("Unsqueeze", y, g.constant([1], np.int64), name="logits"),)


def concat(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    parts = trace.graph.add("Concat", *map(trace.heads, x.inputs), axis=-1)
    return (trace.joined(parts, x.outputs[0].size),)


def head_product(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    y = of_heads(trace, x, trace.heads(x.inputs[0]), x.weights["weight"])
    bias = x.weights.get("bias")
    return (y if bias is None else trace.graph.add("Add", y, trace.graph.weight(bias.flatten())),)


def of_heads(trace: Tracing, x: Instruction, y: str, weight: Tensor) -> str:
    """Multiply (B, T, heads or 1, n) by the matrix of each head, weight (heads or 1, o, n): (B, T, heads·o)."""
    g, (h, o, n), heads = trace.graph, weight.shape, x.inputs[0].heads
    if h == 1:
        return trace.joined(g.add("MatMul", y, g.weight(weight[0].mT)), heads * o)
    if heads == 1:
        return g.add("MatMul", trace.joined(y, n), g.weight(weight.flatten(0, 1).mT))
    weight = weight.repeat_interleave(heads // h, 0)
    one = g.reshape(y, 0, 0, heads, 1, n)
    return trace.joined(g.add("MatMul", one, g.weight(weight.mT)), heads * o)


def add(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    return (binary(trace, x, "Add"),)


def mul(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    return (binary(trace, x, "Mul"),)


def binary(trace: Tracing, x: Instruction, kind: str) -> str:
    """Compute a + b or a·b: b of the shape of a, a number per head, one, a weight, a number."""
    g, a = trace.graph, x.inputs[0]
    if len(x.inputs) == 2:
        b = x.inputs[1]
        if b.size in (a.size, 1):
            return g.add(kind, trace.rows(a), trace.rows(b))
        per_head = trace.split(trace.rows(b), a.heads, 1)
        return trace.joined(g.add(kind, trace.heads(a), per_head), a.size)
    weight = x.weights.get("weight")
    if weight is None:
        return g.add(kind, trace.rows(a), g.constant(number(x, "number")))
    if weight.numel() in (a.size, 1):
        return g.add(kind, trace.rows(a), g.constant(weight.flatten()))
    return trace.joined(g.add(kind, trace.heads(a), g.constant(weight)), a.size)


def norm(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    """Divide each head by its length; l2 is rms of the numbers · √d with eps / d."""
    g, view, kind, eps = trace.graph, x.inputs[0], x.numbers["kind"], number(x, "eps")
    gain, bias, d = x.weights.get("gain"), x.weights.get("bias"), view.width
    y = trace.rows(view) if view.heads == 1 else trace.heads(view)
    inside = gain is not None and gain.numel() == d
    scale = gain.flatten().float() if inside and gain is not None else torch.ones(d)
    if kind == "length":
        length = g.add("Max", g.add("ReduceL2", y, g.constant([-1], np.int64)), g.constant(eps))
        y, inside = g.add("Div", y, length), False
    elif kind == "layer":
        y = g.add("LayerNormalization", y, g.weight(scale), axis=-1, epsilon=eps)
    else:
        scale, eps = (scale * d**-0.5, eps / d) if kind == "l2" else (scale, eps)
        name = "RMSNormalization" if g.standard else "SimplifiedLayerNormalization"
        y = g.add(name, y, g.weight(scale), axis=-1, epsilon=eps)
    for name, w in (("Mul", None if inside else gain), ("Add", bias)):
        if w is not None:
            y = g.add(name, y, g.weight(w.flatten() if view.heads == 1 else w.reshape(-1, d)))
    return (y if view.heads == 1 else trace.joined(y, view.size),)


def silu(g: Graph, x: str) -> str:
    return g.add("Mul", x, g.add("Sigmoid", x))


def squared_relu(g: Graph, x: str) -> str:
    y = g.add("Relu", x)
    return g.add("Mul", y, y)


FUNCTIONS: dict[str, Callable[[Graph, str], str]] = {
    "identity": lambda g, x: x,
    "silu": silu,
    "gelu": lambda g, x: g.add("Gelu", x),
    "gelu_tanh": lambda g, x: g.add("Gelu", x, approximate="tanh"),
    "relu": lambda g, x: g.add("Relu", x),
    "squared_relu": squared_relu,
    "sigmoid": lambda g, x: g.add("Sigmoid", x),
    "tanh": lambda g, x: g.add("Tanh", x),
    "softplus": lambda g, x: g.add("Softplus", x),
    "exp": lambda g, x: g.add("Exp", x),
    "neg": lambda g, x: g.add("Neg", x),
    "log_sigmoid": lambda g, x: g.add("Neg", g.add("Softplus", g.add("Neg", x))),
}


def apply(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    return (FUNCTIONS[str(x.numbers["function"])](trace.graph, trace.rows(x.inputs[0])),)


def clamp(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    g = trace.graph
    return (g.add("Clip", trace.rows(x.inputs[0]), g.constant(number(x, "least")), g.constant(number(x, "most"))),)


def rotate(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    """Compute x cos + partner sin: of a pair (a, b) the partners are (−b, a); angles of channels that stay are 0."""
    g, view, frequencies = trace.graph, x.inputs[0], x.weights["frequencies"]
    p, d = len(frequencies), view.width
    channels, partner, of_pair = np.arange(d), np.arange(d), np.full(d, -1)
    first = channels[: 2 * p : 2] if x.numbers["interleaved"] else channels[:p]
    second = first + (1 if x.numbers["interleaved"] else p)
    partner[first], partner[second], of_pair[first], of_pair[second] = second, first, np.arange(p), np.arange(p)
    angles = torch.cat([frequencies, frequencies.new_zeros(1)])[torch.from_numpy(of_pair)]
    cos, sin = (g.add("Unsqueeze", y, g.constant([2], np.int64)) for y in trigonometry(trace, angles))
    signs = np.ones(d)
    signs[first] = -1
    y = trace.heads(view)
    swapped = g.add("Gather", y, g.constant(partner, np.int64), axis=-1)
    turned = g.add("Mul", swapped, g.add("Mul", sin, g.constant(signs)))
    return (trace.joined(g.add("Add", g.add("Mul", y, cos), turned), view.size),)
