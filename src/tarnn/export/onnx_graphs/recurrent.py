"""Instructions that remember, as ONNX nodes: linear attention, the delta rule, short filters, softmax over all tokens.

Their states are inputs and outputs, with the names that onnxruntime-genai has: past.N.recurrent, past.N.conv,
past_key_values.N.key and .value; N counts the parts of the model's state. The sum of keys that normalises linear attention
is one more column of the values, and of the state.
"""

import numpy as np
import torch

from tarnn.export.onnx_graphs.registers import BATCH, Tracing
from tarnn.export.onnx_graphs.row_wise import FUNCTIONS, number
from tarnn.numerics import default_eps
from tarnn.program.instructions import Instruction, View

PAST, TOTAL = "past_sequence_length", "total_sequence_length"


def part(trace: Tracing, x: Instruction) -> int:
    """Return the number of the part of the state that an instruction has."""
    return trace.program.states[x.states[0]].layer


def filter(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    g, taps, bias = trace.graph, x.weights["taps"], x.weights.get("bias")
    (n, width), function, rows = taps.shape, str(x.numbers["function"]), trace.rows(x.inputs[0])
    if width == 1:
        y = g.add("Mul", rows, g.weight(taps[:, 0]))
        return (FUNCTIONS[function](g, y if bias is None else g.add("Add", y, g.weight(bias))),)
    past, present = trace.state(f"past.{part(trace, x)}.conv", f"present.{part(trace, x)}.conv", BATCH, n, width - 1)
    fused = function == "silu"
    inputs = [
        g.add("Transpose", rows, perm=[0, 2, 1]),
        g.weight(taps[:, None]),
        g.weight(bias) if bias is not None else "",
    ]
    y, _ = g.newer("CausalConvWithState", *inputs, past, outputs=["", present], activation="silu" if fused else "none")
    y = g.add("Transpose", y, perm=[0, 2, 1])
    return (y if fused else FUNCTIONS[function](g, y),)


def attention(
    trace: Tracing,
    x: Instruction,
    q: str,
    k: str,
    v: str,
    state: str,
    sizes: tuple[int, int, int, int],
    *,
    decay: str = "",
    beta: str = "",
) -> str:
    """Append the operator LinearAttention; return (B, T, heads of q · e). sizes: heads of q, of states, f and e.

    state: what its name ends with.
    """
    heads, n, f, e = sizes
    i = part(trace, x)
    past, present = trace.state(f"past.{i}.{state}", f"present.{i}.{state}", BATCH, n, f, e)
    rule = "gated_delta" if beta and decay else "delta" if beta else "gated" if decay else "linear"
    inputs = [q, k, v, past, decay, beta] if beta else [q, k, v, past, decay] if decay else [q, k, v, past]
    y, _ = trace.graph.newer(
        "LinearAttention",
        *inputs,
        outputs=["", present],
        q_num_heads=heads,
        kv_num_heads=n,
        scale=1.0,
        update_rule=rule,
    )
    return y


def decays(trace: Tracing, x: Instruction, register: View | None) -> str:
    """Return the log-decay of each state, (B, T, states or states·f); "" where there is none."""
    weight = x.weights.get("log_decay")
    if register is not None:
        return trace.rows(register)
    return "" if weight is None else trace.per_token(weight.double().tolist())


def repeated(trace: Tracing, view: View, n: int, heads: int) -> str:
    """Return queries or keys (B, T, ·) with a head for each of n states that share those of fewer keys."""
    return trace.repeated(trace.rows(view), view.heads, view.width, max(1, n // heads))


def linear(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    g, (q, k, v, *_) = trace.graph, x.inputs
    n, heads, f, e = max(k.heads, v.heads), x.outputs[0].heads, k.width, v.width
    decay = decays(trace, x, x.inputs[int(number(x, "decay"))] if "decay" in x.numbers else None)
    queries, keys = (repeated(trace, y, n, k.heads) for y in (q, k))
    if not x.numbers["normalize"]:
        return (attention(trace, x, queries, keys, trace.rows(v), "recurrent", (heads, n, f, e), decay=decay),)
    if "denominator" in x.numbers:
        at = int(number(x, "denominator"))
        of_sum = [repeated(trace, y, n, k.heads) for y in x.inputs[at : at + 2]]
        ones = trace.per_token([1.0] * n)
        den = attention(trace, x, of_sum[0], of_sum[1], ones, "sum", (heads, n, f, 1), decay=decay)
        num = attention(trace, x, queries, keys, trace.rows(v), "recurrent", (heads, n, f, e), decay=decay)
        num, den = trace.split(num, heads, e), trace.split(den, heads, 1)
    else:
        one_more = g.constant([0] * 7 + [1], np.int64)
        values = trace.joined(g.add("Pad", trace.heads(v), one_more, g.constant(1.0)), n * (e + 1))
        y = attention(trace, x, queries, keys, values, "recurrent", (heads, n, f, e + 1), decay=decay)
        y = trace.split(y, heads, e + 1)
        num, den = g.sliced(y, 0, e), g.sliced(y, e, e + 1)
    eps = number(x, "eps") or default_eps(torch.float32)
    return (trace.joined(g.add("Div", num, g.add("Add", den, g.constant(eps))), heads * e),)


def delta(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    q, k, v, beta, *register = x.inputs
    n, heads = max(k.heads, v.heads), x.outputs[0].heads
    decay = decays(trace, x, register[0] if register else None)
    queries, keys = (repeated(trace, y, n, k.heads) for y in (q, k))
    values = repeated(trace, v, n, v.heads)
    sizes = (heads, n, k.width, v.width)
    return (attention(trace, x, queries, keys, values, "recurrent", sizes, decay=decay, beta=trace.rows(beta)),)


def softmax(trace: Tracing, x: Instruction) -> tuple[str, ...]:
    """Attend to all tokens so far, whose keys and values are (B, heads, S, width)."""
    g, (q, k, *v), i = trace.graph, x.inputs, part(trace, x)
    h, e, shared = q.heads, x.outputs[0].width, q.heads // k.heads
    kept = []
    for name, view in zip(("key", "value"), (k, *v), strict=False):
        shapes = [(BATCH, view.heads, length, view.width) for length in (PAST, TOTAL)]
        past, present = trace.state(f"past_key_values.{i}.{name}", f"present.{i}.{name}", *shapes[0], grown=shapes[1])
        new = g.add("Transpose", trace.heads(view), perm=[0, 2, 1, 3])
        kept.append(g.add("Concat", past, new, axis=2, name=present))
    keys, values = kept[0], kept[-1] if v else g.sliced(kept[0], 0, e)
    queries = g.add("Mul", trace.heads(q), g.constant(number(x, "scale")))
    queries = g.reshape(g.add("Transpose", queries, perm=[0, 2, 1, 3]), 0, k.heads, -1, q.width)
    scores = g.add("MatMul", queries, g.add("Transpose", keys, perm=[0, 1, 3, 2]))  # (B, g, shared · T, S)
    if not trace.one_token:
        whole = g.add("Shape", scores)
        apart = g.add(
            "Concat", *(g.constant(y, np.int64) for y in ([0], [k.heads * shared])), *_lengths(trace, i), axis=0
        )
        scores = g.add("Where", _seen(trace, i), g.add("Reshape", scores, apart), g.constant(-np.inf))
        scores = g.add("Reshape", scores, whole)
    o = g.add("MatMul", g.add("Softmax", scores), values)
    o = g.add("Transpose", g.reshape(o, 0, h, -1, e), perm=[0, 2, 1, 3])
    return (trace.joined(o, h * e),)


def _lengths(trace: Tracing, i: int) -> tuple[str, str]:
    """Return T, and the number of all tokens so far."""
    g = trace.graph
    new = g.add("Shape", trace.ids, start=1, end=2)
    return new, g.add("Add", new, g.add("Shape", f"past_key_values.{i}.key", start=2, end=3))


def _seen(trace: Tracing, i: int) -> str:
    """Return which tokens a new token sees, (T, S): itself and those before."""
    g = trace.graph
    new, total = (g.add("Squeeze", y) for y in _lengths(trace, i))
    zero, one = g.constant(0, np.int64), g.constant(1, np.int64)
    places = g.add("Range", g.add("Sub", total, new), total, one)
    return g.add("LessOrEqual", g.add("Range", zero, total, one), g.add("Unsqueeze", places, g.constant([1], np.int64)))


RECURRENT = {f.__name__: f for f in (filter, linear, delta, softmax)}
