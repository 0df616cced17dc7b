"""`tarnn finetune --against-softmax`: a converted model trained against its own softmax attention."""

from pathlib import Path

from typer import Exit

TRAINED = "maps"


def against_softmax(
    checkpoint: Path,
    texts: list[str],
    out: Path,
    *,
    train: str | None,
    steps: int | None,
    batch_size: int | None,
    learning_rate: float | None,
    drop_window: bool,
    num_texts: int | None,
    length: int | None,
    resume: bool,
    device: str,
) -> None:
    """Train a converted model: its maps alone (stage 1), or its weights (stage 2). Report its loss before and after."""
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

    train, steps, batch_size, num_texts = train or TRAINED, steps or 200, batch_size or 4, num_texts or 256
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
