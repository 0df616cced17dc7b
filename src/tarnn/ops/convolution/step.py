"""One token of short convolution."""

from jaxtyping import Float
from torch import Tensor

from tarnn.ops.convolution.arguments import make_call
from tarnn.ops.convolution.op import convolve
from tarnn.ops.convolution.state import ConvolutionState


def short_convolution_step(
    x: Float[Tensor, "b 1 c"],
    weight: Float[Tensor, "c w"],
    bias: Float[Tensor, " c"] | None = None,
    *,
    activation: str | None = None,
    state: ConvolutionState | None = None,
    inplace: bool = False,
) -> tuple[Float[Tensor, "b 1 c"], ConvolutionState]:
    """One token more of a causal `short_convolution`: o (b, 1, c), and the state behind it.

    Arguments, precision and errors as there. `state=None` starts a sequence. `inplace` writes into the given state, which may
    have any strides, and returns it: for loops that own it, without gradients.
    """
    if x.ndim == 3 and x.shape[1] != 1:
        raise ValueError(
            f"a step takes one token, x (b, 1, c); got {tuple(x.shape)}. For more, short_convolution(state=…)."
        )
    if inplace and state is None:
        raise ValueError(
            "short_convolution_step(inplace=True) needs a state to write into: make one with ConvolutionState.zeros(…)."
        )
    if (
        inplace
        and state is not None
        and any(n > 1 and not step for n, step in zip(state.tokens.shape, state.tokens.stride()))
    ):
        raise ValueError(
            "a state that is written in place must have memory of its own for each row; this one is expanded. Clone it."
        )
    call = make_call(x, weight, bias, True, activation, state=state)
    if call.S is None:
        call = call._replace(S=call.new_state().zero_())
    outputs = convolve.step(call, inplace=inplace)
    return outputs.o, state if inplace and state is not None else ConvolutionState(outputs.S)
