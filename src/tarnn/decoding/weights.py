"""The weights of a checkpoint: safetensors files and nothing else, held against the model before one is used."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tarnn.errors import UserError
from tarnn.weight_files import FLOATS, FOREIGN, INTACT, INTEGERS, Header, weight_files

# keys of a config that count what each takes a place in the weights
COUNTED = re.compile(r"(^|_)(layers?|heads?|experts?|labels?)(_|$)")
SMALL = 4096  # counts of that many cost nothing


def check_counts(file: Path, fields: Any, header: Header) -> None:
    """UserError where a config.json counts more layers, heads, experts or labels than its weights can have.

    No count exceeds both the number of tensors and their longest axis: to be looked at before anything is built.
    """
    most = max([SMALL, len(header), *(size for _, shape in header.values() for size in shape)])
    for key, value in fields.items() if isinstance(fields, dict) else enumerate(fields):
        if isinstance(value, dict | list):
            check_counts(file, value, header)
        elif isinstance(value, int | float) and COUNTED.search(str(key)):
            if value < 0 and str(key).startswith("n"):  # num_…; others count from the end
                raise UserError(f"{file}: {key} must be 0 or more; got {value:,}.")
            if value <= most:
                continue
            raise UserError(f"{file}: {key} is {value:,}, and the weights have room for {most:,} at most. {FOREIGN}")


def saved_dtype(file: Path, header: Header) -> torch.dtype:
    """The type of the first floating-point tensor. UserError where there is none."""
    for kind, _ in header.values():
        if kind in FLOATS:
            return FLOATS[kind]
    raise UserError(f"{file} holds no floating-point weights ({len(header)} tensors). {INTACT}")


def check_weights(file: Path, header: Header, model: Any) -> None:
    """UserError unless the tensors of a file are exactly those of the model: name, shape, kind of number."""
    expected, tied = model.state_dict(), model.tied
    kinds = {
        "lacks": [name for name in expected if name not in header and tied.get(name) not in header],
        "has, beyond what the config calls for,": [name for name in header if name not in expected],
    }
    for verb, names in kinds.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(f"{file} {verb} {', '.join(sorted(names)[:3])}{more}. {FOREIGN}")
    for name, (kind, shape) in sorted(header.items()):
        wanted, dtype = tuple(expected[name].shape), expected[name].dtype
        if shape != wanted:
            raise UserError(f"{file} has {name} of shape {shape} where the config calls for {wanted}. {FOREIGN}")
        if not (kind in FLOATS if dtype.is_floating_point else INTEGERS.get(kind) == dtype):
            numbers = "floating-point numbers" if dtype.is_floating_point else f"{dtype}".removeprefix("torch.")
            raise UserError(f"{file} has {name} as {kind} where the model needs {numbers}. {INTACT}")


def read_weights(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the files, on the CPU. UserError at the first that holds NaN or an infinity."""
    for file in weight_files(path):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                try:
                    x = tensors.get_tensor(name)
                except (SafetensorError, RuntimeError) as error:
                    raise UserError(f"{file} can't be read: {name} is damaged ({error}). {INTACT}") from error
                # (a sum of 16 bits would take a copy in more)
                if x.is_floating_point() and x.numel() and not torch.stack(x.aminmax()).isfinite().all():
                    raise UserError(f"{file} holds NaN or an infinity in {name}: the training diverged. {INTACT}")
                yield name, x


def fill(model: Any, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device | str) -> None:
    """Puts weights into a model that has none yet (on the meta device); floats become `dtype`.

    Copies, so that the file may change afterwards.
    """
    filled = {
        name: torch.empty_like(x, device=device, dtype=dtype if x.is_floating_point() else x.dtype).copy_(x)
        for name, x in weights
    }
    for name, source in model.tied.items():
        filled[name] = filled[source] = filled[source] if source in filled else filled[name]
    nn.Module.load_state_dict(model, filled, assign=True)
    model.tie()
