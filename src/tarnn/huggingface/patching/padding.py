"""Padding after a text: a row is turned until its padding stands before it, which linear layers leave out exactly.

transformers sets padded inputs of a linear layer to zero. Before a text that is right: a state of nothing stays nothing. After
it the state goes on to decay and the convolution's last inputs become zeros, so what is generated next is wrong.
A layer that knows positions only by their order may be given the row in another order.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def layer_with_padding(mask_name: str = "attention_mask", also: Callable[[Callable], Callable] | None = None) -> Callable:
    """The forward of a layer `(hidden_states, …)` that is right with padding on either side."""

    def replace(original: Callable) -> Callable:
        inner = original if also is None else also(original)

        @functools.wraps(original)
        def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            mask = kwargs.get(mask_name)
            if mask is None or not _ends_in_padding(mask):
                return inner(self, hidden_states, *args, **kwargs)
            turned, back = _turns(mask.bool())
            kwargs[mask_name] = mask.gather(1, turned)
            outputs = inner(self, _take(hidden_states, turned), *args, **kwargs)
            if isinstance(outputs, tuple):
                return (_take(outputs[0], back), *outputs[1:])
            return _take(outputs, back)

        return forward

    return replace


def _ends_in_padding(mask: Tensor) -> bool:
    """Whether a row of the mask (b, t) ends in padding; while a graph is traced, which can't know, it may."""
    return torch.compiler.is_compiling() or not bool(mask[:, -1].all())


def _turns(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where each token of the turned rows (b, t) comes from, and where each token of the rows went."""
    t = mask.shape[1]
    place = torch.arange(t, device=mask.device)
    last = torch.where(mask, place, -1).amax(1, keepdim=True)  # (b, 1): the last token; −1 for a row of padding alone
    shift = torch.where(last < 0, 0, t - 1 - last)
    return (place - shift) % t, (place + shift) % t


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))
