"""Events as the chunks of a stream. All but the text is the same each time, and so is written once."""

import json
from collections.abc import Callable
from typing import Any

from tarnn.serving.http.answers import check
from tarnn.serving.http.asking import usage_of
from tarnn.serving.http.reader import Reader
from tarnn.serving.http.sse import DONE, escaped
from tarnn.serving.http.wire import StreamOptions
from tarnn.serving.request import Event


class Chunks:
    """head: what all chunks of an answer have. opened, first: what stands before a text, and before the first of a choice;
    closed: behind it. options: whether usage is told, behind all chunks or in each. logprobs: of an event, as JSON; None: they
    were not asked for.
    """

    def __init__(
        self,
        head: dict[str, Any],
        reader: Reader,
        *,
        opened: bytes,
        first: bytes | None = None,
        closed: bytes = b"",
        options: StreamOptions | None,
        logprobs: Callable[[Event], Any] | None,
    ):
        self._head, self._reader, self._logprobs = head, reader, logprobs
        self._with_usage = bool(options and options.include_usage)
        self._usage_in_each = self._with_usage and bool(options and options.continuous_usage_stats)
        self._begin = b"data: " + compact(head)[:-1] + b',"choices":[{"index":'
        self._opened, self._closed = b"," + opened, closed
        self._first = self._opened if first is None else b"," + first
        self._end_with(b',"usage":null}\n\n' if self._with_usage else b"}\n\n")
        self._begun: set[int] = set()

    def _end_with(self, end: bytes) -> None:
        self._end = end
        self._goes_on = self._closed + b',"logprobs":null,"finish_reason":null}]' + end

    def encode(self, events: list[Event]) -> bytes:
        if self._usage_in_each:
            self._end_with(b',"usage":%b}\n\n' % compact(usage_of(self._reader.usage)))
        return b"".join(map(self._chunk, events))

    def _chunk(self, event: Event) -> bytes:
        choice = event.choice
        opened = self._opened
        if choice not in self._begun:
            self._begun.add(choice)
            opened = self._first
        text = escaped(event.text)
        if not event.finish and self._logprobs is None:
            return b"%b%d%b%b%b" % (self._begin, choice, opened, text, self._goes_on)
        if event.finish:
            check(event)
        logprobs = b"null" if self._logprobs is None else compact(self._logprobs(event))
        finish = compact(event.finish or None)
        rest = b'%b,"logprobs":%b,"finish_reason":%b}]%b' % (self._closed, logprobs, finish, self._end)
        return b"%b%d%b%b%b" % (self._begin, choice, opened, text, rest)

    def last(self) -> bytes:
        if not self._with_usage:
            return DONE
        whole = self._head | {"choices": [], "usage": usage_of(self._reader.usage)}
        return b"data: " + compact(whole) + b"\n\n" + DONE


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
