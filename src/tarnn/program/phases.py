"""From operations to phases: what one barrier encloses, and what is done by unit, by row, or by panel.

A phase has one spreading operation. Operations on the heads of a unit that lead to it alone stand `before`, those that follow it
stand `after`; all others are done to whole rows of the earliest phase after which their inputs are there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

from tarnn.program.fusion import Fusion, Operation
from tarnn.program.instructions import View

OF_UNITS = ("softmax", "linear", "delta", "low_rank_delta", "hybrid")  # spread over units of heads
SPREADING = ("product", "filter", "mix", "head", "experts", "selective_scan", "diagonal_scan", *OF_UNITS)
BEFORE = ("norm", "rotate", "features", "head_product", "combine", "concat")
AFTER = ("norm", "combine", "rotate")


@dataclass(eq=False)
class Phase:
    """One phase; its first operations are one spreading operation, or the products that are spread together."""

    ops: list[Operation] = field(default_factory=list)
    units: int = 1
    before: list[Operation] = field(default_factory=list)
    after: list[Operation] = field(default_factory=list)
    rows: list[Operation] = field(default_factory=list)

    def all(self) -> Iterator[Operation]:
        """All operations in the order in which they run."""
        for some in (self.before, self.ops, self.after, self.rows):
            yield from some


def units_of(x: Operation) -> int:
    """Heads that are tasks: the key heads, or, where values are grouped, the states."""
    k, v = x.inputs[1], x.inputs[-1] if x.kind == "softmax" else x.inputs[2]
    if x.kind == "linear" and v.heads != k.heads:
        return max(k.heads, v.heads)
    return gcd(k.heads, v.heads) if x.kind == "delta" else k.heads


class Phases:
    """The phases of a program. readers: of each register the operations that read it."""

    def __init__(self, fusion: Fusion):
        self.operations = fusion.operations
        self.readers: dict[int, list[Operation]] = {}
        for x in self.operations:
            for view in x.inputs:
                self.readers.setdefault(view.register, []).append(x)
        self.target = self._targets()
        self.phases = [Phase()]
        self._home: dict[int, int] = {}
        for x in self.operations:
            self._place(x)

    def _targets(self) -> dict[int, Operation]:
        """Find, for each operation that stands before one of `OF_UNITS`, which; by id."""
        targets: dict[int, Operation] = {}
        for x in reversed(self.operations):
            if x.kind not in (*BEFORE, "filter"):
                continue
            readers = [y for view in x.outputs for y in self.readers.get(view.register, [])]
            to = {id(y): y for y in (targets.get(id(y), y) for y in readers)}
            if len(to) != 1:
                continue
            target = next(iter(to.values()))
            if target.kind in OF_UNITS and self._fits_before(x, target):
                targets[id(x)] = target
        return targets

    def _fits_before(self, x: Operation, target: Operation) -> bool:
        units = units_of(target)
        if x.kind == "filter":
            return target.kind in ("delta", "linear") and units > 1 and self._by_heads(x, units) is not None
        if all(view.width == 1 for view in x.outputs) and x.kind == "combine" and not self._comes_of_heads(x):
            return False  # a number a head: whole rows of them are one vector
        return all(view.heads % units == 0 for view in x.outputs) and all(
            view.heads % units == 0 or view.heads == 1 for view in x.inputs
        )

    def _comes_of_heads(self, x: Operation) -> bool:
        """Whether an input is made by an operation that makes it head by head."""
        registers = {view.register for view in x.inputs}
        kinds = ("features", "head_product")
        return any(y.kind in kinds and registers & {o.register for o in y.outputs} for y in self.operations)

    def _by_heads(self, x: Operation, units: int) -> list[View] | None:
        """The heads as which a filter's output is read, if these are all of it, each read once and shared out by units."""
        views = sorted(
            {v for y in self.readers[x.outputs[0].register] for v in y.inputs if v.register == x.outputs[0].register},
            key=lambda v: v.offset,
        )
        ends = [0, *(v.offset + v.size for v in views)]
        parts = all(v.offset == end and v.heads % units == 0 for v, end in zip(views, ends, strict=False))
        return views if parts and ends[-1] == x.outputs[0].size else None

    def _place(self, x: Operation) -> None:
        if id(x) in self.target:
            return  # placed with its target
        if x.kind in SPREADING:
            self._spread(x)
        elif not self._follow(x):
            needed = [self._home[v.register] for v in x.inputs]
            needed += [self._home[v.register] for v in x.outputs if v.register in self._home]  # the part before
            at = max(needed, default=0)
            self._enter(self.phases[at].rows, x, at)

    def _enter(self, to: list[Operation], x: Operation, phase: int) -> None:
        to.append(x)
        for view in x.outputs:
            self._home[view.register] = phase

    def _spread(self, x: Operation) -> None:
        if x.kind == "product":
            latest = max((i for i, p in enumerate(self.phases) if p.ops and p.ops[0].kind == "product"), default=0)
            if latest and all(self._home[v.register] < latest for v in x.inputs):
                return self._enter(self.phases[latest].ops, x, latest)
        phase = Phase()
        self.phases.append(phase)
        at = len(self.phases) - 1
        if x.kind in OF_UNITS:
            phase.units = units_of(x)
            for y in self.operations:
                if self.target.get(id(y)) is x:
                    for part in self._parts(y, phase.units):
                        self._enter(phase.before, part, at)
        self._enter(phase.ops, x, at)

    def _parts(self, x: Operation, units: int) -> Sequence[Operation]:
        """A filter before a state becomes one for each of the views that the state's operations read."""
        if x.kind != "filter":
            return [x]
        views, source = self._by_heads(x, units), x.inputs[0]
        assert views is not None
        return [
            replace(
                x,
                kind="filter_rows",
                outputs=[v],
                inputs=[View(source.register, source.offset + v.offset, v.heads, v.width)],
                integers=[*x.integers[:2], v.offset, x.integers[3]],
            )
            for v in views
        ]

    def _follow(self, x: Operation) -> bool:
        """Put an operation after the state whose output it reads, if units can do it."""
        at = max((self._home[v.register] for v in x.inputs), default=0)
        phase = self.phases[at]
        if x.kind not in AFTER or not phase.ops or phase.ops[0].kind not in OF_UNITS:
            return False
        own = {v.register for y in (*phase.ops, *phase.after) for v in y.outputs}
        in_rows = {v.register for y in phase.rows for v in y.outputs}
        if not own & {v.register for v in x.inputs} or in_rows & {v.register for v in x.inputs}:
            return False
        shared = x.kind == "rotate"
        fits = all(v.heads % phase.units == 0 for v in (*x.outputs, *(x.inputs[:1] if shared else x.inputs)))
        if fits:
            self._enter(phase.after, x, at)
        return fits
