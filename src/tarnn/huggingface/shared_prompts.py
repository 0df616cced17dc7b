"""A prompt that several ranks share, read by all of them: then each has the cache behind it, and generates by itself."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from tarnn.huggingface.stretches import whole_rows
from tarnn.huggingface.versions import CACHE, NAMES
from tarnn.parallel.agreement import agree, looks, telling
from tarnn.parallel.group import Ranks

_STARTS = (*NAMES, "inputs_embeds", "assistant_model", "prompt_lookup_num_tokens")


@torch.no_grad()
def prompt_of_all_ranks(
    model: Any, ranks: Ranks, positional: Sequence[Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of `generate` with the whole prompt, and a cache of all but its last token, from those with this rank's stretch.

    Raises ValueError for arguments that begin with something else than token ids, or make several rows of one.
    """
    named = dict(zip(("inputs", "generation_config"), positional)) | dict(arguments)
    with telling(ranks):
        ids, mask = _checked(model, named), named.get("attention_mask")
    layout = agree(ranks, ids.shape[1], {"the op": "generate", "ids": looks(ids, 1), "mask": looks(mask, 1)})
    total, own = layout.starts[-1], ids.shape[1]
    whole, whole_mask = whole_rows(ranks, ids, mask)
    named = {name: x for name, x in named.items() if name not in ("inputs", "input_ids")} | {"input_ids": whole}
    if whole_mask is not None:
        named["attention_mask"] = whole_mask
    if total < 2:
        return named
    mine = slice(0, max(0, min(own, total - 1 - layout.offset)))
    state = model.new_state(len(ids), total)
    _, state = model.model.prefill(ids[:, mine], state, None if mask is None else mask[:, mine])
    cache = DynamicCache(config=model.config)
    parts = [part for layer in cache.layers for part in cast(Any, layer).parts]
    for part, after in zip(parts, state.layers, strict=True):
        part.begin(after, total - 1)
    return named | {CACHE: cache}


def _checked(model: Any, arguments: Mapping[str, Any]) -> Tensor:
    """The token ids among arguments of `generate`."""
    ids = arguments.get("input_ids", arguments.get("inputs"))
    given = [name for name in _STARTS if arguments.get(name) is not None]
    if given or not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise ValueError(
            "generate over several ranks takes this rank's stretch of the prompt, token ids (b, t); got "
            f"{', '.join(given) or type(ids).__name__}. Pass input_ids, or read and generate on one rank."
        )
    chosen = arguments.get("generation_config") or model.generation_config
    for name in ("num_beams", "num_return_sequences"):
        if (number := arguments.get(name, getattr(chosen, name, None)) or 1) > 1:
            raise ValueError(
                f"generate over several ranks continues each row once; got {name}={number}. Repeat the rows of the prompt, or "
                "generate on one rank."
            )
    return ids
