"""What `tarnn train --bf16` costs in quality on a CPU, and what float32 products by another library change.

    python experiments/mixed_precision.py --books FOLDER --threads 1      # an hour of one core; goes on where it was stopped
    python experiments/mixed_precision.py --books FOLDER --quick

Each cell is one run of `tarnn train` on novels, byte by byte: equal models, equal tokens in equal order, for each seed.
`float32` is what `tarnn train` does by default, with products by oneDNN where it keeps float32's error; `float32, MKL` is
torch's default (TARNN_FAST_MATMUL=off), and shows what the last bits alone change; `bf16` is --bf16. Differences are taken
seed by seed.

FOLDER holds books as .txt or .txt.gz; the end of the last one is kept for validation.
"""

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, mean_and_error, page, source
from scripts.common.training import trained
from tarnn.matmul import VARIABLE
from tarnn.tasks import TextSettings
from tarnn.training.folder import read_settings

MEASURE = "validation_bits_per_byte"
DEFAULT, MKL, BF16 = "float32", "float32, MKL", "bf16"
KINDS: dict[str, dict[str, Any]] = {DEFAULT: {}, MKL: {}, BF16: {"bf16": True}}
FULL = {
    "steps": 1000,
    "context": 256,
    "batch_size": 4,
    "hidden_size": 128,
    "layers": 4,
    "learning_rate": 1e-3,
    "held_out": 0.01,
    "seeds": [0, 1, 2],
    "books": Path,
    "runs": Path("runs/mixed_precision"),
}
QUICK = {"steps": 2, "context": 16, "batch_size": 2, "hidden_size": 16, "layers": 1, "held_out": 2e-3, "seeds": [0, 1]}


def main() -> int:
    about = {
        "held_out": "the part of the text to validate on",
        "books": "a folder of .txt or .txt.gz",
        "runs": "folder of the runs; complete ones are read",
    }
    return run(parse(__file__, __doc__, FULL, QUICK, about=about), measure, report=report)


def measure(options, found: dict[str, Any], keep) -> None:
    for seed in options.seeds:
        for kind, choices in KINDS.items():
            settings = TextSettings(
                sources=(str(options.books),),
                out=options.runs / f"{kind.replace(', ', '_')}_{seed}",
                seed=seed,
                steps=options.steps,
                eval_every=options.steps,
                save_every=max(10, options.steps // 4),
                context=options.context,
                batch_size=options.batch_size,
                hidden_size=options.hidden_size,
                layers=options.layers,
                heads=4,
                learning_rate=options.learning_rate,
                val_fraction=options.held_out,
                sample_tokens=0,
                resume=True,
                **choices,
            )
            with patch.dict(os.environ, {VARIABLE: "off"} if kind == MKL else {}):
                bits = trained(settings, MEASURE)[-1][MEASURE]
            run_facts = read_settings(settings.out)["run"]
            cell = {"bits_per_byte": bits, "products": run_facts["products"]}
            found.setdefault(kind, {})[str(seed)] = cell
            print(f"seed {seed}, {kind}: {bits:.4f} ({cell['products']})", flush=True)
            keep()


def report(options, facts: dict[str, Any], found: dict[str, Any]) -> str:
    rows = [
        [kind, *(f"{cells[seed]['bits_per_byte']:.4f}" for seed in cells), difference(found, kind)]
        for kind, cells in found.items()
        if len(cells) == len(options.seeds)
    ]
    about = (
        f"Bits per byte of held-out text, after {options.steps:,} steps of {options.batch_size} × {options.context} bytes; "
        f"{options.layers} layers of 4 heads, {options.hidden_size} wide. Differences from `{DEFAULT}` are means over the seeds, "
        "with the standard error of that mean."
    )
    header = ["products", *(f"seed {seed}" for seed in options.seeds), f"less `{DEFAULT}`"]
    return page("What mixed precision costs on a CPU", source(facts, about), markdown(header, rows))


def difference(found: dict[str, Any], kind: str) -> str | None:
    """The mean difference from the default, and its standard error over the seeds."""
    if kind == DEFAULT:
        return None
    changes = [found[kind][seed]["bits_per_byte"] - found[DEFAULT][seed]["bits_per_byte"] for seed in found[kind]]
    return mean_and_error(changes, "+.4f")


if __name__ == "__main__":
    sys.exit(main())
