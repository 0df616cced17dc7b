"""What `favor.py` has to show: targets, tables and a picture; and how the arithmetic is counted.

Flops a token and head of the fused kernels, with chunk c, each multiplication and addition one (`attention_targets.py`,
with m for the width of the features, and their projection):

    forward       4·d·m + 4·m·e + c·(m + e)          features of q and k; into the state and out of it; within the chunk
    backward      8·d·m + 10·m·e + c·(3m + 2e)       features again, and their gradients; the states once more
    not causal    forward without c, backward 8·d·m + 8·m·e
"""

from collections.abc import Sequence
from typing import Any

from scripts.common.plots import BLUE, GREEN, RED, SKY
from scripts.common.tables import bullets, markdown, milliseconds, page, ratio, source
from scripts.common.targets import Target, at_least, at_most, section
from toolkit.attention_cells import Cell, Cost, Costs
from toolkit.attention_report import by_case, cost_figure, extra, shares

DTYPE = "float32"
KINDS = ("fused", "stored", "ready")
COLORS = {"fused": BLUE, "stored": SKY, "ready": GREEN, "sdpa": RED}
LABELS = {
    "fused": "tarnn",
    "stored": "features stored, chunked PyTorch",
    "ready": "native, features given",
    "sdpa": "SDPA (softmax)",
}


def named(kind: str, m: int) -> str:
    return f"{kind}, m = {m}"


def targets(costs: Costs, features: Sequence[int]) -> list[Target]:
    """A case is a number of features, and causal or full."""
    found = []
    for m in features:
        fused, stored, ready = ((named(kind, m), DTYPE) for kind in KINDS)
        for causal in (True, False):
            cells = [c for c in costs.cells if c.causal == causal]
            case = f"m = {m}, {'causal' if causal else 'full'}"
            for backward in (False, True):
                way = "forward + backward" if backward else "forward"
                of = [c for c in cells if c.backward == backward]
                faster = costs.ratios(stored, fused, of)
                slower = costs.ratios(fused, ready, of)
                memory = costs.ratios(fused, stored, of, lambda cost: cost.extra_bytes)
                found += [
                    at_least(f"{way}: at least 5 times faster than with stored features", case, 5, faster),
                    at_most(f"{way}: at most a tenth of its extra memory", case, 0.1, memory, "%"),
                    at_most(f"{way}: at most 2 times as long as with features ready made", case, 2, slower),
                ]
    return found


def flops(cell: Cell, m: int, heads: int, chunk: int) -> int:
    """Of one call, with e = d."""
    within = min(chunk, cell.t) if cell.causal else 0
    each = 8 * cell.d * m + within * (m + cell.d)
    if cell.backward:
        each += (18 if cell.causal else 16) * cell.d * m + within * (3 * m + 2 * cell.d)
    return each * cell.t * heads


def report(options, facts: dict[str, Any], costs: Costs) -> str:
    """Markdown: what was run where, the targets, and a table for each number of features."""
    how = (
        f"FAVOR+ attention, {options.heads} heads, d = e = {options.head_dim}, batch 1, float32. All in one process, on the "
        "same inputs, in turns; times are medians of the rounds, with * of one call."
    )
    what = (
        "fused: `linear_attention(q, k, v, PositiveRandomFeatures(d, m))`. stored: φ(q), φ(k) by the module under "
        "autograd, then linear attention in chunked PyTorch. ready: the native kernels, given φ(q), φ(k) that were made "
        "before. Extra memory is the peak of one call beyond inputs, outputs and gradients. Share of mm: of the rate that "
        "`torch.mm` of 2048³ had in the same rounds, by the flops that the fused kernels do: "
        f"forward 8·d·m + c·(m + d) per token and head, backward 18·d·m + c·(3m + 2d), c = {facts['chunk']}, not causal "
        "without c and with 16·d·m. At most: how many times faster than stored the fused kernels would be at mm's rate."
    )
    names = {f"m = {m}": m for m in options.features}
    return page(
        "Random features within the kernels",
        source(facts, how),
        what,
        section(targets(costs, options.features)),
        *by_case(
            costs, list(names), lambda name, cells: table(costs, names[name], cells, options.heads, facts["chunk"])
        ),
        "## Left out",
        bullets(costs.left_out()),
    )


def table(costs: Costs, m: int, cells: Sequence[Cell], heads: int, chunk: int) -> str:
    """A row for each pass and length."""
    names = [*(named(kind, m) for kind in KINDS), "sdpa"]
    head = [
        "pass",
        "t",
        *(f"{kind}, ms" for kind in (*KINDS, "sdpa")),
        "stored / fused",
        "at most",
        "fused / ready",
        "sdpa / fused",
        "fused: share of mm",
        "stored: the same",
        *(f"{kind}, extra MiB" for kind in (*KINDS, "sdpa")),
        "fused / stored",
    ]
    rows = []
    for cell in sorted(cells, key=lambda c: (c.backward, c.t)):
        fused, stored, ready, sdpa = found = [costs.get(name, DTYPE, cell) for name in names]
        row = [cell.way, f"{cell.t:,}", *map(milliseconds, found)]
        count = flops(cell, m, heads, chunk)
        most = stored and stored.share_of_matmul(count)
        row += [ratio(stored, fused), f"{1 / most:.2f}" if most else None, ratio(fused, ready), ratio(sdpa, fused)]
        row += [shares(x, count)[0] for x in (fused, stored)]
        rows.append([*row, *(extra(x, 1) for x in found), _part(fused, stored)])
    return markdown(head, rows)


def _part(x: Cost | None, y: Cost | None) -> str | None:
    """Of the other's extra memory."""
    known = x and y and x.extra_bytes is not None and y.extra_bytes
    return f"{x.extra_bytes / y.extra_bytes:.1%}" if known else None


def figure(options, facts: dict[str, Any], costs: Costs):
    """Draw the most features solid, fewer dashed."""
    most = max(options.features)
    lines = {("sdpa", DTYPE): (COLORS["sdpa"], LABELS["sdpa"])}
    for m in options.features:
        for kind in KINDS:
            solid = m == most
            lines[named(kind, m), DTYPE] = (f"{COLORS[kind]} {'-' if solid else '--'}", f"{LABELS[kind]}, m = {m}")
    kind = "causal" if any(c.causal for c in costs.cells) else "not causal"
    on = f"{facts['machine']['cpu']}, {facts['threads']} threads"
    return cost_figure(costs, lines, costs.cells, f"FAVOR+ attention, {kind}; {on}")
