"""Whatever bytes stand in a folder: it opens, or one UserError says what is wrong."""

import contextlib
import json

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save

from tarnn.errors import UserError
from tarnn.families.config import Config
from tarnn.families.generation import read_generation
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b.c": torch.ones(5, dtype=torch.bfloat16), "d": torch.tensor(3)}
CONFIG = {
    "model_type": "llama", "hidden_size": 48, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "num_hidden_layers": 2, "layer_types": ["a", "b"], "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 1e4, "eos_token_id": [2, 3], "text_config": None, "time_step_limit": [0.0, {"__float__": "Infinity"}],
}  # fmt: skip

damages = st.lists(
    st.tuples(st.floats(0, 0.999), st.sampled_from(["set", "cut", "insert"]), st.binary(min_size=1, max_size=9)),
    min_size=1,
    max_size=4,
)


def damaged(data, changes):
    data = bytearray(data)
    for place, kind, new in changes:
        at = int(place * len(data))
        if kind == "cut":
            del data[at : at + new[0]]
        else:
            data[at : at + (len(new) if kind == "set" else 0)] = new
    return bytes(data)


@given(changes=damages)
@settings(max_examples=300, deadline=None)
def test_files_of_weights(tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("weights")
    (folder / "model.safetensors").write_bytes(damaged(save(TENSORS), changes))
    with contextlib.suppress(UserError):
        weights = Weights.read(folder)
        for name in list(weights):
            assert tuple(weights[name].shape) == weights.shape(name)
            weights[name].double().sum()


@given(changes=damages)
@settings(max_examples=300, deadline=None)
def test_indices_of_weights(tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("index")
    (folder / "one.safetensors").write_bytes(save(TENSORS))
    index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(TENSORS, "one.safetensors")})
    (folder / "model.safetensors.index.json").write_bytes(damaged(index.encode(), changes))
    with contextlib.suppress(UserError):
        assert set(Weights.read(folder)) == set(TENSORS)


def read_all(config, folder):
    config = config.text()
    config.size("hidden_size")
    config.number("rms_norm_eps", 1e-6, least=0)
    config.choice("hidden_act", "silu")
    config.flag("tie_word_embeddings", False)
    config.choices("layer_types", "a", "b", length=config.size("num_hidden_layers"))
    config.numbers("time_step_limit", length=2, infinite=True)
    assert rope_of(config, 8).frequencies().isfinite().all()
    read_generation(folder, config, 10)
    config.check_all_taken()


@given(changes=damages)
@settings(max_examples=300, deadline=None)
def test_configs(tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_bytes(damaged(json.dumps(CONFIG).encode(), changes))
    with contextlib.suppress(UserError):
        read_all(Config.read(folder), folder)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just({"__float__": "NaN"}),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@given(key=st.sampled_from(sorted(CONFIG)), value=values)
@settings(max_examples=300, deadline=None)
def test_values_of_configs(tmp_path_factory, key, value):
    with contextlib.suppress(UserError):
        read_all(Config(CONFIG | {key: value}), tmp_path_factory.getbasetemp())


def test_the_undamaged_ones_open(tmp_path):
    read_all(Config(CONFIG), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(save(TENSORS))
    assert set(Weights.read(tmp_path)) == set(TENSORS)
    with pytest.raises(UserError, match="odd"):
        read_all(Config(CONFIG | {"odd": 3}), tmp_path)
