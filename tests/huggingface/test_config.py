"""The config: what it takes, what it refuses and says, and that it survives a file."""

import json

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from tarnn.feature_maps import Dpfp, Hedgehog, OwnMap, PositiveRandomFeatures, Reparametrized
from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnForImageGeneration, TarnnImageConfig


def test_defaults_are_resolved():
    config = TarnnConfig(hidden_size=96, num_attention_heads=6)
    assert (config.num_key_value_heads, config.head_dim, config.intermediate_size) == (6, 16, 256)
    assert TarnnConfig(hidden_size=96, num_attention_heads=6, mlp="gelu").intermediate_size == 384
    assert TarnnConfig(hidden_size=32, num_attention_heads=4).intermediate_size == 96  # 85.3, in 32s


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("linear", ["linear"] * 4),
        (["linear", "softmax"], ["linear", "softmax"] * 2),
        (["none", "linear", "linear", "softmax"], ["none", "linear", "linear", "softmax"]),
    ],
)
def test_patterns(pattern, layers):
    config = TarnnConfig(num_hidden_layers=4, attention=pattern)
    assert [config.attention_of(i) for i in range(4)] == layers
    assert config.layer_types == ["tarnn_softmax" if x == "softmax" else "tarnn_linear" for x in layers]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hiden_size": 8}, "has no 'hiden_size'; it takes vocab_size, hidden_size, .*pad_token_id"),
        ({"max_length": 10, "layer_types": []}, "TarnnConfig has no 'layer_types', 'max_length'"),
        ({"hidden_size": 10}, "multiple of num_att.*hidden_size = 10 and num_attention_heads = 8"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads; got 8 and 3"),
        ({"hidden_size": "256"}, "hidden_size must be a positive integer; got '256'"),
        ({"max_position_embeddings": 1.5}, "max_position_embeddings must be a positive integer"),
        ({"dropout": 1.0}, "dropout must be a number from 0 to below 1; got 1.0"),
        ({"normalize": "yes"}, "normalize must be true or false; got 'yes'"),
        ({"attention": "liner"}, "attention must be one of gated_delta, .*; got 'liner'. Did you mean 'linear'"),
        ({"attention": ["linear"] * 3}, "multiple of its length; got 3 attentions for 8 layers"),
        ({"attention": []}, "got 0 attentions for 8 layers"),
        ({"feature_map": "softmax"}, "feature_map must be one of clusters, cosformer, .*trigonometric; got 'softmax'"),
        ({"feature_map": ["elu"] * 5}, "got 5 feature_maps for 8 layers"),
        ({"feature_map": "identity"}, "Identity may give negative weights.*normalize=False"),
        ({"feature_map": "exp", "position": "rotary"}, "Exp are kept as scaled logarithms.*no rotary positions"),
        ({"decay": "channel", "position": "rotary"}, "take a decay per head or per token, or no rotary"),
        ({"head_dim": 7, "position": "rotary"}, "dim must be even and ≥ 2; got 7"),
        ({"feature_map_options": {"nu": 2}}, r"as in \{'dpfp': \{'nu': 2\}\}; got \{'nu': 2\}"),
        ({"feature_map_options": {"favour": {}}}, "no feature map is called 'favour'; there are clusters"),
        ({"feature_map_options": {"favor": {"seed": -1}}, "feature_map": "favor"}, "whole number from 0.*got -1"),
        ({"feature_map": "cosformer", "position": "none"}, "needs to know the longest sequence"),
        ({"feature_map": "dpfp", "feature_map_options": {"dpfp": {"nu": "2"}}}, "can't be made with {'nu': '2'"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id must be a token's number.*got \[1, -1\]"),
        ({"feature_map": "dpfp", "feature_map_options": {"dpfp": {"mu": 2}}}, "no option 'mu'; it takes nu"),
        ({"feature_map": "dpfp", "feature_map_options": {"dpfp": {"nu": 0}}}, "Dpfp needs nu ≥ 1; got 0"),
        ({"attention_options": {"nu": 2}}, r"attention_options holds options .* as in .*; got \{'nu': 2\}"),
        ({"attention_options": {"linnear": {}}}, "no attention is called 'linnear'; there are gated_delta, linear"),
        ({"attention_options": {"linear": {"window": 2}}}, "attention 'linear' has no option 'window'"),
        ({"feature_map": OwnMap(nn.ReLU())}, "OwnMap has no name that a config could hold.*register"),
        ({"feature_map": PositiveRandomFeatures(16)}, "was made with head_dim = 16; this model's is 32"),
        ({"feature_map": Hedgehog(32, 4)}, "Hedgehog given as feature_map was made with num_heads = 4; .* is 8"),
        ({"feature_map": [Dpfp(), Dpfp(2)]}, r"the same options of it; got \{\} and \{'nu': 2\} for 'dpfp'"),
        ({"feature_map": Dpfp(1), "feature_map_options": {"dpfp": {"nu": 2}}}, r"got \{'nu': 2\} and \{'nu': 1\}"),
        ({"feature_map": Reparametrized(PositiveRandomFeatures(32), fit="call")}, "'favor' has no option 'fit'"),
        ({"position": "alibi"}, "position must be one of rotary, sinusoidal"),
        ({"position": "learned"}, "say how long, max_position_embeddings"),
        ({"position": "sinusoidal", "hidden_size": 18, "num_attention_heads": 2}, "a multiple of 4; got 18"),
        ({"position": "sinusoidal_half", "tie_word_embeddings": True}, "leave tie_word_embeddings out"),
        ({"model_type": "llama"}, "the config of a 'llama' model"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        TarnnConfig(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "attention": ["linear", "softmax"],
            "feature_map": ["elu", "relu", "dpfp", "elu"],
            "max_position_embeddings": 99,
        },
        {"feature_map": "dpfp", "feature_map_options": {"dpfp": {"nu": 3}}, "eos_token_id": [1, 2], "position": "none"},
        {
            "feature_map": [Dpfp(3), Reparametrized(PositiveRandomFeatures(32, 64, seed=1), balance=False)],
            "position": "none",
        },
        {"vocab_size": 12, "eos_token_id": 3, "bos_token_id": 4, "pad_token_id": 5, "use_cache": False},
    ],
    ids=["default", "patterns", "options", "objects", "tokens"],
)
def test_a_file_keeps_everything(tmp_path, options):
    config = TarnnConfig(**options)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is TarnnConfig
    assert {k: getattr(loaded, k) for k in TarnnConfig.known_keys()} == {
        k: getattr(config, k) for k in TarnnConfig.known_keys()
    }
    assert "layer_types" not in json.loads((tmp_path / "config.json").read_text())
    assert TarnnConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_a_file_with_an_unknown_key_is_refused(tmp_path):
    TarnnConfig().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"atention": "linear"}))
    with pytest.raises(ValueError, match="TarnnConfig has no 'atention'; it takes vocab_size"):
        AutoConfig.from_pretrained(tmp_path)


