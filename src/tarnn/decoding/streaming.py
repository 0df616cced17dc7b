"""From a stream of tokens to a stream of text: whole characters only, and nothing past a stop string."""

from codecs import utf_8_decode
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from tarnn.decoding.byte_text import ByteTable, byte_table

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
INCOMPLETE = 3  # an unfinished UTF-8 character is at most three bytes, so at most three of these
KEEP = 8  # tokens of context kept for the tokenizer; a character spans at most four of them
TRIM = 32


def decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """A tokenizer's `decode` for the classes here: nothing tidied, special tokens left out. A `ByteTable` where it can be."""
    table = byte_table(tokenizer)
    return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True) if table is None else table


class StreamingDecoder:
    """Tokens in, the text that they make certain out. Never half a character: it waits for the rest.

    Works with any `decode(ids) -> str` that writes U+FFFD for bytes that are not (yet) UTF-8, as all of
    Hugging Face's tokenizers do. A window of the last tokens is decoded again with each new one, and what
    goes beyond the text shown so far is new; U+FFFD at its end, up to three of them, are held back
    because the next byte may complete them. The window is bounded, so the cost per token is constant.

    `context` are the tokens before the stream (the prompt's end): a tokenizer needs them to know whether
    the first word begins with a space, and a prompt may end in the middle of a character.

    >>> stream = StreamingDecoder(lambda ids: bytes(ids).decode("utf-8", "replace"))
    >>> [stream.push(byte) for byte in "é!".encode()], stream.finish()
    (['', 'é', '!'], '')
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()):
        self._decode = decode
        self._window = list(context[-KEEP:])
        text = decode(self._window) if self._window else ""
        self._shown = len(text) - held_back(text)

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        certain = len(text) - held_back(text)
        new = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if len(self._window) >= TRIM:
            self._trim(len(text))
        return new

    def finish(self) -> str:
        """Return the text that was held back: the stream is over, nothing will complete it."""
        text = self._decode(self._window)
        new = text[self._shown :]
        self._shown = len(text)
        return new

    @property
    def recent(self) -> list[int]:
        """The last tokens: all the context that a stream going on from here needs."""
        return self._window[-KEEP:]

    def _trim(self, length: int) -> None:
        """Forgets all but the last tokens. Text is counted from its end, which they alone determine."""
        self._window = self._window[-KEEP:]
        self._shown = len(self._decode(self._window)) - (length - self._shown)


class ByteDecoder:
    """Tokens in, the text that they make certain out, as `StreamingDecoder`, at a tenth of its cost per token.

    Nothing is decoded twice: at most three bytes of an unfinished character wait for the next token. `context` are the
    tokens before the stream, which may end in the middle of a character.
    """

    def __init__(self, table: ByteTable, context: Sequence[int] = ()):
        self._table = table
        self._recent = deque(context[-KEEP:], KEEP)
        self._half = b""
        self._decode(b"".join([table[token][0] for token in self._recent]))

    def push(self, token: int) -> str:
        self._recent.append(token)
        data, text = self._table[token]
        return self._decode(data) if self._half or text is None else text

    def finish(self) -> str:
        """Return the text that was held back: the stream is over, nothing will complete it."""
        half, self._half = self._half, b""
        return half.decode("utf-8", "replace")

    @property
    def recent(self) -> list[int]:
        """The last tokens: all the context that a stream going on from here needs."""
        return list(self._recent)

    def _decode(self, data: bytes) -> str:
        data = self._half + data
        text, used = utf_8_decode(data, "replace", False)
        self._half = data[used:]
        return text


def held_back(text: str) -> int:
    """How many characters at the end of `text` may still change: U+FFFD there, up to three."""
    tail = text[-INCOMPLETE:]
    return len(tail) - len(tail.rstrip(REPLACEMENT))


class StopStrings:
    """Cuts a stream of text before the first of some strings, and holds back what may be the start of one.

    >>> stop = StopStrings(["END"])
    >>> stop.push("the E"), stop.push("ND of"), stop.stopped
    ('the ', '', True)
    """

    def __init__(self, strings: Sequence[str]):
        if "" in strings:
            raise ValueError("a stop string must have at least one character; got an empty one")
        self._strings = tuple(strings)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if self.stopped or not self._strings:
            return "" if self.stopped else text
        text = self._held + text
        starts = [at for at in (text.find(s) for s in self._strings) if at >= 0]
        if starts:
            self.stopped, self._held = True, ""
            return text[: min(starts)]
        cut = len(text) - max((overlap(text, s) for s in self._strings), default=0)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The held text: the stream ended before it became a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, string: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `string`."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)


class TextStream:
    """The text of one sequence as far as it may be shown: whole characters, up to its end or a stop string.

    `over` says why it ended, once it has; tokens pushed after that are left out.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = (), stop: Sequence[str] = ()):
        self._decoder: ByteDecoder | StreamingDecoder
        if isinstance(decode, ByteTable):
            self._decoder = ByteDecoder(decode, context)
        else:
            self._decoder = StreamingDecoder(decode, context)
        self._stop = StopStrings(stop)
        self._text: list[str] = []
        self.over = ""

    def push(self, token: int, ends: Collection[int] = ()) -> None:
        """`ends`: tokens that end a text and are not shown."""
        if token in ends:
            self.finish("the text is at its end")
        if self.over:
            return
        self._text.append(self._stop.push(self._decoder.push(token)))
        self.over = "a stop string was met" if self._stop.stopped else ""

    def finish(self, why: str, *, goes_on: bool = False) -> None:
        """No more tokens: what was held back comes out. If the sequence `goes_on`, half a character stays
        back: a later stream, with `recent` as its context, will complete it.
        """
        if not self.over:
            half = "" if goes_on else self._decoder.finish()
            self._text.append(self._stop.push(half) + self._stop.finish())
            self.over = why

    @property
    def recent(self) -> list[int]:
        """The last few tokens, the context's among them: the context of a stream that goes on from here."""
        return self._decoder.recent

    def take(self) -> str:
        """The text since the last take."""
        text = "".join(self._text)
        self._text.clear()
        return text
