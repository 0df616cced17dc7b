"""What `attention.py` and `favor.py` measure: a cell is a question, a cost is a method's answer to it."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import cycle, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.common.clock import Contender, Effort, measure_in_turns
from scripts.common.peak import multiply_adds
from scripts.common.provenance import provenance, total_memory
from scripts.common.results import earlier
from toolkit.baselines import Method

MATMUL_SIZE = 2048
MATMUL_FROM = 1024  # lengths from which torch.mm runs in the same rounds
ROOM = 0.5  # of the machine's memory, at most, for one call
SAME = ("versions", "machine", "threads", "kernels", "shape")  # of a run that is taken up again
COLD_FROM = 1024  # lengths from which calls on cold inputs are measured
COLD_BYTES = 2**27  # of inputs that take turns: more than the caches have
# (b, h, t, d) contiguous; a view of (b, t, h·d), as a projection gives it
HEADS_FIRST, SIDE_BY_SIDE = "heads-first", "side-by-side"
SPREAD = ("native", "specialised")  # who is measured in every layout, cold and warm; others only heads first and warm
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
Inputs = dict[str, list[Tensor]]  # q, k, v and the gradient of o, by dtype


class Cell(NamedTuple):
    """Length, width, causal or not, with backward or without; how inputs lie, and where. All methods take it in turns."""

    t: int
    d: int
    causal: bool
    backward: bool
    layout: str = HEADS_FIRST
    cold: bool = False  # each call has inputs of its own, too many for the caches

    def __str__(self) -> str:
        parts = [f"t = {self.t:,}, d = {self.d}, {self.way}"]
        parts += [self.layout] if self.layout != HEADS_FIRST else []
        return ", ".join([*parts, "cold"] if self.cold else parts)

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Cell":
        """Of a results file; older ones have neither layout nor cold."""
        return cls(**{x: row[x] for x in cls._fields if x in row})

    @property
    def plain(self) -> bool:
        return self.layout == HEADS_FIRST and not self.cold

    @property
    def kind(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def way(self) -> str:
        return "forward + backward" if self.backward else "forward"


@dataclass(frozen=True)
class Cost:
    """Milliseconds per call (median, least, most of the rounds), memory, and the rates of torch.mm and of multiply–adds
    in the same rounds."""

    method: str
    dtype: str
    cell: Cell
    ms: float
    ms_min: float
    ms_max: float
    rounds: int
    calls: int
    peak_bytes: int | None  # above what was there before the call, results included
    extra_bytes: int | None  # beyond outputs and gradients
    mm_gflops: float | None  # float32, 2048³
    heads_first_ms: float | None = None  # the same heads-first, in the same rounds; where the layout is another
    peak_gflops: float | None = None  # float32 multiply–adds in registers
    others: float | None = None  # the share of the processors that other processes took meanwhile

    def share_of_matmul(self, flops: int) -> float | None:
        """Of the rate that torch.mm had in the same rounds."""
        return self.mm_gflops and flops / self.ms / 1e6 / self.mm_gflops

    def share_of_peak(self, flops: int) -> float | None:
        """Of the rate that multiply–adds in registers had in the same rounds."""
        return self.peak_gflops and flops / self.ms / 1e6 / self.peak_gflops

    def as_json(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k != "cell"} | self.cell._asdict()


class Costs:
    """Costs by method, dtype and cell; what was skipped, and who is absent, with the reason."""

    def __init__(self, costs: Iterable[Cost] = (), skipped: Iterable[dict[str, Any]] = ()):
        self.by = {(c.method, c.dtype, c.cell): c for c in costs}
        self._skipped = {tuple(s.values())[:-1]: s for s in skipped}
        self.absent: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.by)

    def add(self, cost: Cost) -> None:
        self.by[cost.method, cost.dtype, cost.cell] = cost

    def skip(self, method: str, dtype: str, cell: Cell, why: str) -> None:
        self._skipped[method, dtype, *cell] = {"method": method, "dtype": dtype, **cell._asdict(), "why": why}

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """But what was measured since, in an earlier run that is taken up with more patience."""
        return [s for key, s in self._skipped.items() if (*key[:2], Cell(*key[2:])) not in self.by]

    def left_out(self) -> list[str]:
        lines = [f"{name}: {why}" for name, why in self.absent.items()]
        for s in self.skipped:
            cell = Cell.of(s)
            lines.append(f"{s['method']}, {s['dtype']}, {cell}, {cell.kind}: {s['why']}")
        return lines

    def get(self, method: str, dtype: str, cell: Cell) -> Cost | None:
        return self.by.get((method, dtype, cell))

    def shorter(self, method: str, dtype: str, cell: Cell) -> Cost | None:
        """The longest that was measured of the same kind, below this length."""
        kin = [
            c
            for c in self.by.values()
            if (c.method, c.dtype, c.cell[1:]) == (method, dtype, cell[1:]) and c.cell.t < cell.t
        ]
        return max(kin, key=lambda c: c.cell.t, default=None)

    def ratios(
        self,
        over: tuple[str, str],
        under: tuple[str, str],
        cells: Iterable[Cell],
        value: Callable[[Cost], float | None] = lambda cost: cost.ms,
    ) -> dict[str, float]:
        """By cell, how many times larger one's value (method, dtype) is than the other's, where both are known."""
        found = {}
        for cell in cells:
            above, below = (value(x) if (x := self.get(*who, cell)) else None for who in (over, under))
            if above is not None and below:
                found[str(cell)] = above / below
        return found

    @property
    def cells(self) -> list[Cell]:
        return sorted({c.cell for c in self.by.values()})

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(c.method for c in self.by.values()))

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(c.dtype for c in self.by.values()))

    def as_json(self) -> list[dict[str, Any]]:
        return [c.as_json() for c in self.by.values()]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Costs":
        """Of a results file; older ones say "rival" where this says "method"."""
        rows = [{"method" if k == "rival" else k: v for k, v in row.items()} for row in data["results"]]
        skipped = [{"method" if k == "rival" else k: v for k, v in row.items()} for row in data["skipped"]]
        costs = []
        for row in rows:
            cell = Cell.of(row)
            costs.append(Cost(cell=cell, **{k: x for k, x in row.items() if k not in Cell._fields}))
        return cls(costs, skipped)

    def take_up(self, options, shape: dict[str, Any]) -> None:
        """With --resume, what an earlier run left, if it ran on the same machine, versions, kernels and shapes."""
        path = options.out / f"{options.script.rpartition('/')[2].removesuffix('.py')}.json"
        if options.resume and path.exists():
            found = self.from_json(earlier(path, {**provenance(options.script), "shape": shape}, SAME))
            self.by, self._skipped = found.by, found._skipped

    def gflops(self, of: str) -> dict[str, Any]:
        """The rates `mm_gflops` or `peak_gflops` over all cells."""
        rates = {c.cell: getattr(c, of) for c in self.by.values() if getattr(c, of)}
        middle = statistics.median(rates.values()) if rates else None
        least, most = (f(rates.values(), default=None) for f in (min, max))
        return {"median": middle, "least": least, "most": most, "cells": len(rates)}


def measure_cells(entrants: Sequence[tuple[Method, str]], costs: Costs, options, keep) -> None:
    """Every cell not yet there, short ones first, each printed and kept as soon as it is known."""
    effort = Effort(min(0.03, options.seconds / 3), options.seconds)
    for t, d in product(sorted(set(options.lengths)), options.head_dims):
        inputs = draw_inputs(t, d, options.dtypes, options.batch_size, options.heads, options.device)
        for kind, way, (layout, cold) in product(options.kinds, options.passes, places(options, t)):
            cell, able = Cell(t, d, kind == "causal", way == "both", layout, cold), []
            for method, dtype in entrants:
                if not cell.plain and (method.name not in SPREAD or dtype != "float32"):
                    continue
                if costs.get(method.name, dtype, cell):
                    continue
                if why := too_much(method, dtype, cell, costs, options.longest_call):
                    costs.skip(method.name, dtype, cell, why)
                    print(f"{cell}, {cell.kind}: without {method.name} in {dtype}: {why}")
                else:
                    able.append((method, dtype))
            if able:
                found = measure_cell(cell, inputs, able, effort, options.device)
                for cost in found:
                    costs.add(cost)
                keep()
                times = "  ".join(f"{c.method} {SHORT[c.dtype]} {c.ms:.4g}" for c in found)
                print(f"{f'{cell}, {cell.kind}:':54}{times} ms", flush=True)


def places(options, t: int) -> list[tuple[str, bool]]:
    """(layout, cold) of the cells of one length."""
    return [
        (layout, cache == "cold")
        for layout, cache in product(options.layouts, options.caches)
        if cache == "warm" or t >= COLD_FROM
    ]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same (b, h, t, d) numbers; side by side they are a view of a projection's (b, t, h·d)."""
    return x if layout == HEADS_FIRST else x.transpose(1, 2).contiguous().transpose(1, 2)


