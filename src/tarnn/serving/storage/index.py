"""The index of a folder of states, in SQLite: what was committed outlives the process.

It is read once, when the folder is opened; then `states.py` and `ids.py` have all of it in memory, but for the notes.
"""

import errno
import os
import secrets
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tarnn.errors import UserError
from tarnn.serving.model import StateKey
from tarnn.serving.storage.ids import MOST_GONE, Hold, Holds
from tarnn.serving.storage.states import Entry, States

VERSION = 2
MODELS_AND_HOLDS = """
CREATE TABLE models (
    id INTEGER PRIMARY KEY, fingerprint TEXT, weights TEXT, isa TEXT, products TEXT,
    UNIQUE (fingerprint, weights, isa, products)
);
CREATE TABLE holds (
    tenant TEXT NOT NULL, id TEXT NOT NULL, name TEXT,
    model INTEGER NOT NULL REFERENCES models,
    state INTEGER REFERENCES states,  -- NULL if it is gone
    seal TEXT NOT NULL,  -- over tenant, id and the state's tokens
    tokens INTEGER NOT NULL, bytes INTEGER NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, parent TEXT, note TEXT NOT NULL,
    gone TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (tenant, id)
);
CREATE UNIQUE INDEX by_name ON holds (tenant, model, name) WHERE name IS NOT NULL AND state IS NOT NULL;
CREATE INDEX by_state ON holds (state);
"""
STATES = f"""
CREATE TABLE states (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    model INTEGER NOT NULL REFERENCES models,
    owner TEXT NOT NULL,
    above INTEGER REFERENCES states,  -- one after a beginning of its tokens; NULL: none
    tokens BLOB NOT NULL,  -- those since that one's, int32 in little endian
    file TEXT NOT NULL UNIQUE,
    bytes INTEGER NOT NULL,
    used REAL NOT NULL
);
CREATE INDEX by_above ON states (above);
PRAGMA user_version = {VERSION};
"""
V1_TABLES = ("states", "roots", "nodes", "totals")  # gone in version 2
HOLDS = (
    "SELECT tenant, id, name, parent, tokens, bytes, created, used, model, seal, length(CAST(note AS BLOB)), state, gone "
    "FROM holds ORDER BY created"
)


