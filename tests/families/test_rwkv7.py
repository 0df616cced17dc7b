"""RWKV-7: logits of a trained model, those of `RwkvModel` in float64, and fla's names for the same weights."""

import pytest
import torch
from support.damaged_configs import check_refusals
from support.rwkv_models import FLA, HEADS, VOCABULARY, fla_weights, rwkv_model

from tarnn.errors import UserError
from tarnn.families.by_name import family_of
from tarnn.families.config import Config
from tarnn.families.rwkv7 import program_of_weights
from tarnn.families.weights import Weights
from tarnn.kernels.cpu import library
from tarnn.program.definition import new_states, run
from tarnn.program.runtime import Runtime


def tokens():
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


def defined(program, ids, dtype=torch.float64):
    return run(program, ids, new_states(program, len(ids), dtype=dtype), positions=[0] * len(ids), dtype=dtype)


def test_logits_of_a_trained_model(data):
    load_file = pytest.importorskip("safetensors.torch").load_file
    weights = load_file(data("tiny_rwkv") / "rwkv7.safetensors")
    expected, prompt = weights.pop("expected_logits"), torch.tensor([list(b'"in')])
    program = program_of_weights(Weights.of(weights))
    assert (defined(program, prompt)[0][0, -1] - expected).abs().max() < 1e-5
    assert (defined(program, prompt, torch.float32)[0][0, -1] - expected).abs().max() < 1e-5
    if library.available():
        runtime = Runtime(program)
        whole, _ = runtime.prefill(prompt, runtime.new_state(1))
        assert (whole[0] - expected).abs().max() < 2e-5
        state = runtime.new_state(1)
        for token in prompt[0]:
            logits, state = runtime(token[None], state)
        assert torch.equal(logits, whole)


@torch.no_grad()
def test_logits_and_states_are_those_of_the_model():
    model, ids = rwkv_model(), tokens()
    program = program_of_weights(Weights.of(model.state_dict()))
    logits, states = defined(program, ids)
    torch.testing.assert_close(logits, model(ids), rtol=1e-9, atol=1e-9)
    expected = model.prefill(ids, model.new_state(2))[1].tensors()
    assert {f"layers.{x.layer}.{x.name}" for x in program.states} == expected.keys() - {"position"}
    for i, x in enumerate(program.states):
        y = torch.stack([row[i] for row in states])
        torch.testing.assert_close(y, expected[f"layers.{x.layer}.{x.name}"], rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"head_dim": None, "num_heads": HEADS}, {"v_low_rank_dim": None}])
def test_folders_of_fla(changes):
    model, ids, config = rwkv_model(), tokens(), Config(FLA | changes)
    program = family_of(config)(config, Weights.of(fla_weights(model)))
    torch.testing.assert_close(defined(program, ids)[0], model(ids), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_folders_with_the_names_of_rwkv_cpp():
    model, ids, config = rwkv_model(), tokens(), Config({"model_type": "rwkv7"})
    program = family_of(config)(config, Weights.of(model.state_dict()))
    torch.testing.assert_close(defined(program, ids)[0], model(ids), rtol=1e-9, atol=1e-9)
    with pytest.raises(UserError, match=r"hidden_ratio = 2 is not known"):
        family_of(config)(Config({"model_type": "rwkv7", "hidden_ratio": 2}), Weights.of(model.state_dict()))


REFUSED = {
    "layers with softmax": ({"attn": {"layers": [1]}}, "attn must be None"),
    "another function": ({"hidden_act": "relu"}, "hidden_act must be 'sqrelu'"),
    "wider values": ({"value_dim": 24}, "value_dim must be 12, as hidden_size"),
    "heads that do not fit": ({"head_dim": 5}, r"a divisor of hidden_size \(12\)"),
    "another rank": (
        {"gate_low_rank_dim": 7},
        r"g_lora.lora.0.weight of shape \(5, 12\) where the config calls for \(7, 12\)",
    ),
    "a foreign key": ({"logit_scale": 0.5}, "logit_scale = 0.5 is not known"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_handled_is_refused(case):
    changes, why = REFUSED[case]
    config, weights = Config(FLA | changes), Weights.of(fla_weights(rwkv_model()))
    with pytest.raises(UserError, match=why):
        family_of(config)(config, weights)


@pytest.mark.thorough
def test_damaged_configs_are_refused_in_a_sentence():
    check_refusals(FLA, fla_weights(rwkv_model()))


def test_weights_of_another_model_are_refused():
    weights = dict(rwkv_model().state_dict())
    with pytest.raises(UserError, match=r"RWKV-5 or RWKV-6; expected RWKV-7"):
        program_of_weights(Weights.of({"blocks.0.att.time_decay": torch.zeros(3, 4, 1)}))
    with pytest.raises(UserError, match=r"lacks the weights head.weight"):
        program_of_weights(Weights.of({name: x for name, x in weights.items() if name != "head.weight"}))
    with pytest.raises(UserError, match=r"emb.weight of shape \(3,\); expected a matrix"):
        program_of_weights(Weights.of(weights | {"emb.weight": torch.zeros(3)}))
    with pytest.raises(UserError, match=r"does not call for: extra"):
        program_of_weights(Weights.of(weights | {"extra": torch.zeros(3)}))
