"""The contract of backends: one record of a call, one chooser, and what every backend's results look like."""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from tarnn import Elu, linear_attention, step
from tarnn.errors import SlowPathWarning
from tarnn.kernels import contract
from tarnn.kernels.contract import schema
from tarnn.kernels.cpu import linear as cpu
from tarnn.kernels.eager import linear as eager
from tarnn.kernels.linear import BackwardInputs, Call, Gradients, Outputs
from tarnn.ops.linear.op import attend

DTYPES = [torch.float64, torch.float32, torch.float16]


def strided(*shape: int, dtype=torch.float32) -> torch.Tensor:
    """Numbers whose last two axes lie in memory the other way round."""
    return torch.rand(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT


def a_call(*, causal=True, packed=False, channels=False, projected=False, state=True, h=4, dtype=torch.float32) -> Call:
    """A call that has everything, each tensor laid out in a way of its own; decays and log-weights as narrow as q."""
    b, g, t, d, e = (1 if packed else 3), 2, 11, 6, 5
    n = 3 if packed else b
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q = torch.randn(b, t, h * d, dtype=dtype).unflatten(-1, (h, d)).transpose(1, 2)
    f = 7 if projected else d
    decay = -strided(b, g, t, *[f] * channels, dtype=dtype)
    return Call(
        q,
        strided(b, g, t, d, dtype=dtype),
        torch.randn(b, g, 2 * t, e, dtype=dtype)[:, :, ::2],
        decay if causal else None,
        strided(b, g, t, dtype=dtype),
        *((strided(n, g, f, e, dtype=wide), strided(n, g, f, dtype=wide)) if state else (None, None)),
        *((strided(1, g, f, d), strided(1, g, f)) if projected else (None, None)),
        torch.zeros(n, g, dtype=wide) if state else None,
        torch.rand(b, t) > 0.3,
        torch.tensor([0, 4, 4, t], dtype=torch.int32) if packed else None,
        "exp" if projected else "elu",
        causal,
    )._replace(eps=1e-30)


VARIANTS = [
    {},
    {"causal": False},
    {"channels": True, "projected": True},
    {"packed": True},
    {"packed": True, "causal": False},
    {"projected": True},
    {"state": False},
    {"state": False, "causal": False, "packed": True},
    {"h": 0},
    {"h": 0, "packed": True},
]


def all_results(backend, call: Call) -> tuple[Outputs, Gradients]:
    outputs = backend.forward(call)
    grad_o = torch.ones(1, 1, 1, 1, dtype=call.v.dtype).expand(outputs.o.shape)
    grads = (torch.randn_like(outputs.S), torch.randn_like(outputs.z))
    found = backend.backward(call, BackwardInputs.of(call, outputs, grad_o, *grads))
    # a backend may make gradients of a state that nobody gave, or not
    return outputs, Gradients(*found.wanted(call))


def look(x: torch.Tensor | None) -> tuple | None:
    """Shape, dtype and strides, the latter where an axis has more than one place."""
    if x is None:
        return None
    return x.shape, x.dtype, [step for step, n in zip(x.stride(), x.shape) if n > 1 and x.numel()]


def looks(xs) -> list[tuple | None]:
    return [look(x) for x in xs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_results_look_alike_whoever_computes_them_and_as_the_fakes_promise(options, dtype, poisoned_memory):
    """Shape, dtype and strides of all that both operators return: eager, compiled, and without data. And all is written."""
    torch.manual_seed(0)
    call = a_call(**options, dtype=dtype)
    outputs, grads = all_results(eager, call)
    assert all(x is None or not x.isnan().any() for x in (*outputs, *grads))
    assert looks(outputs) == looks(call.new_outputs())
    assert looks(grads) == looks(call.new_gradients(BackwardInputs.of(call, outputs, outputs.o)).of(call).wanted(call))
    if cpu.refusal(call) is None:
        compiled, compiled_grads = all_results(cpu, call)
        assert looks(compiled) == looks(outputs)
        assert looks(compiled_grads) == looks(grads)
        assert all(x is None or not x.isnan().any() for x in (*compiled, *compiled_grads))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Call(*[mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in call])
        promised = attend.forward_op(*fake)
        assert looks(promised) == looks(outputs[:5])  # what a backend keeps for itself is no result
        returned = BackwardInputs.of(call, Outputs(*promised), promised[0], promised[2], promised[3])
        found = attend.backward_op(*returned, *fake)
    there = [(x, y) for x, y in zip(found, grads) if y is not None]
    assert looks([x for x, _ in there]) == looks([y for _, y in there])


def test_without_queries_decays_have_gradients_all_the_same(poisoned_memory):
    """Those that come through the state behind; no query writes them first."""
    call, found = a_call(h=0), []
    if cpu.refusal(call):
        pytest.skip(cpu.refusal(call))
    for backend in (cpu, eager):
        torch.manual_seed(1)
        found.append(all_results(backend, call)[1].log_decay)
    assert found[0].abs().max() > 0.1
    torch.testing.assert_close(*found)


def test_a_record_is_its_flattened_form():
    """Schemas name the records' fields in their order, and gradients go with the first fields of a call."""
    call = a_call()
    assert Call._fields[: len(Gradients._fields)] == Gradients._fields
    assert all(x is y for x, y in zip(contract.of_form(contract.form(call), contract.present(call))[0], call))
    arguments = attend.forward_op._opoverload._schema.arguments
    assert tuple(x.name for x in arguments) == Call._fields
    arguments = attend.backward_op._opoverload._schema.arguments
    assert tuple(x.name for x in arguments) == (*BackwardInputs._fields, *Call._fields)
    returned = BackwardInputs(*range(len(BackwardInputs._fields)))
    back = attend.records((*returned, *call))
    assert back[0] == returned
    assert all(x is y for x, y in zip(back[1], call))
    end = "Tensor? kept, bool wants_projection) -> (Tensor o, Tensor den, Tensor S, Tensor z, Tensor M)"
    assert schema(BackwardInputs, results=Outputs).endswith(end)


def test_every_backend_has_the_contracts_functions():
    for name in contract.ORDER:
        module = contract.named(name, "linear")
        assert all(callable(getattr(module, f)) for f in ("refusal", "forward", "backward", "step"))
    assert contract.ORDER[-1] == "eager"
    assert eager.refusal(a_call()) is None


@pytest.fixture
def added(monkeypatch):
    """A backend that counts its calls, added as a folder would be: by a name in `ORDER`."""
    calls: list[str] = []

    def counted(name):
        return lambda *args, **options: calls.append(name) or getattr(eager, name)(*args, **options)

    module = SimpleNamespace(refusal=lambda call: None, calls=calls)
    for name in ("forward", "backward", "step"):
        setattr(module, name, counted(name))
    monkeypatch.setitem(sys.modules, "tarnn.kernels.added.linear", module)
    monkeypatch.setattr(contract, "ORDER", ("added", *contract.ORDER))
    contract.named.cache_clear()
    contract.backends.cache_clear()
    yield module
    contract.named.cache_clear()
    contract.backends.cache_clear()


def test_adding_a_backend_is_adding_a_folder(added):
    q = torch.randn(1, 2, 5, 3, requires_grad=True)
    linear_attention(q, q, q, Elu(), causal=True).sum().backward()
    with torch.no_grad():
        step(*(q[:, :, :1] for _ in range(3)))
    assert added.calls == ["forward", "backward", "step"]


def test_a_refusal_that_the_user_can_mend_is_a_warning_once(added):
    q = torch.randn(1, 2, 5, 3)
    added.refusal = lambda call: "It has better things to do."
    linear_attention(q, q, q, causal=True)  # a reason that nobody can mend: no warning
    added.refusal = lambda call: contract.FixableRefusal("The fast kernels sleep: wake them.")
    with pytest.warns(SlowPathWarning, match="wake them"):
        linear_attention(q, q, q, causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear_attention(q, q, q, causal=True)
    assert not added.calls
