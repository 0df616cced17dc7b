"""Time and memory against length: figure 1 of "Transformers are RNNs", with slopes fitted in log-log.

    python experiments/time_memory.py           # some minutes on two cores
    python experiments/time_memory.py --quick

A training step (forward and backward) of one causal attention layer with its projections, lengths 2⁹ … 2¹⁶, the batch
shrinking as the length grows; time and peak memory per sample. Methods: linear; softmax as it was computed in 2020,
with its t × t matrix in memory; softmax by torch's fused kernel, which is as exact and keeps no such matrix. A method
drops out where the next length would take more time or memory than --patience and --room allow.

The paper measured on a GTX 1080 Ti and prints curves only, so it is the slopes that can be compared: in log-log, 1 is
linear in the length, 2 quadratic. Katharopoulos et al. 2020 (arXiv 2006.16236), section 4.1.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from output import markdown, write
from settings import as_facts, parser, resolve
from torch import Tensor, nn

from tarnn import Elu, LinearAttention, SoftmaxAttention

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from memory import peak_bytes  # what a call holds at most, as the benchmarks measure it

FULL = {
    "lengths": [2**n for n in range(9, 17)],
    "tokens": 2**14,
    "hidden": 256,
    "patience": 120.0,
    "rounds": 3,
}
QUICK = {"lengths": [2**n for n in range(6, 11)], "tokens": 2**10, "hidden": 32, "patience": 1.0, "rounds": 2}
COLORS = {"softmax, matrix": "#d55e00", "softmax, fused": "#e69f00", "linear": "#0072b2", "lsh": "#009e73"}


@dataclass(frozen=True)
class Cost:
    """Of one sample of `length` tokens: median milliseconds, least and most, peak bytes (None where nobody counts)."""

    length: int
    batch_size: int
    ms: float
    ms_min: float
    ms_max: float
    bytes: float | None


class MatrixAttention(SoftmaxAttention):
    """Softmax attention with its matrix of weights in memory, as every library had it in 2020."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.project(x, x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.merge(scores.masked_fill(future, -torch.inf).softmax(-1) @ v)


METHODS: dict[str, Callable[..., nn.Module]] = {
    "softmax, matrix": MatrixAttention,
    "softmax, fused": SoftmaxAttention,
    "linear": partial(LinearAttention, feature_map=Elu()),
}


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--lengths", type=int, nargs="+")
    made.add_argument("--tokens", type=int, help="in a batch, where a sample is not longer")
    made.add_argument("--hidden", type=int)
    made.add_argument("--patience", type=float, help="seconds that a step may take")
    made.add_argument("--rounds", type=int)
    made.add_argument("--heads", type=int, default=8)
    made.add_argument("--room", type=float, default=6.0, help="GiB that a step may hold")
    made.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = resolve(made, FULL, QUICK)
    costs = {method: measure(method, options) for method in options.methods}
    slopes = {method: slopes_of(points) for method, points in costs.items()}
    results = {method: [asdict(point) for point in points] for method, points in costs.items()}
    facts = {"settings": as_facts(options), "slopes": slopes, "results": results}
    files = write(options.out, "time_memory", facts, report(costs, slopes, options))
    plot(costs, options.out / "time_memory.png")
    print(*files, options.out / "time_memory.png", sep="\n")
    return 0


