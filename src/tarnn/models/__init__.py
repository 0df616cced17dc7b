"""Models in the Hugging Face manner, registered with transformers' Auto classes when one of these names is first used.

Files of this room that need no transformers (`recurrent`, `state`, …) can be imported by themselves, and start quickly.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tarnn.models.registered import *  # noqa: F403


def __getattr__(name: str):
    registered = importlib.import_module("tarnn.models.registered")
    if name == "__all__" or name in registered.__all__:
        value = globals()[name] = getattr(registered, name)
        return value
    if name in globals():  # a file, which is there now
        return globals()[name]
    raise AttributeError(
        f"module 'tarnn.models' has no attribute {name!r}; it has {', '.join(registered.__all__)}"
    )
