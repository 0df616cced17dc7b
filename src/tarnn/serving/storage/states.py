"""The states of a store, in radix trees over the tokens that they have seen: in memory, on the disk, or both."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np

from tarnn.serving.snapshot import Tokens
from tarnn.serving.storage.ids import Hold
from tarnn.serving.storage.packed import Packed

NODE_BYTES = 600  # of a node beside its tokens: objects of Python, measured
ENTRY_BYTES = 1200  # of a state in memory beside its data: objects of Python and of torch, measured
SAMPLE = 64  # states of which the least useful one goes; the worst of all would need a look at each
NONE = np.zeros(0, np.int32)


class Node:
    """A node of a tree: the tokens from its parent to itself, and the state that is kept there.

    end: number of tokens of the whole sequence up to here. kept None: sequences part here.
    """

    __slots__ = ("children", "end", "kept", "parent", "tokens")

    def __init__(self, parent: "Node | None", tokens: Tokens, end: int):
        self.parent, self.tokens, self.end = parent, tokens, end
        self.children: dict[int, Node] = {}
        self.kept: Entry | None = None

    def since(self, above: "Node | None") -> Tokens:
        """Return the tokens from a node above to here; None: all."""
        parts, node = [NONE], self
        while node is not above and node.parent is not None:
            parts.append(node.tokens)
            node = node.parent
        return np.concatenate(parts[::-1])

    def distance(self) -> int:
        """Count the tokens from the nearest state above to here: those to be read again without this one."""
        node = self.parent
        while node is not None and node.kept is None:
            node = node.parent
        return self.end - (0 if node is None else node.end)


class Tree:
    """A radix tree: sequences that begin alike share their beginnings. nbytes: without the states.

    model: as an index numbers it. owner: of the states.
    """

    def __init__(self, model: int = 0, owner: str = ""):
        self.model, self.owner = model, owner
        self.root = Node(None, NONE, 0)
        self.nbytes = NODE_BYTES

    def path(self, tokens: Tokens, start: Node | None = None) -> Iterator[Node]:
        """Yield the nodes of beginnings of these tokens, shortest first. start: the node that they go on from."""
        node: Node | None = start or self.root
        begin = 0 if start is None else start.end
        while node is not None:
            yield node
            past = node.end - begin
            node = node.children.get(int(tokens[past])) if past < len(tokens) else None
            if node is not None and not np.array_equal(node.tokens, tokens[past : node.end - begin]):
                return

    def place(self, tokens: Tokens, start: Node | None = None) -> Node:
        """Return the node of these tokens, which is made if there is none. start: as in `path`."""
        *_, node = self.path(tokens, start)
        rest = tokens[node.end - (0 if start is None else start.end) :]
        below = node.children.get(int(rest[0])) if len(rest) else None
        if below is not None:
            count = common_length(below.tokens, rest)
            node, rest = self._cut(below, count), rest[count:]
        return self._add(node, np.array(rest, np.int32), node.end + len(rest)) if len(rest) else node

    def clear(self, node: Node) -> None:
        """Remove what is kept at a node, and the tokens that lead nowhere else."""
        node.kept = None
        while node.parent is not None and node.kept is None and not node.children:
            parent = node.parent
            del parent.children[int(node.tokens[0])]
            self.nbytes -= NODE_BYTES + node.tokens.nbytes
            node = parent
        if node.parent is not None and node.kept is None and len(node.children) == 1:
            self._join(node)

    def _add(self, parent: Node, tokens: Tokens, end: int) -> Node:
        node = parent.children[int(tokens[0])] = Node(parent, tokens, end)
        self.nbytes += NODE_BYTES + tokens.nbytes
        return node

    def _cut(self, node: Node, count: int) -> Node:
        """Add a node above this one, after the first `count` of its tokens."""
        above, first, rest = node.parent, node.tokens[:count].copy(), node.tokens[count:].copy()
        assert above is not None  # the root has no tokens
        self.nbytes -= first.nbytes
        upper = self._add(above, first, node.end - len(rest))
        upper.children[int(rest[0])] = node
        node.parent, node.tokens = upper, rest
        return upper

    def _join(self, node: Node) -> None:
        """Let the only child take this node's place, and its tokens."""
        (child,) = node.children.values()
        assert node.parent is not None  # only nodes below the root are joined
        child.tokens, child.parent = np.concatenate([node.tokens, child.tokens]), node.parent
        node.parent.children[int(child.tokens[0])] = child
        self.nbytes -= NODE_BYTES


