"""The delta rule and torch: opcheck, torch.compile, torch.export, torch.func, autocast; and what it says of bad arguments."""

import pytest
import torch
from support.attention_cases import relative_error
from support.delta_fuzz_calls import HEADS, inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from tarnn import DeltaState, delta_rule, delta_step
from tarnn.ops.delta.op import compute

OPTIONS = (None, None, 0.4, 1e-6)  # key_mask, cu_seqlens, scale, norm_eps


def tensors(heads="one of each", decay="token", **sizes) -> list[torch.Tensor]:
    """q, k, v, β, log-decay: all that a call takes in its order."""
    return list(inputs(heads, decay, **sizes).values())


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.one_path
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("heads", "decay", "packed"),
    [
        ("values in groups", "channel", False),
        ("queries in groups", "token", False),
        ("one of each", "none", True),
        ("values in groups", "token", True),
    ],
)
def test_opcheck(heads, decay, packed):
    given = [x.requires_grad_() for x in tensors(heads, decay, b=1, t=6, d=3, e=2)]
    cu = torch.tensor([0, 4, 6], dtype=torch.int32) if packed else None
    n = given[3].shape[1]
    S = torch.randn(2 if packed else 1, n, 3, 2).double().requires_grad_()
    call = (*given, *([None] if decay == "none" else []), S, None, cu, 0.4, 1e-6)
    torch.library.opcheck(compute.forward_op, call)
    if packed:
        return  # its bounds are read from data, which the second derivative cannot do while it is being traced
    grads = [torch.randn_like(x) for x in compute.forward_op(*call)]
    torch.library.opcheck(compute.backward_op, (*grads, None, None, None, *call))


@pytest.mark.compile
@pytest.mark.one_path
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("heads", ["values in groups", "queries in groups"])
def test_compiles_without_a_graph_break(heads):
    """Whole, with gradients, state and dynamic length; the step too."""
    torch.compiler.reset()
    f = lambda *x: delta_rule(*x[:4], log_decay=x[4], normalize_qk=True, return_state=True)  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for t in (5, 9):
        given = [x.requires_grad_() for x in tensors(heads, t=t)]
        (o, state), (expected, expected_state) = compiled(*given), f(*given)
        assert relative_error(o, expected) < 1e-12
        assert relative_error(state.S, expected_state.S) < 1e-12
        for x, y in zip(torch.autograd.grad(o.sum(), given), torch.autograd.grad(expected.sum(), given)):
            assert relative_error(x, y) < 1e-9
    one = [x.detach()[:, :, :1] for x in given]
    state = state.map(torch.Tensor.detach)
    step = lambda state, *x: delta_step(*x[:4], log_decay=x[4], normalize_qk=True, state=state)  # noqa: E731
    stepped = torch.compile(step, fullgraph=True, backend="aot_eager")(state, *one)
    assert relative_error(stepped[0], step(state, *one)[0]) < 1e-12


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_func_transforms(heads, decay):
    """torch.func: grad, vmap, and one of the other."""
    given = tensors(heads, decay, t=7)

    def loss(*x):
        return delta_rule(*x[:4], log_decay=x[4] if len(x) > 4 else None, normalize_qk=True).square().sum()

    which = tuple(range(len(given)))
    grads = torch.func.grad(loss, argnums=which)(*given)
    leaves = [x.requires_grad_() for x in given]
    for x, y in zip(grads, torch.autograd.grad(loss(*leaves), leaves)):
        assert relative_error(x, y) < 1e-10
    each = torch.func.vmap(torch.func.grad(loss, argnums=which))(*(x.detach()[:, None] for x in leaves))
    for x, y in zip(each, grads):
        assert relative_error(x[:, 0], y) < 1e-10


