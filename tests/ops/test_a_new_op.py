"""An op is added in 60 lines, and has gradients, compile, export, packing and the chooser from the contract."""

import sys
from types import SimpleNamespace

import torch
from support import decayed_sum as toy
from support.decayed_sum import Call, SumState, compute, decayed_sum

from tarnn.kernels import contract

CUTS = torch.tensor([0, 3, 3, 7], dtype=torch.int32)


def definition(x: torch.Tensor, decay: float, S: torch.Tensor) -> torch.Tensor:
    rows = []
    for i in range(x.shape[2]):
        S = decay * S + x[:, :, i]
        rows.append(S)
    return torch.stack(rows, 2)


def inputs(n: int = 2, *, b: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    x, S = torch.randn(b, 3, 7, 2, dtype=torch.float64), torch.randn(n, 3, 2, dtype=torch.float64)
    return x.requires_grad_(), S.requires_grad_()


def test_it_is_what_its_definition_says():
    x, S = inputs()
    o = decayed_sum(x, 0.7, state=SumState(S))
    torch.testing.assert_close(o, definition(x, 0.7, S), rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(definition(x, 0.7, S).square().sum(), (x, S))
    for found, right in zip(torch.autograd.grad(o.square().sum(), (x, S)), expected):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_a_compiled_kernel_is_a_file_of_its_name(monkeypatch):
    """The chooser takes it where it doesn't refuse; with a `backward` of its own, that is called too."""
    calls = []

    def forward(call, **hints):
        calls.append("forward")
        return toy.forward(call)

    def backward(call, returned):
        calls.append("backward")
        return compute.of_forward(call, returned[:2])

    why = []
    kernel = SimpleNamespace(refusal=lambda call: why[0] if why else None, forward=forward, backward=backward)
    monkeypatch.setitem(sys.modules, "tarnn.kernels.cpu.decayed_sum", kernel)
    contract.named.cache_clear()
    contract.backends.cache_clear()
    x, S = inputs()
    decayed_sum(x).sum().backward()
    assert calls == ["forward", "backward"]
    why.append("It sleeps.")
    assert contract.reasons("decayed_sum", Call(x, S, None, None, 0.5)) == {"cpu": "It sleeps.", "eager": None}
    decayed_sum(x).sum().backward()
    assert calls == ["forward", "backward"]
    contract.named.cache_clear()
    contract.backends.cache_clear()
