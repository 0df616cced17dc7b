"""Options by layer and by head: what they mean, and that a saved model has them when it is loaded."""

import pytest
import torch
from support.families import FAMILIES, inputs_of, model_of

import tarnn
from tarnn.conversion import attention_layers, constant_cache, set_options
from tarnn.conversion.layer import Heads
from tarnn.conversion.options import layer_attention
from tarnn.feature_maps.statistics import spread_of
from tarnn.huggingface.versions import CACHE
from tarnn.ops import softmax_attention
from tarnn.ops.hybrid.op import hybrid_attention

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers has to say of random configs
NEAR = {"causal": True, "window": 5, "sinks": 1}


@pytest.fixture
def model():
    return model_of(FAMILIES["Llama"], "tarnn_hybrid")  # 2 layers, 4 heads, 2 key/value heads of width 8


@pytest.fixture
def given():
    return inputs_of("decoder")["left"]


@torch.no_grad()
def logits(model, given):
    return model(**given).logits[given["attention_mask"].bool()]


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return [torch.randn(2, h, 30, 8) for h in (4, 2, 2)]


def test_each_head_does_what_its_mode_says(qkv):
    q, k, v = qkv
    for modes in (["features", "window"], ["exact", "features"], ["window", "exact"]):
        layer = layer_attention({"mode": modes}, Heads(4, 2, 8), None, None)
        layer.set_bias([0.1, 0.2, 0.3, 0.4])
        o, _ = layer(*qkv, **NEAR)
        for i, mode in enumerate(modes):
            two, one = slice(2 * i, 2 * i + 2), slice(i, i + 1)
            alone = q[:, two], k[:, one], v[:, one]
            phi = layer.feature_map if mode == "features" else None
            expected = (
                softmax_attention(*alone, causal=True)
                if mode == "exact"
                else hybrid_attention(*alone, phi, far_bias=layer.far_bias[two], **NEAR)
            )
            torch.testing.assert_close(o[:, two], expected)


def test_maps_estimate_the_models_own_products(qkv):
    """A model that scales its products unlike 1/√d (Granite, Gemma) gets features of these products."""
    layer = layer_attention({}, Heads(4, 2, 8), None, None)
    q, k, v = qkv
    torch.testing.assert_close(
        layer(q, k, v, scale=0.7, **NEAR)[0],
        hybrid_attention(q * 0.7 * 8**0.5, k, v, layer.feature_map, far_bias=layer.far_bias, **NEAR),
    )


def test_exact_layers_are_the_models_own(model, given):
    set_options(model, window=2, mode="exact")
    ours = logits(model, given)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(ours, logits(model, given), atol=3e-6, rtol=1e-5)


def test_a_layer_has_options_of_its_own(model, given):
    set_options(model, window=1000)
    whole = logits(model, given)
    set_options(model, layers=1, window=3)
    assert not torch.allclose(logits(model, given), whole)
    set_options(model, layers=[0], sinks=2)
    assert [x.tarnn.options.get("window") for x in attention_layers(model)] == [1000, 3]
    set_options(model, window=1000)
    torch.testing.assert_close(logits(model, given), whole)


def test_generation_with_every_kind_of_head(model, given):
    set_options(model, window=4, sinks=1, mode=["features", "exact"])
    set_options(model, layers=1, mode=["window", "features"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)  # so that tokens differ
    options = {**given, "max_new_tokens": 12, "do_sample": False, "num_beams": 2, "eos_token_id": None}
    with pytest.warns(UserWarning, match="layer 0 keeps"):
        cache = constant_cache(model)
    expected = model.generate(use_cache=False, **options)
    assert torch.equal(model.generate(**{CACHE: cache}, **options), expected)


def test_it_is_loaded_as_it_was_saved(model, given, tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    learned = tarnn.feature_maps.Hedgehog(8, num_heads=2)
    torch.nn.init.normal_(learned.weight)
    fitted = tarnn.feature_maps.make("saderf", head_dim=8, num_heads=2, num_features=16)
    fitted.calibrate(*(spread_of(torch.randn(1, 2, 9, 8) + 1, 2).over_batch() for _ in range(2)))
    set_options(model, window=4, sinks=1, feature_map=learned, far_bias=[0.1, 0.2, 0.3, 0.4])
    set_options(model, layers=1, feature_map=fitted, mode=["window", "features"], far_bias=0.5)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, given), logits(model, given))
    model.set_attn_implementation("sdpa")
    softmax = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    assert torch.equal(logits(softmax, given), logits(model, given))
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {x.dtype for n, x in rounded.named_parameters() if ".tarnn." in n} == {torch.float32}


def test_cross_attention_of_equal_lengths_is_left_alone():
    model = model_of(FAMILIES["BART"])
    given = {"input_ids": torch.arange(3, 33)[None], "decoder_input_ids": torch.arange(40, 70)[None]}
    with torch.no_grad():
        expected = model(**given)[0]
        model.set_attn_implementation("tarnn_hybrid")
        set_options(model, window=3, sinks=0)
        for layer in (x for x in attention_layers(model) if x.is_causal or not x.is_decoder):
            layer.tarnn = layer_attention({"mode": "exact"}, Heads(4, 4, 8), None, None)
        torch.testing.assert_close(model(**given)[0], expected, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "both"}, "features, window, exact"),
        ({"mode": ["exact"] * 3}, "2 key/value heads"),
        ({"far_bias": [1.0, 2.0]}, "4 query heads"),
        ({"layers": 2, "window": 3}, "layers 0 to 1"),
        ({"feature_map": tarnn.feature_maps.Hedgehog(16)}, "another width"),
        ({"feature_map": tarnn.feature_maps.TrigonometricRandomFeatures(8, 16)}, "negative"),
        ({"feature_map": "favour"}, "favor"),
    ],
)
def test_refusals_change_nothing(model, options, words):
    before = dict(model.state_dict())
    with pytest.raises(ValueError, match=words):
        set_options(model, **options)
    assert model.state_dict().keys() == before.keys()
    assert not hasattr(model.config, "tarnn_attention")


@torch.no_grad()
def test_an_encoder_sees_a_window(tmp_path):
    """Two layers carry a token's change by two tokens each, on both sides."""
    model, inputs = model_of(FAMILIES["BERT"], "tarnn_hybrid"), inputs_of("encoder")["right"]
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][:, 30] += 1
    set_options(model, window=3, sinks=0, mode="window")
    x, y = (model(**given).last_hidden_state for given in (inputs, other))
    assert (x != y).any(-1).sum(-1).tolist() == [9, 7]  # the second row ends at 33


def test_global_tokens_are_refused_by_name():
    model = model_of(FAMILIES["BERT"], "tarnn_hybrid")
    with pytest.raises(ValueError, match=r"no option global_tokens.*has been removed. Take `sinks` for first tokens"):
        set_options(model, global_tokens=[0])
