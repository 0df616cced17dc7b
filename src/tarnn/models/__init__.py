"""Models in plain torch: config, blocks, backbones, run as RNNs. No file here loads transformers.

Users also import from here the classes of `tarnn.huggingface`; with the first of them, all are registered with
transformers' Auto classes.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tarnn.huggingface.registered import *  # noqa: F403


def __getattr__(name: str):
    if importlib.util.find_spec(f"tarnn.models.{name}") is not None:  # a file of this folder
        return importlib.import_module(f"tarnn.models.{name}")
    registered = importlib.import_module("tarnn.huggingface.registered")
    if name == "__all__" or name in registered.__all__:
        value = globals()[name] = getattr(registered, name)
        return value
    raise AttributeError(f"module 'tarnn.models' has no attribute {name!r}; it has {', '.join(registered.__all__)}")