def test_the_paper_preset():
    config = TarnnConfig.paper(vocab_size=256, num_hidden_layers=16)
    assert (config.num_hidden_layers, config.num_attention_heads, config.head_dim) == (16, 8, 32)
    assert (config.intermediate_size, config.norm, config.norm_position) == (1024, "layer", "post")
    assert TarnnConfig.paper(hidden_size=48).intermediate_size == 192
    with pytest.raises(ValueError, match="'colour'"):
        TarnnConfig.paper(colour="red")


@torch.no_grad()
def test_the_paper_preset_begins_as_torch_does():
    """Of the same spread as torch's own linear layers; but by 1/√(2·layers) less where a residual is added."""
    config = TarnnConfig.paper(hidden_size=192, num_hidden_layers=3)
    block = TarnnForCausalLM(config).model.layers[0]
    own = nn.Linear(192, 192).weight.std().item()
    assert block.attention.q_proj.weight.std().item() == pytest.approx(own, rel=0.02)
    assert block.attention.o_proj.weight.std().item() == pytest.approx(own / 6**0.5, rel=0.02)
    assert TarnnConfig.paper(initializer_range=0.5).initializer_range == 0.5
    assert TarnnConfig(hidden_size=192).initializer_range == 0.02


def test_what_transformers_sets_is_taken(tmp_path):
    """from_pretrained passes some keys of its own, and models write dtype and architectures."""
    model = TarnnForCausalLM(TarnnConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    model.bfloat16().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, num_labels=3, attn_implementation="eager")
    assert config.num_labels == 3
    assert str(config.dtype) == "torch.bfloat16"


