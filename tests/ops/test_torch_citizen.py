"""Derivatives of both orders, opcheck, torch.compile, torch.func, autocast, torch.export."""

import pytest
import torch
from support.attention_cases import Case, relative_error
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from tarnn import feature_maps
from tarnn.kernels.cpu import library
from tarnn.ops import LinearState, linear_attention, step
from tarnn.ops.linear.op import attend
from tarnn.ops.operators import with_digest

EXP = feature_maps.Exp()


UNPROJECTED = (1.0, 0.0, 0.0, 0.0)  # factor, square, offset, shift


def everything(
    causal: bool, b: int = 1, t: int = 6, decay: str = "token", projected: bool = False
) -> list[torch.Tensor | None]:
    """The first ten inputs of the operator, all there: q, k, v, log_decay, key_log_weight, S, z, omega, bias, M; without
    a projection all but omega and bias, with one of five features a head."""
    case = Case(b=b, g=2, r=2, t=t, d=3, e=2, decay=decay if causal else "none", weighted=True, spread=0.5)
    f = 5 if projected else 3
    S, z = torch.rand(b, 2, f, 2).double(), torch.rand(b, 2, f).double() + 0.5
    omega = [torch.randn(1, 2, f, 3).double() / 2, torch.randn(1, 2, f).double() / 4] if projected else [None, None]
    log_decay = case.options.get("log_decay")
    if log_decay is not None:
        log_decay = log_decay.clamp(min=-3)  # numerical differences can't cross −∞
    given = [case.q, case.k, case.v, log_decay, case.options["key_log_weight"], S, z, *omega]
    return [*(x if x is None else x.requires_grad_() for x in given), torch.rand(b, 2).double()]


OPTIONS = [
    ("elu", True, True, UNPROJECTED),
    ("exp", True, False, UNPROJECTED),
    ("exp", False, True, UNPROJECTED),
    ("identity", True, False, UNPROJECTED),
    ("squared_relu", False, True, UNPROJECTED),
    ("exp", True, True, (0.7, 0.5, -0.3, 0.0)),
    ("exp", False, False, (0.7, 0.5, -0.3, 0.0)),
    ("relu", True, True, (0.7, 0.0, 0.1, 0.01)),
    ("elu", False, True, (0.7, 0.2, 0.0, 0.01)),
    ("identity", True, False, (0.7, 0.0, 0.1, 0.0)),
]


@pytest.mark.thorough
@pytest.mark.parametrize("cu_seqlens", [None, [0, 2, 2, 6]])
@pytest.mark.parametrize(("feature_map", "causal", "normalize", "projection"), OPTIONS)
def test_first_and_second_derivatives(feature_map, causal, normalize, projection, cu_seqlens):
    """gradcheck and gradgradcheck of o and of the true sums S·e^M, z·e^M, in every differentiable input at once."""
    tensors = everything(causal, projected=projection != UNPROJECTED)
    cu = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    if cu is not None:
        S, z, M = (tensors[i].detach().expand(3, *tensors[i].shape[1:]).clone() for i in (5, 6, 9))
        tensors[5:7], tensors[9] = [S.requires_grad_(), z.requires_grad_()], M
    *inputs, M = tensors
    given = [x for x in inputs if x is not None]

    def f(*xs):
        it = iter(xs)
        o, _, S, z, M_out = attend.forward_op(
            *(None if x is None else next(it) for x in inputs),
            M,
            None,
            cu,
            feature_map,
            causal,
            normalize,
            1e-30,
            *projection,
            False,
        )
        scale = M_out.exp()
        return o, S * scale[..., None, None], z * scale[..., None]

    assert torch.autograd.gradcheck(f, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, given, fast_mode=True)


@pytest.mark.thorough
@pytest.mark.one_path
@pytest.mark.parametrize("decay", ["none", "channel"])
def test_derivatives_of_the_plain_call(decay):
    """Slow mode, every entry; without what is optional."""
    tensors = [x for x in everything(True, decay=decay)[:4] if x is not None]
    f = lambda q, k, v, log_decay=None: linear_attention(q, k, v, causal=True, log_decay=log_decay)  # noqa: E731
    assert torch.autograd.gradcheck(f, tensors)
    assert torch.autograd.gradgradcheck(f, tensors)


