"""The broker in one SQLite file: nothing to install or to start, any number of processes.

    broker = SQLiteBroker("events.db", shards=4)

Its tables have names of their own, so the file may be an application's, its outbox included.
Publishing, reading and acknowledging are one transaction each, and wait for the disk; they do so
on a thread of the broker, for a disk may take its time and the event loop may not. What a group has
in hand is a row per message, written with the read that hands it out: whoever owns the shard next
finds it there.

Two things are easy to get wrong. A cancelled reader may have been handed messages that nobody got;
they lie ready for its next read. And a process does not hear another one publish: whoever waits
looks at the tails of all shards now and then, one look for all readers of the broker.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from semel.brokers import rules
from semel.brokers.urls import check_query
from semel.colour import ASYNC, Waiter
from semel.errors import BrokerUnavailableError, SettingsError, StoreUnavailableError
from semel.messages import (
    Backlog,
    Batch,
    Delivery,
    Features,
    Full,
    GroupBacklog,
    Receipt,
    Tail,
    Taken,
)
from semel.stores import path_of
from semel.stores.sqlite.connections import MEMORY, Connections, connections_to
from semel.stores.sqlite.schema import wal
from semel.stores.sqlite.thread import Thread

__all__ = ["SQLiteBroker"]

Place: TypeAlias = tuple[str, int]
"""A topic and one of its shards."""

# How often those who wait look for what other processes published. A look costs some 60 us, most
# of it the way to the thread and back.
LOOK_S: Final = 0.02


class SQLiteBroker:
    """Messages in the SQLite file at a path or `sqlite:///` URL, in `shards` shards per topic.

    What every group has acknowledged is trimmed down to `maxlen` entries per shard; at twice as
    many, publishing answers `Full`. With maxlen=None everything is kept. Shared by the processes
    of one machine, which must agree on `shards`; not on a network file system.
    """

    features = Features(fenced=True, dedups="exact", heals=True, bounded=True)

    def __init__(
        self,
        path_or_url: str | os.PathLike[str],
        *,
        shards: int = 1,
        maxlen: int | None = 10_000,
    ) -> None:
        rules.check_settings(shards, maxlen)
        self.shards = shards
        self._path = _path(path_or_url)
        self._thread = Thread()
        self._connections = connections_to(self._path)
        self._rows = _Rows(self._connections, shards, maxlen)
        self._rows.prepare()
        self._waiters: dict[Place, set[Waiter]] = {}
        self._looked_at = -LOOK_S
        self._tails: Mapping[Place, int] = {}

    async def publish(self, batch: Batch) -> Receipt:
        rules.check(batch, self.shards)
        receipt: Receipt = await self.call(self._rows.publish, batch)
        self._ring((batch.topic, batch.shard))
        return receipt

    async def tail(self, topic: str, shard: int) -> Tail:
        """Return the last message of the shard. Trim first if this broker has published there."""
        rules.check_shard(shard, self.shards)
        tail: Tail = await self.call(self._rows.trimmed_tail, (topic, shard))
        return tail

    async def join(self, topic: str, group: str) -> None:
        await self.call(self._rows.join, topic, group)

    async def leave(self, topic: str, group: str) -> None:
        """Forget the group: nothing is kept for it any more."""
        await self.call(self._rows.leave, topic, group)

    async def trim(self, topic: str, keep: int) -> None:
        """Forget all but the last `keep` messages of each shard that every group is done with."""
        await self.call(self._rows.trim, topic, keep)

    async def consumer(
        self, topic: str, group: str, shard: int, *, name: str, fence: int
    ) -> SQLiteConsumer:
        rules.check_shard(shard, self.shards)
        owner = await self.call(self._rows.open, topic, group, shard, fence)
        return SQLiteConsumer(self, self._rows, (topic, shard), _View(group, owner, name, fence))

    async def backlog(self, topic: str, shard: int) -> Backlog:
        rules.check_shard(shard, self.shards)
        backlog: Backlog = await self.call(self._rows.backlog, (topic, shard))
        return backlog

    async def aclose(self) -> None:
        """End the thread, and close the connections."""
        await self._thread.close()
        self._connections.close()

    def __repr__(self) -> str:
        return f"SQLiteBroker({self._path!r}, shards={self.shards})"

    # --- for its consumers

    async def call(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            return await self._thread.run(work, *args)
        except StoreUnavailableError as error:
            raise BrokerUnavailableError(str(error)) from error

    @contextmanager
    def listening(self, place: Place) -> Iterator[Waiter]:
        """Listen before looking, or a ring between the two is lost."""
        waiter = ASYNC.waiter()
        waiters = self._waiters.setdefault(place, set())
        waiters.add(waiter)
        try:
            yield waiter
        finally:
            waiters.discard(waiter)

    def _ring(self, place: Place) -> None:
        for waiter in list(self._waiters.get(place, ())):
            waiter.ring()

    async def has_more(self, place: Place, read_to: int) -> bool:
        """Is there anything behind that, as of a moment ago? The first who asks looks for all."""
        if ASYNC.now() - self._looked_at >= LOOK_S:
            self._looked_at = ASYNC.now()
            self._tails = await self.call(self._rows.tails)
        return self._tails.get(place, 0) > read_to


def _path(given: str | os.PathLike[str]) -> str:
    path = os.fspath(given)
    if "://" in path:
        if not path.startswith("sqlite:"):
            raise SettingsError(f"{path!r} is no SQLite file; write a path, or sqlite:///path.db")
        check_query(SQLiteBroker, path)
        path = MEMORY if path.rstrip("/") == "sqlite:" else path_of(path)
    if path == MEMORY:
        raise SettingsError("a broker in SQLite needs a file; in this process alone use memory://")
    return path


class _View:
    """Who reads: a group, and its owner of the shard by number and name."""

    __slots__ = ("fence", "group", "name", "owner")

    def __init__(self, group: str, owner: int, name: str, fence: int) -> None:
        self.group = group
        self.owner = owner
        self.name = name
        self.fence = fence


class SQLiteConsumer:
    """One owner's view of one shard of a topic, for one group."""

    def __init__(self, broker: SQLiteBroker, rows: _Rows, place: Place, view: _View) -> None:
        self._broker = broker
        self._rows = rows
        self._place = place
        self._view = view
        self._waiter: Waiter | None = None
        self._closed = False
        # Filled on the broker's thread, with what is in hand by then. A call that is cancelled
        # leaves it here for the next one.
        self._left: deque[Delivery] = deque()
        self._new: deque[Delivery] = deque()

    async def left_over(self, limit: int = 1000) -> Sequence[Delivery]:
        if not self._left and not self._closed:
            await self._broker.call(self._fetch_left_over, limit)
        return _take(self._left, limit)

    def _fetch_left_over(self, limit: int) -> None:
        self._left += self._rows.left_over(self._place, self._view, limit)

    async def read(self, limit: int, *, wait_s: float = 0.0) -> Sequence[Delivery]:
        until = ASYNC.now() + wait_s
        with self._broker.listening(self._place) as waiter:
            self._waiter = waiter
            while not self._new and not self._closed:
                read_to = await self._broker.call(self._fetch, limit)
                if self._new or not await self._is_worth_a_look(waiter, read_to, until):
                    break
        return _take(self._new, limit)

    def _fetch(self, limit: int) -> int:
        found, read_to = self._rows.read(self._place, self._view, limit)
        self._new += found
        return read_to

    async def _is_worth_a_look(self, waiter: Waiter, read_to: int, until: float) -> bool:
        """True when something is there, or may be; False when the time is up."""
        while (left := until - ASYNC.now()) > 0 and not self._closed:
            if await waiter.wait(min(LOOK_S, left)):
                return True
            if await self._broker.has_more(self._place, read_to):
                return True
        return False

    async def reclaim(self, idle_s: float, limit: int = 100) -> Sequence[Delivery]:
        """Nothing: nobody can read here outside our leases."""
        return []

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Not fenced: that a message had its effect is true whoever says it."""
        if deliveries:
            positions = [delivery.token for delivery in deliveries]
            await self._broker.call(self._rows.ack, self._place, self._view, positions)

    async def close(self) -> None:
        """The next owner is handed what is pending anyway; whoever waits here waits no longer."""
        self._closed = True
        if self._waiter is not None:
            self._waiter.ring()


def _take(ready: deque[Delivery], limit: int) -> list[Delivery]:
    return [ready.popleft() for _ in range(min(limit, len(ready)))]


# --- the tables ---------------------------------------------------------------------------------

VERSION: Final = 1

SCHEMA: Final = """
CREATE TABLE broker_layout (
    version INTEGER NOT NULL,
    shards INTEGER NOT NULL
);
CREATE TABLE broker_shard (
    topic TEXT NOT NULL,
    shard INTEGER NOT NULL,
    fence INTEGER NOT NULL,
    tail_position INTEGER NOT NULL,
    tail_id TEXT NOT NULL,
    length INTEGER NOT NULL,
    PRIMARY KEY (topic, shard)
) WITHOUT ROWID;
CREATE TABLE broker_entry (
    topic TEXT NOT NULL,
    shard INTEGER NOT NULL,
    position INTEGER NOT NULL,
    id TEXT NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (topic, shard, position)
);
CREATE TABLE broker_group (
    topic TEXT NOT NULL,
    shard INTEGER NOT NULL,
    group_name TEXT NOT NULL,
    read_to INTEGER NOT NULL DEFAULT 0,
    fence INTEGER NOT NULL DEFAULT 0,
    opened INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (topic, shard, group_name)
) WITHOUT ROWID;
CREATE TABLE broker_pending (
    topic TEXT NOT NULL,
    shard INTEGER NOT NULL,
    group_name TEXT NOT NULL,
    position INTEGER NOT NULL,
    owner INTEGER NOT NULL,
    consumer TEXT NOT NULL,
    since REAL NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (topic, shard, group_name, position)
) WITHOUT ROWID
"""

IS_THERE: Final = "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'broker_layout'"

SHARD: Final = (
    "SELECT fence, tail_position, tail_id, length FROM broker_shard WHERE topic = ? AND shard = ?"
)
PUT_SHARD: Final = "INSERT OR REPLACE INTO broker_shard VALUES (?, ?, ?, ?, ?, ?)"
TAILS: Final = "SELECT topic, shard, tail_position FROM broker_shard"

# As text, for whoever looks into the file; what is no text is read as it is.
PUT_ENTRY: Final = "INSERT INTO broker_entry VALUES (?, ?, ?, ?, CAST(? AS TEXT))"
IDS: Final = (
    "SELECT position, id FROM broker_entry "
    "WHERE topic = ?1 AND shard = ?2 AND (position BETWEEN ?3 AND ?4 OR position = "
    "(SELECT min(position) FROM broker_entry WHERE topic = ?1 AND shard = ?2))"
)
BEHIND: Final = (
    "SELECT position, CAST(document AS BLOB) FROM broker_entry "
    "WHERE topic = ? AND shard = ? AND position > ? ORDER BY position LIMIT ?"
)
TRIM: Final = (
    "DELETE FROM broker_entry WHERE rowid IN (SELECT rowid FROM broker_entry "
    "WHERE topic = ? AND shard = ? AND position <= ? ORDER BY position LIMIT ?)"
)

JOIN: Final = "INSERT OR IGNORE INTO broker_group (topic, shard, group_name) VALUES (?, ?, ?)"
OPEN: Final = (
    "UPDATE broker_group SET fence = ?4, opened = opened + 1 "
    "WHERE topic = ?1 AND shard = ?2 AND group_name = ?3 AND fence <= ?4 RETURNING opened"
)
GROUP: Final = (
    "SELECT read_to FROM broker_group "
    "WHERE topic = ? AND shard = ? AND group_name = ? AND opened = ?"
)
FENCE: Final = "SELECT fence FROM broker_group WHERE topic = ? AND shard = ? AND group_name = ?"
READ_TO: Final = (
    "UPDATE broker_group SET read_to = ? WHERE topic = ? AND shard = ? AND group_name = ?"
)
GROUPS: Final = """
SELECT
    g.group_name,
    (
        SELECT count(*) FROM broker_entry e
        WHERE e.topic = g.topic AND e.shard = g.shard AND e.position > g.read_to
    ),
    count(p.position),
    min(p.since),
    coalesce(min(p.position) - 1, g.read_to) AS done_to
