"""Tokens for many rows in one call, where each row draws in its own way.

A row's token depends on its logits and its own line of the table alone: its random number is a function of its seed, its
choice and the token's place in its answer. So a seed gives the same text in any company, after a pause and after a restart.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tarnn.decoding.draw_definition import Way, drawn, is_distribution, likeliest, logarithms
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.draws import run

# columns of the two tables, as csrc/draws reads them
TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(6)
SEED, CHOICE, POSITION, TOP_K, LIKELIEST, BIASED = range(6)
NONE_WANTED = -1


@dataclass(frozen=True)
class Sampling:
    """Options for drawing a token from the logits. The defaults draw from the model's own distribution; temperature 0 is greedy.

    top_k 0, top_p 1, min_p 0, the penalties and an empty logit_bias are off. Penalties look at what the answer has written so far
    (repetition_penalty, of CTRL, arXiv 1909.05858, at the prompt too): frequency_penalty is taken from a logit once for each
    time that its token was written, presence_penalty once. logit_bias: added to the logits of tokens, by their ids.
    seed: of the draws; None: another one each time.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


class Drawn(NamedTuple):
    """tokens: −1 where a row's logits are no distribution (one is NaN or +∞, or all are −∞).

    The rest is None unless a row wants logarithms: natural ones, of probabilities at temperature 1 and without penalties, of the
    token itself and of the k likeliest tokens, likeliest first. k: the most that a row wants; where a row wants fewer, or has
    token −1, the others are token −1 and NaN.
    """

    tokens: Int[Tensor, " b"]
    logprobs: Float[Tensor, " b"] | None = None
    likeliest: Int[Tensor, "b k"] | None = None
    likeliest_logprobs: Float[Tensor, "b k"] | None = None


