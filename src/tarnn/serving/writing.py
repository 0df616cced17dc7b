"""One choice of a request, being written: what it has, how far it may go, and when it is over."""

import numpy as np
from jaxtyping import Int

from tarnn.serving.request import TokenLogprob
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.stream import Mail, News


class Writing:
    """A choice that goes on from `at`, where it stands while it has no row of the pool.

    prompt: all tokens before its answer. left: how many it may still write. finish: "" while it goes on.
    """

    __slots__ = ("at", "choice", "finish", "left", "mail", "prompt", "text", "written")

    def __init__(self, mail: Mail, choice: int, prompt: Int[np.ndarray, " t"], at: Snapshot, most: int):
        self.mail, self.choice, self.prompt, self.left = mail, choice, prompt, most
        self.at: Snapshot | None = at
        self.written: list[int] = []
        self.text = mail.text_stream() if mail.request.stop else None
        self.finish = ""

    def wrote(self, token: int, logprob: TokenLogprob | None = None) -> News:
        """What the reader gets of a token, and whether the choice ends with it, as `finish` says from then on."""
        self.written.append(token)
        self.left -= 1
        self.mail.num_written += 1
        text = None
        if token in self.mail.ends:
            self.finish = "stop"
        if self.text is not None:
            self.text.push(token, self.mail.ends)
            if self.text.over:
                self.finish = "stop"
            elif not self.left:
                self.text.finish("length", goes_on=self.mail.request.keep)
            text = self.text.take()
        if not self.left and not self.finish:
            self.finish = "length"
        return News(self.choice, token, logprob, text)

    def ended(self, finish: str, snapshot: Snapshot | None = None, error: str = "") -> News:
        """Nothing more will come. What was held back as the beginning of a stop string is shown."""
        self.finish, text = finish, None
        if self.text is not None:
            self.text.finish(finish)
            text = self.text.take()
        return News(self.choice, text=text, finish=finish, snapshot=snapshot, error=error)

    @property
    def length(self) -> int:
        """How many tokens were read and written."""
        return len(self.prompt) + len(self.written)

    def tokens(self) -> Int[np.ndarray, " t"]:
        """All that was read and written."""
        return np.concatenate([self.prompt, np.array(self.written, np.int32)])
