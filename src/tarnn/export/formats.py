"""The formats of `tarnn export` by name. Each is a file of this package, which has

    export(source: Path, out: Path, *, report: Log, OPTION=default, …) -> str

It writes into the empty folder `out`, and returns a line or more on what it wrote. Its other keyword arguments are its
options: `tarnn export` hands over those that were given, and refuses those that the format does not have.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tarnn.errors import UserError
from tarnn.log import Log

FORMATS = {  # name, and file here: what it is
    "hf": "a folder in the layout of Qwen3.5, Mamba-2, Bamba or RWKV-7, for transformers, fla and what reads theirs",
    "onnx": "graphs for onnxruntime, of a prompt and of a token, over one file of weights; of any folder with a program",
    "web": "a folder for any static host, whose page runs the model in the browser",
}


def export(name: str, source: Path, out: Path, options: Mapping[str, Any], report: Log) -> str:
    """Write the model in `source` into the empty folder `out`; return what there is to say of it. options: None counts as absent.

    Raises UserError, in one sentence, for what the format can't express, and for options that it does not have.
    """
    write = exporter(name)
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if key not in inspect.signature(write).parameters:
            others = [x for x in FORMATS if key in inspect.signature(exporter(x)).parameters]
            flag = "--" + key.replace("_", "-")
            raise UserError(f"{flag} is for --format {' or '.join(others)}; leave it out with --format {name}.")
    return write(source, out, report=report, **given)


def exporter(name: str) -> Callable[..., str]:
    """Return the function that writes a format."""
    function: Callable[..., str] = import_module(f"tarnn.export.{name}").export
    return function
