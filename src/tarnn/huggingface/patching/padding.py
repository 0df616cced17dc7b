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

from tarnn.huggingface.padded_prompts import take, turns
from tarnn.huggingface.patching.gaps import by_rows, gaps_here


def layer_with_padding(mask: str = "attention_mask") -> Callable[[Callable], Callable]:
    """Make the forward of a layer `(hidden_states, …)` right with padding on either side; `mask` names that argument.

    Other positional arguments, as Qwen4-exp's token ids, are in the order of time too.
    """

    def replace(original: Callable) -> Callable:
        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            x, real = args[0] if args else kwargs["hidden_states"], kwargs.get(mask)
            if (kept := gaps_here(x.shape[1])) is not None:
                return by_rows(original, self, args, kwargs, kept, mask)
            if real is None or x.device.type != "cpu":
                return original(self, *args, **kwargs)
            t = x.shape[1]
            real = real[:, -t:]  # Mamba hands on a mask that says of the cache's tokens too
            if not _may_end_in_padding(real):
                return original(self, *args, **{**kwargs, mask: real})
            there, back = turns(real.bool())
            if not args:
                kwargs["hidden_states"] = take(x, there)
            args = tuple(take(y, there) if isinstance(y, Tensor) else y for y in args)
            outputs = original(self, *args, **{**kwargs, mask: real.gather(1, there)})
            if isinstance(outputs, tuple):
                return (take(outputs[0], back), *outputs[1:])
            return take(outputs, back)

        return forward

    return replace


def _may_end_in_padding(mask: Tensor) -> bool:
    """Whether a row of the mask (b, t) ends in padding; while a graph is traced, which can't know, it may."""
    return torch.compiler.is_compiling() or not bool(mask[:, -1].all())
