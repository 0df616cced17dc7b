"""Models: configs, blocks, the models as RNNs. The names that users import from here are those of `tarnn.huggingface`, too:
with the first of them, all are registered with transformers' Auto classes.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tarnn.huggingface.registered import *  # noqa: F403


def __getattr__(name: str):
    registered = importlib.import_module("tarnn.huggingface.registered")
    if name == "__all__" or name in registered.__all__:
        value = globals()[name] = getattr(registered, name)
        return value
    if name in globals():  # a file, which is there now
        return globals()[name]
    raise AttributeError(f"module 'tarnn.models' has no attribute {name!r}; it has {', '.join(registered.__all__)}")
