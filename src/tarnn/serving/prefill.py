"""Read a prompt from the deepest known state of its beginning, a piece at a time."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int

from tarnn.models.state import ModelState
from tarnn.serving.model import ServedModel
from tarnn.serving.pool import copy_of, new_state
from tarnn.serving.request import Request
from tarnn.serving.rows import EVERY
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.stream import RequestQueue


class Prefill:
    """A request whose prompt has been read up to `done`. tokens: what it begins from, and its prompt. proven: as of a snapshot.

    The state is its own from its first piece on; until then it is a snapshot that others may share.
    """

    def __init__(self, queue: RequestQueue):
        self.queue = queue
        self.request: Request = queue.request
        begin = self.request.begin
        parts = [self.request.prompt] if begin is None else [begin.tokens, self.request.prompt]
        self.tokens: Int[np.ndarray, " t"] = np.concatenate(parts).astype(np.int32, copy=False)
        self.done = 0
        self._at: Snapshot | None = None
        self._state: ModelState | None = None
        self._begun = False
        self.proven = begin is None or begin.proven
        self._marks = self._places()

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done

    def start(self, found: Snapshot | None) -> None:
        """Begin from `found`, a state of a beginning of the tokens, or from the request's own, whichever is deeper."""
        begin = self.request.begin
        best = max((x for x in (begin, found) if x is not None), key=lambda x: len(x.tokens), default=None)
        self._at, self._begun = best, True
        self.done = self.queue.num_cached = 0 if best is None else len(best.tokens)

    @property
    def begun(self) -> bool:
        return self._begun

    def read(self, model: ServedModel, most: int) -> Iterator[Snapshot]:
        """Read up to `most` tokens; yield a copy at each place on the way whose state is worth keeping."""
        if self._state is None:
            at, length = self._at, len(self.tokens)
            self._state = new_state(model, 1, capacity=length) if at is None else copy_of(at.state, length)
        end = min(self.done + most, len(self.tokens))
        while self.done < end:
            while self._marks and self._marks[-1] <= self.done:
                self._marks.pop()
            stop = min(end, self._marks[-1] if self._marks else end)
            ids = torch.from_numpy(self.tokens[self.done : stop].astype(np.int64))[None]
            logits, self._state = model.step.prefill(ids, self._state, inplace=True)
            self.done = stop
            self._at = Snapshot(self._state, logits, self.tokens[:stop], self.proven)
            if self._marks and stop == self._marks[-1]:
                yield replace(self._at, state=copy_of(self._state))

    def end(self) -> Snapshot:
        """Return the state at the end of the prompt; nothing is read after that."""
        assert self._at is not None
        return self._at

    def _places(self) -> list[int]:
        """Return places before the prompt's end whose states are worth keeping, the last one first."""
        length = len(self.tokens)
        places = {*range(EVERY, length, EVERY), *self.request.boundaries}
        return sorted((x for x in places if 0 < x < length), reverse=True)
