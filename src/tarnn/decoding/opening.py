"""Open a model to run it, whatever kind it is: a step, new states, and the facts that whoever runs it needs.

All that knows one kind of model from another stands in this file; what it opens is used alike.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tarnn.checkpoint_keys import CONVERTED, MODEL_TYPES
from tarnn.decoding.choice import fastest_step
from tarnn.decoding.contents import OfModule
from tarnn.decoding.from_packed import open_packed
from tarnn.decoding.from_program import OWN, key_bytes as key_numbers, open_folder, text_fields
from tarnn.decoding.fused import FusedStep
from tarnn.decoding.loop import Step
from tarnn.decoding.memory import give_back_freed
from tarnn.decoding.opened import Limits, Opened
from tarnn.decoding.refusal import Refusal
from tarnn.errors import UserError
from tarnn.families.converted import about_converted
from tarnn.families.generation import read_generation
from tarnn.json_file import read_json
from tarnn.kernels.cpu.products import FORMATS
from tarnn.log import Log, silent
from tarnn.models.backbone import TextModel
from tarnn.models.config import ModelConfig
from tarnn.models.state import ModelState
from tarnn.program.recording import ProgramError
from tarnn.program.runtime import Runtime


def open_step(
    source: str | Path | nn.Module,
    weights: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    adapter: str | Path | None = None,
    track: Callable[[Any, int], Any] = lambda steps, total: steps,
    report: Log = silent,
) -> Opened:
    """Open the model in a folder or in a packed file, or one that lives already.

    weights: how the step keeps them: float32 | bfloat16 | int8 | int4; None: as they were saved, float16 as float32.
    dtype: of the opened weights; None: as saved. device, track: as `open_model` takes them, for models that a step in plain
    PyTorch can run. adapter: a folder in PEFT's format, whose numbers are added to the weights of a folder as they are read.
    report: called with lines on what is unused.

    Raises UserError for a model that can't be run, with the reason, ValueError for another format, and Refusal where weights
    are given and the model has no fused step.
    """
    if weights is not None and weights not in FORMATS:
        raise ValueError(f"weights must be one of {', '.join(FORMATS)}; got {weights!r}.")
    if adapter is not None:
        return _with_adapter(source, Path(adapter), weights, dtype, device, report)
    if isinstance(source, nn.Module):
        return _of_own(source, weights) if isinstance(source, TextModel) else _of_transformers(source, weights)
    folder = Path(source)
    if folder.is_file():
        return open_packed(folder, weights)
    fields = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if fields.get("model_type") == OWN and torch.device(device).type == "cpu":
        opened = _own_by_program(folder, fields, weights, dtype)
        if opened is not None:
            return opened
    if fields.get("model_type", OWN) in MODEL_TYPES:
        from tarnn.tasks.checkpoint import GENERATED, open_model

        model = open_model(folder, tasks=GENERATED, dtype=dtype, device=device, track=track)
        if not isinstance(model, TextModel):
            raise UserError(f"{folder} holds a model of images; expected one of text. `tarnn generate {folder}` draws.")
        return _of_own(model, weights)
    if fields.get(CONVERTED) is not None:
        return _as_folder_says(_of_converted(folder, dtype, device, weights, report), folder, fields)
    if torch.device(device).type != "cpu":
        raise UserError(f"{folder} runs on the CPU, not on {device}; leave --device out.")
    return _as_folder_says(_of_program(folder, weights, dtype, report), folder, fields)


def _with_adapter(
    source: str | Path | nn.Module,
    adapter: Path,
    weights: str | None,
    dtype: torch.dtype | None,
    device: torch.device | str,
    report: Log,
) -> Opened:
    """Open a folder with an adapter added to its weights."""
    if isinstance(source, nn.Module) or Path(source).is_file():
        raise UserError("an adapter is added to the weights of a folder; give the folder that it was trained on.")
    folder = Path(source)
    if torch.device(device).type != "cpu":
        raise UserError(f"{folder} with an adapter runs on the CPU, not on {device}; leave --device out.")
    opened = _of_program(folder, weights, dtype, report, adapter)
    give_back_freed()
    about = (*opened.about, f"with the adapter {adapter}")
    return _as_folder_says(replace(opened, about=about), folder, read_json(folder / "config.json"))


def _own_by_program(
    folder: Path, fields: dict[str, Any], weights: str | None, dtype: torch.dtype | None
) -> Opened | None:
    opened = _compiled(folder, weights, dtype, silent)
    return None if opened is None else _as_folder_says(opened, folder, fields)


def _compiled(folder: Path, weights: str | None, dtype: torch.dtype | None, report: Log) -> Opened | None:
    """Open a folder compiled; None where it can't be, and the model in PyTorch runs, or says what is wrong."""
    try:
        opened = open_folder(folder, weights, dtype=dtype, report=report)
    except ValueError:  # UserError, Refusal, or ProgramError
        return None
    return None if opened.weights is None or opened.dtype.itemsize > torch.float32.itemsize else opened


