"""What native kernels for linear attention have to reach, and how the arithmetic is counted.

Flops a token and head, each multiplication and addition one:

    forward            4·d·e          into the state and out of it
    backward          12·d·e          three times the same, of S and of its gradient R, both ways round
    not causal        10·d·e          the state of all keys and its gradient are made once
"""

from collections.abc import Callable, Iterable

from scripts.common.tables import MIB
from scripts.common.targets import Target, at_least, at_most
from toolkit.attention_cells import HEADS_FIRST, Cell, Cost, Costs

DROPPED = """Not aimed for any more: four times the specialised PyTorch forward and backward at d = 64, which is 82 % of the rate
of multiply–adds in registers (with φ(q) and φ(k) made twice, as the two sweeps make them, about 75 % can be had); and one token
forward and backward against SDPA: an empty function of autograd alone takes half of SDPA's time."""
# "never slower" is read as: at most 5 % slower, which is what two medians of one thing differ by
NOISE = 0.95
LONG, SHORT, LONGEST = 1024, 256, 65536


def flops(cell: Cell, heads: int) -> int:
    """Of one call."""
    backward = (12 if cell.causal else 10) if cell.backward else 0
    return (4 + backward) * cell.d**2 * cell.t * heads


def targets(costs: Costs, heads: int, threads: int) -> list[Target]:
    """By claim and case; a case is dtype and causal or full."""
    found = []
    for dtype in costs.dtypes:
        for causal in (True, False):
            case = f"{dtype}, {'causal' if causal else 'full'}"
            everywhere = [c for c in costs.cells if c.causal == causal]
            cells = [c for c in everywhere if c.plain]
            found += _against_chunked(costs, dtype, case, cells)
            if causal:
                found += _against_sdpa(costs, dtype, case, cells)
            if dtype == "float32":
                found += _share(costs, dtype, case, cells, heads)
                cold = [c for c in everywhere if c.cold and c.layout == HEADS_FIRST]
                found += _share(costs, dtype, f"{case}, cold", cold, heads)
                found.append(_layouts(costs, dtype, case, everywhere))
            if dtype == "float32" and causal:
                found += _short(costs, dtype, case, cells)
            found += _memory(costs, dtype, case, cells, threads)
            if dtype == "bfloat16" and "float32" in costs.dtypes:
                ratio = costs.ratios(("native", "float32"), ("native", dtype), cells)
                found.append(at_least("bfloat16 not slower than float32 (within 5 %)", case, NOISE, ratio))
    return found


def _against_chunked(costs: Costs, dtype: str, case: str, cells: list[Cell]) -> list[Target]:
    found = []
    for backward, wide, bound in ((False, False, 5), (False, True, 4), (True, False, 4), (True, True, 2.5)):
        of = [c for c in cells if c.t >= LONG and c.backward == backward and (c.d > 64) == wide]
        what = (
            f"{_pass(backward)} at least {bound} times faster than tarnn in plain PyTorch, t ≥ {LONG:,}, {_width(wide)}"
        )
        found.append(at_least(what, case, bound, _faster(costs, dtype, of, "chunked")))
    short = [c for c in cells if c.t <= SHORT]
    what = f"never slower than tarnn in plain PyTorch (within 5 %), t ≤ {SHORT}"
    return [*found, at_least(what, case, NOISE, _faster(costs, dtype, short, "chunked"))]


def _layouts(costs: Costs, dtype: str, case: str, cells: list[Cell]) -> Target:
    """Side by side against heads first, in the same rounds, cell by cell."""
    slower = _values(cells, costs, dtype, lambda cost: cost.heads_first_ms and cost.ms / cost.heads_first_ms)
    return at_most("side by side, (b, t, h·d): at most 1.1 times as long as heads first", case, 1.1, slower)


def _short(costs: Costs, dtype: str, case: str, cells: list[Cell]) -> list[Target]:
    found = []
    for lengths, bound in (((128,), 1), (range(2, 65), 1.5)):
        of = [c for c in cells if c.t in lengths and c.backward]
        what = f"{_pass(True)}: at most {bound} times SDPA's time, t = {', '.join(str(t) for t in sorted({c.t for c in of}))}"
        found.append(at_most(what, case, bound, costs.ratios(("native", dtype), ("sdpa", dtype), of)))
    return found


def _against_sdpa(costs: Costs, dtype: str, case: str, cells: list[Cell]) -> list[Target]:
    found = []
    for wide, bound in ((False, 20), (True, 12)):
        of = [c for c in cells if c.t == 4096 and (c.d > 64) == wide]
        what = f"at least {bound} times faster than SDPA at t = 4,096, {_width(wide)}"
        found.append(at_least(what, case, bound, _faster(costs, dtype, of, "sdpa")))
    of = [c for c in cells if c.t >= 128]
    return [*found, at_least("faster than SDPA at every t ≥ 128", case, 1, _faster(costs, dtype, of, "sdpa"))]


def _share(costs, dtype: str, case: str, cells: list[Cell], heads: int) -> list[Target]:
    found = []
    for backward, bound in ((False, 0.70), (True, 0.55)):
        of = [c for c in cells if c.d == 64 and c.t >= LONG and c.backward == backward]
        shares = _values(of, costs, dtype, lambda c: c.share_of_matmul(flops(c.cell, heads)))
        what = f"{_pass(backward)}, d = 64: at least {bound:.0%} of torch.mm's rate, t ≥ {LONG:,}"
        found.append(at_least(what, case, bound, shares, "%"))
    return found


def _memory(costs: Costs, dtype: str, case: str, cells: list[Cell], threads: int) -> list[Target]:
    longest = [c for c in cells if c.t == LONGEST]
    per_thread = _values(
        longest, costs, dtype, lambda c: None if c.extra_bytes is None else c.extra_bytes / threads / MIB
    )
    # below, a page more or less decides
    shares = costs.ratios(
        ("native", dtype), ("sdpa", dtype), [c for c in cells if c.t >= SHORT], lambda c: c.peak_bytes
    )
    what = f"at most 1 MiB a thread beyond inputs, outputs and gradients, t = {LONGEST:,}"
    return [
        at_most(what, case, 1, per_thread, " MiB"),
        at_most(f"peak memory never above SDPA's, t ≥ {SHORT}", case, 1, shares),
    ]


def _faster(costs: Costs, dtype: str, cells: Iterable[Cell], than: str) -> dict[str, float]:
    return costs.ratios((than, dtype), ("native", dtype), cells)


def _values(cells: Iterable[Cell], costs: Costs, dtype: str, value: Callable[[Cost], float | None]):
    found = {}
    for cell in cells:
        cost = costs.get("native", dtype, cell)
        if cost is not None and (x := value(cost)) is not None:
            found[str(cell)] = x
    return found


def _pass(backward: bool) -> str:
    return "forward + backward" if backward else "forward"


def _width(wide: bool) -> str:
    return "d > 64" if wide else "d ≤ 64"
