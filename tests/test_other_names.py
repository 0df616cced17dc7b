"""Names of other libraries: errors of layers and configs that name ours, in tables that speak of arguments that are there."""

import inspect

import pytest
import torch

import tarnn
from tarnn import LinearAttention, TarnnConfig
from tarnn.attention.multihead import MultiHeadAttention
from tarnn.feature_maps import make, names
from tarnn.other_names import CONFIG, FORWARD
from tarnn.registry import arguments_of


def test_the_tables_name_arguments_that_are_there():
    taken = set(inspect.signature(MultiHeadAttention.forward).parameters)
    layers, config = {*taken, *arguments_of(LinearAttention), "return_weights"}, set(TarnnConfig.known_keys())
    for table, known, refused in ((FORWARD, layers, taken), (CONFIG, config, config)):
        assert not {name for theirs in table.values() for name in theirs.split()} & refused
        assert {name.replace("=", ",").replace(" ", ",").split(",")[0] for name in table} <= known


def test_the_forward_of_a_layer_names_ours():
    with pytest.raises(TypeError, match=r"no argument 'attn_mask'. In its place tarnn takes key_mask \(b, s\)"):
        LinearAttention(8, 2, causal=True)(torch.randn(1, 3, 8), attn_mask=None)


def test_a_config_names_ours():
    with pytest.raises(ValueError, match=r"Did you mean hidden_size, num_hidden_layers, norm_eps\?"):
        TarnnConfig(d_model=8, n_layers=2, norm_epz=1e-5)
    with pytest.raises(ValueError, match=r"got 'rotery'. Did you mean 'rotary'\?"):
        TarnnConfig(position="rotery")


def test_performer_means_favor():
    """In functions, layers and configs, which keep the one name."""
    assert "performer" not in names()
    assert type(make("performer", head_dim=8)) is tarnn.PositiveRandomFeatures
    q = torch.randn(1, 2, 5, 8)
    expected = tarnn.linear_attention(q, q, q, "favor", causal=True)
    assert torch.equal(tarnn.linear_attention(q, q, q, "performer", causal=True), expected)
    config = TarnnConfig(feature_map=["performer", "elu"], feature_map_options={"performer": {"num_features": 8}})
    assert config.feature_map == ["favor", "elu"]
    assert config.feature_map_options == {"favor": {"num_features": 8}}
    with pytest.raises(ValueError, match=r"got 'performr'. Did you mean 'performer'"):
        TarnnConfig(feature_map="performr")