def common_length(a: Tokens, b: Tokens) -> int:
    """Return the number of tokens with which both begin."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length


class Entry:
    """A state, which is in a tree as long as it is in memory (packed), on the disk (id), or on its way there (writes).

    id: its number in the index; 0: not on the disk. file, bytes: its file. damaged: the file is not what was written, and the
    state is about to go. holds: ids of clients for it. use, used: its last use, counted in uses of any state, and in seconds.
    """

    __slots__ = (
        "bytes", "damaged", "file", "holds", "id", "index", "node", "packed", "tree", "use", "used", "writes"
    )  # fmt: skip

    def __init__(self, tree: Tree, node: Node):
        self.tree, self.node = tree, node
        self.packed: Packed | None = None
        self.id = self.bytes = self.writes = self.use = self.index = 0
        self.file, self.damaged, self.used = "", False, time.time()
        self.holds: set[Hold] = set()

    @property
    def tokens(self) -> Tokens:
        """All tokens that the state has seen."""
        return self.node.since(None)

    @property
    def owner(self) -> str:
        return self.tree.owner

    @property
    def tenant(self) -> str:
        return self.owner.partition("/")[2]

    @property
    def nbytes(self) -> int:
        """Bytes in memory, with pages that others have too."""
        return 0 if self.packed is None else self.packed.nbytes + ENTRY_BYTES


class States:
    """All states of a store, used under its lock. loaded: those in memory. saved: those on the disk by number, the one that was
    not used for longest first.

    bound: bytes of states in memory, and of their trees; with most_trees, trees have a bound of their own. model: as an index
    numbers the one that is served.
    """

    def __init__(self, bound: int, most_trees: int | None = None):
        self.bound, self.most_trees, self.model, self.evicted = bound, most_trees, 0, 0
        self._draws = random.Random(0)
        self.clear()

    def clear(self) -> None:
        self.loaded: list[Entry] = []
        self.saved: dict[int, Entry] = {}
        self._sharers: Counter[int] = Counter()  # of each page, by its address
        self.packed_bytes = self.tree_bytes = self.file_bytes = self._uses = 0
        self._trees: dict[tuple[int, str], Tree] = {}

    @property
    def nbytes(self) -> int:
        return self.packed_bytes + (self.tree_bytes if self.most_trees is None else 0)

    @property
    def trees_are_full(self) -> bool:
        return self.most_trees is not None and self.tree_bytes > self.most_trees

    def place(self, owner: str, tokens: Tokens, model: int = 0, above: Entry | None = None) -> Entry:
        """Return the entry of these tokens, which is made if there is none. above: the state whose tokens they go on from."""
        key = model or self.model, owner
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = Tree(*key)
            self.tree_bytes += tree.nbytes
        before = tree.nbytes
        node = tree.place(tokens, None if above is None else above.node)
        self.tree_bytes += tree.nbytes - before
        if node.kept is None:
            node.kept = Entry(tree, node)
        return node.kept

    def path(self, owner: str, tokens: Tokens) -> list[Entry]:
        """Return the states after beginnings of these tokens, longest first."""
        tree = self._trees.get((self.model, owner))
        kept = [] if tree is None else [node.kept for node in tree.path(tokens)]
        return [x for x in kept[::-1] if x is not None and not x.damaged and (x.packed is not None or x.id)]

    def touch(self, entry: Entry) -> None:
        self._uses += 1
        entry.use, entry.used = self._uses, time.time()
        if entry.id:
            self.saved[entry.id] = self.saved.pop(entry.id)

    def load(self, entry: Entry, packed: Packed) -> None:
        """Put a state into memory; one that is there already stays, since it has the same bits."""
        if entry.packed is None:
            entry.packed, entry.index = packed, len(self.loaded)
            self.loaded.append(entry)
            self.packed_bytes += entry.nbytes - self._shared(packed, 1)
        self.touch(entry)

    def unload(self, entry: Entry) -> None:
        """Remove a state from memory."""
        assert entry.packed is not None
        self.packed_bytes -= entry.nbytes - self._shared(entry.packed, -1)
        entry.packed, last = None, self.loaded.pop()
        if last is not entry:
            self.loaded[entry.index], last.index = last, entry.index
        self.release(entry)

    def _shared(self, packed: Packed, change: int) -> int:
        """Count a state in (1) or out (−1) of those that have its pages; return the bytes that others have too."""
        shared = 0
        for page in packed.pages.data:
            others = self._sharers[id(page)] - (change < 0)
            self._sharers[id(page)] += change
            shared += page.nbytes * (others > 0)
            if change < 0 and not others:
                del self._sharers[id(page)]
        return shared

    def save(self, entry: Entry, id: int, file: str, size: int) -> None:
        """Note that a state is on the disk."""
        entry.id, entry.file, entry.bytes = id, file, size
        self.saved[id] = entry
        self.file_bytes += size

    def unsave(self, entry: Entry) -> None:
        """Note that a state is not on the disk any more."""
        if self.saved.pop(entry.id, None) is not None:
            self.file_bytes -= entry.bytes
            entry.id, entry.file, entry.damaged = 0, "", False
            self.release(entry)

    def release(self, entry: Entry) -> None:
        """Remove a state that is nowhere from its tree."""
        if entry.packed is not None or entry.id or entry.writes or entry.node.kept is not entry:
            return
        tree, before = entry.tree, entry.tree.nbytes
        tree.clear(entry.node)
        self.tree_bytes += tree.nbytes - before
        if tree.root.kept is None and not tree.root.children:
            self.tree_bytes -= tree.nbytes
            del self._trees[tree.model, tree.owner]

    def surplus(self, new: Entry) -> Entry | None:
        """Return the state to unload next; None if all fit, or only the new one could go.

        It is the one with the least tokens to be read again, by the time since its last use. States that clients have an id
        for, and that are nowhere else, make room for each other only: those of the client that has the most.
        """
        over = self.nbytes > self.bound
        if not over and not self.trees_are_full:
            return None
        drawn = self.loaded if len(self.loaded) <= SAMPLE else self._draws.sample(self.loaded, SAMPLE)
        for some in (drawn, self.loaded):
            if free := [x for x in some if x is not new and (not x.holds if not x.id else over)]:
                return min(free, key=self.worth)
        if not (over and new.holds) or new.id:
            return None
        shares: Counter[str] = Counter()
        for x in self.loaded:
            shares[x.tenant] += x.nbytes + x.node.tokens.nbytes
        [(most, _)] = shares.most_common(1)
        return min((x for x in self.loaded if x is not new and x.tenant == most), key=self.worth, default=None)

    def worth(self, entry: Entry) -> float:
        """Return the tokens to be read again without a state, by how long ago it was used."""
        return entry.node.distance() / (self._uses - entry.use) if entry.use < self._uses else float("inf")

    def least_used(self, held_by: str | None) -> list[Entry]:
        """Return some of the states on disk that were not used for longest, the least useful first.

        held_by: those that this tenant holds; None: those that are not held.
        """

        def may_go(x: Entry) -> bool:
            held = bool(x.holds)
            return not x.writes and (held and x.tenant == held_by if held_by is not None else not held)

        now, free = time.time(), filter(may_go, self.saved.values())
        return sorted(islice(free, SAMPLE), key=lambda x: x.node.distance() / max(now - x.used, 1e-3))

    def shares(self) -> Counter[str]:
        """Return the bytes of each tenant on disk, of all models: of files and tokens."""
        shares: Counter[str] = Counter()
        for entry in self.saved.values():
            shares[entry.tenant] += entry.bytes
        for tree in self._trees.values():
            shares[tree.owner.partition("/")[2]] += tree.nbytes
        return shares
