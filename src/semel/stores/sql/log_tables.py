"""The log's tables.

`semel_stream` holds one row per stream: where it ends, and whoever appends locks that row first.
`semel_log` holds the entries, `semel_mark` what became of each id, `semel_field` the fields of the
states, `semel_fence` the last number of each producer.

Whatever a row belongs to is told by a hash: MariaDB's default collation takes 'AbC' and 'abc ' for
the same name. The name stands beside it, for people.
"""

from __future__ import annotations

from semel.stores.sql.tables import (
    Column,
    Index,
    Part,
    Table,
    making,
    name_column,
    time_column,
)


def _hash(name: str) -> Column:
    return Column(name, "BYTEA", "BINARY(32)", "BLOB")


def _bytes(name: str, *, null: bool = False) -> Column:
    return Column(name, "BYTEA", "LONGBLOB", "BLOB", null)


def _number(name: str) -> Column:
    return Column(name, "BIGINT", "BIGINT", "INTEGER")


def _tag(name: str) -> Column:
    return Column(name, "VARCHAR(12)", "VARCHAR(12)", "TEXT")


# OFFSET and RANK are words that some of the databases keep to themselves: hence `position`,
# `ranked`.
STREAM = Table(
    "semel_stream",
    (
        _hash("id"),
        name_column("name"),
        _number("head"),
        _tag("head_tag"),
        _number("floor"),
        _tag("floor_tag"),
        Column("ended", "BOOLEAN", "BOOLEAN", "BOOLEAN"),
        _bytes("state", null=True),
        time_column("gone_at", null=True),
        time_column("until_at", null=True),
        # When the sweep is to look at it, at the latest. An append leaves it alone if it can: it
        # is indexed, and PostgreSQL changes a row in place only where no index has to know.
        time_column("due_at", null=True),
    ),
    (Index("ix_semel_stream_due", ("due_at",)),),
)

ENTRY = Table(
    "semel_log",
    (
        _hash("stream"),
        _number("position"),
        _tag("tag"),
        name_column("event_id"),
        _bytes("data"),
        time_column("created_at"),
    ),
    key=("stream", "position"),
)

MARK = Table(
    "semel_mark",
    (
        _hash("id"),
        _hash("stream"),
        name_column("event_id"),
        Column("mark", "VARCHAR(40)", "VARCHAR(40)", "TEXT"),
        _number("position"),
        _tag("tag"),
        _bytes("reply"),
        time_column("until_at"),
    ),
    # The oldest of a stream, which are forgotten first.
    (Index("ix_semel_mark_stream", ("stream", "position")),),
)

FIELD = Table(
    "semel_field",
    (_hash("id"), _hash("stream"), name_column("name"), _number("ranked"), _bytes("data")),
    (Index("ix_semel_field_stream", ("stream",)),),
)

FENCE = Table(
    "semel_fence",
    (_hash("id"), _hash("stream"), name_column("name"), _number("number")),
    (Index("ix_semel_fence_stream", ("stream",)),),
)

LOG_TABLES = (STREAM, ENTRY, MARK, FIELD, FENCE)

LOG = Part("log", 1, LOG_TABLES, {1: making(*LOG_TABLES)})
