"""Sequences cut into blocks, and softmax attention within them: what several baselines are made of."""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def softmax_where(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """softmax(q·k/√d) v over the keys that are seen: q (n, h, t, d), k and v (n, h, s, ·), seen (n or 1, h or 1, t, s).

    By torch's fused kernel, which keeps no weights for the backward pass. Queries that see no key yield zeros.
    """
    some = seen.any(-1, keepdim=True)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen | ~some).masked_fill(~some, 0.0)


def blocked(x: Tensor, size: int) -> Tensor:
    """(b, h, t, d) → (b, n, h, size, d), or (b, t) → (b, n, size); zeros behind the end."""
    missing = -x.shape[-1 if x.ndim == 2 else -2] % size
    x = pad(x, (0, missing) if x.ndim == 2 else (0, 0, 0, missing))
    return x.unflatten(1, (-1, size)) if x.ndim == 2 else x.unflatten(2, (-1, size)).transpose(1, 2)


def unblocked(x: Tensor, t: int) -> Tensor:
    """(b, n, h, size, d) → (b, h, t, d)."""
    return x.transpose(1, 2).flatten(2, 3)[:, :, :t]


def with_neighbours(x: Tensor, after: bool) -> Tensor:
    """Blocks (b, n, …, size, d) with the block before and, with `after`, the one behind: (b, n, …, 2 or 3·size, d).

    For a mask (b, n, size), too. There is nothing (zeros, False) before the first block and behind the last.
    """
    axis = 2 if x.ndim == 3 else -2
    nothing = torch.zeros_like(x[:, :1])
    before = torch.cat([nothing, x[:, :-1]], dim=1)
    return torch.cat([before, x, *([torch.cat([x[:, 1:], nothing], dim=1)] if after else [])], dim=axis)


def banded(q: Tensor, k: Tensor, v: Tensor, reach: int, *, causal: bool, real: Tensor, first: int = 0) -> Tensor:
    """Softmax attention to keys at a distance of at most `reach`, and to the `first` tokens; O(t·reach).

    q, k, v (b, h, t, ·); real (b, t). Causal: to those before only, and to itself.
    """
    b, t, device = q.shape[0], q.shape[2], q.device
    keys, values = (with_neighbours(blocked(y, reach), not causal) for y in (k, v))
    n, size = keys.shape[1], keys.shape[3]
    start = torch.arange(n, device=device)[:, None] * reach
    i = (start + torch.arange(reach, device=device))[..., None]  # (n, reach, 1)
    j = (start - reach + torch.arange(size, device=device))[:, None]  # (n, 1, size)
    near = (i - j).abs() <= reach
    if causal:
        near = near & (j <= i)
    seen = near & with_neighbours(blocked(real, reach), not causal)[:, :, None]  # (b, n, reach, size)
    if first:
        places = torch.arange(first, device=device)
        far = places < i - reach if causal else (i - places).abs() > reach
        seen = torch.cat([seen, far & real[:, None, None, :first]], dim=-1)
        keys, values = (_with_first(y, z, first) for y, z in ((keys, k), (values, v)))
    parts = (blocked(q, reach), keys, values)
    o = softmax_where(*(y.flatten(0, 1) for y in parts), seen.flatten(0, 1)[:, None])
    return unblocked(o.unflatten(0, (b, n)), t)


def _with_first(blocks: Tensor, x: Tensor, first: int) -> Tensor:
    """The first tokens of x (b, h, t, d) behind the keys of each block."""
    shared = x[:, None, :, :first].expand(-1, blocks.shape[1], -1, -1, -1)
    return torch.cat([blocks, shared], dim=-2)
