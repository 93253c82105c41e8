"""Who consumes a Redis stream: the bare commands, us with an inbox and an effect, and FastStream.

FastStream's handler does nothing, and it remembers nothing. Ours puts a row, in one transaction
with the memory of having done so: by a statement of its own for each message, or as an object that
SQLAlchemy writes with the others of the batch at the commit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, Literal

import redis.asyncio
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from bench.outbox_relays import PAYLOAD, Entrant, Open, until


class Base(DeclarativeBase):
    """The tables of handlers."""


class Effect(Base):
    """What a message does."""

    __tablename__ = "bench_effect"

    id: Mapped[int] = mapped_column(primary_key=True)
    event_id: Mapped[str]
    note: Mapped[str]


INSERT = sa.text("INSERT INTO bench_effect (event_id, note) VALUES (:event_id, :note)")


@contextlib.asynccontextmanager
async def floor(_database: str, url: str) -> AsyncIterator[Open]:
    client = redis.asyncio.Redis.from_url(url)
    await client.delete("bare")
    await client.xgroup_create("bare", "g", "0", mkstream=True)

    async def load(many: int) -> None:
        await _fill(client, "bare", many)

    async def drain(many: int) -> None:
        left = many
        while left:
            [[_, entries]] = await client.xreadgroup("g", "c", {"bare": ">"}, count=100)
            await client.xack("bare", "g", *[id for id, _ in entries])
            left -= len(entries)

    try:
        yield Open(load, drain)
    finally:
        await client.aclose()


async def _fill(client: Any, stream: str, many: int) -> None:
    pipe = client.pipeline(transaction=False)
    for _ in range(many):
        pipe.xadd(stream, {"data": PAYLOAD})
    await pipe.execute()


Handled = Literal["a statement", "an object", "nothing"]


class Handler:
    """Puts a row for each message, and counts."""

    def __init__(self, handled: Handled) -> None:
        self._handled = handled
        self.arrived = 0

    def handle(self, message: Any, session: Any) -> Any:
        self.arrived += 1
        row = {"event_id": message.id, "note": message.payload}
        if self._handled == "an object":
            session.add(Effect(**row))
        elif self._handled == "a statement":
            return session.execute(INSERT, row)
        return None

    async def handle_async(self, message: Any, session: Any) -> None:
        if (asked := self.handle(message, session)) is not None:
            await asked

    async def count(self) -> int:
        return self.arrived


def _ours(*, colour: str, handled: Handled) -> Any:
    @contextlib.asynccontextmanager
    async def opened(database: str, url: str) -> AsyncIterator[Open]:
        from sqlalchemy.ext.asyncio import create_async_engine

        from semel.brokers.redis import RedisBroker
        from semel.inbox import MemoryInbox, SQLInbox
        from semel.stores import MemoryStore
        from semel.stores.sql import init
        from semel.stores.sql.lines import parse, with_driver
        from semel.worker import Worker

        init(database)
        full = with_driver(parse(database), colour)
        engine: Any = sa.create_engine(full) if colour == "sync" else create_async_engine(full)
        topic = f"semel-{colour}-{handled.replace(' ', '-')}"
        broker = RedisBroker(url, maxlen=None)
        await broker.join(topic, "g")
        inbox = MemoryInbox() if handled == "nothing" else SQLInbox(engine)
        with contextlib.closing(_sync(database)) as link:
            Base.metadata.create_all(link)
            link.commit()
        position, store = 0, MemoryStore()
        handler = Handler(handled)

        async def load(many: int) -> None:
            nonlocal position
            position = await _publish(broker, topic, position, many)

        async def drain(many: int) -> None:
            handler.arrived = 0
            worker = Worker(broker, group="g", inbox=inbox, store=store, batch=100)
            handle = handler.handle if colour == "sync" else handler.handle_async
            worker.on("order.placed", topic=topic)(handle)
            running = asyncio.create_task(worker.run())
            await until(handler.count, many)
            worker.stop()
            await running

        try:
            yield Open(load, drain)
        finally:
            await broker.aclose()
            closed = engine.dispose()
            if closed is not None:
                await closed

    return opened


def _sync(database: str) -> sa.Connection:
    from semel.stores.sql.lines import parse, with_driver

    return sa.create_engine(with_driver(parse(database), "sync")).connect()


async def _publish(broker: Any, topic: str, position: int, many: int) -> int:
    from semel.messages import Batch, Message, Tail

    now = datetime.now(UTC)
    for start in range(position + 1, position + many + 1, 1000):
        follows = await broker.tail(topic, 0) or Tail()
        messages = [
            Message(
                n, f"e{n}", "order.placed", topic, "", "order", f"k{n % 500}",
                (n - 1) // 500 + 1, PAYLOAD, now,
            )
            for n in range(start, min(start + 1000, position + many + 1))
        ]  # fmt: skip
        await broker.publish(Batch(topic, 0, 1, follows, messages))
    return position + many


@contextlib.asynccontextmanager
async def faststream(_database: str, url: str) -> AsyncIterator[Open]:
    from faststream.redis import RedisBroker, StreamSub

    client = redis.asyncio.Redis.from_url(url)
    await client.delete("faststream")
    await client.xgroup_create("faststream", "g", "0", mkstream=True)
    broker = RedisBroker(url, logger=None)
    arrived = 0

    @broker.subscriber(stream=StreamSub("faststream", group="g", consumer="c", max_records=100))
    async def handle(_: Any) -> None:
        nonlocal arrived
        arrived += 1

    async def load(many: int) -> None:
        await _fill(client, "faststream", many)

    async def count() -> int:
        return arrived

    async def drain(many: int) -> None:
        nonlocal arrived
        arrived = 0
        await broker.start()
        await until(count, many)
        await broker.stop()

    try:
        yield Open(load, drain)
    finally:
        await client.aclose()


ENTRANTS = (
    Entrant("XREADGROUP, XACK", "floor", floor, "the bare commands, nothing done"),
    *(
        Entrant(
            f"semel, inbox, a row as {handled} ({colour})",
            "us",
            _ours(colour=colour, handled=handled),
            "",
            0.5,
        )
        for handled in ("an object", "a statement")
        for colour in ("sync", "async")
    ),
    Entrant(
        "semel, nothing done", "us", _ours(colour="async", handled="nothing"), "inbox in memory"
    ),
    Entrant("FastStream, nothing done", "peer", faststream, "no inbox, no order", 0.3),
)
