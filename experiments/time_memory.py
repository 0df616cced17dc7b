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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.clock import seconds_of
from scripts.common.memory import peak_bytes
from scripts.common.options import parse
from scripts.common.plots import BLUE, ORANGE, RED, label, line, panels
from scripts.common.results import run
from scripts.common.tables import MIB, markdown, page
from tarnn import Elu, LinearAttention, SoftmaxAttention

COLORS = {"softmax, matrix": RED, "softmax, fused": ORANGE, "linear": BLUE}
FULL = {
    "lengths": [2**n for n in range(9, 17)],
    "tokens": 2**14,
    "hidden": 256,
    "patience": 120.0,
    "rounds": 3,
    "heads": 8,
    "room": 6.0,
    "methods": list(COLORS),
    "device": "cuda" if torch.cuda.is_available() else "cpu",
}
QUICK = {"lengths": [2**n for n in range(6, 11)], "tokens": 2**10, "hidden": 32, "patience": 1.0, "rounds": 2}
ABOUT = {
    "tokens": "in a batch, where a sample is not longer",
    "patience": "seconds that a step may take",
    "room": "GiB that a step may hold",
}


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
        return self.merge(scores.masked_fill(future, -torch.inf).softmax(-1) @ v, v.dtype)


METHODS: dict[str, Callable[..., nn.Module]] = {
    "softmax, matrix": MatrixAttention,
    "softmax, fused": SoftmaxAttention,
    "linear": partial(LinearAttention, feature_map=Elu()),
}


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, choices={"methods": list(COLORS)}, about=ABOUT)
    return run(options, measure, facts=lambda options, costs: {"slopes": slopes(costs)}, report=report, figure=figure)


def measure(options, costs: dict[str, list[Cost]], keep) -> None:
    for method in options.methods:
        costs[method] = costs_of(method, options)
        keep()


def costs_of(method: str, options) -> list[Cost]:
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

        times = sorted(seconds_of(step, 1, options.device) for _ in range(options.rounds + 1))[:-1]  # less the warm-up
        peak = peak_bytes(step, options.device)
        ms, least, most = (1000 * t / batch_size for t in (times[len(times) // 2], times[0], times[-1]))
        costs.append(Cost(length, batch_size, ms, least, most, None if peak is None else peak / batch_size))
        print(
            f"{method:16} {length:7,}  {ms:10.2f} ms  {(peak or 0) / batch_size / 2**20:9.1f} MiB a sample", flush=True
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


def slopes(costs: dict[str, list[Cost]]) -> dict[str, dict[str, float | None]]:
    return {method: slopes_of(points) for method, points in costs.items() if points}


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


def report(options, facts, costs: dict[str, list[Cost]]) -> str:
    slopes = facts["slopes"]
    by = {method: {p.length: p for p in points} for method, points in costs.items()}

    def table(what: str, show: Callable[[Cost], float | None], digits: int) -> str:
        known = {m: {t: show(p) for t, p in points.items()} for m, points in by.items()}
        rows = [
            [f"{t:,}", *(None if (x := known[m].get(t)) is None else f"{x:,.{digits}f}" for m in costs)]
            for t in options.lengths
        ]
        fitted = [None if slopes[m][what] is None else f"{slopes[m][what]:.2f}" for m in costs]
        return markdown(["length", *costs], [*(row for row in rows if any(row[1:])), ["slope", *fitted]])

    spans = "; ".join(f"{m}: {slopes[m]['from']:,} to {slopes[m]['to']:,}" for m in costs)
    return page(
        "A training step of causal attention against length",
        f"{options.heads} heads, {options.hidden} wide, float32, {options.device}, {options.threads} threads; a sample's "
        f"share of a batch of {options.tokens:,} tokens. Slopes in log-log over the longer half of the lengths ({spans}).",
        "## Milliseconds per sample",
        table("time", lambda p: p.ms, 2),
        "## Peak MiB per sample",
        table("memory", lambda p: p.bytes and p.bytes / MIB, 1),
        "![milliseconds and peak memory per sample against sequence length](time_memory.png)",
    )


def figure(options, facts, costs: dict[str, list[Cost]]):
    made, axes = panels(2)
    for method, points in costs.items():
        line(axes[0], ((p.length, p.ms) for p in points), COLORS[method], method)
        line(axes[1], ((p.length, p.bytes and p.bytes / MIB) for p in points), COLORS[method], method)
    label(axes[0], "sequence length", "milliseconds per sample", ticks=options.lengths)
    label(axes[1], "sequence length", "peak MiB per sample", ticks=options.lengths)
    return made


if __name__ == "__main__":
    sys.exit(main())
