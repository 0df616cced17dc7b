"""The compiled kernels of hybrid attention: drawn calls, and errors that they have to notice."""

from dataclasses import replace

import pytest
from support import hybrid_calls

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("block", range(0, 60, 20))
def test_drawn_calls(block):
    """`python tests/fuzz_ops.py hybrid` draws thousands."""
    for number in range(block, block + 20):
        assert hybrid_calls.excess(number) <= 1, number


def is_telling(call):
    """Whether there are keys beyond window and sinks."""
    t = call.tensors["q"].shape[2]
    return t > call.options["window"] + call.options["sinks"] + 1 and (call.cuts, call.options["key_mask"]) == (
        None,
        None,
    )


@pytest.mark.parametrize("name", ["window", "sinks", "scale"])
def test_another_call_is_noticed(name, monkeypatch):
    number = next(number for number in range(100) if is_telling(hybrid_calls.drawn(number)))
    ours = hybrid_calls.Hybrid.ours

    def others(call):
        return ours(replace(call, options=call.options | {name: call.options[name] + 1}))

    monkeypatch.setattr(hybrid_calls.Hybrid, "ours", others)
    assert hybrid_calls.excess(number) > 1
