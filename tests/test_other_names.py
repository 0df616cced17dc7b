"""What other libraries call things: errors that name ours, in tables that speak of arguments that are there."""

import inspect

import pytest
import torch

import tarnn
from tarnn import LinearAttention, SoftmaxAttention, TarnnConfig
from tarnn.attention.multihead import MultiHeadAttention
from tarnn.feature_maps import make, names
from tarnn.other_names import CONFIG, DELTA, FORWARD, FUNCTION, LAYER
from tarnn.registry import arguments_of

FUNCTIONS = (tarnn.linear_attention, tarnn.softmax_attention, tarnn.hybrid_attention, tarnn.step)


def arguments(*functions):
    of = lambda f: arguments_of(f) if isinstance(f, type) else inspect.signature(f).parameters  # noqa: E731
    return {name for f in functions for name in of(f)}


TABLES = {
    "functions": (FUNCTION, arguments(*FUNCTIONS), arguments(tarnn.linear_attention)),
    "delta": (DELTA, arguments(tarnn.delta_rule, tarnn.delta_step), arguments(tarnn.delta_rule)),
    "layers": (LAYER, *[arguments(LinearAttention)] * 2),
    "forward": (FORWARD, arguments(MultiHeadAttention.forward, LinearAttention), arguments(MultiHeadAttention.forward)),
    "config": (CONFIG, *[set(TarnnConfig.known_keys())] * 2),
}


@pytest.mark.parametrize("table", TABLES)
def test_the_tables_name_arguments_that_are_there(table):
    theirs, known, taken = TABLES[table]
    assert not {name for names in theirs.values() for name in names.split()} & taken
    for name in theirs:
        first = name.replace("=", ",").replace(" ", ",").split(",")[0]
        assert first in known | {"nothing:", "nothing", "return_weights"}, name


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_function_names_ours(function):
    q = torch.randn(1, 2, 1, 4)
    with pytest.raises(TypeError, match=r"argument 'is_causal'. In its place tarnn takes causal."):
        function(q, q, q, is_causal=True)
    with pytest.raises(TypeError, match=r"argument 'nonsense'$"):
        function(q, q, q, nonsense=True)


@pytest.mark.parametrize("function", [tarnn.delta_rule, tarnn.delta_step], ids=lambda f: f.__name__)
def test_the_delta_rule_names_ours(function):
    q = torch.randn(1, 2, 1, 4)
    with pytest.raises(TypeError, match=r"argument 'use_qk_l2norm_in_kernel'. In its place tarnn takes normalize_qk."):
        function(q, q, q, q[..., 0], use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize("layer", [LinearAttention, SoftmaxAttention])
def test_a_layer_names_ours(layer):
    with pytest.raises(TypeError, match=r"argument 'embed_dim'. In its place tarnn takes hidden_size."):
        layer(embed_dim=8, num_heads=2, causal=True)
    with pytest.raises(TypeError, match=r"no argument 'attn_mask'. In its place tarnn takes key_mask \(b, s\)"):
        layer(8, 2, causal=True)(torch.randn(1, 3, 8), attn_mask=None)


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
