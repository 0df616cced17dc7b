"""Causal attention token by token (csrc/linear/streamed.h): a sequence has the bits of its steps, wherever it is divided."""

import pytest
import torch
from support.fuzz_calls import Call
from support.kernel_calls import DTYPES, MODES, drawn, same_bits

from tarnn.ops import LinearState, linear_attention, step

pytestmark = pytest.mark.usefixtures("compiled")

CAUSAL = [mode for mode in MODES if drawn(mode).causal]
SIZES = [{"d": 17, "e": 33, "t": 41}, {"d": 64, "e": 64, "t": 67}, {"d": 5, "e": 1, "t": 3}, {"d": 130, "e": 48, "t": 9}]


def whole_and_options(call: Call, times: slice = slice(None)):
    """The inputs at some positions, as arguments of the op."""
    q, k, v, *rest = (x if x.ndim < 3 else x[:, :, times] for x in call.inputs)
    options = {"normalize": call.drawn.normalize} | dict(zip(call.names, rest))
    return (q, k, v, call.feature_map), options


def stepped(call: Call, state: LinearState) -> tuple[torch.Tensor, LinearState]:
    outputs = []
    for i in range(call.drawn.t):
        inputs, options = whole_and_options(call, slice(i, i + 1))
        o, state = step(*inputs, state, **options)
        outputs.append(o)
    return torch.cat(outputs, 2), state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mode", CAUSAL)
def test_a_sequence_has_the_bits_of_its_steps(mode, size, dtype):
    call = Call(drawn(mode, dtype=dtype, masked=False, junk="", **size, seed=3))
    inputs, options = whole_and_options(call)
    o, state = linear_attention(*inputs, causal=True, return_state=True, **options)
    empty = linear_attention(*(x[:, :, :0] for x in inputs[:3]), inputs[3], causal=True, return_state=True, **whole_and_options(call, slice(0))[1])[1]
    o_stepped, state_stepped = stepped(call, empty)
    assert same_bits([o, state.S, state.z], [o_stepped, state_stepped.S, state_stepped.z])
