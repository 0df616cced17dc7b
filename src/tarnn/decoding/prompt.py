"""From the text of a prompt to token ids: what a tokenizer puts before a text, and where a text without tokens begins."""

from typing import Any

import numpy as np
from jaxtyping import Int

from tarnn.data.saved_tokenizer import check_ids
from tarnn.data.tokenizers import encode
from tarnn.errors import UserError


def prompt_ids(tokenizer: Any, text: bytes, vocab_size: int, *, starts: bool) -> Int[np.ndarray, " t"]:
    """Return the ids of a prompt, int64. starts: with those that begin a text; an empty one begins with a separator.

    Special tokens written in a prompt are text like any other. Raises UserError for a text that the tokenizer can't encode, ids
    that the model has no embedding for, and an empty prompt that nothing can begin.
    """
    ids = encode(tokenizer, text, "the prompt")
    if starts:
        ids = np.concatenate([np.array(first_ids(tokenizer), np.int64), ids])
    if starts and not len(ids):
        if (separator := separator_of(tokenizer)) is None:
            raise UserError("the prompt is empty and this tokenizer has no separator to start from; give a --prompt.")
        ids = np.array([separator])
    check_ids(ids, vocab_size)
    return ids


def first_ids(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts before each text, such as a mark of its beginning; of most none."""
    encoding = tokenizer.backend_tokenizer.encode("a", add_special_tokens=True)
    is_special = encoding.special_tokens_mask
    return [encoding.ids[i] for i in range(is_special.index(0) if 0 in is_special else 0)]


def separator_of(tokenizer: Any) -> int | None:
    """Return the token that documents begin with; None where the tokenizer has none."""
    begin: int | None = tokenizer.bos_token_id
    end: int | None = tokenizer.eos_token_id
    return end if begin is None else begin
