"""Where a training step's time goes, and how much of it are matrix products: the default model at the demo's size.

    python scripts/dev/training_profile.py     # half a minute; scripts/dev/results/training_profile.{json,md}
    python scripts/dev/training_profile.py --other ../before     # in turns with another checkout and its compiled kernels
    python scripts/dev/training_profile.py --compiled     # in turns with torch.compile, which first takes minutes

128 wide, 4 layers of 4 heads, 4 × 256 tokens per step, float32. Each contender is a process that runs `tarnn train`. They take
turns: one makes a few steps, then a few of the model's own (forward, loss, backward, clipping, AdamW, without the
Trainer), then torch.mm of 2,048³; then the next. The claim: a step of `tarnn train` takes no longer than the matrix products of
its linear layers, at torch.mm's rate of the same round, divided by 0.6. Those of attention don't count as products here. Where
the rest goes, torch.profiler says.
"""

import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.common.options import ROOT, parse
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, page, source
from scripts.common.targets import Target, at_least, section

MODEL = {"hidden_size": 128, "layers": 4, "heads": 4, "context": 256, "batch_size": 4}
TOKENS = MODEL["batch_size"] * MODEL["context"]
FULL = {"rounds": 12, "steps": 10, "profiled": 10, "matrix": 2048, "other": Path, "compiled": False}
QUICK = {"rounds": 1, "steps": 2, "profiled": 1, "matrix": 256}
SHARE = 0.6
NOW, BEFORE, COMPILED = "now", "before", "with torch.compile"
# what operators are for, by the first part that is in their names
PARTS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "linear attention": ("tarnn_cpu::forward", "tarnn_cpu::backward", "_Attention", "LinearAttention"),
    "norms": ("rms_norm", "RmsNorm", "aten::pow", "aten::rsqrt", "aten::mean", "aten::div"),
    "SwiGLU": ("swiglu", "SwiGlu", "aten::silu"),
    "loss": ("log_softmax", "nll_loss"),
    "optimizer, clipping": ("adam", "Adam", "foreach", "linalg_vector_norm"),
    "sums and products of whole tensors": ("aten::add", "aten::mul", "aten::sum", "aten::copy_", "aten::fill_"),
}
REST = "everything else that torch does"


def main() -> int:
    about = {
        "other": "another checkout",
        "compiled": "also with --set torch_compile=true",
        "steps": "of tarnn train, in a round",
    }
    return run(parse(__file__, __doc__, FULL, QUICK, about=about), measure, facts=facts, report=report)


UNCHECKED = "Nothing is guaranteed here: this script compares times and checks no results."


def measure(options, found: dict[str, Any], keep) -> None:
    if options.other is not None and not (options.other / "src" / "tarnn").is_dir():
        raise Unmeasured("--other names no checkout of tarnn")
    asked = {BEFORE: (options.other, {}), NOW: (ROOT, {}), COMPILED: (ROOT, {"torch_compile": True})}
    wanted = {BEFORE: options.other is not None, NOW: True, COMPILED: options.compiled}
    workers: dict[str, Any] = {}
    about: dict[str, dict[str, float]] = {}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name, is_wanted in wanted.items() if is_wanted}
    with ExitStack() as all_workers:
        for name in rounds:
            workers[name] = all_workers.enter_context(worker(options, *asked[name]))
            about[name] = answer(workers[name])
        for _ in range(options.rounds):
            for name, one in workers.items():
                print(file=one.stdin, flush=True)
                rounds[name].append(answer(one))
        for name, one in workers.items():
            one.stdin.close()
            found[name] = summary(options, about[name], rounds[name]) | {"parts_ms": by_part(answer(one))}
            one.wait()  # or its end would disturb the others' profiles
    first = next(iter(rounds.values()))
    for name, own in rounds.items():
        ratios = (x["train"] / y["train"] for x, y in zip(own, first, strict=True))
        found[name]["ratio"] = statistics.median(ratios)


