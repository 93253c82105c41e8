"""The tables, and the way from one version of them to the next.

`idempotency` holds one row per key: whoever reads it sees what was asked, by whom, and how it
ended. Steps and finished attempts live in the row itself, so that they are born, taken over and
deleted with it: a row table of their own could outlive the record and hand its steps to the next
one of the same key. `semel_schema` says which version each part of the schema has.

Alembic users: run what `ddl(name)` returns in a migration of your own and stamp nothing; `check`
tells whether the tables are as they should be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from semel.colour import SYNC, run
from semel.errors import SettingsError
from semel.stores.sql import lines
from semel.stores.sql.dialects import dialect_named
from semel.stores.sql.faults import Fault, fault_of, unavailable
from semel.stores.sql.links import Link

PART = "ledger"
VERSION = 1

TABLE = "idempotency"
VERSIONS = "semel_schema"


# --- the tables ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A column's type in each database."""

    name: str
    postgresql: str
    mysql: str
    sqlite: str
    null: bool = False

    def kind(self, database: str) -> str:
        kind: str = getattr(self, database)
        return kind


def _time(name: str, *, null: bool = False) -> Column:
    return Column(name, "TIMESTAMP WITH TIME ZONE", "DATETIME(6)", "TEXT", null)


COLUMNS = (
    Column("id", "BYTEA", "BINARY(32)", "BLOB"),
    Column("idempotency_key", "TEXT", "TEXT", "TEXT"),
    Column("tenant_id", "VARCHAR(255)", "VARCHAR(255)", "TEXT"),
    Column("operation", "TEXT", "TEXT", "TEXT"),
    Column("request_hash", "TEXT", "TEXT", "TEXT"),
    # MariaDB's own JSON type refuses JSON that is nested deeper than 32 levels, and MySQL's
    # writes it anew: a result must come back to the byte, so there it is text.
    Column("response", "JSON", "LONGTEXT", "TEXT", null=True),
    Column("body", "BYTEA", "LONGBLOB", "BLOB", null=True),
    Column("outcome", "VARCHAR(8)", "VARCHAR(8)", "TEXT", null=True),
    Column("status_code", "INTEGER", "INTEGER", "INTEGER", null=True),
    Column("state", "VARCHAR(20)", "VARCHAR(20)", "TEXT"),
    Column("attempt", "TEXT", "TEXT", "TEXT"),
    Column("fence", "BIGINT", "BIGINT", "INTEGER"),
    Column("number", "INTEGER", "INTEGER", "INTEGER"),
    Column("hold", "BOOLEAN", "BOOLEAN", "BOOLEAN"),
    Column("steps", "TEXT", "LONGTEXT", "TEXT", null=True),
    Column("past", "TEXT", "LONGTEXT", "TEXT", null=True),
    Column("error", "TEXT", "LONGTEXT", "TEXT", null=True),
    _time("created_at"),
    _time("started_at"),
    _time("lease_until"),
    _time("completed_at", null=True),
    _time("expires_at", null=True),
)

INDEXES: Mapping[str, Mapping[str, str]] = {
    "ix_idempotency_tenant": dict.fromkeys(("postgresql", "mysql", "sqlite"), "(tenant_id)"),
    # What the sweep goes by.
    "ix_idempotency_expires": dict.fromkeys(("postgresql", "mysql", "sqlite"), "(expires_at)"),
}

# Compared byte by byte: MariaDB's default collation takes 'AbC' and 'abc' for the same.
OPTIONS = {"mysql": " ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin"}


def _version_1(database: str) -> tuple[str, ...]:
    lines = [_column_line(column, database) for column in COLUMNS]
    indexes = {name: where[database] for name, where in INDEXES.items() if database in where}
    if database == "mysql":  # which cannot be told to make an index only where there is none
        lines += [f"INDEX {name} {where}" for name, where in indexes.items()]
        indexes = {}
    body = ",\n    ".join(lines)
    options = OPTIONS.get(database, "")
    return (
        f"CREATE TABLE IF NOT EXISTS {TABLE} (\n    {body}\n){options}",
        *(f"CREATE INDEX IF NOT EXISTS {name} ON {TABLE} {on}" for name, on in indexes.items()),
    )


def _column_line(column: Column, database: str) -> str:
    null = "" if column.null else " NOT NULL"
    key = " PRIMARY KEY" if column.name == "id" else ""
    return f"{column.name} {column.kind(database)}{null}{key}"


