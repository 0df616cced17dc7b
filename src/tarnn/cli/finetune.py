"""`tarnn finetune`: trains a converted checkpoint against its own softmax attention."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Exit, Option


def finetune(
    checkpoint: Annotated[Path, Argument(help="A folder that `tarnn convert` wrote.")],
    out: Annotated[Path, Argument(help="A folder for the model; --resume continues from the checkpoints/ in it.")],
    texts: Annotated[list[str], Option(help="What to train on: a file, a folder, a glob, .jsonl … May be repeated.")],
    train: Annotated[
        Literal["maps", "lora", "weights"],
        Option(help="Stage 1: maps (that learn, such as hedgehog) and far bias. Stage 2: adapters, or all weights."),
    ] = "maps",
    steps: Annotated[int, Option(min=1, max=10**9, help="Number of optimizer steps.")] = 200,
    batch_size: Annotated[int, Option(min=1, max=10**5, help="Rows per step.")] = 4,
    learning_rate: Annotated[float | None, Option(help="The highest one (1e-2 maps, 1e-4 lora, 1e-5 weights).")] = None,
    drop_window: Annotated[bool, Option("--drop-window", help="Stage 2: leave the window out in many steps.")] = False,
    num_texts: Annotated[
        int, Option(min=1, help="Number of rows of text that are read; a quarter measures the loss.")
    ] = 256,
    length: Annotated[
        int | None, Option(min=2, help="Tokens per row (default: as many as the conversion was calibrated on).")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Continue a training that was stopped.")] = False,
    device: Annotated[str, Option(help="The device for the training: cpu, cuda …")] = "cpu",
) -> None:
    """Train a converted model: its maps alone (stage 1), or its weights (stage 2). Reports its loss before and after."""
    from tarnn.training.folder import check_trained, whole_model
    from tarnn.training.model_card import card_of_conversion, write_card

    check_trained(out, resume)
    from tarnn.cli.convert import log, model_rows, next_command, print_rows, save
    from tarnn.cli.generate import pick_device
    from tarnn.conversion import finetune as finetuned
    from tarnn.conversion.convert import check_length
    from tarnn.conversion.finetune import check_training, exact_keys
    from tarnn.conversion.opening import open_pretrained, tokenizer_of
    from tarnn.conversion.rows import calibrated_length, most_positions, read_rows
    from tarnn.matmul import fast_matmul, product_size
    from tarnn.tasks.text.pretrained import context_length
    from tarnn.training.callbacks import InterruptedRun

    check_training(train, steps, batch_size, learning_rate)
    model_device = pick_device(device)
    model = open_pretrained(checkpoint, converted=True, report=log).to(model_device)
    tokenizer, length = (
        tokenizer_of(checkpoint, model),
        context_length(most_positions(model), length or calibrated_length(model)),
    )
    check_length(length, exact_keys(model))
    of_model = model_rows(checkpoint, model, texts, num_texts, length)
    print_rows({**of_model, "train": train, "steps": f"{steps:,} of {batch_size} rows"})
    rows = read_rows(texts, tokenizer, number=num_texts, length=length, vocab_size=model.config.vocab_size, log=log)
    try:
        with fast_matmul(product_size(model, batch_size * length)):
            report = finetuned(
                model,
                rows,
                train=train,
                steps=steps,
                batch_size=batch_size,
                learning_rate=learning_rate,
                drop_window=drop_window,
                out=out,
                resume=resume,
                report=log,
            )
    except InterruptedRun as stop:
        log(f"{stop}, saved; the same command with --resume goes on")
        raise Exit(stop.exit_code) from None
    with whole_model(out) as partial:
        page = save(partial, model, tokenizer, report)
        write_card(
            partial, card_of_conversion(partial, out.absolute().name, model, checkpoint, texts, report), home=out
        )
    print(f"{report.unit}: {report.softmax:.4f} → {report.hybrid:.4f}")
    print_rows(
        {"model": out, "report": out / page, "log": out / "log.jsonl", "next": next_command(model, out, tokenizer)}
    )
