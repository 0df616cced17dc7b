"""Right-padded prompts: `generate` reads them with the padding on the left, so that the next token follows the text."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tarnn.huggingface.versions import cache_in

# (b, t) or (b, t, c), in time's order
ORDERED = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids")


def padding_before(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], Tensor | None] | None:
    """Arguments of `generate` by keyword with each row's padding first, and the token ids as they were. None: nothing to move."""
    positional = tuple(inspect.signature(model.generate).parameters)[:-1]  # transformers' own, without **kwargs
    named = dict(zip(positional, args)) | dict(kwargs)
    ids = [named[name] for name in ("inputs", "input_ids") if named.get(name) is not None]
    cache, mask = cache_in(named), named.get("attention_mask")
    if len(args) > len(positional) or set(positional[: len(args)]) & set(kwargs) or len(ids) > 1:
        return None  # which transformers refuses
    if named.get("custom_generate") is not None or (cache is not None and cache.get_seq_length()):
        return None
    if mask is None and ids:
        mask = _mask_of(model, ids[0], named)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not mask.numel() or bool(mask[:, -1].all()):
        return None
    given = {name: x for name in ORDERED if isinstance(x := named.get(name), Tensor)} | {"attention_mask": mask}
    if "position_ids" in given:
        given["position_ids"] = given["position_ids"].expand_as(mask)
    if len(given) < 2 or any(x.shape[:2] != mask.shape for x in given.values()):
        return None
    there = turns(mask.bool())[0]
    moved = named | {name: take(x, there) for name, x in given.items()}
    if ids and named.get("streamer") is not None:
        moved["streamer"] = _Streamer(named["streamer"], ids[0])
    return moved, ids[0] if ids else None


def _mask_of(model: Any, ids: Any, named: Mapping[str, Any]) -> Tensor | None:
    """The mask that transformers makes of padding among token ids, where nobody gave one."""
    chosen = named.get("generation_config") or model.generation_config
    pad, eos = (named.get(name, getattr(chosen, name, None)) for name in ("pad_token_id", "eos_token_id"))
    ends = eos if isinstance(eos, list | tuple) else [eos]
    return (ids != pad).long() if isinstance(ids, Tensor) and isinstance(pad, int) and pad not in ends else None


class _Streamer:
    """A streamer that is given the prompt as it was."""

    def __init__(self, streamer: Any, ids: Tensor):
        self.streamer, self.first = streamer, [ids]

    def put(self, value: Tensor) -> None:
        self.streamer.put(self.first.pop().cpu() if self.first else value)

    def end(self) -> None:
        self.streamer.end()


def with_prompts(outputs: Any, prompts: Tensor) -> Any:
    """Put the prompts (b, t), as they were given, back into the outputs of `generate`."""
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
