"""`tarnn train`: data in, a model in a folder out. The options are the fields of the tasks' settings."""

import inspect
import os
import sys
import time
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from typer import Argument, Exit, Option

from tarnn.cli.formats import next_command
from tarnn.cli.output import Output
from tarnn.errors import UserError
from tarnn.tasks import TASKS, RunSettings, own_options
from tarnn.tasks.settings import flag_of

SOURCES = (
    "Text: files (also .gz, .bz2, .xz, .zst), folders, globs, - (stdin), .jsonl files, datasets:NAME[:CONFIG[:SPLIT]], "
    "or the built-in python-docs and python-stdlib. Images: a folder or file of idx (MNIST) or npz, "
    "pictures (FOLDER:train names a part), or datasets:NAME."
)


def train(sources: list[str], out: Path, task: str, **given: Any) -> None:
    """Train a model of text, images, labels or transcripts; it is validated on held-out data.

    Ctrl-C saves and stops. After that, or when killed, the same command with --resume goes on.
    Many processes: torchrun --nproc-per-node N -m tarnn train …
    """
    started = time.monotonic()
    foreign = {name: (o, f) for o in reversed(TASKS) if o != task for name, f in own_options(o).items()}
    for name, (other, field) in foreign.items():
        if name not in own_options(task) and given.pop(name) != default_of(field):
            raise UserError(f"{flag_of(name)} is for --task {other}; leave it out with --task {task}.")
    kind = TASKS[task].settings_class
    parsers = {f.name: parse for f in fields(kind) if (parse := f.metadata.get("parse"))}
    given |= {name: parse(given[name] or []) for name, parse in parsers.items()}
    settings = kind(sources=tuple(sources), out=out, **given)  # refuses before seconds of imports
    if settings.threads is not None:
        import torch

        torch.set_num_threads(settings.threads)
    from tarnn.training.callbacks import InterruptedRun
    from tarnn.training.checkpoints import latest
    from tarnn.training.processes import part
    from tarnn.training.run import train as train_run

    try:
        result = train_run(settings, started=started)
        part()
    except InterruptedRun as stop:
        part()
        if os.environ.get("RANK", "0") == "0":
            print(f"tarnn: {stop}, saved; the same command with --resume goes on", file=sys.stderr)
        raise Exit(stop.exit_code) from None
    except KeyboardInterrupt:
        if last := latest(out / "checkpoints"):
            print(f"\ntarnn: --resume goes on from {last}", file=sys.stderr)
        raise
    if os.environ.get("RANK", "0") == "0":  # under torchrun, once
        paths = {"model": out, "log": out / "log.jsonl", "settings": out / "settings.json"}
        # which escapes what would steer a terminal
        Output().write(report(result, settings, paths) + "\n")


def parameters() -> list[inspect.Parameter]:
    """The command's parameters: every field of every task's settings once."""
    kinds: list[type[RunSettings]] = [RunSettings, *(task.settings_class for task in TASKS.values())]
    types = {name: t for kind in kinds for name, t in get_type_hints(kind).items()}
    options = {f.name: f for kind in kinds for f in fields(kind) if "help" in f.metadata}
    out = Option(help="The folder of the run: model, checkpoints, log.", show_default=False)
    found: dict[str, tuple[Any, Any]] = {
        "sources": (
            Annotated[list[str], Argument(metavar="SOURCE...", help=SOURCES, show_default=False)],
            inspect.Parameter.empty,
        ),
        "out": (Annotated[Path, out], inspect.Parameter.empty),
        "task": (Annotated[Literal[*TASKS], Option(help="What the model is of.")], "text"),
        **{name: (annotation_of(f, types[name]), default_of(f)) for name, f in options.items()},
    }
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(n, kind, annotation=a, default=default) for n, (a, default) in found.items()]


def annotation_of(field: Field, kind: Any) -> Any:
    """A field as typer takes it: its type, help, heading and flag."""
    about = field.metadata
    flag = about["flag"] or ("--" + field.name.replace("_", "-") if kind is bool else None)
    option = Option(
        *([flag] if flag else []), help=about["help"], metavar=about["metavar"], rich_help_panel=about["heading"]
    )
    taken = list[str] | None if about["parse"] else kind
    return Annotated[taken, option]


def default_of(field: Field) -> Any:
    return None if field.default is MISSING else field.default


train.__signature__ = inspect.Signature(parameters())  # type: ignore[attr-defined]
train.__annotations__ = {}


def report(result, settings: Any, paths: dict[str, Path]) -> str:
    """The end of a run: a sample, the measure, the paths."""
    from tarnn.training.summary import measured

    task = TASKS[settings.task]
    measure = measured(task, result.validation, result.best_step, result.rates)
    sample = result.sample
    lines = [sample.text, ""] if sample and sample.text else []
    lines += [f"{result.steps:,} steps in {result.seconds:,.0f} s, {measure}"]
    if sample:
        lines.append(f"{'sample':>9}  {sample.file}" + (f": {sample.about}" if sample.about else ""))
    lines += [f"{name:>9}  {path}" for name, path in paths.items()]
    return "\n".join(
        [*lines, f"{'next':>9}  {next_command(task.next, result.out, result.example, is_path=not task.reads_text)}"]
    )
