"""What only the doctor asks of a database: is anything missing, doubled, old, or in the way?

Every question is bounded. Rows are looked at by their key, the newest or the oldest `SAMPLE` of
them, and whoever is told the answer is told that, too. Nothing is changed, except by `within`.
"""

# The statements are put together from names in this file, nothing else.
# ruff: noqa: S608

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from sqlalchemy import exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from semel.colour import ASYNC
from semel.messages import Tail
from semel.stores.sql import SQLStore
from semel.stores.sql.faults import unavailable
from semel.stores.sql.inbox_sessions import open_async_engine, prepare
from semel.stores.sql.ledger import AsyncLedger
from semel.stores.sql.lines import Work
from semel.stores.sql.links import Link
from semel.stores.sql.outbox_cursor import Cursor, read_tails
from semel.stores.sql.outbox_lag import Holder
from semel.stores.sql.outbox_pages import POSITION
from semel.stores.sql.outbox_watermark import HELD, PLACE
from semel.stores.sql.outbox_writing import counter_of
from semel.values import value

T = TypeVar("T")

SAMPLE = 10_000

# Keys that are looked up in one statement.
PIECE = 500


async def ask(store: SQLStore, work: Work[T]) -> T:
    """Do the work on a link of the store's."""
    return await cast("AsyncLedger", store.ledger(ASYNC)).run(work)


async def within(store: SQLStore, work: Callable[[AsyncConnection], None]) -> None:
    """Do the work in a transaction of its own, and commit it."""
    given = store.engine_or_url
    is_theirs = isinstance(given, AsyncEngine)
    engine = given if isinstance(given, AsyncEngine) else _opened(store)
    try:
        async with engine.begin() as connection:
            work(connection)
    except (exc.SQLAlchemyError, OSError) as error:
        raise unavailable(store.where, error) from error
    finally:
        if not is_theirs:
            await engine.dispose()


def _opened(store: SQLStore) -> AsyncEngine:
    engine = open_async_engine(store.url)
    prepare(engine.sync_engine)
    return engine


# --- times --------------------------------------------------------------------------------------


async def _now_us(link: Link) -> int:
    [(now,)] = await link.fetch("SELECT {now}", link.dialect.now_param())
    return link.dialect.micros(now)


async def _age_s(link: Link, stamp: Any) -> float:
    return max(0.0, (await _now_us(link) - link.dialect.micros(stamp)) / 1e6)


# --- relays -------------------------------------------------------------------------------------

CURSORS = (
    "SELECT shard, fence, position, tails, lanes FROM event_outbox_cursor WHERE name = ? "
    "ORDER BY shard"
)


async def cursors(link: Link, name: str) -> Sequence[Cursor]:
    """Of the relays of one name, the shards that were ever taken."""
    return [
        Cursor(int(shard), int(fence), int(position), read_tails(tails), json.loads(lanes))
        for shard, fence, position, tails, lanes in await link.fetch(CURSORS, [name])
    ]


async def is_published(link: Link, event_id: str, cursor: Cursor | None) -> bool | None:
    """Has the cursor passed this event? None where the outbox does not have it (any more)."""
    tail = await place_of(link, event_id)
    if tail is None:
        return None
    return cursor is not None and 0 < tail.position <= cursor.position


async def place_of(link: Link, event_id: str) -> Tail | None:
    """Where the outbox has this event; position 0 where it has none yet."""
    place = POSITION[link.dialect.name]
    select = f"SELECT {place} FROM event_outbox WHERE event_id = ?"
    rows = await link.fetch(select, [event_id])
    return Tail(int(rows[0][0] or 0), event_id) if rows else None


async def last_id(link: Link) -> int:
    """The newest position that can be seen."""
    place = POSITION[link.dialect.name]
    [(highest,)] = await link.fetch(f"SELECT COALESCE(MAX({place}), 0) FROM event_outbox")
    return int(highest)


