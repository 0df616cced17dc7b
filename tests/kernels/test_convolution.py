"""Short convolution's compiled kernels: the same bits on any number of threads, in any layout, and for any cut of a prompt."""

import pytest
import torch

from tarnn import ConvolutionState, short_convolution, short_convolution_step
from tarnn.kernels.cpu import arguments, library

pytestmark = pytest.mark.usefixtures("compiled")
DTYPES = [x for x in (torch.float32, torch.bfloat16, torch.float16, torch.float64) if arguments.takes(x)]


def call(x, weight, bias, **options):
    """o, the state behind, and the gradients of all three."""
    inputs = [y.detach().requires_grad_() for y in (x, weight, bias)]
    o, state = short_convolution(*inputs, activation="silu", return_state=True, **options)
    return [o, state.tokens, *torch.autograd.grad(o.float().square().sum(), inputs)]


def drawn(b: int, t: int, c: int, width: int = 4, dtype: torch.dtype = torch.float32):
    return torch.randn(b, t, c).to(dtype), torch.randn(c, width).to(dtype), torch.randn(c).to(dtype)


@pytest.mark.parametrize(("b", "t", "c"), [(2, 1, 70), (2, 600, 300), (1, 2500, 130)])
def test_the_number_of_threads_changes_no_bit(b, t, c):
    inputs, found, threads = drawn(b, t, c), [], torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(call(*inputs))
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], others))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layout_changes_no_bit(dtype):
    """Channels first in memory, every second channel, a view of something wider, a state likewise."""
    x, weight, bias = drawn(2, 45, 37, dtype=dtype)
    state = torch.randn(2, 3, 37).to(dtype)
    expected = call(x, weight, bias, state=ConvolutionState(state))
    apart = torch.stack([x, x], 3).flatten(2)[:, :, ::2]
    for other in (x.mT.contiguous().mT, apart, torch.cat([x, x], 2)[..., 37:]):
        given = ConvolutionState(state.mT.contiguous().mT)
        assert all(
            torch.equal(a, b) for a, b in zip(call(other, weight.mT.contiguous().mT, bias, state=given), expected)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 31])
def test_a_prompt_its_pieces_and_its_steps_have_the_same_bits(dtype, width):
    x, weight, bias = drawn(2, 41, 37, width, dtype)
    whole, behind = short_convolution(x, weight, bias, activation="silu", return_state=True)
    o, state = short_convolution(x[:, :33], weight, bias, activation="silu", return_state=True)
    pieces, stepped = [o], ConvolutionState(state.tokens.mT.contiguous().mT)
    rest, behind_rest = short_convolution(x[:, 33:], weight, bias, activation="silu", state=state, return_state=True)
    for i in range(33, 41):
        o, state = short_convolution_step(x[:, i : i + 1], weight, bias, activation="silu", state=state)
        in_place, _ = short_convolution_step(
            x[:, i : i + 1], weight, bias, activation="silu", state=stepped, inplace=True
        )
        assert torch.equal(in_place, o)
        pieces.append(o)
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert torch.equal(torch.cat([pieces[0], rest], 1), whole)
    for other in (state, stepped, behind_rest):
        assert torch.equal(other.tokens, behind.tokens)


def test_packed_and_masked_rows_have_the_bits_of_rows_alone():
    x, weight, bias = drawn(1, 60, 20)
    cuts, real = [0, 13, 13, 47, 60], torch.rand(1, 60) > 0.3
    o, behind = short_convolution(
        x, weight, bias, key_mask=real, cu_seqlens=torch.tensor(cuts), activation="silu", return_state=True
    )
    for i, (start, stop) in enumerate(zip(cuts, cuts[1:])):
        here = real[0, start:stop]
        alone, state = short_convolution(x[:, start:stop][:, here], weight, bias, activation="silu", return_state=True)
        assert torch.equal(o[:, start:stop][:, here], alone)
        assert torch.equal(behind.tokens[i : i + 1], state.tokens)


def test_silu_of_large_sums():
    """Neither side overflows, nor do gradients."""
    x = torch.tensor([[[-1e30], [-90.0], [-1e-30], [0.0], [90.0], [1e30]]], requires_grad=True)
    o = short_convolution(x, torch.ones(1, 1), activation="silu")
    torch.testing.assert_close(o, torch.nn.functional.silu(x), rtol=1e-6, atol=1e-36)
    (grad,) = torch.autograd.grad(o.sum(), x)
    torch.testing.assert_close(grad.flatten(), torch.tensor([0, 0, 0.5, 0.5, 1, 1]), rtol=1e-6, atol=1e-30)


@pytest.mark.skipif(not library.available(), reason="no compiled kernels")
def test_a_step_in_place_is_seen_by_autograd():
    state = ConvolutionState.zeros(1, 3, 2)
    x, weight = torch.ones(1, 1, 2), torch.ones(2, 3, requires_grad=True)
    o = short_convolution(x, weight, state=state)
    with torch.no_grad():
        short_convolution_step(x, weight, state=state, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
