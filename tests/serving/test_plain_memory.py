"""Copies in one piece of memory are copies, whatever the types and shapes."""

import torch

from tarnn.serving.snapshot import copies


def test_copies_are_equal_and_their_own():
    given = [torch.randn(3, 5), torch.arange(7), torch.zeros(0, 2), torch.randn(4, 6).T, torch.tensor([True, False])]
    expected = [x.clone() for x in given]
    made = copies(given)
    for x in given:
        x.zero_()
    for x, wanted in zip(made, expected, strict=True):
        assert x.dtype == wanted.dtype
        assert x.is_contiguous()
        torch.testing.assert_close(x, wanted, rtol=0, atol=0)
    made[0].fill_(9)
    assert torch.equal(made[1], expected[1])
    assert len({x.untyped_storage().data_ptr() for x in made if len(x)}) == 1


def test_nothing_has_no_copies():
    assert copies([]) == []
