"""Open a pretrained checkpoint of transformers as data, with one sentence for whatever is wrong with it.

By itself, transformers follows names in these files to code in the folder, to kernels, adapters and the network,
draws weights that are missing, and allocates whatever sizes are written there. So JSON and tensors are read here;
transformers gets a config without such names, and the tensors, once they are checked against each other.
"""

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from tarnn.checkpoint_keys import METHOD
from tarnn.conversion.options import DEFAULTS, KEY, attach
from tarnn.data.saved_tokenizer import open_saved_tokenizer
from tarnn.decoding.weights import check_counts, read_weights
from tarnn.errors import UserError
from tarnn.huggingface.patching.patch import known_layers, patch_transformers
from tarnn.json_file import read_json, without_links
from tarnn.log import Log, silent
from tarnn.models.meta_device import build_on_meta
from tarnn.weight_files import FLOATS, FOREIGN, Header, read_headers

WHOLE = ("max_length", "max_new_tokens", "min_length", "num_beams", "num_return_sequences", "top_k")
LARGEST_TABLE = 2**28  # numbers that are computed, not saved, such as positions


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of a folder's config.json; UserError where there is none."""
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}: no config.json there; expected the folder of a checkpoint of transformers, as save_pretrained "
            "writes it."
        )
    return read_json(folder / "config.json")


def is_converted(fields: dict[str, Any]) -> bool:
    """Whether a config.json is that of a model that `tarnn convert` has written."""
    return fields.get(KEY) is not None


def open_pretrained(
    folder: Path,
    *,
    converted: bool | None = None,
    attention: str | None = None,
    text_only: bool = False,
    report: Log = silent,
) -> Any:
    """Open the model of a folder, in the class that wrote it, ready to run, with exactly the weights of its files. Linear layers
    are tarnn's (`patch_transformers`).

    converted: whether `tarnn convert` must have written it, or must not; None: either. attention: the implementation that
    it runs (sdpa, tarnn_hybrid, tarnn_linear); None: its own. text_only: of a model of images and text open the language
    model alone, and leave functions of transformers as they are. report: called with a line about weights that the model
    does not use.

    Raises UserError for a folder without a model, for a config that can't be read or needs more weights than the files
    hold, and for weights that are missing, of another shape, not floating-point, not finite, or that can't be read.
    """
    fields = read_config(folder)
    refuse_other_kinds(folder, fields, converted)
    file, header = read_headers(folder)
    check_counts(folder / "config.json", fields, header)
    config = make_config(folder, fields)
    model_class: Any = class_of(config, fields.get("architectures"))
    if text_only:
        config, model_class = text_part(config, model_class)
    check_sizes(folder, model_class, config, file, header)
    with quiet(), refused(folder):
        options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
        weights = dict(read_weights(folder))
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            generation_config=generation_config(folder, fields, strict=converted is not None),
            **options,
        )
    check_loaded(file, info, model)
    if unused := sorted(info["unexpected_keys"]):
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        report(f"{file} has weights that a {model_class.__name__} does not use: {', '.join(unused[:3])}{more}")
    model.config.name_or_path = str(folder)
    if not text_only:
        patch(model, report)
    return model.eval()


def patch(model: nn.Module, report: Log) -> None:
    """Let its linear layers use tarnn's ops, if it has some."""
    if any(known_layers(model)):
        try:
            patch_transformers(model)
        except ValueError as error:  # of a transformers that differs from what was tested
            report(str(error))


def refuse_other_kinds(folder: Path, fields: dict[str, Any], converted: bool | None) -> None:
    """Raise UserError for a model that is not of transformers, or ours, or quantized, or converted against expectation."""
    model_type = fields.get("model_type")
    if isinstance(model_type, str) and model_type.startswith("tarnn"):
        raise UserError(f"{folder}: a {model_type} checkpoint is linear already; a softmax model can be converted.")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UserError(
            f"{folder} can't be read as a checkpoint of transformers: transformers {transformers.__version__} has no "
            f"model_type {model_type!r:.60}."
        )
    if converted is not None and is_converted(fields) != converted:
        has, remedy = ("not been", "`tarnn convert` makes one") if converted else ("been", "take the original")
        raise UserError(f"{folder}: this checkpoint has {has} converted; {remedy}.")
    quantized = fields.get("quantization_config")
    if quantized is not None and not is_ours(quantized):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UserError(
            f"{folder}: its weights are quantized ({method!r:.40}); expected floating-point weights. Take the original."
        )


def is_ours(quantized: Any) -> bool:
    """Whether a quantization_config is the mark of a converted model, with an attention that we have."""
    return (
        isinstance(quantized, dict)
        and quantized.get("quant_method") == METHOD
        and quantized.get("attention") in DEFAULTS
    )


def make_config(folder: Path, fields: dict[str, Any]) -> PreTrainedConfig:
    """The config that a config.json describes, of transformers' own class and without what leads elsewhere."""
    with quiet(), refused(folder):
        config = CONFIG_MAPPING[fields["model_type"]].from_dict(without_links(fields))
        if is_ours(mark := fields.get("quantization_config")):
            config.quantization_config = mark
        return config


