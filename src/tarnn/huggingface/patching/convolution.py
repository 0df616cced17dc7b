"""The short convolution before most linear layers: whole sequences, and one token with the cache's last inputs."""

from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from tarnn.huggingface.patching.in_place import keeps_graph
from tarnn.huggingface.patching.packed import bounds_of, end_to_end
from tarnn.huggingface.patching.undo import lengthen, recording
from tarnn.ops.convolution.op import short_convolution, short_convolution_step
from tarnn.ops.states import ConvolutionState

_OURS = {None: None, "silu": "silu", "swish": "silu"}


def convolve_sequences(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    """hidden_states (b, c, t), weight (c, w), bias (c,): (b, c, t), which is (b, t, c) in memory."""
    x, bounds = hidden_states.transpose(1, 2), bounds_of(kwargs)
    rows = x if bounds is None else end_to_end(x)
    o = short_convolution(rows, weight, bias, activation=_OURS.get(activation), cu_seqlens=bounds)
    assert isinstance(o, Tensor)
    return _activated(o.view_as(x), activation, hidden_states)


def convolve_token(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """hidden_states (b, c, t), conv_state (b, c, n), the last n ≥ w − 1 inputs, which moves on: (b, c, t)."""
    x, past = hidden_states.transpose(1, 2), weight.shape[1] - 1
    ours, tokens = _OURS.get(activation), conv_state[:, :, max(conv_state.shape[2] - past, 0) :].transpose(1, 2)
    if (layer := recording()) is not None:  # of Kimi's and its relatives; others don't come here while they record
        inputs = torch.cat([tokens.to(x.dtype), x], dim=1)  # after a short text fewer than the filters see
        o, _ = short_convolution(inputs, weight, bias, activation=ours, return_state=True)
        o = o[:, -x.shape[1] :]
        lengthen(layer, conv_state, hidden_states)
    elif x.shape[1] == 1 and x.dtype == conv_state.dtype and not keeps_graph():
        if conv_state.shape[2] > past:  # what no filter sees any more, but other functions of transformers may count
            conv_state[:, :, : conv_state.shape[2] - past] = conv_state[
                :, :, 1 : conv_state.shape[2] - past + 1
            ].clone()
        o, _ = short_convolution_step(x, weight, bias, activation=ours, state=ConvolutionState(tokens), inplace=True)
    else:
        past_tokens = ConvolutionState(tokens.to(x.dtype))
        o, _ = short_convolution(x, weight, bias, activation=ours, state=past_tokens, return_state=True)
        new = torch.cat([conv_state, hidden_states.to(conv_state.dtype)], dim=2)
        conv_state.copy_(new[:, :, new.shape[2] - conv_state.shape[2] :])
    return _activated(o, activation, hidden_states)


def _activated(o: Tensor, activation: str | None, like: Tensor) -> Tensor:
    if activation not in _OURS:
        o = ACT2FN[activation](o)
    return o.transpose(1, 2).to(like.dtype)
