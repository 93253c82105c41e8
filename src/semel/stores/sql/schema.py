"""The tables, and the way from one version of them to the next.

`idempotency` holds one row per key: whoever reads it sees what was asked, by whom, and how it
ended. Steps and finished attempts live in the row itself, so that they are born, taken over and
deleted with it: a row table of their own could outlive the record and hand its steps to the next
one of the same key. `event_outbox` holds what is to be told to others, and `event_outbox_seq`
the last number that each of their aggregates has taken. `event_outbox_cursor` says how far each
relay has read, and `event_outbox_mark` how far all of them together are. `inbox_mark` and
`inbox_message` hold what consumers have had the effects of, `event_parked` what waits for them.
The log has its tables in `log_tables`. `semel_schema` says which version each part of the schema
has.

Alembic users: run what `ddl(name)` returns in a migration of your own and stamp nothing; `check`
tells whether the tables are as they should be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from semel.colour import SYNC, Colour, run
from semel.errors import SemelError, SettingsError
from semel.stores.sql import lines
from semel.stores.sql.dialects import dialect_named
from semel.stores.sql.encodings import explaining_bytes
from semel.stores.sql.faults import Fault, NoTableError, fault_of, unavailable
from semel.stores.sql.links import Link, roll_back
from semel.stores.sql.log_tables import LOG
from semel.stores.sql.tables import (
    OPTIONS,
    Column,
    Index,
    Part,
    Table,
    column_line,
    default,
    making,
    name_column,
    time_column,
)

T = TypeVar("T")

VERSIONS = "semel_schema"


# --- the tables ---------------------------------------------------------------------------------


# MySQL takes a default of a TEXT column, and one that is computed, only in parentheses.
NO_TEXT = default("''", mysql="('')")
NOW = default(
    "CURRENT_TIMESTAMP",
    mysql="(UTC_TIMESTAMP(6))",
    sqlite="(strftime('%Y-%m-%d %H:%M:%f000', 'now'))",
)
# The default lease of a guard. A program that renews no lease holds a key for as long.
LEASE = default(
    "(CURRENT_TIMESTAMP + INTERVAL '30 seconds')",
    mysql="(UTC_TIMESTAMP(6) + INTERVAL 30 SECOND)",
    sqlite="(strftime('%Y-%m-%d %H:%M:%f000', 'now', '+30 seconds'))",
)

# The defaults are for rows of other programs: the store writes all columns itself.
COLUMNS = (
    Column("id", "BYTEA", "BINARY(32)", "BLOB"),
    Column("idempotency_key", "TEXT", "TEXT", "TEXT"),
    name_column("tenant_id"),
    Column("operation", "TEXT", "TEXT", "TEXT"),
    Column("request_hash", "TEXT", "TEXT", "TEXT", more=NO_TEXT),
    # MariaDB's own JSON type refuses JSON that is nested deeper than 32 levels, and MySQL's
    # writes it anew: a result must come back to the byte, so there it is text.
    Column("response", "JSON", "LONGTEXT", "TEXT", null=True),
    Column("body", "BYTEA", "LONGBLOB", "BLOB", null=True),
    Column("outcome", "VARCHAR(8)", "VARCHAR(8)", "TEXT", null=True),
    Column("status_code", "INTEGER", "INTEGER", "INTEGER", null=True, more=default("200")),
    Column("state", "VARCHAR(20)", "VARCHAR(20)", "TEXT", more=default("'PENDING'")),
    Column("attempt", "TEXT", "TEXT", "TEXT", more=NO_TEXT),
    Column("fence", "BIGINT", "BIGINT", "INTEGER", more=default("0")),
    Column("number", "INTEGER", "INTEGER", "INTEGER", more=default("1")),
    Column("hold", "BOOLEAN", "BOOLEAN", "BOOLEAN", more=default("FALSE", sqlite="0")),
    Column("steps", "TEXT", "LONGTEXT", "TEXT", null=True),
    Column("past", "TEXT", "LONGTEXT", "TEXT", null=True),
    Column("error", "TEXT", "LONGTEXT", "TEXT", null=True),
    time_column("created_at", more=NOW),
    time_column("started_at", more=NOW),
    time_column("lease_until", more=LEASE),
    time_column("completed_at", null=True),
    time_column("expires_at", null=True),
)

LEDGER = Table(
    "idempotency",
    COLUMNS,
    (
        Index("ix_idempotency_tenant", ("tenant_id",)),
        # What the sweep goes by.
        Index("ix_idempotency_expires", ("expires_at",)),
    ),
)

# A reader's bound is a lock's key: the low 48 bits of it are an id (`outbox_watermark`).
LAST_ID = 2**48 - 1

# Ids are taken in the order of writing and never a second time: without AUTOINCREMENT, SQLite
# begins again at 1 when the table was emptied, behind every reader that went on from there.
COUNTED = {
    "postgresql": f" GENERATED ALWAYS AS IDENTITY (MAXVALUE {LAST_ID})",
    "mysql": " AUTO_INCREMENT",
    "sqlite": " AUTOINCREMENT",
}

# What PostgreSQL names the counter behind `event_outbox.id`.
ID_SEQUENCE = "event_outbox_id_seq"

# Where ids say nothing about the order of commits, rows get a position once they are committed.
POSITION = Column("position", "", "BIGINT", "", null=True)
BY_POSITION = Index("ux_event_outbox_position", ("position",), unique=True, only="mysql")

OUTBOX = Table(
    "event_outbox",
    (
        Column("id", "BIGINT", "BIGINT", "INTEGER", more=COUNTED),
        Column("shard", "SMALLINT", "SMALLINT", "INTEGER"),
        name_column("tenant_id"),
        name_column("topic"),
        name_column("aggregate_type"),
        name_column("aggregate_id"),
        Column("seq", "BIGINT", "BIGINT", "INTEGER", null=True),
        name_column("event_id"),
        name_column("event_type"),
        # Text everywhere: what the application wrote is what goes out, to the byte.
        Column("payload", "TEXT", "LONGTEXT", "TEXT"),
        Column("headers", "TEXT", "LONGTEXT", "TEXT", null=True),
        time_column("created_at"),
        POSITION,
    ),
    (Index("ux_event_outbox_event", ("event_id",), unique=True), BY_POSITION),
)

OUTBOX_SEQ = Table(
    "event_outbox_seq",
    (
        Column("id", "BYTEA", "BINARY(32)", "BLOB"),
        name_column("tenant_id"),
        name_column("topic"),
        name_column("aggregate_type"),
        name_column("aggregate_id"),
        Column("seq", "BIGINT", "BIGINT", "INTEGER"),
    ),
)

# Rows that are written all the time, so nothing but the key is indexed: PostgreSQL then changes
# them in place.
OUTBOX_CURSOR = Table(
    "event_outbox_cursor",
    (
        Column("id", "BYTEA", "BINARY(32)", "BLOB"),
        name_column("name"),
        Column("shard", "SMALLINT", "SMALLINT", "INTEGER"),
        Column("shards", "SMALLINT", "SMALLINT", "INTEGER"),
        Column("position", "BIGINT", "BIGINT", "INTEGER"),
        Column("lowest", "BIGINT", "BIGINT", "INTEGER"),
        Column("tails", "TEXT", "LONGTEXT", "TEXT"),
        Column("lanes", "TEXT", "LONGTEXT", "TEXT"),
        Column("fence", "BIGINT", "BIGINT", "INTEGER"),
        time_column("updated_at"),
    ),
)

OUTBOX_MARK = Table(
    "event_outbox_mark",
    (
        Column("id", "VARCHAR(64)", "VARCHAR(64)", "TEXT"),
        Column("position", "BIGINT", "BIGINT", "INTEGER"),
        time_column("updated_at"),
    ),
)

# One row per consumer and sequence, written with every batch: nothing but the key is indexed.
INBOX_MARK = Table(
    "inbox_mark",
    (
        Column("id", "BYTEA", "BINARY(32)", "BLOB"),
        name_column("consumer"),
        name_column("tenant_id"),
        name_column("topic"),
        name_column("aggregate_type"),
        name_column("aggregate_id"),
        Column("seq", "BIGINT", "BIGINT", "INTEGER"),
        Column("head", "BIGINT", "BIGINT", "INTEGER", null=True),
        Column("turn", "BIGINT", "BIGINT", "INTEGER"),
        time_column("updated_at"),
    ),
)

INBOX_MESSAGE = Table(
    "inbox_message",
    (
        Column("id", "BYTEA", "BINARY(32)", "BLOB"),
        name_column("consumer"),
        name_column("event_id"),
        time_column("received_at"),
    ),
    # What the sweep goes by.
    (Index("ix_inbox_message_received", ("received_at",)),),
)

INBOX_BASELINE = Table(
    "inbox_baseline",
    (
        Column("id", "BYTEA", "BINARY(32)", "BLOB"),
        name_column("consumer"),
        name_column("topic"),
        time_column("created_at"),
    ),
)

INBOX_STARTED = Table(
    "inbox_started",
    (
        Column("id", "BYTEA", "BINARY(32)", "BLOB"),
        name_column("consumer"),
        name_column("event_id"),
        Column("started", "INTEGER", "INTEGER", "INTEGER"),
        time_column("updated_at"),
    ),
)

NUMBERED = COUNTED | {"postgresql": " GENERATED ALWAYS AS IDENTITY"}

PARKED = Table(
    "event_parked",
    (
        Column("id", "BIGINT", "BIGINT", "INTEGER", more=NUMBERED),
        name_column("consumer"),
        Column("sequence", "BYTEA", "BINARY(32)", "BLOB"),
        Column("slot", "SMALLINT", "SMALLINT", "INTEGER"),
        name_column("tenant_id"),
        name_column("topic"),
        name_column("aggregate_type"),
        name_column("aggregate_id"),
        Column("seq", "BIGINT", "BIGINT", "INTEGER"),
        name_column("event_id"),
        name_column("event_type"),
        Column("position", "BIGINT", "BIGINT", "INTEGER"),
        # Text everywhere: the payload in it is kept to the byte.
        Column("message", "TEXT", "LONGTEXT", "TEXT"),
        Column("state", "VARCHAR(8)", "VARCHAR(8)", "TEXT"),
        Column("why", "VARCHAR(8)", "VARCHAR(8)", "TEXT"),
        Column("attempts", "INTEGER", "INTEGER", "INTEGER"),
        Column("error", "TEXT", "LONGTEXT", "TEXT"),
        time_column("due_at", null=True),
        time_column("parked_at"),
        Column("edited", "INTEGER", "INTEGER", "INTEGER"),
    ),
    (
        Index("ux_event_parked_seq", ("sequence", "seq"), unique=True),
        # What is due, however much waits behind it.
        Index("ix_event_parked_due", ("consumer", "due_at", "slot")),
    ),
)

PARKED_AUDIT = Table(
    "event_parked_audit",
    (
        Column("id", "BIGINT", "BIGINT", "INTEGER", more=NUMBERED),
        time_column("settled_at"),
        name_column("who"),
        Column("verb", "VARCHAR(8)", "VARCHAR(8)", "TEXT"),
        name_column("consumer"),
        Column("sequence", "BYTEA", "BINARY(32)", "BLOB"),
        name_column("event_id"),
        Column("note", "TEXT", "LONGTEXT", "TEXT"),
        Column("payload_before", "TEXT", "LONGTEXT", "TEXT", null=True),
        Column("payload_after", "TEXT", "LONGTEXT", "TEXT", null=True),
    ),
    (Index("ix_event_parked_audit_sequence", ("sequence", "id")),),
)

INBOX_TABLES = (
    INBOX_MARK,
    INBOX_MESSAGE,
    INBOX_BASELINE,
    INBOX_STARTED,
    PARKED,
    PARKED_AUDIT,
)


def _defaults(database: str) -> tuple[str, ...]:
    """The second version of the ledger: rows of other programs are valid.

    SQLite cannot alter a column. A table that the first version made there has no defaults.
    """
    if database == "sqlite":
        return ()
    columns = [column for column in LEDGER.columns if column.more]
    alters = [f"ALTER COLUMN {c.name} SET{c.more[database]}" for c in columns]
    return (f"ALTER TABLE {LEDGER.name} {', '.join(alters)}",)


# Of the first version: each relay reads the newest rows by id, whoever's they are.
UNUSED = "ix_event_outbox_shard"


def _readers(database: str) -> tuple[str, ...]:
    """The second version of the outbox: relays can read it."""
    made = making(OUTBOX_CURSOR, OUTBOX_MARK)(database)
    if database != "mysql":
        return (*made, f"DROP INDEX IF EXISTS {UNUSED}")
    alter = f"ALTER TABLE {OUTBOX.name}"
    return (
        *made,
        f"{alter} ADD COLUMN {column_line(POSITION, OUTBOX, database)}",
        f"{alter} ADD {BY_POSITION.word} {BY_POSITION.name} {BY_POSITION.on}",
        f"{alter} DROP INDEX {UNUSED}",
    )


def _versions(database: str) -> str:
    options = OPTIONS.get(database, "")
    return (
        f"CREATE TABLE IF NOT EXISTS {VERSIONS} (\n"
        "    part VARCHAR(64) NOT NULL PRIMARY KEY,\n"
        f"    version INTEGER NOT NULL\n){options}"
    )


OUTBOX_TABLES = (OUTBOX, OUTBOX_SEQ, OUTBOX_CURSOR, OUTBOX_MARK)

PARTS = (
    Part("ledger", 2, (LEDGER,), {1: making(LEDGER), 2: _defaults}),
    Part("outbox", 2, OUTBOX_TABLES, {1: making(*OUTBOX_TABLES), 2: _readers}),
    Part("inbox", 1, INBOX_TABLES, {1: making(*INBOX_TABLES)}),
    LOG,
)


def ddl(name: str) -> tuple[str, ...]:
    """The statements that make an empty database the current version, for people and Alembic."""
    database = dialect_named(name).name
    made = [statement for part in PARTS for statement in _part_ddl(part, database)]
    return (_versions(database), *made)


def _part_ddl(part: Part, database: str) -> tuple[str, ...]:
    made = part.steps[1](database)
    marked = f"INSERT INTO {VERSIONS} (part, version) VALUES ('{part.name}', {part.version})"  # noqa: S608
    return (*made, marked)


# --- making them --------------------------------------------------------------------------------


async def create(link: Link) -> None:
    """Bring the schema to the current version, whatever it is now; safe to run twice at once."""
    if link.dialect.name != "postgresql":
        await _climb(link)
        return
    # CREATE ... IF NOT EXISTS itself fails when two of them meet. The lock ends with the
    # transaction: one of a session would stay on a server connection of a pooler. The next holder
    # must see what the one before has committed, hence READ COMMITTED.
    await link.change("BEGIN ISOLATION LEVEL READ COMMITTED")
    try:
        await link.fetch("SELECT pg_advisory_xact_lock(hashtext('semel_schema'))")
        await _climb(link)
        await link.change("COMMIT")
    except Exception:
        await roll_back(link)
        raise


async def with_tables(
    source: lines.Lines,
    work: lines.Work[T],
    colour: Colour,
    *,
    creates: bool,
    told: Callable[[str, BaseException], SemelError] = unavailable,
) -> T:
    """Run the work; where its tables are missing, make them first if `creates` says so."""
    try:
        return await lines.carry(source, work, colour, told)
    except NoTableError:
        if not creates:
            raise
    await lines.carry(source, create, colour)
    return await lines.carry(source, work, colour, told)


async def _climb(link: Link) -> None:
    database = link.dialect.name
    if database == "sqlite":
        await _refuse_sqlite_store(link)
    await link.change(_versions(database))
    for part in PARTS:
        await _climb_part(link, part)


async def _climb_part(link: Link, part: Part) -> None:
    reached = await version(link, part)
    for step in sorted(part.steps):
        if step > reached:
            for statement in part.steps[step](link.dialect.name):
                await _say_once(link, statement)
            await _mark(link, part, step)


async def _say_once(link: Link, statement: str) -> None:
    """MySQL has no ADD COLUMN IF NOT EXISTS, nor DROP INDEX IF EXISTS."""
    try:
        await link.change(statement)
    except Exception as error:
        if fault_of(error) is not Fault.DONE:
            raise


def _of_sqlite_store(path: str) -> str:
    return (
        f"{path} was made by SQLiteStore; write sqlite:///{path}, as in semel.connect(...). It is "
        "for a ledger and a log: for an outbox or an inbox give SQLStore another file"
    )


async def _refuse_sqlite_store(link: Link) -> None:
    """Its table has our name and other columns: half of ours beside it would help nobody."""
    if await link.fetch("SELECT 1 FROM sqlite_master WHERE name = 'idempotency_floor'"):
        [path] = await link.fetch("SELECT file FROM pragma_database_list WHERE name = 'main'")
        raise SettingsError(_of_sqlite_store(path[0]))


async def version(link: Link, part: Part) -> int:
    select = f"SELECT version FROM {VERSIONS} WHERE part = ?"  # noqa: S608
    rows = await link.fetch(select, (part.name,))
    return int(rows[0][0]) if rows else 0


async def _mark(link: Link, part: Part, reached: int) -> None:
    update = f"UPDATE {VERSIONS} SET version = ? WHERE part = ?"  # noqa: S608
    if await link.change(update, (reached, part.name)) == 1:
        return
    insert = f"INSERT INTO {VERSIONS} (version, part) VALUES (?, ?)"  # noqa: S608
    try:
        await link.change(insert, (reached, part.name))
    except Exception as error:
        if fault_of(error) is not Fault.TAKEN:  # somebody else is doing the same
            raise


# --- for the command line -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """What was found: the version of each part, and everything that is not as it should be.

    `version` is the ledger's. `notes` tell what to know about a database that is in order.
    """

    database: str
    version: int
    problems: tuple[str, ...] = ()
    versions: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def exit_status(self) -> int:
        return 0 if self.ok else 1

    @property
    def told(self) -> str:
        """The versions, for people."""
        parts = ", ".join(f"{part} {version}" for part, version in self.versions.items())
        return f"schema version {parts or self.version}"

    def __str__(self) -> str:
        if self.ok:
            return "\n".join((f"{self.database}: {self.told}, as it should be", *self.notes))
        return "\n".join((f"{self.database}: {self.told}", *self.problems))


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
    source = lines.SyncLines(lines.open_engine(lines.parse(url)), own=True)
    try:
        return work(source)
    finally:
        source.close()


def _init(source: lines.SyncLines) -> Report:
    run(lines.carry(source, create, SYNC))
    return _check(source)


def _check(source: lines.SyncLines) -> Report:
    database, engine = source.where, source.engine
    try:
        there = _looked(engine)
        tables = set(there.columns)
        if engine.dialect.name == "sqlite" and "idempotency_floor" in tables:
            return Report(database, 0, (_of_sqlite_store(engine.url.database or ""),))
        reached = _reached(source) if VERSIONS in tables else dict.fromkeys(NAMES, 0)
        problems = [
            *_version_problems(reached),
            *_table_problems(there, reached, engine),
            *_collation_problems(there, engine),
        ]
        notes = _encoding_notes(engine)
    except source.errors as error:
        raise unavailable(database, error) from error
    return Report(database, reached[PARTS[0].name], tuple(problems), reached, notes)


@dataclass(frozen=True, slots=True)
class Looked:
    """What a database says of its tables, by their names."""

    columns: Mapping[str, Sequence[Any]]
    keys: Mapping[str, Any]
    indexes: Mapping[str, Sequence[Any]]


def _looked(engine: sa.Engine) -> Looked:
    """All of them over one connection; PostgreSQL tells of all tables with each question."""
    with explaining_bytes(engine):
        given = engine.connect()
    with given as connection:
        inspector = sa.inspect(connection)
        known = {table.name for part in PARTS for table in part.tables}
        known |= {VERSIONS, "idempotency_floor"}
        names = sorted(known.intersection(inspector.get_table_names()))
        if not names:
            return Looked({}, {}, {})
        columns = inspector.get_multi_columns(filter_names=names)
        keys = inspector.get_multi_pk_constraint(filter_names=names)
        indexes = inspector.get_multi_indexes(filter_names=names)
    return Looked(_named(columns), _named(keys), _named(indexes))


def _named(found: Mapping[Any, Any]) -> dict[str, Any]:
    return {table: told for (_, table), told in found.items()}


NAMES = tuple(part.name for part in PARTS)


def _reached(source: lines.SyncLines) -> dict[str, int]:
    async def read(link: Link) -> dict[str, int]:
        return {part.name: await version(link, part) for part in PARTS}

    return run(lines.carry(source, read, SYNC))


def _version_problems(reached: Mapping[str, int]) -> list[str]:
    verb = "upgrade" if any(reached.values()) else "init"
    problems = []
    for part in PARTS:
        there = reached[part.name]
        if there > part.version:
            problems.append(
                f"{part.name}: schema version {there} is newer than this release's "
                f"{part.version}; upgrade semel"
            )
        elif there < part.version:
            problems.append(
                f"{part.name}: schema version is {there}, wanted {part.version}; "
                f"run `semel db {verb} URL`"
            )
    return problems


def _table_problems(there: Looked, reached: Mapping[str, int], engine: sa.Engine) -> Sequence[str]:
    problems: list[str] = []
    for part in PARTS:
        for table in part.tables:
            if table.name in there.columns:
                problems += _problems_of(table, there, engine)
            else:
                made = reached[part.name] >= part.version
                problems.append(_missing(table, part, made=made))
    return problems


def _missing(table: Table, part: Part, *, made: bool) -> str:
    """`made`: it was there once, and no upgrade will bring it."""
    if not made:
        return f"table {table.name} is missing"
    return (
        f"table {table.name} was made and is gone: restore it, or delete the row of part "
        f"{part.name!r} in {VERSIONS} and run `semel db init URL`"
    )


def _problems_of(table: Table, there: Looked, engine: sa.Engine) -> Sequence[str]:
    return [
        *_column_problems(table, there, engine),
        *_key_problems(table, there),
        *_index_problems(table, there, engine),
        *_counter_problems(table, there, engine),
    ]


def _column_problems(table: Table, there: Looked, engine: sa.Engine) -> Sequence[str]:
    database = dialect_named(engine.dialect.name).name
    found = {column["name"]: column for column in there.columns[table.name]}
    problems = []
    for column in table.columns_in(database):
        named = f"column {table.name}.{column.name}"
        if column.name not in found:
            problems.append(f"{named} is missing: {column.kind(database)}")
            continue
        told = found[column.name]
        kind = _spelled(told["type"], engine)
        if kind != column.kind(database) and (kind, column.kind(database)) not in AS_GOOD:
            problems.append(f"{named} is {kind}, wanted {column.kind(database)}")
        if bool(told["nullable"]) != column.null:
            problems.append(f"{named} is to be {'NULL' if column.null else 'NOT NULL'}")
    return problems + _strange_columns(table, found)


# PostgreSQL's names had this type once; it holds every name without escapes.
AS_GOOD = {("VARCHAR(255)", "TEXT")}


def _strange_columns(table: Table, found: Mapping[str, Any]) -> list[str]:
    ours = {column.name for column in table.columns}
    return [
        f"column {table.name}.{name} is not ours and has no default: no row can be added"
        for name, there in found.items()
        if name not in ours and not there["nullable"] and there.get("default") is None
    ]


# What a database calls a type when it is asked, where that is not what it was told.
SPELLINGS = {
    "TINYINT(1)": "BOOLEAN",
    "BOOL": "BOOLEAN",
    "INTEGER(11)": "INTEGER",
    "SMALLINT(6)": "SMALLINT",
}


def _spelled(kind: Any, engine: sa.Engine) -> str:
    """The type as we write it: without collation and display width."""
    text = str(kind.compile(dialect=engine.dialect)).upper().partition(" COLLATE")[0]
    text = text.partition(" CHARACTER SET")[0]
    if text.startswith("BIGINT"):
        return "BIGINT"
    return SPELLINGS.get(text, text)


def _key_problems(table: Table, there: Looked) -> Sequence[str]:
    key = (there.keys.get(table.name) or {}).get("constrained_columns") or []
    if tuple(key) == table.key:
        return []
    return [f"the primary key of {table.name} is {list(key)}, wanted {list(table.key)}"]


def _index_problems(table: Table, there: Looked, engine: sa.Engine) -> Sequence[str]:
    database = dialect_named(engine.dialect.name).name
    found = {index["name"]: index for index in there.indexes.get(table.name) or ()}
    problems = []
    for index in table.indexes_in(database):
        told = found.get(index.name)
        if told is None:
            problems.append(f"index {index.name} is missing: ON {table.name} {index.on}")
        elif list(told["column_names"]) != list(index.columns):
            columns = told["column_names"]
            problems.append(f"index {index.name} is on {columns}, wanted {list(index.columns)}")
        elif bool(told["unique"]) != index.unique:
            problems.append(f"index {index.name} is to be {'' if index.unique else 'not '}unique")
    return problems


# --- ids that a reader can go by ----------------------------------------------------------------

SEQUENCES = (
    "SELECT cache_size, increment_by, cycle FROM pg_sequences "  # noqa: S608
    f"WHERE sequencename = '{ID_SEQUENCE}' AND schemaname = ANY (current_schemas(false))"
)


def _counter_problems(table: Table, there: Looked, engine: sa.Engine) -> Sequence[str]:
    """A reader goes on from the last id it saw, so ids must be given out one by one, upwards."""
    if table is not OUTBOX:
        return []
    match dialect_named(engine.dialect.name).name:
        case "postgresql":
            return _sequence_problems(engine)
        case "mysql":
            [told] = [column for column in there.columns[table.name] if column["name"] == "id"]
            counted = told.get("autoincrement") is True
            return [] if counted else ["column event_outbox.id is to be AUTO_INCREMENT"]
        case _:
            made = _one_value(engine, "SELECT sql FROM sqlite_master WHERE name = 'event_outbox'")
            if "AUTOINCREMENT" in str(made).upper():
                return []
            return ["column event_outbox.id is to be AUTOINCREMENT, or ids are given out again"]


def _sequence_problems(engine: sa.Engine) -> Sequence[str]:
    with engine.connect() as connection:
        row = connection.exec_driver_sql(SEQUENCES).one_or_none()
    if row is None:
        return [f"sequence {ID_SEQUENCE} is missing: event_outbox.id is to be its identity"]
    if tuple(row) != (1, 1, False):
        return [f"sequence {ID_SEQUENCE} is to be CACHE 1 INCREMENT BY 1 NO CYCLE"]
    return []


def _one_value(engine: sa.Engine, select: str) -> Any:
    with engine.connect() as connection:
        return connection.exec_driver_sql(select).scalar_one()


COLLATIONS = (
    "SELECT table_name, table_collation FROM information_schema.tables "
    "WHERE table_schema = DATABASE() AND table_collation <> 'utf8mb4_bin'"
)


def _collation_problems(there: Looked, engine: sa.Engine) -> Sequence[str]:
    """Return a problem for each table of MariaDB or MySQL that is not in utf8mb4_bin.

    Other character sets lack characters, and other collations take different names for the same.
    """
    if dialect_named(engine.dialect.name).name != "mysql":
        return []
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(COLLATIONS).all()
    return [
        f"the collation of table {table} is {collation}, wanted utf8mb4_bin: run ALTER TABLE "
        f"{table} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        for table, collation in sorted(map(tuple, rows))
        if table in there.columns
    ]


def _encoding_notes(engine: sa.Engine) -> tuple[str, ...]:
    if engine.dialect.name != "postgresql":
        return ()
    encoding = _one_value(engine, "SHOW server_encoding")
    if encoding == "UTF8":
        return ()
    note = (
        f"the database's encoding is {encoding}: characters that it lacks are stored as escapes, "
        "and results with them as bytes; use UTF8 if people or other programs read these tables"
    )
    return (note,)
