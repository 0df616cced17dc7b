"""The laws of the op, on Triton's kernels: outputs, states and gradients against the definition in float64."""

import pytest
from support import honest_interpreter
from support.kernel_calls import MODES, holds

from tarnn.kernels.triton import launch

pytestmark = pytest.mark.usefixtures("triton_kernels")
SIZES = {"b": 1, "g": 2, "r": 2, "t": 35, "s": 35, "d": 17, "e": 19, "state_grads": True, "dtype": "float32"}
LAYOUTS = ("as projected", "every second", "expanded", "transposed")


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Every case is one that the kernels took."""
    seen = []
    original = launch.Launches.run
    monkeypatch.setattr(launch.Launches, "run", lambda *x, **more: seen.append(x[1]) or original(*x, **more))
    yield seen
    assert seen


@pytest.mark.parametrize("mode", MODES)
def test_the_definition(mode, division):
    holds(mode, **SIZES, layouts=LAYOUTS if division == "whole" else ("contiguous",) * 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "mode", ["causal", "decay a token, weighted", "decay a channel, weighted", "random features"]
)
def test_sixteen_bits(mode, dtype):
    holds(mode, **SIZES | {"dtype": dtype, "g": 1})


@pytest.mark.parametrize("mode", ["causal", "decay a channel, weighted", "full, random features"])
@pytest.mark.parametrize("way", ["continued", "packed", "packed continued"])
def test_ways(mode, way, division):
    if mode.startswith("full") and way == "packed continued":
        return
    with honest_interpreter.order(7):
        holds(mode, **SIZES | {"way": way, "t": 29, "s": 29, "g": 1}, seed=3)


@pytest.mark.parametrize("t", [0, 1, 32, 65])
def test_lengths(t, division, launches):
    holds("decay a token, weighted", **SIZES | {"t": t, "s": t, "g": 1})
    launches.append(t)


@pytest.mark.parametrize("widths", [(1, 1), (16, 33), (130, 3), (3, 130)])
def test_widths(widths):
    d, e = widths
    holds("causal", **SIZES | {"d": d, "e": e, "g": 1, "r": 1})
