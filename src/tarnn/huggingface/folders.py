"""Detect names of checkpoints that mean a local folder, before the hub is asked for them."""

import os
from pathlib import Path


def check_folder(name: str | os.PathLike | None) -> None:
    """Raise FileNotFoundError for a missing folder, instead of the hub's error about such a name.

    `owner/model` may be on the hub. A name means a folder if it is a path, begins with a dot or a slash, has more
    parts, or if its first part is a folder here.
    """
    if name is None or os.path.exists(name):
        return
    parts = Path(name).parts
    local = isinstance(name, os.PathLike) or str(name).startswith((".", "~", os.sep)) or len(parts) > 2
    if local or (len(parts) == 2 and os.path.isdir(parts[0])):
        raise FileNotFoundError(
            f"there is no checkpoint at {os.fspath(name)!r}, seen from {os.getcwd()!r}; give the path of a folder that "
            "`tarnn train` or `save_pretrained` has written."
        )
