"""A checkpoint's JSON files, which anybody may have written."""

import json
from pathlib import Path
from typing import Any

from tarnn.errors import UserError


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; UserError, with what to do, for everything else that a file can be."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}. Take {file.name} from an intact copy.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}). Take {file.name} from an intact copy.") from error
    if not isinstance(found, dict):
        raise UserError(f"{file} must hold a JSON object; got {found!r:.60}. Take {file.name} from an intact copy.")
    return found
