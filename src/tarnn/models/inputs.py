"""What may be fed to a model: lengths, masks and caches that fit; expected, got, remedy."""

import torch
from torch import Tensor

from tarnn.models.configuration import TarnnConfig


def check_length(config: TarnnConfig, num_tokens: int, past: int = 0) -> None:
    """Raises ValueError for an empty input, and for one that ends beyond max_position_embeddings."""
    limit = config.max_position_embeddings
    if num_tokens == 0:
        raise ValueError("the input is empty: a model needs at least one token.")
    if limit is not None and past + num_tokens > limit:
        after = f", {past} of them earlier ones" if past else ""
        raise ValueError(
            f"this model takes sequences of up to {limit} tokens (max_position_embeddings); "
            f"got {past + num_tokens}{after}. Shorten the input, or train with a larger limit or none."
        )


def check_inputs(
    config: TarnnConfig,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache=None,
    past: int = 0,
) -> tuple[torch.Size, torch.device]:
    """The input's shape (b, t) and device. Raises ValueError for what doesn't fit together."""
    given = input_ids if inputs_embeds is None else inputs_embeds
    if given is None or (input_ids is not None and inputs_embeds is not None):
        raise ValueError("give input_ids or inputs_embeds, one of the two.")
    if given.ndim != (2 if inputs_embeds is None else 3):
        raise ValueError(
            f"a model takes input_ids (b, t) or inputs_embeds (b, t, width); got {tuple(given.shape)}."
        )
    batch, t = given.shape[:2]
    check_length(config, t, past)
    if attention_mask is not None:
        _check_mask(attention_mask, batch, t, past, position_ids)
    if cu_seqlens is not None and (cache is not None or attention_mask is not None):
        raise ValueError(
            "cu_seqlens bounds whole sequences packed into one row: it goes without a cache and without "
            "attention_mask (leave the padding out instead)."
        )
    return given.shape[:2], given.device


def _check_mask(mask: Tensor, batch: int, t: int, past: int, position_ids: Tensor | None) -> None:
    whole = (batch, past + t)
    if mask.shape != whole and mask.shape != (batch, t):
        raise ValueError(
            f"attention_mask must be (b, t) = {whole}, 0 where there is padding; got {tuple(mask.shape)}."
        )
    if mask.shape != whole and position_ids is None:
        raise ValueError(
            f"with a cache of {past} tokens attention_mask must cover them too, {whole}; got "
            f"{tuple(mask.shape)}. Or pass position_ids."
        )
