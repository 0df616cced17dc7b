"""States in memory: within a bound of bytes, found by the tokens that they have seen."""

import random
from collections import Counter

from tarnn.serving.storage.packed import Packed
from tarnn.serving.storage.tree import Node, Tokens, Tree

SAMPLE = 64  # of how many states the least useful one goes; the worst of all would need a look at each
ENTRY_BYTES = 1200  # what a state takes beside its data: objects of Python and of torch, measured


class Entry:
    """A state in memory. owner: whose tree it is in. used: when it was last of use, in uses of any.

    holds: tenants and ids of clients who have it, if it is nowhere else. saved: its number on the disk; 0: it is not there.
    """

    __slots__ = ("holds", "index", "node", "owner", "packed", "saved", "used")

    def __init__(self, owner: str, node: Node, packed: Packed):
        self.owner, self.node, self.packed = owner, node, packed
        self.holds: set[tuple[str, str]] = set()
        self.saved = self.used = self.index = 0

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + ENTRY_BYTES

    @property
    def tenant(self) -> str:
        return self.owner.partition("/")[2]


class Memory:
    """States by owner and tokens. nbytes: of all states and the trees that they hang in; saved: those on the disk too."""

    def __init__(self, bound: int):
        self.bound, self.evicted = bound, 0
        self.entries: list[Entry] = []
        self.saved: dict[int, Entry] = {}
        self._trees: dict[str, Tree] = {}
        self._packed_bytes = self._tree_bytes = self._uses = 0
        self._draws = random.Random(0)

    @property
    def nbytes(self) -> int:
        return self._packed_bytes + self._tree_bytes

    def put(self, owner: str, tokens: Tokens, packed: Packed) -> Entry:
        """The state after these tokens, kept from now on; one that is there already stays, since it has the same bits."""
        tree = self._trees.setdefault(owner, Tree())
        before = tree.nbytes if tree.root.children or tree.root.kept is not None else 0
        node = tree.place(tokens)
        self._tree_bytes += tree.nbytes - before
        if node.kept is None:
            entry = node.kept = Entry(owner, node, packed)
            entry.index = len(self.entries)
            self.entries.append(entry)
            self._packed_bytes += entry.nbytes
        self.touch(node.kept)
        return node.kept

    def longest(self, owner: str, tokens: Tokens) -> Entry | None:
        """The state after the longest beginning of these tokens."""
        tree = self._trees.get(owner)
        kept = None if tree is None else [node.kept for node in tree.path(tokens) if node.kept is not None]
        return kept[-1] if kept else None

    def at(self, owner: str, tokens: Tokens) -> Entry | None:
        """The state after exactly these tokens."""
        entry = self.longest(owner, tokens)
        return entry if entry is not None and entry.node.end == len(tokens) else None

    def touch(self, entry: Entry) -> None:
        self._uses += 1
        entry.used = self._uses

    def save(self, entry: Entry, number: int) -> None:
        """It is on the disk now, under this number."""
        self._unsave(entry)
        entry.saved, self.saved[number] = number, entry

    def most_unsaved(self, count: int) -> list[Entry]:
        """States that are not on the disk, of which the most useful come first."""
        unsaved = (x for x in self.entries if not (x.saved or x.holds))
        return sorted(unsaved, key=self.worth, reverse=True)[:count]

    def drop(self, entry: Entry) -> None:
        self._unsave(entry)
        last = self.entries.pop()
        if last is not entry:
            self.entries[entry.index], last.index = last, entry.index
        self._packed_bytes -= entry.nbytes
        tree = self._trees[entry.owner]
        before = tree.nbytes
        tree.clear(entry.node)
        self._tree_bytes += tree.nbytes - before
        if tree.root.kept is None and not tree.root.children:
            self._tree_bytes -= tree.nbytes
            del self._trees[entry.owner]

    def _unsave(self, entry: Entry) -> None:
        if entry.saved:
            del self.saved[entry.saved]
            entry.saved = 0

    def surplus(self, new: Entry) -> Entry | None:
        """The state to be dropped next where there is too much; None where all fits, or nothing but the new one could go.

        The one with the least tokens to be read again, by the time since its last use. Those that clients have an id
        for, and that are nowhere else, make room for each other only: those of the client who has the most.
        """
        if self.nbytes <= self.bound:
            return None
        drawn = self.entries if len(self.entries) <= SAMPLE else self._draws.sample(self.entries, SAMPLE)
        for some in (drawn, self.entries):
            if free := [x for x in some if not x.holds and x is not new]:
                return min(free, key=self.worth)
        if not new.holds:
            return None
        shares: Counter[str] = Counter()
        for x in self.entries:
            shares[x.tenant] += x.nbytes + x.node.tokens.nbytes
        [(most, _)] = shares.most_common(1)
        return min((x for x in self.entries if x is not new and x.tenant == most), key=self.worth, default=None)

    def worth(self, entry: Entry) -> float:
        """Tokens that would have to be read again without it, by how long ago it was of use."""
        return entry.node.distance() / (self._uses - entry.used) if entry.used < self._uses else float("inf")
