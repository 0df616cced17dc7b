"""Long sequences to classify: two tasks of Long Range Arena, byte-level reviews and ListOps, in small.

    python experiments/long_classification.py --data FOLDER            # killed, it goes on
    python experiments/long_classification.py --data FOLDER --quick
    python experiments/long_classification.py --parts speed            # steps per second and memory alone

Text: is a review good or bad, read byte by byte. FOLDER holds train.tsv.gz and test.tsv.gz: label, tab, …, tab, text.
ListOps: the value of an expression such as [MAX 4 [MED 1 5 9 ] 2 ], one of ten, generated here by the rules of the benchmark:
operators MAX, MIN, MED, SM (sum modulo 10) of two to ten arguments, each an expression again with probability 0.25, to a
depth of ten (as lra_benchmarks/data/listops.py of google-research/long-range-arena has it); expressions that are too short or
too long are thrown away.

Attention is all that differs between models: softmax, linear (elu + 1), Performer (FAVOR+). Each token sees both sides.

Tay et al. 2021, Long Range Arena (arXiv 2011.04006), tables 1 and 2. Nangia and Bowman 2018 (ListOps).
"""

import random
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.clock import Contender, Effort, measure_in_turns
from scripts.common.loop import train
from scripts.common.options import parse
from scripts.common.plots import label, line, panels
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, mebibytes, page
from tarnn.data.examples import EpochSampler, PaddedRows
from tarnn.data.pairs import read_pairs
from tarnn.models import TarnnConfig, TarnnForSequenceClassification

FULL = {
    "steps": 2000,
    "batch_size": 32,
    "text_steps": 600,
    "text_batch": 16,
    "hidden_size": 64,
    "layers": 2,
    "heads": 4,
    "features": 32,
    "learning_rate": 2e-3,
    "text_length": 512,
    "list_lengths": [10, 60],
    "train_lists": 20000,
    "test_rows": 1000,
    "lengths": [1024, 2048, 3072, 4096],
    "speed_batch": 4,
    "data": Path,
    "runs": Path("runs/long_classification"),
}
QUICK = {
    "steps": 4,
    "batch_size": 2,
    "text_steps": 4,
    "text_batch": 2,
    "hidden_size": 16,
    "layers": 1,
    "heads": 2,
    "features": 8,
    "text_length": 64,
    "list_lengths": [10, 40],
    "train_lists": 16,
    "test_rows": 8,
    "lengths": [64, 128],
    "speed_batch": 1,
}
ATTENTION: dict[str, tuple[dict[str, Any], str]] = {  # name → (keys of the config, how it is drawn)
    "softmax": ({"attention": "softmax"}, "#d55e00"),
    "linear": ({"feature_map": "elu"}, "#e69f00"),
    "Performer": ({"feature_map": "favor"}, "#0072b2"),
}
PAPER = {  # accuracy of ListOps and Text; steps per second and GB at 1K, 2K, 3K, 4K
    "softmax": (36.37, 64.27, (8.1, 4.9, 2.3, 1.4), (0.85, 2.65, 5.51, 9.48)),
    "linear": (16.13, 65.90, (9.1, 9.3, 8.6, 7.8), (0.37, 0.57, 0.80, 1.03)),
    "Performer": (18.01, 65.40, (9.5, 9.4, 8.7, 8.0), (0.37, 0.59, 0.82, 1.06)),
}
OPERATORS = {"[MAX": max, "[MIN": min, "[MED": lambda x: int(statistics.median(x)), "[SM": lambda x: sum(x) % 10}
TOKENS = [*map(str, range(10)), *OPERATORS, "]"]
MAX_DEPTH, MAX_ARGUMENTS, NESTED = 10, 10, 0.25


class Task(NamedTuple):
    """Rows of ids with their labels, the number of ids (the last is padding) and of classes, and how long is trained."""

    train: list[dict[str, Any]]
    test: list[dict[str, Any]]
    num_ids: int
    num_classes: int
    steps: int
    batch_size: int