class RowSampling:
    """How each of many rows draws: a line per row, of which a call takes the first ones.

        rows = RowSampling(32, vocab_size)
        rows.put(0, sampling, seed=7)
        drawn = draw_rows(logits, rows)  # (1, v): of row 0
        rows.wrote(drawn.tokens)
        rows.move(5, 0)  # row 5 takes the place of row 0, which has ended

    numbers (n, 6) float64 and whole (n, 6) int64: the columns named above. counts (n, v) int32, how often the answer has each
    token; had (n, v) bool, whether answer or prompt have it; bias (n, v) float32: None until a row needs them.
    """

    def __init__(self, num_rows: int, vocab_size: int):
        self.vocab_size = vocab_size
        self.numbers = np.tile(np.array([0, 1, 0, 1, 0, 0], np.float64), (num_rows, 1))
        self.whole = np.tile(np.array([0, 0, 0, 0, NONE_WANTED, 0], np.int64), (num_rows, 1))
        self.counts: np.ndarray | None = None
        self.had: np.ndarray | None = None
        self.bias: np.ndarray | None = None
        self.tensors = self._as_tensors()

    def __len__(self) -> int:
        return len(self.whole)

    def put(
        self,
        row: int,
        sampling: Sampling,
        *,
        seed: int,
        choice: int = 0,
        prompt: Iterable[int] = (),
        written: Iterable[int] = (),
        likeliest: int | None = None,
    ) -> None:
        """A row begins, or goes on: `written` are the tokens of its answer so far. seed: 64 bits, signed or not.

        prompt: of interest to a repetition penalty alone. likeliest: of how many tokens logarithms are wanted, beside the one
        that is drawn; None: of none. Raises ValueError for values out of range.
        """
        check_sampling(sampling, self.vocab_size)
        written = np.fromiter(written, np.int64)
        _check_row(seed, choice, likeliest, self.vocab_size)
        self.numbers[row] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        wanted = NONE_WANTED if likeliest is None else likeliest
        top_k = min(sampling.top_k, self.vocab_size)
        signed = (seed + 2**63) % 2**64 - 2**63
        self.whole[row] = signed, choice, len(written), top_k, wanted, bool(sampling.logit_bias)
        if self._penalizes(row):
            self._count(row, np.fromiter(prompt, np.int64), written)
        if sampling.logit_bias:
            if self.bias is None:
                self.bias = np.zeros((len(self), self.vocab_size), np.float32)
                self.tensors = self._as_tensors()
            self.bias[row] = 0
            for token, bias in sampling.logit_bias.items():
                self.bias[row, token] = bias

    def wrote(self, tokens: Int[Tensor, " b"]) -> None:
        """The first rows have written these tokens; −1: nothing."""
        self.whole[: len(tokens), POSITION] += tokens.numpy() >= 0
        if self.counts is None or self.had is None:
            return
        of_rows = self.numbers[: len(tokens)]
        penalizes = (of_rows[:, REPETITION] != 1) | (of_rows[:, FREQUENCY] != 0) | (of_rows[:, PRESENCE] != 0)
        rows = np.flatnonzero(penalizes & (tokens.numpy() >= 0))
        places = rows, tokens.numpy()[rows]
        self.counts[places] += 1
        self.had[places] = True

    def move(self, source: int, target: int) -> None:
        """Row `target` is now what row `source` was."""
        for table in (self.numbers, self.whole, self.counts, self.had, self.bias):
            if table is not None:
                table[target] = table[source]

    def most_wanted(self, b: int) -> int:
        """Return the largest `top_logprobs` requested by the first b rows; −1 if none."""
        return int(self.whole[:b, LIKELIEST].max(initial=NONE_WANTED))

    def way(self, row: int) -> Way:
        """Return the sampling options of one row as the definition takes them."""
        temperature, top_p, min_p, repetition, frequency, presence = self.numbers[row].tolist()
        seed, choice, position, top_k, _, biased = self.whole[row].tolist()
        counts = had = None
        if self._penalizes(row) and self.counts is not None and self.had is not None:
            counts, had = self.counts[row], self.had[row]
        bias = self.bias[row] if biased and self.bias is not None else None
        return Way(
            temperature, top_k, top_p, min_p, seed, choice, position, repetition, frequency, presence, counts, had, bias
        )

    def _as_tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the same memory as tensors, for the kernel."""
        counts, had, bias = (None if x is None else torch.from_numpy(x) for x in (self.counts, self.had, self.bias))
        return torch.from_numpy(self.numbers), torch.from_numpy(self.whole), counts, had, bias

    def _penalizes(self, row: int) -> bool:
        _, _, _, repetition, frequency, presence = self.numbers[row]
        return bool(repetition != 1 or frequency or presence)

    def _count(self, row: int, prompt: np.ndarray, written: np.ndarray) -> None:
        if self.counts is None or self.had is None:
            self.counts = np.zeros((len(self), self.vocab_size), np.int32)
            self.had = np.zeros((len(self), self.vocab_size), np.bool_)
            self.tensors = self._as_tensors()
        self.counts[row] = np.bincount(written, minlength=self.vocab_size)
        self.had[row] = self.counts[row] > 0
        self.had[row, prompt] = True


def row_sampler(
    sampling: Sampling, vocab_size: int, *, seed: int, prompt: Sequence[int] = (), num_rows: int = 1
) -> Callable[[Float[Tensor, "b v"]], Int[Tensor, " b"]]:
    """Return a sampler for a token loop: rows of one prompt, each a choice of its own, as a server draws them.

    It raises ValueError for logits that are no distribution.
    """
    rows = RowSampling(num_rows, vocab_size)
    for choice in range(num_rows):
        rows.put(choice, sampling, seed=seed, choice=choice, prompt=prompt)

    def draw(logits: Tensor) -> Tensor:
        tokens = draw_rows(logits.float().cpu(), rows).tokens
        if len(tokens) and int(tokens.min()) < 0:
            raise ValueError(
                "the logits are no distribution (NaN or infinite): the weights or the state have diverged."
            )
        rows.wrote(tokens)
        return tokens.to(logits.device)

    return draw


def draw_rows(logits: Float[Tensor, "b v"], rows: RowSampling) -> Drawn:
    """A token of each row of logits, as the first b rows of the table say. Raises ValueError for logits that don't fit it."""
    _check_logits(logits, rows)
    return _by_kernel(logits, rows) if library.available() else by_definition(logits, rows)


