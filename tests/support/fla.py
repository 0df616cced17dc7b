"""flash-linear-attention where it is installed: its functions by name, inputs for them."""

import importlib
import warnings

import pytest
import torch
from torch.nn.functional import normalize


def installed():
    """The package; without it, the tests of a file that asks are skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that there is no GPU
        return pytest.importorskip("fla", reason="flash-linear-attention is not installed")


def of(path: str):
    """A function of fla as it is now."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"fla.{module}"), name)


def drawn(b=2, t=37, h=3, d=8, e=5, heads=None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    n = heads or h
    return {
        "q": torch.randn(b, t, h, d),
        "k": normalize(torch.randn(b, t, h, d), dim=-1),
        "v": torch.randn(b, t, n, e),
        "per_token": -torch.rand(b, t, n),
        "per_channel": -torch.rand(b, t, n, d),
        "beta": torch.rand(b, t, n),
        "S": torch.randn(b, n, d, e),
    }


def close(found, expected, tolerance=2e-5):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
