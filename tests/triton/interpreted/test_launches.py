"""Kernels that can't be launched on some GPU: that call, and others of its kind, go to plain PyTorch, with one warning."""

import warnings

import pytest
import torch
from kernels.test_backends import VARIANTS, a_call, all_results
from triton.runtime.errors import OutOfResources, PTXASError

from tarnn import linear_attention, step
from tarnn.errors import SlowPathWarning
from tarnn.kernels import contract
from tarnn.kernels.eager import linear as eager
from tarnn.kernels.linear import Call, Returned
from tarnn.kernels.triton import backward_kernels, forward_kernels, launch_failures, linear as triton, one_token

pytestmark = pytest.mark.usefixtures("triton_kernels")
TOO_MUCH = OutOfResources(245_760, 232_448, "shared memory")


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(launch_failures, "_refused", {})
    contract._warn_once.cache_clear()


@pytest.fixture
def broken(monkeypatch):
    """A function that makes a kernel's launch fail; gives the list of its tries."""

    def break_it(module, name: str, error: Exception = TOO_MUCH) -> list:
        tries = []

        class Broken:
            arg_names = getattr(module, name).arg_names
            __name__ = name

            def __getitem__(self, grid):
                tries.append(grid)
                raise error

        monkeypatch.setattr(module, name, Broken())
        return tries

    return break_it


def inputs(*widths: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, 20, n, requires_grad=True) for n in (widths[0], *widths)]


ERRORS = [
    TOO_MUCH,
    PTXASError("ptxas fatal : Unsupported .version 9.2"),
    RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda x: type(x).__name__)
def test_a_forward_pass_that_cannot_be_launched(broken, error):
    tries = broken(forward_kernels, "outputs", error)
    q, k, v = inputs(8, 6)
    with pytest.warns(SlowPathWarning, match="heads of 8.*kernel outputs could not be launched") as warned:
        o, state = linear_attention(q, k, v, causal=True, return_state=True)
    assert len(warned) == 1
    assert str(error) in str(warned[0].message)
    expected = eager.forward(Call(q, k, v, function="elu", eps=1e-30))
    torch.testing.assert_close((o, state.S, state.z), (expected.o, expected.S, expected.z))
    torch.autograd.grad(o.sum(), (q, k, v))
    linear_attention(*inputs(8, 6), causal=True)  # not tried again, without a warning
    assert len(tries) == 1
    with pytest.warns(SlowPathWarning, match="heads of 7"):  # another kind
        linear_attention(*inputs(7, 6), causal=True)
    assert len(tries) == 2


@pytest.mark.parametrize("kernel", ["gradient_rows", "query_gradients", "value_gradients"])
def test_a_backward_pass_of_which_some_kernels_ran(broken, kernel, divided):
    """The forward pass was by the kernels; so the plain backward pass is given what they returned."""
    divided("split")
    given = inputs(8, 6)
    expected = torch.autograd.grad(linear_attention(*given, causal=True).square().sum(), given)
    tries = broken(backward_kernels, kernel)
    loss = linear_attention(*given, causal=True).square().sum()
    with pytest.warns(SlowPathWarning, match=f"kernel {kernel} could not be launched"):
        found = torch.autograd.grad(loss, given)
    torch.testing.assert_close(found, expected)
    torch.autograd.grad(linear_attention(*given, causal=True).sum(), given)
    assert len(tries) == 1


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_a_plain_backward_pass_takes_what_the_kernels_returned(number):
    torch.manual_seed(0)
    call = a_call(**VARIANTS[number])
    expected = all_results(eager, call)[1]
    torch.manual_seed(0)
    call, outputs = a_call(**VARIANTS[number]), triton.forward(call)
    grads = torch.randn_like(outputs.S), torch.randn_like(outputs.z)
    grad_o = torch.ones_like(outputs.o)
    found = eager.backward(call, Returned.of(call, outputs, grad_o, *grads))
    for x, y in zip(found.wanted(call), expected):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_step_in_place_adds_its_token_once(broken, weighted):
    q, k, v = (torch.randn(2, 3, 1, 5) for _ in range(3))
    S, z, M = torch.rand(2, 3, 5, 5), torch.rand(2, 3, 5), torch.rand(2, 3)
    call = Call(q, k, v, None, torch.rand(2, 3, 1), S, z, M=M) if weighted else Call(q, k, v, S=S, z=z)
    expected = eager.step(call)
    broken(one_token, "one_token")
    with pytest.warns(SlowPathWarning, match="one_token"):
        found = triton.step(call, inplace=True)
    assert (found.S is S, found.z is z) == (True, True)
    torch.testing.assert_close(found, expected)


def test_a_step_that_fails_does_not_stop_the_attention_of_its_model(broken):
    broken(one_token, "one_token")
    q, k, v = (x.detach() for x in inputs(8, 8))
    _, state = linear_attention(q, k, v, causal=True, return_state=True)
    with pytest.warns(SlowPathWarning):
        step(q[:, :, :1], k[:, :, :1], v[:, :, :1], state=state)
    assert launch_failures.refusal(Call(q, k, v, S=state.S, z=state.z, function="elu")) is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), torch.AcceleratorError("an illegal access")])
def test_what_plain_pytorch_would_not_mend_is_raised(broken, error):
    broken(forward_kernels, "outputs", error)
    with pytest.raises(type(error)), warnings.catch_warnings():
        linear_attention(*inputs(8, 6), causal=True)