class Index:
    """One connection, for any number of threads, one at a time. model: the number of the served model.

    Raises sqlite3.Error where it can't be used.
    """

    def __init__(self, path: Path, key: StateKey):
        self._lock = threading.RLock()
        self.db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self.db.execute("PRAGMA journal_mode = WAL")
            self.db.execute("PRAGMA synchronous = FULL")
            self._prepare()
            with self.change():
                self.db.execute(
                    "INSERT OR IGNORE INTO models (fingerprint, weights, isa, products) VALUES (?, ?, ?, ?)", key
                )
            find = "SELECT id FROM models WHERE fingerprint = ? AND weights = ? AND isa = ? AND products = ?"
            self.model: int = self.db.execute(find, key).fetchone()[0]
        except BaseException:
            self.db.close()
            raise

    def close(self) -> None:
        with self._lock:
            self.db.close()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Make all changes inside durable, or none of them."""
        with self._lock:
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self.db.execute("ROLLBACK")
                raise
            self.db.execute("COMMIT")

    def key(self, model: int) -> StateKey:
        """Return the key of a model, which may be another one than the served."""
        [row] = self._rows("SELECT fingerprint, weights, isa, products FROM models WHERE id = ?", model)
        return StateKey(*row)

    def read(self, states: States, holds: Holds) -> None:
        """Read all states and ids. Raises LookupError, TypeError or ValueError for an index that is damaged."""
        states.clear()
        holds.clear()
        states.model = holds.model = self.model
        by_above: dict[int | None, list[tuple[Any, ...]]] = defaultdict(list)
        for row in self._rows("SELECT id, model, owner, above, tokens, file, bytes, used FROM states"):
            by_above[row[3]].append(row)
        entries: dict[int | None, Entry] = {}
        aboves: list[int | None] = [None]
        while aboves:
            above = aboves.pop()
            for id, model, owner, _, tokens, file, size, used in by_above.pop(above, ()):
                entry = entries[id] = states.place(owner, np.frombuffer(tokens, "<i4"), model, entries.get(above))
                if entry.id or (above is not None and entry.tree is not entries[above].tree):
                    raise LookupError(f"state {id} is not where it should be")
                entry.used = float(used)
                states.save(entry, id, str(file), int(size))
                aboves.append(id)
        if by_above:
            raise LookupError("there are states after others that are not there")
        states.saved = dict(sorted(states.saved.items(), key=lambda item: item[1].used))
        for tenant, id, name, parent, num, size, created, used, model, seal, note_bytes, state, why in self._rows(
            HOLDS
        ):
            if state is None:
                holds.bury(tenant, str(why), id, name if model == self.model else None)
                continue
            times = float(created), float(used)
            hold = Hold(tenant, id, name, parent, None, int(num), int(size), *times, model, seal, int(note_bytes))
            holds.add(hold, entries[state])

    def note(self, hold: Hold) -> str:
        rows = self._rows("SELECT note FROM holds WHERE tenant = ? AND id = ?", hold.tenant, hold.id)
        return str(rows[0][0]) if rows else ""

    def size(self) -> int:
        """Return the bytes of the index, without its log."""
        [(pages,)], [(size,)] = self._rows("PRAGMA page_count"), self._rows("PRAGMA page_size")
        return int(pages * size)

    # in a change

    def add_state(self, *row: object) -> int:
        """Enter (model, owner, above, tokens, file, bytes, used); return its number, which is never used again."""
        values = "INSERT INTO states (model, owner, above, tokens, file, bytes, used) VALUES (?, ?, ?, ?, ?, ?, ?)"
        id = self.db.execute(values, row).lastrowid
        assert id is not None  # it was inserted
        return id

    def remove_state(self, state: int, why: str) -> None:
        """Remove a state; those that went on from it take its tokens. why: for clients that have an id for it."""
        own = "(SELECT {} FROM states WHERE id = ?1)".format
        join = f"UPDATE states SET tokens = CAST({own('tokens')} || tokens AS BLOB), above = {own('above')} WHERE above = ?1"
        self.db.execute(join, (state,))
        self.db.execute("UPDATE holds SET state = NULL, note = '', gone = ? WHERE state = ?", (why, state))
        self.db.execute("DELETE FROM states WHERE id = ?", (state,))

    def add_hold(self, hold: Hold, state: int) -> None:
        """Enter an id. Raises sqlite3.IntegrityError if it, or its name, means a state already."""
        columns = "tenant, id, name, model, state, seal, tokens, bytes, created, used, parent, note"
        row = (hold.tenant, hold.id, hold.name, hold.model, state, hold.seal, hold.tokens, hold.bytes, hold.created)
        self.db.execute("DELETE FROM holds WHERE tenant = ? AND id = ? AND state IS NULL", row[:2])
        values = f"INSERT INTO holds ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        self.db.execute(values, (*row, hold.used, hold.parent, hold.note))

    def remove_hold(self, hold: Hold, why: str) -> None:
        """Remove an id; why: for the client, "" for nothing."""
        remove = "DELETE FROM holds WHERE tenant = ? AND id = ?"
        if why:
            remove = "UPDATE holds SET state = NULL, note = '', gone = ? WHERE tenant = ? AND id = ?"
        self.db.execute(remove, (*([why] if why else []), hold.tenant, hold.id))

    def touch(self, states: Iterable[tuple[float, int]], holds: Iterable[tuple[float, str, str]]) -> None:
        """Enter the times of last use: (time, state), and (time, tenant, id). Forget the oldest ids that are gone."""
        few = "SELECT rowid FROM holds WHERE state IS NULL ORDER BY used DESC LIMIT -1 OFFSET ?"
        self.db.execute(f"DELETE FROM holds WHERE rowid IN ({few})", (MOST_GONE,))
        self.db.executemany("UPDATE states SET used = ? WHERE id = ?", states)
        self.db.executemany("UPDATE holds SET used = ? WHERE tenant = ? AND id = ?", holds)

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self.db.execute(query, values).fetchall()

    def _prepare(self) -> None:
        """Make the tables, if there are none, or from those of version 1."""
        [(version,)] = self._rows("PRAGMA user_version")
        if version == 1:
            self._take_over()
        elif version == 0:
            self.db.execute("PRAGMA auto_vacuum = FULL")
            self.db.executescript(f"BEGIN IMMEDIATE; {MODELS_AND_HOLDS} {STATES} COMMIT;")
        elif version != VERSION:
            raise sqlite3.NotSupportedError(f"version {version} of the index; this tarnn reads version {VERSION}")

    def _take_over(self) -> None:
        """Turn version 1, which had its trees of tokens in tables, into this one."""
        nodes = {id: row for id, *row in self._rows("SELECT id, parent, tokens FROM nodes")}
        owners = {node: row for node, *row in self._rows("SELECT node, model, owner FROM roots")}
        states = self._rows("SELECT id, node, root, file, bytes, used FROM states")
        state_at, rows = {node: id for id, node, *_ in states}, []
        for id, node, root, *file in states:
            place, tokens = nodes[node]
            while place is not None and place not in state_at:
                place, before = nodes[place]
                tokens = before + tokens
            rows.append((id, *owners[root], state_at.get(place), tokens, *file))
        old = [*(f"TRIGGER IF EXISTS {x}_held" for x in ("more", "fewer", "gone")), *(f"TABLE {x}" for x in V1_TABLES)]
        drop = " ".join(f"DROP {x};" for x in old)
        self.db.executescript(f"BEGIN IMMEDIATE; {drop} {STATES}")
        self.db.executemany("INSERT INTO states VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        self.db.execute("COMMIT")


def is_sound(path: Path) -> bool:
    """Return True for a SQLite database as SQLite left it. Raises sqlite3.OperationalError if it can't be read."""
    if not path.is_file():
        return False
    db = sqlite3.connect(path)
    try:
        return bool(db.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
    except sqlite3.OperationalError:
        raise
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return False
    finally:
        db.close()


def set_aside(folder: Path) -> None:
    """Move a damaged index away, with the files of its states; nothing is deleted, and the folder is empty."""
    aside = folder / f"damaged-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    aside.mkdir()
    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "states"):
        if (folder / name).exists():
            os.rename(folder / name, aside / name)
    (folder / "states").mkdir()


def lock_folder(folder: Path) -> int:
    """Take a folder for this store alone; return the descriptor that keeps it until it is closed or the process ends.

    Raises UserError if another server has the folder, or if it can't be written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(
            f"states can't be kept in {folder}: {error.strerror}. Give a folder that this user may write to."
        ) from error
    from fcntl import LOCK_EX, LOCK_NB, flock

    try:
        flock(file, LOCK_EX | LOCK_NB)
    except OSError as error:
        os.close(file)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise UserError(
            f"the states in {folder} belong to a server that is running. Stop it first, or give this one another folder: "
            "each server has one of its own."
        ) from error
    return file
