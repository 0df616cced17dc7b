"""A checkpoint's JSON files, which anybody may have written."""

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


def without_links(value: Any) -> Any:
    """A config's fields, nested ones too, without the keys that lead elsewhere."""
    if isinstance(value, list):
        return [without_links(x) for x in value]
    if not isinstance(value, dict):
        return value
    return {key: without_links(x) for key, x in value.items() if key not in LEAD_ELSEWHERE}
