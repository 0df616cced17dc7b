"""Values of a config come in their type, or one sentence names the key; a key that nobody took is refused."""

import json

import pytest

from tarnn.errors import UserError
from tarnn.families.config import Config


def test_values_come_in_their_type():
    config = Config({
        "hidden_size": 48, "eps": 1, "tie": True, "act": "silu", "head_dim": None, "model_type": "llama",
        "kinds": ["a", "b", "a"], "limit": [0.0, {"__float__": "Infinity"}], "at": [0, 2],
    })  # fmt: skip
    assert config.size("hidden_size") == 48
    assert (config.number("eps"), type(config.number("eps"))) == (1.0, float)
    assert config.flag("tie") is True
    assert config.choice("act", "gelu", "silu") == "silu"
    assert config.choice("absent", "gelu", "silu") == "gelu"
    assert config.choices("kinds", "a", "b", length=3) == ("a", "b", "a")
    assert config.numbers("limit", length=2, infinite=True) == (0.0, float("inf"))
    assert config.sizes("at") == (0, 2)
    assert config.model_type == "llama"


def test_null_counts_as_absent_and_can_be_told_from_it():
    config = Config({"head_dim": None})
    assert config.size("head_dim", 16) == 16
    assert config.size("head_dim", None) is None
    assert config.number("eps", None) is None
    assert "head_dim" in config
    assert "window" not in config
    assert config.sizes("at", (1,)) == (1,)


NAN, INF = float("nan"), float("inf")
WRONG = {  # a value and the way it is read → what the sentence says
    "no key": ({}, lambda c: c.size("n"), "lacks n"),
    "null without a default": ({"n": None}, lambda c: c.size("n"), "lacks n"),
    "a size of 0": ({"n": 0}, lambda c: c.size("n"), "n must be a whole number from 1 to 16,777,216 here; got 0"),
    "a negative size": ({"n": -3}, lambda c: c.size("n", least=0), "from 0 to"),
    "a billion heads": ({"num_heads": 10**9}, lambda c: c.size("num_heads"), "num_heads .* from 1 to 65,536"),
    "a billion layers": ({"num_hidden_layers": 10**9}, lambda c: c.size("num_hidden_layers"), "from 1 to 65,536"),
    "a size of 10^80": ({"n": 10**80}, lambda c: c.size("n"), "n must be"),
    "a size that is a float": ({"n": 4.0}, lambda c: c.size("n"), "whole number .* got 4.0"),
    "a size that is true": ({"n": True}, lambda c: c.size("n"), "whole number .* got True"),
    "a size that is a text": ({"n": "4"}, lambda c: c.size("n"), "whole number .* got '4'"),
    "NaN": ({"n": NAN}, lambda c: c.number("n"), "n must be a finite number here; got nan"),
    "an infinity": ({"n": INF}, lambda c: c.number("n"), "a finite number here; got inf"),
    "an infinity spelled": ({"n": {"__float__": "Infinity"}}, lambda c: c.number("n"), "a finite number here; got inf"),
    "NaN spelled": ({"n": {"__float__": "NaN"}}, lambda c: c.number("n"), "finite number here; got {'__float__'"),
    "code spelled": ({"n": {"__float__": "1+1"}}, lambda c: c.number("n"), "finite number here; got {'__float__'"),
    "beyond float32": ({"n": 10**60}, lambda c: c.number("n"), "a finite number"),
    "out of bounds": ({"n": -1e-6}, lambda c: c.number("n", least=0, most=1), "a finite number from 0 to 1 here; got -1e"),
    "a number as text": ({"n": "1e-6"}, lambda c: c.number("n"), "got '1e-6'"),
    "a flag of 1": ({"n": 1}, lambda c: c.flag("n"), "n must be true or false here; got 1"),
    "a word of 3": ({"n": 3}, lambda c: c.word("n"), "n must be a text here; got 3"),
    "another activation": ({"n": "relu"}, lambda c: c.choice("n", "silu", "gelu"), "'silu' or 'gelu' here; got 'relu'"),
    "0 for false": ({"n": 0}, lambda c: c.choice("n", False), "n must be False here; got 0"),
    "a list too long": ({"n": ["a"] * 3}, lambda c: c.choices("n", "a", length=2), "n must be a list of 2"),
    "a kind in a list": ({"n": ["a", "x"]}, lambda c: c.choices("n", "a", length=2), "a list of 'a' here; got 'x'"),
    "a list in a list": ({"n": [[], "a"]}, lambda c: c.choices("n", "a", length=2), r"got \[\]"),
    "no list": ({"n": 3}, lambda c: c.sizes("n"), "n must be a list here; got 3"),
    "an infinity in a list": ({"n": [0.0, INF]}, lambda c: c.numbers("n", length=2), "finite number here; got inf"),
    "NaN in a list": ({"n": [NAN]}, lambda c: c.numbers("n", length=1, infinite=True), "a number here; got nan"),
    "a negative place": ({"n": [-1]}, lambda c: c.sizes("n"), "whole number from 0"),
    "no object": ({"n": 3}, lambda c: c.inner("n"), "n must be an object"),
    "no model_type": ({}, lambda c: c.model_type, "lacks model_type"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_value_is_named(kind):
    fields, read, message = WRONG[kind]
    with pytest.raises(UserError, match=f"the config.*{message}"):
        read(Config(fields))


def test_a_key_that_nobody_took_is_refused_by_name():
    config = Config({"hidden_size": 8, "architectures": ["X"], "hidden_dropout_prob": 0.5, "logit_scale": 0.25})
    config.size("hidden_size")
    with pytest.raises(UserError, match=r"logit_scale = 0.25 is not known for this family"):
        config.check_all_taken()
    config.check_all_taken(["logit_*"])
    config.skip("logit_scale")
    config.check_all_taken()


def test_a_key_is_harmless_with_one_value_alone():
    Config({"add_cross_attention": False, "pruned_heads": {}, "rope_scaling": None}).check_all_taken()
    with pytest.raises(UserError, match="add_cross_attention = True"):
        Config({"add_cross_attention": True}).check_all_taken()


def test_keys_of_an_inner_object_are_looked_at_too():
    config = Config({"rope": {"theta": 1e4, "odd": 3}})
    assert config.inner("rope").number("theta") == 1e4
    with pytest.raises(UserError, match="the config, rope: odd = 3"):
        config.check_all_taken()
    config.inner("rope").skip("odd")
    config.check_all_taken()


def test_code_of_a_folder_is_refused():
    with pytest.raises(UserError, match="wants code of its own"):
        Config({"auto_map": {"AutoModel": "modeling.Model"}}).check_all_taken()
    # of a family that needs none of it
    Config({"auto_map": {"AutoModel": "modeling.Model"}}).check_all_taken(["auto_map"])


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "bitsandbytes", "fp8"])
def test_a_quantised_folder_is_refused_by_its_method(method):
    with pytest.raises(UserError, match=rf"quantised \({method}\), which tarnn does not read. Take"):
        Config({"quantization_config": {"quant_method": method}})
    with pytest.raises(UserError, match="the config, text_config: the weights are quantised"):
        Config({"text_config": {"quantization_config": {"quant_method": method}}}).text()


