"""Tables and a picture of what `attention.py` measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention_costs import Cell, Cost, Costs
from attention_targets import share_of_matmul
from targets import Target, summary, target_table

MIB = 2**20
NAMES = {"native": "tarnn, native", "chunked": "chunked PyTorch", "sdpa": "SDPA (softmax)"}
COLORS = {
    "native": "#0072b2", "chunked": "#56b4e9", "sdpa": "#d55e00", "fast-transformers": "#009e73",
    "performer": "#cc79a7",
}  # fmt: skip


def report(facts: dict[str, Any], costs: Costs, targets: Sequence[Target], chunk: int) -> str:
    """Markdown: what was run where, the targets, how flops are counted, all times, and what was left out."""
    heads, mm = facts["shape"]["heads"], facts["matmul_gflops"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    parts = [
        "# Attention: time and memory against length",
        f"`{facts['command']}`",
        f"{facts['machine']['cpu']}, {facts['threads']} threads; {versions}. "
        f"Batch {facts['shape']['batch_size']}, {heads} heads, e = d. Kernels: {facts['kernels']}. "
        "All rivals in one process, on the same inputs, in turns; times are medians of the rounds.",
        f"`torch.mm` of 2048³ in float32, once in every round at t ≥ 1,024: {mm['median']:.0f} GFLOP/s in the median "
        f"({mm['least']:.0f} – {mm['most']:.0f} over {mm['cells']} cells). A share is of the rate in the same rounds."
        if mm["cells"]
        else "`torch.mm` was not measured: no length of 1,024 or more.",
        f"## Targets of this benchmark: {summary(targets)}",
        target_table(targets),
        _arithmetic(chunk),
    ]
    for dtype in costs.dtypes:
        for causal in (True, False):
            cells = [c for c in costs.cells if c.causal == causal]
            if cells:
                parts += [
                    f"## {dtype}, {'causal' if causal else 'not causal'}",
                    table(costs, dtype, cells, heads, chunk),
                ]
    parts += ["## Left out", *_left_out(facts["absent"], costs.skipped)]
    return "\n\n".join(parts) + "\n"


def _arithmetic(chunk: int) -> str:
    return (
        f"Flops a token and head, with the kernel's chunk c = {chunk}: forward 4·d·e + c·(d + e), backward 10·d·e + 3c·(d + e); "
        "not causal, without c. Beside the share by that count stands the one without c (4·d·e, and "
        "14·d·e with backward). Extra memory is the peak of one call beyond inputs, outputs and gradients, "
        "scratch that the native kernels keep between calls included. "
        "A time with * is of one call."
    )


def table(costs: Costs, dtype: str, cells: Sequence[Cell], heads: int, chunk: int) -> str:
    """A row a cell: milliseconds a rival, how many times faster native is than each, share of torch.mm, memory."""
    rivals = costs.rivals
    others = [r for r in rivals if r != "native"]
    head = ["pass", "d", "t", *(f"{NAMES.get(r, r)} ms" for r in rivals)]
    if "native" in rivals:
        head += [*(f"{r} / native" for r in others), "native: share of mm", "without c"]
        head += [] if dtype == "float32" else [f"native float32 / {dtype}"]
    head += [f"{r} extra MiB" for r in rivals if r in ("native", "chunked", "sdpa")]
    rows = [f"| {' | '.join(head)} |", f"|---{'|--:' * (len(head) - 1)}|"]
    for cell in sorted(cells, key=lambda c: (c.backward, c.d, c.t)):
        found = {r: costs.get(r, dtype, cell) for r in rivals}
        if not any(found.values()):
            continue
        row = [cell.way, str(cell.d), f"{cell.t:,}", *(_ms(found[r]) for r in rivals)]
        if "native" in rivals:
            row += [_times(costs.ratio((r, dtype), ("native", dtype), cell)) for r in others]
            row += _shares(found["native"], heads, chunk)
            if dtype != "float32":
                row.append(_times(costs.ratio(("native", "float32"), ("native", dtype), cell)))
        row += [_mib(found[r]) for r in rivals if r in ("native", "chunked", "sdpa")]
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows)


def _ms(cost: Cost | None) -> str:
    if cost is None:
        return "–"
    return (f"{cost.ms:.3g}" if cost.ms < 100 else f"{cost.ms:,.0f}") + ("*" if cost.rounds == 1 else "")


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def _shares(cost: Cost | None, heads: int, chunk: int) -> list[str]:
    shares = (
        (None, None)
        if cost is None
        else (share_of_matmul(cost, heads, chunk), share_of_matmul(cost, heads, 0))
    )
    return ["–" if x is None else f"{x:.0%}" for x in shares]


def _mib(cost: Cost | None) -> str:
    return "–" if cost is None or cost.extra_bytes is None else f"{cost.extra_bytes / MIB:.2f}"


def _left_out(absent: dict[str, str], skipped: Sequence[dict]) -> list[str]:
    lines = [f"* {name}: {why}" for name, why in absent.items()]
    for s in skipped:
        cell = Cell(*(s[x] for x in Cell._fields))
        lines.append(f"* {s['rival']}, {s['dtype']}, {cell}, {cell.kind}: {s['why']}")
    return ["\n".join(lines)] if lines else ["Nothing."]


def plot(costs: Costs, path: Path, title: str, d: int) -> None:
    """Causal, width d: forward, forward + backward, and memory, against t; the first dtype solid, others dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained", dpi=150)
    panels = (
        ("forward", False, lambda c: c.ms, "milliseconds"),
        ("forward + backward", True, lambda c: c.ms, "milliseconds"),
        ("forward + backward", True, lambda c: (c.extra_bytes or 0) / MIB, "MiB beyond inputs and outputs"),
    )
    for axes, (way, backward, value, ylabel) in zip(figure.subplots(1, 3), panels):
        for rival in costs.rivals:
            for dtype in costs.dtypes:
                found = [c for c in costs.cells if (c.d, c.causal, c.backward) == (d, True, backward)]
                points = [c for cell in found if (c := costs.get(rival, dtype, cell)) and value(c) > 0]
                solid = dtype == costs.dtypes[0]
                axes.plot(
                    [c.cell.t for c in points], [value(c) for c in points], "-" if solid else "--",
                    color=COLORS.get(rival, "#999999"), marker=".", label=NAMES.get(rival, rival) if solid else None,
                )  # fmt: skip
        lengths = sorted({c.t for c in costs.cells})
        axes.set(xlabel="length t", ylabel=ylabel, title=way)
        if any(len(line.get_xdata()) for line in axes.lines):  # a logarithmic axis needs something on it
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(lengths, [f"{t // 1024}k" if t >= 1024 else str(t) for t in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False, fontsize="small")
    dashed = ", ".join(costs.dtypes[1:])
    figure.suptitle(
        f"causal attention, d = {d}; {title}" + (f"; dashed: {dashed}" if dashed else ""), fontsize="medium"
    )
    figure.savefig(path)
