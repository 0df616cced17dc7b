"""`tarnn convert`: a pretrained softmax model in, the same with calibrated hybrid attention out."""

import shlex
import sys
from collections.abc import Mapping
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
    window: Annotated[int, Option(min=1, help="Keys at a smaller distance than this are exact.")] = 256,
    sinks: Annotated[int, Option(min=0, help="Number of first tokens kept exact.")] = 4,
    slots: Annotated[
        int, Option(min=0, help="Number of distant keys kept exact (those the features approximate worst).")
    ] = 0,
    feature_map: Annotated[
        str, Option(help="The map that estimates all other keys; none: window and sinks alone.")
    ] = "clusters",
    features: Annotated[int | None, Option(min=1, help="Number of features per head (default: 64).")] = None,
    mode: Annotated[
        Literal["choose", "features"], Option(help="Features in the heads where they earn their bytes, or in all.")
    ] = "choose",
    exact_layers: Annotated[int, Option(min=0, help="Number of layers that stay softmax: those that matter most.")] = 0,
    budget: Annotated[
        int | None, Option(min=1, help="Bytes for one sequence; heads that matter most become exact within it.")
    ] = None,
    num_texts: Annotated[int, Option(min=1, help="Number of rows of text that are read.")] = 32,
    length: Annotated[
        int | None,
        Option(min=2, help="Tokens per row: as many as will be used (default: the model's context, at most 4,096)."),
    ] = None,
    device: Annotated[str, Option(help="The device for the calibration: cpu, cuda …")] = "cpu",
) -> None:
    """Convert a pretrained softmax model: window and sinks exactly, all other keys by features.

    Each head is calibrated on the texts; the report says what each of them loses, and what a window alone would.
    Nothing is trained: `tarnn finetune` does that.
    """
    from tarnn.training.folder import check_new, whole_folder
    from tarnn.training.model_card import card_of_conversion, write_card

    check_new(out)
    from tarnn.cli.generate import pick_device
    from tarnn.conversion import convert as converted
    from tarnn.conversion.cache import check_cache
    from tarnn.conversion.calibration import ExactKeys
    from tarnn.conversion.convert import check_length
    from tarnn.conversion.opening import open_pretrained, tokenizer_of
    from tarnn.conversion.rows import most_positions, read_rows
    from tarnn.feature_maps import options_of
    from tarnn.matmul import fast_matmul, product_size
    from tarnn.tasks.text.pretrained import context_length

    described: dict[str, Any] | None = None
    if feature_map != "none":
        counted = "num_features" in options_of(feature_map)
        described = {"name": feature_map, **({"num_features": features or 64} if counted else {})}
    elif features is not None or mode == "features":
        raise UserError("--feature-map none has no features; leave out --features and --mode features.")
    model_device = pick_device(device)
    model = open_pretrained(checkpoint, converted=False, report=log).to(model_device)
    if model.can_generate():
        check_cache(model)
    tokenizer, length = tokenizer_of(checkpoint, model), context_length(most_positions(model), length)
    check_length(length, ExactKeys(window, sinks))
    print_rows(
        {
            **model_rows(checkpoint, model, texts, num_texts, length),
            "window": window,
            "sinks": sinks,
            "slots": slots,
            "features": ", ".join(str(x) for x in (described or {"name": "none"}).values()),
            "exact layers": exact_layers,
            "budget": budget or "none",
        }
    )
    rows = read_rows(texts, tokenizer, number=num_texts, length=length, vocab_size=model.config.vocab_size, log=log)
    with fast_matmul(product_size(model, length)):
        report = converted(
            model,
            rows,
            window=window,
            sinks=sinks,
            slots=slots,
            feature_map=described,
            mode=mode,
            exact_layers=exact_layers,
            budget=budget,
            report=log,
        )
    with whole_folder(out) as partial:
        page = save(partial, model, tokenizer, report)
        write_card(partial, card_of_conversion(partial, out.absolute().name, model, checkpoint, texts, report))
    print(
        f"{report.unit}: {report.softmax:.4f} → {report.hybrid:.4f}; bytes of keys, values and sums of {length:,} tokens: "
        f"{report.softmax_bytes:,} → {report.bytes:,}"
    )
    if report.advice:
        print(report.advice)
    print_rows({"model": out, "report": out / page, "next": next_command(model, out, tokenizer)})


def log(line: str) -> None:
    print(f"tarnn: {line}", file=sys.stderr, flush=True)


def print_rows(rows: Mapping[str, Any]) -> None:
    for name, value in rows.items():
        print(f"{name:>13}  {value}")


def model_rows(checkpoint: Path, model: Any, texts: list[str], num_texts: int, length: int) -> dict[str, str]:
    """The first rows of the table of options: the model and its texts."""
    return {
        "checkpoint": f"{checkpoint} ({type(model).__name__}, {model.num_parameters():,} parameters)",
        "texts": f"{', '.join(texts)}: {num_texts} rows of {length:,} tokens",
    }


def save(folder: Path, model: Any, tokenizer: Any, report: Any) -> str:
    """Save a converted model, its tokenizer and the report; return the name of the report's page."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return report.save(folder)[1].name


def next_command(model: Any, out: Path, tokenizer: Any) -> str:
    """The command that uses a converted model."""
    folder = shlex.quote(str(out))
    if model.can_generate():
        return f'tarnn generate {folder} --prompt "Once upon a time"'
    if type(model).__name__.endswith("ForSequenceClassification"):
        return f'tarnn predict {folder} "a text"'
    if type(model).__name__.endswith("ForMaskedLM") and (mask := getattr(tokenizer, "mask_token", None)):
        return f'tarnn predict {folder} "a text {mask}"'
    return f'tarnn show {folder} --input "a text" --out {folder}-attention'
