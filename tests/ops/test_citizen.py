"""What torch does with every op: derivatives, opcheck, compile, export, torch.func, autocast, checkpointing.

One suite over all of them; a new op is a row of `support/every_op.py`.
"""

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from support.chunks import tiny_chunks
from support.every_op import OPS, Drawn, close, every_op, every_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import CustomOpDef
from torch.utils.checkpoint import checkpoint

from tarnn.kernels.cpu import library
from tarnn.ops import delta_rule, linear_attention, registration
from tarnn.ops.linear.op import attend
from tarnn.ops.operators import with_digest

CUTS = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
WAYS = ("whole", "continued", "masked", "packed")
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@contextmanager
def watched():
    """Ops call their operators, as under torch.compile; which, and with what, is in the list that this gives."""
    calls, run = [], CustomOpDef.__call__

    def record(operator, *inputs):
        calls.append((operator, [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]))
        return run(operator, *inputs)

    with (
        mock.patch.object(registration, "is_untraced", return_value=False),
        mock.patch.object(CustomOpDef, "__call__", record),
    ):
        yield calls


def finite(case, b: int, t: int) -> Drawn:
    """Leaves with no decay of −∞, which numerical differences can't cross."""
    return leaves(case.draw(b, t).map(lambda x: x.clamp(min=-3)))


def leaves(drawn: Drawn) -> Drawn:
    return drawn.map(lambda x: x.detach().clone().requires_grad_())


def outputs(drawn: Drawn, way: str) -> torch.Tensor:
    """Of six tokens: in one call, in two, without some of them, as three sequences."""
    if way == "continued":
        first, state = drawn.part(0, 3).run()
        return torch.cat([first, drawn.part(3, None).run(state)[0]], 2)
    there = torch.tensor([[True, False, True, True, True, False]])
    return drawn.outputs(**{"masked": {"key_mask": there}, "packed": {"cu_seqlens": CUTS}}.get(way, {}))


def skip_stateless(case, way):
    if way == "continued" and not case.stateful:
        pytest.skip("there is no state")


def operators(drawn: Drawn, way: str) -> list:
    """The operators of a call and of its backward pass, with what they get."""
    with watched() as calls:
        torch.autograd.grad(outputs(drawn, way).square().sum(), drawn.tensors)
    if not calls:
        pytest.skip("it has no operator: torch sees plain operations")
    return calls


def gradients(o: torch.Tensor, drawn: Drawn, **options) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(
        o.float().square().sum() if o.dtype.itemsize < 4 else o.square().sum(), drawn.tensors, **options
    )


@pytest.mark.thorough
@every_op
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by", ["call", pytest.param("operator", marks=pytest.mark.slow)])
def test_both_derivatives(case, way, by):
    """In all inputs at once, through a state too; of calls in chunks of a few tokens, and of the operators that torch sees."""
    skip_stateless(case, way)
    drawn = finite(case, 1, 6)

    def f(*tensors):
        with tiny_chunks() if by == "call" else watched():
            return outputs(drawn.of(*tensors), way)

    assert torch.autograd.gradcheck(f, drawn.tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, drawn.tensors, fast_mode=True)


@every_op
def test_third_derivative(case):
    drawn = finite(case, 1, 4)

    def f(*tensors):
        (first,) = torch.autograd.grad(drawn.of(*tensors).outputs().square().sum(), tensors[:1], create_graph=True)
        return torch.autograd.grad(first.square().sum(), tensors[:1], create_graph=True)

    assert torch.autograd.gradcheck(f, drawn.tensors, fast_mode=True)


@pytest.mark.one_path
@every_op
def test_saved_tensors_are_unpacked_once(case):
    """Activation checkpointing without reentrance counts, in backward and where backward is differentiated."""
    unpacked = []

    def unpack(saved):
        unpacked.append(id(saved))
        return saved[0]

    drawn = leaves(case.draw(1, 9).map(torch.Tensor.float))  # float64 is plain PyTorch's, whose scans call torch.func
    with torch.autograd.graph.saved_tensors_hooks(lambda x: [x], unpack):
        o = drawn.outputs()
    gradients(o, drawn)
    assert unpacked
    assert len(unpacked) == len(set(unpacked))
    plain = drawn.outputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: [x], unpack):
        first = gradients(plain, drawn, create_graph=True)[0]
    unpacked.clear()
    torch.autograd.grad(first.square().sum(), drawn.tensors[0])
    assert unpacked
    assert len(unpacked) == len(set(unpacked))


