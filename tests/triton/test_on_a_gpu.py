"""The laws of the op on the GPU that torch sees: the calls of `interpreted/`, and many more. Skipped where there is none."""

import pytest
import torch
from fuzz import allowed, errors
from support.fuzz_calls import DTYPES, Call
from support.kernel_calls import MODES, drawn

from tarnn import linear_attention, step
from tarnn.kernels.triton import machine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
SIZES = [(35, 17, 19), (300, 64, 64), (257, 128, 128), (130, 256, 256), (1, 64, 64)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", MODES)
def test_the_definition(mode, dtype, size):
    """o, states and gradients within the limits of `fuzz.py`; in 16 bits a state's terms are rounded once."""
    assert machine.refusal(torch.device("cuda", 0)) is None
    t, d, e = size
    call = Call(drawn(mode, dtype=dtype, t=t, s=t, d=d, e=e, b=1))
    exact = call.definition(torch.float64)
    limits, once = allowed(call, exact), torch.finfo(DTYPES[dtype]).eps
    call.inputs = [x.cuda() for x in call.inputs]
    call.grads = [x.cuda() for x in call.grads]
    call.mask = None if call.mask is None else call.mask.cuda()
    call.feature_map = call.feature_map.cuda()
    try:
        found = errors([x.cpu() for x in call.ours()], exact)
    finally:
        call.feature_map.cpu()
    for kind, error in found.items():
        assert error <= max(limits[kind], once if kind in "Sz" and dtype != "float32" else 0.0), kind


def test_a_step_is_recorded_in_a_cuda_graph():
    q, k, v = (torch.randn(4, 8, 1, 64, device="cuda") for _ in range(3))
    _, state = linear_attention(q, k, v, causal=True, return_state=True)
    expected, after = step(q, k, v, state=state)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        o, _ = step(q, k, v, state=state, inplace=True)
    graph.replay()
    assert torch.equal(o, expected)
    assert torch.equal(state.S, after.S)
