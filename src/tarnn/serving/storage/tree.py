"""A radix tree over tokens: sequences that begin alike share their beginnings."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

Tokens = Int[np.ndarray, " t"]
NODE_BYTES = 600  # what a node takes beside its tokens: objects of Python, measured
NONE = np.zeros(0, np.int32)


class Node:
    """A place in the tree: the tokens from its parent's place to its own, and whatever is kept there.

    end: how many tokens the whole sequence has up to here. kept None: it is a fork in the road only.
    """

    __slots__ = ("children", "end", "kept", "parent", "tokens")

    def __init__(self, parent: "Node | None", tokens: Tokens, end: int):
        self.parent, self.tokens, self.end = parent, tokens, end
        self.children: dict[int, Node] = {}
        self.kept: Any = None

    def sequence(self) -> Tokens:
        """All tokens from the root to here."""
        parts: list[Tokens] = []
        node = self
        while node.parent is not None:
            parts.append(node.tokens)
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else NONE

    def distance(self) -> int:
        """How many tokens lie between here and the nearest kept place above: those to be read again without this one."""
        node = self.parent
        while node is not None and node.kept is None:
            node = node.parent
        return self.end - (0 if node is None else node.end)


class Tree:
    """Places of sequences of tokens. nbytes: what all of it takes, but for what is kept there."""

    def __init__(self) -> None:
        self.root = Node(None, NONE, 0)
        self.nbytes = NODE_BYTES

    def path(self, tokens: Tokens) -> Iterator[Node]:
        """The places that are beginnings of these tokens, shortest first."""
        node: Node | None = self.root
        while node is not None:
            yield node
            past = node.end
            node = node.children.get(int(tokens[past])) if past < len(tokens) else None
            if node is not None and not np.array_equal(node.tokens, tokens[past : node.end]):
                return

    def place(self, tokens: Tokens) -> Node:
        """The place of these tokens, made where there is none."""
        *_, node = self.path(tokens)
        if node.end == len(tokens):
            return node
        rest = tokens[node.end :]
        below = node.children.get(int(rest[0]))
        if below is not None:
            node = self._cut(below, common_length(below.tokens, rest))
            rest = tokens[node.end :]
        if not len(rest):
            return node
        return self._add(node, np.array(rest, np.int32), len(tokens))

    def clear(self, node: Node) -> None:
        """Nothing is kept there any more; tokens that led nowhere else are let go."""
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
        """A new place above this one, after the first `count` of its tokens."""
        above, first, rest = node.parent, node.tokens[:count].copy(), node.tokens[count:].copy()
        assert above is not None  # the root has no tokens
        self.nbytes -= first.nbytes
        upper = self._add(above, first, node.end - len(rest))
        upper.children[int(rest[0])] = node
        node.parent, node.tokens = upper, rest
        return upper

    def _join(self, node: Node) -> None:
        """Its only child takes this one's place, and its tokens."""
        (child,) = node.children.values()
        assert node.parent is not None  # only places below the root are joined
        child.tokens, child.parent = np.concatenate([node.tokens, child.tokens]), node.parent
        node.parent.children[int(child.tokens[0])] = child
        self.nbytes -= NODE_BYTES


def common_length(a: Tokens, b: Tokens) -> int:
    """How many tokens they begin with alike."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length
