"""Softmax attention of sequences that several ranks share: queries stay where they are, keys and values come to all ranks.

Each rank holds all keys and values while it attends, so memory grows with the whole sequence here, unlike in linear attention.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tarnn.ops.softmax.cache import KVCache
from tarnn.ops.softmax.op import attend
from tarnn.parallel.agreement import looks
from tarnn.parallel.collectives import gather, gather_plain
from tarnn.parallel.group import Layout, Ranks, refuse
from tarnn.parallel.stretch import Stretch


def compute_attention(
    ranks: Ranks,
    whole: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    key_log_weight: Tensor | None,
    state: KVCache | None,
    return_state: bool,
    inplace: bool,
    return_weights: bool,
) -> Any:
    """Compute `softmax_attention` of this rank's queries: o, or (o, the cache with the keys of all ranks)."""
    if return_weights:
        refuse("return_weights of softmax attention", "Compute the weights outside of tarnn.parallel.sequence.")
    facts: dict[str, Any] = {"the op": "softmax_attention", "causal": causal, "gradients": torch.is_grad_enabled()}
    in_time = {"q": q, "k": k, "v": v, "key_log_weight": key_log_weight}
    facts |= {name: looks(x, 2) for name, x in in_time.items()}
    facts |= {"key_mask": looks(key_mask, 1), "state": repr(state), "return_state": return_state}
    stretch = Stretch.agreed(ranks, k.shape[2], cu_seqlens, facts)
    layout = stretch.layout
    weight = None if key_log_weight is None else key_log_weight[..., None].to(k.dtype)
    if layout.starts[-1]:
        k, v, weight = _whole(layout, *gather(ranks, *_padded(layout, k, v, weight)))
    if key_mask is not None and layout.starts[-1]:
        mask = _padded(layout, key_mask[:, None, :, None].to(torch.uint8))[0]
        key_mask = _whole(layout, gather_plain(ranks, mask))[0][:, 0, :, 0].bool()
    weight = None if weight is None else weight[..., 0]
    if (cuts := stretch.cuts) is not None:
        pieces = []
        for number, (begin, end) in zip(stretch.here, pairwise(stretch.bounds)):
            first = cuts[number]
            keys = slice(first, layout.offset + end if causal else cuts[number + 1])
            options: dict[str, Any] = {"causal": causal, "scale": scale, "past": layout.offset + begin - first}
            options |= {"key_log_weight": None if weight is None else weight[:, :, keys], "key_mask": None}
            pieces.append(attend(q[:, :, begin:end], k[:, :, keys], v[:, :, keys], **options))
        return torch.cat(pieces, 2)
    past = 0 if state is None else state.length
    if state is None:
        state = KVCache(k, v, k.shape[2], key_mask)
    elif k.shape[2]:
        state = state.append(k, v, key_mask, inplace=inplace)
    k, v, key_mask = state.read(q.dtype)
    past += layout.offset
    if causal:  # later keys are not even looked at
        k, v = (x[:, :, : past + q.shape[2]] for x in (k, v))
        weight = None if weight is None else weight[:, :, : past + q.shape[2]]
        key_mask = None if key_mask is None else key_mask[:, : past + q.shape[2]]
    o = attend(q, k, v, causal=causal, past=past, scale=scale, key_mask=key_mask, key_log_weight=weight)
    return (o, state) if return_state else o


def _padded(layout: Layout, *tensors: Tensor | None) -> list[Any]:
    """Pad tensors in time (axis 2) to the longest stretch."""
    longest = max(end - start for start, end in pairwise(layout.starts))
    return [None if x is None else pad(x, (0, 0, 0, longest - x.shape[2])) for x in tensors]


def _whole(layout: Layout, *gathered: Tensor | None) -> list[Any]:
    """Lay the stretches (ranks, b, g, longest, ·) of all ranks end to end, without padding."""
    lengths = [end - start for start, end in pairwise(layout.starts)]
    return [None if x is None else torch.cat([x[i, :, :, :n] for i, n in enumerate(lengths)], 2) for x in gathered]
