"""What a step of a whole model costs by the fused step, and what a second thread is worth, alone and beside a busy process.

    python benchmarks/fused_step.py        # three minutes; benchmarks/results/fused_step.{json,md}

The claims: at batch 1 a step takes at most 1.3 times as long as reading its weights at the bandwidth of torch's `copy_`
(bytes read and written, far more than caches hold); two threads are 1.7 times as fast as one from batch 16 on, and beside
a busy process never more than 20 % slower; one thread packs at least 1 GB of weights per second, and takes at most 1.3 times
the packed size of memory for it. Random weights of the default model's shape. For each claim the step is first
compared with `model.step`. A busy process is a Python loop of the same priority; on two cores it wants one of them.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit.model_steps import wrong_token

from scripts.common.clock import Contender, Effort, Timing, measure_in_turns, with_threads
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page, source
from scripts.common.targets import Target, at_least, at_most, section
from tarnn.decoding.fused import FusedStep
from tarnn.kernels.cpu.products import FORMATS
from tarnn.models import TarnnConfig, TarnnForCausalLM

SIZES = {"13 M": (384, 7), "25 M": (512, 8), "101 M": (1024, 8)}  # hidden, layers
LARGE = 256 * 2**20  # bytes: more than caches hold
STORED = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # types of a model's weights
COPY = "copy_"
Found = dict[str, dict[str, Timing]]  # by the claim and what it was measured of, by contender


def main() -> int:
    full = {"sizes": list(SIZES), "batch_sizes": [1, 16, 64], "rounds": 15}
    options = parse(__file__, __doc__, full, {"sizes": ["13 M"], "batch_sizes": [16], "rounds": 3})
    with torch.no_grad():
        return run(options, measure, check=check, targets=targets, report=report)


def make(size: str) -> TarnnForCausalLM:
    torch.manual_seed(0)
    hidden, layers = SIZES[size]
    config = TarnnConfig(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64)
    return TarnnForCausalLM(config).eval()


def check(options) -> str:
    return wrong_token(TarnnForCausalLM(TarnnConfig(num_hidden_layers=2)).eval(), 3)


def measure(options, found: Found, keep: Callable[[], None]) -> None:
    effort = Effort(0.02, rounds=(options.rounds, options.rounds), seconds=10)
    for size in options.sizes:
        model = make(size)
        steps = {kind: FusedStep(model, kind) for kind in FORMATS}
        contenders = {kind: step_call(step, 1, 1) for kind, step in steps.items()} | {COPY: copy_call()}
        found[f"one thread, {size}"] = measure_in_turns(contenders, effort)
        for kind, step in steps.items():
            found[f"one thread, {size}"][f"{kind}, bytes"] = step.runtime.packed.block.numel()
        keep()
    for size in options.sizes:
        for stored in STORED:
            found[packing_of(size, stored)] = measure_in_turns(packing_calls(size, stored), effort)
            keep()
    steps = {kind: FusedStep(make("25 M"), kind) for kind in ("float32", "int8")}
    for beside, surroundings in (("quiet", nobody), ("busy", busy_process)):
        for batch_size in options.batch_sizes:
            threads = {f"{kind}, {n}": step_call(step, batch_size, n) for kind, step in steps.items() for n in (1, 2)}
            with surroundings():
                found[f"{beside}, batch {batch_size}"] = measure_in_turns(threads, effort)
            keep()


def step_call(step: FusedStep, batch_size: int, threads: int) -> Contender:
    ids, state = torch.zeros(batch_size, dtype=torch.long), step.model.new_state(batch_size)
    return Contender(lambda: step(ids, state, inplace=True), surroundings=lambda: with_threads(threads))


def packing_of(size: str, stored: str) -> str:
    return f"packing, {size} in {stored}"


def packing_calls(size: str, stored: str) -> dict[str, Contender]:
    """Make the step of a model, as opening one does: the table of embeddings is shared."""
    model = make(size).to(STORED[stored])

    def call(kind: str) -> Contender:
        return Contender(lambda: FusedStep(model, kind, copy_tokens=False), surroundings=lambda: with_threads(1))

    return {kind: call(kind) for kind in FORMATS}


def packing_facts(found: Found) -> Iterator[tuple[str, str, float, float, float | None]]:
    """For each size and type, and format: its name, the format, milliseconds, GB of weights a second, memory in packed sizes."""
    for name, x in found.items():
        if name.startswith("packing"):
            size, stored = name.removeprefix("packing, ").split(" in ")
            whole = found[f"one thread, {size}"]
            weights = whole["float32, bytes"] * STORED[stored].itemsize / 4
            for kind in FORMATS:
                peak = x[kind].peak_bytes
                memory = None if peak is None else peak / whole[f"{kind}, bytes"]
                yield name.removeprefix("packing, "), kind, x[kind].ms, weights / x[kind].ms / 1e6, memory


def copy_call() -> Contender:
    x, y = torch.ones(LARGE // 4), torch.zeros(LARGE // 4)
    return Contender(lambda: y.copy_(x), surroundings=lambda: with_threads(1))


@contextmanager
def nobody() -> Iterator[None]:
    yield


@contextmanager
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def bound(timings: dict[str, Any], kind: str) -> float:
    """Milliseconds to read the weights at the bandwidth of a copy."""
    return timings[f"{kind}, bytes"] / (2 * LARGE / timings[COPY].ms)


def targets(found: Found) -> list[Target]:
    sizes = {name: x for name, x in found.items() if name.startswith("one thread")}
    made = [
        at_most(
            "batch 1, one thread: at most 1.3 times as long as reading the weights",
            kind,
            1.3,
            {name: x[kind].ms / bound(x, kind) for name, x in sizes.items()},
        )
        for kind in FORMATS
    ]
    packing = list(packing_facts(found))
    for kind in FORMATS:
        rates = {name: rate for name, x, _, rate, _ in packing if x == kind}
        peaks = {name: peak for name, x, _, _, peak in packing if x == kind and peak is not None}
        made.append(at_least("one thread packs: at least 1 GB of weights a second", kind, 1.0, rates))
        made.append(at_most("packing takes: at most 1.3 times the packed size", kind, 1.3, peaks))
    for kind in ("float32", "int8"):
        ratios = {name: x[f"{kind}, 1"].ms / x[f"{kind}, 2"].ms for name, x in found.items() if "batch" in name}
        quiet = {name: x for name, x in ratios.items() if name.startswith("quiet") and name != "quiet, batch 1"}
        busy = {name: 1 / x for name, x in ratios.items() if name.startswith("busy")}
        made.append(
            at_least("two threads, quiet, from batch 16 on: at least 1.7 times as fast as one", kind, 1.7, quiet)
        )
        made.append(at_most("two threads beside a busy process: at most 1.2 times one's time", kind, 1.2, busy))
    return made


def report(options, facts: dict[str, Any], found: Found) -> str:
    weights = [
        [
            name.removeprefix("one thread, "),
            kind,
            f"{x[f'{kind}, bytes']:,}",
            f"{x[kind].ms:.2f}",
            f"{bound(x, kind):.2f}",
        ]
        for name, x in found.items()
        if name.startswith("one thread")
        for kind in FORMATS
    ]
    packing = [
        [name, kind, f"{ms:.0f}", f"{rate:.2f}", None if peak is None else f"{peak:.2f}"]
        for name, kind, ms, rate, peak in packing_facts(found)
    ]
    threads = [
        [name, kind, *(f"{x[f'{kind}, {n}'].ms:.2f}" for n in (1, 2)), f"{x[f'{kind}, 1'].ms / x[f'{kind}, 2'].ms:.2f}"]
        for name, x in found.items()
        if "batch" in name
        for kind in ("float32", "int8")
    ]
    return page(
        "A step of a whole model, by the fused step",
        source(facts, "Random weights; medians, in turns."),
        section(targets(found)),
        "## Batch 1, one thread",
        markdown(["parameters", "weights", "bytes", "ms", "ms to read them"], weights, left=2),
        "## Packing, one thread",
        markdown(["parameters", "packed as", "ms", "GB a second", "peak memory, packed sizes"], packing, left=2),
        "## Two threads, 25 M parameters",
        markdown(["", "weights", "1 thread, ms", "2 threads, ms", "times as fast"], threads, left=2),
    )


if __name__ == "__main__":
    sys.exit(main())
