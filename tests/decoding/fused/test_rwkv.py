"""RWKV-7's models by the fused step: their own logits and states, to the last bit however a text is cut."""

import copy

import pytest
import torch
from support.rwkv_models import VOCABULARY, rwkv_model

from tarnn.decoding.fused import FusedStep
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.products import FORMATS
from tarnn.program import runtime

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")
IDS = torch.randint(VOCABULARY, (3, 50), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    return rwkv_model().float().eval()


def one_by_one(step, ids, state):
    outs = []
    for token in ids.T:
        out, state = step(token, state)
        outs.append(out)
    return torch.stack(outs, 1), state


def test_logits_and_states_are_the_model_s(model):
    """Its own prefill, the fused step, and its own step go on with one another's states."""
    _, state = model.prefill(IDS[:, :20], model.new_state(3))
    found, state = one_by_one(FusedStep(model), IDS[:, 20:40], state)
    with torch.no_grad():
        expected = model(IDS)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected[:, 20:40], rtol=1e-4, atol=1e-4)
    for i in range(40, 50):
        last, state = model.step(IDS[:, i], state)
        torch.testing.assert_close(last, expected[:, i], rtol=1e-4, atol=1e-4)
    assert state.position.tolist() == [50] * 3


@pytest.mark.parametrize("weights", FORMATS)
def test_to_the_last_bit_in_any_pieces(model, weights, monkeypatch):
    """Rows of several lengths, padded on either side, in calls of 7 tokens, are rows alone token by token."""
    step = FusedStep(model, weights)
    mask = torch.ones_like(IDS)
    mask[0, :30] = mask[1, 45:] = mask[2, 3:9] = 0
    monkeypatch.setattr(runtime, "ROWS", 7)
    logits, state = step.prefill(IDS, model.new_state(3), mask, every=True)
    for row, real in enumerate(mask.bool()):
        expected, alone = one_by_one(step, IDS[row : row + 1, real], model.new_state(1))
        assert torch.equal(logits[row, real], expected[0])
        for name, x in alone.tensors().items():
            assert torch.equal(state.tensors()[name][row], x[0]), name


def test_in_bfloat16_to_the_bit_what_its_copy_in_float32_gives(model):
    narrow = model.bfloat16()
    wide = copy.deepcopy(narrow).float()
    found, state = one_by_one(FusedStep(narrow), IDS, narrow.new_state(3))
    expected, other = one_by_one(FusedStep(wide, "bfloat16"), IDS, wide.new_state(3))
    assert torch.equal(found, expected)
    assert all(torch.equal(x, other.tensors()[name]) for name, x in state.tensors().items())
