"""Rows of hybrids whose caches differ in length and room step together, each to the last bit as alone."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.step_models import text_model

from tarnn.decoding.fused import FusedStep
from tarnn.decoding.state_check import UnfitState
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.products import FORMATS
from tarnn.models.state import ModelState
from tarnn.ops import KVCache
from tarnn.ops.softmax.cache import RowCaches

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")

HYBRID = {
    "attention": ["softmax", "linear", "softmax"],
    "position": "rotary",
    "num_key_value_heads": 2,
    "decay": "head",
}
LENGTHS = (1, 700, 13, 511, 512, 0, 1100)  # blocks of keys are 512 long


def rows_of(states):
    """One state with all of these rows."""
    layers = []
    for of_rows in zip(*(x.layers for x in states)):
        if isinstance(of_rows[0], KVCache):
            layers.append(RowCaches(of_rows))
        else:
            layers.append(
                type(of_rows[0])(*(torch.cat(x) for x in zip(*(vars(y).values() for y in of_rows)) if x[0] is not None))
            )
    return ModelState(tuple(layers), torch.cat([x.position for x in states]))


def states_of(step, lengths=LENGTHS, dtype=torch.float32, room=9):
    """A state after so many tokens of one text each, with room for a few more."""
    ids = torch.randint(0, 97, (1, max(lengths)), generator=torch.Generator().manual_seed(1))
    state, at = step.model.new_state(1, capacity=max(lengths), cache_dtype=dtype), {}
    for begin, end in pairwise([0, *sorted(lengths)]):
        if end > begin:
            _, state = step.prefill(ids[:, begin:end], state, inplace=True)
        layers = (x.resized(end + room) if isinstance(x, KVCache) else x for x in state.layers)
        at[end] = replace(state, layers=tuple(layers)).clone()
    return [at[n] for n in lengths]


def assert_rows(state, alone):
    assert torch.equal(state.position, torch.cat([x.position for x in alone]))
    for i, expected in enumerate(alone):
        row = state.select(torch.tensor([i]))
        for layer, one in zip(row.layers, expected.layers, strict=True):
            layer = layer.rows[0] if isinstance(layer, RowCaches) else layer
            assert all(torch.equal(x, one.tensors()[name]) for name, x in layer.tensors().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", FORMATS)
def test_rows_of_other_lengths_step_together_as_alone(weights, dtype):
    step = FusedStep(text_model(**HYBRID), weights)
    alone = states_of(step, dtype=dtype)
    state = rows_of(alone).clone()
    for i in range(3):
        tokens = torch.arange(len(LENGTHS)) + i
        parameters, state = step(tokens, state, inplace=True)
        for row, token in enumerate(tokens):
            expected, alone[row] = step(token[None], alone[row])
            assert torch.equal(parameters[row], expected[0])
    assert_rows(state, alone)


def test_they_step_in_place_again_and_again():
    step = FusedStep(text_model(**HYBRID))
    alone = states_of(step)
    state, parameters = rows_of(alone).clone(), torch.empty(len(LENGTHS), step.num_outputs)
    run = step.over(state, parameters)
    for i in range(9):
        tokens = torch.arange(len(LENGTHS)) * i
        run(tokens)
        for row, token in enumerate(tokens):
            expected, alone[row] = step(token[None], alone[row])
            assert torch.equal(parameters[row], expected[0])
    kept = [x.clone() for x in state.layers[0].rows[0].used()[:2]]
    with pytest.raises(ValueError, match="cache is full"):
        run(torch.zeros(len(LENGTHS), dtype=torch.int64))
    assert torch.equal(state.position, torch.cat([x.position for x in alone]))
    assert all(torch.equal(x, y) for x, y in zip(kept, state.layers[0].rows[0].used()))


def test_rows_read_several_tokens_together_as_alone():
    step = FusedStep(text_model(**HYBRID))
    alone = states_of(step)
    ids = torch.randint(0, 97, (len(LENGTHS), 7), generator=torch.Generator().manual_seed(2))
    logits, state = step.prefill(ids, rows_of(alone))
    for row, tokens in enumerate(ids):
        expected, alone[row] = step.prefill(tokens[None], alone[row])
        assert torch.equal(logits[row], expected[0])
    assert_rows(state, alone)


def test_what_does_not_fit_is_refused():
    step = FusedStep(text_model(**HYBRID))
    states, tokens = states_of(step, (2, 3)), torch.zeros(2, dtype=torch.int64)
    state = rows_of(states)
    with pytest.raises(UnfitState):
        step(tokens[:1], replace(state, position=state.position[:1]))
    with pytest.raises(ValueError, match="as many keys as they have seen tokens"):
        step(tokens, replace(state, position=state.position + 1))
    with pytest.raises(ValueError, match="cache is full"):
        step.prefill(tokens[:, None].expand(2, 10), state)
    with pytest.raises(ValueError, match="no masks"):
        step.prefill(tokens[:, None].expand(2, 2), state, torch.tensor([[1, 1], [0, 1]]))
    mixed = states_of(step, (2,), torch.bfloat16) + states[1:]
    with pytest.raises(UnfitState):
        step(tokens, rows_of(mixed))
    with pytest.raises(ValueError, match="RowCaches"):
        step.over(states[0], torch.empty(1, step.num_outputs))
