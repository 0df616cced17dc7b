"""Short convolution: one filter per channel, over the last few tokens or around each one."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tarnn.kernels.convolution import LARGEST_WIDTH, Call, Gradients, Outputs
from tarnn.numerics import autocast, wide
from tarnn.ops.checks import check_kind, check_masks, check_state, check_step, check_tensors
from tarnn.ops.operators import with_operator
from tarnn.ops.registration import Op
from tarnn.ops.states import ConvolutionState
from tarnn.ops.validated import skip_repeated_checks

convolve = Op("convolution", Call, Outputs, Gradients, ("o", "S"))
with_operator(convolve, "short_convolution")


def short_convolution(
    x: Float[Tensor, "b t c"],
    weight: Float[Tensor, "c w"],
    bias: Float[Tensor, " c"] | None = None,
    *,
    causal: bool = True,
    activation: str | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
    state: ConvolutionState | None = None,
    return_state: bool = False,
) -> Float[Tensor, "b t c"] | tuple[Float[Tensor, "b t c"], ConvolutionState]:
    """Filter each channel along time with w numbers of its own, w up to 31:

        o_i = a(bias + Σ_l weight_l x_(i − p + l))      l = 0 … w − 1

    p = w − 1 where causal: the last weight is that of the token itself (as of a Conv1d with padding w − 1, cut to t). Else
    p = (w − 1) // 2, as padding="same". There are zeros before the first token and after the last.

    Args:
        x: (b, t, c), any strides; one with channels side by side, c last in memory, is not copied.
        weight: (c, w): `weight[:, 0]` of a Conv1d with groups=c. bias: (c,). Any floating dtype.
        causal: position i sees positions up to i only; False: on both sides.
        activation: a, None for none, or "silu": silu(x) = x / (1 + e^−x).
        key_mask: bool (b, t), False: the token is absent. Filters reach over it, to the real tokens beyond; its own output
            is zero. (Zeros in the place of masked tokens would be another thing: then padding on the right changes a state.)
        cu_seqlens: int (n + 1,): the row (b = 1) holds n sequences end to end, which don't see each other.
        state: continues a sequence: its last w − 1 real tokens stand before x. Causal only.
        return_state: return (o, state).

    Precision: sums are float32, float64 for a float64 x, from the oldest token to the newest, so that by the compiled kernels
    a prompt, its tokens one by one, and its pieces give the same bits. o and the state have the dtype of x. Under autocast x is
    cast first.
    NaN and infinities: they show in the w outputs that see them; at masked tokens anything may stand.

    Kept for backward: x, weight and bias. Twice differentiable. Raises ValueError or TypeError for what doesn't fit.

    >>> import torch
    >>> x, weight = torch.ones(1, 5, 2), torch.ones(2, 4)
    >>> short_convolution(x, weight)[0, :, 0].tolist()
    [1.0, 2.0, 3.0, 4.0, 4.0]
    """
    call = make_call(x, weight, bias, causal, activation, key_mask, cu_seqlens, state, return_state)
    outputs = convolve(call, with_state=return_state)
    return (outputs.o, ConvolutionState(outputs.S)) if return_state else outputs.o


def short_convolution_step(
    x: Float[Tensor, "b 1 c"],
    weight: Float[Tensor, "c w"],
    bias: Float[Tensor, " c"] | None = None,
    *,
    activation: str | None = None,
    state: ConvolutionState | None = None,
    inplace: bool = False,
) -> tuple[Float[Tensor, "b 1 c"], ConvolutionState]:
    """One token more of a causal `short_convolution`: o (b, 1, c), and the state after it.

    Arguments, precision and errors as there. `state=None` starts a sequence. `inplace` writes into the given state, which may
    have any strides, and returns it: for loops that own it, without gradients.
    """
    check_step("short_convolution", x, 3, ConvolutionState, state, inplace)
    if (
        inplace
        and state is not None
        and any(n > 1 and not step for n, step in zip(state.tokens.shape, state.tokens.stride()))
    ):
        raise ValueError(
            "a state that is written in place must have memory of its own for each row; this one is expanded. Clone it."
        )
    call = make_call(x, weight, bias, True, activation, None, None, state)
    if call.S is None:
        call = call._replace(S=call.new_state().zero_())
    outputs = convolve.step(call, inplace=inplace)
    return outputs.o, state if inplace and state is not None else ConvolutionState(outputs.S)


# --- arguments


@skip_repeated_checks
def make_call(
    x, weight, bias, causal, activation, key_mask=None, cu_seqlens=None, state=None, return_state=False
) -> Call:
    """Weights and bias come in the wide dtype, so that their gradients are summed in it. Raises ValueError or TypeError."""
    if x is None or weight is None:
        raise TypeError(
            f"short convolution takes x (b, t, c) and weight (c, width); got {type(x if x is None else weight).__name__}."
        )
    check_tensors(x=x, weight=weight, bias=bias)
    (x,) = autocast(x)
    _check_filters(x, weight, bias)
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False; got {causal!r}.")
    if not causal and (state is not None or return_state):
        raise ValueError("a centred filter has no state: it would also need what comes after. Pass causal=True.")
    if activation not in (None, "silu"):
        raise ValueError(f'activation must be None or "silu"; got {activation!r}. Apply another one to the output.')
    b, t, _ = x.shape
    check_masks(key_mask, cu_seqlens, b, t, t, "t")
    sums = wide(x.dtype)
    bias = None if bias is None else bias.to(sums)
    call = Call(x, weight.to(sums), bias, None, key_mask, cu_seqlens, causal, activation == "silu")
    if state is None:
        return call
    check_kind(state, ConvolutionState, "short_convolution")
    check_state("tokens", state.tokens, (call.num_sequences, weight.shape[1] - 1, x.shape[2]), x.dtype, x.device)
    return call._replace(S=state.tokens)


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
