"""`tarnn check`: whether a model gives one text the same logits, however it is computed."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from tarnn.cli.info import parse_lengths
from tarnn.log import silent


def check(
    checkpoint: Annotated[
        Path, Argument(metavar="FOLDER", help="A folder in Hugging Face's layout, or a file of `tarnn pack`.")
    ],
    weights: Annotated[
        str | None, Option(help="Formats of the runtime's weights, as float32,bfloat16,int8,int4 (default: as saved).")
    ] = None,
    also: Annotated[
        str | None,
        Option(
            help="transformers: check also its own model; patched: that one with tarnn's ops; or both, with a comma."
        ),
    ] = None,
    tokens: Annotated[str, Option(help="Lengths of the rows of random tokens, with commas between them.")] = "70,23,7",
    seed: Annotated[int, Option(min=0, help="Of the tokens.")] = 0,
    as_json: Annotated[bool, Option("--json", help="As JSON, for programs.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="The result only, nothing on stderr.")] = False,
) -> None:
    """Check that a model gives the same logits in every way to compute the same text.

    Rows of random tokens are computed alone, in a batch, padded on either side, with a cache, in pieces and token by token:
    each result must be that of the row alone. tarnn's runtime must give the same bits; it is then compared with its
    definition in float64, and with transformers' model of the folder, within that model's own rounding.

    Each line says pass, FAIL or skipped, the largest difference of two logits, and the first layer where it appears.
    Exit code 0: nothing failed. 1: something failed. 2: it could not be checked.
    """
    from tarnn.laws.check import check as check_source

    report = silent if quiet else partial(print, file=sys.stderr, flush=True)
    lengths = parse_lengths(tokens, "--tokens")
    formats, others = (None if x is None else x.split(",") for x in (weights, also))
    found = check_source(checkpoint, formats, also=others or (), tokens=lengths, seed=seed, report=report)
    print(json.dumps(found.facts(), indent=2) if as_json else found)
    if found.failed:
        raise Exit(1)