def _versions(database: str) -> str:
    options = OPTIONS.get(database, "")
    return (
        f"CREATE TABLE IF NOT EXISTS {VERSIONS} (\n"
        "    part VARCHAR(64) NOT NULL PRIMARY KEY,\n"
        f"    version INTEGER NOT NULL\n){options}"
    )


STEPS: Mapping[int, Any] = {1: _version_1}
"""For each version, what leads to it from the one before."""


def ddl(name: str) -> tuple[str, ...]:
    """The statements that make an empty database the current version, for people and Alembic."""
    database = dialect_named(name).name
    made = [statement for step in STEPS.values() for statement in step(database)]
    marked = f"INSERT INTO {VERSIONS} (part, version) VALUES ('{PART}', {VERSION})"  # noqa: S608
    return (_versions(database), *made, marked)


# --- making them --------------------------------------------------------------------------------


async def create(link: Link) -> None:
    """Bring the schema to the current version, whatever it is now; safe to run twice at once."""
    if link.dialect.name == "postgresql":
        # CREATE ... IF NOT EXISTS itself fails when two of them meet.
        await link.fetch("SELECT pg_advisory_lock(hashtext('semel_schema'))")
        try:
            await _climb(link)
        finally:
            await link.fetch("SELECT pg_advisory_unlock(hashtext('semel_schema'))")
    else:
        await _climb(link)


async def _climb(link: Link) -> None:
    database = link.dialect.name
    if database == "sqlite":
        await _refuse_sqlite_store(link)
    await link.change(_versions(database))
    reached = await version(link)
    for step in sorted(STEPS):
        if step > reached:
            for statement in STEPS[step](database):
                await link.change(statement)
            await _mark(link, step)


OF_SQLITE_STORE = (
    "this file was made by SQLiteStore; open it with semel.connect('sqlite:///path.db'), "
    "or give SQLStore another file"
)


async def _refuse_sqlite_store(link: Link) -> None:
    """Its table has our name and other columns: half of ours beside it would help nobody."""
    if await link.fetch("SELECT 1 FROM sqlite_master WHERE name = 'idempotency_floor'"):
        raise SettingsError(OF_SQLITE_STORE)


async def version(link: Link) -> int:
    rows = await link.fetch(f"SELECT version FROM {VERSIONS} WHERE part = ?", (PART,))  # noqa: S608
    return int(rows[0][0]) if rows else 0


async def _mark(link: Link, reached: int) -> None:
    update = f"UPDATE {VERSIONS} SET version = ? WHERE part = ?"  # noqa: S608
    if await link.change(update, (reached, PART)) == 1:
        return
    insert = f"INSERT INTO {VERSIONS} (version, part) VALUES (?, ?)"  # noqa: S608
    try:
        await link.change(insert, (reached, PART))
    except Exception as error:
        if fault_of(error) is not Fault.TAKEN:  # somebody else is doing the same
            raise


# --- for the command line -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """What was found: the version that is there, and everything that is not as it should be."""

    database: str
    version: int
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def exit_status(self) -> int:
        return 0 if self.ok else 1

    def __str__(self) -> str:
        if self.ok:
            return f"{self.database}: schema version {self.version}, as it should be"
        return "\n".join((f"{self.database}: schema version {self.version}", *self.problems))


def init(engine_or_url: sa.Engine | AsyncEngine | str) -> Report:
    """Make the tables where there are none. What is there is left as it is, and reported on."""
    return _with_engine(engine_or_url, _init)


def upgrade(engine_or_url: sa.Engine | AsyncEngine | str) -> Report:
    """Bring the tables to the version this release needs."""
    return _with_engine(engine_or_url, _init)


def check(engine_or_url: sa.Engine | AsyncEngine | str) -> Report:
    """Compare the tables with what this release needs, and change nothing."""
    return _with_engine(engine_or_url, _check)


def _with_engine(
    given: sa.Engine | AsyncEngine | str, work: Callable[[lines.SyncLines], Report]
) -> Report:
    if isinstance(given, sa.Engine):
        return work(lines.SyncLines(given, own=False))
    url = given.url.render_as_string(hide_password=False) if not isinstance(given, str) else given
    engine = lines.open_engine(lines.parse(url))
    try:
        return work(lines.SyncLines(engine, own=True))
    finally:
        engine.dispose()


