"""docs/config.md lists every key, name and option that the code has, and no other."""

import json
import re
from dataclasses import fields
from pathlib import Path

from tarnn.attention.registry import ATTENTIONS, DECAYS
from tarnn.feature_maps import names, options_of
from tarnn.feature_maps.registry import MAPS
from tarnn.models import TarnnConfig, TarnnImageConfig, TarnnModel
from tarnn.registry import arguments_of

PAGE = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, list[str]]:
    """The rows of the table under a heading, by the word in their first cell."""
    section = re.split(r"^## ", PAGE, flags=re.M)
    [text] = [x for x in section if x.startswith(heading + "\n")]
    cells = [[x.strip() for x in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("` "): row[1:] for row in cells}


def test_keys_and_defaults():
    found = rows("Keys") | rows("Keys of image models")
    defaults = {x.name: x.default for x in (*fields(TarnnImageConfig), *fields(TarnnConfig))}
    keys = [*TarnnConfig.known_keys(), *(x for x in TarnnImageConfig.known_keys() if x not in TarnnConfig.known_keys())]
    assert list(found) == keys
    assert {key: row[0] for key, row in found.items()} == {key: f"`{json.dumps(defaults[key])}`" for key in keys}


def test_feature_maps_and_their_options():
    found = rows("Feature maps")
    assert list(found) == names()
    for name, (kind, options) in found.items():
        assert re.match(r"`(\w+)`", kind)[1] == MAPS[name].kind.__name__
        assert set(re.findall(r"`(\w+)`", options)) == options_of(name)


def test_attentions_and_decays():
    for registry, heading in ((ATTENTIONS, "Kinds of attention"), (DECAYS, "Decays")):
        found = rows(heading)
        assert list(found) == registry.names()
        assert [row[0] for row in found.values()] == [f"`{registry[x].kind.__name__}`" for x in found]


def test_options_of_attention_are_what_no_model_gives():
    """Each listed option can be given in a config and arrives in the layer; all other arguments come from the model."""
    own = {
        "gated_delta": {"filter_width": 3},
        "mamba2": {"filter_width": 2, "state_size": 5},
        "window": {"window": 5, "sinks": 2},
    }
    for name, (_, options) in rows("Kinds of attention").items():
        given = {"dropout": 0.25, **own.get(name, {})}
        assert set(re.findall(r"`(\w+)`", options)) == set(given) <= arguments_of(ATTENTIONS[name].kind)
        sizes = {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "causal": name in ("gated_delta", "mamba2", "rwkv7"),
        }
        attention = (
            TarnnModel(TarnnConfig(**sizes, attention=name, attention_options={name: given})).layers[0].attention
        )
        assert attention.dropout.p == 0.25
        for option, value in own.get(name, {}).items():
            assert getattr(attention, option) == (tuple(value) if isinstance(value, list) else value)
