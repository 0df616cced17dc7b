"""Read a checkpoint's JSON files, which anybody may have written."""

import json
from pathlib import Path
from typing import Any

from tarnn.errors import UserError


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises UserError, with a remedy, for anything else that a file can be."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}. Take {file.name} from an intact copy.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}). Take {file.name} from an intact copy.") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a JSON object; got {content!r:.60}. Take {file.name} from an intact copy.")
    return content
