"""flash-linear-attention's own kernels against our definitions: forward, backward and one token."""

import importlib

import pytest
import torch
from support import fla, honest_interpreter, naive_fla
from support.fla_calls import delta_excess, linear_drawn, linear_excess

from tarnn import delta_rule, linear_attention

fla.installed()
# factors of pairs above the diagonal, which a mask leaves out afterwards
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")


@pytest.fixture(autouse=True)
def called(on_a_cpu, monkeypatch):
    """The names of the kernels that were called."""
    names: list[str] = []

    def noting(name, kernel):
        return lambda **arguments: names.append(name) or kernel(**arguments)

    for module in naive_fla.KERNELS:
        for name in naive_fla.KERNELS[module]:
            kernel = getattr(importlib.import_module(f"fla.ops.{module}"), name)
            monkeypatch.setattr(f"fla.ops.{module}.{name}", noting(name, kernel))
    return names


@pytest.mark.parametrize("number", range(16))
def test_drawn_calls_of_linear_attention(number):
    drawn = linear_drawn(number)
    with honest_interpreter.order(number):
        worst = linear_excess(drawn)
    assert max(worst.values()) <= 1, (str(drawn), worst)


@pytest.mark.parametrize("number", [*range(12), 24])
def test_drawn_calls_of_the_delta_rule(number):
    with honest_interpreter.order(number):
        worst = delta_excess(number)
    assert max(worst, default=0.0) <= 1, worst


def inputs(t: int, d: int, e: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, t, n, dtype=torch.bfloat16, requires_grad=True) for n in (d, d, e)]


@pytest.mark.parametrize("decay", ["none", "token", "channel", "resets"])
@pytest.mark.parametrize("op", [linear_attention, delta_rule])
def test_two_chunks_are_the_definition(op, decay, called):
    """With gradients through the state behind: longer than the drawn ones, at widths of models."""
    t, d, e = 70, 64, 32
    q, k, v = inputs(t, d, e)
    log_decay = None
    if decay != "none":
        log_decay = -torch.rand(1, 2, t, *[d] * (decay == "channel"))
    if decay == "resets":
        log_decay[:, :, ::17] = -torch.inf
    more = {"causal": True} if op is linear_attention else {"beta": torch.rand(1, 2, t), "normalize_qk": True}
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        own = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        options = {
            n: x.to(torch.promote_types(dtype, torch.float32)) if isinstance(x, torch.Tensor) else x
            for n, x in more.items()
        }
        decays = (
            log_decay if log_decay is None else log_decay.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        )
        o, state = op(*own, log_decay=decays, return_state=True, **options)
        leaves = own if decays is None or decay == "resets" else [*own, decays]
        grads = torch.autograd.grad((o * (own[2].detach() + 1)).sum() + state.S.sum(), leaves)
        results.append([o, state.S, *grads])
    assert len(called) == 2
    for x, y in zip(*results):
        assert (x - y).norm() <= 2**-6 * y.norm()
