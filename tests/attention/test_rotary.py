"""Rotary positions against complex numbers."""

import math

import pytest
import torch

from tarnn.attention import Rotary


def test_a_pair_is_turned_by_position_times_frequency():
    rotation = Rotary(6, base=100.0).rotation(torch.tensor([[3]]))
    x = torch.arange(1.0, 7.0).view(1, 1, 1, 6)
    y = rotation.apply(x)[0, 0, 0]
    for c in range(3):
        angle = 3 * 100.0 ** (-c / 3)
        z = complex(x[0, 0, 0, c], x[0, 0, 0, c + 3]) * complex(math.cos(angle), math.sin(angle))
        assert (y[c].item(), y[c + 3].item()) == pytest.approx((z.real, z.imag), rel=1e-5)


def test_position_zero_is_no_turn_and_lengths_stay():
    x = torch.randn(2, 3, 4, 8)
    assert torch.equal(Rotary(8).rotation(torch.zeros(1, 4, dtype=torch.long)).apply(x), x)
    y = Rotary(8).rotation(torch.arange(4)[None]).apply(x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


def test_angles_are_exact_far_out():
    position = 16_777_217  # 2²⁴ + 1, which float32 does not have
    rotation = Rotary(4, base=10.0).rotation(torch.tensor([[position]]))
    exact = [math.cos(position), math.cos(position / math.sqrt(10.0))]
    assert rotation.cos.flatten()[:2].tolist() == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("dim", [0, 1, 7])
def test_odd_widths_are_refused(dim):
    with pytest.raises(ValueError, match=f"dim must be even and ≥ 2; got {dim}"):
        Rotary(dim)
