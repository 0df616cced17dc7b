"""What one token costs: `tarnn.step` in place, against an empty call and against copying its state.

    python benchmarks/step.py        # half a minute; benchmarks/results/step.{json,md}

The claim: a step is a read and a write of the state, at the speed of memory, and little besides. 8 heads of 64 × 64,
batch 1 and 128. Compared, in turns: the Python function; the operator that it calls, alone, with the same arguments;
both for a batch of nothing, which is what a call costs before it does anything; torch's `copy_` of as many bytes as
the state has (read once, written once, as the step does), of half as many (which touches as much memory as the step,
that writes where it reads), and of far more than the caches hold. Correctness is checked first.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from clock import Contender, Effort, Timing, measure_in_turns
from machine import copy_call
from provenance import kernels, provenance, results_folder
from rivals import native_kernels, without_native_kernels
from targets import Target, at_least, at_most, summary, target_table

from tarnn import Elu, LinearState, step
from tarnn.ops import reference

BATCH_SIZES, HEADS, HEAD_DIM = (1, 128), 8, 64
LARGE = 256 * 2**20  # bytes: more than caches hold
PHI = Elu()
FUNCTION, OPERATOR = "tarnn.step", "the operator alone"
Timings = dict[str, Timing]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder; benchmarks/results, with --quick runs/benchmarks")
    parser.add_argument("--quick", action="store_true", help="three short rounds")
    parser.add_argument("--threads", type=int, help="torch's own choice by default")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    options.out = options.out or results_folder(whole=not options.quick)
    with torch.no_grad():
        if wrong := check():
            print(f"the check is red, so nothing is measured: {wrong}", file=sys.stderr)
            return 1
        found = {batch_size: measure(batch_size, options.quick) for batch_size in BATCH_SIZES}
    write(options.out, found)
    return 0


def check() -> str:
    """What is wrong with the step in place, or nothing: 37 tokens against the definition in float64."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 37, 5, dtype=torch.float64) for _ in range(3))
    expected = reference.quadratic(PHI(q), PHI(k), v, causal=True)
    state = LinearState.zeros(2, 3, 5, 5, dtype=torch.float64)
    for i in range(q.shape[2]):
        o, _ = step(*(x[:, :, i : i + 1] for x in (q, k, v)), PHI, state, inplace=True)
        if not torch.allclose(o, expected[:, :, i : i + 1], rtol=1e-9, atol=1e-12):
            return (
                f"step {i} differs from the definition by {(o - expected[:, :, i : i + 1]).abs().max():.1e}"
            )
    return ""


def measure(batch_size: int, quick: bool = False) -> Timings:
    """A timing a contender, printed."""
    nbytes = state_bytes(batch_size)
    empty = torch.empty(0)
    contenders = {
        FUNCTION: Contender(step_call(batch_size)),
        f"{FUNCTION}, batch 0": Contender(step_call(0)),
        f"{FUNCTION} in plain PyTorch": Contender(step_call(batch_size), surroundings=without_native_kernels),
        "an empty add_": Contender(lambda: empty.add_(empty)),
        "copy_": Contender(copy_call(nbytes)),
        "copy_, half": Contender(copy_call(nbytes // 2)),
        "copy_, empty": Contender(copy_call(0)),
        "copy_, large": Contender(copy_call(LARGE)),
    }
    if operator := operator_call(step_call(batch_size)):
        contenders[OPERATOR] = Contender(operator)
    if operator := operator_call(step_call(0)):
        contenders[f"{OPERATOR}, batch 0"] = Contender(operator)
    effort = Effort(0.005, rounds=(3, 3)) if quick else Effort(rounds=(15, 15), seconds=10)
    timings = measure_in_turns(contenders, effort)
    for name, timing in timings.items():
        print(f"batch {batch_size:<5}{name:32}{1000 * timing.ms:12.2f} µs")
    return timings


def state_bytes(batch_size: int) -> int:
    """S and z in float32."""
    return batch_size * HEADS * (HEAD_DIM * HEAD_DIM + HEAD_DIM) * 4


def step_call(batch_size: int):
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch_size, HEADS, 1, HEAD_DIM) for _ in range(3))
    state = LinearState.zeros(batch_size, HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32)
    return lambda: step(q, k, v, PHI, state, inplace=True)