def main() -> int:
    full = FULL | {"models": list(ATTENTION), "parts": ["text", "listops", "speed"]}
    about = {"data": "the folder of the reviews", "runs": "where the runs are kept"}
    choices = {"models": list(ATTENTION), "parts": full["parts"]}
    options = parse(__file__, __doc__, full, QUICK, choices=choices, about=about)
    return run(options, measure, results={"accuracy": {}, "speed": {}}, report=report, figure=figure)


def measure(options, results: dict[str, Any], keep) -> None:
    if options.data is None and "text" in options.parts:
        raise Unmeasured("--data FOLDER says where the reviews are.")
    for name in options.parts:
        if name == "speed":
            results["speed"] = speed(options)
            continue
        task = {"text": text, "listops": listops}[name](options)
        found = results["accuracy"].setdefault(name, {"guess": guess(task)})
        for model in options.models:
            found[model] = trained(name, task, model, options)
            keep()


def text(options) -> Task:
    """Reviews as bytes, the first `text_length` of each."""

    def read(name: str) -> list[dict[str, Any]]:
        rows = []
        for pair in read_pairs([str(options.data / name)], "label", "text"):
            ids = np.frombuffer(pair.last.encode()[: options.text_length], np.uint8).astype(np.int64)
            rows.append({"input_ids": ids, "labels": int(pair.first)})
        return rows

    test = read("test.tsv.gz")
    random.Random(0).shuffle(test)
    return Task(read("train.tsv.gz"), test[: options.test_rows], 257, 2, options.text_steps, options.text_batch)


def listops(options) -> Task:
    """Expressions whose number of tokens is within `list_lengths`, all different; the same in every run."""
    source, seen, rows = random.Random(0), set(), []
    least, most = options.list_lengths
    while len(rows) < options.train_lists + options.test_rows:
        tokens, value = expression(source, most)
        ids = tuple(map(TOKENS.index, tokens))
        if least <= len(ids) <= most and ids not in seen:
            seen.add(ids)
            rows.append({"input_ids": np.array(ids), "labels": value})
    test, some = rows[: options.test_rows], rows[options.test_rows :]
    return Task(some, test, len(TOKENS) + 1, 10, options.steps, options.batch_size)


def expression(source: random.Random, most: int, depth: int = 1) -> tuple[list[str], int]:
    """(tokens, value) of one expression; of more than `most` tokens it is given up, and is too long."""
    if depth > 1 and (depth >= MAX_DEPTH or source.random() > NESTED):
        value = source.randrange(10)
        return [str(value)], value
    tokens, values = [operator := source.choice(list(OPERATORS))], []
    for _ in range(source.randint(2, MAX_ARGUMENTS)):
        part, value = expression(source, most, depth + 1)
        tokens += part
        values.append(value)
        if len(tokens) > most:
            break
    return [*tokens, "]"], OPERATORS[operator](values)


def guess(task: Task) -> dict[str, float]:
    """How often the most frequent label of the training rows is right."""
    labels = [row["labels"] for row in task.train]
    best = max(set(labels), key=labels.count)
    return {"accuracy": 100 * sum(row["labels"] == best for row in task.test) / len(task.test)}


def build(name: str, num_ids: int, num_classes: int, options) -> TarnnForSequenceClassification:
    torch.manual_seed(0)
    given = dict(ATTENTION[name][0])
    if given.get("feature_map") == "favor":
        given["feature_map_options"] = {"favor": {"num_features": options.features}}
    config = TarnnConfig(
        vocab_size=num_ids,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        causal=False,
        num_attention_heads=options.heads,
        pad_token_id=num_ids - 1,
        num_labels=num_classes,
        **given,
    )
    return TarnnForSequenceClassification(config)