def draw_inputs(t: int, d: int, dtypes: Sequence[str], batch_size: int, heads: int, device: str) -> Inputs:
    """The same numbers in each dtype."""
    torch.manual_seed(t + d)
    drawn = [torch.randn(batch_size, heads, t, d, device=device) for _ in range(4)]
    return {dtype: [x.to(getattr(torch, dtype)) for x in drawn] for dtype in dtypes}


def measure_cell(
    cell: Cell, inputs: Inputs, entrants: Sequence[tuple[Method, str]], effort: Effort, device: str
) -> list[Cost]:
    """A cost for each (method, dtype), in turns; torch.mm is one of those that take turns, where a call is long enough."""
    contenders: dict[Any, Contender] = {}
    results: dict[tuple[str, str], int] = {}
    for method, dtype in entrants:
        who = method.name, dtype
        contenders[who], results[who] = contender(method, inputs[dtype], cell)
        if method.ours and cell.layout != HEADS_FIRST:
            contenders[*who, HEADS_FIRST], _ = contender(method, inputs[dtype], cell._replace(layout=HEADS_FIRST))
    peak = None
    if cell.t >= MATMUL_FROM:
        contenders["matmul"] = matmul(device)
        if peak := multiply_adds(torch.get_num_threads()):
            contenders["peak"] = Contender(peak[0])
    timings = measure_in_turns(contenders, effort, device)
    mm = 2 * MATMUL_SIZE**3 / timings.pop("matmul").ms / 1e6 if "matmul" in timings else None
    most = peak[1] / timings.pop("peak").ms / 1e6 if "peak" in timings and peak else None
    costs = []
    for (name, dtype), nbytes in results.items():
        timing, twin = timings[name, dtype], timings.get((name, dtype, HEADS_FIRST))
        extra = None if timing.peak_bytes is None else max(0, timing.peak_bytes - nbytes)
        first = twin.ms if twin else None
        costs.append(
            Cost(
                name,
                dtype,
                cell,
                **asdict(timing),
                extra_bytes=extra,
                mm_gflops=mm,
                heads_first_ms=first,
                peak_gflops=most,
            )
        )
    return costs


