"""A recurrence in plain PyTorch, chunk by chunk: beside inputs and results lives one chunk's worth of temporaries.

A call is a `Recurrent` one with x (b, t, …) first, the state h before it or None, and key_mask. `one_chunk` computes, of
differentiable operations, a short call that is not packed: its outputs, o and h.

Backward: forward again for the states before all chunks; then, from the last chunk to the first, each one's derivative.
Where something else differentiates `forward`, all temporaries are kept.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tarnn.numerics import full_precision

CHUNK = 32  # tokens

OneChunk = Callable[[Any], Any]


def forward(call: Any, one_chunk: OneChunk) -> Any:
    """Return the outputs of a call."""
    pieces, states = [], []
    with full_precision(call.x):
        for rows, chunks in _sequences(call):
            h = _before(call, rows)
            for start, stop in chunks:
                part = one_chunk(_part(call, start, stop, h))
                pieces.append(part.o)
                h = part.h
            states.append(h)
    o = torch.cat(pieces, 1) if pieces else call.x.clone(memory_format=torch.contiguous_format)
    return call.outputs(o, torch.cat(states) if states else call.new_state())


def backward(call: Any, returned: Any, one_chunk: OneChunk) -> Any:
    """The gradients of a call's tensors, where those of its outputs are `returned.grad_o` and `returned.grad_h`."""
    gradients = call.new_gradients()
    tensors = {name: x for name, x in zip(gradients._fields, call) if x is not None and name != "h"}
    # those of what has no time are sums over it
    sums = {name: torch.zeros_like(x, dtype=call.dtype) for name, x in tensors.items() if name not in call.in_time}
    with full_precision(call.x):
        for rows, chunks in _sequences(call):
            parts, h = [], _before(call, rows)
            for start, stop in chunks:
                parts.append(_part(call, start, stop, h))
                h = one_chunk(parts[-1]).h
            carried = torch.zeros_like(h) if returned.grad_h is None else returned.grad_h[rows]
            for (start, stop), part in zip(reversed(chunks), reversed(parts)):
                sent = torch.zeros_like(part.x) if returned.grad_o is None else returned.grad_o[:, start:stop]
                found = _derivative(one_chunk, part, [*tensors, "h"], (sent, carried))
                carried = found["h"]
                for name in tensors:
                    if name in sums:
                        sums[name] += found[name]
                    else:
                        getattr(gradients, name)[:, start:stop] = found[name]
            if gradients.h is not None:
                gradients.h[rows] = carried
    for name, total in sums.items():
        getattr(gradients, name).copy_(total)
    return gradients


def step(call: Any, one_chunk: OneChunk, inplace: bool) -> Any:
    """One token: the outputs, whose state is the call's own, written to, where `inplace`."""
    with full_precision(call.x):
        part = one_chunk(call._replace(h=_before(call, slice(None))))
    return part._replace(h=call.h.copy_(part.h)) if inplace else part


def _derivative(one_chunk: OneChunk, part: Any, names: list[str], sent: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    def results(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        outputs = one_chunk(part._replace(**dict(zip(names, inputs))))
        return outputs.o, outputs.h

    _, pull, *_ = torch.func.vjp(results, *(getattr(part, name) for name in names))
    return dict(zip(names, pull(sent)))


def _sequences(call: Any) -> Iterator[tuple[slice, list[tuple[int, int]]]]:
    """The rows of the state that belong to a stretch of time, and where its chunks begin and end."""
    cuts = call.cuts()
    stretches = [(0, call.x.shape[1])] if cuts is None else list(zip(cuts, cuts[1:]))
    for i, (first, last) in enumerate(stretches):
        rows = slice(None) if cuts is None else slice(i, i + 1)
        yield rows, [(start, min(start + CHUNK, last)) for start in range(first, last, CHUNK)]


def _before(call: Any, rows: slice) -> Tensor:
    return torch.zeros_like(call.new_state()[rows]) if call.h is None else call.h[rows]


def _part(call: Any, start: int, stop: int, h: Tensor) -> Any:
    """The call on some of its tokens, from the state h on."""
    tokens = {name: getattr(call, name)[:, start:stop] for name in call.in_time}
    mask = None if call.key_mask is None else call.key_mask[:, start:stop]
    return call._replace(h=h, key_mask=mask, cu_seqlens=None, **tokens)