@pytest.mark.one_path
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("phi", [EXP, feature_maps.PositiveRandomFeatures(4, 8, seed=0)])
def test_saved_tensors_are_unpacked_once(phi, causal):
    """Activation checkpointing without reentrance counts, in backward and where backward is differentiated."""
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    unpacked = []

    def unpack(saved):
        unpacked.append(id(saved))
        return saved[0]

    def squares(x):
        return x.square().sum()

    with torch.autograd.graph.saved_tensors_hooks(lambda x: [x], unpack):
        o = linear_attention(q, k, v, phi, causal=causal)
    torch.autograd.grad(squares(o), q)
    assert unpacked
    assert len(unpacked) == len(set(unpacked))
    plain = linear_attention(q, k, v, phi, causal=causal)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: [x], unpack):
        (grad,) = torch.autograd.grad(squares(plain), q, create_graph=True)
    unpacked.clear()
    torch.autograd.grad(squares(grad), q)
    assert unpacked
    assert len(unpacked) == len(set(unpacked))


def test_third_derivative():
    x = torch.randn(1, 1, 4, 2, dtype=torch.float64, requires_grad=True)

    def f(q):
        (first,) = torch.autograd.grad(linear_attention(q, q, q, causal=True).square().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
        return second

    assert torch.autograd.gradcheck(f, x)


@pytest.mark.parametrize("causal", [True, False])
def test_outputs_lie_as_queries_lie(causal):
    """So that merging heads copies nothing; the fake kernel says the same strides."""
    options = (None, None, "elu", causal, True, 1e-30, *UNPROJECTED, False)
    for side_by_side in (True, False):
        q, k, v = (torch.randn(2, 7, 3, 4).transpose(1, 2) for _ in range(3))
        if not side_by_side:
            q = q.contiguous()
        inputs = (q, k, v, *[None] * 7)
        o = attend.forward_op(*inputs, *options)[0]
        if library.available():  # by plain PyTorch, only the operator's output is laid out
            assert linear_attention(q, k, v, causal=causal).stride() == o.stride()
        assert o.transpose(1, 2).is_contiguous() == side_by_side
        with FakeTensorMode() as mode:
            fakes = [None if x is None else mode.from_tensor(x) for x in inputs]
            assert attend.forward_op(*fakes, *options)[0].stride() == o.stride()


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.one_path
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("projected", [False, True])
def test_opcheck(causal, packed, projected):
    cu = torch.tensor([0, 4, 6], dtype=torch.int32) if packed else None
    tensors = everything(causal, projected=projected)
    if packed:
        tensors[5:7], tensors[9] = [None, None], None
    numbers = (0.7, 0.5, 0.0, 0.0) if projected else UNPROJECTED
    options = (None, cu, "exp" if projected else "elu", causal, True, 1e-30, *numbers, False)
    torch.library.opcheck(attend.forward_op, (*tensors, *options))
    if packed:
        return  # its bounds are read from data, which the second derivative cannot do while it is being traced
    o, den, S, z, M = attend.forward_op(*tensors, *options)
    grads = [torch.randn_like(x) for x in (o, S, z)]
    torch.library.opcheck(
        attend.backward_op, (*grads, *(x.detach() for x in (o, den, S, z, M)), None, projected, *tensors, *options)
    )


@pytest.mark.compile
@pytest.mark.one_path
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiles_without_a_graph_break():
    """Whole, with gradients, state and dynamic length; the step too."""
    torch.compiler.reset()
    f = lambda q, k, v, w: linear_attention(q, k, v, EXP, causal=True, key_log_weight=w, return_state=True)  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for t in (5, 9):
        case = Case(b=2, g=2, r=2, t=t, weighted=True)
        inputs = [x.requires_grad_() for x in (case.q, case.k, case.v, case.options["key_log_weight"])]
        (o, state), (expected, expected_state) = compiled(*inputs), f(*inputs)
        assert relative_error(o, expected) < 1e-12
        assert relative_error(state.S, expected_state.S) < 1e-12
        for x, y in zip(torch.autograd.grad(o.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)):
            assert relative_error(x, y) < 1e-9
    one = [x.detach()[:, :, :1] for x in (case.q, case.k, case.v)]
    state = state.map(torch.Tensor.detach)
    stepped = torch.compile(lambda *x: step(*x[:3], EXP, x[3]), fullgraph=True, backend="aot_eager")(*one, state)
    assert relative_error(stepped[0], step(*one, EXP, state)[0]) < 1e-12


def test_func_transforms():
    """torch.func: grad, vmap, and one of the other."""
    case = Case(b=2, g=1, r=2, t=7)
    loss = lambda q, k, v: linear_attention(q, k, v, causal=True).square().sum()  # noqa: E731
    grads = torch.func.grad(loss, argnums=(0, 1, 2))(case.q, case.k, case.v)
    tensors = [x.requires_grad_() for x in (case.q, case.k, case.v)]
    for x, y in zip(grads, torch.autograd.grad(loss(*tensors), tensors)):
        assert relative_error(x, y) < 1e-10
    each = torch.func.vmap(torch.func.grad(loss))(*(x.detach()[:, None] for x in tensors))
    assert relative_error(each[:, 0], grads[0]) < 1e-10


@pytest.mark.parametrize("batched", [(0, None, None), (None, 0, None), (None, None, 0)])
def test_vmap_over_one_input(batched):
    """Whichever it is: the others are shared."""
    case = Case(b=1, g=1, r=2, t=7)
    several = [torch.stack([x, x.flip(2)]) if axis == 0 else x for x, axis in zip((case.q, case.k, case.v), batched)]
    outputs = torch.func.vmap(lambda *x: linear_attention(*x, causal=True), in_dims=batched)(*several)
    for i, o in enumerate(outputs):
        alone = [x[i] if axis == 0 else x for x, axis in zip(several, batched)]
        assert relative_error(o, linear_attention(*alone, causal=True)) < 1e-10


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("causal", [True, False])
def test_forward_mode_derivatives(causal):
    """Of dual tensors: a compiled kernel would compute their values and drop their tangents without a word."""
    case = Case(b=1, g=1, r=2, t=7)
    attend, given = (lambda *x: linear_attention(*x, causal=causal)), (case.q, case.k, case.v)
    tangents = tuple(x.cos() for x in given)
    with forward_ad.dual_level():
        o = forward_ad.unpack_dual(attend(*(forward_ad.make_dual(*x) for x in zip(given, tangents))))
    assert o.tangent is not None
    assert relative_error(o.tangent, torch.func.jvp(attend, given, tangents)[1]) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_autocast_casts_q_k_v_and_not_the_sums(device, causal, dtype):
    """To the bit what inputs cast beforehand give, without autocast; gradients and the step too."""
    q, k, v = (torch.randn(1, 2, 4096, 8, requires_grad=True) for _ in range(3))
    cast = [x.to(dtype) for x in (q, k, v)]
    expected, expected_state = linear_attention(*cast, causal=causal, return_state=True)
    with torch.autocast(device, dtype=dtype):
        o, state = linear_attention(q, k.double().float(), v, causal=causal, return_state=True)
        one = [x[:, :, :1] for x in (q, k, v)]
        stepped, after = step(*one, state=state)
        grads = torch.autograd.grad(o.float().square().sum(), (q, k, v), retain_graph=True)
    assert o.dtype == dtype
    assert torch.equal(o, expected)
    assert torch.equal(state.S, expected_state.S)
    for x, y in zip(grads, torch.autograd.grad(expected.float().square().sum(), (q, k, v), retain_graph=True)):
        assert torch.equal(x, y)
    again, again_after = step(*(x[:, :, :1] for x in cast), state=expected_state)
    assert torch.equal(stepped, again)
    assert torch.equal(after.z, again_after.z)


@pytest.mark.compile
@pytest.mark.one_path
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_step_exports():
    class Step(torch.nn.Module):
        def forward(self, q, k, v, S, z):
            o, state = step(q, k, v, state=LinearState(S, z))
            return o, state.S, state.z

    args = [torch.randn(2, 3, 1, 4) for _ in range(3)] + [torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4)]
    args = [x.double() for x in args]
    exported = torch.export.export(Step(), tuple(args)).module()
    for x, y in zip(exported(*args), Step()(*args)):
        assert relative_error(x, y) < 1e-13


@pytest.mark.parametrize("operator", [attend.forward_op, attend.backward_op])
def test_a_graph_compiled_for_another_schema_is_not_found_again(operator):
    """torch.compile's caches on disk tell operators apart by their names alone."""
    full = operator._opoverload._schema
    own, other = f"{full}".split("(", 1)[1], f"{full.name}".rsplit("_", 1)
    assert with_digest("name", f"({own}") == f"tarnn::name_{other[1]}"
    assert with_digest("name", f"({own}") != with_digest("name", f"(bool more, {own}")
