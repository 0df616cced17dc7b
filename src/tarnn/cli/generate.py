"""`tarnn generate`: a prompt in, its continuation out, as it is made; or images into a PNG."""

import secrets
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from typer import Argument, Option

from tarnn.cli.converted import of_tarnn
from tarnn.cli.progress import progress
from tarnn.decoding import samplers
from tarnn.decoding.draws import Sampling
from tarnn.decoding.refusal import Refusal
from tarnn.errors import UserError
from tarnn.log import silent
from tarnn.tasks import TASKS

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["float32", "bfloat16", "int8", "int4"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BOTH = ("num_samples",)
TEXT_ONLY = (
    "prompt",
    "prompt_file",
    "max_new_tokens",
    "stop",
    "state_in",
    "state_out",
    "cache",
    "adapter",
    "repetition_penalty",
    "draft",
)
IMAGE_ONLY = ("out", "complete", "hidden", "class_label", "batch_size")
text, image = (partial(Option, rich_help_panel=heading) for heading in ("Text", "Images"))


def generate(
    checkpoint: Annotated[
        Path, Argument(help="A checkpoint folder, as `tarnn train --out` writes it, or a file of `tarnn pack`.")
    ],
    task: Annotated[
        Literal["text", "image"] | None, Option(help="What the model makes; the checkpoint knows it.")
    ] = None,
    prompt: Annotated[str | None, text(help="The text to continue; '' is the start of a document.")] = None,
    prompt_file: Annotated[
        str | None, text(help="A file to continue; - is stdin, which is also read if a pipe is all we get.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, text(help="How many at most; 0 only reads the prompt (default: 256).")
    ] = None,
    stop: Annotated[list[str] | None, text(help="Stop before this text. May be repeated.")] = None,
    state_in: Annotated[Path | None, text(help="Go on from a state saved with --state-out.")] = None,
    state_out: Annotated[Path | None, text(help="Save the state after the last token here.")] = None,
    cache: Annotated[
        Literal["bfloat16"] | None,
        text(help="Keep the keys and values of softmax layers in half as many bytes (default: as the weights)."),
    ] = None,
    adapter: Annotated[
        Path | None, text(help="Add this adapter, as `tarnn finetune` and peft write them, to the weights.")
    ] = None,
    draft: Annotated[
        int | None,
        text(
            help="Read up to so many expected tokens along with each one: the same text, faster if it repeats itself."
        ),
    ] = None,
    out: Annotated[Path | None, image(help="The PNG to write (default: images.png).")] = None,
    complete: Annotated[
        str | None, image(help="Complete the first images of this source, which are half hidden.")
    ] = None,
    hidden: Annotated[float | None, image(help="The part of each that is hidden (default: 0.5).")] = None,
    class_label: Annotated[
        list[int] | None, image(help="Draw this class. May be repeated; default: all, in turn.")
    ] = None,
    evaluate: Annotated[str | None, Option(hidden=True)] = None,
    limit: Annotated[int | None, Option(hidden=True)] = None,
    batch_size: Annotated[int | None, image(help="Images that are drawn at once (default: 64).")] = None,
    temperature: Annotated[
        float | None, Option(help="Below 1 sharper, above 1 flatter, 0 greedy (default: 1).")
    ] = None,
    top_k: Annotated[int | None, Option(help="Choose among the k most likely tokens; 0: all.")] = None,
    top_p: Annotated[float | None, Option(help="Choose among the most likely tokens that reach p together.")] = None,
    min_p: Annotated[
        float | None, Option(help="Choose among the tokens at least p times as likely as the likeliest; 0: all.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, text(help="Above 1, tokens of the prompt and of the text so far are less likely (default: 1).")
    ] = None,
    greedy: Annotated[bool, Option("--greedy", help="The most likely token, as --temperature 0.")] = False,
    seed: Annotated[int | None, Option(help="The same seed, the same tokens.")] = None,
    num_samples: Annotated[
        int | None, Option(help="Continuations of the prompt, which is read once (default: 1); images (16).")
    ] = None,
    weights: Annotated[
        Weights | None, Option(help="How the fused step keeps the weights: fewer bits are faster (default: as saved).")
    ] = None,
    device: Annotated[str, Option(help="cpu, cuda, mps …; auto: an accelerator if there is one.")] = "auto",
    dtype: Annotated[Dtype, Option(help="auto: as saved.")] = "auto",
    quiet: Annotated[bool, Option("--quiet", "-q", help="The results only, nothing on stderr.")] = False,
) -> None:
    """Continue a prompt with a trained model, as an RNN: constant time and memory per token. Or draw images.

    The text goes to stdout as it is made, everything else to stderr. On a terminal it ends with a newline, and control
    characters are escaped (\\x1b); a file or a pipe gets the text alone, exactly. A state saved with --state-out stands
    for all that came before it, read or made: read a book once with `--prompt-file book.txt --max-new-tokens
    0 --state-out book.state`, continue it many times with `--state-in book.state`.

    Images are drawn into a PNG, side by side; with --complete each line is what was given, what was made of it, and
    the original. `tarnn eval` reports what held-out images cost, in bits per dimension.

    Folders of other models are taken, too, on the CPU: linear families of transformers, Llama and its like (all are in
    docs/families.md). By default they sample as their generation_config.json says.

    On a CPU most models have a fused step: the whole model in one call. Its weights may be kept as bfloat16, or as int8
    or int4 with activations rounded to bytes: faster, by a little or by a lot. Measure what that costs your model's
    likelihood: int8 cost a trained model of digits 0.03 %.
    """
    options: dict[str, Any] = {
        k: v for k, v in locals().items() if k in (*BOTH, *TEXT_ONLY, *IMAGE_ONLY) and v is not None
    }
    own = of_tarnn(checkpoint)
    images = own and holds_images(checkpoint)
    refuse_other_task(checkpoint, task, images, options)
    if evaluate is not None or limit is not None:
        raise UserError(
            f"--evaluate and --limit are gone: `tarnn eval {checkpoint} IMAGES` measures bits per dimension."
        )
    if seed is not None and not 0 <= seed < 2**63:
        raise UserError(f"--seed must be from 0 to below 2**63; got {seed}.")
    seed = secrets.randbelow(2**31) if seed is None else seed
    sampling: dict[str, Any] = {"temperature": 0.0 if greedy else temperature, "top_k": top_k, "top_p": top_p}
    sampling |= {"min_p": min_p, "repetition_penalty": options.pop("repetition_penalty", None)}
    sampling = {name: x for name, x in sampling.items() if x is not None}
    where = torch.device("cpu") if device == "auto" and not own else pick_device(device)
    report = silent if quiet else partial(print, file=sys.stderr, flush=True)
    opening: dict[str, Any] = {"dtype": DTYPES.get(dtype), "device": where}
    opening |= {"track": partial(progress, text="tensors of the weights read", report=report)}

    if images:
        from tarnn.cli.images import ImageRequest, generate_images
        from tarnn.tasks.images.opening import open_images

        drawing = ImageRequest(**{"class_labels" if k == "class_label" else k: v for k, v in options.items()})
        samplers.sampler(**sampling)  # its errors before anything is read

        def load_images() -> Any:
            try:
                opened = open_images(checkpoint, weights, **opening)
            except Refusal as error:
                raise UserError(f"--weights is not possible here: {error} Leave --weights out.") from error
            report(opened_line(checkpoint, opened[0].dtype, where, Sampling(**sampling), seed))
            return opened

        draws = {**sampling, "generator": torch.Generator(where).manual_seed(seed)}
        generate_images(drawing, load_images, draws, report=report)
        return
    from tarnn.cli.continuation import Request, continue_prompt

    opening["adapter"] = options.pop("adapter", None)

    def load_text() -> Any:
        from tarnn.decoding.lm import load

        try:
            lm = load(checkpoint, weights, report=report, **opening)
        except Refusal as error:
            raise UserError(f"--weights is not possible here: {error} Leave --weights out.") from error
        report(opened_line(checkpoint, lm.opened.dtype, where, lm.sampling(**sampling), seed))
        return lm

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this model's features were calibrated")  # a line says it
        continue_prompt(Request(checkpoint, **options), load_text, sampling, seed, report=report)


def holds_images(checkpoint: Path) -> bool:
    """Return True for a model of images. Raises UserError for a folder of tarnn that holds none of text either."""
    from tarnn.tasks.checkpoint import GENERATED, fields_of

    task, _, _ = fields_of(checkpoint, GENERATED)
    return task.name == "image"


def opened_line(checkpoint: Path, dtype: torch.dtype, device: torch.device, sampling: Sampling, seed: int) -> str:
    """Return the line about the model that was opened, and how it draws."""
    x = sampling
    draws = f"temperature {x.temperature:g}, top-k {x.top_k or 'off'}, top-p {x.top_p:g}"
    draws += (f", min-p {x.min_p:g}" if x.min_p else "") + f", seed {seed}"
    draws = draws if x.temperature else "greedy"
    return f"tarnn: {checkpoint}, {str(dtype).removeprefix('torch.')} on {device}; {draws}"


def refuse_other_task(checkpoint: Path, task: str | None, images: bool, options: dict[str, Any]) -> None:
    """UserError for a task that the checkpoint is not of, and for options of another task."""
    actual, other = ("image", TEXT_ONLY) if images else ("text", IMAGE_ONLY)
    if task not in (None, actual):
        raise UserError(f"--task {task}: {checkpoint} holds a model of {TASKS[actual].of}.")
    if wrong := [name for name in other if name in options]:
        raise UserError(
            f"--{wrong[0].replace('_', '-')} does not go with a model of {'images' if images else 'text'}, as {checkpoint} "
            "is; leave it out."
        )


def pick_device(name: str) -> torch.device:
    """The device of that name; for auto the accelerator, if there is one. UserError if it isn't there."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        torch.Generator(name)  # the meta device has none
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"--device {name} can't be used here: {str(error).splitlines()[0].split('. ')[0].rstrip('.')}. Try cpu or auto."
        ) from error
