"""Short convolution against its definition, and what else it promises."""

import pytest
import torch
from support.drawn_calls import excess
from torch.nn.functional import conv1d, silu

from tarnn import ConvolutionState, short_convolution, short_convolution_step
from tarnn.ops.convolution.definition import convolution
from tarnn.ops.convolution.op import convolve

CUTS = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)


def filters(c: int = 5, width: int = 4, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(c, width, dtype=dtype), torch.randn(c, dtype=dtype)


@pytest.mark.parametrize("block", range(0, 60, 20))
def test_drawn_calls(block):
    """`python tests/fuzz.py convolution` draws thousands."""
    assert [number for number in range(block, block + 20) if excess("convolution", number) > 1] == []


@pytest.mark.slow
def test_three_thousand_drawn_calls():
    assert [number for number in range(60, 3060) if excess("convolution", number) > 1] == []


@pytest.mark.one_path
def test_the_definition_by_hand():
    """Two channels, the second masked at its middle token: filters reach over what is masked."""
    x = torch.tensor([[[1.0], [10.0], [100.0]]])
    weight, mask = torch.tensor([[2.0, 3.0]]), torch.tensor([[True, False, True]])
    assert convolution(x, weight)[0].flatten().tolist() == [3, 32, 320]
    o, state = convolution(x, weight, torch.tensor([1.0]), key_mask=mask)
    assert o.flatten().tolist() == [4, 0, 303]
    assert state.flatten().tolist() == [100]
    assert convolution(x, weight, causal=False, key_mask=mask)[0].flatten().tolist() == [302, 0, 200]
    assert convolution(x, weight, state=torch.tensor([[[5.0]]]))[0].flatten().tolist() == [13, 32, 320]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8, 31])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_it_is_conv1d(width, activation):
    """With padding on the left, cut to t; and centred with padding="same"."""
    x, (weight, bias) = torch.randn(2, 37, 19).double(), filters(19, width)
    after = silu if activation else torch.nn.Identity()
    padded = conv1d(x.mT, weight[:, None], bias, padding=width - 1, groups=19)[..., :37]
    torch.testing.assert_close(short_convolution(x, weight, bias, activation=activation), after(padded).mT)
    same = conv1d(x.mT, weight[:, None], bias, padding="same", groups=19)
    torch.testing.assert_close(short_convolution(x, weight, bias, causal=False, activation=activation), after(same).mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("cut", [0, 1, 2, 17, 40])
def test_a_prompt_cut_anywhere_has_the_same_bits(dtype, width, cut):
    x, (weight, bias) = torch.randn(2, 40, 21).to(dtype), filters(21, width, dtype)
    whole, behind = short_convolution(x, weight, bias, return_state=True)
    first, state = short_convolution(x[:, :cut], weight, bias, return_state=True)
    rest, after = short_convolution(x[:, cut:], weight, bias, state=state, return_state=True)
    assert torch.equal(torch.cat([first, rest], 1), whole)
    assert torch.equal(after.tokens, behind.tokens)
    assert torch.equal(behind.tokens, torch.nn.functional.pad(x, (0, 0, width, 0))[:, 41:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_steps_have_the_bits_of_the_prompt(dtype, inplace, width):
    """Also into a state whose channels lie apart, as caches of transformers have it."""
    x, (weight, bias) = torch.randn(3, 6, 37).to(dtype), filters(37, width, dtype)
    whole, behind = short_convolution(x, weight, bias, return_state=True)
    state = given = ConvolutionState(torch.zeros(3, 37, width - 1, dtype=dtype).mT)
    for i in range(6):
        o, state = short_convolution_step(x[:, i : i + 1], weight, bias, state=state, inplace=inplace)
        assert torch.equal(o, whole[:, i : i + 1])
        assert (state is given) == inplace
    assert torch.equal(state.tokens, behind.tokens)
    if not inplace:
        assert not given.tokens.any()
    first, state = short_convolution_step(x[:, :1], weight, bias)
    assert torch.equal(first, whole[:, :1])
    assert torch.equal(state.tokens[:, -1:], x[:, :1] if width > 1 else x[:, :0])


def test_a_step_in_place_makes_no_gradient_wrong(path):
    """The compiled kernel keeps the state itself, and autograd is told that it was written to; plain PyTorch has kept a copy."""
    state = ConvolutionState.zeros(1, 3, 2)
    x, weight = torch.ones(1, 1, 2), torch.ones(2, 3, requires_grad=True)
    o = short_convolution(x, weight, state=state)
    with torch.no_grad():
        short_convolution_step(x, weight, state=state, inplace=True)
    assert state.tokens[:, -1].tolist() == [[1.0, 1.0]]
    if path == "compiled":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()
    else:
        o.sum().backward()
        assert weight.grad.tolist() == [[0.0, 0.0, 1.0]] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["plain", "packed", "masked", "centred", "centred, masked"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_both_derivatives(how, activation):
    """Of the call and of the operator, in all inputs, by o and by the state behind."""
    n, causal = 4 if how == "packed" else 2, "centred" not in how
    x, (weight, bias) = torch.randn(1 if how == "packed" else 2, 9, 3).double(), filters(3, 3)
    S = torch.randn(n, 2, 3).double() if causal else None
    mask = torch.rand(2, 9) > 0.4 if "masked" in how else None
    cuts = CUTS if how == "packed" else None
    inputs = [y.requires_grad_() for y in (x, weight, bias, S) if y is not None]

    def call(x, weight, bias, S=None):
        state = None if S is None else ConvolutionState(S)
        options = {"causal": causal, "activation": activation, "key_mask": mask, "cu_seqlens": cuts}
        if S is None:
            return short_convolution(x, weight, bias, **options)
        o, after = short_convolution(x, weight, bias, state=state, return_state=True, **options)
        return o, after.tokens

    def operator(x, weight, bias, S=None):
        found = convolve.forward_op(x, weight, bias, S, mask, cuts, causal, activation == "silu")
        return found if causal else found[0]

    for f in (call, operator):
        assert torch.autograd.gradcheck(f, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(f, inputs, fast_mode=True)


def test_long_sequences_and_many_channels():
    """Longer and wider than what one task takes, packed, with gradients."""
    x, (weight, bias) = torch.randn(1, 2300, 300).double(), filters(300)
    cuts = torch.tensor([0, 1, 3, 1030, 1030, 2300])
    inputs = [y.requires_grad_() for y in (x, weight, bias)]
    o = short_convolution(*inputs, activation="silu", cu_seqlens=cuts)
    expected = torch.cat(
        [
            silu(conv1d(x[:, a:b].mT, weight[:, None], bias, padding=3, groups=300)[..., : b - a]).mT
            for a, b in zip(cuts.tolist(), cuts.tolist()[1:])
            if a < b
        ],
        1,
    )
    torch.testing.assert_close(o, expected)
    sent = torch.randn_like(o)
    pairs = zip(*(torch.autograd.grad(y, inputs, sent) for y in (o, expected)))
    for found, right in pairs:
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


def test_nan_stays_where_it_is_used():
    x, (weight, bias) = torch.randn(2, 12, 5), filters(5, 3, torch.float32)
    clean = short_convolution(x, weight, bias)
    x[0, 4] = torch.nan
    found = short_convolution(x, weight, bias)
    spoiled = found.isnan().any(-1)
    assert spoiled[0].nonzero().flatten().tolist() == [4, 5, 6]
    assert not spoiled[1].any()
    assert torch.equal(found[~spoiled], clean[~spoiled])
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 4] = False
    x.requires_grad_()
    for causal in (True, False):
        o = short_convolution(x, weight, bias, key_mask=mask, causal=causal)
        assert o.isfinite().all()
        assert (o[0, 4] == 0).all()
        (grad,) = torch.autograd.grad(o.sum(), x)
        assert grad.isfinite().all()
        assert (grad[0, 4] == 0).all()
