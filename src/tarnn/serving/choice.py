"""One choice of a request, between the engine's thread, which writes it, and its reader, which takes what is new."""

from array import array
from collections import deque
from typing import Any

import numpy as np
from jaxtyping import Int

from tarnn.decoding.streaming import TextStream
from tarnn.serving.request import Event, TokenLogprob
from tarnn.serving.snapshot import Snapshot


class Choice:
    """One of the n texts of a request. Each side appends or counts and waits for nobody: no lock is needed.

    tokens: written so far; logprobs, one per token, where they are wanted; texts: if the request has stop strings, since the
    engine must look for these itself; both until the reader takes them. `finish` comes last. taken: tokens that it has had.

    For the engine alone: prompt, all tokens before it; most, how many it may write; at, its state while it has no row;
    ending, how it will end once its last token was read; proven, as of a snapshot.
    """

    def __init__(self, queue: Any, index: int, text: TextStream):
        self.queue, self.index = queue, index
        self.tokens, self.taken = array("i"), 0
        self.logprobs: deque[TokenLogprob] = deque()
        self.texts: deque[str] = deque()
        self.finish = self.error = self.ending = ""
        self.snapshot: Snapshot | None = None
        self.prompt: Int[np.ndarray, " t"] = np.zeros(0, np.int32)
        self.most = 0
        self.at: Snapshot | None = None
        begin = queue.request.begin
        self.proven = begin is None or begin.proven
        self._text = text
        self._engine_reads = bool(queue.request.stop)

    # of the engine's thread

    def wrote(self, token: int, logprob: TokenLogprob | None) -> None:
        """Add a token; set `ending` if it is the last one."""
        queue = self.queue
        if self._engine_reads:
            self._text.push(token, queue.ends)
            if self._text.over:
                self.ending = "stop"
            self.texts.append(self._text.take())
        if logprob is not None:
            self.logprobs.append(logprob)
        self.tokens.append(token)
        if token in queue.ends:
            self.ending = "stop"
        elif not self.ending and len(self.tokens) >= self.most:
            self.ending = "length"

    def end(self, finish: str, snapshot: Snapshot | None = None, error: str = "") -> None:
        """End the choice."""
        if self._engine_reads:
            self._text.finish(finish, goes_on=_goes_on(finish, snapshot))
            self.texts.append(self._text.take())
        self.snapshot, self.error, self.at = snapshot, error, None
        self.finish = finish

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the choice."""
        return len(self.prompt) + len(self.tokens)

    def all_tokens(self) -> Int[np.ndarray, " t"]:
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    # of the reader

    @property
    def has_news(self) -> bool:
        return bool(self.finish) or len(self.tokens) > self.taken

    def take(self) -> Event | None:
        """Return what is new, or None."""
        finish = self.finish  # before the rest, so that nothing can come after it
        tokens = self.tokens[self.taken :].tolist()
        logprobs = [self.logprobs.popleft() for _ in tokens] if self.logprobs else []
        self.taken += len(tokens)
        text = self._take_text(tokens, finish)
        if not (tokens or text or finish):
            return None
        return Event(self.index, text, tuple(tokens), tuple(logprobs), finish, self.snapshot, self.error)

    def _take_text(self, tokens: list[int], finish: str) -> str:
        if self._engine_reads:
            return "".join(self.texts.popleft() for _ in range(len(self.texts)))
        for token in tokens:
            self._text.push(token, self.queue.ends)
        if finish:
            self._text.finish(finish, goes_on=_goes_on(finish, self.snapshot))
        return self._text.take()


def _goes_on(finish: str, snapshot: Snapshot | None) -> bool:
    """Return True if half a character at the end may be completed by what goes on from the snapshot."""
    return finish == "length" and snapshot is not None
