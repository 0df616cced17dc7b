"""A model's state is a value: it can be copied, selected from, moved and measured."""

import pytest
import torch

from tarnn.models import ModelState


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


@torch.no_grad()
def test_prefill_leaves_the_given_state(make_model, ids):
    model, x = make_model("normed"), ids(2, 6)
    _, state = model.prefill(x[:, :3], model.new_state(2))
    first, _ = model.prefill(x[:, 3:], state)
    second, _ = model.prefill(x[:, 3:], state)
    assert torch.equal(first, second)


@torch.no_grad()
def test_step_in_place_writes_into_the_state(make_model, ids):
    """No growth, no new buffers: the same memory before and after, where the caller asks for it."""
    model, x = make_model("normed"), ids(2, 6)
    _, state = model.prefill(x, model.new_state(2))
    addresses = [x.data_ptr() for x in state.tensors().values()]
    _, same = model.step(x[:, 0], state, inplace=True)
    assert all(x is y for x, y in zip(same.layers, state.layers, strict=True))
    assert same.position is state.position
    assert [x.data_ptr() for x in state.tensors().values()] == addresses


@pytest.mark.parametrize(("kind", "grows"), [("linear", False), ("hybrid", True)])
def test_size(make_model, kind, grows):
    model = make_model(kind)
    small, large = (model.new_state(3, capacity=n).nbytes for n in (10, 1000))
    assert (large > small) == grows
    if not grows:  # 2 layers of S (3, 4, 8, 8) and z (3, 4, 8), in float64 as the model
        assert small == 2 * 3 * 4 * 8 * (8 + 1) * 8


@torch.no_grad()
def test_moving_a_state_keeps_it(model, ids):
    x = ids(2, 5)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    _, state = model.prefill(x[:, :4], model.new_state(2, capacity=9), attention_mask=mask)
    copy = state.select(torch.arange(2))
    moved = state.to("cpu")
    assert isinstance(moved, ModelState)
    torch.testing.assert_close(model.step(x[:, 4], moved)[0], model.step(x[:, 4], copy)[0])


def test_states_are_float32_even_for_bf16_models(make_model):
    state = make_model("hybrid").bfloat16().new_state(1, capacity=4)
    assert state.layers[0].S.dtype == state.layers[0].z.dtype == torch.float32
    assert state.layers[1].k.dtype == torch.bfloat16
