"""Tables and pictures of what `attention.py` measured."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripts.common.plots import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, label, line, panels
from scripts.common.tables import MIB, bullets, markdown, mebibytes, milliseconds, page, ratio, source
from scripts.common.targets import section
from toolkit.attention_cells import COLD_FROM, SIDE_BY_SIDE, Cell, Cost, Costs
from toolkit.attention_targets import DROPPED, flops, targets
from toolkit.baselines import COMPILED, EXPERT

NAMES = {
    "native": "tarnn, native",
    "chunked": "tarnn in plain PyTorch",
    "specialised": "specialised PyTorch",
    EXPERT: "specialised PyTorch, fast products",
    COMPILED: "specialised PyTorch, torch.compile",
    "sdpa": "SDPA (softmax)",
}
PLAIN = "chunked", "specialised", EXPERT, COMPILED  # linear attention in PyTorch, without kernels of ours
COLORS = {
    "native": BLUE,
    "chunked": SKY,
    "specialised": ORANGE,
    COMPILED: GREY,
    "sdpa": RED,
    "fast-transformers": GREEN,
    "performer": PINK,
}


def report(options, facts: dict[str, Any], costs: Costs) -> str:
    """Markdown: what was run where, the targets, how flops are counted, all times, and what was left out."""
    mm, peak = facts["matmul_gflops"], facts["peak_gflops"]
    speed = "`torch.mm` was not measured: no length of 1,024 or more."
    if mm["cells"]:
        speed = (
            f"`torch.mm` of 2048³ in float32, once in every round at t ≥ 1,024: {mm['median']:.0f} GFLOP/s in the median "
            f"({mm['least']:.0f} – {mm['most']:.0f} over {mm['cells']} cells). A share is of the rate in the same rounds."
        )
    if peak["cells"]:
        speed += (
            f" A loop of multiply–adds in registers, in the same rounds: {peak['median']:.0f} GFLOP/s ({peak['least']:.0f} – "
            f"{peak['most']:.0f})."
        )
    how = (
        f"Batch {options.batch_size}, {options.heads} heads, e = d. All methods in one process, on the same inputs, in "
        "turns; times are medians of the rounds."
    )
    return page(
        "Attention: time and memory against length",
        source(facts, how),
        speed,
        section(targets(costs, options.heads, facts["threads"])),
        DROPPED,
        ARITHMETIC,
        *by_case(costs, costs.dtypes, lambda dtype, cells: table(costs, dtype, cells, options.heads)),
        *places(costs, options.heads),
        "## Left out",
        bullets(costs.left_out()),
    )


def places(costs: Costs, heads: int) -> list[str]:
    """A section on how inputs lie and whether they come from memory, where that was measured."""
    if all(c.plain for c in costs.cells):
        return []
    rows = []
    for cell in sorted(costs.cells, key=lambda c: (not c.causal, c.backward, c.d, c.t, c.cold, c.layout)):
        native, specialised = (costs.get(x, "float32", cell) for x in ("native", "specialised"))
        if native is None or not (cell.cold or cell.layout == SIDE_BY_SIDE or cell.t < COLD_FROM):
            continue
        first = native.heads_first_ms
        row = [cell.kind, cell.way, cell.d, f"{cell.t:,}", "cold" if cell.cold else "warm", cell.layout]
        row += [
            milliseconds(native),
            f"{native.ms / first:.2f}" if first else None,
            milliseconds(specialised),
            ratio(specialised, native),
        ]
        rows.append([*row, *shares(native, flops(cell, heads))])
    head = ["", "pass", "d", "t", "caches", "layout", "native ms", "against heads-first", "specialised ms"]
    about = (
        "float32. heads-first is (b, h, t, d) contiguous; side-by-side is a view of (b, t, h·d), which is what a projection "
        "gives. Warm, all calls have the same inputs; cold, each has inputs that no cache holds. Against "
        "heads-first: the same call in that layout, in the same rounds."
    )
    return [
        "## Layouts, and inputs from memory",
        about,
        markdown([*head, "specialised / native", "share of mm", "share of peak"], rows),
    ]


def by_case(costs: Costs, names: Sequence[Any], table: Callable[[Any, list[Cell]], str]) -> list[str]:
    """A section for each of `names`, causal and not."""
    parts = []
    for name in names:
        for causal in (True, False):
            if cells := [c for c in costs.cells if c.causal == causal and c.plain]:
                parts += [f"## {name}, {'causal' if causal else 'not causal'}", table(name, cells)]
    return parts


ARITHMETIC = (
    "Flops per token and head: forward 4·d·e, backward 12·d·e; not causal 10·d·e. (In bfloat16 some processors go by chunks, "
    "which is more; it is counted the same.) Extra memory is the peak of one call beyond inputs, outputs and gradients, "
    "scratch that the native kernels keep between calls included. A time with * is of one call."
)


def table(costs: Costs, dtype: str, cells: Sequence[Cell], heads: int) -> str:
    """A row a cell: milliseconds of each method, how many times faster native is than each, share of torch.mm, memory."""
    methods = costs.methods
    others = [m for m in methods if m != "native"]
    weighed = [m for m in methods if m in ("native", "chunked", "sdpa")]
    head = ["pass", "d", "t", *(f"{NAMES.get(m, m)} ms" for m in methods)]
    if "native" in methods:
        head += [
            *(f"{m} / native" for m in others),
            "best of plain PyTorch / native",
            "native: share of mm",
            "share of peak",
        ]
        head += [] if dtype == "float32" else [f"native float32 / {dtype}"]
    rows = []
    for cell in sorted(cells, key=lambda c: (c.backward, c.d, c.t)):
        found = {m: costs.get(m, dtype, cell) for m in methods}
        if not any(found.values()):
            continue
        row = [cell.way, cell.d, f"{cell.t:,}", *map(milliseconds, found.values())]
        if "native" in methods:
            native = found["native"]
            row += [ratio(found[m], native) for m in others]
            row.append(ratio(min((x for m in PLAIN if (x := found.get(m))), key=lambda x: x.ms, default=None), native))
            row += shares(native, flops(cell, heads))
            row += [] if dtype == "float32" else [ratio(costs.get("native", "float32", cell), native)]
        rows.append([*row, *(extra(found[m]) for m in weighed)])
    return markdown([*head, *(f"{m} extra MiB" for m in weighed)], rows)


def shares(cost: Cost | None, flops: int) -> list[str | None]:
    """Of torch.mm's rate, and of that of multiply–adds."""
    parts = (cost.share_of_matmul(flops), cost.share_of_peak(flops)) if cost else (None, None)
    return [f"{part:.0%}" if part else None for part in parts]