def operator_call(call: Callable[[], object]) -> Callable[[], object] | None:
    """The operator that `call` makes, with the arguments that it gets, or None where plain PyTorch serves."""
    if not native_kernels()[0]:
        return None
    operators, seen = torch.ops.tarnn_cpu, []
    operator = operators.step
    operators.step = lambda *args: seen.append(args) or operator(*args)
    try:
        call()
    finally:
        operators.step = operator
    return (lambda: operator(*seen[0])) if seen else None


def targets(found: dict[int, Timings]) -> list[Target]:
    """Measured of native kernels alone; a case is the function, or the operator alone."""
    targets = []
    native = native_kernels()[0]
    for case in (FUNCTION, OPERATOR):
        one, many, shares = found.get(1, {}), found.get(128, {}), {}
        ratios = {}
        if native and case in one and f"{case}, batch 0" in one:
            bound = one[f"{case}, batch 0"].ms + max(0.0, one["copy_"].ms - one["copy_, empty"].ms)
            ratios["batch 1"] = one[case].ms / bound
        if native and case in many:
            shares["batch 128"] = many["copy_"].ms / many[case].ms
        what = f"{HEADS} heads of {HEAD_DIM} × {HEAD_DIM}, batch 1: at most 1.5 times an empty call and its state copied"
        targets.append(at_most(what, case, 1.5, ratios))
        targets.append(at_least("batch 128: at least 70 % of copy_'s bandwidth", case, 0.7, shares, "%"))
    return targets


def report(facts: dict[str, Any], found: dict[int, Timings], judged: list[Target]) -> str:
    rows = ["| | batch | µs | least – most | GB/s, read and written |", "|---|--:|--:|--:|--:|"]
    for batch_size, timings in found.items():
        for name, x in timings.items():
            moved = 2 * bytes_moved(name, batch_size)
            rate = f"{moved / x.ms / 1e6:.1f}" if moved else ""
            rows.append(
                f"| {name} | {batch_size} | {1000 * x.ms:.2f} | {1000 * x.ms_min:.2f} – {1000 * x.ms_max:.2f} | {rate} |"
            )
    sizes = ", ".join(f"{state_bytes(b):,} bytes at batch {b}" for b in found)
    return "\n\n".join(
        (
            "# One token: a step in place",
            f"`{facts['command']}`",
            f"{facts['machine']['cpu']}, {facts['threads']} threads; torch {facts['versions']['torch']}. {HEADS} heads of "
            f"{HEAD_DIM} × {HEAD_DIM}, float32: a state of {sizes}. Kernels: {facts['kernels']}. Medians, in turns.",
            f"## Targets of this benchmark: {summary(judged)}",
            target_table(judged),
            "\n".join(rows),
            f"At batch 1 {overhead(found.get(1, {}))}",
        )
    )


def overhead(one: Timings) -> str:
    """What the Python function adds to its operator."""
    if OPERATOR not in one:
        return "no operator of ours is called: plain PyTorch serves."
    function, operator = 1000 * one[FUNCTION].ms, 1000 * one[OPERATOR].ms
    return (
        f"the function takes {function:.1f} µs and its operator {operator:.1f}: the rest is checks, allocating the output, "
        f"and Python. A trivial operator of torch's takes {1000 * one['an empty add_'].ms:.1f} µs."
    )


def bytes_moved(name: str, batch_size: int) -> int:
    """Read by a call, and as many written."""
    if "batch 0" in name or "empty" in name:
        return 0
    special = {"copy_, half": state_bytes(batch_size) // 2, "copy_, large": LARGE}
    return special.get(name, state_bytes(batch_size))


def write(folder: Path, found: dict[int, Timings]) -> None:
    judged = targets(found)
    facts = {**provenance(), "kernels": kernels()}
    facts |= {"heads": HEADS, "head_dim": HEAD_DIM, "targets": [t.as_json() for t in judged]}
    results = {str(b): {name: asdict(x) for name, x in timings.items()} for b, timings in found.items()}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**facts, "results": results}, indent=2, ensure_ascii=False)
    (folder / "step.json").write_text(text + "\n")
    (folder / "step.md").write_text(report(facts, found, judged) + "\n")
    print(f"targets: {summary(judged)}", folder / "step.json", folder / "step.md", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
