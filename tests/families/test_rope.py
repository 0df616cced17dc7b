"""Frequencies have the bits of transformers' for every way to write them in a config; other types are refused."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tarnn.errors import UserError
from tarnn.families.config import Config
from tarnn.families.rope import Rope, rope_of

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 256}
SPELLED = {
    "nothing": {},
    "transformers 4": {"rope_theta": 500_000.0},
    "transformers 5": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "theta of whole numbers": {"rope_theta": 1_000_000},
    "linear of 4": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "linear of 5": {"rope_parameters": {"rope_type": "linear", "factor": 3, "rope_theta": 1e4}},
    "llama3 of 4": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama3 of 5": {
        "rope_parameters": LLAMA3 | {"rope_theta": 1e4, "factor": 7.3, "original_max_position_embeddings": 64}
    },
    "proportional": {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.4}},
    "proportional by 2": {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6, "factor": 2.0}},
    "theta inside and beside": {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
}


@pytest.mark.parametrize("spelled", SPELLED)
@pytest.mark.parametrize("head_dim", [10, 64, 128])
def test_frequencies_have_the_bits_of_transformers(spelled, head_dim):
    fields = SPELLED[spelled]
    expected = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_dim, **fields)).inv_freq
    config = Config(fields)
    frequencies = rope_of(config, head_dim).frequencies()
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, expected)
    config.check_all_taken()


@pytest.mark.parametrize("inside", [True, False])
def test_a_part_of_the_channels(inside):
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    rotary = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    part = {"partial_rotary_factor": 0.25}
    fields = {"rope_parameters": rotary | part} if inside else {"rope_parameters": rotary} | part
    rope = rope_of(Config(fields), 64)
    assert rope == Rope(1e7, 16)
    expected = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(head_dim=64, **fields)).inv_freq
    assert torch.equal(rope.frequencies(), expected)
    assert rope_of(Config({}), 64, theta=3.0, partial=0.5) == Rope(3.0, 32)


def test_rotations_by_kind_of_layer():
    kinds = {"full": {"rope_type": "default", "rope_theta": 1e6}, "window": {"rope_type": "default", "rope_theta": 1e4}}
    config = Config({"rope_parameters": kinds})
    assert rope_of(config, 8, layer_type="full").theta == 1e6
    with pytest.raises(UserError, match=r"window = .* is not known"):
        config.check_all_taken()
    assert rope_of(config, 8, layer_type="window").theta == 1e4
    config.check_all_taken()


REFUSED = {
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "type 'yarn' are not handled; expected default, lin"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "type 'dynamic'"),
    "longrope": ({"rope_parameters": {"rope_type": "longrope"}}, "type 'longrope'"),
    "no name": ({"rope_parameters": {"rope_type": ["default"]}}, r"type \['default'\]"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling lacks factor"),
    "a factor of 0": ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be .* from 1"),
    "bands that meet": ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor must be"),
    "two thetas": ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta must be 1000000.0, as in rope_p"),
    "theta of 0": ({"rope_theta": 0}, "rope_theta must be"),
    "theta of NaN": ({"rope_theta": float("nan")}, "rope_theta must be"),
    "more than all": ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be"),
    "none": ({"partial_rotary_factor": 0.1}, "0 of 8 channels would be rotated"),
    "an odd number": ({"partial_rotary_factor": 0.4}, "3 of 8 channels would be rotated"),
    "a list": ({"rope_parameters": [1]}, "rope_parameters must be an object"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind):
    fields, message = REFUSED[kind]
    with pytest.raises(UserError, match=message):
        rope_of(Config(fields), 8)


def test_a_rotary_key_that_is_not_known():
    config = Config({"rope_parameters": {"rope_type": "default", "attention_factor": 1.2}})
    rope_of(config, 8)
    with pytest.raises(UserError, match=r"the config, rope_parameters: attention_factor = 1\.2 is not known"):
        config.check_all_taken()
