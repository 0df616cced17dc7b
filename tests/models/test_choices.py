"""From a config's names to layers."""

import pytest

from tarnn.attention import (
    ChannelDecay,
    HeadDecay,
    LinearAttention,
    NoAttention,
    SoftmaxAttention,
    TokenDecay,
)
from tarnn.feature_maps import Dpfp, Elu, Hedgehog
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.models.choices import FEATURE_MAPS, make_feature_map


def attentions(**options):
    config = TarnnConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, **options)
    return [block.attention for block in TarnnForCausalLM(config).model.layers]


def test_patterns_become_layers():
    layers = attentions(
        attention=["linear", "softmax", "none", "linear"], feature_map=["elu", "dpfp"], position="rotary",
        rotary_base=77.0, decay="none", feature_map_options={"dpfp": {"nu": 3}},
    )  # fmt: skip
    assert [type(layer) for layer in layers] == [
        LinearAttention,
        SoftmaxAttention,
        NoAttention,
        LinearAttention,
    ]
    assert [type(layer.feature_map) for layer in (layers[0], layers[3])] == [Elu, Dpfp]
    assert layers[3].feature_map.nu == 3
    rotaries = [(layer.rotary.dim, layer.rotary.base) for layer in (layers[0], layers[1], layers[3])]
    assert rotaries == [(8, 77.0), (8, 77.0), (48, 77.0)]  # as wide as the features: 2·3·8 for dpfp


def test_grouped_heads_share_a_learned_map():
    layer = attentions(feature_map="hedgehog", num_key_value_heads=2, position="none", decay="channel")[0]
    assert isinstance(layer.feature_map, Hedgehog)
    assert layer.feature_map.weight.shape == (2, 8, 8)
    assert layer.num_kv_heads == 2
    assert layer.decay.up.out_features == 2 * 16  # heads · features


@pytest.mark.parametrize(
    ("name", "kind"),
    [("none", type(None)), ("head", HeadDecay), ("token", TokenDecay), ("channel", ChannelDecay)],
)
def test_decays(name, kind):
    assert type(attentions(decay=name, position="none")[0].decay) is kind


@pytest.mark.parametrize("name", list(FEATURE_MAPS))
def test_every_map_can_be_named(name):
    config = TarnnConfig(feature_map=name, normalize=name != "identity", position="none")
    assert type(make_feature_map(config, 0)) is FEATURE_MAPS[name]
