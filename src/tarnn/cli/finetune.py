"""`tarnn finetune`: trains a converted checkpoint against its own softmax attention."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Exit, Option


def finetune(
    checkpoint: Annotated[Path, Argument(help="A folder that `tarnn convert` wrote.")],
    out: Annotated[Path, Argument(help="A folder for the model; checkpoints/ in it is where --resume goes on.")],
    texts: Annotated[list[str], Option(help="What to train on: a file, a folder, a glob, .jsonl … May be repeated.")],
    train: Annotated[
        Literal["maps", "lora", "weights"],
        Option(help="Stage 1: maps (that learn, such as hedgehog) and far bias. Stage 2: adapters, or all weights."),
    ] = "maps",
    steps: Annotated[int, Option(min=1, max=10**9, help="How many steps.")] = 200,
    batch_size: Annotated[int, Option(min=1, max=10**5, help="Rows per step.")] = 4,
    learning_rate: Annotated[float | None, Option(help="1e-2 for maps, 1e-4 lora, 1e-5 weights.")] = None,
    drop_window: Annotated[bool, Option("--drop-window", help="Stage 2: leave the window away in many steps.")] = False,
    num_texts: Annotated[int, Option(min=1, help="How many rows of text are read; a quarter measures.")] = 256,
    length: Annotated[
        int | None, Option(min=2, help="Tokens of a row (default: as many as the conversion was calibrated on).")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Go on where it was stopped.")] = False,
    device: Annotated[str, Option(help="Where it is trained: cpu, cuda …")] = "cpu",
) -> None:
    """Train a converted model: its maps alone (stage 1), or its weights (stage 2). Says what it loses before and after."""
    from tarnn.training.new_folder import check_trained, whole_model

    check_trained(out, resume)
    from tarnn.cli.convert import next_command
    from tarnn.cli.generate import pick_device
    from tarnn.conversion import finetune as finetuned
    from tarnn.conversion.convert import check_length
    from tarnn.conversion.finetune import check_training, near_of
    from tarnn.conversion.opening import open_pretrained, tokenizer_of
    from tarnn.conversion.rows import calibrated_length, length_of_rows, read_rows
    from tarnn.training.interruption import InterruptedRun

    def report(line: str) -> None:
        print(f"tarnn: {line}", file=sys.stderr, flush=True)

    check_training(train, steps, batch_size, learning_rate)
    where = pick_device(device)
    model = open_pretrained(checkpoint, converted=True, report=report).to(where)
    tokenizer, length = (tokenizer_of(checkpoint, model), length_of_rows(model, length or calibrated_length(model)))
    check_length(length, near_of(model))
    shown = {
        "checkpoint": f"{checkpoint} ({type(model).__name__}, {model.num_parameters():,} parameters)",
        "texts": f"{', '.join(texts)}: {num_texts} rows of {length:,} tokens",
        "train": train,
        "steps": f"{steps:,} of {batch_size} rows",
    }
    for name, value in shown.items():
        print(f"{name:>13}  {value}")

    rows = read_rows(
        texts, tokenizer, number=num_texts, length=length, vocab_size=model.config.vocab_size, report=report
    )
    try:
        found = finetuned(
            model,
            rows,
            train=train,
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            drop_window=drop_window,
            out=out,
            resume=resume,
            report=report,
        )
    except InterruptedRun as stop:
        report(f"{stop}, saved; the same command with --resume goes on")
        raise Exit(stop.exit_code) from None
    with whole_model(out) as partial:
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        page = found.save(partial)[1].name
    print(f"{found.unit}: {found.softmax:.4f} → {found.hybrid:.4f}")
    after = {"model": out, "report": out / page, "log": out / "log.jsonl", "next": next_command(model, out)}
    for name, path in after.items():
        print(f"{name:>13}  {path}")
