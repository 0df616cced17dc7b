"""The laws of the op, on Triton's kernels: outputs, states and gradients against the definition in float64.

A few cases of each kind, as small as they can be: two or three chunks. `tests/fuzz_triton.py` draws hundreds.
"""

import pytest
import torch
from support import honest_interpreter
from support.kernel_calls import MODES, holds, holds_on_tensor_cores

from tarnn import linear_attention, step
from tarnn.feature_maps import Exp
from tarnn.kernels.triton import launch

pytestmark = pytest.mark.usefixtures("triton_kernels")
# number 2: a call that isn't computed again with other threads
SIZES = {"number": 2, "b": 1, "g": 1, "r": 2, "t": 35, "s": 35, "d": 17, "e": 19, "dtype": "float32"}
CHANNELS = {"t": 19, "s": 19}  # where decays have channels, chunks are of 16
LAYOUTS = ("as projected", "every second", "expanded", "transposed")


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Every case is one that the kernels took."""
    seen = []
    original = launch.Launches.run
    monkeypatch.setattr(launch.Launches, "run", lambda *x, **more: seen.append(x[1]) or original(*x, **more))
    yield
    assert seen


def of_channels(mode: str) -> dict[str, int]:
    return CHANNELS if MODES[mode].get("decay") == "channel" else {}


@pytest.mark.parametrize("mode", MODES)
def test_the_definition(mode, divided):
    divided("whole" if list(MODES).index(mode) % 2 else "split")
    holds(mode, **SIZES | of_channels(mode), layouts=LAYOUTS)


@pytest.mark.parametrize("mode", ["causal", "decay a token, weighted", "random features"])
def test_the_definition_divided_otherwise(mode, divided):
    divided("split" if list(MODES).index(mode) % 2 else "whole")
    holds(mode, **SIZES | {"g": 2, "r": 1, "t": 33, "s": 33})


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("causal", "bfloat16"),
        ("causal", "float16"),
        ("decay a token, weighted", "bfloat16"),
        ("decay a channel", "float16"),
        ("random features", "bfloat16"),
    ],
)
def test_sixteen_bits(mode, dtype):
    holds_on_tensor_cores(mode, **SIZES | of_channels(mode) | {"r": 1, "dtype": dtype})


@pytest.mark.parametrize(
    ("mode", "way"),
    [
        ("causal", "packed continued"),
        ("decay a channel, weighted", "packed"),
        ("full, random features", "packed"),
        ("decay a token, weighted", "continued"),
    ],
)
def test_ways(mode, way, divided):
    """In any order of programs, too."""
    divided("split")
    with honest_interpreter.order(7):
        holds(mode, **SIZES | {"way": way, "t": 37, "s": 37, "r": 1} | of_channels(mode), seed=3)


@pytest.mark.parametrize("t", [0, 1, 32])
def test_lengths(t):
    holds("decay a token, weighted", **SIZES | {"t": t, "s": t})


@pytest.mark.parametrize("widths", [(1, 1), (16, 65), (130, 3), (256, 2)])  # blocks of values, of features
def test_widths(widths):
    d, e = widths
    holds("causal", **SIZES | {"d": d, "e": e, "r": 1, "t": 17, "s": 17})


def test_a_long_sum_is_cut():
    """Of few rows: `tiles.product`, with features in its columns, and with values."""
    holds_on_tensor_cores("causal", **SIZES | {"d": 129, "e": 130, "r": 1, "t": 5, "s": 5, "dtype": "bfloat16"})


@pytest.mark.parametrize("causal", [True, False])
def test_a_query_without_a_key_whose_features_overflow(causal):
    """Zeros, and gradients of zero, by `linear_attention` and by a step."""
    q, k, v = (torch.randn(1, 1, 20, n, requires_grad=True) for n in (4, 4, 5))
    mask = torch.zeros(1, 20, dtype=torch.bool)
    o = linear_attention(q + 200, k, v, Exp(), causal=causal, normalize=False, key_mask=mask)
    assert (o == 0).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(o.sum(), (q, k, v)))
    with torch.no_grad():
        q, k, v = (x[:, :, :1] for x in (q, k, v))
        o, _ = step(q + 200, k, v, Exp(), normalize=False, key_log_weight=torch.full((1, 1, 1), -torch.inf))
    assert (o == 0).all()
