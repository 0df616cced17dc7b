"""What `tarnn.patch_transformers()` is worth in training: a step of Qwen3.5's text model, with tarnn's ops and without.

    python benchmarks/families.py        # some twenty minutes on two cores; benchmarks/results/families.{json,md}

`lora`: adapters of rank 8 in a model with 0.8 billion weights in 36 layers like those of Qwen3.5-0.8B, bfloat16, one row of
1,024 tokens, with gradient checkpointing. Its vocabulary is small (8,192), so that layers are measured. `vocabulary`: the same
with one of 150,000, for its memory. `float32`: that vocabulary, 12 layers of 768 channels, in float32. `scratch`: all weights of
a model of 20 million, float32, 4 rows of 512 tokens. Weights are random. A step is forward, loss, backward and AdamW. Each
contender has a process of its own (`toolkit/family_worker.py`), as memory is its own; the processes take turns, a step at a
time. Memory is the most that a step holds beyond what was there before it, and that of the whole process.
Correctness is checked first: a tiny model in float32 has the same losses, step by step.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit import family_worker
from toolkit.family_worker import METHODS

from scripts.common.options import ROOT, parse
from scripts.common.others import MOST, taken_quietly
from scripts.common.results import run
from scripts.common.tables import markdown, mebibytes, milliseconds, page, source
from scripts.common.targets import Target, at_least, at_most, section

LINEAR = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
}
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
    **LINEAR,
}
SMALL = LARGE | {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "head_dim": 64,
    **dict(zip(LINEAR, (6, 64, 6, 64), strict=True)),
}
WIDE = LARGE | {"vocab_size": 150_000}
MIDDLE = WIDE | {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    **dict(zip(LINEAR, (6, 128, 6, 128), strict=True)),
}
TINY = SMALL | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 256}
CASES = {
    "lora": {"config": LARGE, "dtype": "bfloat16", "lora": True, "batch": 1, "tokens": 1024},
    "vocabulary": {"config": WIDE, "dtype": "bfloat16", "lora": True, "batch": 1, "tokens": 1024},
    "float32": {"config": MIDDLE, "dtype": "float32", "lora": True, "batch": 1, "tokens": 1024},
    "scratch": {"config": SMALL, "dtype": "float32", "lora": False, "batch": 4, "tokens": 512},
}
FULL = {"cases": list(CASES), "rounds": 2, "shrink": 1}
QUICK = {"rounds": 1, "shrink": 16}
FASTER = {"lora": 1.6, "scratch": 1.5}  # were all but the products free, 2.1 and 1.8
LESS = 0.5
THEIRS, OURS, PRODUCTS = METHODS


@dataclass
class Step:
    """Milliseconds of a step: median, least and most of the rounds. Bytes beyond what was there before, and of the process."""

    ms: float
    ms_min: float
    ms_max: float
    rounds: int
    loss: float
    parameters: int
    peak_bytes: int | None
    process_bytes: int
    others: float | None


def main() -> int:
    about = {"shrink": "divides layers, vocabulary and tokens"}
    options = parse(__file__, __doc__, FULL, QUICK, choices={"cases": list(CASES)}, about=about)
    return run(options, measure, check=check, report=report)


def check(options) -> str:
    """The losses of three steps, with adapters and without."""
    import tarnn

    for lora in (False, True):
        case = {"config": TINY, "dtype": "float32", "lora": lora, "batch": 2, "tokens": 70}
        losses = {}
        for method in (THEIRS, OURS):
            with tarnn.patch_transformers() if method == OURS else open(os.devnull):
                step = family_worker.training_step(family_worker.make_model(case), case)
                losses[method] = [step() for _ in range(3)]
        far = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
        if far > 1e-4:
            return f"losses differ by {far:.1g}: {losses}"
    return ""


def measure(options, found: dict[str, Any], keep) -> None:
    for name in options.cases:
        found[name] = of_case(shrunk(CASES[name], options.shrink), options)
        keep()


def shrunk(case: dict[str, Any], factor: int) -> dict[str, Any]:
    config = dict(case["config"])
    for name in ("num_hidden_layers", "vocab_size"):
        config[name] = max(4, config[name] // factor)
    return {**case, "config": config, "tokens": case["tokens"] // factor}


def of_case(case: dict[str, Any], options) -> dict[str, Step]:
    workers: dict[str, subprocess.Popen] = {}
    try:
        about = {}
        methods = [x for x in METHODS if x != PRODUCTS or case["dtype"] == "float32"]
        for method in methods:
            workers[method] = begin(case, method, options.threads)
            about[method] = answer(workers[method])
        rounds, share = taken_quietly(lambda: [{m: ask(w) for m, w in workers.items()} for _ in range(options.rounds)])
    finally:
        for worker in workers.values():
            worker.kill()
            worker.communicate()
    return {method: step_of([x[method] for x in rounds], about[method], share) for method in methods}


def step_of(rounds: Sequence[dict[str, float]], about: dict[str, Any], share: float | None) -> Step:
    times = [x["ms"] for x in rounds]
    return Step(median(times), min(times), max(times), len(times), rounds[0]["loss"], **about, others=share)


def begin(case: dict[str, Any], method: str, threads: int) -> subprocess.Popen:
    given = json.dumps({"case": case, "method": method, "threads": threads})
    command = [sys.executable, str(Path(family_worker.__file__)), given]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(worker: subprocess.Popen) -> dict[str, Any]:
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    return answer(worker)


def answer(worker: subprocess.Popen) -> dict[str, Any]:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError("a worker ended before its time; what it wrote stands above.")
    return json.loads(line)


def targets(found: dict[str, Any]) -> list[Target]:
    judged = [
        at_least(
            f"{name}: a step at least {bound:g} times as fast as transformers",
            "measured",
            bound,
            _of(found, name, "ms"),
        )
        for name, bound in FASTER.items()
    ]
    less = {name: 1 / x for name, x in _of(found, "vocabulary", "peak_bytes").items()}
    judged.append(
        at_most(f"vocabulary: memory of a step with adapters at most {LESS:g} of transformers'", "measured", LESS, less)
    )
    return judged


def _of(found: dict[str, Any], name: str, what: str) -> dict[str, float]:
    """How many times as much transformers takes; nothing where it was not measured."""
    if name not in found or not getattr(found[name][OURS], what):
        return {}
    return {name: getattr(found[name][THEIRS], what) / getattr(found[name][OURS], what)}


def report(options, facts, found: dict[str, Any]) -> str:
    rows = [
        [
            f"{name}, {at[THEIRS].parameters / 1e6:,.0f} M",
            method,
            milliseconds(step),
            f"{at[THEIRS].ms / step.ms:.2f}",
            mebibytes(step.peak_bytes, 0),
            mebibytes(step.process_bytes, 0),
            f"{step.loss:.4f}",
        ]
        for name, at in found.items()
        for method, step in at.items()
    ]
    header = ["model", "computed by", "ms", "times as fast", "a step's MiB", "the process's MiB", "loss"]
    about = (
        f"Medians of {options.rounds} steps of each, in turns (° where others took over {MOST:.0%} of the processors)."
    )
    title = "A training step of linear models of transformers"
    return page(title, source(facts, about), section(targets(found)), markdown(header, rows, left=2))


if __name__ == "__main__":
    raise SystemExit(main())
