"""Where registers lie: slots of memory that registers share which are not needed at the same time."""

from dataclasses import dataclass, replace

from tarnn.program.fusion import Operation
from tarnn.program.instructions import View
from tarnn.program.phases import OF_UNITS, Phase

# operations whose output may lie where their first input lay
IN_PLACE = ("combine", "norm", "rotate", "clamp", "filter", "filter_rows", "diagonal_scan")
OVER_KEYS = ("softmax", "hybrid")  # units of these have no slots of their own
ALL, OWN, BYTES = 0, 1, 2  # kinds of slots, as csrc/runtime/program.h has them


@dataclass
class Slot:
    """Room for `width` numbers per row, of one of the kinds above; it is taken up to and including the phase `until`."""

    kind: int
    width: int
    until: int


class Slots:
    """The slot of each register. sizes: numbers per token of each; groups: registers that products write side
    by side, each with the register that it is a part of, and where."""

    def __init__(self, phases: list[Phase], sizes: list[int], groups: dict[int, tuple[int, int]]):
        self.phases, self.sizes = phases, sizes
        self.slots: list[Slot] = []
        self._base = dict(groups)  # register → (register that it is a part of, offset)
        self._parts: dict[int, list[int]] = {}  # of each register that is no part of another: those read in it
        self._order: list[tuple[int, Operation]] = [(i, x) for i, p in enumerate(phases) for x in p.all()]
        self._last: dict[int, list[tuple[int, View]]] = {}  # of each register when which part of it is read
        self._find_uses()
        self._share_places()
        self._slot: dict[int, int] = {}
        self._assign()

    def place(self, view: View) -> tuple[int, int, int, int]:
        """Return (slot, offset, heads, width); a thread's own slot holds the heads of one unit."""
        base, offset = self._root(view.register)
        slot = self._slot[base]
        if self.slots[slot].kind != OWN:
            return slot, offset + view.offset, view.heads, view.width
        units = self._units[base]
        return slot, (offset + view.offset) // units, view.heads // units, view.width

    def new_bytes(self, width: int, begin: int, until: int) -> int:
        """Take a slot for rows of bytes."""
        return self._take(BYTES, width, begin, until)

    def _root(self, register: int) -> tuple[int, int]:
        offset = 0
        while register in self._base:
            register, more = self._base[register]
            offset += more
        return register, offset

    def _find_uses(self) -> None:
        """Each read as a moment: its place in the order, or the end of the phase for what other tasks may still read."""
        ends = {i: at for at, (i, _) in enumerate(self._order)}
        for at, (phase, x) in enumerate(self._order):
            late = x.kind == "mix"
            for view in x.inputs:
                self._last.setdefault(view.register, []).append((ends[phase] if late else at, view))
        for register in self._last:
            self._parts.setdefault(self._root(register)[0], []).append(register)

    def _share_places(self) -> None:
        """Let outputs lie where their inputs did, if nothing reads these any more."""
        moved: set[int] = set()
        for at, (_, x) in enumerate(self._order):
            if x.kind not in IN_PLACE or not x.outputs:
                continue
            out, source = x.outputs[0], x.inputs[0]
            if x.kind == "filter_rows":
                if out.register in moved:
                    continue
                source = View(source.register, source.offset - out.offset, 1, self.sizes[out.register])
                parts = [y for _, y in self._order if y.outputs and y.outputs[0].register == out.register]
                later = [a for a, (_, y) in enumerate(self._order) if y in parts][-1]
            else:
                later = at
                if out.offset or out.size != self.sizes[out.register]:
                    continue
            if out.register in self._base or self._read_later(source, later):
                continue
            self._base[out.register] = (source.register, source.offset)
            self._parts.setdefault(self._root(source.register)[0], []).extend(self._parts.pop(out.register, []))
            moved.add(out.register)

    def _read_later(self, source: View, at: int) -> bool:
        """Whether channels of a view, or of what lies in the same place, are read after a moment."""
        root, offset = self._root(source.register)
        begin, end = offset + source.offset, offset + source.offset + source.size
        for register in self._parts.get(root, ()):
            first = self._root(register)[1]
            for when, view in self._last[register]:
                overlaps = first + view.offset < end and first + view.offset + view.size > begin
                if when > at and overlaps:
                    return True
        return False

    def _assign(self) -> None:
        begin: dict[int, int] = {}
        until: dict[int, int] = {}
        inside: dict[int, set[tuple[int, bool]]] = {}
        for phase, x in self._order:
            p = self.phases[phase]
            of_units = p.ops and p.ops[0].kind in OF_UNITS and p.ops[0].kind not in OVER_KEYS and x not in p.rows
            for view in (*x.inputs, *x.outputs):
                root = self._root(view.register)[0]
                begin[root] = min(begin.get(root, phase), phase)
                until[root] = max(until.get(root, phase), phase)
                inside.setdefault(root, set()).add((phase, bool(of_units)))
        made = {v.register for p in self.phases for x in p.before if x.kind != "filter_rows" for v in x.outputs}
        self._units: dict[int, int] = {}
        for root in sorted(begin, key=lambda r: (begin[r], r)):
            own = root in made and len(inside[root]) == 1 and next(iter(inside[root]))[1]
            units = self.phases[begin[root]].units if own else 1
            self._units[root] = units
            self._slot[root] = self._take(OWN if own else ALL, self.sizes[root] // units, begin[root], until[root])

    def _take(self, kind: int, width: int, begin: int, until: int) -> int:
        free = [i for i, x in enumerate(self.slots) if x.kind == kind and x.until < begin]
        if not free:
            self.slots.append(Slot(kind, width, until))
            return len(self.slots) - 1
        best = min(free, key=lambda i: (max(0, width - self.slots[i].width), abs(self.slots[i].width - width)))
        self.slots[best] = replace(self.slots[best], width=max(width, self.slots[best].width), until=until)
        return best
