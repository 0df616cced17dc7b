"""The files of weights in a folder and their headers: safetensors and nothing else, looked at before a tensor is read."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tarnn.errors import UserError
from tarnn.json_file import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
Header = dict[str, tuple[str, tuple[int, ...]]]
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")
INTACT = "Take an intact copy, or train again."
FOREIGN = "Its config.json belongs to another model."


def weight_files(path: str | Path) -> list[Path]:
    """model.safetensors, or the files that its index lists; UserError where there is neither."""
    folder = Path(path)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        pickled = sorted(x.name for pattern in PICKLED for x in folder.glob(pattern))
        if pickled:
            raise UserError(
                f"{folder} holds its weights as {pickled[0]}, a format that may hold code, and no {WEIGHTS}; expected "
                "safetensors: load it where you trust it, and save_pretrained writes them."
            )
        raise UserError(f"{folder} holds no weights: there is no {WEIGHTS} in it. {INTACT}")
    return [folder / name for name in sorted(set(read_index(folder).values()))]


def read_index(folder: Path) -> dict[str, str]:
    """The name of the file of each tensor, by a folder's index; UserError where one is elsewhere or missing."""
    files = read_json(folder / INDEX).get("weight_map")
    files = files if isinstance(files, dict) and files else {"": None}
    if wrong := [name for name in files.values() if not isinstance(name, str) or Path(name).name != name]:
        raise UserError(
            f"{folder / INDEX} must hold weight_map, from each tensor to a file beside it; got {wrong[0]!r:.80}. {INTACT}"
        )
    if missing := sorted({name for name in files.values() if not (folder / name).is_file()}):
        raise UserError(
            f"{folder} lacks {missing[0]}, which its {INDEX} lists ({len(missing)} of its files are missing). Copy the whole "
            "folder again."
        )
    return files


def read_headers(path: str | Path) -> tuple[Path, Header]:
    """The (first) file of weights in folder `path`, and name → (dtype, shape) of all that they hold."""
    files = weight_files(path)
    return files[0], {name: facts for file in files for name, facts in read_header(file).items()}


def read_header(file: Path) -> Header:
    """Name → (dtype, shape) of a file's tensors, without reading them; UserError if it was cut short."""
    try:
        with safe_open(file, "pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: more than can be mapped
        raise UserError(
            f"{file} can't be read: it was cut short or is no safetensors file ({error}). {INTACT}"
        ) from error
