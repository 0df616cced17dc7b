"""The families by `model_type` of config.json, and the program of a folder."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from tarnn.errors import UserError
from tarnn.families.config import Config
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program

FAMILIES = {  # model_type: the file of this package that reads it
    "bamba": "bamba",
    "falcon_h1": "falcon_h1",
    "falcon_mamba": "mamba",
    "granitemoehybrid": "granitemoehybrid",
    "jamba": "jamba",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2_moe",
    "lfm3": "lfm3",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_next": "qwen3_next",
    "minimax": "minimax",
    "olmo_hybrid": "olmo_hybrid",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "nemotron_h": "nemotron_h",
    "recurrent_gemma": "recurrent_gemma",
    "rwkv7": "rwkv7",
    "zamba2": "zamba2",
    "tarnn": "own.text",
    "tarnn_image": "own.images",
    "xlstm": "xlstm",
}


def family_of(config: Config) -> Callable[[Config, Weights], Program]:
    """Return the function that writes the program of this config. Raises UserError for a model_type that is not known."""
    name = config.model_type
    if name not in FAMILIES:
        raise UserError(
            f"{config.place}: models of type {name!r:.60} are not handled; expected one of {', '.join(sorted(FAMILIES))}."
        )
    program: Callable[[Config, Weights], Program] = import_module(f"tarnn.families.{FAMILIES[name]}").program
    return program


def open_program(folder: str | Path) -> Program:
    """Read the program of a folder; its weights are mapped, not copied. Raises UserError, in one sentence."""
    config = Config.read(folder)
    return family_of(config)(config, Weights.read(folder))
