"""Where a router takes events from: shards of the workers' own log, or of a broker.

Both are read as a `Consumer` is: what was handed out comes again until it is acknowledged.

A shard of a log needs no cursor beside it. What is routed is trimmed, so what is there is what is
left to do, for whoever comes next. The easy mistake is to trim by number: after a failover that has
lost the end of the log, the numbers are given again, to events that nobody has read. So it is
trimmed by position, and a position that the log does not know is told of as what it is: a loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from semel.bus.jobs import Event, Written, event_of, shard_stream_of
from semel.colour import ASYNC
from semel.entries import Entry, Page, Position
from semel.errors import SettingsError
from semel.messages import Delivery
from semel.ports import Bell, Broker, Consumer, Log, LogStore, TellsShards
from semel.shards import Hold

__all__ = ["BrokerSource", "LogSource", "Source"]

# Streams of shards are looked for besides our own, up to this number and at least as many again:
# workers with more shards than the router would put events where nobody reads.
MOST_SHARDS = 64

Lost = Callable[[int, str], None]
"""Told of a shard whose history is not what was read of it."""


class Source(Protocol):
    """What a router needs to know of where its events are."""

    shards: int
    shown: str
    """What people call it."""

    async def consumer(self, hold: Hold) -> Consumer:
        """A view of the shard for its owner."""
        ...

    def event(self, delivery: Delivery) -> tuple[Event, Written]:
        """The event that was handed out; `ValueError` when it is none."""
        ...

    async def check(self) -> None:
        """`SettingsError` when some events are where this router does not read."""
        ...

    async def aclose(self) -> None: ...


# --- a log --------------------------------------------------------------------------------------


class LogSource:
    """The shards that publishers fill (`Publisher(shards=)`)."""

    def __init__(self, store: LogStore, domain: str, shards: int, lost: Lost) -> None:
        self.shards = shards
        self.shown = "the workers' log"
        self.domain = domain
        self.log = store.log(ASYNC)
        self.lost = lost
        self._store = store
        self._bell: Bell | None = None
        self.routed_to: dict[int, tuple[Hold, Position]] = {}
        """By shard, how far its owner is. It outlives outages, so that a failover is noticed."""

    @property
    def bell(self) -> Bell:
        if self._bell is None:
            self._bell = self._store.bell()
        return self._bell

    async def consumer(self, hold: Hold) -> Consumer:
        consumer = _ShardReader(self, hold)
        await consumer.listen()
        return consumer

    def event(self, delivery: Delivery) -> tuple[Event, Written]:
        event = event_of(delivery.raw)
        return event, event.written(delivery.raw)

    async def check(self) -> None:
        most = max(MOST_SHARDS, 2 * self.shards)
        others = [shard_stream_of(self.domain, n) for n in range(self.shards, most)]
        heads = await self.log.heads(others)
        for stream, head in zip(others, heads, strict=True):
            if head.offset and not _is_drained(await self.log.read(stream, None, 1)):
                raise SettingsError(
                    f"there are events in {stream!r}, and this router has {self.shards} shards, "
                    f"from 0: give it and every publisher of {self.domain!r} the same number"
                )

    async def aclose(self) -> None:
        if self._bell is not None:
            await self._bell.aclose()


def _is_drained(page: Page) -> bool:
    return page.floor == page.head


class _ShardReader:
    """One owner's view of a shard's stream."""

    def __init__(self, source: LogSource, hold: Hold) -> None:
        self._source = source
        self._log: Log = source.log
        self._hold = hold
        self._stream = shard_stream_of(source.domain, hold.shard)
        hold_then, routed_to = source.routed_to.get(hold.shard, (None, None))
        self._after = routed_to if hold_then is hold else None
        self._waiter = ASYNC.waiter()
        self._ending: asyncio.Task[None] | None = None

    async def listen(self) -> None:
        """Before the first look, or a ring between the two is lost."""
        await self._source.bell.listen(self._stream, self._waiter.ring)
        self._ending = asyncio.create_task(self._ring_at_the_end())

    async def _ring_at_the_end(self) -> None:
        await self._hold.ending.wait()
        self._waiter.ring()

    async def left_over(self, limit: int = 1000) -> Sequence[Delivery]:
        """Nothing apart: what was not finished is what is read first."""
        return ()

    async def read(self, limit: int, *, wait_s: float = 0.0) -> Sequence[Delivery]:
        found = await self._entries(limit)
        if not found and wait_s > 0:
            await self._waiter.wait(wait_s)
            found = await self._entries(limit)
        return [Delivery(entry.position, None, raw=entry.data) for entry in found]

    async def _entries(self, limit: int) -> Sequence[Entry]:
        page = await self._log.read(self._stream, self._after, limit)
        if page.lost:
            if self._after is not None and self._hold.live:
                self._source.lost(self._hold.shard, _told(self._after, page))
            self._after = page.floor
            self._source.routed_to.pop(self._hold.shard, None)
            page = await self._log.read(self._stream, page.floor, limit)
        if page.entries:
            self._after = page.entries[-1].position
        return page.entries

    async def reclaim(self, idle_s: float, limit: int = 100) -> Sequence[Delivery]:
        """Nothing: nobody is handed anything here."""
        return ()

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Not fenced: that an event was routed is true whoever says it."""
        last: Position = deliveries[-1].token
        self._source.routed_to[self._hold.shard] = (self._hold, last)
        await self._log.trim(self._stream, last)

    async def close(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        await self._source.bell.leave(self._stream, self._waiter.ring)


def _told(after: Position, page: Page) -> str:
    has = f"from {page.floor or 0} to {page.head}" if page.life != "unknown" else "nothing"
    return f"it was read up to {after}, and now has {has}"


# --- a broker -----------------------------------------------------------------------------------


class BrokerSource:
    """A topic of a broker, to which an outbox was relayed: a message's payload is an event."""

    def __init__(self, broker: Broker, topic: str, group: str, name: str) -> None:
        self.shards = broker.shards
        self.shown = "the broker"
        self._broker = broker
        self._topic = topic
        self._group = group
        self._name = name

    async def consumer(self, hold: Hold) -> Consumer:
        await self._broker.join(self._topic, self._group)
        return await self._broker.consumer(
            self._topic, self._group, hold.shard, name=self._name, fence=hold.fence
        )

    def event(self, delivery: Delivery) -> tuple[Event, Written]:
        """Written anew: what others have written may have line breaks in it, or no attempt."""
        if delivery.message is None:
            raise ValueError(delivery.problem)
        if delivery.message.refused:
            raise ValueError(f"it came without its payload: {delivery.message.refused}")
        event = event_of(delivery.message.payload)
        return event, event.written()

    async def check(self) -> None:
        if isinstance(self._broker, TellsShards):
            published = await self._broker.published_shards(self._topic)
            if published not in (None, self.shards):
                raise SettingsError(
                    f"{self._topic!r} is published in {published} shards, and this router reads "
                    f"{self.shards}: give both the same number"
                )

    async def aclose(self) -> None:
        """The broker is closed by whoever has opened it."""
