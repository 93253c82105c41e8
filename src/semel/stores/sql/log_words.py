"""What the log says to each database.

To PostgreSQL many rows are one statement with an array per column, whatever their number: so there
are few statements, each prepared once. To the others they are a statement with many rows. Times go
out as microseconds, or as that database's timestamps.
"""

# The statements are put together from names in this file, nothing else.
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from semel.entries import Position
from semel.stores.log_rules import Row
from semel.stores.sql.asking import dense
from semel.stores.sql.dialects import LAST_US, Dialect, dialect_named
from semel.stores.sql.lines import IDLE_S
from semel.stores.sql.links import Array, Said
from semel.stores.sql.rows import stored_name
from semel.values import value

# What PostgreSQL, which reckons with doubles, still takes for a moment of the year 9999.
LATEST_US = LAST_US - 1_000_000

# Of one IN (...): SQLite takes 32,766 values.
MOST_NAMED = 10_000


@value
class Kind:
    """A kind of column: PostgreSQL's type and the number of that, and how a value is read there."""

    type: str
    oid: int
    read: str = "u.{name}"

    def given(self, value: Any, dialect: Dialect) -> Any:
        """As one value of one row, where a database is given no arrays."""
        return value

    def encoded(self, value: Any, codec: str) -> Any:
        """As one value for a PostgreSQL database whose encoding is not UTF-8."""
        return value


class _Text(Kind):
    def encoded(self, value: Any, codec: str) -> Any:
        return stored_name(value, codec)


