"""`tarnn finetune`: a folder and data in, an adapter or a tuned folder out."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Exit, Option

from tarnn.errors import UserError
from tarnn.log import Log

DATA = (
    "A table (.jsonl, .csv, datasets:NAME) of messages, of prompt and completion, or of text; or files and folders of text. "
    "May be repeated."
)
length_and_speed, kept, converted = (
    partial(Option, rich_help_panel=heading) for heading in ("Length and speed", "What is kept", "Converted models")
)
RANK = 16


def finetune(
    folder: Annotated[Path, Argument(help="The folder of a model, of any family of transformers that opens.")],
    data: Annotated[list[str], Argument(help=DATA)],
    out: Annotated[Path, Option(help="The folder of the run: the best adapter, the last one, checkpoints, log.")],
    lora: Annotated[
        int | None, Option(min=1, max=4096, help=f"Train adapters of this rank (default: {RANK}).", show_default=False)
    ] = None,
    alpha: Annotated[float | None, Option(help="The adapters' alpha (default: twice the rank).")] = None,
    full: Annotated[bool, Option("--full", help="Train all weights, in float32.")] = False,
    length: Annotated[
        int | None, length_and_speed(min=2, help="Tokens per row (default: as many as the model reads, at most 2,048).")
    ] = None,
    no_packing: Annotated[
        bool, length_and_speed("--no-packing", help="One example per row; by default short ones share a row, unmixed.")
    ] = False,
    steps: Annotated[int | None, length_and_speed(min=1, max=10**9, help="Number of optimizer steps.")] = None,
    epochs: Annotated[float | None, length_and_speed(help="Passes over the data (default: 3).")] = None,
    max_minutes: Annotated[float | None, length_and_speed(help="The time for the whole command.")] = None,
    batch_size: Annotated[
        int | None, length_and_speed(min=1, max=10**5, help="Rows per step, one after the other (default: 1).")
    ] = None,
    learning_rate: Annotated[
        float | None, length_and_speed(help="The highest one (default: 2e-4 adapters, 1e-5 all weights).")
    ] = None,
    checkpointing: Annotated[
        bool, length_and_speed("--checkpointing/--no-checkpointing", help="Save memory by computing activations twice.")
    ] = True,
    threads: Annotated[int | None, length_and_speed(min=1, max=4096, help="Threads of the CPU.")] = None,
    seed: Annotated[int, length_and_speed(help="For the first weights and the order of the rows.")] = 0,
    val: Annotated[str | None, kept(help="Validate on this source.")] = None,
    val_fraction: Annotated[
        float | None, kept(help="Validate on this part of the examples; 0: none (default: a tenth, at most 64).")
    ] = None,
    eval_every: Annotated[int, kept(min=1, max=10**9, help="Steps between validations.")] = 100,
    save_every: Annotated[int, kept(min=1, max=10**9, help="Steps between checkpoints.")] = 100,
    resume: Annotated[bool, kept("--resume", help="Go on from the last complete checkpoint, if any.")] = False,
    overwrite: Annotated[bool, kept("--overwrite", help="Delete the run in --out first.")] = False,
    softmax: Annotated[
        bool, converted("--against-softmax", help="Train what `tarnn convert` wrote against its own softmax attention.")
    ] = False,
    train: Annotated[
        Literal["maps", "lora", "weights"] | None,
        converted(help="Stage 1: maps (that learn) and far bias (default). Stage 2: adapters, or all weights."),
    ] = None,
    drop_window: Annotated[
        bool, converted("--drop-window", help="Stage 2: leave the window out in many steps.")
    ] = False,
    num_texts: Annotated[
        int | None, converted(min=1, help="Rows of text that are read (default: 256); a quarter measures the loss.")
    ] = None,
    device: Annotated[str, converted(help="The device for the training (default: cpu).")] = "cpu",
) -> None:
    """Tune a model on your data: adapters of low rank (the default), or all weights.

    Of conversations (`messages`) the answers are learned, of `prompt` and `completion` the completion, of texts all. Short
    examples share rows and stay apart, in attention and in states. The adapter is in PEFT's format: peft and transformers read
    it. `tarnn generate` and `tarnn serve` take it by --adapter.

    Ctrl-C saves and stops. After that, or when killed, the same command with --resume goes on.

    With --against-softmax a converted model is trained on texts: its maps alone, or its weights.
    """
    own = {"--train": train, "--drop-window": drop_window, "--num-texts": num_texts}
    if softmax:
        from tarnn.cli.against_softmax import against_softmax

        others = {"--lora": lora, "--alpha": alpha, "--full": full, "--epochs": epochs, "--max-minutes": max_minutes}
        refuse(others, "does not go with --against-softmax")
        against_softmax(
            folder,
            data,
            out,
            train=train,
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            drop_window=drop_window,
            num_texts=num_texts,
            length=length,
            resume=resume,
            device=device,
        )
        return
    refuse(own, "is for --against-softmax")
    if device not in ("cpu", "auto"):
        raise UserError(f"--device {device}: models are tuned on the CPU; leave it out.")
    if full and lora is not None:
        raise UserError("--lora trains adapters and --full all weights; give one of them.")
    import torch

    from tarnn.tuning.run import fields_to_tune, positions_of, row_length, tune
    from tarnn.tuning.task import TuneSettings

    if threads is not None:
        torch.set_num_threads(threads)
    settings = TuneSettings(
        sources=tuple(data),
        out=out,
        folder=folder,
        kind="full" if full else "lora",
        lora=None if full else lora or RANK,
        alpha=alpha,
        length=row_length(positions_of(fields_to_tune(folder)), length),
        pack=not no_packing,
        steps=steps,
        epochs=epochs,
        max_minutes=max_minutes,
        batch_size=1,
        accumulate=batch_size or 1,
        learning_rate=learning_rate,
        gradient_checkpointing=checkpointing,
        threads=threads,
        seed=seed,
        val=val,
        val_fraction=val_fraction,
        eval_every=eval_every,
        save_every=save_every,
        resume=resume,
        overwrite=overwrite,
        device="cpu",
    )
    log = partial(print, file=sys.stderr, flush=True)
    with resumable(log):
        tuned = tune(settings, log)
    report(tuned, settings, folder)


@contextmanager
def resumable(log: Log) -> Iterator[None]:
    """Say how a run that was interrupted within goes on, and leave with its exit code."""
    from tarnn.training.callbacks import InterruptedRun

    try:
        yield
    except InterruptedRun as stop:
        log(f"tarnn: {stop}, saved; the same command with --resume goes on")
        raise Exit(stop.exit_code) from None


def refuse(options: dict[str, Any], why: str) -> None:
    """Raise UserError for an option that was given and does not go with another."""
    if name := next((name for name, x in options.items() if x), None):
        raise UserError(f"{name} {why}; leave it out.")


def report(tuned: Any, settings: Any, folder: Path) -> None:
    """Print what was trained, where it is, and the command that follows."""
    from tarnn.cli.convert import print_rows

    result, out = tuned.result, settings.out
    measure = "nothing held out" if result.validation is None else f"{result.validation:.4f} nats/token held out"
    where = "" if result.best_step is None else f" (step {result.best_step:,})"
    print(f"{result.steps:,} steps in {result.seconds:,.0f} s, {measure}{where}")
    follow = f"tarnn generate {folder} --adapter {out}" if settings.lora else f"tarnn generate {out}"
    rows = {"adapter" if settings.lora else "model": out, "last": tuned.last, "log": out / "log.jsonl", "next": follow}
    print_rows({name: x for name, x in rows.items() if x is not None})