@pytest.mark.parametrize("which", range(5))
def test_vmap_over_one_input(which):
    """Whichever it is: the others are shared."""
    given = tensors(t=7)
    several = [torch.stack([x, x.flip(2)]) if i == which else x for i, x in enumerate(given)]
    attend = lambda *x: delta_rule(*x[:4], log_decay=x[4], normalize_qk=True)  # noqa: E731
    outputs = torch.func.vmap(attend, in_dims=tuple(0 if i == which else None for i in range(5)))(*several)
    for i, o in enumerate(outputs):
        assert relative_error(o, attend(*(x[i] if j == which else x for j, x in enumerate(several)))) < 1e-10


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch's own
def test_forward_mode_derivatives():
    """Of dual tensors: a compiled kernel would compute their values and drop their tangents without a word."""
    given = tensors(t=7)
    attend = lambda *x: delta_rule(*x[:4], log_decay=x[4], normalize_qk=True)  # noqa: E731
    tangents = [x.cos() for x in given]
    with forward_ad.dual_level():
        o = forward_ad.unpack_dual(attend(*(forward_ad.make_dual(*x) for x in zip(given, tangents))))
    assert o.tangent is not None
    step, nearby = 1e-6, lambda sign: [x + sign * 1e-6 * y for x, y in zip(given, tangents)]
    assert relative_error(o.tangent, (attend(*nearby(1)) - attend(*nearby(-1))) / (2 * step)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_q_k_v_and_neither_gates_nor_sums(device, dtype):
    """To the bit what inputs cast beforehand give, without autocast; gradients and the step too."""
    given = [x.float().requires_grad_() for x in tensors(t=300, d=8)]
    cast = [*(x.to(dtype) for x in given[:3]), *given[3:]]
    attend = lambda *x: delta_rule(*x[:4], log_decay=x[4], normalize_qk=True, return_state=True)  # noqa: E731
    expected, expected_state = attend(*cast)
    with torch.autocast(device, dtype=dtype):
        o, state = attend(*given)
        grads = torch.autograd.grad(o.float().square().sum(), given, retain_graph=True)
        stepped, _ = delta_step(*(x[:, :, :1] for x in given[:4]), state=state.map(torch.detach))
    assert o.dtype == dtype
    assert torch.equal(o, expected)
    assert torch.equal(state.S, expected_state.S)
    for x, y in zip(grads, torch.autograd.grad(expected.float().square().sum(), given, retain_graph=True)):
        assert torch.equal(x, y)
    again, _ = delta_step(*(x[:, :, :1] for x in cast[:4]), state=expected_state.map(torch.detach))
    assert torch.equal(stepped, again)


@pytest.mark.compile
@pytest.mark.one_path
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_step_exports():
    class Step(torch.nn.Module):
        def forward(self, q, k, v, beta, log_decay, S):
            o, state = delta_step(q, k, v, beta, log_decay=log_decay, normalize_qk=True, state=DeltaState(S))
            return o, state.S

    args = [*(x[:, :, :1] for x in tensors("values in groups")), torch.randn(2, 4, 5, 3).double()]
    exported = torch.export.export(Step(), tuple(args)).module()
    for x, y in zip(exported(*args), Step()(*args)):
        assert relative_error(x, y) < 1e-13


@pytest.mark.parametrize("heads", HEADS)
def test_outputs_lie_as_queries_lie(heads):
    """So that merging heads copies nothing; the fake kernel says the same strides."""
    for side_by_side in (True, False):
        given = tensors(heads, t=7)
        if side_by_side:
            given[0] = given[0].transpose(1, 2).contiguous().transpose(1, 2)
        call = (*given, None, *OPTIONS)
        o = compute.forward_op(*call)[0]
        assert delta_rule(*given[:4], log_decay=given[4]).stride() == o.stride()
        assert o.transpose(1, 2).is_contiguous() == side_by_side
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in call]
            assert compute.forward_op(*fakes)[0].stride() == o.stride()


# --- errors: expected, got, remedy

