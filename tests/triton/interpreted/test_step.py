"""One token at a time is the whole, in place or not; one launch."""

import pytest
import torch
from support.kernel_calls import MODES, holds

from tarnn import linear_attention, step
from tarnn.kernels.eager import linear as eager
from tarnn.kernels.linear import Call
from tarnn.kernels.triton import linear as triton, one_token

pytestmark = pytest.mark.usefixtures("triton_kernels")
CAUSAL = [mode for mode, words in MODES.items() if words.get("causal", True)]


@pytest.mark.parametrize("mode", CAUSAL)
def test_the_definition(mode):
    """In place, and so without gradients."""
    words = {"number": 2, "masked": False, "junk": "", "b": 2, "g": 1, "r": 2, "t": 2, "s": 2, "d": 17, "e": 70}
    dtype = "bfloat16" if CAUSAL.index(mode) % 2 else "float32"
    holds(mode, **words, dtype=dtype, way="stepped in place")


def test_the_definition_with_gradients():
    words = {"number": 2, "masked": False, "b": 1, "g": 1, "r": 1, "t": 2, "s": 2, "d": 3, "e": 5}
    holds("decay a token, weighted", **words, junk="", dtype="float32", way="stepped")


def test_a_step_is_one_launch_that_writes_in_place(monkeypatch):
    launches = []
    kernel = one_token.one_token

    class Counted:
        arg_names = kernel.arg_names

        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(one_token, "one_token", Counted())
    q, k, v = (torch.randn(3, 4, 1, 8) for _ in range(3))
    _, state = linear_attention(q, k, v, causal=True, return_state=True)
    S, version = state.S.clone(), state.S._version
    with torch.no_grad():
        _, new = step(q, k, v, state=state)
        assert torch.equal(state.S, S)
        _, same = step(q, k, v, state=state, inplace=True)
    assert launches == [(3, 4), (3, 4)]
    assert same.S is state.S
    assert torch.equal(state.S, new.S)
    assert state.S._version > version
    expected = eager.step(Call(q, k, v, S=S, z=new.z * 0, function="elu", normalize=False))
    torch.testing.assert_close(expected.S, new.S)


def test_a_state_that_does_not_lie_in_a_row_is_written_in_place():
    q, k, v = (torch.randn(2, 3, 1, 5) for _ in range(3))
    S, z = torch.rand(2, 3, 5, 5).mT, torch.rand(2, 3, 5)
    call = Call(q, k, v, S=S, z=z, function="elu")
    expected = eager.step(call)
    found = triton.step(call, inplace=True)
    assert found.S is S
    torch.testing.assert_close(S, expected.S)
    torch.testing.assert_close(found.o, expected.o)
