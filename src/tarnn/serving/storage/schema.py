"""The tables of the index of a folder of states."""

from tarnn.serving.storage import token_rows

VERSION = 1
TABLES = f"""
CREATE TABLE models (
    id INTEGER PRIMARY KEY, fingerprint TEXT, weights TEXT, isa TEXT, products TEXT,
    UNIQUE (fingerprint, weights, isa, products)
);
{token_rows.TABLE}
CREATE TABLE roots (
    model INTEGER NOT NULL REFERENCES models, owner TEXT NOT NULL, node INTEGER NOT NULL UNIQUE REFERENCES nodes,
    PRIMARY KEY (model, owner)
);
CREATE TABLE states (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used again, so that a process may remember it
    node INTEGER NOT NULL UNIQUE REFERENCES nodes,
    root INTEGER NOT NULL REFERENCES nodes,
    end INTEGER NOT NULL,  -- how many tokens it has seen
    file TEXT NOT NULL UNIQUE,
    bytes INTEGER NOT NULL,
    used REAL NOT NULL,
    held INTEGER NOT NULL DEFAULT 0  -- how many ids mean it
);
CREATE INDEX by_use ON states (held > 0, used);
CREATE TABLE holds (
    tenant TEXT NOT NULL, id TEXT NOT NULL, name TEXT,
    model INTEGER NOT NULL REFERENCES models,
    state INTEGER REFERENCES states,  -- NULL where it is gone
    seal TEXT NOT NULL,  -- over tenant, id and the state's tokens
    tokens INTEGER NOT NULL, bytes INTEGER NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, parent TEXT, note TEXT NOT NULL,
    gone TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (tenant, id)
);
CREATE UNIQUE INDEX by_name ON holds (tenant, model, name) WHERE name IS NOT NULL AND state IS NOT NULL;
CREATE INDEX by_state ON holds (state);
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
PRAGMA user_version = {VERSION};
"""
