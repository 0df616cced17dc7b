"""The index of a folder of states: which there are, after which tokens, and what ids clients have for them.

SQLite in WAL mode: any number of processes read while one writes, and what was committed outlives them all.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tarnn.serving.model import StateKey
from tarnn.serving.storage import token_rows
from tarnn.serving.storage.schema import TABLES, VERSION
from tarnn.serving.storage.tree import Tokens

BUSY = 30.0  # seconds to wait for another process that writes
MOST_GONE = 10_000  # rows of ids that say why their states are gone


class StateRow(NamedTuple):
    """A state on disk. end: how many tokens it has seen. owner: whose tree it is in."""

    id: int
    node: int
    file: str
    bytes: int
    end: int
    owner: str


class NewHold(NamedTuple):
    """An id that a client is to be given."""

    tenant: str
    id: str
    name: str | None
    parent: str | None
    note: str
    created: float


class HoldRow(NamedTuple):
    """An id of a tenant's. state None: it is gone, and `gone` says why."""

    id: str
    name: str | None
    model: int
    state: int | None
    seal: str
    tokens: int
    bytes: int
    created: float
    used: float
    parent: str | None
    note: str
    gone: str


TENANT = "substr(owner, instr(owner, '/') + 1)"  # of a root
ID_BYTES = 300  # what an id takes in the index, measured
SHARES = f"""
    WITH RECURSIVE places(root, id, bytes) AS (
        SELECT node, node, 0 FROM roots
        UNION ALL SELECT p.root, n.id, length(n.tokens) FROM places p JOIN nodes n ON n.parent = p.id
    ),
    parts(tenant, bytes) AS (
        SELECT {TENANT}, p.bytes FROM places p JOIN roots r ON r.node = p.root
        UNION ALL SELECT {TENANT}, s.bytes FROM states s JOIN roots r ON r.node = s.root
        UNION ALL SELECT tenant, length(note) + {ID_BYTES} FROM holds
    )
    SELECT tenant, SUM(bytes) FROM parts GROUP BY tenant
"""
STATE = "SELECT id, s.node, file, bytes, end, owner FROM states s JOIN roots r ON r.node = s.root WHERE "
HOLD = "SELECT id, name, model, state, seal, tokens, bytes, created, used, parent, note, gone FROM holds WHERE tenant = ? AND "
HELD = "UPDATE states SET held = (SELECT COUNT(*) FROM holds WHERE state = ?1) WHERE id = ?1"


