"""From a config's names to layers."""

import pytest
import torch

from tarnn.attention import LinearAttention, NoAttention, SoftmaxAttention
from tarnn.feature_maps import Dpfp, Elu, PositiveRandomFeatures, Reparametrized, names
from tarnn.feature_maps.registry import MAPS
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.models.build_layers import make_feature_map
from tarnn.models.config import ModelConfig


def attentions(**options):
    config = TarnnConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, **options)
    return [block.attention for block in TarnnForCausalLM(config).model.layers]


def test_patterns_become_layers():
    layers = attentions(
        attention=["linear", "softmax", "none", "linear"],
        feature_map=["elu", "dpfp"],
        position="rotary",
        rotary_base=77.0,
        decay="none",
        feature_map_options={"dpfp": {"nu": 3}},
    )
    assert [type(layer) for layer in layers] == [LinearAttention, SoftmaxAttention, NoAttention, LinearAttention]
    assert [type(layer.feature_map) for layer in (layers[0], layers[3])] == [Elu, Dpfp]
    assert layers[3].feature_map.nu == 3
    rotaries = [(layer.rotary.dim, layer.rotary.base) for layer in (layers[0], layers[1], layers[3])]
    assert rotaries == [(8, 77.0), (8, 77.0), (48, 77.0)]  # as wide as the features: 2·3·8 for dpfp


SIGNED = ("identity", "trigonometric", "gaussian")


@pytest.mark.parametrize("name", names())
def test_every_map_can_be_named(name):
    config = ModelConfig(feature_map=name, normalize=name not in SIGNED, position="none", max_position_embeddings=64)
    made = make_feature_map(config, 0)
    assert type(made.inner) is MAPS[name].kind
    assert isinstance(made, Reparametrized) == (name == "saderf")


def test_options_of_random_features():
    options = {"favor": {"num_features": 24, "seed": 3, "directions": "iid", "centre": True}}
    layers = attentions(feature_map="favor", feature_map_options=options, num_key_value_heads=2)
    phi = layers[0].feature_map
    assert isinstance(phi, Reparametrized)
    assert (phi.centre, phi.balance, phi.num_heads) == (True, False, 2)
    assert (phi.feature_map.num_draws, phi.feature_map.directions) == (24, "iid")
    seeds = [int(layer.feature_map.feature_map.seed) for layer in layers]
    assert seeds == [300_000, 300_001, 300_002, 300_003]
    omegas = [layer.feature_map.feature_map.omega for layer in layers]
    assert not torch.allclose(omegas[0], omegas[1])  # layers that err in different places


def test_an_object_stands_for_its_name_and_options():
    phi = PositiveRandomFeatures(8, 24, seed=3)
    layers = attentions(feature_map=[Reparametrized(phi, balance=False), Dpfp(2)], position="none")
    by_name = attentions(
        feature_map=["favor", "dpfp"],
        position="none",
        feature_map_options={"favor": {"num_features": 24, "seed": 3, "centre": True}, "dpfp": {"nu": 2}},
    )
    assert [repr(x.feature_map) for x in layers] == [repr(x.feature_map) for x in by_name]
    omegas = [x[2].feature_map.feature_map.omega for x in (layers, by_name)]
    assert torch.equal(*omegas)
    assert not torch.equal(omegas[0], phi.omega)  # a map of each layer's own
