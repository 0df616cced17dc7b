"""Check the inputs of a model: their lengths, masks and positions."""

from typing import Any

import torch
from torch import Tensor

from tarnn.models.config import ModelConfig


def check_length(config: Any, num_tokens: int, past: int = 0) -> None:
    """Raise ValueError if a sequence would end beyond max_position_embeddings of a config of any kind."""
    limit = config.max_position_embeddings
    if limit is not None and past + num_tokens > limit:
        after = f", {past} of them earlier ones" if past else ""
        raise ValueError(
            f"this model takes sequences of up to {limit} tokens (max_position_embeddings); "
            f"got {past + num_tokens}{after}. Shorten the input, or train with a larger limit or none."
        )


def check_positions(config: ModelConfig, positions: Tensor, past: int = 0) -> None:
    """Run `check_length` for the sequences that these positions count, however wide their rows are."""
    if config.max_position_embeddings is not None and can_look(positions):
        last = positions.max() if positions.numel() else positions.new_tensor(-1)
        check_length(config, int(last) + 1 - past, past)


def can_look(x: Tensor) -> bool:
    """Return whether x holds numbers now, and is not a placeholder in a graph that is being recorded."""
    recorded = torch.compiler.is_compiling() or torch.jit.is_tracing() or type(x) is not Tensor
    return not (recorded or (x.is_cuda and torch.cuda.is_current_stream_capturing()))


def check_inputs(
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past: int = 0,
) -> tuple[torch.Size, torch.device]:
    """Return the input's shape (b, t) and device. Raises ValueError for inputs that don't fit together."""
    inputs = input_ids if inputs_embeds is None else inputs_embeds
    if inputs is None or (input_ids is not None and inputs_embeds is not None):
        raise ValueError("give input_ids or inputs_embeds, one of the two.")
    if inputs.ndim != (2 if inputs_embeds is None else 3):
        raise ValueError(f"a model takes input_ids (b, t) or inputs_embeds (b, t, width); got {tuple(inputs.shape)}.")
    batch, t = inputs.shape[:2]
    if t == 0:
        raise ValueError("the input is empty: a model needs at least one token.")
    if position_ids is not None and can_look(position_ids) and position_ids.shape not in ((batch, t), (1, t)):
        raise ValueError(f"position_ids must be (b, t) = {(batch, t)}, or (1, t); got {tuple(position_ids.shape)}.")
    if attention_mask is not None:
        _check_mask(attention_mask, batch, t, past, position_ids)
    return inputs.shape[:2], inputs.device


def count_tokens(num_tokens: int, key_mask: Tensor | None) -> int | Tensor:
    """Count the real tokens of each row, (b,), or of all if none is masked."""
    return num_tokens if key_mask is None else key_mask.sum(-1)


def without_padding(inputs_embeds: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """Set embeddings (b, t, width) to zero at padding, which may hold anything, also NaN."""
    if inputs_embeds is None or key_mask is None:
        return inputs_embeds
    return inputs_embeds.masked_fill(~key_mask[..., None], 0.0)


def last_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Select each row's last position whose mask is 1: x (b, t, width), mask (b, t) → (b, width)."""
    if mask is None:
        return x[:, -1]
    position = (mask.long() * torch.arange(1, x.shape[1] + 1, device=x.device)).argmax(-1)
    return x[torch.arange(len(x), device=x.device), position]


def _check_mask(mask: Tensor, batch: int, t: int, past: int, position_ids: Tensor | None) -> None:
    whole = (batch, past + t)
    if mask.shape != whole and mask.shape != (batch, t):
        raise ValueError(f"attention_mask must be (b, t) = {whole}, 0 where there is padding; got {tuple(mask.shape)}.")
    if mask.shape != whole and position_ids is None:
        raise ValueError(
            f"with a cache of {past} tokens attention_mask must cover them too, {whole}; got "
            f"{tuple(mask.shape)}. Or pass position_ids."
        )
