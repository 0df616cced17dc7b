"""What the engine does, one round after the other: read a piece of a prompt, then write one token of every row.

One thread calls it. Nothing here waits, for a reader or for anything else.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from jaxtyping import Int
from torch import Tensor

from tarnn.serving.answer import Answer
from tarnn.serving.model import ServedModel
from tarnn.serving.queue import FairQueue
from tarnn.serving.reading import Reading
from tarnn.serving.rows import EVERY, Rows, without
from tarnn.serving.shares import client_of, given_up, is_behind, makes_way, next_of
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.stream import Mail, wake

MOST_UNREAD = 256  # tokens of a choice that its reader has not taken; beyond, the request is parked
LOOK = 32  # rounds after which it is looked who is to be parked
AHEAD = 2  # choices that may wait, their prompts read, for a row to become free
GAP = 4e-3  # seconds that reading may add to the time between two tokens of those who write
TOO_SLOW = "nobody read this text for long, and there is no more room for texts that wait for their readers."
LEAST_PIECE = 32  # tokens of a prompt that are read at least: fewer take as long


class Keeper(Protocol):
    """Of a store of states, what the engine calls."""

    def longest(self, tenant: str, tokens: Int[np.ndarray, " t"]) -> Snapshot | None: ...

    def keep(self, tenant: str, snapshot: Snapshot) -> object: ...


class Rounds:
    """The queue of prompts, the rows, answers that wait for a row, and those that are parked.

    max_parked: bytes of the states of those that are parked. when_read: called with each request that leaves the queue.
    """

    def __init__(
        self,
        model: ServedModel,
        store: Keeper | None,
        max_rows: int,
        prefill_piece: int,
        max_parked: int,
        when_read: Callable[[Mail], None],
    ):
        self._model, self._max_parked, self._when_read = model, max_parked, when_read
        self._store, self._max_rows, self._piece = store, max_rows, prefill_piece
        self._limit = model.model.config.max_position_embeddings
        self.queue = FairQueue(prefill_piece)
        self.rows = Rows(model, max_rows)
        self.ready: deque[Answer] = deque()
        self.parked: dict[Mail, list[Answer]] = {}
        self.tokens_read = self.tokens_written = self.tokens_cached = self.errors = self._count = 0
        self.error = ""  # the last one
        self.pace = 1 / 4000  # seconds in which a token of a prompt is read, as measured
        self._told: dict[Mail, None] = {}

    @property
    def busy(self) -> bool:
        """Whether there is something to do now."""
        return bool(self.rows or self.ready or self.queue)

    def add(self, reading: Reading) -> None:
        self.queue.add(reading)

    def cancel(self, mail: Mail) -> None:
        """Its answers end here."""
        self._leave(mail)
        self._end_all(mail, "cancelled")

    def resume(self, mail: Mail) -> None:
        """The reader has taken what was there."""
        mail.parked = False
        self.ready.extend(self.parked.pop(mail, ()))

    def turn(self) -> None:
        """One round."""
        if self.queue:
            self._read()
        if self.ready:
            self._fill_rows()
        if self.rows:
            try:
                self._write()
            except Exception as error:
                for mail in dict.fromkeys(x.mail for x in self.rows.clear()):
                    self._fail(mail, f"the model failed: {type(error).__name__}: {error}")
        self.tell()

    def tell(self) -> None:
        """Wake the readers of answers that have ended."""
        if self._told:
            told, self._told = self._told, {}
            wake(told)

    def end(self, finish: str, error: str = "") -> None:
        """All that goes on ends so."""
        mails = [x.mail for x in (*self.rows.clear(), *self.ready)]
        mails += [*self.parked, *(x.mail for x in self.queue.clear())]
        self.ready.clear()
        self.parked.clear()
        for mail in dict.fromkeys(mails):
            self._when_read(mail)
            self._end_all(mail, finish, error)

    def _read(self) -> None:
        """Pieces of prompts, for about as long as those who write can wait for their next token."""
        left = self._piece
        if self.rows:
            left = max(LEAST_PIECE, min(left, int(GAP / self.pace)))
        while left > 0 and (reading := self.queue.first(self._may_read)) is not None:
            left -= max(
                LEAST_PIECE // 2, self._read_piece(reading, left)
            )  # a prompt that needn't be read takes time too

    def _may_read(self, client: str) -> bool:
        """Whether a prompt of this client's will have a row soon."""
        if len(self.rows) + len(self.ready) < self._max_rows + AHEAD:
            return True
        return client not in map(client_of, self.ready) and is_behind(client, self.rows.answers)

    def _read_piece(self, reading: Reading, most: int) -> int:
        """How many tokens were read."""
        mail, before, start = reading.mail, reading.done, time.perf_counter()
        try:
            if not reading.begun:
                self._start(reading)
                before = reading.done
            for snapshot in reading.read(self._model, most):
                self._keep(mail, snapshot)
            num_tokens = reading.done - before
            self.tokens_read += num_tokens
            self.queue.read(reading, num_tokens)
            if not reading.left:
                self._end_of_prompt(reading)
        except Exception as error:
            self._fail(mail, f"the prompt could not be read: {error}")
            return 0
        if num_tokens >= LEAST_PIECE:
            self.pace += 0.2 * ((time.perf_counter() - start) / num_tokens - self.pace)
        return num_tokens

    def _fill_rows(self) -> None:
        """Those who wait get free rows, and of a client who has too many, others get one."""
        while self.ready and not self.rows.full:
            index = next_of(self.ready, self.rows.answers) if len(self.ready) > 1 else 0
            answer = self.ready[index]
            del self.ready[index]
            self._join(answer)
        while self.ready and (row := makes_way(self.ready, self.rows.answers)) is not None:
            index = next_of(self.ready, self.rows.answers)
            first, at = self.ready[index], self.rows.snapshot(row)
            del self.ready[index]
            self.ready.append(self.rows.leave(row))
            self.ready[-1].at = at
            self._join(first)

    def _start(self, reading: Reading) -> None:
        found = None
        if self._store is not None and reading.proven:
            try:
                found = self._store.longest(reading.request.tenant, reading.tokens)
            except Exception as error:  # what is not found is read
                self.error = f"the store of states: {error}"
        reading.start(found)
        self.tokens_cached += reading.done

    def _end_of_prompt(self, reading: Reading) -> None:
        mail, request, at = reading.mail, reading.request, reading.end()
        self._when_read(mail)
        self._keep(mail, at)
        most = min(request.max_tokens, self._room(len(at.tokens)))
        for answer in mail.answers:
            answer.prompt, answer.most, answer.at = at.tokens, most, at
            if most > 0:
                self.ready.append(answer)
            else:
                self._end(answer, "length", at if request.keep else None)

    def _join(self, answer: Answer) -> None:
        try:
            self.rows.join(answer)
        except Exception as error:
            self._fail(answer.mail, f"the answer could not begin: {error}")

    def _room(self, length: int) -> int:
        """Return how many tokens can be written after `length`."""
        return 2**62 if self._limit is None else self._limit - length

    def _write(self) -> None:
        """Draw a token for each row, hand them over, and read them."""
        rows, n = self.rows, len(self.rows)
        tokens, look = rows.draw()
        self.tokens_written += n
        told = rows.mails
        if look:
            tokens = self._end_unread(tokens)
            told, self._told = list(dict.fromkeys([*told, *self._told])), {}
        wake(told)
        if rows:
            rows.step(tokens)
        if look:
            self._keep_read()
        self._count += 1
        if self._count % LOOK == 0:
            for mail in rows.mails:
                if any(len(x.tokens) - x.taken > MOST_UNREAD for x in mail.answers):
                    self._park(mail)

    def _end_unread(self, tokens: Tensor) -> Tensor:
        """Answers at their end leave before the step, if nobody wants the state behind it; the tokens of the others."""
        for row in range(len(self.rows) - 1, -1, -1):
            answer = self.rows.answers[row]
            if answer.finish:
                self._count_error(answer.error)
                self._told[answer.mail] = None
            elif answer.ending and not (answer.mail.request.keep or self._store):
                self._end(answer, answer.ending)
            else:
                continue
            self.rows.leave(row)
            tokens = without(tokens, row)
        return tokens

    def _keep_read(self) -> None:
        """Of answers whose last token was read now, and of long ones, the state is kept."""
        for row in range(len(self.rows) - 1, -1, -1):
            answer = self.rows.answers[row]
            if answer.ending:
                end = self.rows.snapshot(row)
                self._keep(answer.mail, end)
                self._end(answer, answer.ending, end if answer.mail.request.keep else None)
                self.rows.leave(row)
            elif self._store is not None and answer.length % EVERY == 0:
                self._keep(answer.mail, self.rows.snapshot(row))

    def _keep(self, mail: Mail, snapshot: Snapshot) -> None:
        """A state that diverged would spoil whatever goes on from it."""
        if self._store is None or not snapshot.proven or not snapshot.logits.isfinite().all():
            return
        try:
            self._store.keep(mail.request.tenant, snapshot)
        except Exception as error:  # an answer doesn't depend on what is kept
            self.error = f"the store of states: {error}"

    def _park(self, mail: Mail) -> None:
        """The rows of a slow reader leave, until it has taken what is there."""
        self.parked[mail] = self._leave(mail, keep=True)
        mail.parked = True
        if not any(x.has_news for x in mail.answers):  # it was quicker than this
            mail.ask("resume", mail)
        for mail in given_up(self.parked, self._max_parked):
            self._leave(mail)
            self._end_all(mail, "error", TOO_SLOW)

    def _leave(self, mail: Mail, *, keep: bool = False) -> list[Answer]:
        """The answers of a request that go on; they are nowhere then. keep: those of rows with their states."""
        if self.queue.remove(mail):
            self._when_read(mail)
        answers = self.parked.pop(mail, [])
        for row in range(len(self.rows) - 1, -1, -1):
            if self.rows.answers[row].mail is mail:
                at = self.rows.snapshot(row) if keep else None
                answers.append(self.rows.leave(row))
                answers[-1].at = at
        waiting = [x for x in self.ready if x.mail is mail]
        if waiting:
            self.ready = deque(x for x in self.ready if x.mail is not mail)
        return [*answers, *waiting]

    def _fail(self, mail: Mail, error: str) -> None:
        self._leave(mail)
        self._when_read(mail)
        self._count_error(error)
        self._end_all(mail, "error", error)

    def _count_error(self, error: str) -> None:
        self.errors, self.error = self.errors + 1, error

    def _end_all(self, mail: Mail, finish: str, error: str = "") -> None:
        """Every answer that goes on ends."""
        for answer in mail.going_on:
            self._end(answer, finish, error=error)

    def _end(self, answer: Answer, finish: str, snapshot: Snapshot | None = None, error: str = "") -> None:
        answer.end(finish, snapshot, error)
        self._told[answer.mail] = None
