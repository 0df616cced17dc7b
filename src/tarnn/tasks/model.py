"""The model that a run's settings ask for: preset, then the file of --config, then options; what comes later wins."""

from dataclasses import fields
from typing import Any, TypeVar

from tarnn.errors import UserError
from tarnn.feature_maps import names, options_of
from tarnn.feature_maps.registry import MAPS
from tarnn.huggingface.config import TarnnConfig
from tarnn.json_file import read_json
from tarnn.tasks.settings import RunSettings

C = TypeVar("C", bound=TarnnConfig)
# small enough for a laptop's CPU
MODERN = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}


def chosen(settings: RunSettings) -> dict[str, Any]:
    """The keys of a config that the file of --config and the options name; "a,b" is a pattern over the layers."""
    choices = read_json(settings.config) if settings.config else {}
    for each in fields(settings):
        key, value = each.metadata.get("key"), getattr(settings, each.name)
        if key is not None and value is not None:
            choices[key] = value.split(",") if isinstance(value, str) and "," in value else value
    if options := map_options(settings, choices):
        choices["feature_map_options"] = options
    return choices


def vocabulary(tokenizer: Any) -> dict[str, int]:
    """The keys of a config that the tokenizer decides; its end of a text begins and pads, too."""
    end = tokenizer.eos_token_id
    return {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}


def map_options(settings: RunSettings, choices: dict[str, Any]) -> dict[str, Any]:
    """Join the options of --config and of --map-option; random maps are drawn from --seed by default."""
    maps = choices.get("feature_map", "elu")
    of_config = choices.get("feature_map_options") or {}
    if not isinstance(of_config, dict) or not all(isinstance(x, dict) for x in of_config.values()):
        return of_config  # the config will say what is wrong with it
    options = {MAPS.own_name(name): dict(x) for name, x in of_config.items()}
    for name, own in settings.feature_map_options.items():
        name = MAPS.own_name(name)
        options[name] = options.get(name, {}) | own
    for name in [maps] if isinstance(maps, str) else maps if isinstance(maps, list) else []:
        name = MAPS.own_name(name)
        if name in names() and "seed" in options_of(name):
            options.setdefault(name, {}).setdefault("seed", settings.seed)
    return options


def make_config(
    kind: type[C], settings: RunSettings, choices: dict[str, Any], of_data: dict[str, Any], longest: int | None = None
) -> C:
    """Make a config of that kind: the preset, what was chosen, what the data say, and learned positions for the longest.

    Raises UserError for whatever the config refuses, and for sizes that were chosen otherwise than the data say.
    """
    paper, source = settings.preset == "paper", settings.config or getattr(settings, "start", None)
    for key, value in of_data.items():
        is_size = isinstance(value, int) and not key.endswith("_token_id")
        if is_size and choices.get(key, value) != value:
            raise UserError(f"{key} is {choices[key]} in {source}, but {value} by the data; leave it out.")
    choices = choices | of_data
    if longest is not None and choices.get("position") == "learned":
        choices.setdefault("max_position_embeddings", longest)
    try:
        return kind.paper(**choices) if paper else kind(**MODERN | choices)
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: sizes beyond 64 bits
        where = f"{settings.config}: " if settings.config else ""
        raise UserError(f"{where}{' '.join(str(error).split())}") from error
