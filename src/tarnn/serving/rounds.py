"""What the engine does, one round after the other: read a piece of a prompt, then write one token of every row.

One thread calls it. Nothing here waits, for a reader or for anything else.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Int

from tarnn.decoding.draws import Drawn, RowSampling, draw_rows
from tarnn.models.images import ImageModel
from tarnn.models.likelihoods import NUM_VALUES
from tarnn.serving.model import ServedModel
from tarnn.serving.pool import Pool, logits_of
from tarnn.serving.queue import FairQueue
from tarnn.serving.reading import EVERY, Reading
from tarnn.serving.request import TokenLogprob
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.stream import NO_TOKEN, Mail, News, wake
from tarnn.serving.writing import Writing

MOST_UNREAD = 256  # news of a request that its reader has not taken; beyond, its rows are parked
AHEAD = 2  # choices that may wait, their prompts read, for a row to become free
DIVERGED = (
    "the model's logits are no distribution (NaN or infinite): its weights or its state have diverged. Check the checkpoint, or "
    "serve it in float32."
)


class Keeper(Protocol):
    """Of a store of states, what the engine calls."""

    def longest(self, tenant: str, tokens: Int[np.ndarray, " t"]) -> Snapshot | None: ...

    def keep(self, tenant: str, snapshot: Snapshot) -> object: ...


class Rounds:
    """The queue of prompts, the rows of the pool, choices that wait for a row, and those that are parked.

    when_read: called with each request that leaves the queue.
    """

    def __init__(
        self,
        model: ServedModel,
        store: Keeper | None,
        max_rows: int,
        prefill_piece: int,
        when_read: Callable[[Mail], None],
    ):
        self._model, self._store, self._when_read = model, store, when_read
        self._max_rows, self._piece = max_rows, prefill_piece
        self._pool = Pool(model, max_rows)
        self._sampling = RowSampling(max_rows, NUM_VALUES if model.draws_images else model.step.num_outputs)
        self._limit = model.model.config.max_position_embeddings
        self.queue = FairQueue(prefill_piece)
        self.rows: list[Writing] = []
        self.ready: deque[Writing] = deque()
        self.parked: dict[Mail, list[Writing]] = {}
        self.tokens_read = self.tokens_written = self.tokens_cached = self.errors = 0
        self._told: dict[Mail, None] = {}

    @property
    def busy(self) -> bool:
        """Whether there is something to do now."""
        return bool(self.rows or self.ready or self.queue)

    def add(self, mail: Mail) -> None:
        self.queue.add(Reading(mail))

    def cancel(self, mail: Mail) -> None:
        """Its choices end here."""
        self._leave(mail)
        self._end_all(mail, "cancelled")

    def resume(self, mail: Mail) -> None:
        """The reader has taken what was there."""
        mail.parked = False
        self.ready.extend(self.parked.pop(mail, ()))

    def turn(self) -> None:
        """One round."""
        if self.queue and len(self.rows) + len(self.ready) < self._max_rows + AHEAD:
            self._read_piece()
        while self.ready and len(self.rows) < self._max_rows:
            self._begin_row(self.ready.popleft())
        if self.rows:
            self._write()
        self.tell()

    def tell(self) -> None:
        """Wake the readers of what is new."""
        if self._told:
            told, self._told = self._told, {}
            wake(told)

    def end(self, finish: str, error: str = "") -> None:
        """All that goes on ends so."""
        mails = [x.mail for x in (*self.rows, *self.ready)]
        mails += [*self.parked, *(x.mail for x in self.queue.clear())]
        self._pool.num_rows = 0
        self.rows.clear()
        self.ready.clear()
        self.parked.clear()
        for mail in dict.fromkeys(mails):
            self.errors += bool(error)
            self._when_read(mail)
            self._end_all(mail, finish, error)

    def _read_piece(self) -> None:
        reading, most = self.queue.first()
        mail = reading.mail
        try:
            if not reading.begun:
                self._start(reading)
            before = reading.done
            for snapshot in reading.read(self._model, min(most, self._piece)):
                self._keep(mail, snapshot)
            self.tokens_read += reading.done - before
            self.queue.read(reading, reading.done - before)
            if not reading.left:
                self._end_of_prompt(reading)
        except Exception as error:
            self._fail(mail, f"its prompt could not be read: {error}")

    def _start(self, reading: Reading) -> None:
        found = None
        if self._store is not None and not self._model.draws_images:
            found = self._store.longest(reading.request.tenant, reading.tokens)
        reading.start(found)
        self.tokens_cached += reading.done

    def _end_of_prompt(self, reading: Reading) -> None:
        mail, request, at = reading.mail, reading.request, reading.end()
        self._when_read(mail)
        self._keep(mail, at)
        most = min(request.max_tokens, self._room(len(at.tokens)))
        for choice in range(request.n):
            writing = Writing(mail, choice, at.tokens, at, most)
            if most:
                self.ready.append(writing)
            else:
                self._give(mail, writing.ended("length", at if request.keep else None))

    def _room(self, length: int) -> int:
        """How many tokens can be written behind so many."""
        last_unread = 1 if isinstance(self._model.model, ImageModel) else 0  # nothing comes after an image's last value
        return 2**62 if self._limit is None else self._limit - length + last_unread

    def _begin_row(self, writing: Writing) -> None:
        assert writing.at is not None
        row = self._pool.add(writing.at)
        mail, request = writing.mail, writing.mail.request
        self._sampling.put(
            row,
            request.sampling,
            seed=mail.seed,
            choice=writing.choice,
            prompt=writing.prompt,
            written=writing.written,
            likeliest=request.logprobs,
        )
        writing.at = None
        self.rows.append(writing)

    def _end_row(self, row: int) -> None:
        """The last row takes its place."""
        last = len(self.rows) - 1
        self._pool.remove(row)
        self._sampling.move(last, row)
        self.rows[row] = self.rows[last]
        self.rows.pop()

    def _write(self) -> None:
        """Draw a token for each row, hand them over, and read them."""
        n = len(self.rows)
        drawn = draw_rows(logits_of(self._model, self._pool.parameters[:n]), self._sampling)
        self._sampling.wrote(drawn.tokens)
        tokens = drawn.tokens.tolist()
        for row, (writing, token) in enumerate(zip(self.rows, tokens)):
            logprob = None
            if token == NO_TOKEN:
                self._give(writing.mail, writing.ended("error", error=DIVERGED))
                self.errors += 1
                continue
            if writing.mail.request.logprobs is not None:
                logprob = logprob_of(drawn, row, token)
            news = writing.wrote(token, logprob)
            if writing.finish and not self._wants_end(writing):
                news = news._replace(finish=writing.finish)
            self._give(writing.mail, news)
        self.tokens_written += n
        self.tell()
        for row in range(n - 1, -1, -1):
            writing = self.rows[row]
            if writing.finish and not self._wants_end(writing):
                tokens[row] = tokens[-1]
                tokens.pop()
                self._end_row(row)
        if tokens:
            self._pool.step(torch.tensor(tokens))
            self._after_step()

    def _after_step(self) -> None:
        for row in range(len(self.rows) - 1, -1, -1):
            writing = self.rows[row]
            if writing.finish:
                end = self._snapshot(row)
                self._keep(writing.mail, end)
                self._give(writing.mail, News(writing.choice, finish=writing.finish, snapshot=self._kept(writing, end)))
                self._end_row(row)
            elif self._store is not None and writing.length % EVERY == 0:
                self._keep(writing.mail, self._snapshot(row))
        if any(len(x.mail.news) > MOST_UNREAD for x in self.rows):
            for mail in {x.mail for x in self.rows if len(x.mail.news) > MOST_UNREAD}:
                self._park(mail)

    def _kept(self, writing: Writing, end: Snapshot) -> Snapshot | None:
        return end if writing.mail.request.keep else None

    def _wants_end(self, writing: Writing) -> bool:
        """Whether the state after the answer's last token is wanted, which must be read then."""
        if writing.finish == "error" or (self._model.draws_images and not writing.left):
            return False
        return writing.mail.request.keep or self._store is not None

    def _snapshot(self, row: int) -> Snapshot:
        return self._pool.snapshot(row, self.rows[row].tokens())

    def _keep(self, mail: Mail, snapshot: Snapshot) -> None:
        """A state that diverged would spoil whatever goes on from it."""
        if self._store is not None and not self._model.draws_images and snapshot.logits.isfinite().all():
            self._store.keep(mail.request.tenant, snapshot)

    def _park(self, mail: Mail) -> None:
        """The rows of a slow reader leave, until it has taken what is there."""
        self.parked[mail] = self._leave(mail, keep=True)
        mail.parked = True
        if not mail.news:  # it was quicker than this
            mail.ask("resume", mail)

    def _leave(self, mail: Mail, *, keep: bool = False) -> list[Writing]:
        """The choices of a request that go on; they are nowhere then. keep: those of rows with their states."""
        if self.queue.remove(mail):
            self._when_read(mail)
        writings = self.parked.pop(mail, [])
        for row in range(len(self.rows) - 1, -1, -1):
            if (writing := self.rows[row]).mail is mail:
                writing.at = self._snapshot(row) if keep else None
                writings.append(writing)
                self._end_row(row)
        waiting = [x for x in self.ready if x.mail is mail]
        if waiting:
            self.ready = deque(x for x in self.ready if x.mail is not mail)
        return [*writings, *waiting]

    def _end_all(self, mail: Mail, finish: str, error: str = "") -> None:
        """Every choice that has not ended does."""
        for choice in sorted(mail.going_on):
            self._give(mail, News(choice, finish=finish, error=error))

    def _fail(self, mail: Mail, error: str) -> None:
        self._leave(mail)
        self.errors += 1
        self._end_all(mail, "error", error)

    def _give(self, mail: Mail, news: News) -> None:
        mail.news.append(news)
        if news.finish:
            mail.going_on.discard(news.choice)
        self._told[mail] = None


def logprob_of(drawn: Drawn, row: int, token: int) -> TokenLogprob:
    """What is told of the token that this row has drawn."""
    assert drawn.logprobs is not None
    likeliest: tuple[tuple[int, float], ...] = ()
    if drawn.likeliest is not None and drawn.likeliest_logprobs is not None:
        pairs = zip(drawn.likeliest[row].tolist(), drawn.likeliest_logprobs[row].tolist())
        likeliest = tuple(x for x in pairs if x[0] != NO_TOKEN)
    return TokenLogprob(token, float(drawn.logprobs[row]), likeliest)