OLD_KEYS = {"pretraining_tp": 1, "tokenizer_class": "X", "is_decoder": True, "bos_token": "<s>", "max_length": 20}


def test_keys_of_transformers_own_are_ignored_in_a_file_and_refused_in_a_call(tmp_path):
    TarnnConfig(hidden_size=64).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | OLD_KEYS))
    words = "the config has bos_token, is_decoder, max_length, pretraining_tp, tokenizer_class, which .* ignored"
    for read in (AutoConfig, TarnnConfig):
        with pytest.warns(UserWarning, match=words):
            read_back = read.from_pretrained(tmp_path)
        assert read_back.to_diff_dict() == TarnnConfig(hidden_size=64).to_diff_dict()
    for key, value in OLD_KEYS.items():
        with pytest.raises(ValueError, match=f"TarnnConfig has no '{key}'"):
            TarnnConfig(**{key: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": 3}, "dtype must be the name of a floating type of torch.*got 3"),
        ({"dtype": "flaot32"}, "dtype must be .* such as float32 .*got 'flaot32'"),
        ({"architectures": 3}, "architectures must be a list of names or null; got 3"),
        ({"id2label": 3}, "id2label must be an object or null; got 3"),
        ({"id2label": {"a": 1}}, r"id2label gives labels by their numbers, as in \{0: .*got \{'a': 1\}"),
        ({"num_labels": "x"}, "num_labels must be a whole number from 1 to a million; got 'x'"),
        ({"use_cache": "yes"}, "use_cache must be true or false or null; got 'yes'"),
        ({"auto_map": 3}, "auto_map must be an object"),
        ({"hiden_size": 8}, r"it takes vocab_size, .*\. Did you mean hidden_size\?"),
        ({"hidden_size": 100_000_000}, r"a model of 9.6e\+17 weights, more than the 1e\+13 that are taken"),
        ({"hidden_size": 2**36}, "a model of inf weights"),
        ({"hidden_size": 10**40}, "hidden_size must be below 2⁴⁰"),
        ({"num_hidden_layers": 2**38, "attention": ["linear", "none"]}, r"a model of .*e\+17 weights"),
        ({"position": "learned", "max_position_embeddings": 2**39}, r"a model of 1.4e\+14 weights"),
    ],
)
def test_values_that_transformers_or_the_machine_would_stumble_over(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        TarnnConfig(**options)
    assert "\n" not in str(caught.value)


SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4}
IMAGE = {"image_height": 3, "image_width": 5}


@pytest.mark.parametrize(
    "config",
    [
        TarnnConfig(**SMALL, attention=["linear", "softmax"], feature_map=["favor", "hedgehog", "elu", "dpfp"]),
        TarnnConfig(**SMALL, position="learned", max_position_embeddings=9, decay="channel", bias=True),
        TarnnConfig(**SMALL, tie_word_embeddings=False, attention="none"),
        TarnnConfig.paper(**SMALL),
        TarnnImageConfig(**SMALL, **IMAGE, num_classes=7, num_channels=3),
        TarnnImageConfig.paper(**SMALL, **IMAGE, likelihood="categorical"),
    ],
)
def test_the_estimate_of_its_size_is_the_size(config):
    kind = TarnnForImageGeneration if isinstance(config, TarnnImageConfig) else TarnnForCausalLM
    model = kind(config)
    assert config.num_parameters_estimate() == sum(x.numel() for x in (*model.parameters(), *model.buffers()))


def test_embeddings_are_tied_where_they_can_be():
    assert TarnnConfig().tie_word_embeddings
    assert not TarnnConfig(position="sinusoidal_half").tie_word_embeddings
    assert not TarnnConfig.paper().tie_word_embeddings
    assert TarnnConfig.paper(position="none").tie_word_embeddings


def test_a_thousand_million_heads_cost_nothing():
    """They are refused before anything per head is made."""
    with pytest.raises(ValueError, match="must be at most 1,048,576; got 1,000,000,000"):
        TarnnConfig(num_attention_heads=10**9, head_dim=1, hidden_size=32)
