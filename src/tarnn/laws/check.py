"""`tarnn.check`: whether a model gives one text the same logits, however it is computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tarnn.checkpoint_keys import MODEL_TYPES
from tarnn.decoding.contents import OfModule
from tarnn.decoding.memory import check_memory
from tarnn.decoding.opened import Opened
from tarnn.decoding.opening import open_step
from tarnn.errors import UserError
from tarnn.json_file import read_json
from tarnn.laws.report import FAIL, PASS, SKIPPED, Report, Result, Section
from tarnn.laws.runtime import Running, defined, first_unlike
from tarnn.laws.ways import (
    FACTOR,
    LAWS,
    LOGITS,
    STEPS,
    Runner,
    Tolerance,
    alone,
    difference,
    first_above,
    hold,
    measured,
)
from tarnn.log import Log, silent
from tarnn.program.runtime import Runtime

TOKENS = (70, 23, 7)  # longer than the chunks in which linear layers compute; a few words; one
ALSO = ("transformers", "patched")
BITS = "a compiled program promises the same bits in any company, pieces and padding"


@torch.no_grad()
def check(
    source: str | Path | nn.Module,
    weights: str | Sequence[str] | None = None,
    *,
    also: Sequence[str] = (),
    tokens: Sequence[int] = TOKENS,
    seed: int = 0,
    report: Log = silent,
) -> Report:
    """Check that a language model gives the same logits in every way to compute the same text.

        report = tarnn.check("Qwen3.5-0.8B", "int8")   # or tarnn.check(model), a live one, patched or not
        assert not report.failed, report

    Rows of random tokens are computed alone, in a batch, padded on either side, packed, with a cache, in pieces and token by
    token. Of a live model its own `forward` is checked, and tarnn's runtime compared with it. Of a folder the runtime is
    checked, and compared with its definition and with the model of transformers, or of tarnn, in PyTorch.

    weights: formats of a folder's weights, float32 | bfloat16 | int8 | int4; None: as saved. also: of a folder check also
    `transformers`' own model, or that one `patched` with tarnn's ops. tokens: how long the rows are. report: called with a line
    before each part.

    Returns a `Report`, whose `failed` are the results that failed, and which prints as a page. What can't be checked is skipped,
    with the reason. Raises UserError, a ValueError, for a source that holds no language model, and for other tokens.
    """
    if wrong := [x for x in also if x not in ALSO]:
        raise UserError(f"also must be of {', '.join(ALSO)}; got {wrong[0]!r}.")
    if len(tokens) < 2 or min(tokens) < 2 or max(tokens) > 10**5 or max(tokens) == min(tokens):
        raise UserError(
            f"tokens are the lengths of two rows or more, from 2 to 100,000 and not all the same; got {[*tokens]}."
        )
    how = Drawn(tuple(tokens), seed, report)
    if isinstance(source, nn.Module):
        if also or weights is not None:
            raise UserError("weights and also are for folders; a live model is checked as it is. Leave them out.")
        return how.report_of(type(source).__name__, _live(source, how))
    formats = [weights] if weights is None or isinstance(weights, str) else [*weights]
    return how.report_of(str(source), _folder(Path(source), formats, also, how))


class Drawn:
    """The random rows, and what a report says of them."""

    def __init__(self, lengths: tuple[int, ...], seed: int, report: Log):
        self.lengths, self.seed, self.report = lengths, seed, report

    def rows(self, runner: Runner) -> list[Tensor]:
        """Draw rows as long as the longest and the steps behind it. Raises UserError for a model with fewer positions."""
        longest = max(self.lengths) + STEPS
        if runner.limit is not None and longest > runner.limit:
            most = runner.limit - STEPS
            raise UserError(
                f"this model has {runner.limit:,} positions; rows of {max(self.lengths):,} tokens and {STEPS} more do not fit. "
                f"Take rows of at most {most:,} (--tokens)."
            )
        left = torch.tensor([x for x in range(runner.vocab_size) if x not in runner.special | {runner.pad_id}])
        if not len(left):
            raise UserError(f"its vocabulary of {runner.vocab_size:,} tokens has special ones alone.")
        generator = torch.Generator().manual_seed(self.seed)
        return [left[torch.randint(len(left), (longest,), generator=generator)] for _ in self.lengths]

    def report_of(self, source: str, sections: Iterator[Section]) -> Report:
        """Run the parts, and put their results together."""
        return Report(source, self.lengths, self.seed, tuple(sections))


class Allowance:
    """The tolerance of a runner, measured once for its logits, and once for all stages if they are needed."""

    def __init__(self, runner: Runner, rows: list[Tensor], dtype: torch.dtype):
        self._runner, self._rows, self._dtype = runner, rows, dtype
        self._known: dict[bool, Tolerance] = {}

    def __call__(self) -> Tolerance:
        watching = self._runner.watching
        if watching not in self._known:
            self._known[watching] = measured(self._runner, self._rows, self._dtype)
        return self._known[watching]


def _live(model: Any, how: Drawn) -> Iterator[Section]:
    forward: Any = _forward_of(model, "forward")
    if forward is None:
        yield from _running(open_step(model), how)
        return
    with evaluating(model):
        rows = how.rows(forward)
        allowed = Allowance(forward, rows, forward.dtype)

        def against() -> Result:
            return _compare("tarnn's runtime against it", forward, lambda: _running_of(open_step(model)), rows, allowed)

        yield _laws(forward, rows, how, allowed, against)


def _folder(folder: Path, formats: Sequence[str | None], also: Sequence[str], how: Drawn) -> Iterator[Section]:
    for i, weights in enumerate(formats):
        opened = open_step(folder, weights, report=how.report)
        yield from _running(opened, how, None if i else folder)
    for kind in also:
        model = _model_of(folder, patched=kind == "patched", report=how.report)
        forward: Any = _forward_of(model, f"{kind}: forward")
        rows = how.rows(forward)
        yield _laws(forward, rows, how, Allowance(forward, rows, forward.dtype))


def _running(opened: Opened, how: Drawn, folder: Path | None = None) -> Iterator[Section]:
    """Check what was opened. folder: compare it with that folder's model in PyTorch."""
    if not isinstance(getattr(opened.step, "runtime", opened.step), Runtime):
        if (
            not isinstance(opened.contents, OfModule)
            or (forward := _forward_of(opened.contents.model, "forward")) is None
        ):
            raise UserError(f"this {opened.architecture} has no program and no forward that could be checked.")
        rows = how.rows(forward)
        yield _laws(forward, rows, how, Allowance(forward, rows, forward.dtype))
        return
    running = _running_of(opened)
    rows = how.rows(running)
    running.room = len(rows[0])
    measured_here = Allowance(running, rows, torch.float32)
    bits = Tolerance({LOGITS: 0.0}, BITS)

    def definition() -> Result:
        return against_definition(running, rows, opened.dtype)

    def ours(folder: Path) -> Running:
        return running if running.runtime.weights == "float32" else _running_of(open_step(folder, "float32"))

    def other(folder: Path) -> Result:
        law = "in float32, against PyTorch's model"
        try:
            forward = opened_model(folder, how.report)
            return _compare(law, forward, lambda: ours(folder), rows, Allowance(forward, rows, forward.dtype))
        except (ValueError, ImportError) as error:
            return Result(law, SKIPPED, why=str(error))

    comparisons: list[Callable[[], Result]] = [definition]
    if folder is not None:
        comparisons.append(partial(other, folder))
    yield _laws(running, rows, how, (lambda: bits) if running.exact else measured_here, *comparisons)


