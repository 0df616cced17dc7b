"""The fused step by the program of a live model: which models it takes, rows with padding, and what is refused by place."""

import pytest
import torch
from support.rwkv_models import rwkv_model
from support.step_models import MAPS, SERVED, SERVED_IMAGES, image_model, map_model, text_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tarnn.decoding.fused import FusedStep
from tarnn.decoding.live import program_of
from tarnn.decoding.plan import Refusal
from tarnn.errors import UserError
from tarnn.kernels.cpu import library
from tarnn.models import TarnnForCausalLM
from tarnn.models.backbone import TextModel

compiled = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")
SOFTMAX = {"attention": ["softmax", "linear", "softmax"], "position": "rotary", "num_key_value_heads": 2}


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes)).eval()


@compiled
@pytest.mark.parametrize("kind", SERVED)
def test_texts_run_by_their_programs(kind):
    model = text_model(**SERVED[kind])
    assert FusedStep(model).program is not None
    record = TextModel(model.config.record())
    record.load_state_dict(model.state_dict())
    assert FusedStep(record.eval()).program is not None


@compiled
def test_making_a_step_draws_no_random_number():
    model = text_model(**SERVED["delta"])
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    FusedStep(model)
    assert torch.equal(torch.rand(2), expected)


@compiled
def test_rwkv_runs_by_its_program():
    assert FusedStep(rwkv_model().float().eval()).program is not None


@compiled
@pytest.mark.parametrize("name", [*MAPS, *SERVED_IMAGES])
def test_maps_and_images_run_by_their_programs(name):
    model = map_model(name, MAPS[name]) if name in MAPS else image_model(**SERVED_IMAGES[name])
    assert FusedStep(model).program is not None


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


def with_adapter(model):
    class Adapter(nn.Linear):
        pass

    model.model.layers[1].mlp.down_proj = Adapter(40, 32, bias=False)


REFUSED = {
    "hook": (lambda m: m.model.norm.register_forward_hook(lambda *_: None), r"model.norm \(LlamaRMSNorm\) has a hook"),
    "forward": (lambda m: setattr(m.model, "forward", m.forward), r"model \(.*\) has a method of its own, forward"),
    "head": (lambda m: setattr(m, "lm_head", nn.Sequential(m.lm_head)), r"lm_head \(Sequential\) does not describe"),
    "adapter": (with_adapter, r"model.layers.1.mlp.down_proj \(Adapter\) does not describe itself"),
    "child": (
        lambda m: setattr(m.model.norm, "more", nn.Identity()),
        r"model.norm.more \(Identity\) is not in a model",
    ),
    "training": (lambda m: m.train(), "is in training mode"),
    "attention": (lambda m: setattr(m.config, "_attn_implementation", "flex_attention"), "computes flex_attention"),
    "eps": (lambda m: setattr(m.model.norm, "variance_epsilon", 0.1), "another variance_epsilon than its config says"),
    "frequencies": (lambda m: m.model.rotary_emb.inv_freq.mul_(2), "another inv_freq than its config says"),
    "activation": (lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.GELU()), r"act_fn \(GELU\) does not describe"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_was_changed_is_refused_by_place(case):
    change, reason = REFUSED[case]
    model = llama()
    program_of(model)
    change(model)
    with pytest.raises(Refusal, match=reason):
        program_of(model)


def test_shapes_that_the_config_does_not_give_are_refused():
    model = llama()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:20].detach())
    with pytest.raises(UserError, match=r"this LlamaForCausalLM has lm_head.weight of shape \(20, 32\)"):
        program_of(model)


def test_what_has_no_family_is_refused():
    class Own(TarnnForCausalLM):
        pass

    with pytest.raises(Refusal, match="not for Linear"):
        program_of(nn.Linear(2, 2))
    with pytest.raises(Refusal, match=r"the model \(Own\) does not describe itself"):
        program_of(Own(text_model().config).eval())