@every_op
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(case, use_reentrant):
    drawn, again = leaves(case.draw(2, 70)), leaves(case.draw(2, 70))
    o = drawn.outputs()
    saved = checkpoint(lambda *x: again.of(*x).outputs(), *again.tensors, use_reentrant=use_reentrant)
    assert torch.equal(o, saved)
    o.sum().backward()
    saved.sum().backward()
    for x, y in zip(again.tensors, drawn.tensors):
        close(x.grad, y.grad)


@every_op
@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_fake_kernels_say_the_same_shapes_types_and_strides(case, side_by_side, dtype):
    """And where heads lie side by side in queries they do in outputs, so that merging them copies nothing."""
    drawn = case.draw(2, 7)
    if side_by_side:
        drawn = drawn.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    drawn = leaves(
        drawn.of(
            *(x.to(dtype) for x in drawn.inputs),
            *(x.to(dtype) if dtype == torch.float64 else x.float() for x in drawn.options.values()),
        )
    )
    calls = operators(drawn, "whole")
    for operator, inputs in calls:
        with FakeTensorMode() as mode:
            fakes = operator(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs))
        results = operator(*inputs)
        assert [(x.shape, x.dtype, x.stride()) for x in results] == [(x.shape, x.dtype, x.stride()) for x in fakes]
    if getattr(case.op, "func", None) in (linear_attention, delta_rule) and len(calls) == 2:
        operator, inputs = calls[0]
        o = operator(*inputs)[0]
        assert o.transpose(1, 2).is_contiguous() == side_by_side
        # without, only the operator's is laid out
        assert drawn.outputs().stride() == o.stride() or not library.available()


@quiet
@every_op
def test_func_transforms(case):
    """torch.func: grad, vmap, and one of the other."""
    drawn = leaves(case.draw(2, 7))
    loss = lambda *tensors: drawn.of(*tensors).outputs().square().sum()  # noqa: E731
    which = tuple(range(len(drawn.tensors)))
    found = torch.func.grad(loss, argnums=which)(*drawn.tensors)
    for x, y in zip(found, gradients(drawn.outputs(), drawn)):
        close(x, y)
    each = torch.func.vmap(torch.func.grad(loss, argnums=which))(*(x.detach()[:, None] for x in drawn.tensors))
    for x, y in zip(each, found):
        close(x[:, 0], y)


@quiet
@every_op
def test_vmap_over_one_input(case):
    """Whichever it is: the others are shared."""
    drawn = case.draw(1, 7)
    attend = lambda *tensors: drawn.of(*tensors).outputs()  # noqa: E731
    for which in range(len(drawn.tensors)):
        several = [torch.stack([x, x.flip(2)]) if i == which else x for i, x in enumerate(drawn.tensors)]
        found = torch.func.vmap(attend, in_dims=tuple(0 if i == which else None for i in range(len(several))))(*several)
        for i, o in enumerate(found):
            close(o, attend(*(x[i] if j == which else x for j, x in enumerate(several))))


@quiet
@every_op
def test_forward_mode_derivatives(case):
    """Of dual tensors: a compiled kernel would compute their values and drop their tangents without a word."""
    drawn = case.draw(1, 7).map(lambda x: x.clamp(min=-3))
    tangents = [x.cos() for x in drawn.tensors]
    with forward_ad.dual_level():
        dual = drawn.of(*(forward_ad.make_dual(*x) for x in zip(drawn.tensors, tangents))).outputs()
        tangent = forward_ad.unpack_dual(dual).tangent
    nearby = lambda h: drawn.of(*(x + h * y for x, y in zip(drawn.tensors, tangents))).outputs()  # noqa: E731
    torch.testing.assert_close(tangent, (nearby(1e-6) - nearby(-1e-6)) / 2e-6, rtol=1e-6, atol=1e-6)


