"""The answers that are written now, one a row of the pool: a token of each is drawn, handed over and read."""

from typing import Any

from torch import Tensor

from tarnn.decoding.draws import Drawn, RowSampling, draw_rows
from tarnn.serving.answer import Answer
from tarnn.serving.model import ServedModel
from tarnn.serving.pool import Pool
from tarnn.serving.request import TokenLogprob
from tarnn.serving.snapshot import Snapshot

EVERY = 1024  # tokens after which a state is kept
NO_TOKEN = -1  # of a row whose logits are no distribution
DIVERGED = (
    "the model's logits are no distribution (NaN or infinite): its weights or its state have diverged. Check the checkpoint, or "
    "serve it in float32."
)


class Rows:
    """Up to `max_rows` answers. A row that leaves is replaced by the last.

    A step of many rows takes about a millisecond, so what is done for each row in Python is kept to one append; `_prepare` finds
    out, whenever the rows have changed, when one of them must be looked at again.
    """

    def __init__(self, model: ServedModel, max_rows: int):
        self.answers: list[Answer] = []
        self.mails: list[Any] = []  # of the answers, each once
        self._max_rows = max_rows
        self._pool = Pool(model, max_rows)
        self._sampling = RowSampling(max_rows, model.step.num_outputs)
        self._changed = False
        self._appends: list[Any] = []
        self._ends: frozenset[int] = frozenset()
        self._watched = False
        self._quiet = 0  # steps until an answer is at its last token, or at one whose state is kept

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def full(self) -> bool:
        return len(self.answers) == self._max_rows

    def join(self, answer: Answer) -> None:
        """The answer goes on in a row of its own."""
        assert answer.at is not None
        mail = answer.mail
        self._sampling.put(
            len(self.answers),
            mail.request.sampling,
            seed=mail.seed,
            choice=answer.choice,
            prompt=answer.prompt,
            written=answer.tokens,
            likeliest=mail.request.logprobs,
        )
        self._pool.add(answer.at)
        answer.at = None
        self.answers.append(answer)
        self._changed = True

    def leave(self, row: int) -> Answer:
        """The last row takes this one's place."""
        answer, last = self.answers[row], len(self.answers) - 1
        self._pool.remove(row)
        self._sampling.move(last, row)
        self.answers[row] = self.answers[last]
        self.answers.pop()
        self._changed = True
        return answer

    def clear(self) -> list[Answer]:
        """All leave."""
        answers, self.answers = self.answers, []
        self._pool.clear()
        self._changed = True
        return answers

    def snapshot(self, row: int) -> Snapshot:
        """Where a row stands, copied."""
        answer = self.answers[row]
        return self._pool.snapshot(row, answer.all_tokens(), answer.proven)

    def draw(self) -> tuple[Tensor, bool]:
        """(a token of each row, which its answer has now; whether one of the answers must be looked at)."""
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
            return drawn.tokens, look or any(x.ending or x.finish for x in self.answers)
        for append, token in zip(self._appends, tokens):
            append(token)
        return drawn.tokens, False

    def step(self, tokens: Tensor) -> None:
        """Each row reads its token."""
        self._pool.step(tokens)

    def _look_at(self, tokens: list[int], drawn: Drawn) -> None:
        for row, (answer, token) in enumerate(zip(self.answers, tokens)):
            if token == NO_TOKEN:
                answer.end("error", error=DIVERGED)
            else:
                wanted = answer.mail.request.logprobs is not None
                answer.wrote(token, logprob_of(drawn, row, token) if wanted else None)

    def _prepare(self) -> None:
        """What holds until the rows change, or one of them is looked at."""
        self._changed = False
        self.mails = list(dict.fromkeys(x.mail for x in self.answers))
        self._appends = [x.tokens.append for x in self.answers]
        self._ends = frozenset({NO_TOKEN}).union(*(x.ends for x in self.mails))
        self._watched = any(x.request.stop or x.request.logprobs is not None for x in self.mails)
        until = (min(x.most - len(x.tokens), EVERY - x.length % EVERY) for x in self.answers)
        self._quiet = min(until, default=0)


def logprob_of(drawn: Drawn, row: int, token: int) -> TokenLogprob:
    """What is told of the token that this row has drawn."""
    assert drawn.logprobs is not None
    likeliest: tuple[tuple[int, float], ...] = ()
    if drawn.likeliest is not None and drawn.likeliest_logprobs is not None:
        pairs = zip(drawn.likeliest[row].tolist(), drawn.likeliest_logprobs[row].tolist())
        likeliest = tuple(x for x in pairs if x[0] != NO_TOKEN)
    return TokenLogprob(token, float(drawn.logprobs[row]), likeliest)


def without(tokens: Tensor, row: int) -> Tensor:
    """The tokens of the rows that are left once the last one has taken this one's place."""
    tokens = tokens.clone()
    tokens[row] = tokens[-1]
    return tokens[:-1]
