"""The model that a run's settings ask for: preset, then the file of --config, then options; what comes later wins."""

from typing import Any, TypeVar

from tarnn.errors import UserError
from tarnn.feature_maps import names, options_of
from tarnn.feature_maps.registry import MAPS
from tarnn.json_file import read_json
from tarnn.models import TarnnConfig
from tarnn.tasks.settings import RunSettings

C = TypeVar("C", bound=TarnnConfig)
# small enough for a laptop's CPU
MODERN = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
OPTIONS = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "decay": "decay",
    "position": "position",
    "dropout": "dropout",
}


def chosen(settings: RunSettings) -> dict[str, Any]:
    """The keys of a config that the file of --config and the options name."""
    choices = read_json(settings.config) if settings.config else {}
    for name, key in OPTIONS.items():
        if getattr(settings, name) is not None:
            choices[key] = getattr(settings, name)
    for key in ("attention", "feature_map"):
        if (value := getattr(settings, key)) is not None:
            choices[key] = pattern(value)
    if options := map_options(settings, choices):
        choices["feature_map_options"] = options
    return choices


def pattern(value: str) -> str | list[str]:
    """A pattern over the layers, "a,b", as a list."""
    return value.split(",") if "," in value else value


def vocabulary(tokenizer: Any) -> dict[str, int]:
    """The keys of a config that the tokenizer decides; its end of a text begins and pads, too."""
    end = tokenizer.eos_token_id
    return {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}


def map_options(settings: RunSettings, choices: dict[str, Any]) -> dict[str, Any]:
    """Those of --config, then those of --map-option; random maps are drawn from --seed unless asked otherwise."""
    maps = choices.get("feature_map", "elu")
    given = choices.get("feature_map_options") or {}
    if not isinstance(given, dict) or not all(isinstance(x, dict) for x in given.values()):
        return given  # the config will say what is wrong with it
    options = {MAPS.own_name(name): dict(x) for name, x in given.items()}
    for name, own in settings.feature_map_options.items():
        name = MAPS.own_name(name)
        options[name] = options.get(name, {}) | own
    for name in [maps] if isinstance(maps, str) else maps if isinstance(maps, list) else []:
        name = MAPS.own_name(name)
        if name in names() and "seed" in options_of(name):
            options.setdefault(name, {}).setdefault("seed", settings.seed)
    return options


def make_config(kind: type[C], settings: RunSettings, choices: dict[str, Any]) -> C:
    """A config of that kind: the preset, and what was chosen beside it."""
    paper = settings.preset == "paper"
    try:
        return kind.paper(**choices) if paper else kind(**MODERN | choices)
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: sizes beyond 64 bits
        where = f"{settings.config}: " if settings.config else ""
        raise UserError(f"{where}{' '.join(str(error).split())}") from error