def test_the_text_model_of_a_composite():
    fields = {
        "model_type": "qwen3_5", "tie_word_embeddings": True, "vision_config": {"depth": 27}, "image_token_id": 7,
        "text_config": {"model_type": "qwen3_5_text", "hidden_size": 32, "tie_word_embeddings": False},
    }  # fmt: skip
    text = Config(fields).text()
    assert text.model_type == "qwen3_5_text"
    assert text.size("hidden_size") == 32
    assert text.flag("tie_word_embeddings") is True
    text.check_all_taken()
    odd = Config(fields | {"logit_scale": 3}).text()
    odd.skip("hidden_size", "tie_word_embeddings")
    with pytest.raises(UserError, match="the config: logit_scale = 3"):
        odd.check_all_taken()
    alone = Config({"hidden_size": 3})
    assert alone.text() is alone


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"n": 3, "n": 4}', "'n' stands twice"),
        ('{"a": {"n": 3, "n": 4}}', "'n' stands twice"),
        ('{"a": ' * 100_000, "is not JSON"),
        ("[" * 100_000 + "]" * 100_000, "is not JSON"),
        ("[3]", "must hold a JSON object"),
        ('{"n": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"n": 3', "is not JSON"),
        ('{"n": __float__}', "is not JSON"),
    ],
)
def test_a_file_that_is_no_config(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        Config.read(tmp_path)
    assert len(str(error.value)) < 400


def test_a_file_is_read(tmp_path):
    with pytest.raises(UserError, match=r"there is no config.json in it"):
        Config.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 3}))
    assert Config.read(tmp_path).size("hidden_size") == 3
    with pytest.raises(UserError, match=r"config\.json lacks vocab_size"):
        Config.read(tmp_path).size("vocab_size")