# For how long the session has been doing what it is doing, or nothing: the lock is at least as old,
# unless this very statement takes it, and that one is short. The age of the transaction says less:
# one of an hour that is committed just now holds up nobody.
WRITERS = (
    "SELECT a.pid, COALESCE(a.state, ''), "
    "COALESCE(extract(epoch FROM clock_timestamp() - a.state_change), 0)::float8, "
    "COALESCE(left(a.query, 200), '') FROM pg_stat_activity AS a "
    f"WHERE a.pid IN (SELECT l.pid {HELD} {PLACE}) ORDER BY a.state_change"
)


async def writers(link: Link) -> Sequence[Holder]:
    """Who keeps readers from going on, and for how long surely."""
    if link.dialect.name != "postgresql":
        return ()
    rows = await link.fetch(WRITERS)
    return [Holder(int(pid), state, float(held_s), query) for pid, state, held_s, query in rows]


# --- numbers ------------------------------------------------------------------------------------


@value
class Numbers:
    """The numbers of one aggregate in the outbox, as far as they were looked at.

    `counter` is the last one that was given out, None where nothing says so.
    """

    tenant: str
    topic: str
    aggregate_type: str
    aggregate_id: str
    rows: int
    distinct: int
    first: int
    last: int
    counter: int | None

    @property
    def name(self) -> str:
        of = f" of tenant {self.tenant}" if self.tenant else ""
        return f"{self.topic} {self.aggregate_type}/{self.aggregate_id}{of}"

    @property
    def missing(self) -> int:
        """Between the first that is there and the last that was given out."""
        return max(self.last, self.counter or 0) - self.first + 1 - self.distinct

    @property
    def doubled(self) -> int:
        return self.rows - self.distinct

    @property
    def is_behind(self) -> bool:
        """Would the counter give out a number that is taken?"""
        return self.counter is None or self.counter < self.last


AGGREGATE = "tenant_id, topic, aggregate_type, aggregate_id"

# Within an aggregate ids grow with the numbers, and rows go from the oldest on. So of the newest
# rows each aggregate has its last numbers, without gaps.
NUMBERS = (
    f"SELECT {AGGREGATE}, COUNT(*), COUNT(DISTINCT seq), MIN(seq), MAX(seq) FROM "
    f"(SELECT {AGGREGATE}, seq FROM event_outbox ORDER BY id DESC LIMIT {SAMPLE}) AS newest "
    f"WHERE seq IS NOT NULL GROUP BY {AGGREGATE}"
)


async def numbers(link: Link) -> Sequence[Numbers]:
    """Of the aggregates among the newest rows, those whose numbers are not as they should be.

    Rows and counters are from one moment, or every commit in between would look like a hole.
    """
    async with _snapshot(link):
        rows = await link.fetch(NUMBERS)
        ids = [counter_of(*row[:4]) for row in rows]
        counters = await _counters(link, ids)
    found = [_numbers(row, counters.get(id)) for row, id in zip(rows, ids, strict=True)]
    return [each for each in found if each.missing or each.doubled or each.is_behind]


def _numbers(row: Any, counter: int | None) -> Numbers:
    tenant, topic, aggregate_type, aggregate_id, count, distinct, first, last = row
    return Numbers(
        tenant,
        topic,
        aggregate_type,
        aggregate_id,
        int(count),
        int(distinct),
        int(first),
        int(last),
        counter,
    )


async def _counters(link: Link, ids: Sequence[bytes]) -> Mapping[bytes, int]:
    found: dict[bytes, int] = {}
    for start in range(0, len(ids), PIECE):
        piece = ids[start : start + PIECE]
        marks = ", ".join("?" * len(piece))
        select = f"SELECT id, seq FROM event_outbox_seq WHERE id IN ({marks})"
        found |= {bytes(id): int(seq) for id, seq in await link.fetch(select, piece)}
    return found


SNAPSHOT = {
    "postgresql": ("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",),
    "mysql": (
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY",
    ),
    "sqlite": ("BEGIN",),
}


