"""The radix tree over tokens as rows of the index, for several processes at once: `tree.py`, on disk.

A root has no parent and no tokens. Whoever changes rows has begun a transaction.
"""

from collections.abc import Iterator
from sqlite3 import Connection, DatabaseError

import numpy as np

from tarnn.serving.storage.tree import NONE, Tokens, common_length

TABLE = """
CREATE TABLE nodes (
    id INTEGER PRIMARY KEY,
    parent INTEGER REFERENCES nodes,
    first INTEGER NOT NULL,  -- of its tokens
    end INTEGER NOT NULL,  -- how many tokens the whole sequence has up to here
    tokens BLOB NOT NULL  -- those since the parent's, int32 in little endian
);
CREATE UNIQUE INDEX children ON nodes (parent, first);
"""
BROKEN = (None, -1, b"")
CHILD = "SELECT id, end, tokens FROM nodes WHERE parent = ? AND first = ?"


def path(db: Connection, node: int, past: int, tokens: Tokens) -> Iterator[tuple[int, int]]:
    """Places below this one that are beginnings of the tokens, with their lengths, shortest first. past: its own length."""
    while past < len(tokens):
        row = db.execute(CHILD, (node, int(tokens[past]))).fetchone()
        if row is None or row[1] <= past or not np.array_equal(of_blob(row[2]), tokens[past : row[1]]):
            return
        node, past = row[:2]
        yield node, past


def place(db: Connection, root: int, tokens: Tokens) -> int:
    """The place of these tokens, made where there is none."""
    node, past = [(root, 0), *path(db, root, 0, tokens)][-1]
    if past == len(tokens):
        return node
    below = db.execute(CHILD, (node, int(tokens[past]))).fetchone()
    if below is not None:
        child, label = below[0], of_blob(below[2])
        common = common_length(label, tokens[past:])
        db.execute("UPDATE nodes SET parent = NULL WHERE id = ?", (child,))
        node = _add(db, node, label[:common], past + common)
        move = "UPDATE nodes SET parent = ?, first = ?, tokens = ? WHERE id = ?"
        db.execute(move, (node, int(label[common]), to_blob(label[common:]), child))
        past += common
    return node if past == len(tokens) else _add(db, node, tokens[past:], len(tokens))


def clear(db: Connection, node: int) -> None:
    """No state is kept there any more; tokens that led nowhere else are let go, and a root without any."""
    while True:
        parent, label = db.execute("SELECT parent, tokens FROM nodes WHERE id = ?", (node,)).fetchone()
        children = db.execute("SELECT id, tokens FROM nodes WHERE parent = ? LIMIT 2", (node,)).fetchall()
        if children or db.execute("SELECT 1 FROM states WHERE node = ?", (node,)).fetchone():
            break
        db.execute("DELETE FROM nodes WHERE id = ?", (node,))
        if parent is None:
            db.execute("DELETE FROM roots WHERE node = ?", (node,))
            return
        node = parent
    kept = db.execute("SELECT 1 FROM states WHERE node = ?", (node,)).fetchone()
    if len(children) == 1 and parent is not None and not kept:
        ((child, rest),) = children
        db.execute("DELETE FROM nodes WHERE id = ?", (node,))
        join = "UPDATE nodes SET parent = ?, first = ?, tokens = ? WHERE id = ?"
        db.execute(join, (parent, int(of_blob(label)[0]), label + rest, child))


def sequence(db: Connection, node: int) -> Tokens:
    """All tokens from the root to this place. Raises DatabaseError where its rows don't fit together."""
    labels: list[Tokens] = []
    place: int | None = node
    past = None
    while place is not None:
        parent, end, blob = (
            db.execute("SELECT parent, end, tokens FROM nodes WHERE id = ?", (place,)).fetchone() or BROKEN
        )
        if (past is not None and end != past) or (parent is not None and not blob):
            raise DatabaseError(f"the rows of place {node} don't fit together")
        labels.append(of_blob(blob))
        place, past = parent, end - len(labels[-1])
    return np.concatenate([NONE, *labels[::-1]])


def distance(db: Connection, node: int) -> int:
    """How many tokens lie between this place and the nearest above with a state."""
    above = "SELECT n.parent, n.end, s.id FROM nodes n LEFT JOIN states s ON s.node = n.id WHERE n.id = ?"
    node, end, _ = db.execute(above, (node,)).fetchone()
    while node is not None:
        node, past, state = db.execute(above, (node,)).fetchone()
        if state is not None:
            return end - past
    return end


def new_root(db: Connection) -> int:
    return _add(db, None, NONE, 0)


def of_blob(blob: bytes) -> Tokens:
    return np.frombuffer(blob, "<i4")


def to_blob(tokens: Tokens) -> bytes:
    return tokens.astype("<i4").tobytes()


def _add(db: Connection, parent: int | None, tokens: Tokens, end: int) -> int:
    row = (parent, int(tokens[0]) if len(tokens) else -1, end, to_blob(tokens))
    id = db.execute("INSERT INTO nodes (parent, first, end, tokens) VALUES (?, ?, ?, ?)", row).lastrowid
    assert id is not None  # it was inserted
    return id
