"""Good or bad? Film reviews by their bytes: trained on masked bytes first, then on labels.

    python experiments/reviews.py --data FOLDER           # killed, it goes on; an hour a model on one core
    python experiments/reviews.py --data FOLDER --quick

Trained on labels alone, such models end at 62 % (results/long_classification.md), where a bag of words has 80. Here each model
first reads the training reviews with 15 % of their bytes masked (in stretches of four: single bytes are too easy), then the
labels, from the same weights; beside it the same model without the first part, for the time of both. All runs have the same
processor time.

FOLDER holds train.tsv.gz and test.tsv.gz: label, tab, …, tab, text. Tay et al. 2021, Long Range Arena (arXiv 2011.04006).
"""

import math
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.loop import in_turns, train_in_parts
from scripts.common.options import parse
from scripts.common.plots import BLUE, GREEN, RED, label, line, panels
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, mean_and_error, page
from tarnn.data.pairs import read_pairs
from tarnn.models import TarnnConfig, TarnnForMaskedLM, TarnnForSequenceClassification

FULL = {
    "masked_minutes": 45.0,
    "label_minutes": 15.0,
    "looks": 5,
    "seeds": [0],
    "length": 1024,
    "masked_length": 512,
    "batch_tokens": 8192,
    "hidden_size": 128,
    "layers": 4,
    "heads": 4,
    "learning_rate": 2e-3,
    "test_rows": 5000,
    "data": Path,
    "runs": Path("runs/reviews"),
}
QUICK = {
    "masked_minutes": 0.001,
    "label_minutes": 0.001,
    "looks": 1,
    "length": 64,
    "masked_length": 32,
    "batch_tokens": 128,
    "hidden_size": 16,
    "layers": 1,
    "heads": 2,
    "test_rows": 8,
}
LINEAR = {"decay": "token", "conv_kernel": 15}  # what speech has: near and far, both relative
ATTENTION: dict[str, tuple[dict[str, Any], str]] = {  # name → (keys of the config, how it is drawn)
    "linear": ({}, BLUE),
    "linear, decay and convolution": (LINEAR, GREEN),
    "softmax, rotary": ({"attention": "softmax", "position": "rotary"}, RED),
}
MASK, PADDING, IGNORED, STRETCH, SHARE = 256, 257, -100, 4, 0.15
LABELS_ALONE = "labels alone"


def main() -> int:
    lists = {"only": list(ATTENTION)}
    about = {
        "masked_minutes": "of processor time on masked bytes, for each run",
        "label_minutes": "of processor time on labels",
        "masked_length": "bytes in a row of masked training",
    }
    options = parse(__file__, __doc__, FULL | lists, QUICK, choices=lists, about=about)
    return run(options, measure, results={"words": 0.0, "models": {}}, report=report, figure=figure)


def measure(options, results: dict[str, Any], keep) -> None:
    if options.data is None:
        raise Unmeasured("--data FOLDER says where the reviews are.")
    train, test = (read(options.data / f"{part}.tsv.gz") for part in ("train", "test"))
    np.random.default_rng(0).shuffle(test)
    test = test[: options.test_rows]
    results["words"] = bag_of_words(train, test)
    row = np.frombuffer(b"\n".join(text for text, _ in train), np.uint8)
    runs = {}
    for seed in options.seeds:
        for name in options.only:
            runs[name, seed] = both_parts(name, seed, row, train, test, options)
            runs[f"{name}, {LABELS_ALONE}", seed] = labels_alone(name, seed, train, test, options)
    for (name, seed), progress in in_turns(runs):
        if progress.curve and "accuracy" in progress.curve[-1]:
            facts = {"accuracy": progress.curve[-1]["accuracy"], "curve": progress.curve, "steps": progress.step}
            results["models"].setdefault(name, {})[str(seed)] = facts
            keep()


def read(path: Path) -> list[tuple[bytes, int]]:
    return [(pair.last.encode(), int(pair.first)) for pair in read_pairs([str(path)], "label", "text")]


def bag_of_words(train: list[tuple[bytes, int]], test: list[tuple[bytes, int]]) -> float:
    """Per cent right of naive Bayes on words, each counted once a review."""
    counts = {label: Counter(word for text, x in train if x == label for word in words(text)) for label in (0, 1)}
    number = {label: sum(x == label for _, x in train) for label in (0, 1)}

    def score(text: bytes, label: int) -> float:
        return sum(math.log((counts[label][word] + 1) / (number[label] + 2)) for word in words(text))

    return 100 * statistics.mean((score(text, 1) > score(text, 0)) == bool(x) for text, x in test)


def words(text: bytes) -> set[bytes]:
    return set("".join(c if c.isalpha() else " " for c in text.decode().lower()).encode().split())


def config(name: str, options) -> TarnnConfig:
    return TarnnConfig(
        vocab_size=PADDING + 1,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        causal=False,
        pad_token_id=PADDING,
        num_labels=2,
        **{"decay": "none"} | ATTENTION[name][0],
    )


