"""What `favor.py` has to show: targets, tables and a picture; and how the arithmetic is counted.

Flops a token and head of the fused kernels, with chunk c, each multiplication and addition one (`attention_targets.py`,
with m for the width of the features, and their projection):

    forward       4·d·m + 4·m·e + c·(m + e)          features of q and k; into the state and out of it; within the chunk
    backward      8·d·m + 10·m·e + 3c·(m + e)        features again, and their gradients
    not causal    the same without c
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attention_costs import Cell, Cost, Costs
from targets import Target, at_least, at_most, summary, target_table

DTYPE = "float32"
KINDS = ("fused", "stored", "ready")
COLORS = {"fused": "#0072b2", "stored": "#56b4e9", "ready": "#009e73", "sdpa": "#d55e00"}
LABELS = {
    "fused": "tarnn", "stored": "features stored, chunked PyTorch", "ready": "native, features given",
    "sdpa": "SDPA (softmax)",
}  # fmt: skip
MIB = 2**20


def named(kind: str, m: int) -> str:
    return f"{kind}, m = {m}"


def targets(costs: Costs, features: Sequence[int]) -> list[Target]:
    """A case is a number of features, and causal or full."""
    found = []
    for m in features:
        fused, stored, ready = (named(kind, m) for kind in KINDS)
        for causal in (True, False):
            cells = [c for c in costs.cells if c.causal == causal]
            case = f"m = {m}, {'causal' if causal else 'full'}"
            for backward in (False, True):
                way = "forward + backward" if backward else "forward"
                of = [c for c in cells if c.backward == backward]
                faster = _ratios(costs, of, stored, fused, _ms)
                slower = _ratios(costs, of, fused, ready, _ms)
                memory = _ratios(costs, of, fused, stored, _extra)
                found += [
                    at_least(f"{way}: at least 5 times faster than with stored features", case, 5, faster),
                    at_most(f"{way}: at most a tenth of its extra memory", case, 0.1, memory, "%"),
                    at_most(f"{way}: at most 2 times as long as with features ready made", case, 2, slower),
                ]
    return found


def _ratios(
    costs: Costs, cells: Sequence[Cell], over: str, under: str, value: Callable[[Cost], float | None]
):
    """By length, where both are known and above zero."""
    found = {}
    for cell in cells:
        pair = [costs.get(name, DTYPE, cell) for name in (over, under)]
        above, below = (value(x) if x else None for x in pair)
        if above is not None and below:
            found[f"t = {cell.t:,}"] = above / below
    return found


def _ms(cost: Cost) -> float:
    return cost.ms


def _extra(cost: Cost) -> int | None:
    return cost.extra_bytes


def flops(cell: Cell, m: int, heads: int, chunk: int) -> int:
    """Of one call, with e = d."""
    within = min(chunk, cell.t) * (m + cell.d) if cell.causal else 0
    each = 8 * cell.d * m + within
    if cell.backward:
        each += 18 * cell.d * m + 3 * within
    return each * cell.t * heads


def report(facts: dict[str, Any], costs: Costs, judged: Sequence[Target]) -> str:
    """Markdown: what was run where, the targets, and a table a number of features."""
    d = facts["head_dim"]
    parts = [
        "# Random features within the kernels",
        f"`{facts['command']}`",
        f"{facts['machine']['cpu']}, {facts['threads']} threads; torch {facts['versions']['torch']}. FAVOR+ attention, "
        f"{facts['heads']} heads, d = e = {d}, batch 1, float32. Kernels: {facts['kernels']}. All in one process, on the "
        "same inputs, in turns; times are medians of the rounds, with * of one call.",
        "fused: `linear_attention(q, k, v, PositiveRandomFeatures(d, m))`. stored: φ(q), φ(k) by the module under "
        "autograd, then linear attention in chunked PyTorch. ready: the native kernels, given φ(q), φ(k) that were made "
        "before. Extra memory is the peak of one call beyond inputs, outputs and gradients. Share of mm: of the rate that "
        "`torch.mm` of 2048³ had in the same rounds, by the flops that the fused kernels do: "
        f"forward 8·d·m + c·(m + d) a token and head, backward 18·d·m + 3c·(m + d), c = {facts['chunk']}, not causal "
        "without c.",
        f"## Targets of this benchmark: {summary(judged)}",
        target_table(judged),
    ]
    for m in facts["features"]:
        for causal in (True, False):
            cells = [c for c in costs.cells if c.causal == causal]
            if cells:
                parts += [
                    f"## m = {m}, {'causal' if causal else 'not causal'}",
                    table(costs, m, cells, facts["heads"], facts["chunk"]),
                ]
    left_out = []
    for s in costs.skipped:
        cell = Cell(*(s[x] for x in Cell._fields))
        left_out.append(f"* {s['rival']}, {cell}, {cell.kind}: {s['why']}")
    return "\n\n".join([*parts, "## Left out", "\n".join(left_out) or "Nothing."]) + "\n"


def table(costs: Costs, m: int, cells: Sequence[Cell], heads: int, chunk: int) -> str:
    """A row a pass and length."""
    names = [*(named(kind, m) for kind in KINDS), "sdpa"]
    head = [
        "pass", "t", *(f"{kind}, ms" for kind in (*KINDS, "sdpa")), "stored / fused", "fused / ready", "sdpa / fused",
        "fused: share of mm", "stored: the same", *(f"{kind}, extra MiB" for kind in (*KINDS, "sdpa")), "fused / stored",
    ]  # fmt: skip
    rows = [f"| {' | '.join(head)} |", f"|---{'|--:' * (len(head) - 1)}|"]
    for cell in sorted(cells, key=lambda c: (c.backward, c.t)):
        fused, stored, ready, sdpa = found = [costs.get(name, DTYPE, cell) for name in names]
        row = [cell.way, f"{cell.t:,}", *map(_time, found)]
        row += [_times(over, under) for over, under in ((stored, fused), (fused, ready), (sdpa, fused))]
        row += [_share(x, flops(cell, m, heads, chunk)) for x in (fused, stored)]
        row += [_mib(x) for x in found]
        row.append(f"{fused.extra_bytes / stored.extra_bytes:.1%}" if _both(fused, stored) else "–")
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows)


def _share(cost: Cost | None, flops: int) -> str:
    return f"{flops / cost.ms / 1e6 / cost.mm_gflops:.0%}" if cost and cost.mm_gflops else "–"


def _both(x: Cost | None, y: Cost | None) -> bool:
    return bool(x and y and x.extra_bytes is not None and y.extra_bytes)


def _time(cost: Cost | None) -> str:
    if cost is None:
        return "–"
    return (f"{cost.ms:.3g}" if cost.ms < 100 else f"{cost.ms:,.0f}") + ("*" if cost.rounds == 1 else "")


def _times(over: Cost | None, under: Cost | None) -> str:
    return f"{over.ms / under.ms:.2f}" if over and under else "–"


def _mib(cost: Cost | None) -> str:
    return "–" if cost is None or cost.extra_bytes is None else f"{cost.extra_bytes / MIB:,.1f}"


def plot(costs: Costs, features: Sequence[int], path: Path, title: str) -> None:
    """Causal: forward, forward + backward, and memory, against t; the most features solid, fewer dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained", dpi=150)
    panels = (
        ("forward", False, _ms, "milliseconds"),
        ("forward + backward", True, _ms, "milliseconds"),
        ("forward + backward", True, lambda x: (x.extra_bytes or 0) / MIB, "MiB beyond inputs and outputs"),
    )
    causal = True in {c.causal for c in costs.cells}  # full, where nothing else was measured
    lines = [(k, named(k, m), "-" if m == max(features) else "--") for m in features for k in KINDS]
    lengths = sorted({c.t for c in costs.cells})
    for axes, (way, backward, value, ylabel) in zip(figure.subplots(1, 3), panels):
        cells = [c for c in costs.cells if (c.causal, c.backward) == (causal, backward)]
        for kind, name, style in (*lines, ("sdpa", "sdpa", "-")):
            points = [(c.t, value(x)) for c in cells if (x := costs.get(name, DTYPE, c)) and value(x)]
            if points:
                label = LABELS[kind] if style == "-" else None
                axes.plot(*zip(*points), style, color=COLORS[kind], marker=".", label=label)
        axes.set(xlabel="length t", ylabel=ylabel, title=way)
        if axes.lines:  # a logarithmic axis needs something on it
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(lengths, [f"{t // 1024}k" if t >= 1024 else str(t) for t in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False, fontsize="small")
    fewer = "".join(f"; dashed: m = {m}" for m in features if m != max(features))
    kind = "causal" if causal else "not causal"
    figure.suptitle(f"FAVOR+ attention, {kind}, m = {max(features)}; {title}{fewer}", fontsize="medium")
    figure.savefig(path)