def worker(options, checkout: Path, assignments: dict[str, Any]) -> subprocess.Popen:
    given = {
        "model": MODEL,
        "set": assignments,
        "threads": options.threads,
        "steps": options.steps,
        "profiled": options.profiled,
        "matrix": options.matrix,
    }
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("training_worker.py")), json.dumps(given)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")},
    )


def answer(one: subprocess.Popen) -> dict[str, float]:
    assert one.stdout is not None
    line = one.stdout.readline()
    if not line:
        raise Unmeasured("a contender ended before its time; its message is above")
    return json.loads(line)


def summary(options, about: dict[str, float], rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of the rounds; the share is that of each round's own rate of torch.mm."""
    found = {f"{name}_ms": statistics.median(x[name] for x in rounds) for name in ("train", "step", "mm")}
    per_product = (
        6 * about["in_products"] * TOKENS / (2 * options.matrix**3)
    )  # products of a step, in those of torch.mm
    shares = sorted(per_product * x["mm"] / x["train"] for x in rounds)
    return (
        about
        | found
        | {
            "gflops_of_mm": 2 * options.matrix**3 / found["mm_ms"] / 1e6,
            "products_ms": per_product * found["mm_ms"],
            "share": statistics.median(shares),
            "share_min": shares[0],
            "share_max": shares[-1],
        }
    )


def by_part(operators: dict[str, float]) -> dict[str, float]:
    parts = dict.fromkeys([*PARTS, REST], 0.0)
    for name, ms in operators.items():
        parts[part_of(name)] += ms
    return parts


def part_of(operator: str) -> str:
    return next((part for part, names in PARTS.items() if any(x in operator for x in names)), REST)


def targets(found: dict[str, Any]) -> list[Target]:
    ratio = {"tarnn train": found[NOW]["share"]} if NOW in found else {}
    return [at_least(f"at least {SHARE:.0%} of a step are products at mm's rate", "measured", SHARE, ratio, "")]


def facts(options, found: dict[str, Any]) -> dict[str, Any]:
    return {"targets": [t.as_json() for t in targets(found)]}


def report(options, facts: dict[str, Any], found: dict[str, Any]) -> str:
    columns = list(found.values())
    rows = {
        "products of the linear layers, at mm's rate, ms": lambda x: f"{x['products_ms']:.1f}",
        "the model's step, ms": lambda x: f"{x['step_ms']:.1f}",
        "a step of tarnn train, ms": lambda x: f"{x['train_ms']:.1f}",
        "tokens per second of tarnn train": lambda x: f"{1000 * TOKENS / x['train_ms']:,.0f}",
        "products' share of it": lambda x: f"{x['share']:.0%} ({x['share_min']:.0%} … {x['share_max']:.0%})",
        "its time, divided by that of the first column": lambda x: f"{x['ratio']:.2f}",
        "its first step, s": lambda x: f"{x['first_step_s']:.1f}",
    }
    lines = [[name, *map(text, columns)] for name, text in rows.items()]
    parts = [[part, *(f"{x['parts_ms'][part]:.1f}" for x in columns)] for part in [*PARTS, REST]]
    size = f"{MODEL['hidden_size']} wide, {MODEL['layers']} layers of {MODEL['heads']} heads"
    how = (
        f"{size}, {columns[0]['parameters']:,} parameters, {MODEL['batch_size']} × {MODEL['context']} tokens, float32; "
        f"torch.mm {found[NOW]['gflops_of_mm']:.0f} GFLOP/s. Medians of {options.rounds} rounds in turns; shares and ratios are "
        "medians of those of each round."
    )
    return page(
        "Where a training step's time goes",
        source(facts, how),
        section(targets(found), UNCHECKED),
        markdown(["", *found], lines),
        "## By operator, ms per step",
        "The model's step as torch.profiler has it, whose own time is in it; Python between operators is not.",
        markdown(["part", *found], parts),
    )


if __name__ == "__main__":
    sys.exit(main())
