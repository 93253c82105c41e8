"""The table: its columns, the statements over them, and what makes a file ours."""

# The statements are put together from the names in COLUMNS, nothing else.
# ruff: noqa: S608

from __future__ import annotations

import sqlite3
import time
from typing import Final

from semel.errors import SettingsError
from semel.values import Guarantees

VERSION: Final = 1
FULL: Final = 2  # as PRAGMA synchronous says it

COLUMNS: Final = (
    "id",
    "idempotency_key",
    "tenant_id",
    "operation",
    "request_hash",
    "state",
    "attempt",
    "fence",
    "number",
    "hold",
    "created_us",
    "started_us",
    "lease_us",
    "completed_us",
    "expires_us",
    "outcome",
    "response",
    "status_code",
    "error",
    "steps",
    "past",
)

# What a replay reads, and what the seal is the checksum of, together with the id.
REPLAYED: Final = (
    "state",
    "operation",
    "request_hash",
    "expires_us",
    "fence",
    "outcome",
    "response",
    "status_code",
)

SCHEMA: Final = """
CREATE TABLE idempotency (
    id BLOB NOT NULL PRIMARY KEY,
    idempotency_key TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    operation TEXT NOT NULL,
    request_hash BLOB NOT NULL,
    state TEXT NOT NULL,
    attempt TEXT NOT NULL,
    fence INTEGER NOT NULL,
    number INTEGER NOT NULL,
    hold INTEGER NOT NULL,
    created_us INTEGER NOT NULL,
    started_us INTEGER NOT NULL,
    lease_us INTEGER NOT NULL,
    completed_us INTEGER,
    expires_us INTEGER,
    outcome TEXT,
    response BLOB,
    status_code INTEGER,
    error TEXT,
    steps TEXT,
    past TEXT NOT NULL,
    seal INTEGER,
    checksum INTEGER NOT NULL
);
CREATE INDEX ix_idempotency_expires ON idempotency (expires_us);
CREATE TABLE idempotency_floor (fence INTEGER NOT NULL);
INSERT INTO idempotency_floor VALUES (0);
"""

_LIST: Final = ", ".join(COLUMNS)
SELECT: Final = f"SELECT {_LIST}, checksum FROM idempotency WHERE id = ?"
PAGE: Final = f"SELECT {_LIST}, checksum FROM idempotency WHERE id > ? ORDER BY id LIMIT ?"
REPLAY: Final = f"SELECT {', '.join(REPLAYED)}, seal FROM idempotency WHERE id = ?"
INSERT: Final = (
    f"INSERT INTO idempotency ({_LIST}, checksum, seal, rowid) "
    f"VALUES ({', '.join('?' * (len(COLUMNS) + 3))})"
)
# The id stays out of it: SQLite would take its index for changed.
UPDATE: Final = (
    f"UPDATE idempotency SET {', '.join(f'{name} = ?' for name in COLUMNS[1:])}, "
    f"checksum = ?, seal = ? WHERE id = ?"
)
# As long as any other lock is waited for.
WAL_WITHIN_S: Final = 5.0

FLOOR: Final = "SELECT fence FROM idempotency_floor"
RAISE_FLOOR: Final = "UPDATE idempotency_floor SET fence = max(fence, ?)"
DELETE: Final = "DELETE FROM idempotency WHERE id = ?"
DELETE_EXPIRED: Final = (
    "DELETE FROM idempotency WHERE id IN "
    "(SELECT id FROM idempotency WHERE expires_us <= ? LIMIT ?) RETURNING fence"
)


def wal(connection: sqlite3.Connection) -> None:
    """Of several who make the same file at once, SQLite tells all but one that it is locked, and
    does not let them wait: each would have to wait for the other.
    """
    until = time.monotonic() + WAL_WITHIN_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= until:
                raise
            time.sleep(0.01)
        else:
            return


def user_version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


OWN: Final = {"idempotency", "idempotency_floor"}

# Of SQLiteBroker, which shares any file.
BESIDE: Final = {
    "broker_layout",
    "broker_shard",
    "broker_entry",
    "broker_group",
    "broker_pending",
}


def refuse_foreign(connection: sqlite3.Connection, path: str) -> None:
    """Before anything is changed in a file that is another's, its journal mode included."""
    if problem := foreign(connection, path):
        raise SettingsError(problem)


def foreign(connection: sqlite3.Connection, path: str) -> str:
    """Whose tables these are, if not ours, and what to write instead; "" if ours, or none.

    `user_version` alone does not tell: an application's migrations count with it too.
    """
    names = _names(connection)
    theirs = f"sqlite+pysqlite:///{path}"
    if _is_sql_store(connection, names):
        return f"{path} was made by SQLStore; write {theirs}"
    if not names or (names & OWN and user_version(connection) >= VERSION):
        return ""
    if "idempotency" in names:
        return (
            f"{path} has a table idempotency that SQLiteStore did not make; open it with the "
            "store that made it, or give SQLiteStore a file of its own"
        )
    return (
        f"{path} has other tables; for tables in your application's database use {theirs}, or "
        "give SQLiteStore a file of its own"
    )


def maker(connection: sqlite3.Connection) -> str:
    """The store of ours that made this file, "" for none."""
    names = _names(connection)
    if _is_sql_store(connection, names):
        return "SQLStore"
    return "SQLiteStore" if "idempotency_floor" in names else ""


def _names(connection: sqlite3.Connection) -> set[str]:
    select = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT GLOB 'sqlite_*'"
    return {name for (name,) in connection.execute(select)} - BESIDE


def _is_sql_store(connection: sqlite3.Connection, names: set[str]) -> bool:
    columns = "SELECT 1 FROM pragma_table_info('idempotency') WHERE name = 'lease_until'"
    return "semel_schema" in names or connection.execute(columns).fetchone() is not None


def create(connection: sqlite3.Connection) -> None:
    if user_version(connection) == VERSION:  # another process was faster
        return
    for statement in SCHEMA.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def guarantees_of(connection: sqlite3.Connection) -> Guarantees:
    level = connection.execute("PRAGMA synchronous").fetchone()[0]
    mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    durable = level >= FULL and mode != "off"
    why = [
        f"PRAGMA synchronous is {level}, journal_mode is {mode}: "
        + ("a commit waits for the disk" if durable else "a commit does not wait for the disk"),
        "one file on one machine: nothing to fail over to",
    ]
    return Guarantees(
        store="sqlite",
        survives=frozenset({"process_crash", "power_loss"} if durable else {"process_crash"}),
        shared=True,
        why=tuple(why),
    )
