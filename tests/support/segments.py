"""Attention of one segment to itself and to a memory, by the formula of Transformer-XL, one query after the other."""

import math

import torch
from torch import Tensor


def heads(layer, name: str, x: Tensor) -> Tensor:
    """Queries, keys or values of x, (b, t, h, d)."""
    y = getattr(layer, f"{name}_proj")(x).unflatten(-1, (-1, layer.head_dim))
    norm = getattr(layer, f"{name}_norm", None)
    return y if norm is None else norm(y)


def attended(layer, x: Tensor, past: Tensor) -> Tensor:
    """A segment's outputs, (b, t, hidden). past: the inputs of the places that are remembered."""
    source, old, out = torch.cat([past, x], 1), past.shape[1], []
    q, k, v = (heads(layer, name, y) for name, y in (("q", x), ("k", source), ("v", source)))
    width = layer.hidden_size
    rates = 10000 ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    for i in range(x.shape[1]):
        seen = old + i + 1
        angles = (old + i - torch.arange(seen, dtype=x.dtype))[:, None] * rates
        # (seen, h, d)
        r = layer.r_proj(torch.cat([angles.sin(), angles.cos()], -1)).unflatten(-1, (-1, layer.head_dim))
        content = torch.einsum("bhd,bshd->bhs", q[:, i] + layer.u[:, 0, 0], k[:, :seen])
        position = torch.einsum("bhd,shd->bhs", q[:, i] + layer.w[:, 0, 0], r)
        weights = ((content + position) / math.sqrt(layer.head_dim)).softmax(-1)
        out.append(torch.einsum("bhs,bshd->bhd", weights, v[:, :seen]).flatten(1))
    return layer.o_proj(torch.stack(out, 1))
