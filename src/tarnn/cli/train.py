"""`tarnn train`: text in, a model in a folder out."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tarnn.training.settings import DEFAULT_STEPS, TrainSettings

TEXT, MODEL, LENGTH, KEPT = "Text", "Model", "Length and speed", "What is kept"


def train(
    sources: Annotated[
        list[str],
        Argument(metavar="TEXT...", help="Files, folders, globs, - (stdin), .jsonl files, datasets:NAME[:CONFIG[:SPLIT]], "
                 "or the built-in python-docs and python-stdlib.", show_default=False),
    ],
    out: Annotated[Path, Option(help="The folder of the run: model, checkpoints, log.", show_default=False)],
    text_field: Annotated[str, Option(help="The field that holds the text in jsonl and datasets.", rich_help_panel=TEXT)] = "text",
    val: Annotated[str | None, Option(help="Validate on this text.", rich_help_panel=TEXT)] = None,
    val_fraction: Annotated[
        float | None,
        Option(help="Validate on this part of the text, cut off its end; 0: none.  [default: a tenth, at most 256 KB]", rich_help_panel=TEXT),
    ] = None,
    tokenizer: Annotated[str, Option(help="bytes, or bpe:N: trained on the text, N ids.", rich_help_panel=TEXT)] = "bytes",
    context: Annotated[int, Option(help="Tokens in a training sequence.", rich_help_panel=TEXT)] = 256,
    preset: Annotated[str, Option(help="modern, or paper: the model of 2020.", rich_help_panel=MODEL)] = "modern",
    config: Annotated[Path | None, Option(help="JSON of TarnnConfig's keys.", rich_help_panel=MODEL)] = None,
    hidden_size: Annotated[int | None, Option(help="Channels.  [default: 256]", rich_help_panel=MODEL)] = None,
    layers: Annotated[int | None, Option(help="Blocks.  [default: 4, paper 8]", rich_help_panel=MODEL)] = None,
    heads: Annotated[int | None, Option(help="Attention heads.  [default: 4, paper 8]", rich_help_panel=MODEL)] = None,
    attention: Annotated[
        str | None,
        Option(help="linear, softmax or none; a,b,c is a pattern over the layers, such as "
               "linear,linear,linear,softmax.  [default: linear]", rich_help_panel=MODEL),
    ] = None,
    feature_map: Annotated[
        str | None, Option(help="elu, relu, exp, dpfp, hedgehog …, or a pattern.  [default: elu]", rich_help_panel=MODEL)
    ] = None,
    decay: Annotated[str | None, Option(help="none, head, token or channel.  [default: none]", rich_help_panel=MODEL)] = None,
    position: Annotated[
        str | None, Option(help="rotary, sinusoidal, learned or none.  [default: rotary]", rich_help_panel=MODEL)
    ] = None,
    dropout: Annotated[float | None, Option(help="[default: 0]", rich_help_panel=MODEL)] = None,
    steps: Annotated[
        int | None, Option(help=f"Optimizer steps.  [default: {DEFAULT_STEPS}, if there is no other limit]", rich_help_panel=LENGTH)
    ] = None,
    epochs: Annotated[float | None, Option(help="Passes over the text.", rich_help_panel=LENGTH)] = None,
    max_minutes: Annotated[
        float | None, Option(help="Stop by the clock; the learning rate follows it.", rich_help_panel=LENGTH)
    ] = None,
    batch_size: Annotated[int, Option(help="Sequences in a batch, on each device.", rich_help_panel=LENGTH)] = 16,
    accumulate: Annotated[int, Option(help="Batches in a step.", rich_help_panel=LENGTH)] = 1,
    learning_rate: Annotated[float, Option(help="The highest; AdamW.", rich_help_panel=LENGTH)] = 1e-3,
    bf16: Annotated[bool, Option("--bf16", help="Mixed precision.", rich_help_panel=LENGTH)] = False,
    gradient_checkpointing: Annotated[
        bool, Option("--gradient-checkpointing", help="Less memory, more time.", rich_help_panel=LENGTH)
    ] = False,
    seed: Annotated[int, Option(help="Of weights, order and dropout.", rich_help_panel=LENGTH)] = 0,
    eval_every: Annotated[int, Option(help="Steps between validations.", rich_help_panel=KEPT)] = 250,
    save_every: Annotated[int, Option(help="Steps between checkpoints.", rich_help_panel=KEPT)] = 250,
    keep: Annotated[int, Option(help="Checkpoints to keep.", rich_help_panel=KEPT)] = 2,
    sample_tokens: Annotated[int, Option(help="Length of the sample at the end; 0: none.", rich_help_panel=KEPT)] = 256,
    resume: Annotated[
        bool, Option("--resume", help="Go on from the last complete checkpoint in --out, if there is one.", rich_help_panel=KEPT)
    ] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Delete the run in --out first.", rich_help_panel=KEPT)] = False,
    set_: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Any other field of Hugging Face's TrainingArguments; repeatable."),
    ] = None,
) -> None:  # fmt: skip
    """Train a language model on text; it is validated on the end of the text, in bits per byte.

    Killed at any moment, the same command with --resume goes on as if nothing had happened.
    Many processes: torchrun --nproc-per-node N -m tarnn.cli.main train …
    """
    options = {name: value for name, value in locals().items() if name not in ("sources", "set_")}
    settings = TrainSettings(sources=tuple(sources), **options)  # cheap checks first: the rest imports for seconds
    from tarnn.training.arguments import parse_assignments
    from tarnn.training.checkpoints import latest
    from tarnn.training.run import train as train_run

    settings = TrainSettings(**{**vars(settings), "training_arguments": parse_assignments(set_ or [])})
    try:
        result = train_run(settings)
    except KeyboardInterrupt:
        last = latest(out / "checkpoints")
        print(f"\ntarnn: --resume goes on from {last}" if last else "", file=sys.stderr)
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
    return "\n".join(
        [
            result.sample, "",
            f"{result.steps:,} steps in {result.seconds:,.0f} s, {measure}",
            *(f"{name:>9}  {path}" for name, path in paths.items()),
            f"{'next':>9}  tarnn generate {result.out}",
        ]  # fmt: skip
    )