@asynccontextmanager
async def _snapshot(link: Link) -> AsyncIterator[None]:
    for statement in SNAPSHOT[link.dialect.name]:
        await link.change(statement)
    try:
        yield
    finally:
        await link.change("ROLLBACK")


# --- what waits ---------------------------------------------------------------------------------


@value
class Waiting:
    """How many messages wait alike for a consumer, and the age of the oldest of them.

    `alone`: they have no number.
    """

    consumer: str
    state: str
    why: str
    alone: bool
    count: int
    oldest_s: float


WAITING = (
    "SELECT consumer, state, why, CASE WHEN seq = 0 THEN 1 ELSE 0 END, COUNT(*), MIN(parked_at) "
    "FROM (SELECT consumer, state, why, seq, parked_at FROM event_parked "
    f"ORDER BY id LIMIT {SAMPLE}) AS oldest GROUP BY 1, 2, 3, 4"
)


async def waiting(link: Link) -> Sequence[Waiting]:
    """Of the messages that have waited longest."""
    rows = await link.fetch(WAITING)
    now_us = await _now_us(link)
    return [
        Waiting(consumer, state, why, bool(alone), int(count), _since(link, now_us, stamp))
        for consumer, state, why, alone, count, stamp in rows
    ]


def _since(link: Link, now_us: int, stamp: Any) -> float:
    return max(0.0, (now_us - link.dialect.micros(stamp)) / 1e6)


# --- what is old --------------------------------------------------------------------------------


@value
class Oldest:
    """The oldest event in the outbox, and its age; position 0 where it has none yet."""

    position: int
    age_s: float


async def oldest(link: Link) -> Oldest | None:
    place = POSITION[link.dialect.name]
    rows = await link.fetch(f"SELECT {place}, created_at FROM event_outbox ORDER BY id LIMIT 1")
    return Oldest(int(rows[0][0] or 0), await _age_s(link, rows[0][1])) if rows else None


async def oldest_remembered_s(link: Link) -> float | None:
    """The age of the oldest id that the inbox remembers."""
    rows = await link.fetch("SELECT received_at FROM inbox_message ORDER BY received_at LIMIT 1")
    return await _age_s(link, rows[0][0]) if rows else None


LOWEST = "SELECT name, MIN(lowest) FROM event_outbox_cursor GROUP BY name"


async def lowest(link: Link) -> Mapping[str, int]:
    """Of each name of relays, where the slowest of its shards and lanes is."""
    return {name: int(at) for name, at in sorted(await link.fetch(LOWEST))}


# --- tables -------------------------------------------------------------------------------------


@value
class Size:
    """How large a table is, and how many of its rows are dead; None where nobody counts them."""

    table: str
    bytes: int
    live: int | None = None
    dead: int | None = None
    vacuumed_s: float | None = None


TABLES = ("event_outbox", "event_outbox_seq", "event_outbox_cursor", "inbox_mark", "inbox_message")
_LISTED = ", ".join(f"'{table}'" for table in TABLES)
_REGISTERED = ", ".join(f"to_regclass('{table}')" for table in TABLES)

SIZES = {
    "postgresql": (
        "SELECT relname::text, pg_total_relation_size(relid), n_live_tup, n_dead_tup, extract("
        "epoch FROM clock_timestamp() - GREATEST(last_autovacuum, last_vacuum))::float8 "
        f"FROM pg_stat_user_tables WHERE relid IN ({_REGISTERED}) ORDER BY relname"
    ),
    "mysql": (
        "SELECT table_name, data_length + index_length, NULL, NULL, NULL "
        "FROM information_schema.tables "
        f"WHERE table_schema = DATABASE() AND table_name IN ({_LISTED}) ORDER BY table_name"
    ),
}


async def sizes(link: Link) -> Sequence[Size]:
    """Of the tables that are written all the time; none on SQLite, which is one file."""
    if link.dialect.name not in SIZES:
        return ()
    rows = await link.fetch(SIZES[link.dialect.name])
    return [Size(table, int(size), live, dead, since) for table, size, live, dead, since in rows]
