"""Whether a model is what its config builds: every way to change one is seen, by name."""

import functools
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from tarnn.attention import calibrating
from tarnn.attention.linear import LinearAttention
from tarnn.attention.rotary import Rotary
from tarnn.decoding.as_built import change
from tarnn.decoding.fused import FusedStep, refusal
from tarnn.feature_maps import as_feature_map
from tarnn.kernels.cpu import library
from tarnn.models import TarnnForCausalLM, TarnnForImageGeneration, TarnnImageConfig
from tarnn.models.backbone import TextModel
from tarnn.models.block import GeluMlp, SwiGlu
from tarnn.models.images import ImageModel


class Packed(torch.Tensor):
    """Not a plain tensor."""


def own_forward(x):
    x.forward = x.forward


def other_norm(x):
    x.attention_norm = nn.LayerNorm(32)


def no_gain(x):
    x.attention_norm = nn.LayerNorm(32, elementwise_affine=False)


def own_norm(x):
    x.attention.q_norm = nn.LayerNorm(8)


def gelu(x):
    x.mlp = GeluMlp(x.config)


def wider(x):
    x.mlp.down_proj.weight = nn.Parameter(torch.zeros(32, 50))


def other_eps(x):
    x.mlp_norm.eps = 0.1


def own_method(x):
    x.attention.mix = x.attention.mix


def other_dropout(x):
    x.attention.dropout = nn.Tanh()


def hook(x):
    x.register_forward_pre_hook(lambda *_: None)


def more(x):
    x.mlp.adapter = nn.Linear(3, 3)


def other_base(x):
    x.attention.rotary.base = 5.0


def narrower_rotary(x):
    x.attention.rotary = Rotary(4)


def scaled_rotary(x):
    class Scaled(Rotary):
        def rotation(self, positions, dtype=torch.float32):
            return super().rotation(positions / 8, dtype)

    x.attention.rotary = Scaled(x.attention.rotary.dim, base=x.attention.rotary.base)


def eps_of_each(x):
    x.mlp_norm.eps = torch.full((32,), 1e-6)


CHANGES = {
    other_base: "model.layers.1.attention.rotary",
    narrower_rotary: "model.layers.1.attention.rotary",
    scaled_rotary: "model.layers.1.attention.rotary",
    eps_of_each: "model.layers.1.mlp_norm.eps",
    own_forward: "model.layers.1.forward, a method of its own",
    other_norm: "model.layers.1.attention_norm, LayerNorm in the place of RMSNorm",
    no_gain: "model.layers.1.attention_norm, LayerNorm in the place of RMSNorm",
    own_norm: "model.layers.1.attention.q_norm, LayerNorm in the place of RMSNorm",
    gelu: "model.layers.1.mlp",
    wider: "the shape of model.layers.1.mlp.down_proj.weight",
    other_eps: "model.layers.1.mlp_norm.eps",
    own_method: "model.layers.1.attention.mix, a method of its own",
    other_dropout: "model.layers.1.attention.dropout",
    hook: "a hook on model.layers.1",
    more: "model.layers.1.mlp.adapter",
}


def what(model):
    return change(model, TextModel)


def test_what_was_built_is_as_built(model):
    assert what(model) is None
    assert what(model.float().train()) is None
    model.resize_token_embeddings(50)
    assert what(model) is None
    assert what(TextModel(model.config.record())) is None
    maybe_install_capturing_hooks(model)  # transformers' own, which only note
    assert what(model) is None


def test_what_changes_no_number_is_no_change(make_model):
    """What transformers leaves behind: hooks for gradients, a new head; dropout's rate, an embedding's padding."""
    model = make_model("default", tie_word_embeddings=False)
    model.enable_input_require_grads()
    model.resize_token_embeddings(50)
    model.model.dropout.p, model.model.embed_tokens.padding_idx = 0.5, 3
    assert what(model) is None
    if library.available():
        assert refusal(model.float()) is None


def test_another_map_is_seen_and_one_of_another_shape(make_model):
    for name, kind in (("taylor", "default"), ("exp", "rotary"), ("hedgehog", "default")):
        model = make_model(kind)
        attention = model.model.layers[1].attention
        attention.feature_map = as_feature_map(name, head_dim=attention.head_dim, num_heads=4)
        assert what(model).startswith("model.layers.1.attention.feature_map, ")
    model = make_model("random features", feature_map="favor", feature_map_options={}).float()
    phi = model.model.layers[0].attention.feature_map
    phi.omega = phi.omega[..., :2]
    assert what(model) == "the shape of model.layers.0.attention.feature_map.omega"


def test_what_was_loaded_is_as_built(make_model, tmp_path):
    make_model("hybrid").save_pretrained(tmp_path)
    assert what(TarnnForCausalLM.from_pretrained(tmp_path)) is None
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_height": 4, "image_width": 4}
    image = TarnnForImageGeneration(TarnnImageConfig.paper(**sizes, position="grid", num_classes=3))
    assert change(image, ImageModel) is None


@pytest.mark.parametrize("how", CHANGES, ids=lambda x: x.__name__)
def test_a_change_is_seen(make_model, how):
    model = make_model("rotary").float()
    block = model.model.layers[1]
    if how is gelu:
        block.config = model.config
    how(block)
    assert what(model).startswith(CHANGES[how])
    if library.available():
        assert what(model) in refusal(model)
        with pytest.raises(ValueError, match="there is no fused step"):
            FusedStep(model)


def test_changes_to_all_modules_of_a_kind_are_seen(make_model):
    model = make_model("default")
    for kind, name in ((nn.Linear, "forward"), (SwiGlu, "forward"), (LinearAttention, "step")):
        old = getattr(kind, name)
        new = lambda *args, old=old, **options: old(*args, **options)  # noqa: E731
        for method in (new, functools.wraps(old)(new)):
            with patch.object(kind, name, method):
                assert what(model) == f"{kind.__name__}.{name}, which was replaced"
    with patch.object(nn.Linear, "__call__", lambda *args: None):
        assert what(model) == "Linear.__call__, which was replaced"
    with patch.object(Rotary, "rotation", lambda *args: None):
        assert what(make_model("rotary")) == "Rotary.rotation, which was replaced"
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert what(model) == "a hook on all modules"
    handle.remove()
    assert what(model) is None


def test_a_vocabulary_that_was_cut_by_hand_is_seen(make_model):
    model = make_model("default", tie_word_embeddings=False)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:20].detach())
    assert what(model) == "the shape of lm_head.weight"


def test_a_config_that_was_changed_is_seen(make_model):
    model = make_model("default")
    model.config.norm_eps = 0.1
    assert what(model) == "model.layers.0.attention_norm.eps"
    model.config.num_attention_heads = 7
    assert "nothing can be built" in what(model)


def test_a_layer_that_is_being_calibrated_is_seen(make_model):
    model = make_model("random features")
    with calibrating(model):
        assert what(model).endswith("attention.calibration")
    assert what(model) is None


@pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")
def test_training_parts_and_other_tensors_are_refused(make_model):
    model = make_model("default").float()
    assert refusal(model) is None
    model.model.layers[1].dropout.train()
    assert "training mode" in refusal(model)
    model.eval()
    weight = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(weight.data.as_subclass(Packed))
    assert "kept in another way" in refusal(model)
