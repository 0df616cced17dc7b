"""Conversations as a model's chat template writes them, in tokens.

A template writes special tokens; a message is text, whatever it looks like: "<|im_end|>" in it ends nothing. So strings in
a message that look like special tokens are marked before the template sees them, and encoded as text afterwards.
"""

import re
import uuid
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
LAST = 3  # messages before the last one whose ends are kept; earlier ones were the last ones of earlier requests


def opened(model: ServedModel, messages: Messages, *, answer_follows: bool = True) -> tuple[Ids, list[int]]:
    """Return the tokens of a conversation, up to where the next answer begins, and places in them where messages end."""
    text = rendered(model, messages, answer_follows=answer_follows)
    ids, ends = encoded(model, text)
    places = set()
    for n in {1, *range(max(1, len(messages) - LAST), len(messages))} - {len(messages)}:
        try:
            beginning = rendered(model, messages[:n], answer_follows=False)
        except Exception:  # a template that refuses the mere beginning of a conversation
            continue
        if text.startswith(beginning):
            places.add(int(np.searchsorted(ends, len(beginning), "right")))
    return ids, sorted(places - {0})


def continued(model: ServedModel, messages: Messages, last: int) -> Ids:
    """Return the tokens after an answer that a state has read: its end, new messages, the start of the next answer.

    A template writes whole conversations, so it gets a short one with a marker in the place of the answer. last: the
    token with which the answer ended; if the template ends it with the same, that is not read twice. Raises ApiError for
    a template that leaves some of it out.
    """
    marker = uuid.uuid4().hex
    earlier = {"role": "user", "content": "-"}, {"role": "assistant", "content": marker}
    text = rendered(model, [*earlier, *messages], answer_follows=True)
    _, shown, rest = text.rpartition(marker)
    if not shown:
        raise bad(
            "The model's chat template leaves earlier answers out, so no conversation can go on after one. Send all of its "
            "messages again, without previous_response_id.",
            "previous_response_id",
        )
    check_shown(model, messages, rest)
    ids, _ = encoded(model, rest)
    return ids[1:] if len(ids) and ids[0] == last else ids


def check_shown(model: ServedModel, messages: Messages, text: str) -> None:
    """Raise ApiError for a message that the template left out: many write a system message at the beginning only."""
    for message in messages:
        if marked(message["content"], patterns(model)[0]).strip() not in text:
            raise bad(
                f"The model's chat template has no place for a {message['role']} message after an answer. Put it into the "
                "first request of a conversation, or into a user message.",
                "instructions" if message["role"] == "system" else "input",
            )


def check_template(model: ServedModel) -> None:
    """Raise ApiError (400) for a model without one."""
    if not model.chats:
        raise bad(
            f"{model.name} has no chat template, so it is not known how it wants a conversation written. Put a "
            "chat_template.jinja into its folder, or use /v1/completions.",
            "model",
            "no_chat_template",
        )


def rendered(model: ServedModel, messages: Messages, *, answer_follows: bool) -> str:
    """Return the template's text, with marks. Raises ApiError for messages that the template refuses."""
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
    """Return the tokens of a template's text, and the place in the text where each ends."""
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
    """Return the matches of the marks of `marked`. To find one sign is faster than to match a pattern in a long text."""
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
        [encoding] = backend.encode_batch([piece], add_special_tokens=False)  # unlike `encode`, other threads run
        ids.append(np.array(encoding.ids, np.int64))
        ends.append(np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 1] + (place + start))


def cut(text: str) -> Iterator[tuple[int, str]]:
    """Return pieces of a long text with their places, cut at ends of lines if those are near: none takes long to encode."""
    start = 0
    while start < len(text):
        line = text.find("\n", start + PIECE, start + LONGEST_PIECE) + 1
        end = line or min(start + LONGEST_PIECE, len(text))
        yield start, text[start:end]
        start = end


@lru_cache(maxsize=MODELS)
def patterns(model: ServedModel) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return two patterns: of special tokens, and of one between its marks, or of a mark that lost the other."""
    added = model.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    longest_first = sorted((token.content for token in added), key=len, reverse=True)
    names = "|".join(map(re.escape, longest_first)) or NEVER
    return re.compile(names), re.compile(f"{OPEN}({names}){CLOSE}|[{OPEN}{CLOSE}]")


def marked(content: str, names: re.Pattern[str]) -> str:
    content = content.replace(OPEN, "").replace(CLOSE, "")
    return names.sub(rf"{OPEN}\g<0>{CLOSE}", content)