def both_parts(name: str, seed: int, row: np.ndarray, train, test, options):
    """Masked bytes, then labels from the same weights."""
    torch.manual_seed(seed)
    masked, length = TarnnForMaskedLM(config(name, options)), options.masked_length

    def loss(model, step: int) -> Tensor:
        draw = np.random.default_rng([seed, step])
        starts = draw.integers(len(row) - length, size=options.batch_tokens // length)
        ids = torch.from_numpy(row[starts[:, None] + np.arange(length)].astype(np.int64))
        hidden = torch.from_numpy(draw.random((len(ids), length // STRETCH)) < SHARE).repeat_interleave(STRETCH, 1)
        inputs, targets = ids.masked_fill(hidden, MASK), ids.masked_fill(~hidden, IGNORED)
        return cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    folder = folder_of(name, seed, options)
    yield from parts(folder / "masked", masked, loss, options.masked_minutes, lambda model: {}, options)
    model = TarnnForSequenceClassification(config(name, options))
    model.model.load_state_dict(masked.model.state_dict())
    yield from on_labels(folder / "labels", model, seed, train, test, options.label_minutes, options)


def labels_alone(name: str, seed: int, train, test, options):
    """The same time on labels."""
    torch.manual_seed(seed)
    minutes = options.masked_minutes + options.label_minutes
    model = TarnnForSequenceClassification(config(name, options))
    return on_labels(folder_of(name, seed, options) / "alone", model, seed, train, test, minutes, options)


def on_labels(folder: Path, model, seed: int, train, test, minutes: float, options):
    count = options.batch_tokens // options.length

    def loss(model, step: int) -> Tensor:
        chosen = np.random.default_rng([seed, step, 1]).integers(len(train), size=count)
        ids, mask = padded([train[i][0] for i in chosen], options.length)
        return model(ids, attention_mask=mask, labels=torch.tensor([train[i][1] for i in chosen])).loss

    return parts(folder, model, loss, minutes, lambda model: {"accuracy": accuracy(model, test, options)}, options)


def parts(folder: Path, model, loss, minutes: float, measured, options):
    every, rate = 60 * minutes / options.looks, options.learning_rate
    return train_in_parts(
        folder, model, loss, 60 * minutes, unit="seconds", every=every, learning_rate=rate, measure=measured
    )


def folder_of(name: str, seed: int, options) -> Path:
    return options.runs / f"{name.replace(' ', '_').replace(',', '')}_{seed}"


def padded(texts: list[bytes], length: int) -> tuple[Tensor, Tensor]:
    """Ids (b, t) of the first bytes of each text, and where they are."""
    rows = [torch.frombuffer(bytearray(text[:length]), dtype=torch.uint8).long() for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
    return ids, (ids != PADDING).long()


@torch.no_grad()
def accuracy(model, test: list[tuple[bytes, int]], options) -> float:
    """In per cent."""
    right, ordered = 0, sorted(test, key=lambda x: len(x[0]))
    for start in range(0, len(ordered), 16):
        ids, mask = padded([text for text, _ in ordered[start : start + 16]], options.length)
        found = model(ids, attention_mask=mask).logits.argmax(-1).tolist()
        right += sum(x == label for x, (_, label) in zip(found, ordered[start : start + 16]))
    return 100 * right / len(ordered)


def report(options, facts, results: dict[str, Any]) -> str:
    rows = [["bag of words (naive Bayes)", None, f"{results['words']:.1f}"]]
    for name, seeds in results["models"].items():
        rows.append([name, len(seeds), mean_and_error([one["accuracy"] for one in seeds.values()], ".1f")])
    return page(
        "Film reviews by their bytes",
        f"The first {options.length:,} bytes; {options.layers} layers, hidden {options.hidden_size}; {options.masked_minutes:g} "
        f"minutes of processor time on masked bytes, then {options.label_minutes:g} on labels, or all of it on labels. "
        f"{options.test_rows:,} test reviews; one standard error of a share of 80 % is .6 points with 5,000.",
        markdown(["", "seeds", "% right"], rows),
    )


def figure(options, facts, results: dict[str, Any]):
    made, (axes,) = panels(1, width=6.4, height=4.2)
    for name, seeds in results["models"].items():
        alone = name.endswith(LABELS_ALONE)
        style = ATTENTION[name.removesuffix(f", {LABELS_ALONE}")][1]
        minutes, before = (options.label_minutes, options.masked_minutes) if not alone else (0.0, 0.0)
        minutes = minutes or options.masked_minutes + options.label_minutes
        for seed, one in seeds.items():
            curve = one["curve"]
            points = [(before + minutes * (i + 1) / len(curve), x["accuracy"]) for i, x in enumerate(curve)]
            line(axes, points, f"{style} --" if alone else style, name if seed == next(iter(seeds)) else None)
    label(axes, "minutes", "% right", scales="linear linear")
    return made


if __name__ == "__main__":
    raise SystemExit(main())