class _Time(Kind):
    def given(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else dialect.stamp(value)


BYTES = Kind("bytea", 17)
INT = Kind("int8", 20)
TEXT = _Text("text", 25)
BOOL = Kind("bool", 16)
TIME = _Time("int8", 20, "timestamptz 'epoch' + u.{name} * interval '1 us'")

Columns = Mapping[str, Kind]


class Put:
    """Inserts rows; where one is there already, it is given what `changes` names."""

    def __init__(self, table: str, columns: Columns, changes: Sequence[str] = ()) -> None:
        self._table = table
        self._columns = columns
        self._changes = changes
        self._into = f"INSERT INTO {table} ({', '.join(columns)})"
        self.arrays = dense(self._arrays())
        self._rows = lru_cache(maxsize=256)(self._said_rows)

    def said(self, dialect: Dialect, rows: Sequence[Sequence[Any]]) -> Said:
        kinds = list(self._columns.values())
        if dialect.name == "postgresql":
            columns: Iterable[tuple[Kind, Sequence[Any]]] = zip(
                kinds, zip(*rows, strict=True), strict=True
            )
            if dialect.codec != "utf-8":
                columns = _encoded(columns, dialect.codec)
            return self.arrays, [Array(values, kind.oid) for kind, values in columns]
        given = [k.given(v, dialect) for row in rows for k, v in zip(kinds, row, strict=True)]
        return self._rows(dialect.name, len(rows)), given

    def _arrays(self) -> str:
        read = ", ".join(kind.read.format(name=name) for name, kind in self._columns.items())
        arrays = ", ".join(f"?::{kind.type}[]" for kind in self._columns.values())
        given = f"unnest({arrays}) AS u ({', '.join(self._columns)})"
        return f"{self._into} SELECT {read} FROM {given} {self._on_conflict('excluded.{}')}"

    def _said_rows(self, database: str, count: int) -> str:
        rows = ", ".join([f"({_marks(len(self._columns))})"] * count)
        if database == "mysql" and self._changes:
            sets = ", ".join(f"{name} = VALUES({name})" for name in self._changes)
            return f"{self._into} VALUES {rows} ON DUPLICATE KEY UPDATE {sets}"
        return f"{self._into} VALUES {rows} {self._on_conflict('excluded.{}')}"

    def _on_conflict(self, new: str) -> str:
        if not self._changes:
            return ""
        sets = ", ".join(f"{name} = {new.format(name)}" for name in self._changes)
        return f"ON CONFLICT (id) DO UPDATE SET {sets}"


def _encoded(
    columns: Iterable[tuple[Kind, Sequence[Any]]], codec: str
) -> Iterator[tuple[Kind, Sequence[Any]]]:
    for kind, values in columns:
        yield kind, [kind.encoded(value, codec) for value in values]


def _marks(many: int) -> str:
    return ", ".join("?" * many)


@lru_cache(maxsize=256)
def _among(database: str, count: int) -> str:
    return "= ANY (?::bytea[])" if database == "postgresql" else f"IN ({_marks(count)})"


def among(dialect: Dialect, ids: Sequence[bytes]) -> tuple[str, Sequence[Any]]:
    """What says "one of these", and what goes with it."""
    given = [Array(ids, BYTES.oid)] if dialect.name == "postgresql" else ids
    return _among(dialect.name, len(ids)), given


# --- beginning ----------------------------------------------------------------------------------

STREAM: Columns = {
    "id": BYTES,
    "name": TEXT,
    "head": INT,
    "head_tag": TEXT,
    "ended": BOOL,
    "gone_at": TIME,
    "until_at": TIME,
    "due_at": TIME,
    "floor": INT,
    "floor_tag": TEXT,
    "state": BYTES,
}
MOVING = ("head", "head_tag", "ended", "gone_at", "until_at", "due_at")
ROW = "head, head_tag, floor, floor_tag, ended, gone_at, until_at"

BEGINS: Mapping[str, Sequence[str]] = {
    "postgresql": (
        "BEGIN ISOLATION LEVEL READ COMMITTED",
        f"SET LOCAL idle_in_transaction_session_timeout = {IDLE_S * 1000}",
    ),
    "mysql": ("START TRANSACTION",),
    "sqlite": ("BEGIN IMMEDIATE",),
}

_STREAMS = f"SELECT id, {ROW}, due_at FROM semel_stream"
LOCKS = {
    "postgresql": f"{_STREAMS} WHERE id {{}} ORDER BY id FOR UPDATE",
    # By the index even where the table is small: a scan would lock what nobody asked for.
    "mysql": f"{_STREAMS} FORCE INDEX (PRIMARY) WHERE id {{}} ORDER BY id FOR UPDATE",
    "sqlite": f"{_STREAMS} WHERE id {{}}",
}


def begun(dialect: Dialect) -> list[Said]:
    return [(statement, ()) for statement in BEGINS[dialect.name]]


def locked(dialect: Dialect, ids: Sequence[bytes]) -> Said:
    """The streams' rows, which are the caller's own from now on: in the order of their ids, so
    that no two batches wait for each other.
    """
    are, given = among(dialect, ids)
    return LOCKS[dialect.name].format(are), given


def row_of(values: Sequence[Any], dialect: Dialect) -> Row:
    """The stream in these columns, which are those of `ROW`."""
    head, head_tag, floor, floor_tag, ended, gone_at, until_at = values
    return Row(
        Position(int(head), head_tag),
        Position(int(floor), floor_tag),
        bool(ended),
        micros_or_none(gone_at, dialect),
        micros_or_none(until_at, dialect),
    )


def micros_or_none(stamp: Any, dialect: Dialect) -> int | None:
    return None if stamp is None else dialect.micros(stamp)


def _here(columns: str, table: str) -> str:
    """The time, and the rows if there are any: always at least one line.

    Said behind `locked`, and not with it: a statement sees what was committed before it began, and
    the lock may have been waited for.
    """
    return f"SELECT {{now}}, {columns} FROM (SELECT 1 AS one) AS here LEFT JOIN {table} ON "


MARKS = _here("id, mark, position, tag, reply, until_at", "semel_mark")


def marks(dialect: Dialect, ids: Sequence[bytes]) -> Said:
    are, given = among(dialect, ids)
    return f"{MARKS} id {are}", [*dialect.now_param(), *given]


def numbers(dialect: Dialect, ids: Sequence[bytes]) -> Said:
    are, given = among(dialect, ids)
    return f"SELECT id, number FROM semel_fence WHERE id {are}", given


def ranks(dialect: Dialect, ids: Sequence[bytes]) -> Said:
    are, given = among(dialect, ids)
    return f"SELECT id, ranked FROM semel_field WHERE id {are}", given


# How many streams wait for a sweep, up to a number: one look into an index. To the planner it seems
# that a third of all are due, so that it would begin to read them all, were it not for the order.
DUE = (
    "SELECT count(*) FROM (SELECT 1 AS one FROM semel_stream "
    "WHERE due_at <= (SELECT {now}) ORDER BY due_at LIMIT ?) AS due"
)


def due(dialect: Dialect, most: int) -> Said:
    return DUE, (*dialect.now_param(), most)


# --- writing ------------------------------------------------------------------------------------

NEW = Put("semel_stream", STREAM)
MOVED = Put("semel_stream", STREAM, MOVING)
CHANGED = Put("semel_stream", STREAM, (*MOVING, "floor", "floor_tag", "state"))

ENTRY: Columns = {
    "stream": BYTES,
    "position": INT,
    "tag": TEXT,
    "event_id": TEXT,
    "data": BYTES,
    "created_at": TIME,
}
ENTRIES = Put("semel_log", ENTRY)

MARK: Columns = {
    "id": BYTES,
    "stream": BYTES,
    "event_id": TEXT,
    "mark": TEXT,
    "position": INT,
    "tag": TEXT,
    "reply": BYTES,
    "until_at": TIME,
}
MARKED = Put("semel_mark", MARK, ("mark", "position", "tag", "reply", "until_at"))

FIELD: Columns = {"id": BYTES, "stream": BYTES, "name": TEXT, "ranked": INT, "data": BYTES}
FIELDS = Put("semel_field", FIELD, ("ranked", "data"))

FENCE: Columns = {"id": BYTES, "stream": BYTES, "name": TEXT, "number": INT}
FENCES = Put("semel_fence", FENCE, ("number",))

# Everything of a stream but its row.
BELONGINGS = ("semel_log", "semel_mark", "semel_field", "semel_fence")


def deleted(dialect: Dialect, table: str, column: str, ids: Sequence[bytes]) -> Said:
    are, given = among(dialect, ids)
    return f"DELETE FROM {table} WHERE {column} {are}", given


def wiped(dialect: Dialect, streams: Sequence[bytes]) -> list[Said]:
    return [deleted(dialect, table, "stream", streams) for table in BELONGINGS]


FLOOR = (
    "UPDATE semel_stream SET floor = ?, floor_tag = "
    "(SELECT tag FROM semel_log WHERE stream = ? AND position = ?) WHERE id = ?"
)
CUT = "DELETE FROM semel_log WHERE stream = ? AND position <= ?"


def cut(stream: bytes, upto: int) -> list[Said]:
    """Forget entries, and say so in the row. The one at `upto` is still there."""
    return [(FLOOR, (upto, stream, upto, stream)), (CUT, (stream, upto))]


OLDEST = "SELECT id, position, until_at FROM semel_mark WHERE stream = ? ORDER BY position LIMIT ?"
FORGET = {
    "postgresql": f"DELETE FROM semel_mark AS m USING ({OLDEST}) AS o "
    "WHERE m.id = o.id AND o.position <= ? AND o.until_at <= {now}",
    "mysql": f"DELETE m FROM semel_mark AS m JOIN ({OLDEST}) AS o ON m.id = o.id "
    "WHERE o.position <= ? AND o.until_at <= {now}",
    "sqlite": f"DELETE FROM semel_mark WHERE id IN (SELECT id FROM ({OLDEST}) "
    "WHERE position <= ? AND until_at <= {now})",
}


def forgotten(dialect: Dialect, stream: bytes, floor: int, count: int) -> Said:
    """Of the oldest ids those that `rules.is_forgotten` tells."""
    return FORGET[dialect.name], (stream, count, floor, *dialect.now_param())


# --- telling ------------------------------------------------------------------------------------

# What PostgreSQL's listeners are told, and how much of a stream's identity: enough to tell apart
# the few thousand streams that one of them listens to, and a whole batch fits into one word.
CHANNEL = "semel_log"
SHORT = 16

RING = f"SELECT pg_notify('{CHANNEL}', ?::text)"


# --- what is prepared ---------------------------------------------------------------------------


def _of_an_append() -> tuple[str, ...]:
    dialect, ids = dialect_named("postgresql"), [b""]
    read = (locked, marks, numbers, ranks)
    puts = (NEW, MOVED, CHANGED, ENTRIES, MARKED, FIELDS, FENCES)
    said = [*begun(dialect), *(ask(dialect, ids) for ask in read), *wiped(dialect, ids)]
    said += [
        *cut(b"", 0),
        forgotten(dialect, b"", 0, 0),
        due(dialect, 0),
        ("COMMIT", ()),
        (RING, ()),
    ]
    return (*(statement for statement, _ in said), *(put.arrays for put in puts))


# Prepared before the transaction begins: a pooler that was not recognised causes an error, which
# would end a transaction.
OF_AN_APPEND = _of_an_append()
