"""The choices that are written now, one per row of the pool: draw a token of each, hand it over, read it."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from tarnn.decoding.draws import Drawn, RowSampling, draw_rows
from tarnn.serving.model import ServedModel
from tarnn.serving.pool import EVERY, Pool
from tarnn.serving.request import TokenLogprob
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.stream import Choice

NO_TOKEN = -1  # of a row whose logits are no distribution
DIVERGED = (
    "the model's logits are no distribution (NaN or infinite): its weights or its state have diverged. Check the checkpoint, or "
    "serve it in float32."
)


class Rows:
    """Up to `max_rows` choices. A row that leaves is replaced by the last.

    A step of many rows takes about a millisecond, so what is done for each row in Python is kept to one append; `_prepare` finds
    out, whenever the rows have changed, when one of them must be looked at again.
    """

    def __init__(self, model: ServedModel, max_rows: int):
        self.choices: list[Choice] = []
        self.queues: list[Any] = []  # of the choices, each once
        self._max_rows = max_rows
        self._pool = Pool(model, max_rows)
        self._sampling = RowSampling(max_rows, model.step.num_outputs)
        self._changed = False
        self._appends: list[Any] = []
        self._ends: frozenset[int] = frozenset()
        self._watched = False
        self._quiet = 0  # steps until a choice is at its last token, or at one whose state is kept

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def full(self) -> bool:
        return len(self.choices) == self._max_rows

    def join(self, choice: Choice) -> None:
        """Give the choice a row."""
        assert choice.at is not None
        queue = choice.queue
        self._sampling.put(
            len(self.choices),
            queue.request.sampling,
            seed=queue.seed,
            choice=choice.index,
            prompt=choice.prompt,
            written=choice.tokens,
            likeliest=queue.request.logprobs,
        )
        self._pool.add(choice.at)
        choice.at = None
        self.choices.append(choice)
        self._changed = True

    def leave(self, row: int, *, keep: bool = False) -> Choice:
        """Free a row, whose place the last one takes; return its choice. keep: with its state, to go on from later."""
        choice, last = self.choices[row], len(self.choices) - 1
        if keep:
            choice.at = replace(self.snapshot(row), alone=True)
        self._pool.remove(row)
        self._sampling.move(last, row)
        self.choices[row] = self.choices[last]
        self.choices.pop()
        self._changed = True
        return choice

    def clear(self) -> list[Choice]:
        """Free all rows; return their choices."""
        choices, self.choices = self.choices, []
        self._pool.clear()
        self._changed = True
        return choices

    def snapshot(self, row: int) -> Snapshot:
        """Return a row's state, as `Pool.snapshot` does."""
        choice = self.choices[row]
        return self._pool.snapshot(row, choice.all_tokens(), choice.proven)

    def draw(self) -> tuple[Tensor, bool]:
        """Return a token of each row, which its choice has now, and whether one of the choices must be looked at."""
        if self._changed:
            self._prepare()
        drawn = draw_rows(self._pool.logits_now(), self._sampling)
        self._sampling.wrote(drawn.tokens)
        tokens = drawn.tokens.tolist()
        self._quiet -= 1
        look = not self._quiet or not self._ends.isdisjoint(tokens)
        if look or self._watched:
            self._look_at(tokens, drawn)
            self._changed |= look
            return drawn.tokens, look or any(x.ending or x.finish for x in self.choices)
        for append, token in zip(self._appends, tokens):
            append(token)
        return drawn.tokens, False

    def step(self, tokens: Tensor) -> None:
        """Let each row read its token."""
        self._pool.step(tokens)

    def _look_at(self, tokens: list[int], drawn: Drawn) -> None:
        for row, (choice, token) in enumerate(zip(self.choices, tokens)):
            if token == NO_TOKEN:
                choice.end("error", error=DIVERGED)
            else:
                wanted = choice.queue.request.logprobs is not None
                choice.wrote(token, logprob_of(drawn, row, token) if wanted else None)

    def _prepare(self) -> None:
        """Compute what holds until the rows change, or one of them is looked at."""
        self._changed = False
        self.queues = list(dict.fromkeys(x.queue for x in self.choices))
        self._appends = [x.tokens.append for x in self.choices]
        self._ends = frozenset({NO_TOKEN}).union(*(x.ends for x in self.queues))
        self._watched = any(x.request.stop or x.request.logprobs is not None for x in self.queues)
        until = (min(x.most - len(x.tokens), EVERY - x.length % EVERY) for x in self.choices)
        self._quiet = min(until, default=0)


def logprob_of(drawn: Drawn, row: int, token: int) -> TokenLogprob:
    """Return the log-probabilities of the token that this row has drawn."""
    assert drawn.logprobs is not None
    likeliest: tuple[tuple[int, float], ...] = ()
    if drawn.likeliest is not None and drawn.likeliest_logprobs is not None:
        pairs = zip(drawn.likeliest[row].tolist(), drawn.likeliest_logprobs[row].tolist())
        likeliest = tuple(x for x in pairs if x[0] != NO_TOKEN)
    return TokenLogprob(token, float(drawn.logprobs[row]), likeliest)


def without(tokens: Tensor, row: int) -> Tensor:
    """Return the tokens of the other rows, once the last one has taken this one's place."""
    tokens = tokens.clone()
    tokens[row] = tokens[-1]
    return tokens[:-1]
