"""A model's state is a value: it can be copied, selected from, moved and measured."""

import pytest
import torch
from support.model_kinds import KINDS, UNFUSED, build
from support.models import fixtures_of

kind, model, make_model = fixtures_of(KINDS | UNFUSED, build)


@torch.no_grad()
def test_select_forks_a_sequence(model, ids):
    x = ids(2, 6)
    _, state = model.prefill(x[:, :5], model.new_state(2, capacity=9))
    fork = state.select(torch.tensor([1, 0, 1]))
    plain, _ = model.step(x[:, 5], state)
    other = 3 + (x[1, 5] - 2) % 30
    logits, _ = model.step(torch.stack([x[1, 5], x[0, 5], other]), fork)
    torch.testing.assert_close(logits[:2], plain[[1, 0]])
    assert not torch.allclose(logits[2], logits[0])
    assert fork.position.tolist() == [5, 5, 5]
    assert state.position.tolist() == [5, 5]


@pytest.mark.refusals
def test_keys_are_kept_in_the_type_of_the_weights_or_in_bfloat16(make_model):
    model = make_model("softmax").float()
    assert {x.k.dtype for x in model.new_state(1, 9, torch.bfloat16).layers} == {torch.bfloat16}
    with pytest.raises(
        ValueError, match=r"in torch.float32, as the weights, or.*bfloat16; got cache_dtype=torch.float16"
    ):
        model.new_state(1, 9, torch.float16)
    with pytest.raises(ValueError, match=r"in torch.float64, as the weights.*got cache_dtype=torch.bfloat16"):
        model.double().new_state(1, 9, torch.bfloat16)


@torch.no_grad()
def test_two_continuations_from_one_prompt(model, ids):
    """Neither prefill nor step changes the state that it is given, so the first branch does not change the second."""
    prompt, here, there = ids(2, 13).split([3, 5, 5], dim=1)
    _, state = model.prefill(prompt, model.new_state(2, capacity=9))
    kept = state.clone()
    for branch in (here, there):
        alone = model(torch.cat([prompt, branch], dim=1)).logits[:, -1].float()
        logits, after = model.prefill(branch[:, :4], state)
        logits, _ = model.step(branch[:, 4], after)
        torch.testing.assert_close(logits, alone)
        stepped = state
        for token in branch.T:
            logits, stepped = model.step(token, stepped)
        torch.testing.assert_close(logits, alone)
    assert all(torch.equal(x, kept.tensors()[name]) for name, x in state.tensors().items())


@torch.no_grad()
def test_in_place_makes_the_same_numbers(model, ids):
    x = ids(2, 9)
    value, own = model.new_state(2, capacity=9), model.new_state(2, capacity=9)
    for part in x[:, :6].split([2, 4], dim=1):
        (expected, value), (got, own) = model.prefill(part, value), model.prefill(part, own, inplace=True)
        assert torch.equal(got, expected)
    for token in x[:, 6:].T:
        (expected, value), (got, own) = model.step(token, value), model.step(token, own, inplace=True)
        torch.testing.assert_close(got, expected)
    assert own.position.tolist() == value.position.tolist() == [9, 9]


def test_states_are_float32_even_for_bf16_models(make_model):
    state = make_model("hybrid").bfloat16().new_state(1, capacity=4)
    assert state.layers[0].S.dtype == state.layers[0].z.dtype == torch.float32
    assert state.layers[1].k.dtype == torch.bfloat16
