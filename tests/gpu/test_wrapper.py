"""What stands around flash-linear-attention's kernels, with its naive functions in their place, against our definitions."""

import pytest
import torch
from support import fla, naive_fla
from support.fla_calls import delta_excess, linear_drawn, linear_excess

from tarnn import delta_rule, delta_step, linear_attention
from tarnn.kernels import contract, delta, linear
from tarnn.kernels.cpu import library
from tarnn.kernels.fla import delta as fla_delta, linear as fla_linear

fla.installed()


@pytest.fixture(autouse=True)
def called(on_a_cpu, monkeypatch):
    """The names of the functions of fla that were called."""
    return naive_fla.take_the_place_of_kernels(monkeypatch)


@pytest.mark.parametrize("block", range(4))
def test_drawn_calls_of_linear_attention(block, called):
    for number in range(20 * block, 20 * block + 20):
        drawn = linear_drawn(number)
        worst = linear_excess(drawn)
        assert max(worst.values()) <= 1, (str(drawn), worst)
    assert {*called} == {"chunk_simple_gla", "chunk_gla"}


@pytest.mark.parametrize("block", range(3))
def test_drawn_calls_of_the_delta_rule(block, called):
    """Packed, continued, masked, token by token, with decays that reset, keys that repeat, and grouped values."""
    for number in range(20 * block, 20 * block + 20):
        worst = delta_excess(number)
        assert max(worst, default=0.0) <= 1, (number, worst)
    assert {"chunk_gated_delta_rule", "chunk_kda"} <= {*called}


def random(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("normalize", [True, False, "at_least_one"])
@pytest.mark.parametrize("channels", [False, True])
def test_values_in_groups(channels, normalize, called):
    """They are those of heads with queries and keys of their own."""
    torch.manual_seed(0)
    q, k, v = random(2, 2, 30, 8), random(2, 2, 30, 8), random(2, 6, 30, 5)
    decay = -torch.rand(2, 6, 30, *[8] * channels)
    phi = "relu" if normalize is True else "identity"  # whose sums may be below 0
    options = {"causal": True, "log_decay": decay, "normalize": normalize, "return_state": True}
    o, state = linear_attention(q, k, v, phi, **options)
    assert called == ["chunk_gla" if channels else "chunk_simple_gla"]
    with torch.no_grad():
        wide = (x.double() for x in (q.repeat_interleave(3, 1), k.repeat_interleave(3, 1), v))
        expected, after = linear_attention(*wide, phi, **options | {"log_decay": decay.double()})
    assert o.shape == expected.shape
    assert (o - expected).abs().max() <= 0.01 * expected.abs().max()
    assert (state.S - after.S).abs().max() <= 0.01 * after.S.abs().max()


@pytest.mark.parametrize("op", [linear_attention, delta_rule])
def test_at_masked_tokens_anything_may_stand(op):
    torch.manual_seed(0)
    mask = torch.tensor([[1, 0, 1, 1, 0, 0, 1]], dtype=torch.bool)
    q, k, v = (torch.randn(1, 2, 7, 8).bfloat16() for _ in range(3))
    beta, decay = torch.rand(1, 2, 7), -torch.rand(1, 2, 7)
    options = {"beta": beta} if op is delta_rule else {"causal": True}
    inputs = {"k": k, "v": v, "log_decay": decay, **options}
    cut = {n: x[:, :, mask[0]] if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    expected = op(q[:, :, mask[0]], **cut)
    for x in (k, v, beta, decay):
        x[:, :, ~mask[0]] = torch.nan
    o = op(q, key_mask=mask, **inputs)
    assert torch.equal(o[:, :, mask[0]], expected)
    assert o.isfinite().all()


def test_results_lie_as_every_backends_do():
    """In the layout of q, so that heads merge without a copy; gradients as what they are the gradients of."""
    q = random(2, 9, 3 * 16).unflatten(-1, (3, 16)).transpose(1, 2)
    k, v = random(2, 3, 9, 16), random(2, 3, 9, 5)
    decay, beta = -torch.rand(2, 3, 9), torch.rand(2, 3, 9)
    for backend, call in (
        (fla_linear, linear.Call(q, k, v, decay, function="elu")),
        (fla_delta, delta.Call(q, k, v, beta, decay)),
    ):
        outputs = backend.forward(call)
        promised = call.new_outputs()
        results = [(x, y) for x, y in zip(outputs, promised) if x is not None]
        returned = None
        if backend is fla_linear:
            returned = linear.BackwardInputs.of(call, outputs, torch.ones_like(outputs.o), torch.ones_like(outputs.S))
        else:
            sent = type("BackwardInputs", (), {"grad_o": torch.ones_like(outputs.o), "grad_S": None, "kept": None})
            returned = sent
        grads, targets = backend.backward(call, returned), call.new_gradients(returned)
        results += [(x, y) for x, y in zip(grads, targets) if y is not None]
        assert len(results) > 5
        assert all((x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype) for x, y in results)


def test_second_derivatives_are_plain_pytorchs(called):
    torch.manual_seed(0)
    inputs = [random(1, 2, 9, 4) for _ in range(3)]

    def twice() -> list[torch.Tensor]:
        o = linear_attention(*inputs, causal=True)
        first = torch.autograd.grad(o.float().square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.float().square().sum() for x in first), inputs)

    found = twice()
    assert called == ["chunk_simple_gla"] * 3  # forward, and its derivative with a graph and, of o within it, without
    with pytest.MonkeyPatch.context() as patch, library.disabled():
        patch.setattr(contract, "choose", lambda op, call: contract.named("eager", op))
        expected = twice()
    for x, y in zip(found, expected):
        assert (x - y).abs().max() <= 0.05 * y.abs().max()


@pytest.mark.compile
@pytest.mark.parametrize("op", [linear_attention, delta_rule])
def test_torch_compile_sees_one_operator(op, called):
    torch.manual_seed(0)
    q, k, v, beta = *(random(1, 2, 9, 16) for _ in range(3)), torch.rand(1, 2, 9)
    call = (lambda *x: op(*x, causal=True)) if op is linear_attention else (lambda *x: op(*x, beta, normalize_qk=True))
    expected = torch.autograd.grad(call(q, k, v).float().sum(), (q, k, v))
    compiled = torch.compile(lambda *x: call(*x).float().sum(), fullgraph=True)
    found = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    assert len(called) == 4  # forward and backward, twice
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_a_step_in_place_writes_into_its_state(called):
    q, k, v, beta = *(random(2, 3, 1, 8).detach() for _ in range(3)), torch.rand(2, 3, 1)
    _, state = delta_rule(q, k, v, beta, return_state=True)
    o, after = delta_step(q, k, v, beta, state=state)
    own = state.clone()
    written = own.S
    o2, same = delta_step(q, k, v, beta, state=own, inplace=True)
    assert same.S is written
    assert torch.equal(o, o2)
    assert torch.equal(written, after.S)
    assert called[1:] == ["fused_recurrent_gated_delta_rule"] * 2


def test_packed_rows_that_do_not_fit_are_refused():
    q, bounds = random(1, 2, 9, 8), torch.tensor([0, 4, 8])
    with pytest.raises(ValueError, match="cu_seqlens"):
        linear_attention(q, q, q, causal=True, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="cu_seqlens"):
        delta_rule(q, q, q, torch.rand(1, 2, 9), cu_seqlens=bounds)