def _laws(runner: Any, rows: list[Tensor], how: Drawn, allowed: Any, *comparisons: Callable[[], Result]) -> Section:
    """Hold a runner to all laws, and add what it is compared with."""
    how.report(f"tarnn: {runner.name}")
    results = [hold(runner, law, way, rows, how.lengths, allowed) for law, way in LAWS.items()]
    tolerance = allowed()
    return Section(runner.name, tolerance.of[LOGITS], tolerance.origin, (*results, *(x() for x in comparisons)))


def against_definition(running: Running, rows: list[Tensor], saved: torch.dtype) -> Result:
    """Compare a runtime with its program's definition in float64. saved: the type of the weights before they were packed."""
    law, weights = "against the definition, in float64", running.runtime.weights
    if weights != "float32" and (weights, saved) != ("bfloat16", torch.bfloat16):
        return Result(law, SKIPPED, why=f"{weights} rounds the weights; `tarnn eval` measures what that costs.")
    try:
        with running.watched():
            single, exact = (defined(running.program, torch.stack(rows), x, states=True) for x in DTYPES)
            ours = running.whole(torch.stack(rows))
    except UserError as error:
        return Result(law, SKIPPED, why=str(error))
    limits = {name: FACTOR * largest(single[name], exact[name]) for name in exact}
    return compared(law, ours, exact, limits, lambda: first_above(ours, exact, limits))


