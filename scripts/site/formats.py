"""The page of file formats, from the docstrings of the modules that write them."""

import importlib
import inspect

MODULES = {  # heading → the module that writes such files
    "Packed file": "tarnn.decoding.packed_file",
    "State file": "tarnn.data.tensor_file",
    "State of a model": "tarnn.decoding.state_file",
    "Cache of a converted model": "tarnn.conversion.cache_file",
    "Stored states of a server": "tarnn.serving.storage.packed",
}


def formats() -> str:
    """Return the page."""
    intro = (
        "What tarnn writes besides checkpoints, which are folders in Hugging Face's layout (`config.json`, "
        "`model.safetensors`, `tokenizer.json`). A file of another version is refused in one sentence, never misread."
    )
    return "\n\n".join([f"# File formats\n\n{intro}", *(section(*x) for x in MODULES.items())]) + "\n"


def section(title: str, name: str) -> str:
    """Return one format: its name and version, and what the module says about it."""
    module = importlib.import_module(name)
    mark = getattr(module, "FORMAT", None)
    version = f"Format `{mark}`, version {module.VERSION}.\n\n" if mark and hasattr(module, "VERSION") else ""
    return f"## {title}\n\n{version}{inspect.cleandoc(module.__doc__ or '')}\n\nWritten by `{name}`."
