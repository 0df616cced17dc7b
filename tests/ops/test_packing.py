"""Packed sequences: bounds, buckets of similar length, and turning each around."""

import pytest
import torch
from hypothesis import given, strategies as st

from tarnn.kernels.packing import buckets
from tarnn.ops import packing

pytestmark = pytest.mark.one_path

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=8)


def cuts_of(sizes):
    return [0, *torch.tensor(sizes).cumsum(0).tolist()]


@given(lengths)
def test_reverse_turns_each_sequence_and_is_its_own_inverse(sizes):
    cuts = cuts_of(sizes)
    x = torch.arange(cuts[-1])[None, :, None]
    cu = torch.tensor(cuts, dtype=torch.int32)
    turned = packing.reverse(x, cu)
    expected = [i for a, b in zip(cuts, cuts[1:]) for i in reversed(range(a, b))]
    assert turned.flatten().tolist() == expected
    assert torch.equal(packing.reverse(turned, cu), x)


@given(lengths)
def test_buckets_hold_each_token_once_and_waste_less_than_half(sizes):
    cuts = cuts_of(sizes)
    seen, tokens = [], []
    for members, index, real in buckets(cuts, torch.get_default_device()):
        for row, i in enumerate(members.tolist()):
            assert index[row][real[row]].tolist() == list(range(cuts[i], cuts[i + 1]))
        seen += members.tolist()
        tokens += index[real].tolist()
        assert not real.numel() or real.sum() * 2 > real.numel()
    assert sorted(seen) == list(range(len(sizes)))
    assert sorted(tokens) == list(range(cuts[-1]))
