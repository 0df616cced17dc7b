"""Scans as torch's citizens: both derivatives, opcheck, torch.compile, torch.export, torch.func, checkpointing."""

import pytest
import torch
from support.scans import FUNCTIONS, Scan, draw
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tarnn import ScanState
from tarnn.ops.scan.diagonal import _scan as diagonal
from tarnn.ops.scan.selective import _scan as selective

OPS = {"diagonal": diagonal, "selective": selective}
both = pytest.mark.parametrize("kind", OPS)
CUTS = torch.tensor([0, 2, 2, 6], dtype=torch.int32)


def call_of(scan: Scan, cu_seqlens=None):
    return OPS[scan.kind].call(*scan.tensors.values(), scan.h, scan.key_mask, cu_seqlens)


def small(kind: str, packed: bool = False, masked: bool = False) -> Scan:
    scan = draw(kind, 1 if packed else 2, 6, 3, 2, masked=masked)
    return Scan(kind, scan.tensors, draw(kind, 3 if packed else 2, 1, 3, 2, state=True).h, scan.key_mask)


@pytest.mark.thorough
@both
@pytest.mark.parametrize("packed", [False, True], ids=["batch, masked", "packed"])
def test_both_derivatives_of_the_call_and_of_the_operator(kind, packed):
    """Of every input, entry by entry."""
    op, scan, cuts = OPS[kind], small(kind, packed, masked=not packed).leaves(), CUTS if packed else None
    tensors = [*scan.tensors.values(), scan.h]
    for f in (
        lambda *xs: tuple(op(op.call(*xs, scan.key_mask, cuts))[:2]),
        lambda *xs: op.forward_op(*xs, scan.key_mask, cuts),
    ):
        assert torch.autograd.gradcheck(f, tensors)
        assert torch.autograd.gradgradcheck(f, tensors, fast_mode=True)


@pytest.mark.thorough
@both
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_opcheck(kind):
    for packed in (False, True):
        call = call_of(small(kind, packed, masked=True).leaves(), CUTS if packed else None)
        torch.library.opcheck(OPS[kind].forward_op, call)


@both
def test_the_fake_kernel_says_the_same_shapes_types_and_strides(kind):
    scan = draw(kind, 2, 5, 3, state=True).map(lambda x: x.half() if x.ndim == 3 else x.float())
    laid = {k: x.mT.contiguous().mT if x.ndim == 3 else x for k, x in scan.tensors.items()}
    call = OPS[kind].call(*laid.values(), scan.h.float(), None, None)
    outputs = OPS[kind].forward_op(*call)
    returned = OPS[kind].returned(*[torch.ones_like(x) for x in outputs], None, None, None)
    gradients = OPS[kind].backward_op(*returned, *call)
    for real, expected in zip((*outputs, *gradients), (*call.new_outputs()[:2], *call.new_gradients())):
        assert (real.shape, real.dtype, real.stride()) == (expected.shape, expected.dtype, expected.stride())


def compiled_is_plain(kind, compiler, *cases):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=len(cases) > 1, backend=compiler)
    def loss(tensors, h, cuts):
        o, state = FUNCTIONS[kind](*tensors, state=ScanState(h), return_state=True, cu_seqlens=cuts)
        return o.square().sum() + (state.h * 2).sum()

    for scan, cuts in cases:
        found, expected = scan.leaves(), scan.leaves()
        got = loss(list(found.tensors.values()), found.h, cuts)
        o, h = expected.ours(**({} if cuts is None else {"cu_seqlens": cuts}))
        right = o.square().sum() + (h * 2).sum()
        torch.testing.assert_close(got, right)
        one = [torch.ones_like(right)]
        for x, y in zip(found.gradients((got,), one).values(), expected.gradients((right,), one).values()):
            torch.testing.assert_close(x, y)


@pytest.mark.compile
@pytest.mark.one_path
@both
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_one_graph_for_any_length(kind):
    """And another for packed rows; with gradients."""
    lengths = [(draw(kind, 2, t, 5, state=True), None) for t in (9, 12)]
    compiled_is_plain(kind, "aot_eager", *lengths, (small(kind, packed=True), CUTS))


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.one_path
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_by_torch():
    compiled_is_plain("selective", "inductor", (small("selective"), None))


@pytest.mark.compile
@pytest.mark.one_path
@both
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_step_can_be_exported(kind):
    class Step(torch.nn.Module):
        def forward(self, tensors, h):
            o, h = Scan(kind, tensors, h).step()
            return o, h

    scan = draw(kind, 2, 1, 5, state=True)
    exported = torch.export.export(Step(), (scan.tensors, scan.h)).module()
    for x, y in zip(exported(scan.tensors, scan.h), scan.step()):
        torch.testing.assert_close(x, y)


@both
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_func_sees_through_it(kind):
    """vmap over rows, per-sample gradients, forward-mode derivatives."""
    scan = draw(kind, 3, 7, 4, state=True)
    shared = {k: x for k, x in scan.tensors.items() if k in "AD"}

    def outputs(in_time, h):
        one = {k: x[None] for k, x in in_time.items()}
        ordered = {k: (one | shared)[k] for k in scan.tensors}
        return Scan(kind, ordered, h[None]).ours()[0][0]

    in_time = {k: x for k, x in scan.tensors.items() if k not in shared}
    torch.testing.assert_close(torch.func.vmap(outputs)(in_time, scan.h), scan.ours()[0])
    loss = lambda *a: outputs(*a).square().sum()  # noqa: E731
    each = torch.func.vmap(torch.func.grad(loss))(in_time, scan.h)
    leaves = scan.leaves()
    o = leaves.ours()[0]
    gradients = leaves.gradients((o,), [2 * o.detach()])
    for name, x in each.items():
        torch.testing.assert_close(x, gradients[name])
    with forward_ad.dual_level():
        dual = {k: forward_ad.make_dual(x, torch.ones_like(x)) for k, x in scan.tensors.items()}
        tangent = forward_ad.unpack_dual(Scan(kind, dual, scan.h).ours()[0]).tangent
    close = {k: x + 1e-7 for k, x in scan.tensors.items()}
    numerical = (Scan(kind, close, scan.h).ours()[0] - scan.ours()[0]) / 1e-7
    torch.testing.assert_close(tangent, numerical, rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(kind, use_reentrant):
    scan, again = (draw(kind, 2, 70, 5, state=True).leaves() for _ in range(2))

    def run(*tensors):
        return Scan(kind, dict(zip(again.tensors, tensors)), again.h).ours()[0]

    o, saved = scan.ours()[0], checkpoint(run, *again.tensors.values(), use_reentrant=use_reentrant)
    assert torch.equal(o, saved)
    for result in (o, saved):
        result.sum().backward()
    for name, x in scan.tensors.items():
        torch.testing.assert_close(again.tensors[name].grad, x.grad)


@both
def test_no_state_of_every_token_is_kept(kind):
    """What autograd saves grows with the inputs, not with n times the inputs."""
    scan, sizes = draw(kind, 1, 512, 8, 16).leaves(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        scan.ours()
    inputs = sum(x.numel() for x in scan.tensors.values())
    assert sum(sizes) <= inputs + 512 // 64 * 8 * 16
