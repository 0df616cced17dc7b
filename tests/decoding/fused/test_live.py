"""A live model has a program while its modules compute what its config says; what was changed is refused by place."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.output_capturing import maybe_install_capturing_hooks

import tarnn
from tarnn.attention import calibrating
from tarnn.attention.rotary import Rotary
from tarnn.decoding.fused import FusedStep, refusal
from tarnn.decoding.live import program_of
from tarnn.decoding.refusal import Refusal
from tarnn.errors import UserError
from tarnn.feature_maps import Elu
from tarnn.kernels.cpu import library
from tarnn.models import TarnnForCausalLM
from tarnn.models.backbone import TextModel
from tarnn.program import runtime

compiled = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")
LAYER = "model.layers.1"


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


class Own(TarnnForCausalLM):
    """It may, too."""


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes)).eval()


def directions(block):
    return block.attention.feature_map.feature_map


CHANGED = {  # what is done to a layer of tarnn's own, and the reason against it
    "forward": (lambda x: setattr(x, "forward", x.forward), f"{LAYER} (TarnnBlock) has a method of its own, forward"),
    "step": (
        lambda x: setattr(x.attention, "step", x.attention.step),
        f"{LAYER}.attention (LinearAttention) has a method of its own, step",
    ),
    "adapter": (
        lambda x: setattr(x.mlp, "down_proj", Adapter(48, 32)),
        f"{LAYER}.mlp.down_proj (Adapter) is not the Linear that the config calls for",
    ),
    "dropout": (
        lambda x: setattr(x.attention, "dropout", nn.Tanh()),
        f"{LAYER}.attention.dropout (Tanh) is not the Dropout that the config calls for",
    ),
    "map": (
        lambda x: setattr(x.attention, "feature_map", OwnElu()),
        f"{LAYER}.attention.feature_map (OwnElu) is not the Reparametrized that the config calls for",
    ),
    "hook": (lambda x: x.register_forward_pre_hook(lambda *_: None), f"{LAYER} (TarnnBlock) has a hook"),
    "scaled rotary": (
        lambda x: setattr(x.attention, "rotary", Scaled(8)),
        f"{LAYER}.attention (LinearAttention) has another rotary than its config says",
    ),
    "base of rotary": (
        lambda x: setattr(x.attention.rotary, "base", 5.0),
        f"{LAYER}.attention (LinearAttention) has another rotary than its config says",
    ),
    "wide product": (
        lambda x: setattr(x.mlp.down_proj, "weight", nn.Parameter(torch.zeros(32, 50))),
        f"this TarnnForCausalLM has {LAYER}.mlp.down_proj.weight of shape (32, 50) where the config calls for (32, 48)",
    ),
    "eps": (
        lambda x: setattr(x.mlp_norm, "eps", 0.1),
        f"{LAYER}.mlp_norm (RMSNorm) has another eps than its config says",
    ),
    "eps of channels": (
        lambda x: setattr(x.mlp_norm, "eps", torch.full((32,), 1e-6)),
        f"{LAYER}.mlp_norm (RMSNorm) has another eps than its config says",
    ),
    "eps of heads": (
        lambda x: setattr(x.attention.q_norm, "eps", 1e-3),
        f"{LAYER}.attention.q_norm (RMSNorm) has another eps than its config says",
    ),
    "norm": (
        lambda x: setattr(x, "attention_norm", nn.LayerNorm(32).eval()),
        f"{LAYER}.attention_norm (LayerNorm) is not the RMSNorm that the config calls for",
    ),
    "few directions": (
        lambda x: setattr(directions(x), "omega", directions(x).omega[..., :2]),
        f"{LAYER}.attention.feature_map.feature_map.omega of shape (12, 2)",
    ),
    "training": (lambda x: x.dropout.train(), f"{LAYER}.dropout (Dropout) is in training mode"),
}


@compiled
@pytest.mark.parametrize("case", CHANGED)
def test_a_layer_that_was_changed_is_named(make_model, case):
    change, sentence = CHANGED[case]
    model = make_model("random features").float()
    assert refusal(model) is None
    change(model.model.layers[1])
    assert sentence in refusal(model)
    with pytest.raises(ValueError, match=r"there is no fused step for this model: .*Use model.step"):
        FusedStep(model)


@compiled
def test_what_changes_no_number_is_taken(make_model):
    """What transformers leaves behind: its hooks, a new head in training; dropout's rate, an embedding's padding."""
    model = make_model("default", tie_word_embeddings=False).float()
    model.enable_input_require_grads()
    maybe_install_capturing_hooks(model)
    model.resize_token_embeddings(50)
    model.model.dropout.p, model.model.embed_tokens.padding_idx = 0.5, 3
    assert refusal(model) is None
    assert refusal(TextModel(model.config.record()).eval()) is None


@compiled
def test_hooks_on_the_model_and_on_all_modules_are_refused(make_model):
    model = make_model("default").float()
    handle = model.register_forward_hook(lambda *_: None)
    assert refusal(model).endswith("(TarnnForCausalLM) has a hook")
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert refusal(model) == "there is a hook on all modules"
    handle.remove()
    assert refusal(model) is None


@compiled
def test_a_layer_that_is_being_calibrated_is_refused(make_model):
    model = make_model("random features").float()
    with calibrating(model):
        assert "attention (LinearAttention) has another calibration" in refusal(model)
    assert refusal(model) is None


@compiled
def test_other_tensors_are_refused_and_a_model_without_numbers_has_a_kind(make_model):
    model = make_model("default").float()
    weight = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(weight.data.as_subclass(Packed))
    assert "kept in another way" in refusal(model)
    assert refusal(make_model("default").to("meta"), anywhere=True) is None


@compiled
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["llama", "own"])
def test_an_adapter_is_refused_by_place_until_it_is_merged(make_model, kind):
    peft = pytest.importorskip("peft")
    model, ids = llama() if kind == "llama" else make_model("default").float(), torch.arange(7)[None]
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        expected = adapted(ids).logits
    assert refusal(adapted) == "the model (PeftModel) is of a class that no family knows"
    place = (
        r"model.layers.0.\w+.q_proj \(Linear\) is of peft.tuners.lora.layer, not the Linear that the config calls for"
    )
    with pytest.raises(ValueError, match=place):
        FusedStep(model)
    logits = tarnn.load(adapted.merge_and_unload()).logits(ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@compiled
def test_kernels_of_another_version_are_refused(make_model, monkeypatch):
    monkeypatch.setattr(runtime, "VERSION", 10**6)
    with pytest.raises(
        Refusal, match=r"read programs of version \d+, and this package writes version 1000000: compile"
    ):
        FusedStep(make_model("default").float())


def with_adapter(model):
    model.model.layers[1].mlp.down_proj = Adapter(40, 32, bias=False)


REFUSED = {
    "hook": (lambda m: m.model.norm.register_forward_hook(lambda *_: None), r"model.norm \(LlamaRMSNorm\) has a hook"),
    "forward": (lambda m: setattr(m.model, "forward", m.forward), r"model \(.*\) has a method of its own, forward"),
    "head": (lambda m: setattr(m, "lm_head", nn.Sequential(m.lm_head)), r"lm_head \(Sequential\) is not the Linear"),
    "adapter": (with_adapter, r"model.layers.1.mlp.down_proj \(Adapter\) is not the Linear that the config calls for"),
    "child": (
        lambda m: setattr(m.model.norm, "more", nn.Identity()),
        r"model.norm.more \(Identity\) is not in a model",
    ),
    "training": (lambda m: m.train(), "is in training mode"),
    "attention": (lambda m: m.set_attn_implementation("flex_attention"), "computes flex_attention"),
    "eps": (lambda m: setattr(m.model.norm, "variance_epsilon", 0.1), "another variance_epsilon than its config says"),
    "frequencies": (lambda m: m.model.rotary_emb.inv_freq.mul_(2), "another inv_freq than its config says"),
    "activation": (lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.GELU()), r"act_fn \(GELU\) is not the"),
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


def test_what_has_no_family_is_refused(make_model):
    with pytest.raises(Refusal, match="not for Linear"):
        program_of(nn.Linear(2, 2))
    with pytest.raises(Refusal, match=r"the model \(Own\) is of a class that no family knows"):
        program_of(Own(make_model("default").float().config).eval())
