"""Whether a checkpoint's name is meant as a folder of this machine, before it is looked for on the network."""

import os
from pathlib import Path


def check_folder(name: str | os.PathLike | None) -> None:
    """Raises FileNotFoundError for a missing folder, in place of what the hub has to say of such a name.

    `owner/model` may be on the hub. A folder is meant where a name is a path, begins with a dot or a slash, has more
    parts, or where its first part is a folder here.
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