FROM broker_group g LEFT JOIN broker_pending p
    ON p.topic = g.topic AND p.shard = g.shard AND p.group_name = g.group_name
WHERE g.topic = ? AND g.shard = ?
GROUP BY g.group_name
ORDER BY done_to, g.group_name
"""
DONE_TO: Final = """
SELECT min(coalesce(
    (
        SELECT min(p.position) - 1 FROM broker_pending p
        WHERE p.topic = g.topic AND p.shard = g.shard AND p.group_name = g.group_name
    ),
    g.read_to
))
FROM broker_group g WHERE g.topic = ? AND g.shard = ?
"""

HAND_OUT: Final = "INSERT INTO broker_pending VALUES (?, ?, ?, ?, ?, ?, ?, 1)"
LEFT_OVER: Final = """
SELECT p.position, p.count, p.consumer, p.since, CAST(e.document AS BLOB)
FROM broker_pending p LEFT JOIN broker_entry e
    ON e.topic = p.topic AND e.shard = p.shard AND e.position = p.position
WHERE p.topic = ? AND p.shard = ? AND p.group_name = ? AND p.owner <> ?
ORDER BY p.position LIMIT ?
"""
TAKE_OVER: Final = (
    "UPDATE broker_pending SET owner = ?, consumer = ?, since = ?, count = count + 1 "
    "WHERE topic = ? AND shard = ? AND group_name = ? AND position = ?"
)
ACK: Final = (
    "DELETE FROM broker_pending WHERE topic = ? AND shard = ? AND group_name = ? AND position = ?"
)


class _Rows:
    """The verbs over the tables, blocking."""

    def __init__(self, connections: Connections, shards: int, maxlen: int | None) -> None:
        self._connections = connections
        self._shards = shards
        self._maxlen = maxlen
        self._published: set[Place] = set()
        """Shards to which this object has published. Their publisher decides how much is kept."""

    def prepare(self) -> None:
        """Make the tables, or see that they are as expected."""
        self._connections.read(wal)
        if self._connections.select(IS_THERE, ()) is None:
            self._connections.write(self._create)
        found = self._connections.select("SELECT version, shards FROM broker_layout", ())
        if found is None or found[0] != VERSION:
            raise SettingsError(
                f"{self._connections.path} has tables of a broker that this version of Semel does "
                "not know; upgrade Semel, or give the broker another file"
            )
        if found[1] != self._shards:
            raise SettingsError(
                f"{self._connections.path} is laid out in {found[1]} shards, not {self._shards}: "
                f"write shards={found[1]}, or begin another file once this one has been read"
            )

    def _create(self, connection: sqlite3.Connection) -> None:
        if connection.execute(IS_THERE).fetchone():  # another process was faster
            return
        for statement in SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute("INSERT INTO broker_layout VALUES (?, ?)", (VERSION, self._shards))

    # --- publishing

    def publish(self, batch: Batch) -> Receipt:
        # Before the transaction: the file is locked for all writers while that lasts.
        documents = rules.documents(batch.messages)
        return self._connections.write(lambda c: self._publish(c, batch, documents))

    def _publish(
        self, connection: sqlite3.Connection, batch: Batch, documents: rules.Documents
    ) -> Receipt:
        place = (batch.topic, batch.shard)
        found = connection.execute(SHARD, place).fetchone() or (0, 0, "", 0)
        fence, tail, length = found[0], Tail(found[1], found[2]), found[3]

        def ids(first: int, last: int) -> Mapping[int, str]:
            return dict(connection.execute(IDS, (*place, first, last)))

        fresh = rules.fresh(batch, fence, tail, ids)
        if not isinstance(fresh, Sequence):
            return fresh
        self._published.add(place)
        if fresh and self._maxlen is not None and length > self._maxlen:
            length -= self._trim(connection, place, length - self._maxlen)
        if fresh and self._maxlen is not None and length >= 2 * self._maxlen:
            receipt: Receipt = Full(length, self._why_full(connection, batch))
        else:
            added, refused = rules.written(fresh, documents)
            rows = [(*place, m.position, m.id, document) for m, document in added]
            connection.executemany(PUT_ENTRY, rows)
            length += len(added)
            tail = Tail(added[-1][0].position, added[-1][0].id) if added else tail
            receipt = refused or Taken(len(added))
        connection.execute(PUT_SHARD, (*place, batch.fence, tail.position, tail.id, length))
        return receipt

    def trim(self, topic: str, keep: int) -> None:
        def trimmed(connection: sqlite3.Connection) -> None:
            for shard in range(self._shards):
                self._shorten(connection, (topic, shard), keep)

        self._connections.write(trimmed)

    def _shorten(self, connection: sqlite3.Connection, place: Place, keep: int) -> None:
        found = connection.execute(SHARD, place).fetchone()
        if found is not None and found[3] > keep:
            *kept, length = found
            length -= self._trim(connection, place, length - keep)
            connection.execute(PUT_SHARD, (*place, *kept, length))

    @staticmethod
    def _trim(connection: sqlite3.Connection, place: Place, excess: int) -> int:
        """Delete what every group has acknowledged, at most so many. Without a group, nothing."""
        (done_to,) = connection.execute(DONE_TO, place).fetchone()
        if done_to is None:
            return 0
        return connection.execute(TRIM, (*place, done_to, excess)).rowcount

    @staticmethod
    def _why_full(connection: sqlite3.Connection, batch: Batch) -> str:
        slowest = connection.execute(GROUPS, (batch.topic, batch.shard)).fetchone()
        return rules.why_full(batch, GroupBacklog(*slowest[:3]) if slowest else None)

    def trimmed_tail(self, place: Place) -> Tail:
        keep, found = self._maxlen, self._connections.select(SHARD, place)
        if keep is not None and found is not None and found[3] > keep and place in self._published:
            self._connections.write(lambda c: self._shorten(c, place, keep))
        return Tail() if found is None else Tail(found[1], found[2])

    def tail(self, place: Place) -> Tail:
        found = self._connections.select(SHARD, place)
        return Tail() if found is None else Tail(found[1], found[2])

    def tails(self) -> Mapping[Place, int]:
        rows = self._connections.read(lambda c: c.execute(TAILS).fetchall())
        return {(topic, shard): position for topic, shard, position in rows}

    # --- groups

    def join(self, topic: str, group: str) -> None:
        self._connections.write(lambda c: self._join(c, topic, group))

    def _join(self, connection: sqlite3.Connection, topic: str, group: str) -> None:
        connection.executemany(JOIN, [(topic, shard, group) for shard in range(self._shards)])

    def leave(self, topic: str, group: str) -> None:
        def forget(connection: sqlite3.Connection) -> None:
            for table in ("broker_group", "broker_pending"):
                connection.execute(
                    f"DELETE FROM {table} WHERE topic = ? AND group_name = ?",  # noqa: S608
                    (topic, group),
                )

        self._connections.write(forget)

    def open(self, topic: str, group: str, shard: int, fence: int) -> int:
        """The number of the new owner; 0, who is never the owner, for one of the past."""

        def opened(connection: sqlite3.Connection) -> int:
            self._join(connection, topic, group)
            found = connection.execute(OPEN, (topic, shard, group, fence)).fetchone()
            return found[0] if found else 0

        return self._connections.write(opened)

    # --- reading

    def read(self, place: Place, view: _View, limit: int) -> tuple[list[Delivery], int]:
        """What is handed out now, and up to where there is no need to look again."""
        group = self._connections.select(GROUP, (*place, view.group, view.owner))
        if group is None:
            now = self._connections.select(FENCE, (*place, view.group))
            if now is not None and now[0] == view.fence:
                raise rules.begun_anew(f"shard {place[1]} of {place[0]!r} for group {view.group!r}")
            return [], 2**63 - 1  # somebody else's, for ever
        if self.tail(place).position <= group[0]:
            return [], group[0]
        found = self._connections.write(lambda c: self._hand_out(c, place, view, limit))
        return [rules.delivery(position, raw) for position, raw in found], group[0]

    @staticmethod
    def _hand_out(
        connection: sqlite3.Connection, place: Place, view: _View, limit: int
    ) -> Sequence[tuple[int, bytes]]:
        group = connection.execute(GROUP, (*place, view.group, view.owner)).fetchone()
        if group is None:
            return []
        found = connection.execute(BEHIND, (*place, group[0], limit)).fetchall()
        now = time.time()
        connection.executemany(
            HAND_OUT, [(*place, view.group, at, view.owner, view.name, now) for at, _ in found]
        )
        if found:
            connection.execute(READ_TO, (found[-1][0], *place, view.group))
        return found

    def left_over(self, place: Place, view: _View, limit: int) -> list[Delivery]:
        mine = (*place, view.group, view.owner)
        if self._connections.select(LEFT_OVER, (*mine, 1)) is None:
            return []
        return self._connections.write(lambda c: self._take_over(c, place, view, limit))

    @staticmethod
    def _take_over(
        connection: sqlite3.Connection, place: Place, view: _View, limit: int
    ) -> list[Delivery]:
        mine = (*place, view.group, view.owner)
        if connection.execute(GROUP, mine).fetchone() is None:
            return []
        found = connection.execute(LEFT_OVER, (*mine, limit)).fetchall()
        now = time.time()
        connection.executemany(
            TAKE_OVER,
            [(view.owner, view.name, now, *place, view.group, row[0]) for row in found],
        )
        return [
            rules.delivery(
                position,
                raw or b"",  # somebody has deleted it by hand
                count=count + 1,
                consumer=consumer,
                idle_s=max(0.0, now - since),
            )
            for position, count, consumer, since, raw in found
        ]

    def ack(self, place: Place, view: _View, positions: Sequence[int]) -> None:
        rows = [(*place, view.group, position) for position in positions]

        def acknowledged(connection: sqlite3.Connection) -> None:
            connection.executemany(ACK, rows)
            if place in self._published and self._maxlen is not None:
                self._shorten(connection, place, self._maxlen)

        self._connections.write(acknowledged)

    # --- for people

    def backlog(self, place: Place) -> Backlog:
        def look(connection: sqlite3.Connection) -> tuple[Any, list[Any]]:
            return (
                connection.execute(SHARD, place).fetchone() or (0, 0, "", 0),
                connection.execute(GROUPS, place).fetchall(),
            )

        (_, position, id, length), rows = self._connections.read(look)
        now = time.time()
        groups = [
            GroupBacklog(name, unread, pending, 0.0 if since is None else max(0.0, now - since))
            for name, unread, pending, since, _ in rows
        ]
        return Backlog(*place, length, self._maxlen, Tail(position, id), groups)
