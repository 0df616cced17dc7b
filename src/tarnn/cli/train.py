"""`tarnn train`: text in, a model in a folder out."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from tarnn.training.settings import DEFAULT_STEPS, TrainSettings

# an option under one of the headings of --help
text, model, length, kept = (
    partial(Option, rich_help_panel=heading)
    for heading in ("Text", "Model", "Length and speed", "What is kept")
)
SOURCES = (
    "Files, folders, globs, - (stdin), .jsonl files, datasets:NAME[:CONFIG[:SPLIT]], or the built-in "
    "python-docs and python-stdlib."
)
PATTERN = "linear, softmax, none, or a pattern over the layers: linear,linear,softmax (default: linear)."
VALIDATION = "Validate on this part of the text, cut off its end; 0: none (default: a tenth, at most 256 KB)."


def train(
    sources: Annotated[list[str], Argument(metavar="TEXT...", help=SOURCES, show_default=False)],
    out: Annotated[Path, Option(help="The folder of the run: model, checkpoints, log.", show_default=False)],
    text_field: Annotated[str, text(help="The field that holds the text in jsonl and datasets.")] = "text",
    val: Annotated[str | None, text(help="Validate on this text.")] = None,
    val_fraction: Annotated[float | None, text(help=VALIDATION)] = None,
    tokenizer: Annotated[str, text(help="bytes, or bpe:N: trained on the text, N ids.")] = "bytes",
    context: Annotated[int, text(help="Tokens in a training sequence.")] = 256,
    preset: Annotated[str, model(help="modern, or paper: the model of 2020.")] = "modern",
    config: Annotated[
        Path | None, model(help="A JSON file of TarnnConfig's keys; options win over it.")
    ] = None,
    hidden_size: Annotated[int | None, model(help="Channels (default: 256).")] = None,
    layers: Annotated[int | None, model(help="Blocks (default: 4; paper 8).")] = None,
    heads: Annotated[int | None, model(help="Attention heads (default: 4; paper 8).")] = None,
    attention: Annotated[str | None, model(help=PATTERN)] = None,
    feature_map: Annotated[str | None, model(help="elu, relu, exp, dpfp, hedgehog … (default: elu).")] = None,
    decay: Annotated[str | None, model(help="none, head, token or channel (default: the preset's).")] = None,
    position: Annotated[
        str | None, model(help="rotary, sinusoidal, learned, none (default: the preset's).")
    ] = None,
    dropout: Annotated[float | None, model(help="On the embedding and in every block (default: 0).")] = None,
    steps: Annotated[
        int | None, length(help=f"Optimizer steps (default: {DEFAULT_STEPS}, if nothing else ends it).")
    ] = None,
    epochs: Annotated[float | None, length(help="Passes over the text.")] = None,
    max_minutes: Annotated[
        float | None, length(help="Stop by the clock; the learning rate follows it.")
    ] = None,
    batch_size: Annotated[int, length(help="Sequences in a batch, on each device.")] = 16,
    accumulate: Annotated[int, length(help="Batches in a step.")] = 1,
    learning_rate: Annotated[float, length(help="The highest; AdamW.")] = 1e-3,
    bf16: Annotated[bool, length("--bf16", help="Mixed precision.")] = False,
    gradient_checkpointing: Annotated[
        bool, length("--gradient-checkpointing", help="Less memory, more time.")
    ] = False,
    seed: Annotated[int, length(help="Of weights, order and dropout.")] = 0,
    eval_every: Annotated[int, kept(help="Steps between validations.")] = 250,
    save_every: Annotated[int, kept(help="Steps between checkpoints.")] = 250,
    keep: Annotated[int, kept(help="Checkpoints to keep.")] = 2,
    sample_tokens: Annotated[int, kept(help="Length of the sample at the end; 0: none.")] = 256,
    resume: Annotated[
        bool, kept("--resume", help="Go on from the last complete checkpoint, if any.")
    ] = False,
    overwrite: Annotated[bool, kept("--overwrite", help="Delete the run in --out first.")] = False,
    set_: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Any other field of Hugging Face's TrainingArguments."),
    ] = None,
) -> None:
    """Train a language model on text; it is validated on the end of the text, in bits per byte.

    Killed at any moment, the same command with --resume goes on as if nothing had happened.
    Many processes: torchrun --nproc-per-node N -m tarnn.cli.main train …
    """
    options = {name: value for name, value in locals().items() if name not in ("sources", "set_")}
    settings = TrainSettings(sources=tuple(sources), **options)  # refuses before seconds of imports
    from tarnn.training.arguments import parse_assignments
    from tarnn.training.checkpoints import latest
    from tarnn.training.run import train as train_run

    settings = TrainSettings(**{**vars(settings), "training_arguments": parse_assignments(set_ or [])})
    try:
        result = train_run(settings)
    except KeyboardInterrupt:
        last = latest(out / "checkpoints")
        if last:
            print(f"\ntarnn: --resume goes on from {last}", file=sys.stderr)
        raise
    if os.environ.get("RANK", "0") == "0":  # under torchrun, once
        print(report(result))


def report(result) -> str:
    """The end of a run: a sample, the measure, the paths."""
    measure = (
        f"{result.bits_per_byte:.4f} bits/byte on the validation text (step {result.best_step:,})"
        if result.bits_per_byte is not None
        else "no validation text"
    )
    paths = {"model": result.out, "log": result.out / "log.jsonl", "settings": result.out / "settings.json"}
    lines = [result.sample, "", f"{result.steps:,} steps in {result.seconds:,.0f} s, {measure}"]
    lines += [f"{name:>9}  {path}" for name, path in paths.items()]
    return "\n".join([*lines, f"{'next':>9}  tarnn generate {result.out}"])
