"""States of programs: the classes and names of models' own states, order of tensors, rows with their own caches."""

from dataclasses import replace

import pytest
import torch
from support.step_models import SERVED, text_model

from tarnn.families.config import Config
from tarnn.families.own import text
from tarnn.families.weights import Weights
from tarnn.ops import KVCache
from tarnn.program.state import advanced, by_row, check_state, joined, new_state, tensors_of


def opened(**choices):
    model = text_model(**choices)
    config = {key: x for key, x in model.config.to_dict().items() if x is not None}
    return model, text.program(Config(config), Weights.of(model.state_dict()))


def layout(state):
    return {name: (x.shape, x.dtype) for name, x in state.tensors().items()}


KINDS = {**SERVED, "window": {"attention": "window", "attention_options": {"window": {"window": 3, "sinks": 2}}}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_state_is_that_of_the_model(kind):
    model, program = opened(**KINDS[kind])
    mine, theirs = new_state(program, 3, 5), model.new_state(3, 5)
    assert layout(joined(mine)) == layout(theirs)
    assert [type(x) for x in joined(mine).layers] == [type(x) for x in theirs.layers]
    for x, y in zip(joined(mine).tensors().values(), theirs.tensors().values(), strict=True):
        assert torch.equal(x, y)
    check_state(mine, program, 3, [5, 5, 5])
    check_state(by_row(theirs), program, 3)


def test_tensors_are_in_the_order_of_the_program_and_of_rows():
    _, program = opened(attention=["linear", "softmax", "none"], decay="none", position="rotary")
    state = new_state(program, 2, 7)
    S, z, *caches = tensors_of(state, program)
    assert S is state.layers[0].S
    assert z is state.layers[0].z
    rows = state.layers[1].rows
    assert [id(x) for x in caches] == [id(x) for x in (rows[0].k, rows[1].k, rows[0].v, rows[1].v)]
    assert caches[0].shape == (1, 4, 7, 10)


def test_rows_are_split_and_joined():
    """The keys of a row, without those that its mask excludes, are those of the joined cache."""
    model, program = opened(attention="softmax", num_key_value_heads=2)
    ids = torch.randint(97, (2, 6), generator=torch.Generator().manual_seed(0))
    _, whole = model.prefill(ids, model.new_state(2, 9))
    split = by_row(whole)
    check_state(split, program, 2, [3, 3])
    assert split.layers[0].rows[1].k.data_ptr() == whole.layers[0].k[1].data_ptr()
    for x, y in zip(joined(split).tensors().values(), whole.tensors().values(), strict=True):
        assert torch.equal(x, y)

    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    _, padded = model.prefill(ids, model.new_state(2, 9), mask)
    split = by_row(padded)
    check_state(split, program, 2, [5, 3])
    assert [x.length for x in split.layers[2].rows] == [4, 6]
    alone = model.prefill(ids[:1, 2:], model.new_state(1, 9))[1].layers[2]
    torch.testing.assert_close(split.layers[2].rows[0].used()[0], alone.used()[0])
    step, again = (model.step(ids[:, 0], x)[0] for x in (padded, joined(split)))
    torch.testing.assert_close(again, step)


def test_keys_are_counted_row_by_row():
    _, program = opened(attention=["linear", "softmax", "softmax"], position="rotary")
    state = new_state(program, 2, 4)
    after = advanced(state, [3, 1])
    assert [x.length for x in after.layers[1].rows] == [3, 1]
    assert after.layers[0] is state.layers[0]
    with pytest.raises(ValueError, match=r"got \[3, 1\] keys at positions \[0, 0\]"):
        check_state(after, program, 2)
    after.position.copy_(torch.tensor([3, 1]))
    check_state(after, program, 2, [1, 3])
    with pytest.raises(ValueError, match="the key/value cache is full: it holds 4 positions, 3 are taken and 2 more"):
        check_state(after, program, 2, [2, 1])


@pytest.mark.refusals
def test_states_that_do_not_fit_are_refused():
    _, program = opened(attention=["linear", "softmax", "softmax"], position="rotary")
    _, other = opened(attention=["linear", "softmax", "none"], position="rotary")
    _, narrow = opened(attention=["linear", "softmax", "softmax"], position="rotary", head_dim=8)
    state = new_state(program, 2, 4)
    with pytest.raises(ValueError, match="3 layers and 2 rows; this program has 3 layers, and there are 3 rows"):
        check_state(state, program, 3)
    wide = replace(state, layers=tuple(x.map(torch.Tensor.double) for x in state.layers))
    for wrong in (new_state(other, 2, 4), new_state(narrow, 2, 4), joined(state), wide):
        with pytest.raises(ValueError, match=r"a layer of the state is .*; expected .*, contiguous, on the CPU"):
            check_state(wrong, program, 2)
    transposed = state.layers[0].S.mT.contiguous().mT
    spoiled = type(state)((state.layers[0].filled({"S": transposed}), *state.layers[1:]), state.position)
    with pytest.raises(ValueError, match=r"expected LinearState with S \(2, 4, 10, 10\), z \(2, 4, 10\)"):
        check_state(spoiled, program, 2)
    check_state(new_state(program, 2, 4, cache_dtype=torch.bfloat16), program, 2)
    assert isinstance(joined(new_state(program, 1, 4)).layers[1], KVCache)
