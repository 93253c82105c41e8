"""The log's tables in the file, beside the ledger's; made when a log is first asked for.

They have a version of their own: a file keeps the ledger's, so that an earlier Semel goes on with
its ledger whether or not there is a log in it.

A stream is known by its number, and all else by that: a stream that begins anew gets another one,
and what was there before is deleted a few rows at a time. `serial` counts appends in the whole
file, in the order in which they became visible: that is what bells look at.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from semel.errors import SettingsError

VERSION: Final = 1

# The state as a whole is the field without a name: kept apart from the row that every append
# writes. `due_us`: from when on a sweep has something to delete.
SCHEMA: Final = """
CREATE TABLE semel_log_layout (
    version INTEGER NOT NULL,
    serial INTEGER NOT NULL
);
CREATE TABLE semel_stream (
    number INTEGER NOT NULL PRIMARY KEY,
    stream TEXT UNIQUE,
    head INTEGER NOT NULL,
    head_tag TEXT NOT NULL,
    floor INTEGER NOT NULL,
    floor_tag TEXT NOT NULL,
    ended INTEGER NOT NULL,
    gone_us INTEGER,
    until_us INTEGER,
    due_us INTEGER,
    serial INTEGER NOT NULL
);
CREATE INDEX ix_semel_stream_serial ON semel_stream (serial);
CREATE INDEX ix_semel_stream_due ON semel_stream (due_us) WHERE due_us IS NOT NULL;
CREATE TABLE semel_log (
    number INTEGER NOT NULL,
    position INTEGER NOT NULL,
    tag TEXT NOT NULL,
    id TEXT NOT NULL,
    data BLOB NOT NULL,
    at_us INTEGER NOT NULL,
    PRIMARY KEY (number, position)
) WITHOUT ROWID;
CREATE TABLE semel_mark (
    number INTEGER NOT NULL,
    id TEXT NOT NULL,
    mark TEXT NOT NULL,
    position INTEGER NOT NULL,
    tag TEXT NOT NULL,
    reply BLOB NOT NULL,
    until_us INTEGER NOT NULL,
    PRIMARY KEY (number, id)
) WITHOUT ROWID;
CREATE INDEX ix_semel_mark_position ON semel_mark (number, position);
CREATE TABLE semel_fence (
    number INTEGER NOT NULL,
    name TEXT NOT NULL,
    fence INTEGER NOT NULL,
    PRIMARY KEY (number, name)
) WITHOUT ROWID;
CREATE TABLE semel_field (
    number INTEGER NOT NULL,
    name TEXT NOT NULL,
    rank INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (number, name)
) WITHOUT ROWID;
INSERT INTO semel_log_layout VALUES (1, 0)
"""

IS_THERE: Final = "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'semel_log_layout'"
LAYOUT: Final = "SELECT version FROM semel_log_layout"
SERIAL: Final = "SELECT serial FROM semel_log_layout"
NEXT_SERIAL: Final = "UPDATE semel_log_layout SET serial = serial + 1 RETURNING serial"

STREAM: Final = (
    "SELECT number, head, head_tag, floor, floor_tag, ended, gone_us, until_us "
    "FROM semel_stream WHERE stream = ?"
)
NEW_STREAM: Final = (
    "INSERT INTO semel_stream (stream, head, head_tag, floor, floor_tag, ended, serial) "
    "VALUES (?, 0, '', 0, '', 0, 0)"
)
RETIRE: Final = "UPDATE semel_stream SET stream = NULL, until_us = 0, due_us = 0 WHERE number = ?"
PUT_STREAM: Final = (
    "UPDATE semel_stream SET head = ?, head_tag = ?, floor = ?, floor_tag = ?, ended = ?, "
    "gone_us = ?, until_us = ?, due_us = ? WHERE number = ?"
)
MOVED: Final = "UPDATE semel_stream SET serial = ? WHERE number = ?"
PUT_FLOOR: Final = "UPDATE semel_stream SET floor = ?, floor_tag = ? WHERE number = ?"
CHANGED: Final = "SELECT stream, serial FROM semel_stream WHERE serial > ? LIMIT ?"
HEADS: Final = "SELECT stream, head, head_tag, until_us FROM semel_stream WHERE stream IN ({})"

TAG: Final = "SELECT tag FROM semel_log WHERE number = ? AND position = ?"
BEHIND: Final = (
    "SELECT position, tag, id, data, at_us FROM semel_log "
    "WHERE number = ? AND position > ? ORDER BY position LIMIT ?"
)
PUT_ENTRY: Final = "INSERT INTO semel_log VALUES (?, ?, ?, ?, ?, ?)"
TRIM: Final = "DELETE FROM semel_log WHERE number = ? AND position <= ?"

MARK: Final = (
    "SELECT mark, position, tag, reply, until_us FROM semel_mark WHERE number = ? AND id = ?"
)
PUT_MARK: Final = "INSERT OR REPLACE INTO semel_mark VALUES (?, ?, ?, ?, ?, ?, ?)"
# Only the oldest few are looked at, so that this costs the same however many there are.
FORGET: Final = (
    "DELETE FROM semel_mark WHERE number = ?1 AND id IN (SELECT id FROM ("
    "SELECT id, until_us FROM semel_mark WHERE number = ?1 AND position <= ?2 "
    "ORDER BY position LIMIT ?3) WHERE until_us <= ?4)"
)

FENCE: Final = "SELECT fence FROM semel_fence WHERE number = ? AND name = ?"
PUT_FENCE: Final = "INSERT OR REPLACE INTO semel_fence VALUES (?, ?, ?)"
RANK: Final = "SELECT rank FROM semel_field WHERE number = ? AND name = ?"
PUT_FIELD: Final = "INSERT OR REPLACE INTO semel_field VALUES (?, ?, ?, ?)"
FIELDS: Final = "SELECT name, rank, data FROM semel_field WHERE number = ?"

DUE: Final = "SELECT number, until_us FROM semel_stream WHERE due_us <= ? ORDER BY due_us LIMIT ?"
# What a sweep has taken something of stays gone, or over, even if the clock goes back.
GONE: Final = "UPDATE semel_stream SET gone_us = 0 WHERE number = ?"
OVER: Final = "UPDATE semel_stream SET until_us = 0 WHERE number = ?"
NOT_DUE: Final = "UPDATE semel_stream SET due_us = until_us WHERE number = ?"
DROP: Final = "DELETE FROM semel_stream WHERE number = ?"
_EMPTY: Final = (
    "DELETE FROM {0} WHERE number = ?1 AND {1} IN (SELECT {1} FROM {0} WHERE number = ?1 LIMIT ?2)"
)
EMPTY_READABLE: Final = (
    _EMPTY.format("semel_log", "position"),
    _EMPTY.format("semel_field", "name"),
)
EMPTY: Final = (
    *EMPTY_READABLE,
    _EMPTY.format("semel_mark", "id"),
    _EMPTY.format("semel_fence", "name"),
)


def is_there(connection: sqlite3.Connection, path: str) -> bool:
    """Does the file have the log's tables? A later Semel's are refused."""
    if connection.execute(IS_THERE).fetchone() is None:
        return False
    (version,) = connection.execute(LAYOUT).fetchone()
    if version > VERSION:
        raise SettingsError(
            f"the log in {path} has version {version}, this version of Semel knows {VERSION}; "
            "upgrade Semel, or give SQLiteStore a file of its own"
        )
    return True


def create(connection: sqlite3.Connection) -> None:
    if connection.execute(IS_THERE).fetchone() is not None:  # another process was faster
        return
    for statement in SCHEMA.split(";"):
        connection.execute(statement)
