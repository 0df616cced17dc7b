"""tarnn's own language models, folders of `TarnnForCausalLM` (`tarnn.models` has their formulas).

The config is checked by the record that the models are built from; what it says nothing of, such as sizes, the shapes of the
tensors must confirm.
"""

from dataclasses import fields
from typing import TypeVar

import torch
from torch import Tensor

from tarnn.errors import UserError
from tarnn.families.config import Config
from tarnn.families.own.blocks import blocks
from tarnn.families.weights import Weights
from tarnn.models.config import ModelConfig
from tarnn.models.positions import sinusoidal
from tarnn.program.instructions import Program
from tarnn.program.recording import Recorder, Register

MOST_PLACES = 2**12  # positions whose sinusoids are kept in a table
Record = TypeVar("Record", bound=ModelConfig)


def program(config: Config, weights: Weights) -> Program:
    """Record a language model. Raises UserError for what is not possible, and for what programs don't have."""
    record = checked(config, ModelConfig, "TarnnForCausalLM")
    try:
        recorder = Recorder(record.max_position_embeddings, vocab_size=record.vocab_size)
        width = embedding_width(record)
        name, shape = "model.embed_tokens.weight", (record.vocab_size, width)
        tied = record.tie_word_embeddings
        tokens = weights.tied("lm_head.weight", name, shape) if tied else weights.get(name, shape)
        x = blocks(embed(recorder, record, weights.under("model."), tokens), record, weights.under("model."))
        head = tokens if tied else weights.get("lm_head.weight", (record.vocab_size, record.hidden_size))
    except ValueError as error:
        raise refused(config, error) from error
    weights.check_all_taken()
    return recorder.head(x, head)


def checked(config: Config, kind: type[Record], architecture: str) -> Record:
    """Return the checked record of a config, all of whose keys are known. Raises UserError for one that has no program."""
    names = config.get("architectures", [])
    if names not in ([], [architecture]):
        config.refuse("architectures", names, f"[{architecture!r}]")
    values = {x.name: config.get(x.name) for x in fields(kind)}
    config.check_all_taken()
    try:
        record = kind(**{name: x for name, x in values.items() if x is not None})
    except (ValueError, TypeError) as error:
        raise refused(config, error) from error
    if not record.causal or record.input_size is not None:
        raise UserError(
            f"{config.place} is of an encoder, or of a model of frames; expected one that reads tokens in order."
        )
    return record


def refused(config: Config, error: Exception) -> UserError:
    """Return an error of what the config calls for, with its place."""
    return error if isinstance(error, UserError) else UserError(f"{config.place}: {error}")


def embedding_width(record: ModelConfig) -> int:
    """Return the numbers of a token's embedding: all channels, or half of them where the others are its position."""
    return record.hidden_size // 2 if record.position == "sinusoidal_half" else record.hidden_size


def embed(
    recorder: Recorder,
    record: ModelConfig,
    weights: Weights,
    tokens: Tensor,
    places: Tensor | None = None,
    classes: Tensor | None = None,
) -> Register:
    """Record what enters the first block. weights: of `Backbone`; places: of other positions than the record knows."""
    width, limit, scale, formula = embedding_width(record), record.max_position_embeddings, 1.0, 0
    if record.position == "learned":
        places = weights.get("embed_positions.weight", (limit or 0, width))
    elif record.position.startswith("sinusoidal"):
        scale = record.hidden_size**0.5
        if limit is not None and limit <= MOST_PLACES:
            places = sinusoidal(torch.arange(limit), width)
        else:
            formula = width
    return recorder.embed(
        tokens, scale=scale, places=places, sinusoidal=formula, classes=classes, width=record.hidden_size
    )
