"""Drawn calls in bfloat16 that flash-linear-attention's kernels compute, and how far their results are from the definitions'.

The rule: each error is at most twice that of the definition computed in bfloat16, and one rounding.
"""

from dataclasses import replace

import torch
from fuzz import errors

from support import drawn_calls, fuzz_calls

ROUNDING = torch.finfo(torch.bfloat16).eps


def linear_drawn(number: int) -> fuzz_calls.Drawn:
    """A drawn call that is causal, and has neither log-weights nor features that are some."""
    drawn = replace(fuzz_calls.draw(5, number), causal=True, weighted=False, steep=0.0, dtype="bfloat16")
    if drawn.feature_map not in ("elu", "relu", "squared_relu", "identity", "random relu"):
        drawn = replace(drawn, feature_map="elu", m=0)
    decay = ("none", "token", "channel", drawn.decay)[number % 4]
    return replace(drawn, s=drawn.t, e=max(drawn.e, 1), decay=decay)


def linear_excess(drawn: fuzz_calls.Drawn) -> dict[str, float]:
    """The errors of outputs, sums and gradients, over what they may be."""
    call = fuzz_calls.Call(drawn)
    exact = call.definition(torch.float64)
    low = errors(call.definition(torch.bfloat16), exact)
    return {kind: error / (2 * low[kind] + ROUNDING) for kind, error in errors(call.ours(), exact).items()}


def delta_excess(number: int) -> list[float]:
    """The errors of outputs, the state and gradients, over what they may be; ∞ if something later changed an output."""
    ours, steady = drawn_calls.computed(drawn_calls.drawn("delta", number, "bfloat16"))
    call = drawn_calls.drawn("delta", number, "bfloat16")
    exact, low = (call.leaves(dtype) for dtype in (torch.float64, torch.bfloat16))
    right = exact.numbers(exact.defined())
    pairs = zip(drawn_calls.errors(ours, right), drawn_calls.errors(low.numbers(low.defined()), right))
    return [mine / (2 * theirs + ROUNDING) for mine, theirs in pairs] if steady else [torch.inf]
