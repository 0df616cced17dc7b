"""From the arguments of short convolution to the record that backends take: cast and checked."""

import torch
from torch import Tensor

from tarnn.kernels.convolution import LARGEST_WIDTH, Call
from tarnn.numerics import autocast, wide
from tarnn.ops.checks import check_key_mask, check_packing, check_tensors
from tarnn.ops.convolution.state import ConvolutionState


def make_call(
    x, weight, bias, causal, activation, key_mask=None, cu_seqlens=None, state=None, return_state=False
) -> Call:
    """Weights and bias come in the wide dtype, so that their gradients are summed in it. Raises ValueError or TypeError."""
    if x is None or weight is None:
        raise TypeError(
            f"short convolution takes x (b, t, c) and weight (c, width); got {type(x if x is None else weight).__name__}."
        )
    check_tensors(x=x, weight=weight, bias=bias, key_mask=key_mask, cu_seqlens=cu_seqlens)
    (x,) = autocast(x)
    _check_filters(x, weight, bias)
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False; got {causal!r}.")
    if not causal and (state is not None or return_state):
        raise ValueError("a centred filter has no state: it would also need what comes after. Pass causal=True.")
    if activation not in (None, "silu"):
        raise ValueError(f'activation must be None or "silu"; got {activation!r}. Apply another one to the output.')
    b, t, _ = x.shape
    if key_mask is not None:
        check_key_mask(key_mask, b, t, "t")
    if cu_seqlens is not None:
        check_packing(cu_seqlens, b, t, t)
    sums, S = wide(x.dtype), None if state is None else _tokens(state)
    bias = None if bias is None else bias.to(sums)
    call = Call(x, weight.to(sums), bias, S, key_mask, cu_seqlens, causal, activation == "silu")
    if S is not None:
        _check_state(call, S)
    return call


def _check_filters(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.ndim != 3:
        raise ValueError(
            f"short convolution takes x (b, t, c), three axes; got {tuple(x.shape)}. Channels come last: "
            "a (b, c, t) tensor becomes (b, t, c) by .transpose(1, 2)."
        )
    c = x.shape[2]
    if weight.ndim != 2 or weight.shape[0] != c or not 1 <= weight.shape[1] <= LARGEST_WIDTH:
        raise ValueError(
            f"weight must be (c, width) with c = {c} and a width of 1 to {LARGEST_WIDTH}; got {tuple(weight.shape)}. "
            "That of a Conv1d, (c, 1, width), is its weight[:, 0]."
        )
    if bias is not None and bias.shape != (c,):
        raise ValueError(f"bias must be (c,) = {(c,)}; got {tuple(bias.shape)}.")
    for name, y in (("x", x), ("weight", weight), ("bias", bias)):
        if y is not None and not y.is_floating_point():
            raise TypeError(f"{name} must be of a floating dtype; got {y.dtype}. Cast it first.")
        if y is not None and y.device != x.device:
            raise ValueError(f"x, weight and bias must be on one device; got {x.device} and {y.device}.")


def _tokens(state: ConvolutionState) -> Tensor:
    if not isinstance(state, ConvolutionState):
        raise TypeError(
            f"state must be a ConvolutionState, which short_convolution returns; got {type(state).__name__}."
        )
    return state.tokens


def _check_state(call: Call, S: Tensor) -> None:
    expected = torch.Size((call.num_sequences, call.weight.shape[1] - 1, call.x.shape[2]))
    if S.shape != expected or S.dtype != call.x.dtype or S.device != call.x.device:
        raise ValueError(
            f"the state must be {tuple(expected)}, the last width - 1 tokens, in {call.x.dtype} on {call.x.device}; got "
            f"{tuple(S.shape)} in {S.dtype} on {S.device}. A state fits the filters and the dtype that made it."
        )
