"""Drafts: tokens that something cheap expects, read by the model together with the last one, in a single pass.

The model decides about each of them as it would have without drafts: a token is drawn from the logits before it, with the random
number of its place, and a draft stays where it is that token. So a text is the same with drafts and without, for any seed.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tarnn.decoding.loop import PIECE, TokenLoop
from tarnn.decoding.mtp import TrainedHead
from tarnn.decoding.program_step import ProgramStep
from tarnn.errors import UserError
from tarnn.models.state import ModelState
from tarnn.program.pending import MOST_ROWS, Pending
from tarnn.program.runtime import Runtime
from tarnn.program.state import by_row

MOST = MOST_ROWS - 1  # drafts per pass: the token before them is read as well
LONGEST, SHORTEST = 4, 2  # tokens that must agree for the text behind them to be expected again
WINDOW = 2**16  # tokens of a prompt that are looked up


class Drafter(Protocol):
    """Expects tokens."""

    def read(self, ids: Sequence[int]) -> None:
        """Note tokens of the text, prompt or answer."""

    def propose(self, most: int) -> list[int]:
        """Return at most so many tokens that may come next; none where nothing is expected."""


class PromptLookup:
    """Expect that a text goes on as it did when its last few tokens stood there before.

    >>> lookup = PromptLookup()
    >>> lookup.read([7, 1, 2, 3, 4, 5, 1, 2])
    >>> lookup.propose(3)
    [3, 4, 5]
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        # of some tokens that followed one another: where the next one stands
        self._next: dict[tuple[int, ...], int] = {}

    def read(self, ids: Sequence[int]) -> None:
        for token in ids[-WINDOW:]:
            end = len(self._ids)
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self._next[tuple(self._ids[-n:])] = end
            self._ids.append(token)

    def propose(self, most: int) -> list[int]:
        ids = self._ids
        for n in range(min(LONGEST, len(ids)), SHORTEST - 1, -1):
            begin = self._next.get(tuple(ids[-n:]))
            if begin is not None:  # a text that repeats itself does so again: what is expected follows what is expected
                return [ids[begin + i % (len(ids) - begin)] for i in range(most)]
        return []


class DraftLoop(TokenLoop):
    """A token loop that reads drafts along with each token. draft: at most so many per pass.

    passes, drafted, accepted: calls of the model for tokens so far, drafts that were read, and those that were right.
    """

    def __init__(
        self,
        model: Any,
        state: ModelState,
        logits: Float[Tensor, "b v"] | None = None,
        *,
        draft: int,
        owned: bool = False,
    ):
        if not 1 <= draft <= MOST:
            raise ValueError(f"drafts per pass must be from 1 to {MOST}, or 0 for none; got {draft}.")
        step = model.step
        self.runtime = runtime_of(step)
        state = state if owned else state.clone()
        state = by_row(step.widened(state) if isinstance(step, ProgramStep) else state)
        super().__init__(model, state, logits, step=step, owned=True)
        head = getattr(model, "draft_head", None) if self.runtime.can_undo else None
        self.drafter: Any = PromptLookup() if head is None else TrainedHead(head)
        self.passes = self.drafted = self.accepted = 0
        self._draft = self._now = draft
        self._pending: Pending | None = None
        self._read: list[int] = []  # tokens of the last pass, the first `_kept` of which are in the text
        self._kept = 0

    @property
    def state(self) -> ModelState:
        """The state after all tokens that were read or given out."""
        if self._pending is not None:
            self._state, self._pending = self._pending.accept([self._kept]), None
        return self._state

    def read(self, ids: Int[Tensor, "b t"], **options: Any) -> None:
        if len(ids) != 1:
            raise ValueError(f"drafts are for one row of tokens; got {len(ids)}. Leave draft out.")
        if not isinstance(self.drafter, TrainedHead):
            super().read(ids, **options)
            return self.drafter.read(ids[0].tolist())
        for part in ids.split(PIECE, dim=1) if ids.shape[1] else ():
            self.logits, hidden, self._state = self.runtime.with_hidden(part[0], self.state)
            self.drafter.read(part[0].tolist())
            self.drafter.passed(hidden)

    def fork(self, copies: int) -> None:
        raise ValueError("drafts are for one row of tokens, which is not forked. Leave draft out.")

    def _advance(self, token: Int[Tensor, " b"], left: int) -> None:
        (new,) = token.tolist()
        self.drafter.read([new])
        if self._pending is None or self._kept == len(self._read) or self._read[self._kept] != new:
            self._verify(new, left)
        else:
            self.accepted += 1
        assert self._pending is not None
        self.logits = self._pending.logits[:, self._kept]
        if isinstance(self.drafter, TrainedHead) and self._pending.hidden is not None:
            self.drafter.passed(self._pending.hidden[0, self._kept : self._kept + 1])
        self._kept += 1

    def _verify(self, token: int, left: int) -> None:
        """Read a token, and drafts behind it. left: tokens that may follow."""
        if self._read:  # as many again as were right, and more where all were
            all_right = self._kept == len(self._read)
            self._now = min(self._draft, 2 * self._now if all_right else max(1, self._kept))
        state, drafts = self.state, self.drafter.propose(min(self._now, left))
        self._read, self._kept = [token, *drafts], 0
        self._pending = self.runtime.verify(torch.tensor([self._read]), state, inplace=True)
        self.passes, self.drafted = self.passes + 1, self.drafted + len(drafts)


def runtime_of(step: Any) -> Runtime:
    """Return the runtime of a step. Raises UserError for one that is no program's."""
    runtime = step.runtime if isinstance(step, ProgramStep) else step
    if not isinstance(runtime, Runtime):
        raise UserError("drafts need a model that runs as a program, and this one runs in PyTorch; leave draft out.")
    return runtime


def token_loop(model: Any, state: ModelState, logits: Tensor | None = None, *, draft: int = 0) -> TokenLoop:
    """Return a loop over an opened model that goes on with this very state. draft: tokens that are expected per pass; 0: none.

    Raises ValueError for another number, and UserError for a model that can't verify drafts.
    """
    if draft == 0:
        return TokenLoop(model, state, logits, step=model.step, owned=True)
    return DraftLoop(model, state, logits, draft=draft, owned=True)
