"""`tarnn export`: a model in a form that other programs run."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from tarnn.export.formats import FORMATS, export as write
from tarnn.log import silent, ticking

Weights = Literal["float32", "bfloat16", "int8", "int4"]
Format = Literal[*FORMATS]  # type: ignore[valid-type]
HELP = "; ".join(f"{name}: {text}" for name, text in FORMATS.items())


def export(
    checkpoint: Annotated[
        Path, Argument(help="The folder of a language model; for hf and web one that `tarnn train` made.")
    ],
    out: Annotated[Path, Option(help="The folder to write; it must be new or empty.")],
    format: Annotated[Format, Option(help=HELP)],
    operators: Annotated[
        Literal["onnx", "microsoft"] | None,
        Option(
            help="Of --format onnx: ONNX's own, of opset 27 (default), or those of com.microsoft, for older onnxruntime and "
            "for onnxruntime-web."
        ),
    ] = None,
    weights: Annotated[Weights | None, Option(help="For web: how the page keeps the weights (default: int8).")] = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
) -> None:
    """Write a model for other programs.

    What a format can't express is refused, by the names of the model's options. The folder is whole, or not there.
    """
    from tarnn.training.folder import check_new, whole_folder

    check_new(out)
    report = silent if quiet else partial(print, file=sys.stderr, flush=True)
    with whole_folder(out) as folder, ticking(f"tarnn: exporting {checkpoint}", report):
        about = write(format, checkpoint, folder, {"operators": operators, "weights": weights}, report)
    print(f"{out}: {about}")
