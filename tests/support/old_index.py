"""The index of a folder of states as tarnn's first version wrote it: trees of tokens in tables, and sums by triggers."""

import sqlite3

import numpy as np

from tarnn.serving.storage.states import Tree

OLD = """
CREATE TABLE nodes (
    id INTEGER PRIMARY KEY, parent INTEGER REFERENCES nodes, first INTEGER NOT NULL, end INTEGER NOT NULL, tokens BLOB NOT NULL
);
CREATE UNIQUE INDEX children ON nodes (parent, first);
CREATE TABLE roots (
    model INTEGER NOT NULL REFERENCES models, owner TEXT NOT NULL, node INTEGER NOT NULL UNIQUE REFERENCES nodes,
    PRIMARY KEY (model, owner)
);
CREATE TABLE states (
    id INTEGER PRIMARY KEY AUTOINCREMENT, node INTEGER NOT NULL UNIQUE REFERENCES nodes, root INTEGER NOT NULL REFERENCES nodes,
    end INTEGER NOT NULL, file TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL, used REAL NOT NULL, held INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX by_use ON states (held > 0, used);
CREATE INDEX by_age ON holds (used);
CREATE TABLE totals (states INTEGER NOT NULL, bytes INTEGER NOT NULL, held INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0, 0);
CREATE TRIGGER more AFTER INSERT ON states BEGIN
    UPDATE totals SET states = states + 1, bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER fewer AFTER DELETE ON states BEGIN
    UPDATE totals SET states = states - 1, bytes = bytes - OLD.bytes;
END;
CREATE TRIGGER more_held AFTER INSERT ON holds BEGIN
    UPDATE totals SET held = held + 1;
END;
CREATE TRIGGER fewer_held AFTER DELETE ON holds WHEN OLD.state IS NOT NULL BEGIN
    UPDATE totals SET held = held - 1;
END;
CREATE TRIGGER gone_held AFTER UPDATE OF state ON holds WHEN OLD.state IS NOT NULL AND NEW.state IS NULL BEGIN
    UPDATE totals SET held = held - 1;
END;
PRAGMA user_version = 1;
"""


def to_version_1(path, sequences):
    """Rewrite an index. sequences: (owner, tokens) of all its states, by their files."""
    db = sqlite3.connect(path)
    states = db.execute("SELECT id, model, owner, file, bytes, used FROM states").fetchall()
    db.executescript(f"DROP TABLE states; {OLD}")
    trees, places = {}, {}
    for id, model, owner, file, *_ in states:
        tree = trees.setdefault((model, owner), Tree())
        places[id] = tree.place(np.array(sequences[file], np.int32))
    ids = {}
    for (model, owner), tree in trees.items():
        nodes = [tree.root]
        while nodes:
            node = nodes.pop()
            first, parent = int(node.tokens[0]) if len(node.tokens) else -1, ids.get(node.parent)
            row = (parent, first, node.end, node.tokens.astype("<i4").tobytes())
            ids[node] = db.execute("INSERT INTO nodes (parent, first, end, tokens) VALUES (?, ?, ?, ?)", row).lastrowid
            nodes += node.children.values()
        db.execute("INSERT INTO roots VALUES (?, ?, ?)", (model, owner, ids[tree.root]))
    for id, model, owner, file, size, used in states:
        row = (id, ids[places[id]], ids[trees[model, owner].root], places[id].end, file, size, used)
        db.execute("INSERT INTO states (id, node, root, end, file, bytes, used) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    db.commit()
    db.close()
