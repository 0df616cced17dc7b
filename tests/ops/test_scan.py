"""Both scans against their definition: values, gradients of all inputs, masks, packed rows, extreme decays, precision."""

import pytest
import torch
from support.scans import Scan, draw

from tarnn.ops.scan.op import diagonal, selective

KINDS = ("diagonal", "selective")
both = pytest.mark.parametrize("kind", KINDS)
# odd sizes, and such as fill a vector, a chunk, a segment, a bundle of channels
SIZES = [(1, 1, 1, 1), (2, 5, 3, 2), (1, 33, 17, 16), (3, 64, 16, 4), (1, 131, 35, 5), (2, 257, 8, 1)]


def close(found, expected, tolerance=1e-9):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def sent_to(results, seed=0):
    """Gradients to send back to these results."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=generator, device="cpu").to(x) for x in results]


def compare(scan: Scan, tolerance=1e-9, **options):
    """Outputs, states and all gradients with those of the definition."""
    leaves, exact = scan.leaves(), scan.leaves()
    results, expected = leaves.ours(**options), exact.exact()
    for x, y in zip(results, expected, strict=True):
        close(x, y, tolerance)
    sent = sent_to(expected)
    gradients, right = leaves.gradients(results, sent), exact.gradients(expected, sent)
    for name, x in right.items():
        close(gradients[name], x, tolerance)


@both
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_what_its_definition_says(kind, size, masked, chunks):
    compare(draw(kind, *size, state=True, masked=masked))
    compare(draw(kind, *size, masked=masked, skip=False))


@both
@pytest.mark.parametrize("rate", [0.0, -5.0, -torch.inf], ids=str)
def test_extreme_decays(kind, rate, chunks):
    """e^(−5 t) underflows, and e^(5 t) overflows, within 150 tokens."""
    scan = draw(kind, 2, 150, 5, state=True)
    if kind == "diagonal":
        scan.tensors["log_decay"].fill_(rate)
    else:
        scan.tensors["dt"].fill_(1.0)
        scan.tensors["A"].fill_(max(rate, -1e300))
    compare(scan)
    o, _ = scan.ours()
    if rate == -torch.inf and kind == "diagonal":
        assert torch.equal(o, scan.tensors["x"])


@both
def test_one_decay_of_minus_infinity_begins_anew(kind):
    scan = draw(kind, 2, 40, 5, state=True)
    name = "log_decay" if kind == "diagonal" else "dt"
    scan.tensors[name][:, 20] = -torch.inf if kind == "diagonal" else 1e30
    o, h = scan.ours()
    if kind == "selective":  # what it takes in is as large
        scan.tensors[name][:, 20:21] = 1e30
    again, end = scan.part(20, None).ours()
    close(o[:, 20:], again)
    close(h, end)


@both
@pytest.mark.parametrize("side", ["left", "right"])
def test_junk_at_masked_tokens_reaches_nothing(kind, side):
    """On either side, as if it were cut off: outputs, state, gradients; to the bit."""
    scan = draw(kind, 2, 90, 19, state=True)
    there = torch.ones(2, 90, dtype=torch.bool)
    there[1, slice(0, 70) if side == "left" else slice(20, None)] = False
    cut = slice(70, None) if side == "left" else slice(0, 20)
    junk = {k: x if k in "AD" else x.masked_fill(~there[..., None], torch.nan) for k, x in scan.tensors.items()}
    padded = Scan(kind, junk, scan.h, there).leaves()
    alone = scan.part(cut.start, cut.stop, scan.h).rows(slice(1, 2)).leaves()
    results, expected = padded.ours(), alone.ours()
    assert torch.equal(results[0][1:, cut], expected[0])
    assert (results[0][1][~there[1]] == 0).all()
    assert torch.equal(results[1][1:], expected[1])
    gradients = padded.gradients((results[0].square().sum() + results[1].square().sum(),), [torch.tensor(1.0).double()])
    right = alone.gradients((expected[0].square().sum() + expected[1].square().sum(),), [torch.tensor(1.0).double()])
    for name, x in right.items():
        if name == "h":
            close(gradients[name][1:], x)
        elif name not in "AD":
            close(gradients[name][1:, cut], x)
            assert (gradients[name][1][~there[1]] == 0).all()
    assert all(x.isfinite().all() for x in gradients.values())


@both
def test_only_the_state_has_a_gradient(kind):
    """And only the output."""
    for which in (0, 1):
        scan, exact = (draw(kind, 2, 70, 5, state=True).leaves() for _ in range(2))
        result, expected = scan.ours()[which], exact.exact()[which]
        sent = sent_to((expected,))
        inputs = {k: x for k, x in exact.tensors.items() if which == 0 or k not in "CD"}
        for x, y in zip(
            torch.autograd.grad(result, [scan.tensors[k] for k in inputs], sent),
            torch.autograd.grad(expected, list(inputs.values()), sent),
        ):
            close(x, y)


# --- precision


def relative(x, exact):
    return ((x.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("x_type", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_any_mixture_of_types(x_type):
    """The result has the type of x, each gradient that of its input."""
    others = {"dt": torch.float64, "A": torch.float32, "B": torch.float16, "C": torch.bfloat16, "D": torch.float64}
    types = {"x": x_type} | others
    scan = draw("selective", 2, 70, 9, 5).leaves(types)
    exact = scan.map(lambda x: x.double()).leaves()
    results, expected = scan.ours(), exact.exact()
    sent = [torch.ones_like(x) for x in results]
    assert results[0].dtype == x_type
    tolerance = 1e-2 if x_type == torch.bfloat16 else 1e-5
    close(results[0].double(), expected[0], tolerance)
    right = exact.gradients(expected, [x.double() for x in sent])
    for name, x in scan.gradients(results, sent).items():
        assert x.dtype == types[name]
        assert relative(x, right[name]) < 1e-2


@both
@pytest.mark.parametrize("layout", ["channels apart", "every second", "expanded"])
def test_any_strides(kind, layout):
    """Without a copy: as a convolution gives them (t runs fastest), as parts of a larger tensor, repeated."""

    def lay(x):
        if x.ndim != 3:
            return x
        if layout == "channels apart":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "every second":
            wide = torch.full((*x.shape[:2], 2 * x.shape[2]), torch.nan, dtype=x.dtype)
            wide[..., ::2] = x
            return wide[..., ::2]
        return x[:1, :1].expand(x.shape)

    drawn = draw(kind, 2, 67, 37, 5, state=True)
    for dtype in (torch.float64, torch.float32):
        tensors = {k: lay(x.to(dtype)) for k, x in drawn.tensors.items()}
        scan = Scan(kind, tensors, drawn.h.to(dtype))
        same = scan.map(lambda x: x.contiguous())
        if layout != "expanded":  # whose gradients would be added up in one place
            scan, same = (x.map(lambda x: x.requires_grad_()) for x in (scan, same))
        results, expected = scan.ours(), same.ours()
        for x, y in zip(results, expected):
            assert torch.equal(x, y)
        if layout != "expanded":
            sent = sent_to(results)
            for x, y in zip(scan.gradients(results, sent).values(), same.gradients(expected, sent).values()):
                assert torch.equal(x, y)


@both
@pytest.mark.parametrize("tokens", [1, 67], ids=str)
def test_a_state_whose_channels_stand_apart(kind, tokens):
    """Dense, and not contiguous, as h.T of what a step for (c, b) keeps: values and gradients of the contiguous one."""
    scan = draw(kind, 3, tokens, 5, 4, state=True)
    apart = Scan(kind, scan.tensors, scan.h.transpose(0, -1).contiguous().transpose(0, -1)).leaves()
    same = scan.leaves()
    assert not apart.h.is_contiguous()
    for function in ("ours", "step") if tokens == 1 else ("ours",):
        results, expected = getattr(apart, function)(), getattr(same, function)()
        sent = sent_to(expected)
        for x, y in zip(results, expected):
            assert torch.equal(x, y)
        gradients, right = apart.gradients(results, sent), same.gradients(expected, sent)
        for name, x in right.items():
            assert torch.equal(gradients[name], x), name


EMPTY = {
    "no row": (0, 7, 5, 3), "no token": (2, 0, 5, 3), "no channel": (2, 7, 0, 3), "no number of a channel": (2, 7, 5, 0),
}  # fmt: skip


@both
@pytest.mark.parametrize("size", EMPTY.values(), ids=EMPTY)
def test_empty_tensors(kind, size):
    compare(draw(kind, *size, state=True))


# --- derivatives and memory

OPERATORS = {"diagonal": diagonal, "selective": selective}
CUTS = torch.tensor([0, 2, 2, 6], dtype=torch.int32)


def small(kind: str, packed: bool = False, masked: bool = False) -> Scan:
    scan = draw(kind, 1 if packed else 2, 6, 3, 2, masked=masked)
    return Scan(kind, scan.tensors, draw(kind, 3 if packed else 2, 1, 3, 2, state=True).h, scan.key_mask)


@pytest.mark.thorough
@both
@pytest.mark.parametrize("packed", [False, True], ids=["batch, masked", "packed"])
def test_both_derivatives_of_the_call_and_of_the_operator(kind, packed):
    """Of every input, entry by entry."""
    op, scan, cuts = OPERATORS[kind], small(kind, packed, masked=not packed).leaves(), CUTS if packed else None
    tensors = [*scan.tensors.values(), scan.h]
    for f in (
        lambda *xs: tuple(op(op.call(*xs, scan.key_mask, cuts))[:2]),
        lambda *xs: op.forward_op(*xs, scan.key_mask, cuts),
    ):
        assert torch.autograd.gradcheck(f, tensors)
        assert torch.autograd.gradgradcheck(f, tensors, fast_mode=True)


@both
def test_no_state_of_every_token_is_kept(kind):
    """What autograd saves grows with the inputs, not with n times the inputs."""
    scan, sizes = draw(kind, 1, 512, 8, 16).leaves(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        scan.ours()
    inputs = sum(x.numel() for x in scan.tensors.values())
    assert sum(sizes) <= inputs + 512 // 64 * 8 * 16