@every_op
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_inputs_and_neither_options_nor_sums(case, dtype, device):
    """To the bit what inputs cast beforehand give, without autocast; gradients and the step too."""
    if case.autocast is None:
        pytest.skip("it says nothing of autocast")
    drawn = leaves(case.draw(1, 190).map(torch.Tensor.float))
    cast = drawn.of(*(x.to(dtype) if case.autocast else x for x in drawn.inputs), *drawn.options.values())
    with torch.autocast(device, dtype=dtype):
        o = drawn.outputs()
    expected = cast.outputs()
    assert o.dtype == (dtype if case.autocast else torch.float32)
    assert torch.equal(o, expected)
    for x, y in zip(gradients(o, drawn), gradients(expected, drawn)):
        assert torch.equal(x, y)
    if case.stateful:
        results = []
        for given, context in ((drawn, torch.autocast(device, dtype=dtype)), (cast, nullcontext())):
            with torch.no_grad(), context:
                o, state = given.part(0, 1).step(given.run()[1])
                results.append([o, *state.tensors().values()])
        assert all(map(torch.equal, *results))


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.one_path
@quiet
@every_op
@pytest.mark.parametrize("way", ["continued", "masked", "packed"])
def test_opcheck(case, way):
    """Of the operators of the call and of its backward pass; the first alone of packed rows, whose bounds are read from data,
    which the second derivative can't do while it is traced, and of a backward pass by torch.func, which stands no modes."""
    if (way == "masked") == case.stateful and way != "packed":
        pytest.skip("one of both is enough")
    calls = operators(finite(case, 1, 6), way)
    for operator, inputs in calls[:1] if way == "packed" or case is OPS["a new op"] else calls:
        # in float32, which has kernels: in float64 too the backward pass is by torch.func
        leaf = lambda x: x.float().requires_grad_() if x.is_floating_point() else x.clone()  # noqa: E731
        torch.library.opcheck(operator, tuple(leaf(x) if isinstance(x, torch.Tensor) else x for x in inputs))


@pytest.mark.compile
@pytest.mark.one_path
@quiet
@every_op
def test_compiles_without_a_graph_break(case):
    """With any size, with gradients and a state; packed rows; the step."""
    if case.dynamic is None:
        pytest.skip("torch makes no whole graph of it")
    torch.compiler.reset()
    options = {"return_state": True} if case.stateful else {}

    def run(inputs, given, **more):
        return case.op(*inputs, **given, **more)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=case.dynamic)
    for t in (5, 9) if case.dynamic else (9,):
        drawn = leaves(case.draw(2, t))
        expected, found = (g(drawn.inputs, drawn.options, **options) for g in (run, compiled))
        o, right = (x[0] if case.stateful else x for x in (found, expected))
        close(o, right)
        for x, y in zip(gradients(o, drawn), gradients(right, drawn)):
            close(x, y)
        if case.stateful:
            for x, y in zip(found[1].tensors().values(), expected[1].tensors().values(), strict=True):
                close(x, y)
    packed = torch.compile(run, fullgraph=True, backend="aot_eager")
    drawn = leaves(case.draw(1, 6))
    o, right = (g(drawn.inputs, drawn.options, cu_seqlens=CUTS) for g in (packed, run))
    close(o, right)
    for x, y in zip(gradients(o, drawn), gradients(right, drawn)):
        close(x, y)
    if case.stateful:
        with torch.no_grad():
            _, state = drawn.run()
            one = drawn.part(0, 1)
            step = torch.compile(lambda one, state: one.step(state)[0], fullgraph=True, backend="aot_eager")
            close(step(one, state), one.step(state)[0])


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.one_path
@quiet
@pytest.mark.parametrize("name", ["selective scan", "delta of low rank, channels"])
def test_compiled_by_inductor(name):
    drawn = leaves(OPS[name].draw(2, 9))
    compiled = torch.compile(lambda *tensors: drawn.of(*tensors).outputs(), fullgraph=True)
    for x, y in zip(gradients(compiled(*drawn.tensors), drawn), gradients(drawn.outputs(), drawn)):
        close(x, y)


@pytest.mark.compile
@pytest.mark.one_path
@quiet
@every_state
def test_a_step_exports(case):
    class Step(torch.nn.Module):
        def forward(self, tensors, state):
            return drawn.of(*tensors).step(state)

    _, state = case.draw(2, 6).run()
    drawn = case.draw(2, 1, seed=1)
    exported = torch.export.export(Step(), (drawn.tensors, state)).module()
    (o, after), (expected, right) = exported(drawn.tensors, state), drawn.step(state)
    close(o, expected)
    for x, y in zip(after.tensors().values(), right.tensors().values(), strict=True):
        close(x, y)


@pytest.mark.parametrize("operator", [attend.forward_op, attend.backward_op])
def test_a_graph_compiled_for_another_schema_is_not_found_again(operator):
    """torch.compile's caches on disk tell operators apart by their names alone."""
    full = operator._opoverload._schema
    own, other = f"{full}".split("(", 1)[1], f"{full.name}".rsplit("_", 1)
    assert with_digest("name", f"({own}") == f"tarnn::name_{other[1]}"
    assert with_digest("name", f"({own}") != with_digest("name", f"(bool more, {own}")
