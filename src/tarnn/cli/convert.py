"""`tarnn convert`: a pretrained softmax model in, the same with calibrated hybrid attention out."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from tarnn.errors import UserError


def convert(
    checkpoint: Annotated[Path, Argument(help="A folder as save_pretrained of transformers writes it.")],
    out: Annotated[Path, Argument(help="A new folder: the model, conversion.json and conversion.md.")],
    texts: Annotated[
        list[str], Option(help="What to calibrate on: a file, a folder, a glob, .jsonl … May be repeated.")
    ],
    window: Annotated[int, Option(min=1, help="Keys nearer than this are exact.")] = 256,
    sinks: Annotated[int, Option(min=0, help="The first so many tokens are exact.")] = 4,
    slots: Annotated[int, Option(min=0, help="So many far keys that features represent worst are exact.")] = 0,
    feature_map: Annotated[
        str, Option(help="What estimates all others; none: nothing does, window and sinks are alone.")
    ] = "clusters",
    features: Annotated[int | None, Option(min=1, help="How many features per head (default: 64).")] = None,
    mode: Annotated[
        Literal["choose", "features"], Option(help="Features in the heads where they earn their bytes, or in all.")
    ] = "choose",
    exact_layers: Annotated[int, Option(min=0, help="So many layers stay softmax: those that matter most.")] = 0,
    budget: Annotated[
        int | None, Option(min=1, help="Bytes for one sequence; heads that matter most become exact within it.")
    ] = None,
    num_texts: Annotated[int, Option(min=1, help="How many rows of text are read.")] = 32,
    length: Annotated[
        int | None,
        Option(min=2, help="Tokens of a row: as many as will be used (default: the model's context, at most 4,096)."),
    ] = None,
    device: Annotated[str, Option(help="Where it is calibrated: cpu, cuda …")] = "cpu",
) -> None:
    """Convert a pretrained softmax model: window and sinks exactly, all other keys by features.

    Each head is calibrated on the texts; the report says what each of them loses, and what a window alone would.
    Nothing is trained: `tarnn finetune` does that.
    """
    from tarnn.training.new_folder import check_new, whole_folder

    check_new(out)
    from tarnn.cli.generate import pick_device
    from tarnn.conversion import convert as converted
    from tarnn.conversion.calibration import Near
    from tarnn.conversion.convert import check_length
    from tarnn.conversion.opening import open_pretrained, tokenizer_of
    from tarnn.conversion.rows import length_of_rows, read_rows
    from tarnn.feature_maps import options_of

    def report(line: str) -> None:
        print(f"tarnn: {line}", file=sys.stderr, flush=True)

    described: dict[str, Any] | None = None
    if feature_map != "none":
        counted = "num_features" in options_of(feature_map)
        described = {"name": feature_map, **({"num_features": features or 64} if counted else {})}
    elif features is not None or mode == "features":
        raise UserError("--feature-map none has no features; leave out --features and --mode features.")
    where = pick_device(device)
    model = open_pretrained(checkpoint, converted=False, report=report).to(where)
    tokenizer, length = tokenizer_of(checkpoint, model), length_of_rows(model, length)
    check_length(length, Near(window, sinks))
    shown = {
        "checkpoint": f"{checkpoint} ({type(model).__name__}, {model.num_parameters():,} parameters)",
        "texts": f"{', '.join(texts)}: {num_texts} rows of {length:,} tokens",
        "window": window,
        "sinks": sinks,
        "slots": slots,
        "features": ", ".join(str(x) for x in (described or {"name": "none"}).values()),
        "exact layers": exact_layers,
        "budget": budget or "none",
    }
    for name, value in shown.items():
        print(f"{name:>13}  {value}")

    rows = read_rows(
        texts, tokenizer, number=num_texts, length=length, vocab_size=model.config.vocab_size, report=report
    )
    found = converted(
        model,
        rows,
        window=window,
        sinks=sinks,
        slots=slots,
        feature_map=described,
        mode=mode,
        exact_layers=exact_layers,
        budget=budget,
        report=report,
    )
    with whole_folder(out) as partial:
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        page = found.save(partial)[1].name
    print(
        f"{found.unit}: {found.softmax:.4f} → {found.hybrid:.4f}; bytes of keys, values and sums of {length:,} tokens: "
        f"{found.softmax_bytes:,} → {found.bytes:,}"
    )
    if found.advice:
        print(found.advice)
    for name, path in {"model": out, "report": out / page, "next": next_command(model, out)}.items():
        print(f"{name:>13}  {path}")


def next_command(model: Any, out: Path) -> str:
    """What one does with a converted model."""
    folder = shlex.quote(str(out))
    if model.can_generate():
        return f'tarnn generate {folder} --prompt "Once upon a time"'
    if type(model).__name__.endswith(("ForSequenceClassification", "ForMaskedLM")):
        return f'tarnn predict {folder} "a text"'
    return f'tarnn show {folder} --input "a text" --out {folder}-attention'
