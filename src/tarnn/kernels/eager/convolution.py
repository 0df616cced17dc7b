"""Short convolution in plain PyTorch, any device.

Tokens stand in a row with w − 1 places before each sequence, for the state or for zeros; masked ones are left out. Then
every output is a sum of w shifted products, whatever the sequences. Where nothing is masked or packed, the rows of the batch are
such rows already.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from tarnn.kernels.convolution import Call, Outputs
from tarnn.kernels.eager import refusal as refusal
from tarnn.numerics import full_precision


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    with full_precision(call.x):
        if call.key_mask is None and call.cu_seqlens is None:
            return _of_whole_rows(call)
        call.cuts()
        return _of_places(call)


def step(call: Call, *, inplace: bool = False) -> Outputs:
    """One token of each row; in place, the state of the call is written to."""
    outputs = forward(call)
    if not inplace:
        return outputs
    assert call.S is not None, "a step in place has a state"
    return Outputs(outputs.o, call.S.copy_(outputs.S))


def _of_whole_rows(call: Call) -> Outputs:
    (b, t, c), width = call.x.shape, call.weight.shape[1]
    before = call.x.new_zeros(b, call.before, c) if call.S is None else call.S
    after = call.x.new_zeros(b, width - 1 - call.before, c)
    padded = torch.cat([before, call.x, after], 1)
    behind = padded[:, t:] if call.causal else padded[:, :0]
    return Outputs(_filtered(call, padded), behind.clone(memory_format=torch.contiguous_format))


def _filtered(call: Call, padded: Tensor) -> Tensor:
    """(…, t + w − 1, c) → (…, t, c), summed from the oldest token to the newest, as every kernel does."""
    width = call.weight.shape[1]
    padded, t = padded.to(call.dtype), padded.shape[-2] - width + 1
    total = torch.zeros_like(call.weight[:, 0]) if call.bias is None else call.bias
    for i in range(width):
        total = total + call.weight[:, i] * padded[..., i : i + t, :]
    return (silu(total) if call.silu else total).to(call.x.dtype)


class _Places(NamedTuple):
    """Where things stand in the one row of all sequences."""

    source: Tensor  # (l,)  of each place: 0 for zeros, then the tokens of all states, then those of x
    token: Tensor  # (b·t,)  the place of each token; of a masked one any
    behind: Tensor  # (n·(w − 1),)  the places of the states after all tokens


def _of_places(call: Call) -> Outputs:
    c, width = call.x.shape[2], call.weight.shape[1]
    places = _places(call)
    sources = [call.x.new_zeros(1, c), *([] if call.S is None else [call.S.flatten(0, 1)]), call.x.flatten(0, 1)]
    row = torch.cat(sources).index_select(0, places.source)
    # a place less than `before` is that of a masked token
    o = _filtered(call, row).index_select(0, (places.token - call.before).clamp(min=0)).unflatten(0, call.x.shape[:2])
    if call.key_mask is not None:
        o = o.masked_fill(~call.key_mask[..., None], 0.0)
    behind = row.index_select(0, places.behind if call.causal else places.behind[:0])
    return Outputs(o, behind.unflatten(0, (call.num_sequences, width - 1 if call.causal else 0)))


def _places(call: Call) -> _Places:
    (b, t, _), halo, n = call.x.shape, call.weight.shape[1] - 1, call.num_sequences
    device = call.x.device
    real = torch.ones(b * t, dtype=torch.bool, device=device) if call.key_mask is None else call.key_mask.flatten()
    so_far = torch.nn.functional.pad(real.cumsum(0), (1, 0))  # real tokens before each token, and in all
    index, sequence = torch.arange(b * t, device=device), torch.arange(n, device=device)
    if call.cu_seqlens is None:
        starts, ends = t * sequence, t * (sequence + 1)
    else:
        starts, ends = call.cu_seqlens[:-1].long(), call.cu_seqlens[1:].long()
    of_token = torch.searchsorted(ends, index, right=True)  # its sequence
    token = halo * (of_token + 1) + so_far[:-1]
    room = (halo * sequence)[:, None] + torch.arange(halo, device=device)  # (n, w − 1)
    last = n * halo + b * t + halo  # a place that nobody reads, for what is masked
    source = index.new_zeros(last + 1)
    states = 0
    if call.S is not None:
        states = n * halo
        before = (room + so_far[starts][:, None]).flatten()
        source = source.scatter(0, before, 1 + torch.arange(states, device=device))
    source = source.scatter(0, torch.where(real, token, last), 1 + states + index)[:last]
    return _Places(source, token, (room + so_far[ends][:, None]).flatten())
