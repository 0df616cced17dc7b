"""The gradients of a recurrence, segment by segment of time: each runs again, from the state that was kept before it.

For ops whose call has a state S, whose outputs are o and the state S behind it, and whose gradients are `new_gradients`. Beside
the results lives what autograd keeps of one segment.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def backward(whole: Callable[[Any], Any], call: Any, returned: Any, segment: int, in_time: Sequence[str]) -> Any:
    """The gradients of a call that isn't packed, of which `whole` computes the outputs in differentiable operations.

    in_time: the call's fields with axes (b, h, t, …). returned: `grad_o`, `grad_S`, and `kept`, the states before all segments
    but the first, one after the other; they are computed again if it is None.
    """
    starts = range(0, max(1, call[0].shape[2]), segment)
    states = _states(whole, call, starts, in_time) if returned.kept is None else [call.S, *returned.kept]
    gradients = call.new_gradients(returned, state=call.S is not None)
    grad_S = returned.grad_S
    for start, S in zip(reversed(starts), reversed(states)):
        time = slice(start, start + segment)
        grad_o = None if returned.grad_o is None else returned.grad_o[:, :, time]
        parts = _of_segment(whole, _at(call, time, in_time)._replace(S=S), grad_o, grad_S, in_time)
        for name in in_time:
            if name in parts:
                getattr(gradients, name)[:, :, time] = parts[name]
        grad_S = parts.get("S")
    return gradients._replace(S=grad_S)


def _at(call: Any, time: slice, in_time: Sequence[str]) -> Any:
    """The call on a part of its tokens."""
    parts = {name: None if (x := getattr(call, name)) is None else x[:, :, time] for name in in_time}
    mask = None if call.key_mask is None else call.key_mask[:, time]
    return call._replace(key_mask=mask, **parts)


def _states(whole: Callable[[Any], Any], call: Any, starts: range, in_time: Sequence[str]) -> list[Tensor | None]:
    states = [call.S]
    for start in starts[:-1]:
        part = _at(call, slice(start, start + starts.step), in_time)
        states.append(whole(part._replace(S=states[-1])).S)
    return states


def _of_segment(
    whole: Callable[[Any], Any], call: Any, grad_o: Tensor | None, grad_S: Tensor | None, in_time: Sequence[str]
) -> dict[str, Tensor]:
    """The gradients, by name. By torch.func, which differentiates within operators too, unlike autograd."""
    tensors = {name: x for name in (*in_time, "S") if (x := getattr(call, name)) is not None}

    def results(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        outputs = whole(call._replace(**dict(zip(tensors, inputs))))
        return outputs.o, outputs.S

    (o, S), pull, *_ = torch.func.vjp(results, *tensors.values())
    sent = [torch.zeros_like(y) if x is None else x.to(y.dtype) for x, y in ((grad_o, o), (grad_S, S))]
    return dict(zip(tensors, pull(tuple(sent))))
