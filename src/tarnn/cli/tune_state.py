"""`tarnn tune-state`: a folder and examples in, a file of states out."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from tarnn.cli.finetune import DATA, resumable

STEPS = 100


def tune_state(
    folder: Annotated[Path, Argument(help="The folder of a model with recurrent layers.")],
    data: Annotated[list[str], Argument(help=DATA)],
    out: Annotated[Path, Option(help="The file of states to write; OUT.run beside it has log and checkpoints.")],
    steps: Annotated[int | None, Option(min=1, max=10**9, help=f"Number of steps (default: {STEPS}).")] = None,
    epochs: Annotated[float | None, Option(help="Passes over the data, in the place of steps.")] = None,
    learning_rate: Annotated[float | None, Option(help="The highest one (default: 1e-2).")] = None,
    scale: Annotated[float, Option(help="Multiply the trained states by this.")] = 1.0,
    length: Annotated[
        int | None, Option(min=2, help="Tokens per row (default: as many as the model reads, at most 2,048).")
    ] = None,
    batch_size: Annotated[int, Option(min=1, max=10**5, help="Rows per step, one after the other.")] = 1,
    no_packing: Annotated[bool, Option("--no-packing", help="One example per row.")] = False,
    checkpointing: Annotated[
        bool, Option("--checkpointing/--no-checkpointing", help="Save memory by computing activations twice.")
    ] = True,
    val: Annotated[str | None, Option(help="Validate on this source, and keep the best states.")] = None,
    val_fraction: Annotated[float, Option(help="Validate on this part of the examples (default: none).")] = 0.0,
    eval_every: Annotated[int, Option(min=1, max=10**9, help="Steps between validations.")] = 20,
    threads: Annotated[int | None, Option(min=1, max=4096, help="Threads of the CPU.")] = None,
    seed: Annotated[int, Option(help="For the order of the rows.")] = 0,
    resume: Annotated[bool, Option("--resume", help="Go on from the last complete checkpoint, if any.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Delete the run beside OUT first.")] = False,
) -> None:
    """Tune the states from which a model's recurrent layers begin: some 50 examples teach a format, a persona or a task.

    Nothing else of the model changes, and the states cost nothing per token. They steer; they teach no facts: `tarnn finetune`
    does. The file is for this model alone: `tarnn generate FOLDER --state-in OUT`, `tarnn serve FOLDER --state NAME=OUT`.

    Ctrl-C saves and stops. After that, or when killed, the same command with --resume goes on.
    """
    import torch

    from tarnn.cli.convert import print_rows
    from tarnn.tuning.run import fields_to_tune, positions_of, row_length
    from tarnn.tuning.state_run import tune_state as tuned
    from tarnn.tuning.task import TuneSettings

    if threads is not None:
        torch.set_num_threads(threads)
    settings = TuneSettings(
        sources=tuple(data),
        out=out.with_name(out.name + ".run"),
        folder=folder,
        kind="state",
        length=row_length(positions_of(fields_to_tune(folder)), length),
        pack=not no_packing,
        steps=steps or (None if epochs else STEPS),
        epochs=epochs,
        batch_size=1,
        accumulate=batch_size,
        learning_rate=learning_rate,
        gradient_checkpointing=checkpointing,
        threads=threads,
        seed=seed,
        val=val,
        val_fraction=None if val else val_fraction,
        eval_every=eval_every,
        save_every=eval_every,
        resume=resume,
        overwrite=overwrite,
        device="cpu",
    )
    log = partial(print, file=sys.stderr, flush=True)
    with resumable(log):
        result, size = tuned(settings, out, scale, log)
    measure = "" if result.validation is None else f", {result.validation:.4f} nats/token held out"
    print(f"{result.steps:,} steps in {result.seconds:,.0f} s{measure}")
    follow = f"tarnn generate {folder} --state-in {out}"
    print_rows({"states": f"{out} ({size:,} bytes)", "log": settings.out / "log.jsonl", "next": follow})
