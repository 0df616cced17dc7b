"""Ends and defaults of sampling come from generation_config.json, ends otherwise from config.json."""

import json

import pytest
from transformers import GenerationConfig

from tarnn.errors import UserError
from tarnn.families.config import Config
from tarnn.families.generation import Generation, read_generation


def written(folder, **fields):
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_the_file_counts_more_than_the_config(tmp_path):
    config = Config({"eos_token_id": 2, "pad_token_id": 3})
    assert read_generation(tmp_path, config, 10) == Generation(frozenset({2}), 3)
    assert read_generation(tmp_path, Config({"eos_token_id": [2, 4], "pad_token_id": -1}), 10).end_ids == {2, 4}
    assert read_generation(tmp_path, Config({}), 10) == Generation()
    written(tmp_path, eos_token_id=[7, 8], do_sample=True, temperature=0.7, top_k=20, top_p=0.8, min_p=0)
    expected = Generation(frozenset({7, 8}), 3, True, 0.7, 20, 0.8, 0.0)
    assert read_generation(tmp_path, config, 10) == expected
    written(tmp_path, eos_token_id=None, repetition_penalty=1.05, transformers_version="5", odd={"x": []})
    assert read_generation(tmp_path, config, 10) == Generation(frozenset({2}), 3, repetition_penalty=1.05)


def test_a_file_of_transformers(tmp_path):
    GenerationConfig(eos_token_id=[5], temperature=0.6, top_p=0.95, do_sample=True).save_pretrained(tmp_path)
    found = read_generation(tmp_path, Config({}), 10)
    assert (found.end_ids, found.temperature, found.top_p, found.do_sample) == ({5}, 0.6, 0.95, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eos_token_id": 10}, "eos_token_id must be a token below 10, or a list of them; got 10"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id must be .* got \[1, -1\]"),
        ({"eos_token_id": "2"}, "eos_token_id must be .* got '2'"),
        ({"eos_token_id": [True]}, r"eos_token_id must be .* got \[True\]"),
        ({"pad_token_id": "0"}, "pad_token_id must be"),
        ({"temperature": -0.1}, "temperature must be a finite number from 0"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_k": -1}, "top_k must be a whole number from 0"),
        ({"top_k": 2.5}, "top_k must be"),
        ({"top_p": 1.5}, "top_p must be a finite number from 0 to 1"),
        ({"min_p": -1}, "min_p must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be"),
        ({"do_sample": "yes"}, "do_sample must be true or false"),
    ],
)
def test_values_that_are_not_possible(tmp_path, fields, message):
    with pytest.raises(UserError, match=f"generation_config.json: {message}"):
        read_generation(written(tmp_path, **fields), Config({}), 10)


def test_a_config_with_an_end_beyond_its_vocabulary(tmp_path):
    with pytest.raises(UserError, match="the config: eos_token_id must be a token below 10"):
        read_generation(tmp_path, Config({"eos_token_id": 10}), 10)
    assert read_generation(tmp_path, Config({"pad_token_id": 10}), 10).pad_id is None
