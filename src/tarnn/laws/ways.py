"""Ways to compute the logits of rows, which have to agree with each row alone; and the comparison.

A `Runner` is a model in one way to run it. It gives `Stages`: by name, for each row, a tensor (t, width). The last stage is the
logits; while the runner is watched, others come before: outputs of layers, or states of layers behind the last token.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.errors import UserError, is_out_of_memory
from tarnn.laws.report import FAIL, PASS, SKIPPED, Result, Section
from tarnn.log import Log

Stages = dict[str, list[Tensor]]
Computed = tuple[list[Tensor], Stages]  # texts, and what a way computed of them
LOGITS, STATE = "logits", "the state of "  # the name of a state's stage begins so
NONE: dict[str, Callable[..., Result]] = {}
STEPS = 4  # tokens that follow a prompt one by one
BITS = "a compiled program promises the same bits in any company, pieces and padding"
FACTOR = 4  # each of two ways may be off by the rounding, and by twice of what was measured


class Runner:
    """A model in one way to run it. Tokens are (b, t), masks (b, tokens so far), 0 for padding.

    whole(ids, mask=None): computes rows from their first token, without a cache where there is such a way. read(ids, past=None,
    mask=None): computes new tokens of rows that have a past, and returns what they leave. packed(rows, told): computes texts
    in one row; told: the arguments that say where each begins. exactly(ids): as whole, in float64; raises UserError where
    that is not possible. limit: positions. special: tokens that random texts leave out. exact: whether all ways give the same
    bits. room: tokens that its states have room for.
    """

    name: str
    vocab_size: int
    pad_id: int
    limit: int | None
    whole: Callable[..., Stages]
    read: Callable[..., tuple[Stages, Any]]
    packed: Callable[..., Stages]
    exactly: Callable[..., Stages]
    dtype = torch.float32
    special: frozenset[int] = frozenset()
    exact = watching = False
    room = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within: stages have those of layers before the logits."""
        self.watching = True
        try:
            yield
        finally:
            self.watching = False


def in_calls(
    ends: Callable[[int], Iterable[int]], runner: Runner, rows: list[Tensor], lengths: tuple[int, ...]
) -> Computed:
    """Compute rows of one length with a cache, in several calls. ends: where they end, for so many tokens."""
    ids, start, past, parts = torch.stack(rows), 0, None, []
    for end in ends(ids.shape[1]):
        out, past = runner.read(ids[:, start:end], past)
        parts.append(out)
        start = end
    return rows, joined(parts)


def padded(side: str, steps: int, runner: Runner, rows: list[Tensor], lengths: tuple[int, ...]) -> Computed:
    """Compute a batch with padding on one side. steps: tokens that follow one by one, with a cache."""
    ids = torch.full((len(rows), max(lengths)), runner.pad_id)
    mask = torch.zeros_like(ids)
    for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        place = slice(0, n) if side == "right" else slice(ids.shape[1] - n, None)
        ids[i, place], mask[i, place] = row[:n], 1
    out, past = runner.read(ids, None, mask) if steps else (runner.whole(ids, mask), None)
    real = mask.bool()
    parts = [{name: x if name.startswith(STATE) else [*map(Tensor.__getitem__, x, real)] for name, x in out.items()}]
    for j in range(steps):
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        token = torch.stack([row[n + j] for row, n in zip(rows, lengths, strict=True)])
        out, past = runner.read(token[:, None], past, mask)
        parts.append(out)
    return [row[: n + steps] for row, n in zip(rows, lengths, strict=True)], joined(parts)


def packed(told: str, runner: Runner, rows: list[Tensor], lengths: tuple[int, ...]) -> Computed:
    """Compute texts in one row, end to end."""
    texts = [row[:n] for row, n in zip(rows, lengths, strict=True)]
    return texts, {name: list(x[0].split([*lengths])) for name, x in runner.packed(texts, told).items()}


