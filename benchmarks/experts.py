"""A model of experts beside a dense one that reads as many bytes for a token.

    python benchmarks/experts.py --threads 1       # two minutes, and 5 GiB; benchmarks/results/experts.{json,md}

The claim: what a token or a prompt costs goes by the experts that tokens choose, not by those that there are. Each layer has a
linear attention and 32 experts of which a router chooses two, about a billion weights in all, or a SwiGLU as wide as two experts.
Random weights and tokens, batch 1, in turns: a prompt, and then single tokens. Both times are medians.
"""

import sys
import time
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
    "tokens": 24,
    "rounds": 5,
    "formats": ["float32", "int8"],
}
QUICK = {"layers": 2, "size": 64, "vocabulary": 500, "prompt": 70, "tokens": 2, "rounds": 1, "formats": ["float32"]}
COUNT, CHOSEN = 32, 2
TOKEN, PROMPT = 1.5, 2.0


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, choices={"formats": list(FORMATS)})
    with torch.no_grad():
        return run(options, measure, check=check, report=report)


def recorded(options, sparse: bool) -> Program:
    """Record a model of experts, or a dense one. Layers share the tensors of their weights, which are packed one by one."""
    n, inner, generator = options.size, options.size // 2, torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    square, table = weight(n, n), weight(options.vocabulary, n)
    up, down = weight(2 * CHOSEN, inner, n), weight(n, CHOSEN * inner)
    all_experts = [Expert(up[i % 2], up[2 + i % 2], down[:, i % 2 * inner :][:, :inner]) for i in range(COUNT)]
    x = Recorder().embed(table)
    for _ in range(options.layers):
        x = x + mixed(norm(x, eps=1e-6), square)
        h = norm(x, eps=1e-6)
        if sparse:
            x = x + experts(h, *route(product(h, weight(COUNT, n) * 4, exact=True), CHOSEN), all_experts)
        else:
            gate, both = (product(h, some.flatten(0, 1)) for some in (up[:2], up[2:]))
            x = x + product(apply(gate, "silu") * both, down)
    return x.record.head(norm(x, eps=1e-6), table)


def mixed(x: Register, w: Tensor) -> Register:
    q, k, v = (heads(product(x, w), 8) for _ in range(3))
    q, k = norm(q, eps=1e-6, kind="l2"), norm(k, eps=1e-6, kind="l2")
    decay = torch.full((8,), -0.1)
    return product(linear(q, k, v, x.record.state("DeltaState"), log_decay=decay, normalize=False, keep_z=False), w)


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
        found, seen = taken_quietly(lambda runtimes=runtimes: seconds_of(options, runtimes))
        for name, x in found.items():
            results[f"{name}, {weights}"] = {**x, "bytes": runtimes[name].nbytes, "other_processes": seen}
        del runtimes
        keep()


def seconds_of(options, runtimes: dict[str, Runtime]) -> dict[str, Any]:
    """In turns, the prompt and the tokens behind it of each."""
    generator = torch.Generator().manual_seed(2)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in runtimes}
    for _ in range(options.rounds):
        ids = torch.randint(options.vocabulary, (1, options.prompt + options.tokens), generator=generator)
        for name, runtime in runtimes.items():
            state, (prompts, tokens) = runtime.new_state(1), times[name]
            start = time.perf_counter()
            _, state = runtime.prefill(ids[:, : options.prompt], state, inplace=True)
            prompts.append(time.perf_counter() - start)
            for token in ids[0, options.prompt :]:
                start = time.perf_counter()
                _, state = runtime(token[None], state, inplace=True)
                tokens.append(time.perf_counter() - start)
    return {name: {"prompt": median(x), "token": median(y)} for name, (x, y) in times.items()}


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
