"""Linear attention against its baselines: what each costs, and what each learns in the same time. One table, one picture.

    python experiments/baseline_table.py --threads 1                     # all of it, about a day; killed, it goes on
    python experiments/baseline_table.py --threads 1 --parts cost        # milliseconds and MiB alone, on a quiet machine
    python experiments/baseline_table.py --threads 1 --parts short --tasks copying --rows softmax linear
    python experiments/baseline_table.py --quick --data FOLDER --mnist FOLDER

Cost: forward and backward of one layer with its projections, one sequence of 1k to 64k tokens. A row ends where the next length
would take more time or memory than --patience and --room allow.

Quality: small models that differ in their attention alone learn four tasks: copying (128 tokens), ListOps (10 to 60), reviews
(1,024 bytes) and pixels (784). All train for the same processor time, --minutes (part "short", one seed). The rows that matter
most also train for --minutes-most, from three seeds (part "long"). Models of a task train in turns, a piece each, so that all
have the same company. An attention that cannot look ahead reads the sequences of the encoder's tasks from left to right; one
that always sees both sides has no part in the decoder's tasks.

What was measured is kept in --runs and read from there: options choose what is measured in addition.

Tay et al. 2021, Long Range Arena (arXiv 2011.04006), figure 3: accuracy, speed and memory in one picture.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from measures.attentions import MOST, ROWS
from measures.baseline_page import figure, report
from measures.layer_costs import measure_costs
from measures.short_tasks import TASKS, Task

from scripts.common.clock import Timing
from scripts.common.loop import Progress, in_turns, train_in_parts
from scripts.common.options import parse
from scripts.common.results import run

SHARED = Path(__file__).parents[2] / "shared" / "data"
PARTS = ["cost", "short", "long"]
FULL = {
    "minutes": 6.0,
    "minutes_most": 15.0,
    "seeds": [0, 1, 2],
    "rows": list(ROWS),
    "tasks": list(TASKS),
    "parts": PARTS,
    "lengths": [2**10, 2**12, 2**14, 2**16],
    "cost_hidden": 256,
    "cost_heads": 8,
    "patience": 240.0,
    "room": 8.0,
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "learning_rate": 2e-3,
    "batch_size": 32,
    "text_batch": 16,
    "image_batch": 8,
    "copy_length": 128,
    "list_lengths": [10, 60],
    "train_lists": 20000,
    "text_length": 1024,
    "test_rows": 1000,
    "looks": 6,
    "data": SHARED / "imdb",
    "mnist": SHARED / "mnist",
    "runs": Path("runs/baseline_table"),
}
QUICK = {
    "minutes": 0.0005,
    "minutes_most": 0.001,
    "seeds": [0, 1],
    "lengths": [64, 128],
    "cost_hidden": 16,
    "cost_heads": 2,
    "hidden": 16,
    "layers": 1,
    "heads": 2,
    "batch_size": 2,
    "text_batch": 2,
    "image_batch": 1,
    "copy_length": 16,
    "list_lengths": [10, 40],
    "train_lists": 16,
    "text_length": 64,
    "test_rows": 8,
    "looks": 1,
}
ABOUT = {
    "minutes": "of processor time, for all rows",
    "minutes_most": f"for {', '.join(MOST)}",
    "seeds": "of the long part; the short one has the first",
    "patience": "seconds that forward and backward may take",
    "room": "GiB that they may hold",
    "data": "the folder of the reviews, train.tsv.gz and test.tsv.gz",
    "runs": "where what was measured is kept",
}


def main() -> int:
    choices = {"rows": list(ROWS), "tasks": list(TASKS), "parts": PARTS}
    options = parse(__file__, __doc__, FULL, QUICK, choices=choices, about=ABOUT)
    return run(options, measure, results={"cost": {}, "quality": {}}, report=report, figure=figure)


def measure(options, results: dict[str, Any], keep) -> None:
    """Costs by side, row and length; runs by task, part, row and seed: those that are kept, and those that are asked for.

    Each task and part has a file of its own, so that several processes can measure different ones.
    """
    costs, quality = results["cost"], results["quality"]
    for side, rows in read(options.runs / "cost.json").items():
        costs[side] = {row: {n: Timing(**x) for n, x in found.items()} for row, found in rows.items()}
    for name, part in product(TASKS, PARTS[1:]):
        if found := read(options.runs / f"{name}_{part}.json"):
            quality.setdefault(name, {}).update(found)
    if "cost" in options.parts:
        for side in ("back", "both"):
            measure_costs(
                side, options, costs.setdefault(side, {}), lambda: save(options.runs / "cost.json", costs, keep)
            )
    for part, name in product(PARTS[1:], options.tasks):
        if part in options.parts:
            train_all(name, part, options, quality.setdefault(name, {}), keep)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def save(path: Path, found: dict[str, Any], keep) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, default=asdict))
    partial.replace(path)
    keep()


def train_all(name: str, part: str, options, found: dict[str, Any], keep) -> None:
    """All rows of a task that can do it, in turns."""
    task, every_row = TASKS[name](options), part == "short"
    minutes, seeds = (options.minutes, options.seeds[:1]) if every_row else (options.minutes_most, options.seeds)
    rows = [row for row in options.rows if every_row or row in MOST]
    rows = [row for row in rows if not (task.causal and ROWS[row].sees == "both")]
    folder = options.runs / f"{name}_{part}"
    runs = {(row, seed): training(folder, task, row, seed, minutes, options) for row in rows for seed in seeds}
    facts = {key: getattr(task, key) for key in ("guess", "margin", "unit", "more_is_better", "causal")}
    found.update(facts)
    for (row, seed), progress in in_turns(runs):
        if progress.curve:
            curve = [{"step": x["step"], "score": x["score"]} for x in progress.curve]
            run_facts = {"seconds": round(progress.seconds, 1), "steps": progress.step, "curve": curve}
            found.setdefault(part, {}).setdefault(row, {})[str(seed)] = run_facts
            save(folder.with_suffix(".json"), {**facts, part: found[part]}, keep)


def training(folder: Path, task: Task, row: str, seed: int, minutes: float, options) -> Iterator[Progress]:
    torch.manual_seed(seed)
    sizes = {"hidden_size": options.hidden, "num_hidden_layers": options.layers, "num_attention_heads": options.heads}
    causal = task.causal or ROWS[row].sees == "back"
    yield from train_in_parts(
        folder / f"{re.sub(r'[^a-zA-Z0-9]+', '_', row)}_{seed}",
        task.build({**sizes, "causal": causal, **ROWS[row].keys(task.length)}),
        lambda model, step: task.loss(model, seed, step),
        60 * minutes,
        unit="seconds",
        every=60 * minutes / options.looks,
        learning_rate=options.learning_rate,
        measure=lambda model: {"score": task.score(model)},
    )


if __name__ == "__main__":
    raise SystemExit(main())
