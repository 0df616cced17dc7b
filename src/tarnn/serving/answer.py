"""One choice of a request, between the engine's thread, which writes it, and its reader, who takes what is new."""

from array import array
from collections import deque
from typing import Any

import numpy as np
from jaxtyping import Int

from tarnn.decoding.streaming import TextStream
from tarnn.serving.request import Event, TokenLogprob
from tarnn.serving.snapshot import Snapshot


class Answer:
    """What one choice has written. Each side appends or counts and waits for nobody: no lock is needed.

    tokens: written so far; logprobs, one per token, where they are wanted; texts: where the request has stop strings, since the
    engine must look for these itself; both until the reader takes them. `finish` comes last. taken: tokens that it has had.

    Of the engine alone: prompt, all tokens before it; most, how many it may write; at, where it stands while it has no row of the
    pool; ending, how it will end once its last token was read; proven, as of a snapshot.
    """

    def __init__(self, mail: Any, choice: int, text: TextStream):
        self.mail, self.choice = mail, choice
        self.tokens, self.taken = array("i"), 0
        self.logprobs: deque[TokenLogprob] = deque()
        self.texts: deque[str] = deque()
        self.finish = self.error = self.ending = ""
        self.snapshot: Snapshot | None = None
        self.prompt: Int[np.ndarray, " t"] = np.zeros(0, np.int32)
        self.most = 0
        self.at: Snapshot | None = None
        begin = mail.request.begin
        self.proven = begin is None or begin.proven
        self._text = text
        self._engine_reads = bool(mail.request.stop)

    # of the engine's thread

    def wrote(self, token: int, logprob: TokenLogprob | None) -> None:
        """One token more; `ending` says whether it is the last one."""
        mail = self.mail
        if self._engine_reads:
            self._text.push(token, mail.ends)
            if self._text.over:
                self.ending = "stop"
            self.texts.append(self._text.take())
        if logprob is not None:
            self.logprobs.append(logprob)
        self.tokens.append(token)
        if token in mail.ends:
            self.ending = "stop"
        elif not self.ending and len(self.tokens) >= self.most:
            self.ending = "length"

    def end(self, finish: str, snapshot: Snapshot | None = None, error: str = "") -> None:
        """Nothing more will come."""
        if self._engine_reads:
            self._text.finish(finish, goes_on=_goes_on(finish, snapshot))
            self.texts.append(self._text.take())
        self.snapshot, self.error, self.at = snapshot, error, None
        self.finish = finish

    @property
    def length(self) -> int:
        """How many tokens the prompt and the answer have."""
        return len(self.prompt) + len(self.tokens)

    def all_tokens(self) -> Int[np.ndarray, " t"]:
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    # of the reader

    @property
    def has_news(self) -> bool:
        return bool(self.finish) or len(self.tokens) > self.taken

    def take(self) -> Event | None:
        """What is new."""
        finish = self.finish  # before the rest, so that nothing can come after it
        tokens = self.tokens[self.taken :].tolist()
        logprobs = [self.logprobs.popleft() for _ in tokens] if self.logprobs else []
        self.taken += len(tokens)
        text = self._take_text(tokens, finish)
        if not (tokens or text or finish):
            return None
        return Event(self.choice, text, tuple(tokens), tuple(logprobs), finish, self.snapshot, self.error)

    def _take_text(self, tokens: list[int], finish: str) -> str:
        if self._engine_reads:
            return "".join(self.texts.popleft() for _ in range(len(self.texts)))
        for token in tokens:
            self._text.push(token, self.mail.ends)
        if finish:
            self._text.finish(finish, goes_on=_goes_on(finish, self.snapshot))
        return self._text.take()


def _goes_on(finish: str, snapshot: Snapshot | None) -> bool:
    """Whether half a character at the end may be completed by what goes on from the snapshot."""
    return finish == "length" and snapshot is not None
