"""The laws of the op on the GPU that torch sees: the calls of `interpreted/`, and many more. Skipped where there is none."""

import pytest
import torch
from support.kernel_calls import MODES, holds_on_tensor_cores

from tarnn import linear_attention, step
from tarnn.kernels.triton import device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
SIZES = [(35, 17, 19), (300, 64, 64), (257, 128, 128), (130, 256, 256), (1, 64, 64)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", MODES)
def test_the_definition(mode, dtype, size):
    assert device.refusal(torch.device("cuda", 0)) is None
    t, d, e = size
    holds_on_tensor_cores(mode, "cuda", dtype=dtype, t=t, s=t, d=d, e=e, b=1)


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