def extra(cost: Cost | None, digits: int = 2) -> str | None:
    return cost and mebibytes(cost.extra_bytes, digits)


def figure(options, facts: dict[str, Any], costs: Costs):
    """Draw causal attention of one width in the first dtype; the tables have the others."""
    widths = {c.d for c in costs.cells}
    d = 64 if 64 in widths else min(widths)
    dtype = costs.dtypes[0]
    lines = {(x, dtype): (COLORS.get(x, GREY), NAMES.get(x, x)) for x in costs.methods}
    on = f"{facts['machine']['cpu']}, {facts['threads']} threads"
    title = f"causal attention in {dtype}, d = {d}, {options.heads} heads; {on}"
    return cost_figure(costs, lines, [c for c in costs.cells if c.d == d and c.plain], title)


def cost_figure(
    costs: Costs, lines: Mapping[tuple[str, str], tuple[str, str | None]], cells: Sequence[Cell], title: str
) -> Any:
    """Forward, forward + backward, and memory against t, causal where that was measured.

    lines: (method, dtype) → (style, label).
    """
    causal = any(c.causal for c in cells)
    made, axes_of = panels(3, title, width=4)
    for axes, backward, memory in zip(axes_of, (False, True, True), (False, False, True)):
        wanted = [c for c in cells if (c.causal, c.backward) == (causal, backward)]
        for (method, dtype), (style, name) in lines.items():
            found = [(c.t, x) for c in wanted if (x := costs.get(method, dtype, c))]
            line(axes, ((t, (x.extra_bytes or 0) / MIB if memory else x.ms) for t, x in found), style, name)
        label(
            axes,
            "length t",
            "MiB beyond inputs and outputs" if memory else "milliseconds",
            title="forward + backward" if backward else "forward",
            ticks=sorted({c.t for c in costs.cells}),
        )
    return made
