"""Data to tune on, as ids and marks of which tokens are learned: conversations, prompts with completions, or texts.

The columns of a table say which: `messages` (answers of the assistant are learned), `prompt` and `completion` (the completion is
learned), or `text` (all of it is). Other files are texts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from tarnn.data.files import field_of, plain_suffix, read_rows
from tarnn.data.saved_tokenizer import check_ids
from tarnn.data.sources import dataset_rows, read_documents
from tarnn.data.tokenizers import encode
from tarnn.decoding.prompt import first_ids
from tarnn.decoding.tokenizer import SavedTokenizer
from tarnn.errors import UserError
from tarnn.log import Log

MESSAGES, PROMPT, COMPLETION, TEXT = "messages", "prompt", "completion", "text"
COLUMNS = f"{MESSAGES}, or {PROMPT} and {COMPLETION}, or {TEXT}"
LISTED = 8  # columns in a message


class Example(NamedTuple):
    """Tokens, and which of them are learned. whole: it loses its meaning when it is cut into pieces, as a text does not."""

    ids: Int[np.ndarray, " t"]
    learned: Bool[np.ndarray, " t"]
    whole: bool


def read_examples(
    sources: Sequence[str], tokenizer: SavedTokenizer, vocab_size: int, log: Log, end: int | None = None
) -> Iterator[Example]:
    """The examples of all sources, in their order. end: the token that ends a text; None: the tokenizer's.

    Raises UserError for a table without the columns that are needed, rows that can't be read, and a tokenizer of another model.
    """
    end = tokenizer.eos_token_id if end is None else end
    for source in sources:
        for example in examples_of(source, tokenizer, log, end):
            check_ids(example.ids, vocab_size)
            yield example


def examples_of(source: str, tokenizer: SavedTokenizer, log: Log, end: int | None) -> Iterator[Example]:
    """The examples of one source."""
    path = Path(source).expanduser()
    if source.startswith("datasets:"):
        rows: Iterable[tuple[str, Any]] = dataset_rows(source)
    elif path.is_file() and plain_suffix(path) in (".jsonl", ".csv"):
        rows = read_rows(path)
    else:
        for document in read_documents([source], log=log):
            try:
                text = document.data.decode()
            except UnicodeDecodeError as error:
                raise UserError(f"{document.name} is not UTF-8 (byte {error.start:,}); convert the text.") from None
            yield of_text(text, tokenizer, end)
        return
    for place, row in rows:
        yield from examples_in(row, place, tokenizer, end)


def examples_in(row: Mapping[str, Any], place: str, tokenizer: SavedTokenizer, end: int | None) -> list[Example]:
    """The example of a table's row; more than one for some conversations."""
    present = {name for name, x in row.items() if x is not None}
    if MESSAGES in present:
        return of_messages(messages_of(row[MESSAGES], place), place, tokenizer)
    if {PROMPT, COMPLETION} <= present:
        if isinstance(row[PROMPT], list):  # both as conversations
            both = [messages_of(row[name], place) for name in (PROMPT, COMPLETION)]
            return of_messages([*both[0], *both[1]], place, tokenizer)
        prompt, completion = (field_of(dict(row), name, place) for name in (PROMPT, COMPLETION))
        return [of_pair(prompt, completion, tokenizer, end)]
    if TEXT in present:
        return [of_text(field_of(dict(row), TEXT, place), tokenizer, end)]
    names = [*map(repr, row)]
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    raise UserError(f"{place} has the columns {', '.join(names[:LISTED]) or '(none)'}{more}; expected {COLUMNS}.")


def messages_of(value: Any, place: str) -> list[dict[str, Any]]:
    """A conversation: a list of messages with a role. UserError, with the place, for anything else."""
    roles = [x.get("role") if isinstance(x, Mapping) else None for x in value] if isinstance(value, list) else [None]
    if not roles or not all(isinstance(role, str) for role in roles):
        raise UserError(
            f'{place}: {MESSAGES} must be a list such as [{{"role": "user", "content": "…"}}, {{"role": "assistant", "content": '
            f'"…"}}]; got {value!r:.80}.'
        )
    return [dict(x) for x in value]


def of_messages(messages: Sequence[dict[str, Any]], place: str, tokenizer: SavedTokenizer) -> list[Example]:
    """A conversation through the folder's chat template; answers are learned, from after the template's lead to their end.

    Text is divided where an answer begins and ends, and each part becomes tokens by itself, as when the model answers. Some
    templates write an answer in another way once another one follows (its thoughts are left out): then each answer is an
    example of its own, with what came before it.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"{place} is a conversation, and the model's folder has no chat template; give {PROMPT} and {COMPLETION}, or {TEXT}."
        )

    def written(count: int, **options: Any) -> str:
        try:
            return tokenizer.apply_chat_template(messages[:count], **options)
        except Exception as error:  # whatever a template raises over messages that it does not take
            raise UserError(
                f"{place}: the chat template does not take these messages: {' '.join(str(error).split())[:200]}"
            ) from error

    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    text, until = written(len(messages)), {i: written(i + 1) for i in answers}
    begin = {i: shared(until[i], written(i, add_generation_prompt=True) if i else "") for i in answers}
    if any(not text.startswith(x) for x in until.values()):
        return [joined([(until[i][: begin[i]], False), (until[i][begin[i] :], True)], tokenizer) for i in answers]
    parts, at = list[tuple[str, bool]](), 0
    for i in answers:
        parts += [(text[at : begin[i]], False), (text[begin[i] : len(until[i])], True)]
        at = len(until[i])
    return [joined([*parts, (text[at:], False)], tokenizer)]


def shared(text: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    if text.startswith(other):
        return len(other)
    return next((i for i, (x, y) in enumerate(zip(text, other)) if x != y), min(len(text), len(other)))


def of_pair(prompt: str, completion: str, tokenizer: SavedTokenizer, end: int | None) -> Example:
    """A prompt, as `tarnn generate` reads it, and the completion and its end, which are learned."""
    ids, answer = beginning(prompt, tokenizer), plain(completion, tokenizer)
    answer = answer if end is None else [*answer, end]
    return Example(np.array([*ids, *answer], np.int64), np.arange(len(ids) + len(answer)) >= len(ids), True)


def of_text(text: str, tokenizer: SavedTokenizer, end: int | None) -> Example:
    """A text and its end, all of which is learned."""
    ids = beginning(text, tokenizer)
    ids = ids if end is None else [*ids, end]
    return Example(np.array(ids, np.int64), np.ones(len(ids), bool), False)


def beginning(text: str, tokenizer: SavedTokenizer) -> list[int]:
    """The ids of a text with those that begin one."""
    return [*first_ids(tokenizer), *plain(text, tokenizer)]


def plain(text: str, tokenizer: SavedTokenizer) -> list[int]:
    """The ids of a text, in which special tokens are text like any other."""
    backend: Any = tokenizer  # which has what `encode` looks at
    ids: list[int] = encode(backend, text.encode(), "a text").tolist()
    return ids


def joined(parts: Sequence[tuple[str, bool]], tokenizer: SavedTokenizer) -> Example:
    """Texts, each made to tokens by itself, with whether they are learned."""
    ids = [tokenizer.encode(text, add_special_tokens=False) if text else [] for text, _ in parts]
    learned = [np.full(len(x), flag) for x, (_, flag) in zip(ids, parts)]
    return Example(np.array([i for x in ids for i in x], np.int64), np.concatenate(learned), True)
