"""The compiled scans: drawn calls; the same bits for any number of threads, any cut, any step."""

import pytest
import torch
from support.drawn_calls import excess
from support.kernel_calls import same_bits
from support.scans import Scan, draw

from tarnn.kernels.cpu import arguments, library

pytestmark = pytest.mark.usefixtures("compiled")
both = pytest.mark.parametrize("kind", ["diagonal", "selective"])
DTYPES = [x for x in (torch.float32, torch.bfloat16, torch.float64) if arguments.takes(x)]


@both
@pytest.mark.parametrize("block", range(0, 80, 20))
def test_drawn_calls(kind, block):
    """`python tests/fuzz.py "diagonal scan"` draws thousands."""
    assert [number for number in range(block, block + 20) if excess(f"{kind} scan", number) > 1] == []


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_threads(kind, dtype):
    """Outputs, states, gradients: of 300 channels, which are several tasks, in several sequences."""

    def computed(threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            scan = draw(kind, 2, 150, 300, 5, state=True, masked=True).map(
                lambda x: x.to(dtype if x.ndim == 3 else x.dtype)
            )
            scan = Scan(
                kind, scan.tensors, scan.h.to(torch.promote_types(dtype, torch.float32)), scan.key_mask
            ).leaves()
            results = scan.ours()
            return [*results, *scan.gradients(results, [torch.ones_like(x) for x in results]).values()]
        finally:
            torch.set_num_threads(before)

    one = computed(1)
    assert same_bits(computed(2), one)
    assert same_bits(computed(3), one)


@both
@pytest.mark.parametrize("cut", [1, 37, 64, 149])
def test_a_prompt_may_be_cut_anywhere(kind, cut):
    scan = draw(kind, 1, 150, 35, 5, state=True).map(lambda x: x.float())
    whole, end = scan.ours()
    first, h = scan.part(0, cut, scan.h).ours()
    rest, last = scan.part(cut, None, h).ours()
    assert same_bits([torch.cat([first, rest], 1), last], [whole, end])


@both
def test_steps_have_the_bits_of_the_scan(kind):
    scan = draw(kind, 2, 30, 35, 5, state=True).map(lambda x: x.float())
    whole, end = scan.ours()
    h, pieces = scan.h, []
    for i in range(30):
        o, h = scan.part(i, i + 1, h).step()
        pieces.append(o)
    assert same_bits([torch.cat(pieces, 1), h], [whole, end])


@both
def test_packed_rows_have_the_bits_of_each(kind):
    """Whatever stands beside a sequence."""
    scan, cuts = draw(kind, 1, 150, 35, 5).map(lambda x: x.float()), [0, 40, 40, 150]
    packed = scan.ours(cu_seqlens=torch.tensor(cuts))[0]
    assert same_bits([packed], [torch.cat([scan.part(a, b).ours()[0] for a, b in zip(cuts, cuts[1:])], 1)])


@both
def test_a_state_that_is_a_view_is_written_in_place(kind):
    scan = draw(kind, 2, 1, 6, 4, state=True)
    room = torch.zeros(*scan.h.shape, 2).double()
    room[..., 1] = scan.h
    _, h = Scan(kind, scan.tensors, room[..., 1]).step(inplace=True)
    torch.testing.assert_close(room[..., 1], scan.exact()[1])
    assert (room[..., 0] == 0).all()
    assert h.data_ptr() == room[..., 1].data_ptr()


@both
def test_autograd_knows_that_a_state_was_written(kind):
    scan = draw(kind, 2, 1, 6, 4, state=True)
    product = scan.h.requires_grad_() * 2
    saved = product.square()
    with torch.no_grad():
        Scan(kind, scan.tensors, product).step(inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


@both
def test_backward_without_what_forward_kept(kind):
    """As an operator's backward is called, or one whose forward pass plain PyTorch computed."""
    scan = draw(kind, 2, 150, 9, 5, state=True).leaves()
    sent = torch.randn(2, 150, 9).double()
    right = scan.gradients((scan.ours()[0],), [sent])
    with library.disabled():
        o = scan.ours()[0]
    for name, x in scan.gradients((o,), [sent]).items():
        torch.testing.assert_close(x, right[name])
