"""Time and memory of attention against length: linear, torch's SDPA, and linear attention written quadratically.

    python benchmarks/attention.py         # about ten minutes; writes benchmarks/results/attention.{json,png}

The claim: linear attention's time and memory grow as t, softmax's time as t². Forward, and forward with
backward; causal and not; the same inputs for all, in one process. Correctness is checked first, and nothing
is measured if that fails. Time is the median of the rounds; memory is the peak above what was there before
the call, outputs and gradients included. Where tarnn loses is in the table too.
"""

import argparse
import ctypes
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from provenance import provenance, total_memory
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tarnn import Elu, linear_attention
from tarnn.ops import reference

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
ROUNDS, SECONDS_A_ROUND = 7, 0.1
SLOW = 1.0  # seconds a call, from which on three rounds do
ROOM = 0.2  # of the memory of the machine, at most, for what the quadratic form writes
PHI = Elu()


def quadratic(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Linear attention as its definition reads: a (t × t) matrix of weights."""
    weights = PHI(q) @ PHI(k).mT
    weights = weights.tril() if causal else weights
    return weights @ v / weights.sum(-1, keepdim=True)


RIVALS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda q, k, v, causal: linear_attention(q, k, v, PHI, causal=causal),
    "sdpa": lambda q, k, v, causal: scaled_dot_product_attention(q, k, v, is_causal=causal),
    "quadratic": quadratic,
}
QUADRATIC_COPIES = {"quadratic": 5}  # how many (t × t) matrices it holds at once in a training step


@dataclass(frozen=True)
class Cost:
    """Median, least and most milliseconds a call, and peak bytes above what was there before."""

    t: int
    ms: float
    ms_min: float
    ms_max: float
    rounds: int
    peak_bytes: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, help="torch's own choice by default")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if wrong := check(options.device):
        print(f"the check is red, so nothing is measured: {wrong}", file=sys.stderr)
        return 1
    peak = matmul_rate(options)
    print(f"torch.mm, 2048³, {options.dtype}: {peak:.1f} GFLOP/s")
    costs, skipped = measure(options)
    report = table(costs, options, peak)
    print(report)
    settings = {k: v for k, v in vars(options).items() if k != "out"}
    facts = {**provenance(), "settings": settings, "matmul_gflops": peak, "skipped": skipped}
    write(options, facts, costs, report)
    return 0


def check(device: str) -> str:
    """What is wrong with the op, or nothing: output and gradients against the definition in float64."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 201, 8, device=device).double().requires_grad_() for _ in range(3))
    for causal in (True, False):
        o = linear_attention(q, k, v, PHI, causal=causal)
        expected = reference.quadratic(PHI(q), PHI(k), v, causal=causal)
        grads = torch.autograd.grad(o.square().sum(), (q, k, v))
        for x, y in zip((o, *grads), (expected, *torch.autograd.grad(expected.square().sum(), (q, k, v)))):
            if not torch.allclose(x, y, rtol=1e-9, atol=1e-11):
                return f"causal={causal}: off the definition by {(x - y).abs().max():.1e}"
    return ""


def measure(options) -> tuple[dict[str, list[Cost]], list[dict]]:
    """Costs by "rival, causal or full, forward or both", each printed as soon as it is known."""
    costs: dict[str, list[Cost]] = {}
    skipped = []
    for t in options.lengths:
        shape = (options.batch_size, options.heads, t, options.head_dim)
        make = lambda: torch.randn(shape, device=options.device).to(getattr(torch, options.dtype))  # noqa: E731, B023
        q, k, v, grad = make(), make(), make(), make()
        for causal in (True, False):
            for backward in (False, True):
                for rival, f in RIVALS.items():
                    name = f"{rival}, {'causal' if causal else 'full'}, {'both' if backward else 'forward'}"
                    needed = (
                        QUADRATIC_COPIES.get(rival, 0)
                        * options.batch_size
                        * options.heads
                        * t
                        * t
                        * q.itemsize
                    )
                    if needed > ROOM * total_memory():
                        skipped.append({"series": name, "t": t, "bytes": needed})
                        continue
                    cost = measure_one(call(f, q, k, v, grad, causal, backward), t, options)
                    costs.setdefault(name, []).append(cost)
                    print(f"{name:28}{t:8,}{cost.ms:11.2f} ms{cost.peak_bytes / 2**20:10.1f} MiB", flush=True)
    return costs, skipped


def call(f, q, k, v, grad, causal: bool, backward: bool) -> Callable[[], object]:
    if not backward:
        return lambda: f(q, k, v, causal)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return lambda: torch.autograd.grad(f(q, k, v, causal), (q, k, v), grad)


def measure_one(f: Callable[[], object], t: int, options) -> Cost:
    cuda = options.device.startswith("cuda")
    seconds = timed(f, 1, cuda)  # the warm-up
    rounds = options.rounds if seconds < SLOW else min(3, options.rounds)
    calls = max(1, min(100, int(SECONDS_A_ROUND / seconds)))
    times = [1000 * timed(f, calls, cuda) for _ in range(rounds)]
    peak = peak_bytes_cuda(f) if cuda else peak_bytes(f)
    return Cost(t, statistics.median(times), min(times), max(times), rounds, peak)


def timed(f: Callable[[], object], calls: int, cuda: bool) -> float:
    """Seconds a call."""
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        f()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def peak_bytes(f: Callable[[], object]) -> int:
    """Linux counts the most memory that a process has held; here from a fresh mark to the end of one call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # so that what was freed before does not hide what is taken now
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    result = f()
    peak = status("VmHWM")
    del result
    return max(0, peak - before)


def status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def peak_bytes_cuda(f: Callable[[], object]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    return torch.cuda.max_memory_allocated() - before


def matmul_rate(options, n: int = 2048) -> float:
    """GFLOP/s of one large product: what the machine can do at best with this dtype."""
    x = torch.randn(n, n, device=options.device).to(getattr(torch, options.dtype))
    cuda = options.device.startswith("cuda")
    timed(lambda: x @ x, 2, cuda)
    return 2 * n**3 / min(timed(lambda: x @ x, 3, cuda) for _ in range(5)) / 1e9


def table(costs: dict[str, list[Cost]], options, peak: float) -> str:
    """Markdown: a row a length and pass; the share of the machine's rate counts 4·d·e flops a token and head."""
    by = {name: {c.t: c for c in points} for name, points in costs.items()}
    rows = [
        "| causal | pass | t | linear ms | SDPA ms | quadratic ms | SDPA / linear | linear MiB | SDPA MiB | share of mm |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in ("causal", "full"):
        for way, flops in (("forward", 4), ("both", 12)):
            for t in options.lengths:
                linear, sdpa, plain = (by.get(f"{r}, {kind}, {way}", {}).get(t) for r in RIVALS)
                rate = flops * options.head_dim**2 * t * options.heads * options.batch_size / linear.ms / 1e6
                rows.append(
                    f"| {'yes' if kind == 'causal' else 'no'} | {way} | {t:,} | {linear.ms:.2f} | {sdpa.ms:.2f} | "
                    f"{'–' if plain is None else f'{plain.ms:.2f}'} | {sdpa.ms / linear.ms:.2f} | "
                    f"{linear.peak_bytes / 2**20:.1f} | {sdpa.peak_bytes / 2**20:.1f} | {rate / peak:.0%} |"
                )
    return "\n".join(rows)


def write(options, facts: dict, costs: dict[str, list[Cost]], report: str) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    results = {name: [asdict(c) for c in points] for name, points in costs.items()}
    (options.out / "attention.json").write_text(json.dumps({**facts, "results": results}, indent=2) + "\n")
    title = f"{options.heads} heads of {options.head_dim}, {options.dtype}; {facts['machine']['cpu']}, {facts['threads']} threads"
    heading = f"# Attention: time and memory against length\n\n`{facts['command']}`\n\n{title}; torch {torch.__version__}.\n"
    heading += f"`torch.mm` of 2048³: {facts['matmul_gflops']:.0f} GFLOP/s. Full facts: `attention.json`.\n\n"
    (options.out / "attention.md").write_text(heading + report + "\n")
    plot(costs, options.out / "attention.png", title)
    print(*(options.out / f"attention.{x}" for x in ("json", "md", "png")), sep="\n")


def plot(costs: dict[str, list[Cost]], path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    colors = {"linear": "#0072b2", "sdpa": "#d55e00", "quadratic": "#999999"}
    labels = {
        "linear": "tarnn, linear",
        "sdpa": "softmax (torch SDPA)",
        "quadratic": "linear, written quadratically",
    }
    figure = Figure(figsize=(9, 3.8), layout="constrained", dpi=150)
    for axes, value, ylabel in zip(
        figure.subplots(1, 2),
        (lambda c: c.ms, lambda c: c.peak_bytes / 2**20),
        ("milliseconds", "peak MiB"),
        strict=True,
    ):
        for rival, color in colors.items():
            for way, style in (("forward", "--"), ("both", "-")):
                points = costs.get(f"{rival}, causal, {way}", [])
                label = labels[rival] if way == "both" else None
                axes.plot(
                    [c.t for c in points],
                    [value(c) for c in points],
                    style,
                    color=color,
                    marker=".",
                    label=label,
                )
        axes.set(xscale="log", yscale="log", xlabel="length t", ylabel=ylabel)
        axes.set_xticks(LENGTHS, [f"{t / 1024:g}k" for t in LENGTHS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].legend(
        frameon=False, fontsize="small", title="solid: with backward; dashed: forward", title_fontsize="small"
    )
    figure.suptitle(f"causal attention: {title}", fontsize="medium")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
