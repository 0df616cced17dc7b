"""The model that a run's settings ask for."""

import inspect
import json
from pathlib import Path
from typing import Any, TypeVar

from tarnn.errors import UserError
from tarnn.models import TarnnConfig, TarnnImageConfig
from tarnn.models.choices import FEATURE_MAPS
from tarnn.training.settings import ImageSettings, RunSettings, TrainSettings

C = TypeVar("C", bound=TarnnConfig)
# small enough for a laptop's CPU
MODERN = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
OPTIONS = {
    "hidden_size": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "decay": "decay", "position": "position", "dropout": "dropout",
}  # fmt: skip


def model_config(settings: TrainSettings, tokenizer=None) -> TarnnConfig:
    """Preset, then the file of --config, then options: what comes later wins.

    The vocabulary is the tokenizer's. Without one, which may be long in the making, all else is checked.

    Raises UserError for whatever the config refuses (an unknown key, sizes that don't fit), and for a context
    beyond the positions that the model has.
    """
    choices = chosen(settings)
    if choices.get("position") == "learned":
        choices.setdefault("max_position_embeddings", settings.context)
    if tokenizer is not None:
        choices |= vocabulary(choices, tokenizer, settings.config)
    config = make_config(TarnnConfig, settings, choices)
    longest = config.max_position_embeddings
    if longest is not None and settings.context > longest:
        raise UserError(
            f"--context {settings.context} is beyond the {longest} positions of the model "
            "(max_position_embeddings); expected at most as many, or raise that number in --config."
        )
    return config


def image_config(
    settings: ImageSettings, shape: tuple[int, int, int], num_classes: int = 0
) -> TarnnImageConfig:
    """The same for images of that (height, width, channels), which are the data's to say, as is the number of classes."""
    choices = chosen(settings)
    if settings.likelihood is not None:
        choices["likelihood"] = settings.likelihood
    if settings.mixtures is not None:
        choices["num_mixtures"] = settings.mixtures
    of_data = dict(zip(("image_height", "image_width", "num_channels"), shape), num_classes=num_classes)
    for name, value in of_data.items():
        if choices.get(name, value) != value:
            raise UserError(
                f"{name} is {choices[name]} in {settings.config}, but {value} by the images and --class-conditional; "
                "leave it out."
            )
    return make_config(TarnnImageConfig, settings, choices | of_data)


def chosen(settings: RunSettings) -> dict[str, Any]:
    """The keys of a config that the file of --config and the options name."""
    choices = read_config(settings.config) if settings.config else {}
    for name, key in OPTIONS.items():
        if getattr(settings, name) is not None:
            choices[key] = getattr(settings, name)
    for key in ("attention", "feature_map"):  # "a,b" is a pattern over the layers
        if (value := getattr(settings, key)) is not None:
            choices[key] = value.split(",") if "," in value else value
    if options := map_options(settings, choices):
        choices["feature_map_options"] = options
    return choices


def map_options(settings: RunSettings, choices: dict[str, Any]) -> dict[str, Any]:
    """Those of --config, then those of --map-option; random maps are drawn from --seed unless told otherwise."""
    maps = choices.get("feature_map", "elu")
    given = choices.get("feature_map_options") or {}
    if not isinstance(given, dict) or not all(isinstance(x, dict) for x in given.values()):
        return given  # the config will say what is wrong with it
    options = {name: dict(x) for name, x in given.items()}
    for name, own in settings.feature_map_options.items():
        options[name] = options.get(name, {}) | own
    for name in [maps] if isinstance(maps, str) else maps if isinstance(maps, list) else []:
        if isinstance(name, str) and "seed" in inspect.signature(FEATURE_MAPS.get(name, object)).parameters:
            options.setdefault(name, {}).setdefault("seed", settings.seed)
    return options


def make_config(kind: type[C], settings: RunSettings, choices: dict[str, Any]) -> C:
    """A config of that kind: the preset, and what was chosen beside it."""
    paper = settings.preset == "paper"
    try:
        return kind.paper(**choices) if paper else kind(**MODERN | choices)
    except (ValueError, TypeError) as error:
        where = f"{settings.config}: " if settings.config else ""
        raise UserError(f"{where}{' '.join(str(error).split())}") from error


def vocabulary(choices: dict[str, Any], tokenizer, config: Path | None) -> dict[str, int]:
    """The keys of the config that are the tokenizer's to say."""
    size, end = len(tokenizer), tokenizer.eos_token_id
    if choices.get("vocab_size", size) != size:
        raise UserError(
            f"vocab_size is {choices['vocab_size']} in {config}, but the tokenizer has {size} ids; leave it "
            "out."
        )
    return {"vocab_size": size, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file: keys of `TarnnConfig`, such as another checkpoint's config.json."""
    if not path.is_file():
        raise UserError(f"--config {path}: no such file; expected a JSON object of TarnnConfig's keys.")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"--config {path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise UserError(f"--config {path} holds a JSON {type(content).__name__}; expected an object.")
    return content
