"""Is a checkout slower than another? Attention and steps of both, in turns, in two processes.

    python scripts/dev/two_checkouts.py --other ../before          # a checkout with its compiled kernels; four minutes

Each cell is timed in rounds: first one checkout, then the other. A round is the fastest of some calls; shown are the medians
of the rounds and of their ratios, this checkout's time divided by the other's.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.common.options import ROOT, parse
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, page

WORKER = """
import json, os, sys, time
# an editable installation's finder would come before PYTHONPATH, and both workers would load the same checkout
sys.meta_path[:] = [x for x in sys.meta_path if "editable" not in type(x).__module__.lower()]
import torch, tarnn
assert tarnn.__file__.startswith(os.environ["PYTHONPATH"]), tarnn.__file__
from tarnn.ops import LinearState
from tarnn.feature_maps import Elu, PositiveRandomFeatures

def attention(t, d, causal, dtype, backward, map_name):
    shape = (1, 8, t, d)
    q, k, v = (torch.randn(shape, dtype=getattr(torch, dtype)) for _ in range(3))
    phi = Elu() if map_name == "elu" else PositiveRandomFeatures(d, 256, seed=0)
    if not backward:
        return lambda: tarnn.linear_attention(q, k, v, phi, causal=causal)
    leaves, grad = [x.requires_grad_() for x in (q, k, v)], torch.randn(shape, dtype=getattr(torch, dtype))
    return lambda: torch.autograd.grad(tarnn.linear_attention(q, k, v, phi, causal=causal), leaves, grad)

def step(batch, inplace):
    q = k = v = torch.randn(batch, 8, 1, 64)
    phi, state = Elu(), LinearState.zeros(batch, 8, 64, 64)
    def call():
        with torch.no_grad():
            tarnn.step(q, k, v, phi, state, inplace=inplace)
    return call

torch.manual_seed(0)
calls = {}
for line in sys.stdin:
    name, kind, arguments, seconds = json.loads(line)
    if name not in calls:
        calls[name] = attention(*arguments) if kind == "attention" else step(*arguments)
        calls[name](), calls[name]()
    call, least, end = calls[name], float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or least == float("inf"):
        begun = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - begun)
    print(least, flush=True)
"""
CELLS = {
    **{
        f"{'causal' if causal else 'full'}, d = {d}, t = {t:,}, {dtype}, {'both' if backward else 'forward'}": (
            "attention",
            (t, d, causal, dtype, backward, "elu"),
        )
        for d, dtype, causal in [
            (64, "float32", True),
            (64, "float32", False),
            (64, "bfloat16", True),
            (128, "bfloat16", True),
            (32, "float32", True),
            (128, "float32", True),
        ]
        for t in (128, 1024, 16384)
        for backward in (False, True)
    },
    **{
        f"favor 256, d = 64, t = 4,096, {'both' if backward else 'forward'}": (
            "attention",
            (4096, 64, True, "float32", backward, "favor"),
        )
        for backward in (False, True)
    },
    **{
        f"step, batch {batch}, {'in place' if inplace else 'new state'}": ("step", (batch, inplace))
        for batch in (1, 128)
        for inplace in (False, True)
    },
}


def main() -> int:
    options = parse(
        __file__,
        __doc__,
        {"other": Path, "rounds": 7, "seconds": 0.15},
        {"rounds": 1, "seconds": 0.0},
        about={"other": "the other checkout"},
    )
    return run(options, measure, report=report)


def measure(options, results: dict[str, dict[str, float]], keep) -> None:
    if options.other is None or not (options.other / "src" / "tarnn").is_dir():
        raise Unmeasured("--other names no checkout of tarnn")
    workers = [worker(ROOT), worker(options.other)]
    for name, (kind, arguments) in CELLS.items():
        rounds = [
            [ask(one, [name, kind, arguments, options.seconds]) for one in workers] for _ in range(options.rounds)
        ]
        here, there = (statistics.median(times) * 1e3 for times in zip(*rounds))
        results[name] = {"ms": here, "other_ms": there, "ratio": statistics.median(a / b for a, b in rounds)}
    for one in workers:
        one.communicate()


def worker(checkout: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")},
    )


def ask(one: subprocess.Popen, what: list) -> float:
    assert one.stdin is not None
    assert one.stdout is not None
    one.stdin.write(json.dumps(what) + "\n")
    one.stdin.flush()
    return float(one.stdout.readline())


def report(options, facts, results) -> str:
    rows = [[name, f"{x['ms']:.3f}", f"{x['other_ms']:.3f}", f"{x['ratio']:.2f}"] for name, x in results.items()]
    ratios = sorted(x["ratio"] for x in results.values())
    about = (
        f"{facts['machine']['cpu']}, {options.threads} threads. 8 heads, batch 1. Ratios: median "
        f"{statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}."
    )
    return page("Two checkouts", about, markdown(["", "this one, ms", "the other, ms", "ratio"], rows))


if __name__ == "__main__":
    raise SystemExit(main())
