"""Encoder–decoders with linear attention and with softmax: three small tasks, and the time per token against the source's length.

    python experiments/seq2seq.py --data FOLDER           # killed, it goes on
    python experiments/seq2seq.py --data FOLDER --quick

phones: from the letters of a word to its phones, with FOLDER/an4.dic; some words are held out. reversed, sorted: strings of
letters, backwards and in alphabetical order, new ones at each step. Attention is all that differs: `linear` (elu + 1) or
softmax, in encoder, decoder and between them; or linear with softmax between them. Measured: whole targets that are right, and
right tokens, made greedily from the state alone. Then: milliseconds for one more token, and bytes of state, after
sources of many lengths.
"""

import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from measures.pronunciations import read_pronunciations

from scripts.common.clock import Contender, Effort, measure_in_turns
from scripts.common.loop import train
from scripts.common.options import parse
from scripts.common.plots import BLUE, GREEN, RED, label, line, panels
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, milliseconds, page
from tarnn.models import TarnnForConditionalGeneration, TarnnSeq2SeqConfig

FULL = {
    "steps": 1000,
    "every": 250,
    "batch_size": 32,
    "hidden_size": 64,
    "layers": 2,
    "heads": 4,
    "longest": 12,
    "held_out": 100,
    "learning_rate": 3e-3,
    "sources": [64, 1024, 16384],
    "data": Path,
    "runs": Path("runs/seq2seq"),
}
QUICK = {
    "steps": 4,
    "every": 2,
    "batch_size": 4,
    "hidden_size": 16,
    "layers": 1,
    "heads": 2,
    "longest": 5,
    "held_out": 4,
    "sources": [8, 16],
}
METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "linear": ({}, BLUE),
    "linear, softmax across": ({"cross_attention": "softmax"}, GREEN),
    "softmax": ({"attention": "softmax"}, RED),
}
TASKS = ["phones", "reversed", "sorted"]
LETTERS = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"]
PAD, END = 0, 1
Pair = tuple[list[str], list[str]]


class Data(NamedTuple):
    """Pairs by the step that they are for, those held out, and all symbols."""

    batch: Any
    test: list[Pair]
    symbols: list[str]


def main() -> int:
    full = FULL | {"tasks": TASKS, "methods": list(METHODS)}
    about = {"data": "the folder of an4.dic", "runs": "where the runs are kept"}
    options = parse(__file__, __doc__, full, QUICK, choices={"tasks": TASKS, "methods": list(METHODS)}, about=about)
    return run(options, measure, results={"tasks": {}, "speed": {}, "bytes": {}}, report=report, figure=figure)


def measure(options, results: dict[str, Any], keep) -> None:
    for name in options.tasks:
        data = pronunciations(options) if name == "phones" else strings(name, options)
        for method in options.methods:
            results["tasks"].setdefault(name, {})[method] = trained(name, method, data, options)
            keep()
    speed(options, results)


def pronunciations(options) -> Data:
    if options.data is None:
        raise Unmeasured("--data FOLDER says where an4.dic is.")
    words = read_pronunciations(options.data / "an4.dic")
    pairs = [(list(word), [f"/{x}/" for x in phones]) for word, phones in words.items() if set(word) <= set(LETTERS)]
    random.Random(0).shuffle(pairs)
    count = min(options.held_out, len(pairs) // 5)
    rest, phones = pairs[count:], sorted({phone for _, some in pairs for phone in some})
    return Data(
        lambda step: random.Random(step).choices(rest, k=options.batch_size), pairs[:count], [*LETTERS, *phones]
    )


def strings(name: str, options) -> Data:
    change = {"reversed": lambda x: x[::-1], "sorted": sorted}[name]

    def pairs(seed: int, count: int) -> list[Pair]:
        source = random.Random(seed)
        some = [source.choices(LETTERS[:-1], k=source.randint(2, options.longest)) for _ in range(count)]
        return [(x, change(x)) for x in some]

    return Data(lambda step: pairs(step, options.batch_size), pairs(-1, options.held_out), LETTERS)


def build(method: str, num_ids: int, options) -> TarnnForConditionalGeneration:
    torch.manual_seed(0)
    config = TarnnSeq2SeqConfig(
        vocab_size=num_ids,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        eos_token_id=END,
        num_attention_heads=options.heads,
        **METHODS[method][0],
    )
    return TarnnForConditionalGeneration(config)


def padded(rows: list[list[str]], symbols: list[str], end: list[int], fill: int) -> Tensor:
    ids = [[*(symbols.index(x) + 2 for x in row), *end] for row in rows]
    longest = max(map(len, ids))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in ids])


