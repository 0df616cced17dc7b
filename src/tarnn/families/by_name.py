"""The families by `model_type` of config.json, and the program of a folder."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from tarnn.errors import UserError
from tarnn.families.composites import COMPOSITES, text_of
from tarnn.families.config import Config
from tarnn.families.weights import MissingWeights, Weights
from tarnn.program.instructions import Program

Written = TypeVar("Written", bound=Program | None)
FAMILIES = {  # model_type: the file of this package that reads it
    **dict.fromkeys(COMPOSITES, "composites"),
    "bailing_hybrid": "bailing_hybrid",
    "bamba": "bamba",
    "falcon_h1": "falcon_h1",
    "falcon_mamba": "mamba",
    "granitemoehybrid": "granitemoehybrid",
    "jamba": "jamba",
    "kimi_linear": "kimi_linear",
    "lara_mini": "lara_mini",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2_moe",
    "lfm3": "lfm3",
    "llama": "llama",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "minimax": "minimax",
    "mistral": "llama",
    "nemotron_h": "nemotron_h",
    "olmo_hybrid": "olmo_hybrid",
    "qwen2": "llama",
    "qwen3": "llama",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_next": "qwen3_next",
    "recurrent_gemma": "recurrent_gemma",
    "rwkv7": "rwkv7",
    "tarnn": "own.text",
    "tarnn_image": "own.images",
    "xlstm": "xlstm",
    "zamba": "zamba",
    "zamba2": "zamba2",
}

HYPER = "hyper-connections between several residual streams, and an indexer that picks the keys of its attention"
GRANITE = "a plain Granite model of text, with softmax in all layers and multipliers"
INKLING = "scores of softmax with a bias for each distance, which every query makes for itself"
INKLING_2 = "filters whose taps the token itself makes, and attention over what earlier layers put out"
INKLING_LOOP = "layers that run several times over and send each other messages"
QWEN_4 = "embeddings of n-grams by hashes, gated residuals, and an indexer that picks the keys of its attention"
ZAYA = "filters across the channels of a head, and routers that read those of the layer before"
LACKING = {  # model_type: what tarnn has not, for models that are not among FAMILIES
    **dict.fromkeys(("glm5_next", "glm5_next_text"), HYPER),
    **dict.fromkeys(("granite4_vision", "granite4_vision_text"), GRANITE),
    **dict.fromkeys(("inkling_mm_model", "inkling_text"), INKLING),
    **dict.fromkeys(("inkling2", "inkling2_text"), INKLING_2),
    **dict.fromkeys(("inkling2_loop", "inkling2_loop_text"), INKLING_LOOP),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), QWEN_4),
    "nemo_speechlm": "a reader of the text model inside this model of sound",
    "nemotron_h_omni": "a reader of the text model inside this model of images and sound",
    "rwkv": "RWKV-4's recurrence, per channel and with a bonus for the token itself (RWKV-7 opens)",
    "zaya": ZAYA,
}
DRAFTS = {"qwen3_5": "qwen3_5_mtp", "qwen3_5_text": "qwen3_5_mtp"}  # files of heads that expect the token after next


def family_of(config: Config) -> Callable[[Config, Weights], Program]:
    """Return the function that writes the program of this config. Raises UserError for a model_type that is not known."""
    name = config.model_type
    if name not in FAMILIES and name in LACKING:
        raise UserError(f"{config.place}: models of type {name!r:.60} are not handled: tarnn lacks {LACKING[name]}.")
    if name not in FAMILIES:
        raise UserError(
            f"{config.place}: models of type {name!r:.60} are not handled; expected one of {', '.join(sorted(FAMILIES))}."
        )
    if name in COMPOSITES:
        return program_of_text
    return partial(naming_missing, import_module(f"tarnn.families.{FAMILIES[name]}").program)


def naming_missing(program: Callable[[Config, Weights], Written], config: Config, weights: Weights) -> Written:
    """Write a program. Where weights are missing, the UserError names the first ten."""
    try:
        return program(config, weights)
    except MissingWeights:
        noting = weights.noting()
        with suppress(Exception):  # what fails with zeros says nothing of the folder
            program(config, noting)
        raise noting.missing() from None


def program_of_text(config: Config, weights: Weights) -> Program:
    """Write the program of a composite's text model."""
    text, of_text = text_of(config, weights)
    return family_of(text)(text, of_text)


def draft_program(config: Config, weights: Weights) -> Program | None:
    """Write the program of what makes drafts for a model; None where its family or its folder has none. Raises UserError."""
    name = DRAFTS.get(config.model_type)
    return None if name is None else naming_missing(import_module(f"tarnn.families.{name}").program, config, weights)


def open_program(folder: str | Path) -> Program:
    """Read the program of a folder; its weights are mapped, not copied. Raises UserError, in one sentence."""
    config = Config.read(folder)
    return family_of(config)(config, Weights.read(folder))
