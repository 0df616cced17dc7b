"""The cross-entropy of a linear layer's outputs by blocks: against PyTorch's, all logits at once."""

import pytest
import torch
from torch.nn import functional

from tarnn.kernels.cpu import cross_entropy as blocks
from tarnn.kernels.cross_entropy import Call
from tarnn.ops.cross_entropy import linear_cross_entropy

ROWS, WIDTH, CLASSES = 13, 5, 11


@pytest.fixture(params=[1, 3 * CLASSES + 2, 1 << 24], ids=["one row", "3 rows", "all rows"], autouse=True)
def block(request, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", request.param)


def defined(x, weight, labels, *, num_items=None, ignore_index=-100):
    logits = (x @ weight.T).flatten(0, -2)
    logits = logits if x.dtype == torch.float64 else logits.float()
    reduction = "mean" if num_items is None else "sum"
    loss = functional.cross_entropy(logits, labels.flatten(), ignore_index=ignore_index, reduction=reduction)
    return loss if num_items is None else loss / num_items


def inputs(dtype=torch.float64, shape=(ROWS,)):
    x, weight = (torch.randn(*s, dtype=torch.float64).to(dtype) for s in ((*shape, WIDTH), (CLASSES, WIDTH)))
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(CLASSES, shape)


def with_gradients(f, x, weight, labels, **options):
    loss = f(x, weight, labels, **options)
    return loss, *torch.autograd.grad(1.5 * loss, (x, weight))


@pytest.mark.parametrize("shape", [(0,), (1,), (ROWS,), (2, 7)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"ignore_index": 4}, {"num_items": 7}, {"num_items": torch.tensor(7)}], ids=str
)
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_it_is_that_of_pytorch(shape, options, ignored):
    x, weight, labels = inputs(shape=shape)
    mark = options.get("ignore_index", -100)
    if ignored != "none":
        labels.flatten()[:: 1 if ignored == "all" else 3] = mark
    found = with_gradients(linear_cross_entropy, x, weight, labels, **options)
    for a, b in zip(found, with_gradients(defined, x, weight, labels, **options)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_error_is_at_most_twice_that_of_pytorch(dtype):
    """In the norm of each result; and never less than a rounding of it is asked for."""
    x, weight, labels = inputs(dtype, shape=(2, 101))
    exact = with_gradients(defined, *(y.detach().double().requires_grad_() for y in (x, weight)), labels)
    plain = with_gradients(defined, x, weight, labels)
    found = with_gradients(linear_cross_entropy, x, weight, labels)
    assert found[0].dtype == torch.float32
    for a, b, c in zip(found, plain, exact):
        assert (a - c).norm() <= 2 * (b - c).norm() + 4 * torch.finfo(a.dtype).eps * c.norm()


def test_derivatives_of_both_orders():
    x, weight, labels = inputs()
    labels[2] = -100
    assert torch.autograd.gradcheck(linear_cross_entropy, (x, weight, labels))
    assert torch.autograd.gradgradcheck(linear_cross_entropy, (x, weight, labels))


def test_backward_twice_and_of_one_input():
    x, weight, labels = inputs()
    loss = linear_cross_entropy(x, weight, labels)
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, (x, weight))))
    for mine, frozen in ((x, weight), (weight, x)):
        frozen.requires_grad_(False)
        loss = linear_cross_entropy(x, weight, labels)
        torch.testing.assert_close(torch.autograd.grad(loss, mine), (first[0 if mine is x else 1],))
        frozen.requires_grad_()


def test_frozen_weights_have_no_gradient():
    x, weight, labels = inputs()
    call = Call(x, weight.detach(), labels, torch.tensor(2), -100)
    assert blocks.forward(call).grad_weight is None
    assert blocks.forward(call, for_backward=False)[1:] == (None, None)


def test_never_all_logits(monkeypatch):
    """Of the products, none has more rows than a block."""
    x, weight, labels = inputs()
    sizes = []
    softmax = functional.log_softmax
    monkeypatch.setattr(
        functional, "log_softmax", lambda x, *args, **options: sizes.append(len(x)) or softmax(x, *args, **options)
    )
    linear_cross_entropy(x, weight, labels).backward()
    assert sum(sizes) == ROWS
    assert max(sizes) == min(max(1, blocks.BLOCK // CLASSES), ROWS)


@pytest.mark.refusals
def test_label_smoothing_is_refused_and_labels_out_of_range_too():
    x, weight, labels = inputs()
    with pytest.raises(TypeError, match="label_smoothing"):
        linear_cross_entropy(x, weight, labels, label_smoothing=0.1)
    labels[3] = CLASSES
    with pytest.raises(IndexError, match="out of bounds"):
        linear_cross_entropy(x, weight, labels)


def test_autocast_is_that_of_a_linear_layer():
    x, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(x, weight, labels)
    expected = defined(x.bfloat16(), weight.bfloat16(), labels)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert torch.autograd.grad(found, weight)[0].dtype == torch.float32


@pytest.mark.compile
@pytest.mark.one_path
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_torch_sees_through_it():
    x, weight, labels = inputs()
    loss = lambda x: linear_cross_entropy(x, weight, labels)  # noqa: E731
    torch.testing.assert_close(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), loss(x))
    torch.testing.assert_close(torch.func.grad(loss)(x), torch.autograd.grad(loss(x), x)[0])
