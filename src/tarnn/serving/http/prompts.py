"""From the texts of a request to the tokens of a model."""

import asyncio
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from tarnn.data.saved_tokenizer import check_ids
from tarnn.data.tokenizers import encode
from tarnn.errors import UserError
from tarnn.serving.http.errors import ApiError, bad
from tarnn.serving.http.vocabulary import Vocabulary
from tarnn.serving.model import ServedModel
from tarnn.tasks.checkpoint import SavedTokenizer

Ids = Int[np.ndarray, " t"]
MODELS = 16  # whose tables are kept
SHORT = 4096  # characters that are encoded at once; longer texts don't hold the loop up
LONGEST_LINE = 2**18  # characters of a line that are encoded at once


@lru_cache(maxsize=MODELS)
def text_tokenizer(model: ServedModel) -> Any:
    """A copy of the model's tokenizer for which no token is special in a text, in any thread."""
    backend = Tokenizer.from_str(model.tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    return SavedTokenizer(backend, model.tokenizer.bos_token_id, model.tokenizer.eos_token_id)


@lru_cache(maxsize=MODELS)
def vocabulary(model: ServedModel) -> Vocabulary:
    return Vocabulary(model.tokenizer)


async def text_ids(model: ServedModel, text: str, param: str) -> Ids:
    """The ids of a text; what looks like a special token in it is text. ApiError names the parameter."""
    try:
        if len(text) > SHORT:
            ids = await asyncio.to_thread(long_ids, model, text, param)
        else:
            ids = encode(text_tokenizer(model), text.encode(), param)
        check_ids(ids, model.model.config.vocab_size)
    except UserError as error:
        raise bad(str(error), param, "invalid_value") from None
    return ids.astype(np.int32)


def long_ids(model: ServedModel, text: str, param: str) -> Ids:
    """The ids of a text of any length. Lines that are longer than others' texts are cut, so that no thread waits for one."""
    parts, start, line = [], 0, 0
    while len(text) - line > LONGEST_LINE:
        behind = text.rfind("\n", line, line + LONGEST_LINE) + 1
        line = behind or line + LONGEST_LINE
        if not behind:
            parts.append(text[start:line])
            start = line
    encoded = [encode(text_tokenizer(model), part.encode(), param) for part in (*parts, text[start:])]
    return np.concatenate(encoded)


def text_of(model: ServedModel, ids: Ids) -> str:
    """The text of many ids. Other threads run meanwhile, as they don't in `decode`."""
    return str(model.tokenizer.backend_tokenizer.decode_batch([ids.tolist()], skip_special_tokens=False)[0])


def start_ids(model: ServedModel) -> Ids:
    """What stands for an empty prompt: the separator that documents begin with."""
    tokenizer = model.tokenizer
    separator = tokenizer.bos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if separator is None:
        raise bad("The prompt is empty, and this model has no token that begins a text. Give a prompt.", "prompt")
    return np.array([separator], np.int32)


def num_prompts(prompt: Any) -> int:
    """How many `split` would give, without looking at each."""
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1


def split(prompt: Any, param: str = "prompt") -> list[str | Ids]:
    """The prompts of a completion: a text, ids, or a list of either. Raises ApiError for anything else."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if type(prompt[0]) is int:
            return [ids_of(prompt, param)]
        if all(isinstance(x, str) for x in prompt):
            return list(prompt)
        if all(isinstance(x, list) and x for x in prompt):
            return [ids_of(x, f"{param}.{i}") for i, x in enumerate(prompt)]
    raise bad(
        f"{param} must be a text, a list of token ids that is not empty, or a list of either.", param, "invalid_value"
    )


def ids_of(numbers: Any, param: str) -> Ids:
    """Raises ApiError for anything but a list of whole numbers."""
    if not (isinstance(numbers, list) and all(type(x) is int for x in numbers)):
        raise bad(f"{param} must be a list of token ids: whole numbers.", param, "invalid_value")
    if numbers and not -(2**31) <= min(numbers) <= max(numbers) < 2**31:
        raise unknown_token(max(numbers, key=abs), param)
    return np.array(numbers, np.int32)


def unknown_token(token: int, param: str, size: int | None = None) -> ApiError:
    below = "" if size is None else f": its tokens are 0 to {size - 1}"
    return bad(f"{param}: this model has no token {str(token)[:40]}{below}.", param, "invalid_value")


async def prompt_ids(model: ServedModel, prompt: str | Ids, param: str, *, most: int, goes_on: bool = False) -> Ids:
    """The ids of one prompt, in the model's vocabulary, at most so many. goes_on: from a state, so that it may be empty."""
    if isinstance(prompt, str):
        ids = await text_ids(model, prompt, param)
        ids = ids if len(ids) or goes_on else start_ids(model)
    else:
        ids, size = prompt, model.model.config.vocab_size
        if wrong := [x for x in (int(ids.min(initial=0)), int(ids.max(initial=0))) if not 0 <= x < size]:
            raise unknown_token(wrong[0], param, size)
    if len(ids) > most:
        raise bad(
            f"{param} has {len(ids):,} tokens; the most that this server takes is {most:,}. Shorten it, or read it into a "
            "state in pieces.",
            param,
            "prompt_too_long",
        )
    return ids