def sources_of(pairs: list[Pair], symbols: list[str]) -> tuple[Tensor, Tensor]:
    ids = padded([a for a, _ in pairs], symbols, [END], PAD)
    return ids, (ids != PAD).long()


def trained(name: str, method: str, data: Data, options) -> dict[str, Any]:
    """One run, from where it was stopped."""

    def loss(model, step: int) -> Tensor:
        pairs = data.batch(step)
        labels = padded([b for _, b in pairs], data.symbols, [END], -100)
        return model(*sources_of(pairs, data.symbols), labels=labels).loss

    model = build(method, len(data.symbols) + 2, options)
    folder = options.runs / f"{name}_{method.replace(', ', '_').replace(' ', '_')}"
    done = train(
        folder,
        model,
        loss,
        options.steps,
        every=options.every,
        learning_rate=options.learning_rate,
        measure=lambda model: right(model, data),
    )
    return {"seconds_a_step": done.seconds / done.step, "curve": done.curve, **done.curve[-1]}


@torch.no_grad()
def right(model: TarnnForConditionalGeneration, data: Data) -> dict[str, float]:
    """Per cent of whole targets, and of tokens in their places, that are made from the sources held out."""
    wanted = padded([b for _, b in data.test], data.symbols, [END], PAD)
    state, token = (
        model.read(*sources_of(data.test, data.symbols), capacity=wanted.shape[1]),
        model.start(len(wanted)),
    )
    made = []
    for _ in range(wanted.shape[1]):
        logits, state = model.step(token, state, inplace=True)
        made.append(token := logits.argmax(-1))
    real, same = wanted != PAD, torch.stack(made, dim=1) == wanted
    return {
        "sequences": 100 * float((same | ~real).all(-1).double().mean()),
        "tokens": 100 * float(same[real].double().mean()),
    }


def speed(options, results: dict[str, Any]) -> None:
    """A step after sources of many lengths: its time, and the bytes of the state that it reads."""
    contenders = {}
    for method in options.methods:
        model = build(method, 64, options).eval()
        for n in options.sources:
            ids = torch.randint(2, 64, (1, n), generator=torch.Generator().manual_seed(0))
            state = model.read(ids, capacity=8)
            results["bytes"][f"{method} {n}"] = state.nbytes

            def step(model=model, state=state) -> None:
                model.step(model.start(1), state)

            contenders[f"{method} {n}"] = Contender(step)
    effort = Effort(seconds=0.05, rounds=(1, 1)) if options.quick else Effort(seconds=1.0, rounds=(5, 7))
    results["speed"] = dict(measure_in_turns(contenders, effort))


def report(options, facts, results: dict[str, Any]) -> str:
    rows = [
        [name, method, f"{x['sequences']:.1f}", f"{x['tokens']:.1f}", f"{1000 * x['seconds_a_step']:.0f}"]
        for name, found in results["tasks"].items()
        for method, x in found.items()
    ]
    lines = [
        [
            method,
            *(f"{milliseconds(results['speed'][f'{method} {n}'])}" for n in options.sources),
            *(f"{results['bytes'][f'{method} {n}']:,}" for n in options.sources),
        ]
        for method in options.methods
        if results["speed"]
    ]
    names = [f"{n:,}" for n in options.sources]
    return page(
        "Sequence to sequence, by attention",
        f"{options.layers} + {options.layers} layers, hidden {options.hidden_size}, {options.heads} heads; {options.steps} steps "
        f"of {options.batch_size} pairs, one run each. Strings of 2 to {options.longest} letters. Made greedily.",
        markdown(["task", "attention", "targets right, %", "tokens right, %", "ms per step of training"], rows, left=2),
        markdown(
            ["one token after a source of", *(f"{x}: ms" for x in names), *(f"{x}: bytes of state" for x in names)],
            lines,
        ),
    )


def figure(options, facts, results: dict[str, Any]):
    made, every = panels(max(1, len(results["tasks"])), height=4.2)
    for axes, (name, found) in zip(every, results["tasks"].items()):
        for method, one in found.items():
            line(axes, [(x["step"], x["tokens"]) for x in one["curve"]], METHODS[method][1], method)
        label(axes, "steps", "right tokens, %", scales="linear linear", title=name)
    return made


if __name__ == "__main__":
    raise SystemExit(main())