def _by_kernel(logits: Tensor, rows: RowSampling) -> Drawn:
    b = len(logits)
    k = rows.most_wanted(b)
    drawn = Drawn(torch.empty(b, dtype=torch.int64))
    if k != NONE_WANTED:
        drawn = Drawn(drawn.tokens, torch.empty(b), torch.empty(b, k, dtype=torch.int64), torch.empty(b, k))
    run(logits.contiguous(), *rows.tensors, *drawn)
    return drawn


def by_definition(logits: Tensor, rows: RowSampling) -> Drawn:
    """Draw by the definition, in Python and float64, row by row."""
    b = len(logits)
    numbers = logits.numpy()
    tokens = [drawn(numbers[i], rows.way(i)) for i in range(b)]
    k = rows.most_wanted(b)
    if k == NONE_WANTED:
        return Drawn(torch.tensor(tokens))
    logprobs, top, of_top = np.full(b, np.nan), np.full((b, k), -1), np.full((b, k), np.nan)
    for i, token in enumerate(tokens):
        wanted = int(rows.whole[i, LIKELIEST])
        if token < 0 or wanted == NONE_WANTED or not is_distribution(numbers[i]):
            continue
        of_all = logarithms(numbers[i])
        logprobs[i] = of_all[token]
        top[i, :wanted] = likeliest(numbers[i], wanted)
        of_top[i, :wanted] = of_all[top[i, :wanted]]
    return Drawn(
        torch.tensor(tokens),
        torch.from_numpy(logprobs).float(),
        torch.from_numpy(top),
        torch.from_numpy(of_top).float(),
    )


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raise ValueError, with a sentence, for values out of range."""
    x = sampling
    if not 0 <= x.temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (greedy) or above, and finite; got {x.temperature}")
    if x.top_k < 0:
        raise ValueError(f"top-k must be 0 (off) or above; got {x.top_k}")
    if not 0 < x.top_p <= 1:
        raise ValueError(f"top-p must be above 0 and at most 1; got {x.top_p}")
    if not 0 <= x.min_p <= 1:
        raise ValueError(f"min-p must be from 0 (off) to 1; got {x.min_p}")
    if not 0 < x.repetition_penalty < float("inf"):
        raise ValueError(f"repetition-penalty must be above 0 and finite (1: off); got {x.repetition_penalty}")
    for name in ("frequency_penalty", "presence_penalty"):
        if not np.isfinite(value := getattr(x, name)):
            raise ValueError(f"{name.replace('_', '-')} must be finite (0: off); got {value}")
    for token, bias in x.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise ValueError(f"logit-bias names token {token}; the vocabulary has 0 to {vocab_size - 1}")
        if not np.isfinite(bias):
            raise ValueError(f"logit-bias of token {token} must be finite; got {bias}")


def _check_row(seed: int, choice: int, likeliest: int | None, vocab_size: int) -> None:
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"a seed has 64 bits: from −2^63 to 2^64 − 1; got {seed}")
    if not 0 <= choice < 2**63:
        raise ValueError(f"a choice is counted from 0; got {choice}")
    if likeliest is not None and not 0 <= likeliest <= vocab_size:
        raise ValueError(f"logprobs are of 0 to {vocab_size} tokens, as many as the vocabulary has; got {likeliest}")


def _check_logits(logits: Tensor, rows: RowSampling) -> None:
    fits = logits.ndim == 2 and logits.shape[1] == rows.vocab_size and len(logits) <= len(rows)
    if not fits or logits.dtype != torch.float32 or logits.device.type != "cpu":
        raise ValueError(
            f"draw_rows takes logits (b, {rows.vocab_size}) of at most {len(rows)} rows, float32 on a CPU; "
            f"got {tuple(logits.shape)} {logits.dtype} on {logits.device.type}."
        )
