"""`tarnn pack`: the model in a folder as one file, which opens at once."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from tarnn.cli.formats import next_command
from tarnn.log import silent

Weights = Literal["float32", "bfloat16", "int8", "int4"]


def pack(
    checkpoint: Annotated[Path, Argument(help="A folder of a model of text, as `tarnn generate` takes it.")],
    out: Annotated[Path, Argument(help="The file to write, such as model.tarnn.")],
    weights: Annotated[
        Weights | None,
        Option(help="How the file keeps the weights: fewer bits are smaller and faster (default: as saved)."),
    ] = None,
    adapter: Annotated[
        Path | None, Option(help="Add this adapter, as `tarnn finetune` and peft write them, to the weights.")
    ] = None,
    force: Annotated[
        bool, Option("--force", help="Replace a file that is there, once the new one is complete.")
    ] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
) -> None:
    """Pack the model in a folder into one file, with its tokenizer and chat template.

    `tarnn generate`, `info`, `eval` and `serve` take the file in the place of a folder. It is mapped, not read: it opens at
    once, and processes that run the same file share its memory. Its weights are in the format that was packed; to the
    bit, answers are those of the folder with the same --weights.
    """
    from tarnn.decoding.pack import pack_folder

    report = silent if quiet else partial(print, file=sys.stderr, flush=True)
    size = pack_folder(checkpoint, out, weights, adapter=adapter, replace=force, report=report)
    print(f'{out}: {size:,} bytes\nnext: {next_command("generate", out)} --prompt "Call me"')