def _of_program(
    folder: Path, weights: str | None, dtype: torch.dtype | None, report: Log, adapter: Path | None = None
) -> Opened:
    options: dict[str, Any] = {"dtype": dtype, "adapter": adapter, "report": report}
    try:
        return open_folder(folder, weights, **options)
    except ProgramError:  # the kernels lack an instruction
        return open_folder(folder, weights, **options, plain=True)


def _as_folder_says(opened: Opened, folder: Path, fields: dict[str, Any]) -> Opened:
    """Return it with the end tokens and the sampling of generation_config.json."""
    says = read_generation(folder, text_fields(fields, str(folder)), opened.config.vocab_size)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty") if says.do_sample else ()
    sampling = {name: x for name in names if (x := getattr(says, name)) is not None}
    return replace(opened, end_ids=says.end_ids, pad_id=says.pad_id or 0, sampling=sampling)


def _of_own(model: TextModel, weights: str | None) -> Opened:
    config: Any = model.config
    chosen = fastest_step(model, weights=weights)
    layers = sum(config.attention_of(i) != "none" for i in range(config.num_hidden_layers))
    return Opened(
        contents=OfModule(model),
        step=chosen.step,
        prefill=getattr(chosen.step, "prefill", model.prefill),
        new_state=partial(_own_state, model, chosen.step),
        config=Limits(config.vocab_size, config.max_position_embeddings),
        architecture=type(model).__name__,
        fields=asdict(config) if isinstance(config, ModelConfig) else config.to_dict(),
        weights=getattr(chosen.step, "weights", None),
        dtype=model.dtype,
        key_bytes=2 * layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize,
        end_ids=getattr(model, "end_ids", frozenset()),
        pad_id=getattr(model, "pad_id", 0),
        about=(chosen.name, *chosen.why_not),
    )


def _own_state(model: TextModel, step: Step, *sizes: Any, **options: Any) -> ModelState:
    """Make the state before the first token as the step keeps it."""
    state = model.new_state(*sizes, **options)
    return step.widened(state) if isinstance(step, FusedStep) else state


def _of_transformers(model: Any, weights: str | None) -> Opened:
    try:
        step = FusedStep(model, weights)
    except Refusal as error:
        raise UserError(f"this {type(model).__name__} can't be run by tarnn: {error.__cause__}.") from error
    config, dtype = model.config.get_text_config(), model.dtype
    numbers = key_numbers(step.runtime.program)
    ends = getattr(model.generation_config, "eos_token_id", None)
    return Opened(
        contents=OfModule(model),
        step=step,
        prefill=step.prefill,
        new_state=step.new_state,
        config=Limits(config.vocab_size, getattr(config, "max_position_embeddings", None)),
        architecture=type(model).__name__,
        fields=model.config.to_dict(),
        weights=step.weights,
        dtype=dtype,
        key_bytes=numbers * dtype.itemsize,
        end_ids=frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends]),
        pad_id=getattr(config, "pad_token_id", None) or 0,
        about=(f"fused step ({step.weights} weights)",),
    )


def _of_converted(
    folder: Path, dtype: torch.dtype | None, device: torch.device | str, weights: str | None, report: Log
) -> Opened:
    """Open a converted model by its program; where there is none that runs compiled, transformers computes, or says why."""
    if torch.device(device).type == "cpu":
        opened = _compiled(folder, weights, dtype, report)
        if opened is not None:
            return replace(opened, about=(*opened.about, about_converted(cast(Runtime, opened.step).program)))
    from tarnn.conversion.text import open_text

    text = open_text(folder, dtype=dtype, device=torch.device(device), weights=weights)
    model: Any = text.model
    return Opened(
        contents=OfModule(model),
        step=text.step,
        prefill=text.prefill,
        new_state=text.new_state,
        config=Limits(text.config.vocab_size, text.config.max_position_embeddings),
        architecture=type(model).__name__,
        fields=model.config.to_dict(),
        weights=None,
        dtype=model.dtype,
        key_bytes=key_bytes(model.config, model.dtype),
        end_ids=text.end_ids,
        pad_id=text.pad_id,
        about=(text.why, text.about),
    )


def key_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one token, with softmax in each layer."""
    heads = next(x for name in HEADS if (x := getattr(config, name, None)) is not None)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * dtype.itemsize)


HEADS = ("num_key_value_heads", "num_attention_heads", "num_heads")  # of keys, by the first name that a config has
