"""Opens a checkpoint folder, or says in one sentence what is wrong with it."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer
from transformers.utils import logging

from tarnn.errors import UserError
from tarnn.models import TarnnConfig
from tarnn.tasks import TASKS

# model_type → what it is of, its config, its model
KINDS: dict[str, tuple[str, type[TarnnConfig], Any]] = {
    task.model_type: (task.of, *task.classes()) for task in TASKS.values()
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_config(path: str | Path, kinds: Collection[str] = ("tarnn",)) -> TarnnConfig:
    """The config of the checkpoint in folder `path`; UserError where there is none, or not one of these kinds."""
    folder = Path(path)
    file = folder / "config.json"
    if not folder.is_dir():
        wrong = "is a file, not a checkpoint folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {wrong}. `tarnn train TEXT --out {folder}` makes a checkpoint.")
    if not file.is_file():
        raise UserError(
            f"{folder} holds no checkpoint: it has no config.json. If its training was stopped early, "
            f"go on with `tarnn train … --out {folder} --resume`."
        )
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}). Take config.json from an intact copy.") from error
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if kind is None or kind not in kinds:
        expected = " or ".join(map(repr, kinds))
        hint = (
            f"It is a model of {KINDS[kind][0]}"
            if kind in KINDS
            else "`tarnn train` makes checkpoints of ours"
        )
        raise UserError(f"{folder} holds a model of another kind: {kind!r}, not {expected}. {hint}.")
    try:
        return KINDS[kind][1].from_pretrained(folder, local_files_only=True)
    except ValueError as error:
        raise UserError(f"{file}: {' '.join(str(error).split())}") from error


def open_model(
    path: str | Path, *, kinds: Collection[str] = ("tarnn",), dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Any:  # fmt: skip
    """The model in folder `path`, of one of these kinds, ready to run. `dtype` None: as saved.

    Raises UserError for everything that `open_config` refuses, for weights that are missing, cut short or
    unreadable, and for weights that don't belong to the config (transformers would fill gaps with noise).
    """
    config, (file, _) = open_config(path, kinds), read_headers(path)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        loaded: Any = KINDS[config.model_type][2].from_pretrained(
            path, config=config, dtype="auto" if dtype is None else dtype, local_files_only=True,
            use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except SafetensorError as error:
        raise UserError(f"{file} can't be read ({error}). Take an intact copy, or train again.") from error
    model, report = loaded
    refuse_gaps(file, report)
    return model.eval().to(device)


def open_tokenizer(path: str | Path):
    """The tokenizer saved beside the model; UserError where it is missing or can't be read."""
    if not (Path(path) / "tokenizer_config.json").is_file():
        raise UserError(
            f"{path} holds no tokenizer (tokenizer_config.json). Copy it from the checkpoint's origin."
        )
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise UserError(f"the tokenizer in {path} can't be read: {' '.join(str(error).split())}") from error


def weight_files(path: str | Path) -> list[Path]:
    """model.safetensors, or the files that its index lists."""
    folder = Path(path)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise UserError(
            f"{folder} holds no weights: there is no {WEIGHTS} in it. Take an intact copy, or train again."
        )
    names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(names))]


def read_headers(path: str | Path) -> tuple[Path, dict[str, tuple[str, tuple[int, ...]]]]:
    """The (first) file of weights in folder `path`, and name → (dtype, shape) of all that they hold."""
    files = weight_files(path)
    return files[0], {name: facts for file in files for name, facts in read_header(file).items()}


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name → (dtype, shape) of a file's tensors, without reading them; UserError if it was cut short."""
    try:
        with safe_open(file, "pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} can't be read: it was cut short or is no safetensors file ({error}). Take an intact "
            f"copy, or train again."
        ) from error


def refuse_gaps(file: Path, report: dict) -> None:
    """UserError where the weights are not exactly those that the config calls for."""
    kinds = {"missing_keys": "lacks", "unexpected_keys": "has, beyond what the config calls for,"}
    for kind, verb in kinds.items():
        if names := sorted(report.get(kind) or ()):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"{file} {verb} {', '.join(names[:3])}{more}. Its config.json belongs to another model."
            )
    if mismatched := sorted(report.get("mismatched_keys") or ()):
        name, found, expected = mismatched[0]
        raise UserError(
            f"{file} has {name} of shape {tuple(found)} where the config calls for {tuple(expected)}. Its "
            f"config.json belongs to another model."
        )
