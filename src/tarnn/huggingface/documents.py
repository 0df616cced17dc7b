"""Read what transformers passes to `forward`: its arguments, and documents packed into rows in each of its formats."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.utils import TransformersKwargs
from transformers.utils.import_utils import is_tracing

# What transformers passes to every model, used or not, as Llama does not use token_type_ids.
# (`generate` passes the tokenizer that it needs for stop_strings.)
_OF_TRANSFORMERS = TransformersKwargs.__optional_keys__ | {
    "ignore_index",
    "return_dict",
    "shift_labels",
    "token_type_ids",
    "tokenizer",
}


def check_arguments(arguments: Mapping, causal: bool) -> None:
    """Raise TypeError for unknown arguments of `forward`, ValueError for one that would be ignored."""
    if unknown := sorted(set(arguments) - _OF_TRANSFORMERS):
        raise TypeError(
            f"forward() has no argument {', '.join(map(repr, unknown))}; besides its own it takes those of "
            f"transformers: {', '.join(sorted(_OF_TRANSFORMERS))}."
        )
    if arguments.get("is_causal", causal) is not causal:
        raise ValueError(
            f"what a model sees is its config's to say, here causal = {causal}; got is_causal={not causal}."
        )


class Documents(NamedTuple):
    """The documents in the rows of an input, found once. A head that needs them passes them on to the backbone.

    bounds: (n + 1,), of the n documents among all b·t tokens, row after row; None if each row is one document.
    """

    bounds: Tensor | None


def find_documents(
    shape: tuple[int, int] | torch.Size,
    arguments: Mapping,
    *,
    cu_seqlens: Tensor | Documents | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cache: Cache | None = None,
    use_cache: bool | None = None,
) -> Documents:
    """Find the documents in rows of this shape (b, t).

    They are given as cu_seqlens, as cu_seq_lens_q, as seq_idx (the number of each token's document), or by
    position_ids that don't increase by one. Those of padding don't either, but padding has a mask; and with a cache
    that holds tokens they continue its sequence.

    Raises ValueError for documents together with a mask or a cache, and for cu_seq_lens_q and _k that differ.
    """
    if isinstance(cu_seqlens, Documents):
        return cu_seqlens
    cu_seqlens = _as_given(cu_seqlens, arguments)
    cached = cache is not None or bool(use_cache)
    if cu_seqlens is None:
        numbers, step = arguments.get("seq_idx"), 0  # what they grow by within a document
        given = numbers is None and position_ids is not None and attention_mask is None
        if given and not _goes_on(cache):  # (some caches have no length to ask for)
            numbers, step = position_ids, 1
        if numbers is not None:
            starts = numbers.diff(dim=-1) != step
            cu_seqlens = _bounds(starts, *shape, look=not is_tracing(starts), cached=cached)
    if cu_seqlens is not None and (cached or attention_mask is not None):
        raise ValueError(
            "a row of packed documents (cu_seqlens, cu_seq_lens_q, seq_idx, position_ids that start anew within it) goes "
            "without a cache and without attention_mask; pass use_cache=False, and leave the padding out."
        )
    return Documents(cu_seqlens)


def without_seams(labels: Tensor, cu_seqlens: Tensor, arguments: Mapping) -> tuple[Tensor, dict]:
    """Mask each document's first token in labels (b, t), and in `shift_labels` among the loss's arguments.

    The token before it, which would predict it, belongs to another document.
    """
    seams = torch.zeros(labels.numel() + 1, dtype=torch.bool, device=labels.device)
    seams = seams.index_fill(0, cu_seqlens.to(labels.device).long(), True)
    ignored, shifted = arguments.get("ignore_index", -100), arguments.get("shift_labels")
    if shifted is not None:  # these stand where they are predicted, one position earlier
        shifted = shifted.masked_fill(seams[1:].view_as(shifted), ignored)
    labels = labels.masked_fill(seams[:-1].view_as(labels), ignored)
    return labels, {**arguments, "shift_labels": shifted}


def _as_given(cu_seqlens: Tensor | None, arguments: Mapping) -> Tensor | None:
    q, k = arguments.get("cu_seq_lens_q"), arguments.get("cu_seq_lens_k")
    if q is not None and k is not None and not is_tracing(q) and not torch.equal(q, k):
        raise ValueError("a token sees its own document: cu_seq_lens_k must equal cu_seq_lens_q.")
    return cu_seqlens if cu_seqlens is not None else q if q is not None else k


def _goes_on(cache: Cache | None) -> bool:
    return cache is not None and cache.get_seq_length() > 0


def _bounds(starts: Tensor, b: int, t: int, *, look: bool, cached: bool) -> Tensor | None:
    """Convert flags for starts of documents after a row's first token, (b or 1, t − 1), to bounds among all tokens.

    While a graph is traced, the data can't be read (`look` is False): every row is cut where `starts` will say, with
    empty documents at the end so that the shape is fixed. (With a cache, rows are assumed to be whole.)
    """
    if (look and not starts.any()) or (not look and cached):
        return None
    first = torch.nn.functional.pad(starts.expand(b, t - 1), (1, 0), value=True).flatten()
    index = torch.arange(b * t, device=first.device)
    cuts = index[first] if look else torch.where(first, index, b * t).sort().values
    return torch.nn.functional.pad(cuts, (0, 1), value=b * t).int()