def _init(source: lines.SyncLines) -> Report:
    run(lines.carry(source, create, SYNC))
    return _check(source)


def _check(source: lines.SyncLines) -> Report:
    database, engine = source.where, source.engine
    try:
        inspector = sa.inspect(engine)
        tables = set(inspector.get_table_names())
        if engine.dialect.name == "sqlite" and "idempotency_floor" in tables:
            return Report(database, 0, (OF_SQLITE_STORE,))
        reached = run(lines.carry(source, version, SYNC)) if VERSIONS in tables else 0
        problems = [*_version_problems(reached), *_table_problems(inspector, tables, engine)]
    except source.errors as error:
        raise unavailable(database, error) from error
    return Report(database, reached, tuple(problems))


def _version_problems(reached: int) -> list[str]:
    if reached == VERSION:
        return []
    if reached > VERSION:
        return [f"schema version {reached} is newer than this release's {VERSION}; upgrade semel"]
    verb = "init" if reached == 0 else "upgrade"
    return [f"schema version is {reached}, wanted {VERSION}; run `semel db {verb} URL`"]


def _table_problems(inspector: sa.Inspector, tables: set[str], engine: sa.Engine) -> Sequence[str]:
    if TABLE not in tables:
        return [f"table {TABLE} is missing; run `semel db init URL`"]
    return [
        *_column_problems(inspector, engine),
        *_key_problems(inspector),
        *_index_problems(inspector, dialect_named(engine.dialect.name).name),
        *_encoding_problems(engine),
    ]


def _column_problems(inspector: sa.Inspector, engine: sa.Engine) -> Sequence[str]:
    database = dialect_named(engine.dialect.name).name
    found = {column["name"]: column for column in inspector.get_columns(TABLE)}
    problems = []
    for column in COLUMNS:
        if column.name not in found:
            problems.append(f"column {column.name} is missing: {column.kind(database)}")
            continue
        there = found[column.name]
        kind = _spelled(there["type"], engine)
        if kind != column.kind(database):
            problems.append(f"column {column.name} is {kind}, wanted {column.kind(database)}")
        if bool(there["nullable"]) != column.null:
            wanted = "NULL" if column.null else "NOT NULL"
            problems.append(f"column {column.name} is to be {wanted}")
    return problems + _strange_columns(found)


def _strange_columns(found: Mapping[str, Any]) -> list[str]:
    ours = {column.name for column in COLUMNS}
    return [
        f"column {name} is not ours and has no default: no row can be added"
        for name, there in found.items()
        if name not in ours and not there["nullable"] and there.get("default") is None
    ]


# What a database calls a type when it is asked, where that is not what it was told.
SPELLINGS = {"TINYINT(1)": "BOOLEAN", "BOOL": "BOOLEAN", "INTEGER(11)": "INTEGER"}


def _spelled(kind: Any, engine: sa.Engine) -> str:
    """The type as we write it: without collation and display width."""
    text = str(kind.compile(dialect=engine.dialect)).upper().partition(" COLLATE")[0]
    text = text.partition(" CHARACTER SET")[0]
    if text.startswith("BIGINT"):
        return "BIGINT"
    return SPELLINGS.get(text, text)


def _key_problems(inspector: sa.Inspector) -> Sequence[str]:
    key = inspector.get_pk_constraint(TABLE).get("constrained_columns") or []
    return [] if list(key) == ["id"] else [f"the primary key is {list(key)}, wanted ['id']"]


def _index_problems(inspector: sa.Inspector, database: str) -> Sequence[str]:
    found = {index["name"]: index for index in inspector.get_indexes(TABLE)}
    problems = []
    for name, where in INDEXES.items():
        if database not in where:
            continue
        wanted = where[database].partition(")")[0].strip("(").split(", ")
        if name not in found:
            problems.append(f"index {name} is missing: ON {TABLE} {where[database]}")
        elif list(found[name]["column_names"]) != wanted:
            problems.append(f"index {name} is on {found[name]['column_names']}, wanted {wanted}")
    return problems


def _encoding_problems(engine: sa.Engine) -> Sequence[str]:
    if engine.dialect.name != "postgresql":
        return []
    with engine.connect() as connection:
        encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
    if encoding in {"UTF8", "SQL_ASCII"}:
        return []
    return [f"the database's encoding is {encoding}: keys it cannot write are refused; use UTF8"]