x = torch.ones
GOOD = {"q": x(2, 4, 6, 5), "k": x(2, 2, 6, 5), "v": x(2, 2, 6, 3), "beta": x(2, 2, 6)}
BAD = {
    "three axes": ({"q": x(4, 6, 5)}, r"four axes each; got q \(4, 6, 5\).*unflatten"),
    "widths differ": ({"k": x(2, 2, 6, 7)}, r"must share b and t, and q and k also d.*k \(2, 2, 6, 7\)"),
    "lengths differ": ({"v": x(2, 2, 5, 3)}, r"must share b and t.*v \(2, 2, 5, 3\).*pass state="),
    "no channels": ({"q": x(2, 4, 6, 0), "k": x(2, 2, 6, 0)}, r"d, which is 1 at least"),
    "heads that don't divide": ({"v": x(2, 3, 6, 3)}, r"heads must divide.*got h = 4, g = 2, m = 3"),
    "groups on both sides": ({"v": x(2, 4, 6, 3)}, r"heads must divide.*got h = 4, g = 2, m = 4"),
    "no heads": ({"q": x(2, 0, 6, 5), "k": x(2, 0, 6, 5), "v": x(2, 0, 6, 3)}, r"got h = 0, g = 0, m = 0"),
    "dtypes": ({"v": GOOD["v"].double()}, r"share one floating dtype; got .*float32, .*float32, .*float64"),
    "no tensor": ({"beta": 0.5}, r"beta must be a tensor; got float"),
    "beta's shape": ({"beta": x(2, 4, 6)}, r"beta must be \(b, n, t\) = \(2, 2, 6\).*got \(2, 4, 6\)"),
    "beta's dtype": ({"beta": x(2, 2, 6).long()}, r"beta must be floating; got torch.int64. Pass beta.float\(\)"),
    "beta above 2": ({"beta": 2.1 * x(2, 2, 6)}, r"from 0 to 2; got 2.1 to 2.1.*not the logits"),
    "beta below 0": ({"beta": -x(2, 2, 6)}, r"from 0 to 2; got -1 to -1"),
    "beta above 2 beside NaN": ({"beta": torch.tensor([torch.nan, 3.0] * 12).view(2, 2, 6)}, r"from 0 to 2"),
    "decay's shape": (
        {"log_decay": -x(2, 2, 6, 3)},
        r"\(2,\), .* \(2, 2, 6\) or .* \(2, 2, 6, 5\).*got \(2, 2, 6, 3\)",
    ),
    "decay's dtype": ({"log_decay": -x(2).long()}, r"log_decay must be floating"),
    "decay above 0": ({"log_decay": 0.1 * x(2, 2, 6)}, r"log_decay must be ≤ 0.*got 0.1. Pass the logarithm"),
    "channels above 0": ({"log_decay": x(2, 2, 6, 5)}, r"log_decay must be ≤ 0"),
    "a head's decay above 0": ({"log_decay": x(2)}, r"log_decay must be ≤ 0"),
    "mask's shape": ({"key_mask": x(2, 5).bool()}, r"key_mask must be .* = \(2, 6\); got \(2, 5\)"),
    "mask's dtype": ({"key_mask": x(2, 6)}, r"bool, True = attend; got torch.float32"),
    "packed batch": ({"cu_seqlens": torch.tensor([0, 6])}, r"b = 1 .*got b = 2"),
    "scale": ({"scale": float("nan")}, r"scale must be a finite number, or None for 1/√d; got nan"),
    "norm": ({"normalize_qk": 0.0}, r"normalize_qk must be False, True .*or the number above 0.*got 0.0"),
    "another model's state": ({"state": DeltaState.zeros(2, 4, 5, 3)}, r"S must be \(2, 2, 5, 3\).*got \(2, 4, 5, 3\)"),
    "a state of 16 bits": (
        {"state": DeltaState.zeros(2, 2, 5, 3, dtype=torch.bfloat16)},
        r"in torch.float32 .*got .*bfloat16",
    ),
    "a tensor for a state": (
        {"state": x(2, 2, 5, 3)},
        r"state must be a DeltaState, which delta_rule returns; got Tensor",
    ),
}


@pytest.mark.refusals
@pytest.mark.one_path
@pytest.mark.parametrize("name", BAD)
def test_it_says_what_is_wrong(name):
    change, message = BAD[name]
    with pytest.raises((ValueError, TypeError), match=message):
        delta_rule(**{**GOOD, **change})


@pytest.mark.refusals
@pytest.mark.one_path
def test_a_step_says_what_is_wrong():
    with pytest.raises(
        ValueError, match=r"takes one token, q \(b, h, 1, d\); got \(2, 4, 6, 5\).*delta_rule\(state=…\)"
    ):
        delta_step(**GOOD)
    one = {name: tensor[:, :, :1] for name, tensor in GOOD.items()}
    with pytest.raises(ValueError, match=r"needs a state to write into: make one with DeltaState.zeros"):
        delta_step(**one, inplace=True)
    with pytest.raises(ValueError, match=r"from 0 to 2"):
        delta_step(**one | {"beta": 3 * one["beta"]})