def generation_config(folder: Path, fields: dict[str, Any], *, strict: bool) -> GenerationConfig:
    """The config of generation: generation_config.json, or the fields of config.json, where older versions had them.

    strict: it must be one that can be saved again.
    """
    file, of_model = folder / "generation_config.json", {"_from_model_config": True}
    if file.is_file():
        fields, of_model = read_json(file), {}
    for name in WHOLE:
        if type(fields.get(name)) not in (int, type(None)):
            raise UserError(f"{file}: {name} must be a whole number; got {fields[name]!r:.60}.")
    try:
        config = GenerationConfig.from_dict(without_links(fields), **of_model)
        config.validate(strict=strict)
        return config
    except Exception as error:  # of wrong types, whatever its checks raise
        raise UserError(f"{file}: {' '.join(str(error).split())[:300]}") from error


def class_of(config: PreTrainedConfig, architectures: Any) -> type[PreTrainedModel]:
    """The class of transformers that `architectures` names first, if it is for this config; else the backbone."""
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    model_class = getattr(transformers, name, None) if isinstance(name, str) else None
    if (
        isinstance(model_class, type)
        and issubclass(model_class, PreTrainedModel)
        and model_class.config_class is type(config)
    ):
        return model_class
    backbones: Any = AutoModel._model_mapping.get(type(config), ())
    if not backbones:
        raise UserError(
            f"transformers has no class {name} for a model_type {config.model_type!r}; expected one of its own."
        )
    return backbones[0] if isinstance(backbones, tuple) else backbones


def text_part(config: PreTrainedConfig, model_class: Any) -> tuple[PreTrainedConfig, Any]:
    """Return the config and class of the language model alone, where a config is of a model of images and text."""
    part = config.get_text_config()
    if part is config:
        return config, model_class
    if "tie_word_embeddings" in vars(config):  # which some folders say of the whole alone
        part.tie_word_embeddings = config.tie_word_embeddings
    return part, AutoModelForCausalLM._model_mapping[type(part)]


def check_sizes(
    folder: Path, model_class: type[PreTrainedModel], config: PreTrainedConfig, file: Path, header: Header
) -> None:
    """Raise UserError if the config calls for more numbers than the files hold. The model is built without any."""

    def build(config: PreTrainedConfig) -> nn.Module:
        with no_init_weights():
            model = model_class(config)
        if is_converted(vars(config)):
            attach(model)
        return model

    with quiet(), refused(folder), at_most(4 * len(header) + 64, f"{file} has {len(header)} tensors"):
        model = build_on_meta(build, copy.deepcopy(config))  # which models complete
    held = sum(torch.Size(shape).numel() for _, shape in header.values())
    needed = sum(x.numel() for x in model.parameters())
    # embeddings that are shared are counted twice here, and saved once
    if needed > 2 * held + 4096:
        raise UserError(f"{folder / 'config.json'} calls for {needed:,} weights, and {file} holds {held:,}. {FOREIGN}")
    if (computed := sum(x.numel() for x in model.buffers())) > max(LARGEST_TABLE, held):
        raise UserError(
            f"{folder / 'config.json'} calls for tables of {computed:,} numbers; expected {LARGEST_TABLE:,} at most."
        )
    floats = {name for name, x in model.state_dict().items() if x.is_floating_point()}
    for name, (dtype, _) in sorted(header.items()):
        here = name.endswith(".weight") or any(
            name == x or name.endswith("." + x) or x.endswith("." + name) for x in floats
        )
        if dtype not in FLOATS and here:
            raise UserError(f"{file} has {name} as {dtype} where the model needs floating-point numbers.")


def check_loaded(file: Path, info: dict[str, Any], model: nn.Module) -> None:
    """Raise UserError for a weight that was not in the files, or had another shape there."""
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(f"{file} lacks {', '.join(missing[:3])}{more}. {FOREIGN}")
    for name, saved, wanted in sorted(info["mismatched_keys"], key=str):
        raise UserError(
            f"{file} has {name} of shape {tuple(saved)} where the config calls for {tuple(wanted)}. {FOREIGN}"
        )
    if info.get("error_msgs"):
        raise UserError(f"{file} can't be read: {' '.join(str(info['error_msgs'][0]).split())[:300]}")


def tokenizer_of(folder: Path, model: Any) -> Any:
    """The folder's own tokenizer; None for a model of bytes."""
    if any(folder.glob("tokenizer*")) or any(folder.glob("vocab*")):
        return open_saved_tokenizer(folder, model.config)
    if model.config.vocab_size == 256:
        return None
    raise UserError(
        f"{folder}: no tokenizer there, and {model.config.vocab_size:,} tokens are no bytes; add its tokenizer.json."
    )


@contextmanager
def refused(folder: Path) -> Iterator[None]:
    """Turn whatever transformers raises over a folder into one sentence about that folder."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        reason = re.sub(r"\s+", " ", str(error))[:300] or type(error).__name__
        raise UserError(f"{folder} can't be read as a checkpoint of transformers: {reason}") from error


@contextmanager
def at_most(parameters: int, because: str) -> Iterator[None]:
    """Raise UserError as soon as a model that is being built has more parameters than that: layers without end."""
    count = 0

    def counted(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal count
        count += 1
        if count > parameters:
            raise UserError(f"{because}, and its config.json calls for more. {FOREIGN}")

    handle = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' own report, warnings and progress bar: errors are ours."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
