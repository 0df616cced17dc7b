"""Where each token is, and the embeddings made of that, in closed form."""

import math

import pytest
import torch

from tarnn.attention.rotary import positions_in
from tarnn.models.positions import SinusoidalPositions
from tarnn.numerics import widest


def test_positions_count_what_is_there():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert positions_in(mask, None, 0, 5, "cpu").tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]
    assert positions_in(mask, None, 3, 2, "cpu").tolist() == [[1, 2], [2, 2]]
    assert positions_in(None, None, 3, 2, "cpu").tolist() == [[3, 4]]
    cuts = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert positions_in(None, cuts, 0, 5, "cpu").tolist() == [[0, 1, 0, 1, 2]]


def test_sinusoids():
    row = SinusoidalPositions(6)(torch.tensor([[7]]))[0, 0].tolist()
    frequencies = [10000 ** (-c / 3) for c in range(3)]
    assert row == pytest.approx([f(7 * w) for f in (math.sin, math.cos) for w in frequencies], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("rotary", lambda e, p: e),
        ("gated", lambda e, p: e + p),
        ("two maps", lambda e, p: 32**0.5 * e + p),
        ("paper", lambda e, p: torch.cat([32**0.5 * e, p], dim=-1)),
    ],
)
def test_what_enters_the_first_block(make_model, ids, kind, expected):
    """√hidden scales embeddings beside sinusoids, whose amplitude is 1."""
    model, x = make_model(kind).model, ids(2, 5)
    place = None if model.embed_positions is None else model.embed_positions(torch.arange(5)[None]).double()
    place = None if place is None else place.expand(2, -1, -1)
    torch.testing.assert_close(
        model(x, output_hidden_states=True).hidden_states[0], expected(model.embed_tokens(x), place)
    )


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float64), ("cuda:1", torch.float64), ("mps", torch.float32)]
)
def test_angles_and_totals_are_as_exact_as_the_device_can(device, dtype):
    assert widest(device) == widest(torch.device(device)) == dtype
