"""A plan is what the modules of a model say of themselves: of their own numbers, or it says which one it can't take."""

import pytest
import torch
from torch import nn
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from tarnn.attention import calibrating
from tarnn.attention.rotary import Rotary
from tarnn.decoding import fused
from tarnn.decoding.fused import FusedStep, refusal
from tarnn.decoding.plan import Refusal
from tarnn.feature_maps import Elu
from tarnn.kernels.cpu import library
from tarnn.models.backbone import TextModel
from tarnn.models.block import GeluMlp

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")


class Packed(torch.Tensor):
    """Not a plain tensor."""


class Adapter(nn.Linear):
    """With a weight of the same name, of which it makes something else."""

    def forward(self, x):
        return super().forward(x) + 1


class Scaled(Rotary):
    def rotation(self, positions, dtype=torch.float32):
        return super().rotation(positions / 8, dtype)


class OwnElu(Elu):
    """It may compute anything."""


def directions(block):
    return block.attention.feature_map.feature_map


LAYER = "model.layers.1"
REFUSED = {  # what is done to a layer, and how it is told
    "forward": (lambda x: setattr(x, "forward", x.forward), f"{LAYER} (TarnnBlock) has a method of its own, forward"),
    "step": (
        lambda x: setattr(x.attention, "step", x.attention.step),
        f"{LAYER}.attention (LinearAttention) has a method of its own, step",
    ),
    "adapter": (
        lambda x: setattr(x.mlp, "down_proj", Adapter(48, 32)),
        f"{LAYER}.mlp.down_proj (Adapter) does not describe itself",
    ),
    "dropout": (
        lambda x: setattr(x.attention, "dropout", nn.Tanh()),
        f"{LAYER}.attention.dropout (Tanh) does not describe itself",
    ),
    "map": (
        lambda x: setattr(x.attention, "feature_map", OwnElu()),
        f"{LAYER}.attention.feature_map (OwnElu) does not describe itself",
    ),
    "hook": (lambda x: x.register_forward_pre_hook(lambda *_: None), f"{LAYER} (TarnnBlock) has a hook"),
    "scaled rotary": (lambda x: setattr(x.attention, "rotary", Scaled(8)), "a part (Scaled) does not describe itself"),
    "narrow rotary": (
        lambda x: setattr(x.attention, "rotary", Rotary(4)),
        "a tensor is (2,), which does not fit the other weights",
    ),
    "wide product": (
        lambda x: setattr(x.mlp.down_proj, "weight", nn.Parameter(torch.zeros(32, 50))),
        f"{LAYER}.mlp.down_proj.weight is (32, 50), which does not fit the other weights",
    ),
    "eps": (lambda x: setattr(x.mlp_norm, "eps", 0.1), "its layers differ in their eps of norms"),
    "eps of channels": (
        lambda x: setattr(x.mlp_norm, "eps", torch.full((32,), 1e-6)),
        "its layers differ in their eps of norms",
    ),
    "eps of heads": (
        lambda x: setattr(x.attention.q_norm, "eps", 1e-3),
        "norms of queries, keys and outputs are RMSNorms with eps = 1e-06 there",
    ),
    "norm": (
        lambda x: setattr(x, "attention_norm", nn.LayerNorm(32).eval()),
        "its layers differ in their kind of norms",
    ),
    "no gain": (
        lambda x: setattr(x, "attention_norm", nn.LayerNorm(32, elementwise_affine=False).eval()),
        f"{LAYER}.attention_norm (LayerNorm) has no gain",
    ),
    "few directions": (
        lambda x: setattr(directions(x), "omega", directions(x).omega[..., :2]),
        "a tensor is (1, 12, 2), which does not fit the other weights",
    ),
    "training": (lambda x: x.dropout.train(), f"{LAYER}.dropout (Dropout) is in training mode"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_plan_does_not_take_it_names(make_model, case):
    change, sentence = REFUSED[case]
    model = make_model("random features").float()
    model.model.layers[1].config = model.config
    assert refusal(model) is None
    change(model.model.layers[1])
    assert refusal(model) == sentence
    with pytest.raises(ValueError, match=r"there is no fused step for this model: .*Use model.step"):
        FusedStep(model)


def test_what_changes_no_number_is_taken(make_model):
    """What transformers leaves behind: its hooks, a new head in training; dropout's rate, an embedding's padding."""
    model = make_model("default", tie_word_embeddings=False).float()
    model.enable_input_require_grads()
    maybe_install_capturing_hooks(model)
    model.resize_token_embeddings(50)
    model.model.dropout.p, model.model.embed_tokens.padding_idx = 0.5, 3
    assert refusal(model) is None
    assert refusal(TextModel(model.config.record()).eval()) is None


def logits_of(step, model):
    state = model.new_state(2)
    for token in torch.tensor([[3, 5], [7, 7], [4, 9]]):
        logits, state = step(token, state)
    return logits


def test_numbers_are_those_of_the_modules_not_of_the_config(make_model):
    """Written by hand into layers: eps of all norms, one's MLP, another's rotary base, a head with fewer tokens."""
    model = make_model("rotary", feature_map="favor", tie_word_embeddings=False).float()
    before = logits_of(FusedStep(model), model)
    for norm in (model.model.norm, *(x for b in model.model.layers for x in (b.attention_norm, b.mlp_norm))):
        norm.eps = 0.1
    model.model.layers[1].attention.rotary.base = 5.0
    model.model.layers[0].mlp = GeluMlp(model.config).eval()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:20].detach())
    model.config.norm_eps, model.config.rotary_base = 1.0, 1.0
    logits, expected = (logits_of(step, model) for step in (FusedStep(model), model.step))
    assert logits.shape == (2, 20)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert (logits - before[:, :20]).abs().max() > 1e-3


def test_hooks_on_the_model_and_on_all_modules_are_refused(make_model):
    model = make_model("default").float()
    handle = model.register_forward_hook(lambda *_: None)
    assert refusal(model).endswith("(TarnnForCausalLM) has a hook")
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert refusal(model) == "there is a hook on all modules"
    handle.remove()
    assert refusal(model) is None


def test_kernels_of_another_version_are_refused(make_model, monkeypatch):
    monkeypatch.setattr(fused, "VERSION", 10**6)
    with pytest.raises(
        Refusal, match=r"read plans of version \d+, and this package writes version 1000000: compile them"
    ):
        FusedStep(make_model("default").float())


def test_a_layer_that_is_being_calibrated_is_refused(make_model):
    model = make_model("random features").float()
    with calibrating(model):
        assert refusal(model).endswith("attention (LinearAttention) is being calibrated")
    assert refusal(model) is None


def test_other_tensors_are_refused_and_a_model_without_numbers_has_a_kind(make_model):
    model = make_model("default").float()
    weight = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(weight.data.as_subclass(Packed))
    assert "kept in another way" in refusal(model)
    assert refusal(make_model("default").to("meta"), anywhere=True) is None
