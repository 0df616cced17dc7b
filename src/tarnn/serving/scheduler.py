"""Schedule the engine's work: in each step, read a piece of a prompt, then write one token of every row.

One thread calls it. Nothing here waits, for a reader or for anything else.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
from jaxtyping import Int
from torch import Tensor

from tarnn.serving.fairness import FairQueue, client_of, has_fewer_rows, next_choice, requests_to_end, row_to_preempt
from tarnn.serving.model import ServedModel
from tarnn.serving.pool import EVERY, Prefill, room_for
from tarnn.serving.rows import Rows, without
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.stream import Choice, RequestQueue, notify

MOST_UNREAD = 256  # tokens of a choice that its reader has not taken; beyond, the request is paused
LOOK = 32  # steps between two looks for slow readers
AHEAD = 2  # choices that may wait, their prompts read, for a row to become free
GAP = 4e-3  # most extra seconds of prefill between two decode steps
TOO_SLOW = "nobody read this text for long, and there is no more room for texts that wait for their readers."
LEAST_PIECE = 32  # fewest tokens of a prompt that are read at once: fewer take as long


class PrefixCache(Protocol):
    """The part of a store of states that the engine calls."""

    def longest(self, tenant: str, tokens: Int[np.ndarray, " t"], room: int = 0) -> Snapshot | None: ...

    def keep(self, tenant: str, snapshot: Snapshot) -> object: ...


class Scheduler:
    """Prompts to read, choices in rows, choices that are ready for a row, and those paused because their readers are slow.

    max_paused: bytes of the states of paused choices. when_read: called with each request that leaves the queue.
    """

    def __init__(
        self,
        model: ServedModel,
        store: PrefixCache | None,
        max_rows: int,
        prefill_piece: int,
        max_paused: int,
        when_read: Callable[[RequestQueue], None],
    ):
        self._model, self._max_paused, self._when_read = model, max_paused, when_read
        self.store, self._max_rows, self._piece = store, max_rows, prefill_piece
        self._limit = model.model.config.max_position_embeddings
        self.prompts = FairQueue(prefill_piece)
        self.rows = Rows(model, max_rows)
        self.ready: deque[Choice] = deque()
        self.paused: dict[RequestQueue, list[Choice]] = {}
        self.tokens_read = self.tokens_written = self.tokens_cached = self.errors = self._count = 0
        self.error = ""  # the last one
        self.pace = 1 / 4000  # seconds in which a token of a prompt is read, as measured
        self._to_notify: dict[RequestQueue, None] = {}

    @property
    def busy(self) -> bool:
        """Return True if there is work to do now."""
        return bool(self.rows or self.ready or self.prompts)

    def add(self, prefill: Prefill) -> None:
        self.prompts.add(prefill)

    def cancel(self, queue: RequestQueue) -> None:
        """End the choices of a request."""
        self._leave(queue)
        self._end_all(queue, "cancelled")

    def resume(self, queue: RequestQueue) -> None:
        """Go on with a paused request, whose reader has taken what was there."""
        queue.paused = False
        self.ready.extend(self.paused.pop(queue, ()))

    def step(self) -> None:
        """Read pieces of prompts, fill rows, and write one token of each row."""
        if self.prompts:
            self._read()
        if self.ready:
            self._fill_rows()
        if self.rows:
            try:
                self._write()
            except Exception as error:
                for queue in dict.fromkeys(x.queue for x in self.rows.clear()):
                    self._fail(queue, f"the model failed: {type(error).__name__}: {error}")
        self.notify_readers()

    def notify_readers(self) -> None:
        """Notify the readers of choices that have ended."""
        if self._to_notify:
            ended, self._to_notify = self._to_notify, {}
            notify(ended)

    def end(self, finish: str, error: str = "") -> None:
        """End all that goes on."""
        queues = [x.queue for x in (*self.rows.clear(), *self.ready)]
        queues += [*self.paused, *(x.queue for x in self.prompts.clear())]
        self.ready.clear()
        self.paused.clear()
        for queue in dict.fromkeys(queues):
            self._when_read(queue)
            self._end_all(queue, finish, error)

    def _read(self) -> None:
        """Read pieces of prompts, for about as long as the rows can wait for their next token."""
        left = self._piece
        if self.rows:
            left = max(LEAST_PIECE, min(left, int(GAP / self.pace)))
        while left > 0 and (prefill := self.prompts.first(self._may_read)) is not None:
            # a prompt that needn't be read takes time too
            left -= max(LEAST_PIECE // 2, self._read_piece(prefill, left))

    def _may_read(self, client: str) -> bool:
        """Return True if a prompt of this client will have a row soon."""
        if len(self.rows) + len(self.ready) < self._max_rows + AHEAD:
            return True
        return client not in map(client_of, self.ready) and has_fewer_rows(client, self.rows.choices)

    def _read_piece(self, prefill: Prefill, most: int) -> int:
        """Read at most `most` tokens of a prompt; return how many were read."""
        queue, before, start = prefill.queue, prefill.done, time.perf_counter()
        try:
            if not prefill.begun:
                self._start(prefill)
                before = prefill.done
            for snapshot in prefill.read(self._model, most):
                self._keep(queue, snapshot)
            num_tokens = prefill.done - before
            self.tokens_read += num_tokens
            self.prompts.advance(prefill, num_tokens)
            if not prefill.left:
                self._end_of_prompt(prefill)
        except Exception as error:
            self._fail(queue, f"the prompt could not be read: {error}")
            return 0
        if num_tokens >= LEAST_PIECE:
            self.pace += 0.2 * ((time.perf_counter() - start) / num_tokens - self.pace)
        return num_tokens

    def _fill_rows(self) -> None:
        """Give free rows to ready choices, and rows of a client that has too many to others."""
        while self.ready and not self.rows.full:
            index = next_choice(self.ready, self.rows.choices) if len(self.ready) > 1 else 0
            choice = self.ready[index]
            del self.ready[index]
            self._join(choice)
        while self.ready and (row := row_to_preempt(self.ready, self.rows.choices)) is not None:
            index = next_choice(self.ready, self.rows.choices)
            first = self.ready[index]
            del self.ready[index]
            self.ready.append(self.rows.leave(row, keep=True))
            self._join(first)

    def _start(self, prefill: Prefill) -> None:
        found = None
        if self.store is not None and prefill.proven:
            try:
                room = room_for(len(prefill.tokens), self._limit)
                found = self.store.longest(prefill.request.tenant, prefill.tokens, room)
            except Exception as error:  # what is not found is read
                self.error = f"the store of states: {error}"
        prefill.start(found)
        self.tokens_cached += prefill.done

    def _end_of_prompt(self, prefill: Prefill) -> None:
        queue, request, at = prefill.queue, prefill.request, prefill.end()
        self._when_read(queue)
        self._keep(queue, at)
        shared = replace(at, alone=False)
        most = min(request.max_tokens, self._room(len(at.tokens)))
        for choice in queue.choices:
            choice.prompt, choice.most, choice.at = at.tokens, most, at if request.n == 1 else shared
            if most > 0:
                self.ready.append(choice)
            else:
                self._end(choice, "length", shared if request.keep else None)

    def _join(self, choice: Choice) -> None:
        try:
            self.rows.join(choice)
        except Exception as error:
            self._fail(choice.queue, f"the answer could not begin: {error}")

    def _room(self, length: int) -> int:
        """Return how many tokens can be written after `length`."""
        return 2**62 if self._limit is None else self._limit - length

    def _write(self) -> None:
        """Draw a token for each row, hand them over, and read them."""
        rows, n = self.rows, len(self.rows)
        tokens, look = rows.draw()
        self.tokens_written += n
        queues = rows.queues
        if look:
            tokens = self._end_unread(tokens)
            queues, self._to_notify = list(dict.fromkeys([*queues, *self._to_notify])), {}
        notify(queues)
        if rows:
            rows.step(tokens)
        if look:
            self._keep_read()
        self._count += 1
        if self._count % LOOK == 0:
            for queue in rows.queues:
                if any(len(x.tokens) - x.taken > MOST_UNREAD for x in queue.choices):
                    self._pause(queue)

    def _end_unread(self, tokens: Tensor) -> Tensor:
        """End choices at their last token before the step if the state after it is not needed; return the other rows' tokens."""
        for row in range(len(self.rows) - 1, -1, -1):
            choice = self.rows.choices[row]
            if choice.finish:
                self._count_error(choice.error)
                self._to_notify[choice.queue] = None
            elif choice.ending and not (choice.queue.request.keep or self.store):
                self._end(choice, choice.ending)
            else:
                continue
            self.rows.leave(row)
            tokens = without(tokens, row)
        return tokens

    def _keep_read(self) -> None:
        """End the choices whose last token was read now; keep their states, and those of long choices."""
        for row in range(len(self.rows) - 1, -1, -1):
            choice = self.rows.choices[row]
            if choice.ending:
                end = self.rows.snapshot(row)
                self._keep(choice.queue, end)
                self._end(choice, choice.ending, end if choice.queue.request.keep else None)
                self.rows.leave(row)
            elif self.store is not None and choice.length % EVERY == 0:
                self._keep(choice.queue, self.rows.snapshot(row))

    def _keep(self, queue: RequestQueue, snapshot: Snapshot) -> None:
        """Keep a state in the store, unless it diverged: that would spoil whatever goes on from it."""
        if self.store is None or not snapshot.proven or not snapshot.logits.isfinite().all():
            return
        try:
            self.store.keep(queue.request.tenant, snapshot)
        except Exception as error:  # an answer doesn't depend on what is kept
            self.error = f"the store of states: {error}"

    def _pause(self, queue: RequestQueue) -> None:
        """Take the rows from a slow reader, until it has taken what is there."""
        self.paused[queue] = self._leave(queue, keep=True)
        queue.paused = True
        if not any(x.has_news for x in queue.choices):  # the reader was quicker than this
            queue.ask("resume", queue)
        for queue in requests_to_end(self.paused, self._max_paused):
            self._leave(queue)
            self._end_all(queue, "error", TOO_SLOW)

    def _leave(self, queue: RequestQueue, *, keep: bool = False) -> list[Choice]:
        """Remove a request's choices from wherever they are; return them. keep: with the states of those that had rows."""
        if self.prompts.remove(queue):
            self._when_read(queue)
        choices = self.paused.pop(queue, [])
        for row in range(len(self.rows) - 1, -1, -1):
            if self.rows.choices[row].queue is queue:
                choices.append(self.rows.leave(row, keep=keep))
        waiting = [x for x in self.ready if x.queue is queue]
        if waiting:
            self.ready = deque(x for x in self.ready if x.queue is not queue)
        return [*choices, *waiting]

    def _fail(self, queue: RequestQueue, error: str) -> None:
        self._leave(queue)
        self._when_read(queue)
        self._count_error(error)
        self._end_all(queue, "error", error)

    def _count_error(self, error: str) -> None:
        self.errors, self.error = self.errors + 1, error

    def _end_all(self, queue: RequestQueue, finish: str, error: str = "") -> None:
        """End every choice of a request that goes on."""
        for choice in queue.going_on:
            self._end(choice, finish, error=error)

    def _end(self, choice: Choice, finish: str, snapshot: Snapshot | None = None, error: str = "") -> None:
        choice.end(finish, snapshot, error)
        self._to_notify[choice.queue] = None
