"""Hybrid attention as an instruction: softmax over near keys, and beyond them what each key head reaches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.program.feature_functions import width_of
from tarnn.program.instructions import Number
from tarnn.program.recording import LayerState, ProgramError, Register

REACHES = ("features", "window", "exact")


def hybrid(
    q: Register,
    k: Register,
    v: Register,
    *,
    reach: Sequence[str],
    scale: float,
    window: int,
    sinks: int = 0,
    queries: Mapping[str, Any] | None = None,
    keys: Mapping[str, Any] | None = None,
    far_bias: Float[Tensor, " h"] | None = None,
    far_until: int | None = None,
    log_features: bool = False,
) -> Register:
    """Attend by softmax to the `sinks` first tokens and to those nearer than `window`, and to others as each key head reaches.

    reach, of each key head: "window": others are not seen; "exact": all keys are near; "features": the weight of others is
    e^bias φ(q)·φ(k) in the same denominator, for queries before position `far_until`; None: all.
    queries, keys: the arguments of `recording.features` that make φ of each; their tensors of heads have one for each key head
    that reaches features. log_features: they make log φ, and each feature's sums have a maximum of their own. far_bias: of each
    query head, by default 0.

    A key enters the sums when it leaves the window, so the state has k and v of sinks and window, a ring, then S, z, M and count:
    a `HybridState` of the heads that reach features, another of those with a window alone, and a `KVCache` of the exact ones.
    """
    numbers: dict[str, Number] = {"scale": scale, "window": window, "sinks": sinks, "log_features": log_features}
    numbers["reach"] = tuple(REACHES.index(x) for x in reach)
    numbers["far_until"] = -1 if far_until is None else far_until
    fits = (
        q.width == k.width and k.heads == v.heads == len(reach) and q.heads % k.heads == 0 and window > 0 and sinks >= 0
    )
    if not fits or (("features" in reach) != (keys is not None)) or (queries is None) != (keys is None):
        raise ProgramError(
            f"hybrid attention of {q.heads} × {q.width} queries, {k.heads} × {k.width} keys and {v.heads} × {v.width} values, "
            f"{len(reach)} reaches and features of {'no' if keys is None else 'some'} keys do not fit."
        )
    if keys is not None and keys["function"] == "cosformer":
        raise ProgramError("cosformer weighs keys by their distance, which hybrid attention does not know.")
    weights: dict[str, Tensor] = {} if far_bias is None else {"far_bias": far_bias}
    for side, arguments in (("queries", queries or {}), ("keys", keys or {})):
        for name, x in {**arguments, **(arguments.get("move") or {})}.items():
            if isinstance(x, Tensor):
                weights[f"{side}.{name}"] = x
            elif name != "move" and x is not None:
                numbers[f"{side}.{name}"] = x
    f, of_queries = (0 if x is None else width_of(x["function"], k.width, x.get("omega"), x) for x in (keys, queries))
    if f != of_queries:
        raise ProgramError(f"hybrid attention of {of_queries} features of queries and {f} of keys.")
    states = []
    for kind in filter(list(reach).count, REACHES):
        g, width = list(reach).count(kind), f if kind == "features" else 0
        if kind == "exact":
            state = q.record.state("KVCache")
            states += [state.add(name, g, 0, x.width, grows=1) for name, x in (("k", k), ("v", v))]
        else:
            maxima = (g, width) if log_features and width else (g,)
            states += ring_state(q.record.state("HybridState"), g, sinks + window, (k.width, v.width), width, maxima)
    return q.record.add("hybrid", (q, k, v), [(q.heads, v.width)], weights, numbers, states)[0]


def ring_state(
    state: LayerState, g: int, room: int, widths: tuple[int, int], num_features: int, maxima: tuple[int, ...]
) -> list[int]:
    """Declare a ring of keys and values of g heads and the sums over those that have left it."""
    rings = [state.add(name, g, room, width) for name, width in zip("kv", widths, strict=True)]
    sums = [state.add("S", g, num_features, widths[1]), state.add("z", g, num_features)]
    return [*rings, *sums, state.add("M", *maxima, fill=float("-inf")), state.add("count", dtype=torch.int64)]