DTYPES = (torch.float32, torch.float64)


def _compare(law: str, forward: Any, running: Callable[[], Running], rows: list[Tensor], allowed: Allowance) -> Result:
    """Compare a runtime with a live model; what differs is looked for in the outputs of its layers."""
    try:
        ours = running()
        ours.room = len(rows[0])
        logits = {LOGITS: alone(ours, rows)[LOGITS]}
        theirs = alone(forward, rows)
    except ValueError as error:
        return Result(law, SKIPPED, why=str(error))

    def first() -> str | None:
        with forward.watched():
            stages, limits = alone(forward, rows[:1]), allowed().of
        outputs = {name: x[0] for name, x in stages.items() if name != LOGITS and name.rpartition(".")[2].isdigit()}
        return first_unlike(ours.program, outputs, limits, rows[0][None])

    return compared(law, logits, theirs, {LOGITS: allowed().of[LOGITS]}, first)


def compared(law: str, x: dict, y: dict, limits: dict[str, float], first: Callable[[], str | None]) -> Result:
    """Make the result of a comparison of logits. first: looks for the first layer that differs."""
    gaps = torch.cat([difference(*pair) for pair in zip(x[LOGITS], y[LOGITS], strict=True)])
    over = int((gaps > limits[LOGITS]).sum())
    why = f"of at most {limits[LOGITS]:.1e}, by rounding"
    if not over:
        return Result(law, PASS, float(gaps.max()), why=why)
    return Result(law, FAIL, float(gaps.max()), first(), (over, len(gaps)), why)


def largest(x: list[Tensor], y: list[Tensor]) -> float:
    """Return the largest difference of two stages."""
    return max(float(difference(*pair).max()) for pair in zip(x, y, strict=True))


def _running_of(opened: Opened) -> Running:
    runtime: Any = getattr(opened.step, "runtime", opened.step)
    if not isinstance(runtime, Runtime):
        raise UserError(f"there is no program of this {opened.architecture}: {'; '.join(opened.about)}.")
    return Running(opened, runtime, f"tarnn's runtime: {'; '.join(opened.about)}")


def _forward_of(model: Any, what: str) -> Any:
    """Return the runner of a model's own forward; None for a model without one that takes input_ids."""
    import inspect

    if "input_ids" not in inspect.signature(model.forward).parameters and not hasattr(model, "peft_config"):
        return None
    from tarnn.laws.forward import Forward

    return Forward(model, what)


def _model_of(folder: Path, *, patched: bool, report: Log) -> Any:
    """Open a folder's model in PyTorch, in float32. Raises UserError where there is none, or no room for it."""
    kind = read_json(folder / "config.json").get("model_type")
    files = sum(x.stat().st_size for x in folder.glob("*.safetensors"))
    check_memory(3 * files, f"{folder}: the model in PyTorch, in float32 and float64,", "It was not compared.")
    if kind in MODEL_TYPES:
        from tarnn.tasks.checkpoint import open_model

        return open_model(folder, dtype=torch.float32)
    from tarnn.conversion.opening import open_pretrained
    from tarnn.huggingface.patching.patch import patch_transformers

    model = open_pretrained(folder, text_only=True, report=report).float()
    if patched:
        patch_transformers(model)
    return model


def opened_model(folder: Path, report: Log) -> Any:
    """Return the runner of a folder's model in PyTorch. Raises UserError where there is none."""
    if folder.is_file():
        raise UserError("a packed file has no model in PyTorch; check the folder that it was made of.")
    model = _model_of(folder, patched=False, report=report)
    forward = _forward_of(model, "forward")
    if forward is None:
        raise UserError(f"a {type(model).__name__} has no forward that takes input_ids.")
    return forward


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within: the model is in evaluation mode."""
    training = [x for x in model.modules() if x.training]
    model.eval()
    try:
        yield
    finally:
        for x in training:
            x.training = True
