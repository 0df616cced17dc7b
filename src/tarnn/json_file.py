"""Read a checkpoint's JSON files, which anybody may have written."""

import json
from pathlib import Path
from typing import Any

from tarnn.errors import UserError

# keys of a config that lead elsewhere: to code, to kernels, to the network, to other files, to other classes of layers
LEAD_ELSEWHERE = {
    "_attn_implementation",
    "_attn_implementation_internal",
    "_experts_implementation",
    "_experts_implementation_internal",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "backbone_kwargs",
    "custom_generate",
    "distributed_config",
    "experts_implementation",
    "fusion_config",
    "kernel_config",
    "name_or_path",
    "quantization_config",
    "transformers_weights",
    "trust_remote_code",
    "use_pretrained_backbone",
}


def read_json(file: Path, *, unique: bool = False) -> dict[str, Any]:
    """Read the object in a JSON file. Raises UserError, with a remedy, for anything else that a file can be.

    unique: a key that stands twice in one object is refused; otherwise the last one counts.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_unique if unique else None)
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}. Take {file.name} from an intact copy.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}). Take {file.name} from an intact copy.") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a JSON object; got {content!r:.60}. Take {file.name} from an intact copy.")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r:.60} stands twice in one object")
    return content


def without_links(value: Any) -> Any:
    """A config's fields, nested ones too, without the keys that lead elsewhere; what JSON lacks is a number again.

    transformers writes an infinity as {"__float__": "Infinity"}.
    """
    if isinstance(value, list):
        return [without_links(x) for x in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {key: without_links(x) for key, x in value.items() if key not in LEAD_ELSEWHERE}
