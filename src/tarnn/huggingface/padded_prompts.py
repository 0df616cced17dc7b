"""Prompts with padding behind them: `generate` reads them with the padding before, where the next token is a text's next."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tarnn.huggingface.versions import cache_in

ORDERED = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")  # (b, t) or (b, t, c), in the order of time


def padding_before(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """Arguments of `generate` by keyword with each row's padding first, and the prompts as they were; None: nothing was moved."""
    named = dict(zip(("inputs", "generation_config"), args)) | dict(kwargs)
    if "inputs" in named:
        named["input_ids"] = named.pop("inputs")
    mask: Any = named.get("attention_mask")
    given = {name: x for name in ORDERED if isinstance(x := named.get(name), Tensor)}
    fits = isinstance(mask, Tensor) and mask.ndim == 2 and all(x.shape[:2] == mask.shape for x in given.values())
    if not fits or len(given) < 2 or cache_in(named) is not None or bool(mask[:, -1].all()):
        return named, None
    there = turns(mask.bool())[0]
    return named | {name: take(x, there) for name, x in given.items()}, given.get("input_ids")


def with_prompts(outputs: Any, prompts: Tensor) -> Any:
    """What `generate` returned, with the prompts (b, t) as they were given."""
    texts = outputs if isinstance(outputs, Tensor) else outputs.sequences
    texts[:, : prompts.shape[1]] = prompts.repeat_interleave(len(texts) // len(prompts), 0)
    return outputs


def turns(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where each token of the turned rows (b, t), whose padding stands first, comes from, and where each of the rows went."""
    t = mask.shape[1]
    place = torch.arange(t, device=mask.device)
    last = torch.where(mask, place, -1).amax(1, keepdim=True)  # (b, 1): the last token; −1 for a row of padding alone
    shift = torch.where(last < 0, 0, t - 1 - last)
    return (place - shift) % t, (place + shift) % t


def take(x: Tensor, index: Tensor) -> Tensor:
    """The tokens (b, t) or (b, t, c) in another order, (b, t)."""
    return x.gather(1, index.view(*index.shape, *(1,) * (x.ndim - 2)).expand(x.shape))
