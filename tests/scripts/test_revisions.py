"""The script that compares two revisions: this checkout with itself is the same; what differs is told."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.revisions import compare

ONE = torch.tensor([1.0, 2.0])


@pytest.mark.slow
def test_a_checkout_computes_what_it_computes(tmp_path: Path):
    here = Path(__file__).parents[2]
    assert compare.compared("ops", 2, here, here, tmp_path, rounding=None)[1:] == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (ONE, ONE.clone(), ""),
        (ONE, torch.nextafter(ONE, ONE + 1), "off by 7.9e-08"),
        (torch.zeros(2), -torch.zeros(2), "off by 0.0e+00"),
        (ONE, ONE.double(), "float64"),
        (ONE, None, "None"),
        (ONE, torch.tensor([1.0, torch.nan]), "off by inf"),
        ("a text", "another", "another"),
    ],
)
def test_what_differs_is_told(old, new, told):
    line = compare.difference("x", old, new, rounding=None)
    assert told in line
    assert bool(told) == bool(line)


def test_rounding_may_be_allowed():
    assert compare.difference("x", ONE, ONE + 1e-6, rounding=1e-5) == ""
    assert compare.difference("x", ONE, ONE + 1e-3, rounding=1e-5) != ""
