"""The fused step by the program of a live model: which models it takes, and rows with padding."""

import pytest
import torch
from support.step_models import SERVED, text_model

from tarnn.decoding.fused import FusedStep
from tarnn.kernels.cpu import library
from tarnn.models.backbone import TextModel

compiled = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")
SOFTMAX = {"attention": ["softmax", "linear", "softmax"], "position": "rotary", "num_key_value_heads": 2}


@compiled
@pytest.mark.parametrize("kind", SERVED)
def test_a_model_of_a_record_has_the_same_step(kind):
    model, ids = text_model(**SERVED[kind]), torch.arange(9)[None]
    record = TextModel(model.config.record())
    record.load_state_dict(model.state_dict())
    logits = [FusedStep(x).prefill(ids, x.new_state(1, 9))[0] for x in (model, record.eval())]
    assert torch.equal(*logits)


@compiled
def test_making_a_step_draws_no_random_number():
    model = text_model(**SERVED["delta"])
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    FusedStep(model)
    assert torch.equal(torch.rand(2), expected)


@compiled
@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("places", [[0, 0, 0, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0]], ids=["left", "right", "holes"])
def test_a_padded_row_has_the_bits_that_it_has_alone(places, weights):
    """In two pieces with padding in each, then in steps, of which the model takes one."""
    model, ids = text_model(**SOFTMAX), torch.randint(0, 97, (2, 10), generator=torch.Generator().manual_seed(0))
    step, mask = FusedStep(model, weights), torch.ones(2, 10, dtype=torch.long)
    mask[1] = torch.tensor([*places, *places])
    state, alone = model.new_state(2, capacity=13), model.new_state(1, capacity=13)
    for piece in (slice(0, 5), slice(5, 10)):
        logits, state = step.prefill(ids[:, piece], state, mask[:, piece])
        expected, alone = step.prefill(ids[1:, piece][mask[1:, piece].bool()][None], alone)
        assert torch.equal(logits[1], expected[0])
    logits, state = step(ids[:, 0], state)
    expected, alone = step(ids[1:, 0], alone)
    assert torch.equal(logits[1], expected[0])
    _, state = model.step(ids[:, 1], state)
    _, alone = model.step(ids[1:, 1], alone)
    logits, _ = step(ids[:, 2], state)
    torch.testing.assert_close(logits[1:], step(ids[1:, 2], alone)[0], rtol=1e-4, atol=1e-4)


@compiled
@pytest.mark.parametrize("padded", [False, True])
def test_a_step_in_place_writes_into_the_memory_of_the_cache(padded):
    model, ids = text_model(**SOFTMAX), torch.ones(3, 4, dtype=torch.long)
    mask = ids.clone()
    mask[1, :2] = 0
    step = FusedStep(model)
    _, state = step.prefill(ids, model.new_state(3, capacity=9), mask if padded else None)
    places = {x.data_ptr() for name, x in state.tensors().items() if name.endswith((".k", ".v"))}
    for length in range(5, 10):
        _, state = step(ids[:, 0], state, inplace=True)
        assert state.layers[0].length == length
        assert {x.data_ptr() for name, x in state.tensors().items() if name.endswith((".k", ".v"))} == places
    with pytest.raises(ValueError, match="cache is full"):
        step(ids[:, 0], state, inplace=True)
