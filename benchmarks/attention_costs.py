"""What `attention.py` measures: one cost a rival, dtype and cell, and the file that they are kept in.

The file is written anew after every cell, so that an interrupted run keeps what it has, and can be taken up again.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Cell(NamedTuple):
    """One question: length, width, causal or not, with backward or without. All rivals answer it in turns."""

    t: int
    d: int
    causal: bool
    backward: bool

    def __str__(self) -> str:
        return f"t = {self.t:,}, d = {self.d}, {self.way}"

    @property
    def kind(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def way(self) -> str:
        return "forward + backward" if self.backward else "forward"


@dataclass(frozen=True)
class Cost:
    """Milliseconds a call (median, least, most of the rounds), memory, and what torch.mm did in the same rounds."""

    rival: str
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


class Costs:
    """Costs by rival, dtype and cell; and what was left out, with the reason."""

    def __init__(self, costs: Iterable[Cost] = (), skipped: Iterable[dict[str, Any]] = ()):
        self.by = {(c.rival, c.dtype, c.cell): c for c in costs}
        self._skipped = {tuple(s.values())[:-1]: s for s in skipped}

    def add(self, cost: Cost) -> None:
        self.by[cost.rival, cost.dtype, cost.cell] = cost

    def skip(self, rival: str, dtype: str, cell: Cell, why: str) -> None:
        self._skipped[rival, dtype, *cell] = {"rival": rival, "dtype": dtype, **cell._asdict(), "why": why}

    def get(self, rival: str, dtype: str, cell: Cell) -> Cost | None:
        return self.by.get((rival, dtype, cell))

    def shorter(self, rival: str, dtype: str, cell: Cell) -> Cost | None:
        """The longest that was measured of the same kind, below this length."""
        kin = [
            c
            for c in self.by.values()
            if (c.rival, c.dtype, c.cell[1:]) == (rival, dtype, cell[1:]) and c.cell.t < cell.t
        ]
        return max(kin, key=lambda c: c.cell.t, default=None)

    def ratio(self, slow: tuple[str, str], fast: tuple[str, str], cell: Cell) -> float | None:
        """How many times faster `fast` (rival, dtype) is than `slow`, where both were measured."""
        a, b = self.get(*slow, cell), self.get(*fast, cell)
        return None if a is None or b is None else a.ms / b.ms

    @property
    def skipped(self) -> list[dict[str, Any]]:
        return list(self._skipped.values())

    @property
    def cells(self) -> list[Cell]:
        return sorted({c.cell for c in self.by.values()})

    @property
    def rivals(self) -> list[str]:
        return list(dict.fromkeys(c.rival for c in self.by.values()))

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(c.dtype for c in self.by.values()))

    def as_json(self) -> dict[str, Any]:
        rows = [
            {k: v for k, v in asdict(c).items() if k != "cell"} | c.cell._asdict() for c in self.by.values()
        ]
        return {"results": rows, "skipped": self.skipped}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Costs":
        rows = []
        for row in data["results"]:
            cell = Cell(*(row[x] for x in Cell._fields))
            rows.append(Cost(cell=cell, **{k: v for k, v in row.items() if k not in Cell._fields}))
        return cls(rows, data["skipped"])


def save(path: Path, facts: dict[str, Any], costs: Costs) -> None:
    """Facts and costs as JSON, all or nothing. One result a line."""
    rest = {**facts, **costs.as_json()}
    rows = ",\n".join(f"    {json.dumps(row)}" for row in rest.pop("results"))
    text = json.dumps(rest, indent=2, ensure_ascii=False)[:-2] + f',\n  "results": [\n{rows}\n  ]\n}}\n'
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def resumed(path: Path, facts: dict[str, Any]) -> Costs:
    """What an earlier run left at `path`, if it ran on the same machine, versions, kernels and shapes; else a ValueError."""
    data = json.loads(path.read_text())
    for fact in ("versions", "machine", "threads", "kernels", "shape"):
        if data.get(fact) != facts[fact]:
            raise ValueError(
                f"{path.name} was measured with {fact} {data.get(fact)}, this is {facts[fact]}: start anew, without --resume."
            )
    return Costs.from_json(data)
