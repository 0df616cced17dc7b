"""The compiled kernels of hybrid attention: drawn calls, and errors that they have to notice."""

import pytest
from support import drawn_calls
from support.drawn_calls import drawn, excess

from tarnn.kernels.cpu import library

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("block", range(0, 60, 20))
def test_drawn_calls(block):
    """`python tests/fuzz.py hybrid` draws thousands."""
    assert [number for number in range(block, block + 20) if excess("hybrid", number) > 1] == []


def test_drawn_calls_in_plain_pytorch():
    """Some of them in float64, which alone has slots."""
    with library.disabled():
        dtypes = {number: "float64" if number % 4 == 0 else None for number in range(60, 90)}
        assert [number for number, dtype in dtypes.items() if excess("hybrid", number, dtype) > 1] == []


def is_telling(call):
    """Whether there are keys beyond window and sinks, and nothing else makes them exact."""
    few = call.options["window"] + call.options["sinks"] + 1
    plain = call.options["causal"] and not call.options["slots"] and call.options["phi"] is not None
    return plain and call.length > few and call.way == "whole" and call.key_mask is None


@pytest.mark.parametrize("name", ["window", "sinks", "scale"])
def test_another_call_is_noticed(name, monkeypatch):
    number = next(number for number in range(100) if is_telling(drawn("hybrid", number, "float64")))
    op = drawn_calls.OPS["hybrid"]

    def others(tensors, state, **options):
        return op.run(tensors, state, **options | {name: options[name] + 1})

    monkeypatch.setitem(drawn_calls.OPS, "hybrid", op._replace(run=others))
    assert excess("hybrid", number, "float64") > 1
