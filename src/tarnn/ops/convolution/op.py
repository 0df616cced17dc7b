"""Short convolution: one filter per channel, over the last few tokens or around each one."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tarnn.kernels.convolution import Call, Gradients, Outputs
from tarnn.ops.convolution.arguments import make_call
from tarnn.ops.convolution.state import ConvolutionState
from tarnn.ops.operators import with_operator
from tarnn.ops.registration import Op

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
    p = (w − 1) // 2, as padding="same". There are zeros before the first token and behind the last.

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