def contender(method: Method, inputs: list[Tensor], cell: Cell) -> tuple[Contender, int]:
    """A method on these inputs, laid out as the cell says; and the bytes of its results."""
    *qkv, grad = (laid_out(x, cell.layout) for x in inputs)
    with method.surroundings(), torch.no_grad():
        given = method.given(*qkv)
    one = Contender(call(method, given, grad, cell), method.patience, method.surroundings, method.release)
    return one, result_bytes(given, grad, cell)


@cache
def matmul(device: str) -> Contender:
    """The machine at its best: one float32 product of 2048³ into memory that is already there."""
    a, b, out = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device) for _ in range(3))
    return Contender(lambda: torch.mm(a, b, out=out))


def call(method: Method, given: Sequence[Tensor], grad: Tensor, cell: Cell) -> Callable[[], object]:
    """One call of the cell; cold, the next call has copies of the inputs, which no cache holds by then."""
    copies = 1
    if cell.cold:
        copies += COLD_BYTES // (sum(x.nbytes for x in given) + grad.nbytes)
    calls = cycle([_call(method, [x.clone() for x in given], grad.clone(), cell) for _ in range(copies)])
    return lambda: next(calls)()


def _call(method: Method, given: Sequence[Tensor], grad: Tensor, cell: Cell) -> Callable[[], object]:
    if not cell.backward:
        return lambda: method.attend(*given, cell.causal)
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    return lambda: torch.autograd.grad(method.attend(*leaves, *given[3:], cell.causal), leaves, grad)


def result_bytes(given: Sequence[Tensor], o: Tensor, cell: Cell) -> int:
    """o, and with backward the gradients of the first three that are given: q, k, v."""
    return o.nbytes + (sum(x.nbytes for x in given[:3]) if cell.backward else 0)


def too_much(method: Method, dtype: str, cell: Cell, costs: Costs, longest_call: float) -> str:
    """Why not to try: a shorter length says that this one takes too long, or more memory than there is. Else nothing."""
    shorter = costs.shorter(method.name, dtype, cell)
    if shorter is None:
        return ""
    times = cell.t / shorter.cell.t
    seconds = shorter.ms / 1000 * times**method.power
    if seconds > longest_call:
        return f"one call would take about {seconds:.0f} s, by t = {shorter.cell.t:,}"
    needed = (shorter.peak_bytes or 0) * times
    if needed > ROOM * total_memory():
        return f"one call would take about {needed / 2**30:.0f} GiB, by t = {shorter.cell.t:,}"
    return ""
