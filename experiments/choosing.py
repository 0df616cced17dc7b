"""Which attention for a small model? Bits per byte at equal processor time, recall and copying, by kind of attention.

    python experiments/choosing.py --threads 1                      # 15 hours of one core; killed, it goes on
    python experiments/choosing.py --threads 1 --tasks recall       # a part; two processes may train different ones
    python experiments/choosing.py --quick

Models that differ in their attention alone train for the same processor time: on novels, two widths (--minutes); on recalling
the values of 8 to 64 keys and on copying 63 symbols, 128 tokens in all (--recall-minutes). The first seed tries every learning
rate of --rates; the other seeds take the one that was best for that kind and task. Models of a task train in turns, a piece
each, so that all have the same company. Nothing is trained twice: what lies in --runs is read.

FOLDER of --books holds books as .txt or .txt.gz; the one named by --unseen is kept for validation.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from measures.choosing_page import KINDS, best_rate, figure, report
from measures.choosing_tasks import Task, books, copied, recall

from scripts.common.loop import Progress, in_turns, train_in_parts
from scripts.common.options import as_facts, parse
from scripts.common.results import Unmeasured, run

TASKS = ["books", "recall", "copying"]
FULL = {
    "minutes": 12.0,
    "recall_minutes": 6.0,
    "widths": [128, 256],
    "recall_width": 64,
    "seeds": [0, 1, 2],
    "rates": [1e-3, 3e-3],
    "kinds": list(KINDS),
    "tasks": TASKS,
    "layers": 4,
    "heads": 4,
    "context": 512,
    "batch_size": 8,
    "validation_bytes": 65536,
    "pairs": [8, 16, 32, 64],
    "copy_length": 128,
    "recall_batch": 16,
    "test_rows": 64,
    "looks": 6,
    "books": Path(__file__).parents[2] / "shared" / "data" / "gutenberg_books",
    "unseen": "pride_and_prejudice",
    "runs": Path("runs/choosing"),
}
QUICK = {
    "minutes": 0.002,
    "recall_minutes": 0.002,
    "widths": [16, 32],
    "recall_width": 16,
    "seeds": [0, 1],
    "heads": 2,
    "context": 32,
    "batch_size": 2,
    "validation_bytes": 256,
    "pairs": [2, 4],
    "copy_length": 16,
    "recall_batch": 2,
    "test_rows": 4,
    "looks": 2,
    "runs": Path("runs/choosing_quick"),
}
ABOUT = {
    "minutes": "of processor time, for each run on novels",
    "recall_minutes": "of processor time, for each run of recall and copying",
    "rates": "learning rates that the first seed tries",
    "pairs": "numbers of pairs that are tested; training has one to the most",
}
WHICH = ("widths", "seeds", "rates", "kinds", "tasks", "quick", "runs")  # what is trained, not how


class Cell(NamedTuple):
    """What all kinds are compared in."""

    name: str
    task: Task
    width: int
    minutes: float


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, choices={"kinds": list(KINDS), "tasks": TASKS}, about=ABOUT)
    return run(options, measure, report=report, figure=figure)


def measure(options, results: dict[str, Any], keep) -> None:
    check_that_runs_are_alike(options)
    first, *others = options.seeds
    for cell in cells(options):
        kinds = results.setdefault(cell.name, {})
        tried = [(kind, rate, first) for kind in options.kinds for rate in options.rates]
        train_all(cell, tried, options, kinds, keep)
        chosen = {kind: best_rate(kinds[kind], cell.task.more_is_better) for kind in options.kinds}
        train_all(cell, [(kind, chosen[kind], seed) for seed in others for kind in options.kinds], options, kinds, keep)


def check_that_runs_are_alike(options) -> None:
    """Raise Unmeasured where the folder of runs has some that were made in another way."""
    path = options.runs / "settings.json"
    settings = {name: x for name, x in as_facts(options).items() if name not in WHICH}
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    elif (earlier := json.loads(path.read_text())) != settings:
        changed = ", ".join(name for name in settings if earlier.get(name) != settings[name])
        raise Unmeasured(f"{options.runs} has runs with another {changed}: delete it or take another --runs")


def cells(options) -> Iterator[Cell]:
    if "books" in options.tasks:
        task = books(options)
        for width in options.widths:
            yield Cell(f"books, {width} wide", task, width, options.minutes)
    for name, make in {"recall": recall, "copying": copied}.items():
        if name in options.tasks:
            yield Cell(name, make(options), options.recall_width, options.recall_minutes)


def train_all(cell: Cell, wanted: list[tuple[str, float, int]], options, kinds: dict[str, Any], keep) -> None:
    """Train runs, each a kind, a rate and a seed, in turns; note what they have come to."""
    for key, progress in in_turns({key: training(cell, *key, options) for key in wanted}):
        kind, rate, seed = key
        if progress.curve:
            run_facts = {"seconds": round(progress.seconds, 1), "steps": progress.step, "curve": progress.curve}
            found = kinds.setdefault(kind, {"parameters": parameters(cell, kind, options), "runs": {}})
            found["runs"].setdefault(f"{rate:g}", {})[str(seed)] = run_facts
            keep()


def training(cell: Cell, kind: str, rate: float, seed: int, options) -> Iterator[Progress]:
    torch.manual_seed(seed)
    seconds = 60 * cell.minutes
    yield from train_in_parts(
        options.runs / f"{cell.name}_{kind}_{rate:g}_{seed}".replace(", ", "_").replace(" ", "_"),
        cell.task.build(keys_of(cell, kind, options)),
        lambda model, step: cell.task.loss(model, seed, step),
        seconds,
        unit="seconds",
        every=seconds / options.looks,
        learning_rate=rate,
        measure=cell.task.measure,
    )


def keys_of(cell: Cell, kind: str, options) -> dict[str, Any]:
    sizes = {"hidden_size": cell.width, "num_hidden_layers": options.layers, "num_attention_heads": options.heads}
    return {**sizes, **KINDS[kind].keys}


def parameters(cell: Cell, kind: str, options) -> int:
    with torch.device("meta"):
        return cell.task.build(keys_of(cell, kind, options)).num_parameters()


if __name__ == "__main__":
    raise SystemExit(main())
