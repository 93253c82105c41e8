"""A page of an outbox: its statement in each database, and the messages it makes.

Rows are gone through by position behind the one where the reader is, whoever's they are, and those
of other shards left out: the newest rows are in memory, an index of the shards would have to be
written by everybody and sorted by every reader.
"""

# The statements are put together from names in this file, nothing else.
# ruff: noqa: S608

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from semel.messages import Message
from semel.stores.rules import EPOCH
from semel.stores.sql.asking import dense
from semel.stores.sql.dialects import Dialect
from semel.stores.sql.links import Link
from semel.stores.sql.outbox_cursor import Owned
from semel.stores.sql.rows import original_text
from semel.values import value

# What a row's place in the order of reading is called.
POSITION = {"postgresql": "id", "mysql": "position", "sqlite": "id"}

NUMBER = {"postgresql": "?::int8", "mysql": "?", "sqlite": "?"}

# In words that no index can be used for.
SLOT = {"postgresql": "shard::int8", "mysql": "shard", "sqlite": "+shard"}
BY_POSITION = {"mysql": " FORCE INDEX (ux_event_outbox_position)"}

NAMES = ("event_id", "event_type", "topic", "tenant_id", "aggregate_type", "aggregate_id")

ANY_READER = Owned("", ())


@value
class Stretch:
    """Which rows: behind one position up to another, of some slots, or of one topic among them."""

    after: int
    upto: int
    slots: tuple[int, int] | None
    topic: str | None

    def where(self, database: str) -> str:
        place, number = POSITION[database], NUMBER[database]
        parts = [f"{place} > {number}", f"{place} <= {number}"]
        parts += [f"{SLOT[database]} BETWEEN {number} AND {number}"] if self.slots else []
        parts += ["topic = ?"] if self.topic is not None else []
        return " AND ".join(parts)

    @property
    def values(self) -> list[Any]:
        topic = [] if self.topic is None else [self.topic]
        return [self.after, self.upto, *(self.slots or ()), *topic]


async def fetch(
    link: Link, stretch: Stretch, owned: Owned, limit: int, most_bytes: int
) -> tuple[list[Any], bool]:
    """Rows of the stretch, and whether there may be more: it ends at the limit, or is too heavy.

    It returns no rows to a reader that does not own the shard. With `ANY_READER`, ownership is not
    checked.
    """
    work = _fetch_postgres if link.dialect.name == "postgresql" else _fetch_plain
    return await work(link, stretch, owned, limit, most_bytes)


def _if(owned: Owned) -> str:
    if not owned.where:
        return ""
    return f" AND EXISTS (SELECT 1 FROM event_outbox_cursor AS c WHERE {owned.where})"


# --- PostgreSQL ---------------------------------------------------------------------------------


@lru_cache
def _postgres(where: str) -> str:
    columns = f"{', '.join(NAMES)}, seq, payload, created, headers"
    return dense(f"""
        SELECT place, {columns}, total FROM (
            SELECT p.*, sum(size) OVER (ORDER BY place ROWS UNBOUNDED PRECEDING) AS total FROM (
                SELECT id AS place, {", ".join(NAMES)}, seq, payload,
                    (extract(epoch FROM created_at) * 1000000)::int8 AS created, headers,
                    octet_length(payload) AS size
                FROM event_outbox WHERE {where} ORDER BY id LIMIT ?::int8
            ) AS p
        ) AS q WHERE total - size < ?::int8 ORDER BY place""")


async def _fetch_postgres(
    link: Link, stretch: Stretch, owned: Owned, limit: int, most_bytes: int
) -> tuple[list[Any], bool]:
    statement = _postgres(stretch.where("postgresql") + _if(owned))
    rows = await link.ask(statement, [*stretch.values, *owned.values, limit, most_bytes])
    cut = bool(rows) and (len(rows) == limit or rows[-1][-1] >= most_bytes)
    return rows, cut


# --- MariaDB, MySQL, SQLite ---------------------------------------------------------------------


async def _fetch_plain(
    link: Link, stretch: Stretch, owned: Owned, limit: int, most_bytes: int
) -> tuple[list[Any], bool]:
    """Sizes first: they have no window over rows with long texts that would be worth its while."""
    database = link.dialect.name
    place = POSITION[database]
    table = f"event_outbox{BY_POSITION.get(database, '')} WHERE"
    ordered = f"ORDER BY {place} LIMIT ?"
    select = f"SELECT {place}, LENGTH(payload) FROM {table} {stretch.where(database)} {ordered}"
    sizes = await link.fetch(select, [*stretch.values, limit])
    light = _light(sizes, most_bytes)
    if not light:
        return [], False
    columns = f"{place}, {', '.join(NAMES)}, seq, payload, created_at, headers, 0"
    rows = await link.fetch(
        f"SELECT {columns} FROM {table} {stretch.where(database)}{_if(owned)} {ordered}",
        [*stretch.values, *owned.values, light],
    )
    return rows, bool(rows) and (light == limit or light < len(sizes))


def _light(sizes: Sequence[Any], most_bytes: int) -> int:
    """How many of them are one page: at least one, and as many as are light enough."""
    total = 0
    for count, (_, size) in enumerate(sizes, 1):
        total += int(size)
        if total >= most_bytes:
            return count
    return len(sizes)


# --- messages -----------------------------------------------------------------------------------


def _of_micros(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


def _of_naive(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC)


def _of_text(moment: str) -> datetime:
    return datetime.fromisoformat(moment).replace(tzinfo=UTC)


MOMENTS: Mapping[str, Callable[[Any], datetime]] = {
    "postgresql": _of_micros,
    "mysql": _of_naive,
    "sqlite": _of_text,
}


def messages(rows: Sequence[Any], dialect: Dialect, source: str) -> list[Message]:
    """This is where a reader's time goes, so it is written out."""
    moment = MOMENTS[dialect.name]
    if dialect.codec != "utf-8":
        rows = [_original(row) for row in rows]
    return [
        Message(at, id, kind, to, of, a, b, seq, text, moment(us), _read(headers), source)
        for at, id, kind, to, of, a, b, seq, text, us, headers, _ in rows
    ]


def _original(row: Sequence[Any]) -> Sequence[Any]:
    """The row with its names as they were given; see `rows.stored_name`."""
    at, *rest = row
    names, more = rest[: len(NAMES)], rest[len(NAMES) :]
    return (at, *map(original_text, names), *more)


def _read(headers: str | None) -> dict[str, str]:
    return json.loads(headers) if headers else {}
