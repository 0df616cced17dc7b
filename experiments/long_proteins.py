"""Concatenated proteins, 8,192 residues in a row, by attention and at equal time: figure 7 of the Performer paper, in small.

    python experiments/long_proteins.py --data FOLDER        # killed, it goes on; 45 minutes a run, 12 runs
    python experiments/long_proteins.py --data FOLDER --quick

Each model has the same processor time. In the paper, softmax of this length fits into memory only as a small model, which
stays at 19 % of next residues right, where a Performer reaches 24. Here all models are of one size, so softmax pays with
updates: each costs it many times as much. The runs of one seed read the same rows, in turns.

FOLDER as of experiments/proteins.py. Choromanski et al. 2021 (arXiv 2009.14794), section 4.4.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

import proteins
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))
from measures.protein_models import ATTENTION, SEED_STRIDE, Data, build, end_to_end, folder_of, logits_of, mean_loss

from scripts.common.loop import in_turns, train_in_parts
from scripts.common.options import parse
from scripts.common.plots import label, line, panels
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, mean_and_error, page

FULL = {
    "minutes": 45.0,
    "looks": 9,
    "seeds": [0, 1, 2],
    "context": 8192,
    "batch_size": 1,
    "hidden_size": 64,
    "layers": 3,
    "heads": 8,
    "features": 32,
    "learning_rate": 3e-3,
    "test_rows": 8,
    "test_sequences": 200,
    "data": Path,
    "runs": Path("runs/long_proteins"),
}
QUICK = {
    "minutes": 0.001,
    "looks": 1,
    "seeds": [0],
    "context": 64,
    "hidden_size": 16,
    "layers": 1,
    "heads": 2,
    "test_rows": 2,
    "test_sequences": 4,
}
PAPER = {"softmax": 19, "Performer-ReLU": 24}


def main() -> int:
    lists = {"only": list(ATTENTION)}
    about = {"minutes": "of processor time, for each run", "test_rows": "of so many residues as a row in training"}
    options = parse(__file__, __doc__, FULL | lists, QUICK, choices=lists, about=about)
    return run(options, measure, report=report, figure=figure)


def measure(options, results: dict[str, Any], keep) -> None:
    if options.data is None:
        raise Unmeasured("--data FOLDER says where the sequences are.")
    data = proteins.split(options)
    ids = end_to_end(data.test)
    count = min(options.test_rows, len(ids) // options.context)
    rows = torch.from_numpy(ids[: count * options.context].reshape(count, options.context))
    runs = {(name, seed): training(name, seed, data, rows, options) for seed in options.seeds for name in options.only}
    for (name, seed), progress in in_turns(runs):
        if progress.curve:
            facts = {"steps": progress.step, "seconds": progress.seconds, "curve": progress.curve}
            results.setdefault(name, {})[str(seed)] = facts
            keep()


def training(name: str, seed: int, data: Data, rows: Tensor, options):
    """One run, in parts."""
    seconds = 60 * options.minutes
    return train_in_parts(
        folder_of("unidirectional", name, options, seed),
        build("unidirectional", name, options, seed),
        lambda model, step: mean_loss("unidirectional", model, data, options, step + SEED_STRIDE * seed),
        seconds,
        unit="seconds",
        every=seconds / options.looks,
        learning_rate=options.learning_rate,
        measure=lambda model: evaluate(model, rows),
    )


@torch.no_grad()
def evaluate(model, rows: Tensor) -> dict[str, float]:
    """Of rows that were not trained on, the residues behind the first: how many are guessed right, in per cent, and nats."""
    nats, right, number = 0.0, 0, 0
    for row in rows:
        logits, targets = logits_of(model, row[None, :-1])[0], row[1:]
        nats += float(cross_entropy(logits, targets, reduction="sum"))
        right += int((logits.argmax(-1) == targets).sum())
        number += len(targets)
    return {"accuracy": 100 * right / number, "nats": nats / number}


def report(options, facts, results: dict[str, Any]) -> str:
    table = []
    for name, seeds in results.items():
        ends = [one["curve"][-1] for one in seeds.values()]
        row = [
            mean_and_error([end[what] for end in ends], form) for what, form in (("accuracy", ".1f"), ("nats", ".3f"))
        ]
        steps = statistics.mean(one["steps"] for one in seeds.values())
        table.append([name, len(seeds), f"{steps:,.0f}", *row, PAPER.get(name)])
    return page(
        "Concatenated proteins at equal time, by attention",
        f"{options.minutes:g} minutes of processor time a run; rows of {options.context:,} residues, {options.layers} layers, "
        f"hidden {options.hidden_size}, {options.heads} heads. Mean over seeds ± standard error; test sequences end to end.",
        markdown(["attention", "seeds", "updates", "% right", "nats a residue", "paper, % right"], table),
    )


def figure(options, facts, results: dict[str, Any]):
    made, (axes,) = panels(1, width=6.4, height=4.2)
    for name, seeds in results.items():
        for seed, one in seeds.items():
            share = one["seconds"] / 60 / len(one["curve"])
            points = [((i + 1) * share, x["accuracy"]) for i, x in enumerate(one["curve"])]
            line(axes, points, ATTENTION[name][1], name if seed == next(iter(seeds)) else None)
    label(axes, "minutes", "% of next residues right", scales="linear linear")
    return made


if __name__ == "__main__":
    raise SystemExit(main())