LAWS: dict[str, Callable[[Runner, list[Tensor], tuple[int, ...]], Computed]] = {
    "batch against alone": lambda runner, rows, _: (rows, runner.whole(torch.stack(rows))),
    "cache against none": partial(in_calls, lambda n: [n]),
    "prompt, then steps": partial(in_calls, lambda n: range(n - STEPS, n + 1)),
    "token by token": partial(in_calls, lambda n: range(1, n + 1)),
    "prompt in pieces, with a cache": partial(in_calls, lambda n: [2 * n // 5, 3 * n // 4, n]),
    "padding left": partial(padded, "left", 0),
    "padding left, then steps": partial(padded, "left", STEPS),
    "padding right": partial(padded, "right", 0),
    "padding right, then steps": partial(padded, "right", STEPS),
    "packed rows, by position_ids": partial(packed, "position_ids"),
    "packed rows, by cu_seq_lens, seq_idx": partial(packed, "cu_seq_lens, seq_idx"),
}


def joined(parts: Sequence[Stages]) -> Stages:
    """Put the tokens of several calls one behind the other. Of states the last one stays, and only stages of all calls."""
    return {
        name: last if name.startswith(STATE) else [torch.cat(x) for x in zip(*(x[name] for x in parts), strict=True)]
        for name, last in parts[-1].items()
        if all(name in part for part in parts)
    }


def alone(runner: Runner, texts: Iterable[Tensor]) -> Stages:
    """Compute each text by itself, from its first token."""
    parts = [runner.whole(text[None]) for text in texts]
    return {name: [part[name][0] for part in parts] for name in parts[0]}


def difference(x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
    """Compute the largest difference of two stages at each token of all rows; infinite where one is not finite."""
    gaps = []
    for a, b in zip(x, y, strict=True):
        gap = (a.double() - b.double()).abs() if a.shape == b.shape else torch.full((len(a), 1), torch.inf)
        gaps.append(torch.where(gap.isfinite(), gap, torch.inf).flatten(1).amax(1) if gap.numel() else gap.sum(-1))
    return torch.cat(gaps)


def attempt(law: str, compute: Callable[[], Result]) -> Result:
    """Return a result, or why there is none.

    What a model refuses by a TypeError, ValueError or NotImplementedError is skipped; any other error is a failure.
    """
    try:
        return compute()
    except Exception as error:
        words = " ".join(str(error).split())
        why = words if isinstance(error, ValueError | ImportError) else f"{type(error).__name__}: {words[:200]}"
        refused = isinstance(error, TypeError | ValueError | NotImplementedError | ImportError)
        return Result(law, SKIPPED if refused or is_out_of_memory(error) else FAIL, why=why)


def hold(runner: Runner, law: str, rows: list[Tensor], lengths: tuple[int, ...], limit: float) -> Result:
    """Compare the way of a law with each row alone. limit: what rounding explains in the logits."""
    texts, stages = LAWS[law](runner, rows, lengths)

    def first() -> str | None:
        with runner.watched():
            stages = LAWS[law](runner, rows, lengths)[1]
            return first_above(stages, alone(runner, texts), {} if runner.exact else rounding(runner, rows)[0])

    return compared(law, stages, alone(runner, texts), limit, first)


def compared(
    law: str, x: Stages, y: Stages, limit: float, first: Callable[[], str | None], why: str | None = None
) -> Result:
    """Make the result of a comparison of logits. first: looks for the first layer that differs."""
    gaps = difference(x[LOGITS], y[LOGITS])
    largest, over = float(gaps.max()), int((gaps > limit).sum())
    if not over:
        return Result(law, PASS, largest, why=why)
    return Result(law, FAIL, largest, first(), (over, len(gaps)), why)


def first_above(x: Stages, y: Stages, limits: dict[str, float]) -> str | None:
    """Return the first stage before the logits whose difference is above its limit."""
    names = (name for name in x if name != LOGITS and name in y)
    return next((name for name in names if (difference(x[name], y[name]) > limits.get(name, 0.0)).any()), None)


def rounding(runner: Runner, rows: list[Tensor]) -> tuple[dict[str, float], str]:
    """Measure how a runner rounds, each row alone against the same in float64.

    Returns the largest differences that rounding explains, by stage, and in words where they come from.
    """
    computed, kind = alone(runner, rows), str(runner.dtype).removeprefix("torch.")
    sizes = {name: max(float(x.double().abs().max()) for x in part) for name, part in computed.items()}
    spacing = {name: FACTOR * torch.finfo(runner.dtype).eps * x for name, x in sizes.items()}
    try:
        parts = [runner.exactly(row[None]) for row in rows]
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        why = " ".join(str(error).split())[:100].rstrip(".")
        origin = f"{8 * FACTOR} × the spacing of {kind} at the largest logit, as it was not computed in float64 ({why})"
        return {name: 8 * x for name, x in spacing.items()}, origin
    exact = {name: [part[name][0] for part in parts] for name in computed if all(name in part for part in parts)}
    limits = {
        name: max(FACTOR * float(difference(computed[name], x).max()), spacing[name]) for name, x in exact.items()
    }
    return limits, f"{FACTOR} × the largest difference of these rows, each alone, between {kind} and float64"


class Texts(NamedTuple):
    """Describe the random rows. report: of the parts that are checked."""

    lengths: tuple[int, ...]
    seed: int
    report: Log

    def section(self, runner: Runner, comparisons: Mapping[str, Callable[..., Result]] = NONE) -> Section:
        """Hold a runner to all laws, and compare it with others: functions of a law's name and the rows.

        Rows are as long as the longest and the steps behind it. Raises UserError for a model with fewer positions.
        """
        longest = max(self.lengths)
        runner.room = longest + STEPS
        if runner.limit is not None and runner.room > runner.limit:
            raise UserError(
                f"this model has {runner.limit:,} positions; rows of {longest:,} tokens and {STEPS} more do not fit. "
                f"Take rows of at most {runner.limit - STEPS:,} (--tokens)."
            )
        usual = torch.tensor(sorted({*range(runner.vocab_size)} - runner.special - {runner.pad_id}))
        if not len(usual):
            raise UserError(f"its vocabulary of {runner.vocab_size:,} tokens has special ones alone.")
        generator = torch.Generator().manual_seed(self.seed)
        rows = [usual[torch.randint(len(usual), (runner.room,), generator=generator)] for _ in self.lengths]
        self.report(f"tarnn: {runner.name}")
        limits, origin = ({LOGITS: 0.0}, BITS) if runner.exact else rounding(runner, rows)
        results = [attempt(law, partial(hold, runner, law, rows, self.lengths, limits[LOGITS])) for law in LAWS]
        results += [attempt(law, partial(compare, law, rows)) for law, compare in comparisons.items()]
        return Section(runner.name, limits[LOGITS], origin, tuple(results))
