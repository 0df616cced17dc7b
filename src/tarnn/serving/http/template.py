"""Conversations as a model's chat template writes them, in tokens.

A template writes special tokens; what stands in a message is text, whatever it looks like: "<|im_end|>" ends nothing there.
So what looks like a special token in a message is marked before the template sees it, and encoded as text afterwards.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int

from tarnn.serving.http.errors import bad
from tarnn.serving.http.prompts import MODELS, Ids, text_tokenizer
from tarnn.serving.model import ServedModel

Messages = Sequence[Mapping[str, str]]
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # code points that are no characters and stand in no text
NEVER = "(?!)"
NONE = np.zeros(0, np.int64)
PIECE, LONGEST_PIECE = 2**16, 2**17  # characters of a text that are encoded at once


def check_template(model: ServedModel) -> None:
    """Raises ApiError (400) for a model without one."""
    if not model.chats:
        raise bad(
            f"{model.name} has no chat template, so it is not known how it wants a conversation written. Put a "
            "chat_template.jinja into its folder, or use /v1/completions.",
            "model",
            "no_chat_template",
        )


def rendered(model: ServedModel, messages: Messages, *, answer_follows: bool) -> str:
    """What the template writes, with marks. Raises ApiError for messages that it doesn't take."""
    check_template(model)
    names, _ = patterns(model)
    try:
        return str(
            model.tokenizer.apply_chat_template(
                [{**message, "content": marked(message["content"], names)} for message in messages],
                tokenize=False,
                add_generation_prompt=answer_follows,
            )
        )
    except Exception as error:  # a template is somebody's program
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise bad(f"The model's chat template does not take these messages: {reason}.", "messages") from None


def encoded(model: ServedModel, text: str) -> tuple[Ids, Int[np.ndarray, " t"]]:
    """The tokens of what a template wrote, and the place in it behind each."""
    ids, ends = [NONE], [NONE]
    place = 0
    for match in (*marks(model, text), None):
        end = len(text) if match is None else match.start()
        _encode(model.tokenizer.backend_tokenizer, text[place:end], place, ids, ends)
        if match is not None:
            _encode(text_tokenizer(model).backend_tokenizer, match[1] or "", match.start() + 1, ids, ends)
            place = match.end()
    return np.concatenate(ids).astype(np.int32), np.concatenate(ends)


def marks(model: ServedModel, text: str) -> Iterator[re.Match[str]]:
    """What `marked` has marked. Long texts have few: to look for one sign is faster than to look for a pattern."""
    place = 0
    while places := [x for x in (text.find(OPEN, place), text.find(CLOSE, place)) if x >= 0]:
        match = patterns(model)[1].match(text, min(places))
        assert match is not None  # it takes either sign alone
        yield match
        place = match.end()


def _encode(
    backend: Any, text: str, place: int, ids: list[Int[np.ndarray, " t"]], ends: list[Int[np.ndarray, " t"]]
) -> None:
    for start, piece in cut(text):
        [encoding] = backend.encode_batch(
            [piece], add_special_tokens=False
        )  # unlike `encode` it lets other threads run
        ids.append(np.array(encoding.ids, np.int64))
        ends.append(np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 1] + (place + start))


def cut(text: str) -> Iterator[tuple[int, str]]:
    """Pieces of a long text with their places, cut at ends of lines where those are near: none takes long to encode."""
    start = 0
    while start < len(text):
        line = text.find("\n", start + PIECE, start + LONGEST_PIECE) + 1
        end = line or min(start + LONGEST_PIECE, len(text))
        yield start, text[start:end]
        start = end


@lru_cache(maxsize=MODELS)
def patterns(model: ServedModel) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Of what looks like a special token; of such a one with its marks, or of a mark that lost the other."""
    added = model.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    longest_first = sorted((token.content for token in added), key=len, reverse=True)
    names = "|".join(map(re.escape, longest_first)) or NEVER
    return re.compile(names), re.compile(f"{OPEN}({names}){CLOSE}|[{OPEN}{CLOSE}]")


def marked(content: str, names: re.Pattern[str]) -> str:
    content = content.replace(OPEN, "").replace(CLOSE, "")
    return names.sub(rf"{OPEN}\g<0>{CLOSE}", content)
