"""Products of 16-bit weights in float32: against float64, piece by piece, and in the model that is tuned."""

import pytest
import torch
from torch import nn

from tarnn.kernels.cpu import cross_entropy, wide_products
from tarnn.kernels.cross_entropy import Call

TYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _slow_and_in_pieces(monkeypatch):
    monkeypatch.setattr(wide_products, "are_slow", lambda weight: weight.dtype in TYPES)
    monkeypatch.setattr(wide_products, "PIECE", 3 * 5)  # three rows of five


def error(x, exact):
    return (x.double() - exact).abs().max().item()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_layer_and_its_gradient_err_by_one_rounding(dtype):
    layer, x = nn.Linear(5, 11).to(dtype).requires_grad_(False), torch.randn(2, 7, 5).to(dtype).requires_grad_()
    plain, g = layer(x), torch.randn(2, 7, 11).to(dtype)
    wide_products.widen_layers(nn.Sequential(layer))
    assert type(layer) is wide_products.WideLinear
    o = layer(x)
    (grad,) = torch.autograd.grad(o, x, g)
    weight, bias = layer.weight.double(), layer.bias.double()
    exact = x.double() @ weight.T + bias
    assert o.dtype == grad.dtype == dtype
    assert error(o, exact) <= 2 * error(plain, exact)
    exact = g.double() @ weight
    assert error(grad, exact) <= 2 * error(exact.to(dtype), exact)


def test_only_frozen_layers_of_slow_types_but_one_are_changed():
    layers = [nn.Linear(5, 3).bfloat16().requires_grad_(False) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(5, 3).bfloat16(), nn.Linear(5, 3).requires_grad_(False))
    wide_products.widen_layers(model, but=layers[1])
    assert [type(x) for x in model] == [wide_products.WideLinear, *[nn.Linear] * 3]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_loss_errs_no_more_than_by_16_bit_products(dtype, monkeypatch):
    x, weight = torch.randn(13, 5).to(dtype).requires_grad_(), torch.randn(11, 5).to(dtype)
    call = Call(x, weight, torch.randint(11, (13,)), torch.tensor(13.0), -100)
    y = x.detach().double().requires_grad_()
    exact = nn.functional.cross_entropy(y @ weight.double().T, call[2])
    exact.backward()
    wide = cross_entropy.forward(call)
    monkeypatch.setattr(wide_products, "are_slow", lambda weight: False)
    plain = cross_entropy.forward(call)
    assert error(wide[0], exact) <= 2 * error(plain[0], exact) + 1e-6
    assert error(wide[1], y.grad) <= 2 * error(plain[1], y.grad)
