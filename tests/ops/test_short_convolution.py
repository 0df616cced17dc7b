"""Short convolution against its definition, and what else it promises."""

import pytest
import torch
from support.convolution_calls import wrong
from torch.nn.functional import conv1d, silu

from tarnn import ConvolutionState, short_convolution, short_convolution_step
from tarnn.ops.convolution.definition import convolution
from tarnn.ops.convolution.op import convolve

CUTS = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)


def filters(c: int = 5, width: int = 4, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(c, width, dtype=dtype), torch.randn(c, dtype=dtype)


@pytest.mark.parametrize("seed", range(60))
def test_drawn_calls(seed):
    assert wrong(seed) == ""


@pytest.mark.slow
def test_three_thousand_drawn_calls():
    assert [(seed, what) for seed in range(60, 3060) if (what := wrong(seed))] == []


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_x_and_not_the_sums(device, dtype):
    x, (weight, bias) = torch.randn(1, 9, 5), filters(5, 4, torch.float32)
    expected, behind = short_convolution(x.to(dtype), weight, bias, return_state=True)
    with torch.autocast(device, dtype=dtype):
        o, state = short_convolution(x, weight, bias, return_state=True)
        stepped, _ = short_convolution_step(x[:, :1], weight, bias, state=state)
    assert o.dtype == stepped.dtype == state.tokens.dtype == dtype
    assert torch.equal(o, expected)
    assert torch.equal(state.tokens, behind.tokens)


@pytest.mark.compile
@pytest.mark.one_path
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_torch_takes_it():
    """torch.compile without a graph break and with any length, with gradients and state; torch.export of a step."""
    torch.compiler.reset()
    weight, bias = (y.requires_grad_() for y in filters())
    f = lambda x: short_convolution(x, weight, bias, activation="silu", return_state=True)  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for t in (5, 9):
        x = torch.randn(2, t, 5, dtype=torch.float64, requires_grad=True)
        (o, state), (expected, behind) = compiled(x), f(x)
        assert torch.equal(o, expected)
        assert torch.equal(state.tokens, behind.tokens)
        both = [torch.autograd.grad(y.square().sum(), (x, weight, bias)) for y in (o, expected)]
        for found, right in zip(*both):
            torch.testing.assert_close(found, right)
    packed = torch.compile(
        lambda x, cuts: short_convolution(x, weight, cu_seqlens=cuts), fullgraph=True, backend="aot_eager"
    )
    x = torch.randn(1, 9, 5).double()
    assert torch.equal(packed(x, CUTS), short_convolution(x, weight, cu_seqlens=CUTS))

    class Step(torch.nn.Module):
        def forward(self, x, tokens):
            o, state = short_convolution_step(x, weight.detach(), state=ConvolutionState(tokens))
            return o, state.tokens

    given = torch.randn(2, 1, 5).double(), torch.randn(2, 3, 5).double()
    for found, right in zip(torch.export.export(Step(), given).module()(*given), Step()(*given)):
        torch.testing.assert_close(found, right)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.one_path
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("how", ["plain", "packed", "centred"])
def test_opcheck(how):
    x, (weight, bias) = torch.randn(1, 9, 5).double(), filters()
    S = torch.randn(4 if how == "packed" else 1, 3, 5).double() if how != "centred" else None
    options = (None, CUTS if how == "packed" else None, how != "centred", True)
    inputs = [None if y is None else y.requires_grad_() for y in (x, weight, bias, S)]
    torch.library.opcheck(convolve.forward_op, (*inputs, *options))
    outputs = convolve.forward_op(*inputs, *options)
    sent = [torch.randn_like(y) for y in outputs]
    if how != "packed":
        torch.library.opcheck(convolve.backward_op, (*sent, None, None, *inputs, *options))


def test_func_transforms():
    x, (weight, bias) = torch.randn(3, 9, 5).double(), filters()
    loss = lambda x, weight: short_convolution(x, weight, bias, activation="silu").square().sum()  # noqa: E731
    grads = torch.func.grad(loss, argnums=(0, 1))(x, weight)
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    for found, right in zip(grads, torch.autograd.grad(loss(*inputs), inputs)):
        torch.testing.assert_close(found, right)
    each = torch.func.vmap(lambda x: short_convolution(x[None], weight, bias, key_mask=None)[0])(x.detach())
    torch.testing.assert_close(each, short_convolution(x, weight, bias))


def test_states_are_values():
    x, (weight, _) = torch.randn(2, 6, 5).double(), filters()
    _, state = short_convolution(x, weight, return_state=True)
    forked = state.select(torch.tensor([1, 0, 1]))
    more = torch.randn(3, 4, 5).double()
    o = short_convolution(more, weight, state=forked)
    for i, row in enumerate((1, 0, 1)):
        joined = torch.cat([x[row], more[i]])[None]
        torch.testing.assert_close(o[i], short_convolution(joined, weight)[0, 6:])


X, W = torch.zeros(2, 3, 5), torch.zeros(5, 4)
WRONG = {
    "three axes": (lambda: short_convolution(X[0], W), ValueError, r"x \(b, t, c\), three axes; got \(3, 5\)"),
    "channels": (lambda: short_convolution(X, W[:3]), ValueError, r"\(c, width\) with c = 5 .*got \(3, 4\)"),
    "conv1d's": (lambda: short_convolution(X, W[:, None]), ValueError, r"weight\[:, 0\]"),
    "width 0": (lambda: short_convolution(X, W[:, :0]), ValueError, "a width of 1 to 31"),
    "width 32": (lambda: short_convolution(X, torch.zeros(5, 32)), ValueError, "a width of 1 to 31"),
    "bias": (lambda: short_convolution(X, W, W[0]), ValueError, r"bias must be \(c,\) = \(5,\); got \(4,\)"),
    "whole numbers": (lambda: short_convolution(X.long(), W), TypeError, "x must be of a floating dtype"),
    "a list": (lambda: short_convolution(X, [1.0]), TypeError, "weight must be a tensor; got list"),
    "activation": (lambda: short_convolution(X, W, activation="gelu"), ValueError, "None or \"silu\"; got 'gelu'"),
    "causal": (lambda: short_convolution(X, W, causal=1), ValueError, "causal must be True or False; got 1"),
    "mask": (lambda: short_convolution(X, W, key_mask=X[0] > 0), ValueError, r"\(b, t\)"),
    "packed rows": (lambda: short_convolution(X, W, cu_seqlens=torch.tensor([0, 3])), ValueError, "one packed row"),
    "bounds": (lambda: short_convolution(X[:1], W, cu_seqlens=torch.tensor([0, 2])), ValueError, "end with the number"),
    "centred": (lambda: short_convolution(X, W, causal=False, return_state=True), ValueError, "has no state"),
    "centred, state": (
        lambda: short_convolution(X, W, causal=False, state=ConvolutionState.zeros(2, 4, 5)),
        ValueError,
        "has no state",
    ),
    "state's width": (
        lambda: short_convolution(X, W, state=ConvolutionState.zeros(2, 5, 5)),
        ValueError,
        r"must be \(2, 3, 5\), the last width - 1 tokens, .*got \(2, 4, 5\)",
    ),
    "state's dtype": (
        lambda: short_convolution(X, W, state=ConvolutionState.zeros(2, 4, 5, dtype=torch.float64)),
        ValueError,
        "in torch.float32 on cpu; got .* in torch.float64",
    ),
    "a tensor": (lambda: short_convolution(X, W, state=X), TypeError, "must be a ConvolutionState"),
    "no weight": (lambda: short_convolution(X, None), TypeError, "takes x .* and weight"),
    "expanded": (
        lambda: short_convolution_step(
            X[:, :1], W, state=ConvolutionState(torch.zeros(1, 3, 5).expand(2, 3, 5)), inplace=True
        ),
        ValueError,
        "memory of its own for each row",
    ),
    "two tokens": (lambda: short_convolution_step(X, W), ValueError, "a step takes one token"),
    "no state": (lambda: short_convolution_step(X[:, :1], W, inplace=True), ValueError, "needs a state to write into"),
}  # fmt: skip


@pytest.mark.one_path
@pytest.mark.refusals
@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_said(case):
    call, kind, sentence = WRONG[case]
    with pytest.raises(kind, match=sentence):
        call()
