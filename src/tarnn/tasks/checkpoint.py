"""Opens a checkpoint folder, or says in one sentence what is wrong with it.

Only data is read: JSON, and safetensors. transformers' own loaders would follow names in these files to code in the
folder, to adapters and to the network (`auto_map`, `adapter_config.json`, `attn_implementation`), so they stay out.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tarnn.checkpoint_keys import CONVERTED
from tarnn.decoding.weights import check_counts, check_weights, fill, read_weights, saved_dtype
from tarnn.errors import UserError
from tarnn.families.config import Config
from tarnn.families.own.text import checked
from tarnn.json_file import read_json, without_links
from tarnn.models.backbone import TextModel
from tarnn.models.config import ModelConfig
from tarnn.models.meta_device import build_on_meta
from tarnn.tasks.base import TASKS, Task, task_of
from tarnn.weight_files import read_headers

if TYPE_CHECKING:
    from tarnn.huggingface.config import TarnnConfig

GENERATED = tuple(name for name, task in TASKS.items() if task.next == "generate")
# a config's checks take time per layer, before the weights can say how many there are
MOST_LAYERS = 10_000
# models without a task → the example that trains and uses one
EXAMPLES = {"TarnnForConditionalGeneration": "examples/pairs.py", "TarnnForTokenClassification": "examples/words.py"}


@dataclass(frozen=True)
class SavedConfig:
    """A config.json of a model that runs token after token, read without transformers. model: the record that builds it."""

    model: ModelConfig
    fields: Mapping[str, Any]

    def record(self) -> ModelConfig:
        return self.model

    def to_dict(self) -> dict[str, Any]:
        return dict(self.fields)

    @property
    def dtype(self) -> torch.dtype | None:
        name = self.fields.get("dtype", self.fields.get("torch_dtype"))
        dtype = getattr(torch, name, None) if isinstance(name, str) else None
        return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None

    @property
    def eos_token_id(self) -> Any:
        return self.fields.get("eos_token_id")

    @property
    def pad_token_id(self) -> Any:
        return self.fields.get("pad_token_id")


def open_record(path: str | Path, tasks: Collection[str] = ("text",)) -> "SavedConfig | TarnnConfig":
    """The config of a checkpoint, by the record that its model is built from; UserError as in `open_config`.

    Transformers is loaded only for models that read whole sequences, and for keys that the record does not know.
    """
    task, file, fields = fields_of(Path(path), tasks)
    kinds = task.recurrent()
    if kinds is not None:
        try:
            return SavedConfig(checked(Config(fields, file), kinds[0], task.architecture), fields)
        except UserError:  # for `open_config` to say
            pass
    return open_config(path, tasks)


def open_config(path: str | Path, tasks: Collection[str] = ("text",)) -> "TarnnConfig":
    """The config of the checkpoint in folder `path`; UserError where there is none, or not one of these tasks."""
    task, file, fields = fields_of(Path(path), tasks)
    try:
        config: TarnnConfig = task.config_type().from_dict(fields)
    except Exception as error:  # of wrong types in transformers' own keys, whatever its checks raise
        raise UserError(f"{file}: {' '.join(str(error).split())}") from error
    return config


def fields_of(folder: Path, tasks: Collection[str]) -> tuple[type[Task], Path, dict[str, Any]]:
    """The task of the checkpoint in a folder, its config.json and what stands there; UserError as in `open_config`."""
    file = folder / "config.json"
    if not folder.is_dir():
        wrong = "is a file, not a checkpoint folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {wrong}. `tarnn train TEXT --out {folder}` makes a checkpoint.")
    if not file.is_file():
        raise UserError(
            f"{folder} holds no checkpoint: it has no config.json. If its training was stopped early, "
            f"go on with `tarnn train … --out {folder} --resume`."
        )
    fields = read_json(file)
    kind: Any = fields.get("model_type")
    refuse_examples(folder, fields)
    task = task_of(fields)
    if task is None or task.name not in tasks:
        expected = " or ".join(dict.fromkeys(repr(TASKS[name].model_type) for name in tasks))
        hint = f"It is a model of {task.of}" if task else elsewhere(fields)
        if task and kind in [TASKS[name].model_type for name in tasks]:
            kind, expected = task.architecture, " or ".join(TASKS[name].architecture for name in tasks)
            hint = f"It is of the task {task.name}: `tarnn {task.next}` takes it"
        raise UserError(f"{folder} holds a model of another kind: {kind!r:.60}, not {expected}. {hint}.")
    layers = fields.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise UserError(f"{file}: num_hidden_layers must be at most {MOST_LAYERS:,}; got {layers:,}.")
    return task, file, without_links(fields)


def refuse_examples(folder: Path, fields: dict[str, Any]) -> None:
    """UserError for a model that the commands do not run, with the example that does."""
    names = fields.get("architectures")
    for name in names if isinstance(names, list) else ():
        if name in EXAMPLES:
            raise UserError(
                f"{folder} holds a {name}, which the commands do not run; open it by tarnn.models.{name}.from_pretrained, as "
                f"{EXAMPLES[name]} does."
            )


def elsewhere(fields: dict[str, Any]) -> str:
    """Which commands take a folder that is not one of ours."""
    if fields.get(CONVERTED) is not None:
        return (
            "`tarnn convert` has written it: `tarnn generate` continues texts with it, or `tarnn predict` and `tarnn show` take "
            "it where it is an encoder; so do `tarnn info` and `tarnn eval`"
        )
    return "`tarnn train` makes checkpoints of ours, and `tarnn convert` makes one of a softmax model of transformers"


def open_model(
    path: str | Path,
    *,
    tasks: Collection[str] = ("text",),
    dtype: torch.dtype | None = None,
    whole: bool = False,
    device: torch.device | str = "cpu",
    track: Callable[[Any, int], Any] = lambda steps, total: steps,
) -> Any:
    """The model in folder `path`, of one of these tasks, ready to run. `dtype` None: as saved.

    It runs token after token (`TextModel`, `ImageModel`) and needs no transformers; `whole`: with `forward` too, as
    transformers has it.

    `track(tensors, their number)` is what the weights pass through, one after the other: a place for a progress bar.

    Raises UserError for everything that `open_config` refuses, for weights that are missing, cut short, unreadable or
    not finite, and for weights that don't belong to the config.
    """
    config, (file, header) = (open_config if whole else open_record)(path, tasks), read_headers(path)
    check_counts(Path(path) / "config.json", config.to_dict(), header)
    saved = saved_dtype(file, header)
    dtype = dtype or (config.dtype if isinstance(config.dtype, torch.dtype) else saved)
    model = weightless(path, config, header, dtype, whole)
    check_weights(file, header, model)
    fill(model, track(read_weights(path), len(header)), dtype, device)
    if isinstance(model, TextModel):
        model.end_ids = end_ids(Path(path) / "generation_config.json", config)
        model.pad_id = config.pad_token_id or 0
    return model.eval()


def weightless(
    path: str | Path,
    config: "SavedConfig | TarnnConfig",
    header: dict[str, Any],
    dtype: torch.dtype,
    whole: bool = False,
) -> Any:
    """The model with shapes and no numbers: nothing is allocated, by its states neither."""
    file, task = Path(path) / "config.json", task_of(config.to_dict())
    assert task is not None
    layers = config.record().num_hidden_layers
    if layers > len(header):
        raise UserError(
            f"{file} calls for {layers:,} layers, but the weights lack model.layers.{len(header)} and "
            f"all that follow. It belongs to another model."
        )
    try:
        kinds = None if whole else task.recurrent()
        kind = (kinds or task.classes())[1]
        of_transformers = hasattr(kind, "config_class")  # asked so, since importing its base class takes a second
        model = build_on_meta(kind, config if of_transformers else config.record())
        return nn.Module.to(model, dtype)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise UserError(f"{file} calls for a model that can't be made: {str(error).splitlines()[0]}.") from error


def fill_from(path: str | Path, model: Any) -> Any:
    """A model on the CPU, with the weights of the checkpoint in folder `path`; UserError where they are not its own."""
    file, header = read_headers(path)
    check_weights(file, header, model)
    fill(model, read_weights(path), torch.float32, "cpu")
    return model


def end_ids(file: Path, config: "SavedConfig | TarnnConfig") -> frozenset[int]:
    """The tokens that end a text, by generation_config.json or, without one, by the config; UserError for what can't be
    tokens."""
    found = read_json(file).get("eos_token_id") if file.is_file() else config.eos_token_id
    ids = found if isinstance(found, list) else [] if found is None else [found]
    vocab_size = config.record().vocab_size
    if not all(type(one) is int and 0 <= one < vocab_size for one in ids):
        raise UserError(
            f"{file}: eos_token_id must be a token below {vocab_size}, or a list of them; got {found!r:.60}."
        )
    return frozenset(ids)
