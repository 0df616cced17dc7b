"""The definition of short convolution. Every fast path is held against it, in float64.

Plain torch, no imports of ours, and no thought of speed. Of a sequence y_0, y_1, … of its *real* tokens, those that are not
masked, with zeros (or a state) before it and zeros behind it,

    o_i = a(bias + Σ_l weight_l y_(i − p + l))      l = 0 … w − 1, channel by channel

with p = w − 1 where causal, and p = (w − 1) // 2 where the filter is centred; a is nothing, or silu(x) = x / (1 + e^−x).
A masked token is absent: the filter reaches over it to the real tokens before, and its output is zero.
"""

import torch
from torch import Tensor


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool = True,
    activation: str | None = None,
    key_mask: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x (b, t, c), weight (c, w), bias (c,), key_mask (b, t) bool, state (b, w − 1, c): o (b, t, c), and the last w − 1 real
    tokens of each row."""
    (b, t, c), width = x.shape, weight.shape[1]
    before = width - 1 if causal else (width - 1) // 2
    rows, states = [], []
    for row in range(b):
        real = [i for i in range(t) if key_mask is None or bool(key_mask[row, i])]
        past = [x.new_zeros(c)] * (width - 1) if state is None else list(state[row])
        tokens = [*past, *(x[row, i] for i in real), *[x.new_zeros(c)] * (width - 1)]
        outputs = {i: x.new_zeros(c) for i in range(t)}
        for number, i in enumerate(real):
            first = number + len(past) - before
            total = x.new_zeros(c) if bias is None else bias
            for j in range(width):
                total = total + weight[:, j] * tokens[first + j]
            outputs[i] = total * total.sigmoid() if activation == "silu" else total
        rows.append(torch.stack([outputs[i] for i in range(t)]) if t else x.new_zeros(0, c))
        last = tokens[len(real) : len(real) + width - 1]
        states.append(torch.stack(last) if last else x.new_zeros(0, c))
    if not b:
        return x, x.new_zeros(0, width - 1, c)
    return torch.stack(rows), torch.stack(states)
