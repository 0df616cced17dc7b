"""From the texts of a request to the tokens of a model, and from single tokens to their bytes and names."""

import asyncio
import re
from collections.abc import Iterable
from functools import cached_property, lru_cache
from math import isnan
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from tarnn.data.saved_tokenizer import check_ids
from tarnn.data.tokenizers import byte_characters, encode
from tarnn.decoding.prompt import first_ids, separator_of
from tarnn.decoding.tokenizer import SavedTokenizer
from tarnn.errors import UserError
from tarnn.serving.http.errors import ApiError, bad
from tarnn.serving.model import ServedModel
from tarnn.serving.request import TokenLogprob

Ids = Int[np.ndarray, " t"]
MODELS = 16  # whose tables are kept
SHORT = 4096  # characters that are encoded at once; longer texts don't hold the loop up
LONGEST_LINE = 2**18  # characters of a line that are encoded at once
FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece writes a byte that has no token of its own
SPACE = "▁"
LEAST = -9999.0  # stands for the logarithm of 0, which JSON has no number for


@lru_cache(maxsize=MODELS)
def text_tokenizer(model: ServedModel) -> Any:
    """Return a copy of the model's tokenizer for which no token is special in a text, in any thread."""
    backend = Tokenizer.from_str(model.tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    return SavedTokenizer(backend, model.tokenizer.bos_token_id, model.tokenizer.eos_token_id)


async def prompt_ids(model: ServedModel, prompt: str | Ids, param: str, *, most: int, goes_on: bool = False) -> Ids:
    """Return the ids of one prompt, at most `most`. goes_on: from a state, so that the prompt may be empty."""
    if isinstance(prompt, str):
        ids = await text_ids(model, prompt, param)
        ids = ids if goes_on else np.concatenate([start_ids(model, empty=not len(ids)), ids])
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


async def text_ids(model: ServedModel, text: str, param: str) -> Ids:
    """Return the ids of a text, in which nothing is a special token. ApiError names the parameter."""
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
    """Return the ids of a text of any length. Longer lines than `LONGEST_LINE` are cut: no thread waits for one."""
    parts, start, line = [], 0, 0
    while len(text) - line > LONGEST_LINE:
        after = text.rfind("\n", line, line + LONGEST_LINE) + 1
        line = after or line + LONGEST_LINE
        if not after:
            parts.append(text[start:line])
            start = line
    encoded = [encode(text_tokenizer(model), part.encode(), param) for part in (*parts, text[start:])]
    return np.concatenate(encoded)


def text_of(model: ServedModel, ids: Ids) -> str:
    """Return the text of many ids. Other threads run meanwhile, as they don't in `decode`."""
    return str(model.tokenizer.backend_tokenizer.decode_batch([ids.tolist()], skip_special_tokens=False)[0])


def start_ids(model: ServedModel, *, empty: bool) -> Ids:
    """Return the ids that begin a text; of an empty one at least the separator that documents begin with."""
    ids = first_ids(model.tokenizer)
    if empty and not ids:
        if (separator := separator_of(model.tokenizer)) is None:
            raise bad("The prompt is empty, and this model has no token that begins a text. Give a prompt.", "prompt")
        ids = [separator]
    return np.array(ids, np.int32)


def num_prompts(prompt: Any) -> int:
    """Return the number of prompts that `split` would give, without looking at each."""
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1


def split(prompt: Any, param: str = "prompt") -> list[str | Ids]:
    """Return the prompts of a completion: a text, ids, or a list of either. Raises ApiError for anything else."""
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
    """Return a list of whole numbers as ids. Raises ApiError for anything else."""
    if not (isinstance(numbers, list) and all(type(x) is int for x in numbers)):
        raise bad(f"{param} must be a list of token ids: whole numbers.", param, "invalid_value")
    if numbers and not -(2**31) <= min(numbers) <= max(numbers) < 2**31:
        raise unknown_token(max(numbers, key=abs), param)
    return np.array(numbers, np.int32)


def unknown_token(token: int, param: str, size: int | None = None) -> ApiError:
    below = "" if size is None else f": its tokens are 0 to {size - 1}"
    return bad(f"{param}: this model has no token {str(token)[:40]}{below}.", param, "invalid_value")


@lru_cache(maxsize=MODELS)
def vocabulary(model: ServedModel) -> "Vocabulary":
    return Vocabulary(model.tokenizer)


def finite(logprob: float) -> float | None:
    """Return a logarithm as JSON has it; None for NaN, of a token with nothing before it."""
    return None if isnan(logprob) else max(logprob, LEAST)


class Vocabulary:
    """The tokens of a saved tokenizer, one by one."""

    def __init__(self, tokenizer: Any):
        self._backend = tokenizer.backend_tokenizer
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; of a special one, those of its name."""
        if token not in self._known:
            self._known[token] = self._bytes_of(token)
        return self._known[token]

    def text_of(self, token: int) -> str:
        r"""Return a name for the token: its text, or, for bytes that are no whole characters, "bytes:\xe2\x82"."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def width_of(self, token: int) -> int:
        """Return the number of characters that begin in it."""
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes_of(token))

    def described(self, rows: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        """Return tokens and their logarithms as chats and responses have them."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token": self.text_of(token), "logprob": finite(logprob), "bytes": list(self.bytes_of(token))}

        return [entry(x.token, x.logprob) | {"top_logprobs": [entry(*likely) for likely in x.likeliest]} for x in rows]

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """The byte of each character of a byte-level tokenizer; empty for other tokenizers."""
        level = type(self._backend.decoder).__name__ == "ByteLevel"
        return {character: byte for byte, character in enumerate(byte_characters())} if level else {}

    @cached_property
    def _special(self) -> set[int]:
        return set(self._backend.get_added_tokens_decoder())

    def _bytes_of(self, token: int) -> bytes:
        name = self._backend.id_to_token(token)
        if name is None:  # the model's vocabulary is larger than the tokenizer's
            return b""
        if token in self._special:
            return name.encode()
        if self._byte_of and all(character in self._byte_of for character in name):
            return bytes(self._byte_of[character] for character in name)
        if fallback := FALLBACK.fullmatch(name):
            return bytes([int(fallback[1], 16)])
        return name.replace(SPACE, " ").encode()
