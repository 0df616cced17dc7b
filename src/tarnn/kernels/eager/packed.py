"""Packed sequences in plain PyTorch: groups of similar length, each padded to a batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.packing import buckets


def forward(
    whole: Callable[[Any], Any], call: Any, cuts: list[int], in_time: Sequence[str], per_sequence: Sequence[str]
) -> Any:
    """The outputs of a packed call of any op, by `whole`, its forward pass for calls that aren't packed.

    in_time: the call's fields with axes (1, h, t, …). per_sequence: its fields and its outputs with (n, …); other outputs are
    in time. The call has `key_mask`, `cu_seqlens` and `new_outputs()`.
    """
    total = call.new_outputs()
    for members, index, real in buckets(cuts, call[0].device):
        part = whole(_bucket(call, members, index, real, in_time, per_sequence))
        for name, target, source in zip(total._fields, total, part):
            if name not in per_sequence:
                _put(target, source, index, real)
            elif target is not None and source is not None:
                target[members] = source
    return total


def backward(
    whole: Callable[[Any, Any], Any],
    call: Any,
    returned: Any,
    cuts: list[int],
    in_time: Sequence[str],
    per_sequence: Sequence[str],
) -> Any:
    """The gradients of a packed call of any op, by `whole`, its backward pass for calls that aren't packed.

    Those of tensors that are neither in time nor one for each sequence are summed. What a backend keeps is not read.
    """
    total = call.new_gradients(returned)
    for members, index, real in buckets(cuts, call[0].device):
        picked = {name: _pick(x, index) for name in _IN_TIME if (x := getattr(returned, name, None)) is not None}
        rows = _rows(returned, [name for name in _PER_SEQUENCE if name in returned._fields], members)
        if "grad_o" in picked:  # padded queries must not send gradients back: their output is nobody's
            picked["grad_o"] = picked["grad_o"].masked_fill(~real[:, None, :, None], 0.0)
        given = returned._replace(**picked, **rows)._replace(kept=None)
        part = whole(_bucket(call, members, index, real, in_time, per_sequence), given)
        for name, target, source in zip(total._fields, total, part):
            if target is None or source is None:
                continue
            if name in in_time:
                _put(target, source, index, real)
            elif name in per_sequence:
                target[members] = source
            else:
                target += source
    return total


# fields of what returns to a call with axes (1, h, t, …), and with (n, …)
_IN_TIME = ("grad_o", "o", "den")
_PER_SEQUENCE = ("grad_S", "grad_z", "S_behind", "z_behind", "M_behind")


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """(1, h, T, …) at token index (n, l) as a batch, (n, h, l, …)."""
    return x[0][:, index].transpose(0, 1)


def _bucket(
    call: Any, members: Tensor, index: Tensor, real: Tensor, in_time: Sequence[str], per_sequence: Sequence[str]
) -> Any:
    """The call on some of its sequences, padded to a batch."""
    picked = {name: None if (x := getattr(call, name)) is None else _pick(x, index) for name in in_time}
    before = _rows(call, per_sequence, members)
    mask = real if call.key_mask is None else real & call.key_mask[0][index]
    return call._replace(key_mask=mask, cu_seqlens=None, **picked, **before)


def _rows(record: Any, names: Sequence[str], members: Tensor) -> dict[str, Any]:
    """These fields of a record, of some of the sequences."""
    return {name: None if (x := getattr(record, name)) is None else x[members] for name in names}


def _put(target: Tensor | None, source: Tensor | None, index: Tensor, real: Tensor) -> None:
    if target is not None and source is not None:
        target[0][:, index[real]] = source.transpose(0, 1)[:, real].to(target.dtype)


def in_time(call: Any, parts: list[Tensor]) -> Tensor:
    """o in the layout of q. (Not written into one tensor: torch.vmap, of any of the inputs, would refuse that.)"""
    if call.side_by_side:
        return torch.cat([x.transpose(1, 2) for x in parts], 1).contiguous().transpose(1, 2)
    return torch.cat(parts, 2)
