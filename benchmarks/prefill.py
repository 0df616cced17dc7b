"""Tokens of a prompt that are read in a second: by `model.prefill`, and by the fused step in each of its formats.

    python benchmarks/prefill.py        # three minutes; benchmarks/results/prefill.{json,md}

The claims, of 6.5 M parameters (8 layers, 256 wide) on one thread: at least 20,000 tokens a second in int8 and 12,000 in
float32. And a prompt of 700 KB, byte by byte, takes at most 40 s in int8 on two threads. Random weights. Before it is
measured, the fused step must have read a prompt to the last bit as it reads one token after the other.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.clock import Contender, Effort, Timing, measure_in_turns, with_threads
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page, source
from scripts.common.targets import Target, at_least, at_most, section
from tarnn.decoding.fused import FusedStep, refusal
from tarnn.decoding.loop import TokenLoop
from tarnn.kernels.cpu.products import FORMATS
from tarnn.models import TarnnConfig, TarnnForCausalLM

PLAIN = "model.prefill"
LINEAR = "linear, elu"
KINDS: dict[str, dict[str, Any]] = {
    LINEAR: {},
    "linear, FAVOR+": {"feature_map": "favor", "feature_map_options": {"favor": {"num_features": 128}}},
    "softmax": {"attention": "softmax", "position": "rotary", "decay": "none"},
}
PROMPT_THREADS = 2
Found = dict[str, dict[str, Any]]  # by what was read, by contender


def main() -> int:
    full = {"tokens": 2048, "batch_sizes": [1, 4], "thread_counts": [1, 2], "rounds": 9, "long_prompt": 700_000}
    quick = {"tokens": 128, "batch_sizes": [1], "thread_counts": [1], "rounds": 2, "long_prompt": 2000}
    options = parse(__file__, __doc__, full, quick)
    with torch.no_grad():
        return run(options, measure, check=check, facts=facts, report=report)


def make(kind: str) -> TarnnForCausalLM:
    torch.manual_seed(0)
    return TarnnForCausalLM(
        TarnnConfig(hidden_size=256, num_hidden_layers=8, num_attention_heads=4, **KINDS[kind])
    ).eval()


def tokens(batch_size: int, t: int) -> torch.Tensor:
    return torch.randint(0, 256, (batch_size, t), generator=torch.Generator().manual_seed(1))


def check(options) -> str:
    model = make(LINEAR)
    if reason := refusal(model):
        return f"there is no fused step here: {reason}"
    ids, step = tokens(2, 70), FusedStep(model, "int8")
    logits, _ = step.prefill(ids, model.new_state(2))
    state = model.new_state(2)
    for token in ids.T:
        expected, state = step(token, state)
    return "" if torch.equal(logits, expected) else "a prompt is not read as its tokens are"


def measure(options, found: Found, keep: Callable[[], None]) -> None:
    effort = Effort(0, rounds=(options.rounds, options.rounds), seconds=20)
    for kind in KINDS:
        model = make(kind)
        readers = {PLAIN: model.prefill} | {weights: FusedStep(model, weights).prefill for weights in FORMATS}
        for threads in options.thread_counts:
            for batch_size in options.batch_sizes:
                ids = tokens(batch_size, options.tokens // batch_size)
                contenders = {name: read_call(model, reader, ids, threads) for name, reader in readers.items()}
                found[f"{kind}, batch {batch_size}, {threads} threads"] = timings = measure_in_turns(contenders, effort)
                print(
                    kind,
                    batch_size,
                    threads,
                    {name: round(speed(options, x)) for name, x in timings.items()},
                    flush=True,
                )
                keep()
    found["long prompt"] = {"seconds": read_long(options.long_prompt), "tokens": options.long_prompt}
    keep()


def read_call(model: TarnnForCausalLM, reader: Callable[..., Any], ids: torch.Tensor, threads: int) -> Contender:
    batch_size, t = ids.shape
    state = model.new_state(batch_size, capacity=t)
    return Contender(lambda: reader(ids, state.clone(), inplace=True), surroundings=partial(with_threads, threads))


def read_long(t: int) -> float:
    """Seconds of a prompt's way into the state, as `tarnn generate --weights int8` reads it."""
    model = make(LINEAR)
    loop, ids = TokenLoop(model, model.new_state(1), step=FusedStep(model, "int8")), tokens(1, t)
    with with_threads(PROMPT_THREADS):
        start = time.perf_counter()
        loop.read(ids)
        return time.perf_counter() - start


def speed(options, timing: Timing) -> float:
    """Tokens a second, of all rows together."""
    return 1000 * options.tokens / timing.ms


def targets(options, found: Found) -> list[Target]:
    ours = {name: x for name, x in found.items() if name.startswith(LINEAR) and "1 threads" in name}
    claim = "tokens a second, one thread, 6.5 M parameters"
    made = [
        at_least(
            f"at least {least:,} {claim}", weights, least, {n: speed(options, x[weights]) for n, x in ours.items()}, ""
        )
        for weights, least in (("int8", 20_000), ("float32", 12_000))
    ]
    long = {"": found["long prompt"]["seconds"]} if "long prompt" in found else {}
    return [*made, at_most("a prompt of 700 KB in at most 40 s, two threads", "int8", 40, long, " s")]


def facts(options, found: Found) -> dict[str, Any]:
    return {"targets": [t.as_json() for t in targets(options, found)]}


def report(options, facts: dict[str, Any], found: Found) -> str:
    names = [PLAIN, *FORMATS]
    rows = [[of, *(f"{speed(options, x[name]):,.0f}" for name in names)] for of, x in found.items() if PLAIN in x]
    long = found["long prompt"]
    return page(
        "Tokens of a prompt read per second",
        source(facts, f"{options.tokens:,} tokens in all rows together, random weights. Medians, in turns."),
        section(targets(options, found)),
        "## By model, batch and threads",
        markdown(["", *names], rows),
        f"A prompt of {long['tokens']:,} bytes, int8, {PROMPT_THREADS} threads: {long['seconds']:.1f} s.",
    )


if __name__ == "__main__":
    raise SystemExit(main())