def measure(method: str, options) -> list[Cost]:
    """From the shortest length to the longest that a method can afford."""
    torch.manual_seed(0)
    layer = METHODS[method](options.hidden, options.heads, causal=True).to(options.device)
    costs: list[Cost] = []
    for length in options.lengths:
        if costs and (why := too_much(costs[-1], length, method, options)):
            print(f"{method:16} {length:7,}  left out: {why}", flush=True)
            break
        batch_size = max(1, options.tokens // length)
        x = torch.randn(batch_size, length, options.hidden, device=options.device, requires_grad=True)
        wanted = [x, *layer.parameters()]

        def step(x=x, wanted=wanted):
            return torch.autograd.grad(layer(x).square().mean(), wanted)

        times = sorted(timed(step, options.device) for _ in range(options.rounds + 1))[
            : options.rounds
        ]  # less the warm-up
        peak = peak_bytes(step, options.device)
        ms, least, most = (1000 * t / batch_size for t in (times[len(times) // 2], times[0], times[-1]))
        costs.append(Cost(length, batch_size, ms, least, most, None if peak is None else peak / batch_size))
        print(
            f"{method:16} {length:7,}  {ms:10.2f} ms  {(peak or 0) / batch_size / 2**20:9.1f} MiB a sample",
            flush=True,
        )
    return costs


def too_much(last: Cost, length: int, method: str, options) -> str:
    """Why a step at this length would take too long or too much memory, by the quadratic part's growth; or nothing."""
    growth = (length / last.length) ** (1 if method == "linear" else 2)
    batch = max(1, options.tokens // length)
    seconds = last.ms / 1000 * growth * batch
    if seconds > options.patience:
        return f"about {seconds:.0f} s a step"
    if method == "softmax, matrix" and last.bytes and last.bytes * growth * batch > options.room * 2**30:
        return f"about {last.bytes * growth * batch / 2**30:.0f} GiB a step"
    return ""


def timed(f: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    f()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def slopes_of(points: list[Cost]) -> dict[str, float | None]:
    """Exponents of time and memory in the length, fitted over the longer half of the lengths."""
    longer = points[len(points) // 2 - 1 :] if len(points) > 2 else points
    return {
        "time": slope([p.length for p in longer], [p.ms for p in longer]),
        "memory": slope([p.length for p in longer], [p.bytes for p in longer]),
        "from": longer[0].length,
        "to": longer[-1].length,
    }


def slope(x: list[int], y: list[float | None]) -> float | None:
    """Least squares of log y in log x; None for a single point or where a value is missing."""
    if len(x) < 2 or not all(y):
        return None
    a, b = torch.tensor(x).double().log(), torch.tensor(y).double().log()
    a, b = a - a.mean(), b - b.mean()
    return (a @ b / (a @ a)).item()


def report(costs: dict[str, list[Cost]], slopes, options) -> str:
    by = {method: {p.length: p for p in points} for method, points in costs.items()}

    def cells(show) -> list[list[str]]:
        return [
            [f"{t:,}", *(show(by[m][t]) if t in by[m] else "–" for m in costs)]
            for t in options.lengths
            if any(t in points for points in by.values())
        ]

    def fitted(what: str) -> list[str]:
        return ["slope", *("–" if slopes[m][what] is None else f"{slopes[m][what]:.2f}" for m in costs)]

    spans = "; ".join(f"{m}: {slopes[m]['from']:,} to {slopes[m]['to']:,}" for m in costs)
    times = [*cells(lambda p: f"{p.ms:,.2f}"), fitted("time")]
    sizes = [*cells(lambda p: "–" if p.bytes is None else f"{p.bytes / 2**20:,.1f}"), fitted("memory")]
    header = ["length", *costs]
    return (
        f"# A training step of causal attention against length\n\n{options.heads} heads, {options.hidden} wide, float32, "
        f"{options.device}, {options.threads} threads; a sample's share of a batch of {options.tokens:,} tokens. Slopes in "
        f"log-log over the longer half of the lengths ({spans}).\n\n"
        f"## Milliseconds a sample\n\n{markdown(header, times)}\n\n## Peak MiB a sample\n\n{markdown(header, sizes)}\n\n"
        "![time and memory against length](time_memory.png)\n"
    )


def plot(costs: dict[str, list[Cost]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained", dpi=150)
    time_axes, memory_axes = figure.subplots(1, 2)
    for method, points in costs.items():
        style = {"color": COLORS[method], "marker": ".", "label": method}
        time_axes.plot([p.length for p in points], [p.ms for p in points], **style)
        known = [p for p in points if p.bytes]
        memory_axes.plot([p.length for p in known], [p.bytes / 2**20 for p in known], **style)
    for axes, label in ((time_axes, "milliseconds a sample"), (memory_axes, "peak MiB a sample")):
        axes.set(xlabel="sequence length", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    time_axes.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