class Index:
    """One connection to the index, for any number of threads, one at a time. Raises sqlite3.Error where it can't be used."""

    def __init__(self, path: Path, key: StateKey):
        self.lock = threading.RLock()
        self.db = sqlite3.connect(path, timeout=BUSY, isolation_level=None, check_same_thread=False)
        try:
            self.db.execute("PRAGMA journal_mode = WAL")
            self.db.execute("PRAGMA synchronous = FULL")
            self._prepare()
            with self.change():
                self.db.execute(
                    "INSERT OR IGNORE INTO models (fingerprint, weights, isa, products) VALUES (?, ?, ?, ?)", key
                )
            find = "SELECT id FROM models WHERE fingerprint = ? AND weights = ? AND isa = ? AND products = ?"
            (self.model,) = self.db.execute(find, key).fetchone()
        except BaseException:
            self.db.close()
            raise

    def close(self) -> None:
        with self.lock:
            self.db.close()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """All that is changed in here, durable when the outermost is left, or nothing of it."""
        with self.lock:
            if self.db.in_transaction:
                yield self.db
                return
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield self.db
            except BaseException:
                self.db.execute("ROLLBACK")
                raise
            self.db.execute("COMMIT")

    def key(self, model: int) -> StateKey:
        """Of another model, too."""
        with self.lock:
            row = self.db.execute(
                "SELECT fingerprint, weights, isa, products FROM models WHERE id = ?", (model,)
            ).fetchone()
        return StateKey(*row)

    def state(self, id: int) -> StateRow | None:
        return next(self._states("id = ?", id), None)

    def longest(self, owner: str, tokens: Tokens, above: int | None = None) -> Iterator[StateRow]:
        """The states after beginnings of these tokens, longest first. above: a state that is one, to look below it alone."""
        with self.lock:
            start = None if above is None else self.state(above)
            root = self._root(owner)
            if root is None:
                return
            node, past = (root, 0) if start is None else (start.node, start.end)
            places = [(root, 0)] * (start is None) + list(token_rows.path(self.db, node, past, tokens))
        for place, _ in reversed(places):
            yield from self._states("s.node = ?", place)

    def sequence(self, node: int) -> Tokens:
        with self.lock:
            return token_rows.sequence(self.db, node)

    def hold(self, tenant: str, id_or_name: str) -> HoldRow | None:
        """By its id, or else the newest of this model by that name."""
        by_name = "model = ? AND name = ? ORDER BY state IS NULL, created DESC LIMIT 1"
        with self.lock:
            row = self.db.execute(HOLD + "id = ?", (tenant, id_or_name)).fetchone()
            row = row or self.db.execute(HOLD + by_name, (tenant, self.model, id_or_name)).fetchone()
        return None if row is None else HoldRow(*row)

    def holds(self, tenant: str) -> list[HoldRow]:
        """All of this model that are not gone, oldest first."""
        with self.lock:
            rows = self.db.execute(HOLD + "model = ? AND state IS NOT NULL ORDER BY created", (tenant, self.model))
            return [HoldRow(*row) for row in rows]

    def sizes(self) -> tuple[int, int, int]:
        """How many states there are, of all models, how many bytes they and the index take, and how many ids mean one."""
        with self.lock:
            count, total, held = self.db.execute("SELECT states, bytes, held FROM totals").fetchone()
            (pages,), (size,) = (self.db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
        return count, total + pages * size, held

    def shares(self) -> dict[str, int]:
        """Bytes of each tenant's states, of all models: their files, their tokens, and what is noted of them."""
        with self.lock:
            return dict(self.db.execute(SHARES).fetchall())

    def files(self) -> set[str]:
        with self.lock:
            return {file for (file,) in self.db.execute("SELECT file FROM states")}

    def put(self, owner: str, tokens: Tokens, file: str, size: int) -> StateRow:
        """The state after these tokens: a new row, or the one that is there already, with another file."""
        with self.change() as db:
            root = self._root(owner)
            if root is None:
                root = token_rows.new_root(db)
                db.execute("INSERT INTO roots (model, owner, node) VALUES (?, ?, ?)", (self.model, owner, root))
            node = token_rows.place(db, root, tokens)
            row = (node, root, len(tokens), file, size, time.time())
            db.execute(
                "INSERT OR IGNORE INTO states (node, root, end, file, bytes, used) VALUES (?, ?, ?, ?, ?, ?)", row
            )
            return next(self._states("s.node = ?", node))

    def add_hold(self, hold: NewHold, seal: str, size: int, state: int) -> None:
        """Raises sqlite3.IntegrityError where the id or the name means a state already, LookupError where the state is gone."""
        with self.change() as db:
            db.execute("DELETE FROM holds WHERE tenant = ? AND id = ? AND state IS NULL", hold[:2])
            columns = "tenant, id, name, parent, note, created, model, seal, bytes, used, state, tokens"
            values = "SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, id, end FROM states WHERE id = ?"
            row = (*hold, self.model, seal, size, time.time(), state)
            if not db.execute(f"INSERT INTO holds ({columns}) {values}", row).rowcount:
                raise LookupError(f"there is no state {state}")
            db.execute(HELD, (state,))

    def remove_hold(self, tenant: str, id: str, why: str = "") -> str | None:
        """The file of its state, if nobody else has an id for that: its row is gone then, and the file may go."""
        with self.change() as db:
            row = db.execute("SELECT state FROM holds WHERE tenant = ? AND id = ?", (tenant, id)).fetchone()
            if why:
                db.execute(
                    "UPDATE holds SET state = NULL, note = '', gone = ? WHERE tenant = ? AND id = ?", (why, tenant, id)
                )
            else:
                db.execute("DELETE FROM holds WHERE tenant = ? AND id = ?", (tenant, id))
            if row is None or row[0] is None:
                return None
            db.execute(HELD, row)
            nobody = db.execute("SELECT held FROM states WHERE id = ?", row).fetchone() == (0,)
            return self.forget(row[0], "") if nobody else None

    def forget(self, state: int, why: str) -> str | None:
        """Its file, which may go: there is no such state any more. why: what those are told who have an id for it."""
        with self.change() as db:
            row = self.state(state)
            if row is None:
                return None
            db.execute("UPDATE holds SET state = NULL, note = '', gone = ? WHERE state = ?", (why, state))
            db.execute("DELETE FROM states WHERE id = ?", (state,))
            token_rows.clear(db, row.node)
            return row.file

    def forget_file(self, file: str, why: str) -> None:
        """`forget`, by the file."""
        for row in self._states("file = ?", file):
            self.forget(row.id, why)

    def least(self, count: int, *, held_by: str | None) -> list[StateRow]:
        """Of the states that were not used for longest those least useful, worst first: by the tokens to be read again
        without them, and the time since their last use. held_by: those that this tenant has an id for; None: those that nobody
        has."""
        now = time.time()
        with self.lock:
            if held_by is None:
                rows = self._states("(held > 0) = 0 ORDER BY used LIMIT ?", count)
            else:
                rows = self._states(f"(held > 0) = 1 AND {TENANT} = ? ORDER BY used LIMIT ?", held_by, count)
            ages = {
                row: now - self.db.execute("SELECT used FROM states WHERE id = ?", row[:1]).fetchone()[0]
                for row in rows
            }
            worth = {row: token_rows.distance(self.db, row.node) / max(age, 1e-3) for row, age in ages.items()}
        return sorted(worth, key=worth.__getitem__)

    def touch(self, states: dict[int, float], holds: dict[tuple[str, str], float]) -> None:
        """When they were last used. Of ids whose states are gone the oldest are forgotten."""
        few = "SELECT rowid FROM holds WHERE state IS NULL ORDER BY used DESC LIMIT -1 OFFSET ?"
        with self.change() as db:
            db.execute(f"DELETE FROM holds WHERE rowid IN ({few})", (MOST_GONE,))
            db.executemany("UPDATE states SET used = MAX(used, ?) WHERE id = ?", [(x, id) for id, x in states.items()])
            rows = [(x, *key) for key, x in holds.items()]
            db.executemany("UPDATE holds SET used = MAX(used, ?) WHERE tenant = ? AND id = ?", rows)

    def expired(self, before: float) -> list[tuple[str, str]]:
        """Tenants and ids of holds of any model that nobody used since then."""
        with self.lock:
            rows = self.db.execute("SELECT tenant, id FROM holds WHERE used < ? AND state IS NOT NULL", (before,))
            return rows.fetchall()

    def _root(self, owner: str) -> int | None:
        row = self.db.execute("SELECT node FROM roots WHERE model = ? AND owner = ?", (self.model, owner)).fetchone()
        return None if row is None else row[0]

    def _states(self, which: str, *values: object) -> Iterator[StateRow]:
        with self.lock:
            return map(StateRow._make, self.db.execute(STATE + which, values).fetchall())

    def _prepare(self) -> None:
        """Tables, where there are none."""
        (version,) = self.db.execute("PRAGMA user_version").fetchone()
        if version == VERSION:
            return
        if version:
            raise sqlite3.NotSupportedError(f"version {version} of the index; this tarnn reads version {VERSION}")
        self.db.execute("PRAGMA auto_vacuum = FULL")
        self.db.executescript(f"BEGIN IMMEDIATE; {TABLES} COMMIT;")
