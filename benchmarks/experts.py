"""A model of experts beside a dense one that reads as many bytes for a token.

    python benchmarks/experts.py --threads 1       # 90 seconds, and 5 GiB; benchmarks/results/experts.{json,md}

The claim: what a token or a prompt costs goes by the experts that tokens choose, not by those that there are. Each layer has a
linear attention and 32 experts of which a router chooses two, about a billion weights in all, or a SwiGLU as wide as two experts.
Random weights and tokens, batch 1, in turns: a prompt, and then single tokens. Both times are medians.
"""

import sys
import threading
import time
from itertools import count, pairwise
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.options import parse
from scripts.common.others import taken_quietly
from scripts.common.results import run
from scripts.common.tables import markdown, page, source
from scripts.common.targets import Target, at_most, section
from tarnn.kernels.cpu.products import FORMATS
from tarnn.program import definition
from tarnn.program.experts import Expert, experts, route
from tarnn.program.instructions import Program
from tarnn.program.recording import Recorder, Register, apply, heads, linear, norm, product
from tarnn.program.runtime import Runtime, check_kernels

FULL = {
    "layers": 20,
    "size": 1024,
    "vocabulary": 16000,
    "prompt": 1024,
    "tokens": 16,
    "rounds": 3,
    "formats": ["float32", "int8"],
}
QUICK = {"layers": 2, "size": 64, "vocabulary": 500, "prompt": 70, "tokens": 2, "rounds": 1, "formats": ["float32"]}
COUNT, CHOSEN = 32, 2
TOKEN, PROMPT = 1.5, 2.0


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, choices={"formats": list(FORMATS)})
    with torch.no_grad():
        return run(options, measure, check=check, targets=targets, report=report)


def recorded(options, sparse: bool) -> Program:
    """Record a model of experts, or a dense one. Weights are views of one pool, each from another number on: all are packed."""
    n, inner = options.size, options.size // 2
    generator, places = torch.Generator().manual_seed(0), count(step=16)
    pool = torch.randn(2 * n * n + 2**18, generator=generator) / n**0.5

    def weight(*shape: int) -> Tensor:
        return pool[next(places) :][: prod(shape)].view(shape)

    table = torch.randn(options.vocabulary, n, generator=generator)
    x = Recorder().embed(table)
    for _ in range(options.layers):
        x = x + mixed(norm(x, eps=1e-6), [weight(n, n) for _ in range(4)])
        h = norm(x, eps=1e-6)
        if sparse:
            all_experts = [Expert(weight(inner, n), weight(inner, n), weight(n, inner)) for _ in range(COUNT)]
            x = x + experts(h, *route(product(h, weight(COUNT, n), exact=True), CHOSEN), all_experts)
        else:
            gate, up, down = weight(CHOSEN * inner, n), weight(CHOSEN * inner, n), weight(n, CHOSEN * inner)
            x = x + product(apply(product(h, gate), "silu") * product(h, up), down)
    return x.record.head(norm(x, eps=1e-6), table)


def mixed(x: Register, weights: list[Tensor]) -> Register:
    """Mix tokens by linear attention with a decay."""
    q, k, v = (heads(product(x, w), 8) for w in weights[:3])
    q, k = norm(q, eps=1e-6, kind="l2"), norm(k, eps=1e-6, kind="l2")
    decay = torch.full((8,), -0.1)
    return product(
        linear(q, k, v, x.record.state("DeltaState"), log_decay=decay, normalize=False, keep_z=False), weights[3]
    )


def check(options) -> str:
    """Tiny models against their definition."""
    small = type(options)(**vars(options) | {"layers": 1, "size": 64, "vocabulary": 50})
    ids = torch.randint(50, (1, 100), generator=torch.Generator().manual_seed(1))
    for sparse in (True, False):
        program = recorded(small, sparse)
        runtime = Runtime(program)
        out, _ = runtime.prefill(ids, runtime.new_state(1), every=True)
        exact, _ = definition.run(program, ids, definition.new_states(program, 1), positions=[0])
        if not torch.allclose(out, exact, rtol=0, atol=1e-3):
            return f"a model {'of experts' if sparse else 'without experts'} has other logits than its definition"
    return ""


def measure(options, results: dict[str, Any], keep) -> None:
    check_kernels()
    for weights in options.formats:
        runtimes = {name: Runtime(recorded(options, name == "experts"), weights) for name in ("dense", "experts")}
        for thread in threading.enumerate():
            if thread.name == "tarnn-large-pages":
                thread.join()
        for name, x in seconds_of(options, runtimes).items():
            results[f"{name}, {weights}"] = {**x, "bytes": runtimes[name].nbytes}
        del runtimes
        keep()


def seconds_of(options, runtimes: dict[str, Runtime]) -> dict[str, Any]:
    """In turns, the prompts and the tokens behind them of each."""
    generator = torch.Generator().manual_seed(2)
    found: dict[str, Any] = {name: {"prompts": [], "tokens": [], "other_processes": 0.0} for name in runtimes}
    for _ in range(options.rounds):
        ids = torch.randint(options.vocabulary, (options.prompt + options.tokens,), generator=generator)
        for name, runtime in runtimes.items():
            seconds, seen = taken_quietly(lambda runtime=runtime, ids=ids: read(runtime, ids, options.prompt))
            found[name]["prompts"].append(seconds[0])
            found[name]["tokens"] += seconds[1:]
            found[name]["other_processes"] = max(found[name]["other_processes"], seen or 0.0)
    return {name: {"prompt": median(x["prompts"]), "token": median(x["tokens"]), **x} for name, x in found.items()}


def read(runtime: Runtime, ids: Tensor, prompt: int) -> list[float]:
    """Seconds of a prompt, and of each token behind it."""
    state, times = runtime.new_state(1), [time.perf_counter()]
    _, state = runtime.prefill(ids[None, :prompt], state, inplace=True)
    times.append(time.perf_counter())
    for token in ids[prompt:]:
        _, state = runtime(token[None], state, inplace=True)
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def times_of(results: dict[str, Any], what: str) -> dict[str, float]:
    """How many times as long as the dense model the one of experts takes, by format."""
    formats = [x.partition(", ")[2] for x in results if x.startswith("experts")]
    return {x: results[f"experts, {x}"][what] / results[f"dense, {x}"][what] for x in formats}


def targets(results: dict[str, Any]) -> list[Target]:
    return [
        at_most(
            "a token takes at most 1.5 times as long as of the dense model",
            "batch 1",
            TOKEN,
            times_of(results, "token"),
        ),
        at_most("a prompt of 1,024 tokens at most twice", "batch 1", PROMPT, times_of(results, "prompt")),
    ]


def report(options, facts: dict[str, Any], results: dict[str, Any]) -> str:
    rows = [
        [name, f"{x['bytes'] / 1e9:.2f}", f"{x['token'] * 1e3:.2f}", f"{x['prompt'] * 1e3:,.0f}"]
        for name, x in results.items()
    ]
    for what in ("token", "prompt"):
        rows.append(
            [
                f"experts ÷ dense, a {what}",
                "",
                *[", ".join(f"{x:.2f}× ({name})" for name, x in times_of(results, what).items())],
            ]
        )
    columns = ["model", "GB packed", "ms a token", f"{options.prompt:,} tokens, ms"]
    rows = [x + [""] * (len(columns) - len(x)) for x in rows]
    return page("Experts", source(facts, ""), section(targets(results)), markdown(columns, rows))


if __name__ == "__main__":
    sys.exit(main())