def trained(name: str, task: Task, model_name: str, options) -> dict[str, Any]:
    """One run, from where it was stopped."""
    rows, test = (PaddedRows(x, {"input_ids": task.num_ids - 1}) for x in (task.train, task.test))
    order = list(EpochSampler(len(rows), task.steps * task.batch_size, seed=0))

    def loss(model, step: int) -> Tensor:
        batch = rows.__getitems__(order[step * task.batch_size : (step + 1) * task.batch_size])
        return model(**batch).loss

    model = build(model_name, task.num_ids, task.num_classes, options)
    folder = options.runs / f"{name}_{model_name}"
    done = train(
        folder,
        model,
        loss,
        task.steps,
        every=max(1, task.steps // 4),
        learning_rate=options.learning_rate,
        measure=lambda model: {"accuracy": accuracy(model, test)},
    )
    return {
        "accuracy": done.curve[-1]["accuracy"],
        "seconds_a_step": done.seconds / done.step,
        "parameters": sum(x.numel() for x in model.parameters()),
        "curve": done.curve,
    }


@torch.no_grad()
def accuracy(model, rows: PaddedRows, batch_size: int = 16) -> float:
    """In per cent; short rows are read together."""
    number = len(rows)
    index = sorted(range(number), key=lambda i: len(rows.rows[i]["input_ids"]))
    right = 0
    for start in range(0, number, batch_size):
        batch = rows.__getitems__(index[start : start + batch_size])
        right += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
    return 100 * right / number


def speed(options) -> dict[str, Any]:
    """Training steps on random bytes, by model and length."""
    contenders = {}
    for length in options.lengths:
        ids = torch.randint(256, (options.speed_batch, length), generator=torch.Generator().manual_seed(0))
        labels = torch.arange(options.speed_batch) % 2
        for name in options.models:
            model = build(name, 257, 2, options).train()

            def step(model=model, ids=ids, labels=labels) -> None:
                model(ids, labels=labels).loss.backward()
                model.zero_grad()

            contenders[f"{name} {length}"] = Contender(step, patience=3.0)
    effort = Effort(seconds=0.1, rounds=(1, 1)) if options.quick else Effort(seconds=1.5, rounds=(3, 5))
    return dict(measure_in_turns(contenders, effort))


def report(options, facts, results: dict[str, Any]) -> str:
    rows = []
    for name in ("guess", *options.models):
        ours = [results["accuracy"].get(task, {}).get(name) for task in ("listops", "text")]
        paper = PAPER.get(name, (None, None))[:2]
        rows.append([name, *(x and f"{x['accuracy']:.1f}" for x in ours), *paper])
    tables = [markdown(["accuracy, %", "ListOps", "Text", "paper: ListOps", "paper: Text"], rows)]
    timings = {tuple(key.rsplit(" ", 1)): x for key, x in results["speed"].items()}
    for title, show, place in (
        ("steps per second", lambda x: f"{1000 / x.ms:.2f}", 2),
        ("MiB of a step", lambda x: mebibytes(x.peak_bytes, 0), 3),
    ):
        lines = [
            [
                name,
                *(x and show(x) for n in options.lengths for x in [timings.get((name, str(n)))]),
                *(PAPER[name][place]),
            ]
            for name in options.models
        ]
        names = [f"paper{' GB' if place == 3 else ''}: {n}K" for n in range(1, 5)]
        tables.append(markdown([title, *map(str, options.lengths), *names], lines))
    low, high = options.list_lengths
    return page(
        "Long sequences to classify, by attention",
        f"{options.layers} layers, hidden {options.hidden_size}, {options.heads} heads; one run each, {options.test_rows:,} test "
        f"rows. Text: the first {options.text_length:,} bytes of a review, {options.text_steps:,} steps of {options.text_batch} "
        f"rows; ListOps: {low} to {high} tokens, {options.steps:,} steps of {options.batch_size}. The paper: 4 and 6 layers, "
        "hidden 256 and 512, up to 4,000 bytes, 500 to 2,000 tokens, thousands of steps of 32; its speeds are of a 4 × 4 TPU v3 "
        f"and batches of 32, ours of one processor and batches of {options.speed_batch}.",
        *tables,
    )


def figure(options, facts, results: dict[str, Any]):
    made, every = panels(max(1, len(results["accuracy"])), height=4.2)
    for axes, (name, found) in zip(every, results["accuracy"].items()):
        for model, one in found.items():
            if "curve" in one:
                line(axes, [(x["step"], x["accuracy"]) for x in one["curve"]], ATTENTION[model][1], model)
        label(axes, "steps", "accuracy, %", scales="linear linear", title=name)
    return made


if __name__ == "__main__":
    raise SystemExit(main())
