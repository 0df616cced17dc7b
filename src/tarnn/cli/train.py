"""`tarnn train`: text or images in, a model in a folder out."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from tarnn.errors import UserError
from tarnn.training.settings import DEFAULT_STEPS, TASKS, only_for, option

# an option under one of the headings of --help
data, text, image, model, length, kept = (
    partial(Option, rich_help_panel=heading)
    for heading in ("Data", "Text", "Images", "Model", "Length and speed", "What is kept")
)
SOURCES = (
    "Text: files, folders, globs, - (stdin), .jsonl files, datasets:NAME[:CONFIG[:SPLIT]], or the built-in "
    "python-docs and python-stdlib. Images: a folder or file of idx (MNIST), npz, CIFAR-10 or ImageNet64 batches, "
    "PNG or JPEG pictures (FOLDER:train names a part), or digits (scikit-learn's)."
)
PATTERN = "linear, softmax, none, or a pattern over the layers: linear,linear,softmax (default: linear)."
VALIDATION = (
    "Validate on this part of the data: of a text its end, of images some at random; 0: none (default: a tenth, at "
    "most 256 KB)."
)


def train(
    sources: Annotated[list[str], Argument(metavar="SOURCE...", help=SOURCES, show_default=False)],
    out: Annotated[Path, Option(help="The folder of the run: model, checkpoints, log.", show_default=False)],
    task: Annotated[Literal["text", "image"], Option(help="What the model is of.")] = "text",
    val: Annotated[str | None, data(help="Validate on this source.")] = None,
    val_fraction: Annotated[float | None, data(help=VALIDATION)] = None,
    text_field: Annotated[str, text(help="The field that holds the text in jsonl and datasets.")] = "text",
    tokenizer: Annotated[str, text(help="bytes, or bpe:N: trained on the text, N ids.")] = "bytes",
    context: Annotated[int, text(help="Tokens in a training sequence.")] = 256,
    sample_tokens: Annotated[int, text(help="Length of the sample at the end; 0: none.")] = 256,
    likelihood: Annotated[
        str | None, image(help="logistic_mixture or categorical (default: logistic_mixture).")
    ] = None,
    mixtures: Annotated[int | None, image(help="Components of the mixture (default: 10).")] = None,
    class_conditional: Annotated[
        bool, image("--class-conditional", help="Learn to make images of a given class.")
    ] = False,
    optimizer: Annotated[
        str | None, image(help="adamw or radam (default: adamw; with --preset paper radam, constant).")
    ] = None,
    sample_images: Annotated[int, image(help="Images to draw at the end; 0: none.")] = 16,
    preset: Annotated[str, model(help="modern, or paper: the model of 2020.")] = "modern",
    config: Annotated[
        Path | None, model(help="A JSON file of TarnnConfig's keys; options win over it.")
    ] = None,
    hidden_size: Annotated[int | None, model(help="Channels (default: 256).")] = None,
    layers: Annotated[int | None, model(help="Blocks (default: 4; paper 8).")] = None,
    heads: Annotated[int | None, model(help="Attention heads (default: 4; paper 8).")] = None,
    attention: Annotated[str | None, model(help=PATTERN)] = None,
    feature_map: Annotated[
        str | None, model(help="elu, relu, dpfp, hedgehog, favor, oprf … (default: elu), or a pattern.")
    ] = None,
    map_option: Annotated[
        list[str] | None,
        model(metavar="MAP.OPTION=VALUE", help="Of a feature map, such as favor.num_features=128."),
    ] = None,
    redraw_every: Annotated[
        int, model(help="Steps between new draws of random features; 0: the first draw stays.")
    ] = 1000,
    decay: Annotated[str | None, model(help="none, head, token or channel (default: the preset's).")] = None,
    position: Annotated[
        str | None,
        model(help="rotary, sinusoidal, learned, none; of images also grid (default: the preset's)."),
    ] = None,
    dropout: Annotated[float | None, model(help="On the embedding and in every block (default: 0).")] = None,
    steps: Annotated[
        int | None, length(help=f"Optimizer steps (default: {DEFAULT_STEPS}, if nothing else ends it).")
    ] = None,
    epochs: Annotated[float | None, length(help="Passes over the data.")] = None,
    max_minutes: Annotated[
        float | None, length(help="Stop by the clock; the learning rate follows it.")
    ] = None,
    batch_size: Annotated[int, length(help="Sequences or images in a batch, on each device.")] = 16,
    accumulate: Annotated[int, length(help="Batches in a step.")] = 1,
    learning_rate: Annotated[
        float | None, length(help="The highest (default: 1e-3; images with --preset paper: 1e-4).")
    ] = None,
    bf16: Annotated[bool, length("--bf16", help="Mixed precision.")] = False,
    gradient_checkpointing: Annotated[
        bool, length("--gradient-checkpointing", help="Less memory, more time.")
    ] = False,
    seed: Annotated[int, length(help="Of weights, order and dropout.")] = 0,
    eval_every: Annotated[int, kept(help="Steps between validations.")] = 250,
    save_every: Annotated[int, kept(help="Steps between checkpoints.")] = 250,
    keep: Annotated[int, kept(help="Checkpoints to keep.")] = 2,
    resume: Annotated[
        bool, kept("--resume", help="Go on from the last complete checkpoint, if any.")
    ] = False,
    overwrite: Annotated[bool, kept("--overwrite", help="Delete the run in --out first.")] = False,
    set_: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Any other field of Hugging Face's TrainingArguments."),
    ] = None,
) -> None:
    """Train a model of text or images; it is validated on held-out data, in bits per byte or dimension.

    Killed at any moment, the same command with --resume goes on as if nothing had happened.
    Many processes: torchrun --nproc-per-node N -m tarnn.cli.main train …
    """
    options = {
        name: value
        for name, value in locals().items()
        if name not in ("sources", "task", "map_option", "set_")
    }
    for other in TASKS:
        for name, default in only_for(other).items() if other != task else ():
            if options.pop(name) != default:
                raise UserError(f"{option(name)} is for --task {other}; leave it out with --task {task}.")
    settings = TASKS[task](sources=tuple(sources), **options)  # refuses before seconds of imports
    from tarnn.training.arguments import parse_assignments, parse_map_options
    from tarnn.training.checkpoints import latest
    from tarnn.training.run import train as train_run

    parsed = {
        "training_arguments": parse_assignments(set_ or []),
        "feature_map_options": parse_map_options(map_option or []),
    }
    settings = TASKS[task](**{**vars(settings), **parsed})
    try:
        result = train_run(settings)
    except KeyboardInterrupt:
        last = latest(out / "checkpoints")
        if last:
            print(f"\ntarnn: --resume goes on from {last}", file=sys.stderr)
        raise
    if os.environ.get("RANK", "0") == "0":  # under torchrun, once
        paths = {"model": out, "log": out / "log.jsonl", "settings": out / "settings.json"}
        if task == "image" and sample_images:
            from tarnn.cli.images import draw_sample
            from tarnn.training.folder import PICTURE

            paths = {"sample": draw_sample(out, out / PICTURE, sample_images, seed), **paths}
        print(report(result, settings, paths))


def report(result, settings: Any, paths: dict[str, Path]) -> str:
    """The end of a run: a sample, the measure, the paths."""
    unit, data = ("bits/dim", "images") if settings.task == "image" else ("bits/byte", "text")
    measure = (
        f"{result.bits_per_byte:.4f} {unit} on the validation {data} (step {result.best_step:,})"
        if result.bits_per_byte is not None
        else f"no validation {data}"
    )
    lines = [result.sample, ""] if settings.task == "text" else []
    lines += [f"{result.steps:,} steps in {result.seconds:,.0f} s, {measure}"]
    lines += [f"{name:>9}  {path}" for name, path in paths.items()]
    return "\n".join([*lines, f"{'next':>9}  tarnn generate {result.out}"])
