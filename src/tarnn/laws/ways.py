"""Ways to compute the logits of rows, which have to agree with each row alone; and the comparison.

A `Runner` is a model in one way to run it. It gives `Stages`: by name, for each row, a tensor (t, width). The last stage is the
logits; while the runner is watched, others come before: outputs of layers, or states of layers behind the last token.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tarnn.errors import is_out_of_memory
from tarnn.laws.report import FAIL, PASS, SKIPPED, Result

Stages = dict[str, list[Tensor]]
LOGITS, STATE = "logits", "the state of "  # the name of a state's stage begins so
STEPS = 4  # tokens that follow a prompt one by one
FACTOR = 4  # each of two ways may be off by the rounding, and by twice of what was measured


class Runner(Protocol):
    """A model in one way to run it. Tokens are (b, t), masks (b, tokens so far), 0 for padding."""

    name: str
    vocab_size: int
    pad_id: int
    special: frozenset[int]  # tokens that random texts leave out
    limit: int | None  # positions
    watching: bool  # whether it is watched

    def whole(self, ids: Tensor, mask: Tensor | None = None) -> Stages:
        """Compute rows from their first token, without a cache where there is such a way."""

    def read(self, ids: Tensor, past: Any = None, mask: Tensor | None = None) -> tuple[Stages, Any]:
        """Compute new tokens of rows that have a past, and return what they leave."""

    def packed(self, rows: Sequence[Tensor], told: str) -> Stages:
        """Compute texts that lie in one row. told: the arguments that say where each begins."""

    def watched(self) -> AbstractContextManager[None]:
        """Within: stages have those of layers before the logits."""

    def exactly(self, ids: Tensor) -> Stages:
        """Compute rows from their first token in float64. Raises UserError where that is not possible."""


class Tolerance(NamedTuple):
    """The largest differences that rounding explains, by stage, and where they come from in words."""

    of: dict[str, float]
    origin: str


Allowed = Callable[[], Tolerance]  # of the stages that there are: all of them while a runner is watched
Way = Callable[[Runner, list[Tensor], Sequence[int]], tuple[list[Tensor], Stages]]


def batch(runner: Runner, rows: list[Tensor], lengths: Sequence[int]) -> tuple[list[Tensor], Stages]:
    """Compute rows of one length at once."""
    return rows, runner.whole(torch.stack(rows))


def in_turns(*parts: float, steps: int = 0) -> Way:
    """Make the way with a cache, in calls that read these parts of the tokens, and then `steps` calls of one token. No parts:
    all calls read one token."""

    def way(runner: Runner, rows: list[Tensor], lengths: Sequence[int]) -> tuple[list[Tensor], Stages]:
        ids, past, stages = torch.stack(rows), None, []
        prompt = ids.shape[1] - steps
        ends = sorted({max(1, round(sum(parts[: i + 1]) * prompt)) for i in range(len(parts))})
        ends = [*ends, *range(prompt + 1, ids.shape[1] + 1)] if parts else [*range(1, ids.shape[1] + 1)]
        for start, end in zip([0, *ends], ends):
            out, past = runner.read(ids[:, start:end], past)
            stages.append(out)
        return rows, joined(stages)

    return way


def padded(side: str, steps: int) -> Way:
    """Make the way of a batch with padding on one side. steps: tokens that follow one by one, with a cache."""

    def way(runner: Runner, rows: list[Tensor], lengths: Sequence[int]) -> tuple[list[Tensor], Stages]:
        ids = torch.full((len(rows), max(lengths)), runner.pad_id)
        mask = torch.zeros_like(ids)
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            place = slice(0, n) if side == "right" else slice(ids.shape[1] - n, None)
            ids[i, place], mask[i, place] = row[:n], 1
        out, past = runner.read(ids, None, mask) if steps else (runner.whole(ids, mask), None)
        real = mask.bool()
        stages = [{name: [cut(name, x, real[i]) for i, x in enumerate(part)] for name, part in out.items()}]
        for j in range(steps):
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
            token = torch.stack([row[n + j] for row, n in zip(rows, lengths, strict=True)])
            out, past = runner.read(token[:, None], past, mask)
            stages.append(out)
        return [row[: n + steps] for row, n in zip(rows, lengths, strict=True)], joined(stages)

    return way


def packed(told: str) -> Way:
    """Make the way of texts in one row, end to end."""

    def way(runner: Runner, rows: list[Tensor], lengths: Sequence[int]) -> tuple[list[Tensor], Stages]:
        texts = [row[:n] for row, n in zip(rows, lengths, strict=True)]
        out = runner.packed(texts, told)
        return texts, {name: list(part[0].split([*map(len, texts)])) for name, part in out.items()}

    return way


LAWS: dict[str, Way] = {
    "batch against alone": batch,
    "cache against none": in_turns(1.0),
    "prompt, then steps": in_turns(1.0, steps=STEPS),
    "token by token": in_turns(),
    "prompt in pieces, with a cache": in_turns(0.4, 0.35, 0.25),
    "padding left": padded("left", 0),
    "padding left, then steps": padded("left", STEPS),
    "padding right": padded("right", 0),
    "padding right, then steps": padded("right", STEPS),
    "packed rows, by position_ids": packed("position_ids"),
    "packed rows, by cu_seq_lens, seq_idx": packed("cu_seq_lens, seq_idx"),
}


def cut(name: str, x: Tensor, real: Tensor) -> Tensor:
    """Return the real tokens of a row; a state is that behind them."""
    return x if name.startswith(STATE) else x[real]


def joined(parts: Sequence[Stages]) -> Stages:
    """Put the tokens of several calls one behind the other. Of states the last one stays, and only stages of all calls."""
    names = [name for name in parts[-1] if all(name in part for part in parts)]
    last = range(len(parts[-1][LOGITS]))
    return {
        name: parts[-1][name] if name.startswith(STATE) else [torch.cat([x[name][i] for x in parts]) for i in last]
        for name in names
    }


def alone(runner: Runner, texts: Iterable[Tensor]) -> Stages:
    """Compute each text by itself, from its first token."""
    parts = [runner.whole(text[None]) for text in texts]
    return {name: [part[name][0] for part in parts] for name in parts[0]}


def difference(x: Tensor, y: Tensor) -> Tensor:
    """Compute the largest difference at each token; infinite where one is not finite."""
    if x.shape != y.shape:
        return torch.full((len(x),), torch.inf)
    gap = (x.double() - y.double()).abs().flatten(1)
    return torch.where(gap.isfinite(), gap, torch.inf).amax(1) if gap.numel() else gap.new_zeros(len(x))


def hold(runner: Runner, law: str, way: Way, rows: list[Tensor], lengths: Sequence[int], allowed: Allowed) -> Result:
    """Compare a way with each row alone.

    What a model refuses by a TypeError, ValueError or NotImplementedError is skipped; any other error of a way is a failure.
    """
    try:
        texts, stages = way(runner, rows, lengths)
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        refused = isinstance(error, TypeError | ValueError | NotImplementedError) or is_out_of_memory(error)
        return Result(law, SKIPPED if refused else FAIL, why=why if not isinstance(error, ValueError) else str(error))
    gaps = [difference(*pair) for pair in zip(stages[LOGITS], alone(runner, texts)[LOGITS], strict=True)]
    all_gaps, limit = torch.cat(gaps), allowed().of[LOGITS]
    largest, over = float(all_gaps.max()), int((all_gaps > limit).sum())
    if not over:
        return Result(law, PASS, largest)
    with runner.watched():
        _, stages = way(runner, rows, lengths)
        reference, limits = alone(runner, texts), allowed().of
    first = first_above(stages, reference, limits)
    return Result(law, FAIL, largest, first, (over, len(all_gaps)))


def first_above(stages: Stages, reference: Stages, limits: dict[str, float]) -> str | None:
    """Return the first stage before the logits whose difference is above its limit."""
    for name in stages:
        if name != LOGITS and name in reference:
            pairs = zip(stages[name], reference[name], strict=True)
            if any(bool((difference(*pair) > limits.get(name, 0.0)).any()) for pair in pairs):
                return name
    return None


def measured(runner: Runner, rows: list[Tensor], dtype: torch.dtype) -> Tolerance:
    """Measure how a runner rounds: each row alone against the same in float64."""
    computed, unit = alone(runner, rows), torch.finfo(dtype).eps
    spacing = {name: unit * max(float(x.double().abs().max()) for x in part) for name, part in computed.items()}
    kind = str(dtype).removeprefix("torch.")
    try:
        exact = [runner.exactly(row[None]) for row in rows]
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        why = " ".join(str(error).split())[:100].rstrip(".")
        origin = f"{8 * FACTOR} × the spacing of {kind} at the largest logit, as it was not computed in float64 ({why})"
        return Tolerance({name: 8 * FACTOR * x for name, x in spacing.items()}, origin)
    errors = {
        name: max(float(difference(x, y[name][0]).max()) for x, y in zip(part, exact, strict=True))
        for name, part in computed.items()
        if all(name in y for y in exact)
    }
    rounding = {name: max(x, spacing[name]) for name, x in errors.items()}
    origin = f"{FACTOR} × the largest difference of these rows, each alone, between {kind} and float64"
    return Tolerance({name: FACTOR * x for name, x in rounding.items()}, origin)
