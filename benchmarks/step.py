"""What one token costs: `tarnn.step` in place, against an empty call and against copying its state.

    python benchmarks/step.py        # half a minute; benchmarks/results/step.{json,md}

The claim: a step is a read and a write of the state, at the speed of memory, and little besides. 8 heads of 64 × 64,
batch 1 and 128. Compared, in turns: the Python function; the operator that it calls, alone, with the same arguments;
both for a batch of nothing, which is what a call costs before it does anything; torch's `copy_` of as many bytes as
the state has (read once, written once, as the step does), of half as many (which touches as much memory as the step,
that writes where it reads), and of far more than the caches hold. Correctness is checked first.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.clock import Contender, Effort, Timing, measure_in_turns
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page, source
from scripts.common.targets import Target, at_least, at_most, section
from tarnn import Elu, LinearState, step
from tarnn.kernels.cpu import library
from tarnn.ops.linear import definition as linear_definition

BATCH_SIZES, HEADS, HEAD_DIM = (1, 128), 8, 64
LARGE = 256 * 2**20  # bytes: more than caches hold
PHI = Elu()
FUNCTION, OPERATOR = "tarnn.step", "the operator alone"
Timings = dict[str, Timing]


def main() -> int:
    options = parse(__file__, __doc__, {"rounds": 15}, {"rounds": 3})
    with torch.no_grad():
        return run(options, measure, check=lambda options: check(), facts=facts, report=report)


def measure(options, found: dict[int, Timings], keep) -> None:
    effort = Effort(0.005 if options.quick else 0.03, rounds=(options.rounds, options.rounds), seconds=10)
    for batch_size in BATCH_SIZES:
        found[batch_size] = measure_batch(batch_size, effort)
        keep()


def facts(options, found: dict[int, Timings]) -> dict[str, Any]:
    judged = [t.as_json() for t in targets(found)]
    return {"heads": HEADS, "head_dim": HEAD_DIM, "targets": judged}


def check() -> str:
    """What is wrong with the step in place, or nothing: 37 tokens against the definition in float64."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 37, 5) for _ in range(3))
    expected = linear_definition.quadratic(PHI(q.double()), PHI(k.double()), v.double(), causal=True)
    state = LinearState.zeros(2, 3, 5, 5)
    for i in range(q.shape[2]):
        o, _ = step(*(x[:, :, i : i + 1] for x in (q, k, v)), PHI, state, inplace=True)
        if not torch.allclose(o.double(), expected[:, :, i : i + 1], rtol=1e-5, atol=1e-5):
            return f"step {i} differs from the definition by {(o - expected[:, :, i : i + 1]).abs().max():.1e}"
    return ""


def measure_batch(batch_size: int, effort: Effort) -> Timings:
    """The timing of each contender, printed."""
    nbytes = state_bytes(batch_size)
    empty = torch.empty(0)
    contenders = {
        FUNCTION: Contender(step_call(batch_size)),
        f"{FUNCTION}, batch 0": Contender(step_call(0)),
        f"{FUNCTION} in plain PyTorch": Contender(step_call(batch_size), surroundings=library.disabled),
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
    timings = measure_in_turns(contenders, effort)
    for name, timing in timings.items():
        print(f"batch {batch_size:<5}{name:32}{1000 * timing.ms:12.2f} µs")
    return timings


def copy_call(num_bytes: int) -> Callable[[], object]:
    """`copy_` of so many bytes: as many are read as are written."""
    source, target = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
    return lambda: target.copy_(source)


def state_bytes(batch_size: int) -> int:
    """S and z in float32."""
    return batch_size * HEADS * (HEAD_DIM * HEAD_DIM + HEAD_DIM) * 4


def step_call(batch_size: int):
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch_size, HEADS, 1, HEAD_DIM) for _ in range(3))
    state = LinearState.zeros(batch_size, HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32)
    return lambda: step(q, k, v, PHI, state, inplace=True)


def operator_call(call: Callable[[], object]) -> Callable[[], object] | None:
    """The operator that `call` makes, with the arguments that it gets, or None where plain PyTorch computes."""
    if not library.available():
        return None
    operators, seen = torch.ops.tarnn_cpu, []
    operator = operators.step
    operators.step = SimpleNamespace(default=lambda *args: seen.append(args) or operator(*args))
    try:
        call()
    finally:
        operators.step = operator
    return (lambda: operator(*seen[0])) if seen else None


def targets(found: dict[int, Timings]) -> list[Target]:
    """Measured of native kernels alone; a case is the function, or the operator alone."""
    targets = []
    native = library.available()
    for case in (FUNCTION, OPERATOR):
        one, many, shares = found.get(1, {}), found.get(128, {}), {}
        ratios = {}
        if native and case in one and f"{case}, batch 0" in one:
            bound = one[f"{case}, batch 0"].ms + max(0.0, one["copy_"].ms - one["copy_, empty"].ms)
            ratios["batch 1"] = one[case].ms / bound
        if native and case in many:
            shares["batch 128"] = many["copy_"].ms / many[case].ms
        what = (
            f"{HEADS} heads of {HEAD_DIM} × {HEAD_DIM}, batch 1: at most 1.5 times an empty call and its state copied"
        )
        targets.append(at_most(what, case, 1.5, ratios))
        targets.append(at_least("batch 128: at least 70 % of copy_'s bandwidth", case, 0.7, shares, "%"))
    return targets


def report(options, facts: dict[str, Any], found: dict[int, Timings]) -> str:
    rows = []
    for batch_size, timings in found.items():
        for name, x in timings.items():
            moved = 2 * bytes_moved(name, batch_size)
            span = f"{1000 * x.ms_min:.2f} – {1000 * x.ms_max:.2f}"
            rows.append([name, batch_size, f"{1000 * x.ms:.2f}", span, f"{moved / x.ms / 1e6:.1f}" if moved else ""])
    sizes = ", ".join(f"{state_bytes(b):,} bytes at batch {b}" for b in found)
    how = f"{HEADS} heads of {HEAD_DIM} × {HEAD_DIM}, float32: a state of {sizes}. Medians, in turns."
    return page(
        "One token: a step in place",
        source(facts, how),
        section(targets(found)),
        markdown(["", "batch", "µs", "least – most", "GB/s, read and written"], rows),
        f"At batch 1 {overhead(found.get(1, {}))}",
    )


def overhead(one: Timings) -> str:
    """What the Python function adds to its operator."""
    if OPERATOR not in one:
        return "no operator of ours is called: plain PyTorch computes."
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


if __name__ == "__main__":
    sys.exit(main())
