"""Who relays from PostgreSQL to Redis Streams: the bare commands, us, and the peers.

Each is opened on a database and a Redis of its own names, filled with events, and told to drain.
What is counted is what has arrived in Redis (or, for the two queues that publish nowhere, what a
handler that does nothing was handed).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import asyncpg
import redis.asyncio

PAYLOAD = '{"x":"' + "a" * 190 + '"}'
AGGREGATES = 500


@dataclass(frozen=True)
class Open:
    """A relay that is ready: `load` puts so many events, `drain` returns when all have arrived."""

    load: Callable[[int], Awaitable[None]]
    drain: Callable[[int], Awaitable[None]]


@dataclass(frozen=True)
class Entrant:
    """Who takes part. `share` is its part of the events: the slow ones get fewer."""

    name: str
    role: str
    open: Callable[[str, str], contextlib.AbstractAsyncContextManager[Open]]
    note: str = ""
    share: float = 1.0


async def until(arrived: Callable[[], Awaitable[int]], wanted: int) -> None:
    while await arrived() < wanted:  # noqa: ASYNC110 - a count has no event
        await asyncio.sleep(0.002)


# --- the floor ----------------------------------------------------------------------------------

APPEND = """
local fence = tonumber(redis.call('HGET', KEYS[2], 'fence') or '0')
if tonumber(ARGV[1]) < fence then return redis.error_reply('FENCED') end
local last = tonumber(redis.call('HGET', KEYS[2], 'last') or '0')
for i = 2, #ARGV, 2 do
  local id = tonumber(ARGV[i])
  if id > last then
    redis.call('XADD', KEYS[1], ARGV[i] .. '-0', 'event', ARGV[i + 1])
    last = id
  end
end
redis.call('HSET', KEYS[2], 'fence', ARGV[1], 'last', string.format('%.0f', last))
return last"""

LOCKS = "select min(objid::int8) from pg_locks where locktype = 'advisory' and classid = 7711"


@contextlib.asynccontextmanager
async def floor(database: str, url: str) -> AsyncIterator[Open]:
    """A cursor over decided ids and a fenced batch append, and nothing else."""
    link = await asyncpg.connect(database)
    client = redis.asyncio.Redis.from_url(url)
    append = client.register_script(APPEND)
    await client.delete("floor", "floor:meta")
    await link.execute(
        "create table floor_outbox (id bigserial primary key, aggregate text, payload text,"
        " created_at timestamptz default now());"
        " create table floor_cursor (position bigint); insert into floor_cursor values (0)"
    )
    position = 0

    async def load(many: int) -> None:
        await link.execute(
            "insert into floor_outbox (aggregate, payload)"
            f" select 'k' || n % {AGGREGATES}, $1 from generate_series(1, {many}) n",
            PAYLOAD,
        )

    async def drain(many: int) -> None:
        nonlocal position
        left = many
        while left > 0:
            last = await link.fetchval("select last_value from floor_outbox_id_seq")
            held = await link.fetchval(LOCKS)
            rows = await link.fetch(
                "select id, aggregate, payload from floor_outbox where id > $1 and id <= $2"
                " order by id limit 1000",
                position,
                last if held is None else min(last, held),
            )
            words: list[Any] = [1]
            for id, aggregate, payload in rows:
                words += (id, f'{{"subject":"{aggregate}","data":{payload}}}')
            await append(keys=["floor", "floor:meta"], args=words)
            position = rows[-1][0]
            await link.execute("update floor_cursor set position = $1", position)
            left -= len(rows)

    try:
        yield Open(load, drain)
    finally:
        await link.close()
        await client.aclose()


# --- us -----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def semel(database: str, url: str) -> AsyncIterator[Open]:
    from semel.brokers.redis import RedisBroker
    from semel.messages import SLOTS
    from semel.relay import Relay
    from semel.stores.sql import SQLStore, init

    init(database)
    link = await asyncpg.connect(database)
    store = SQLStore(database)
    # Nobody reads here: the stream is measured, not its back-pressure.
    broker = RedisBroker(url, maxlen=None)
    seq = 0

    async def load(many: int) -> None:
        nonlocal seq
        await link.execute(
            "insert into event_outbox (shard, tenant_id, topic, aggregate_type, aggregate_id, seq,"
            " event_id, event_type, payload, created_at)"
            f" select n % {SLOTS}, '', 'semel', 'order', 'k' || n % {AGGREGATES}, n,"
            " gen_random_uuid(), 'order.placed', $1, clock_timestamp()"
            f" from generate_series({seq + 1}, {seq + many}) n",
            PAYLOAD,
        )
        seq += many

    async def drain(many: int) -> None:
        relay = Relay(store, broker)
        running = asyncio.create_task(relay.run())
        while relay.counts["published"] < many:
            if running.done():
                await running
            await asyncio.sleep(0.002)
        relay.stop()
        await running

    try:
        yield Open(load, drain)
    finally:
        await link.close()
        await broker.aclose()
        await store.aclose()


# --- peers that publish to Redis ----------------------------------------------------------------


@contextlib.asynccontextmanager
async def txoutbox(database: str, url: str) -> AsyncIterator[Open]:
    from txoutbox import Relay, RelayConfig
    from txoutbox.adapters.postgres import PostgresStorage

    storage = await PostgresStorage.connect(
        database, strict_ordering=True, delete_on_ack=True, table="txoutbox"
    )
    await storage.create_schema()
    client = redis.asyncio.Redis.from_url(url)
    await client.delete("txoutbox")
    arrived = 0

    async def publish(message: Any) -> None:
        nonlocal arrived
        await client.xadd("txoutbox", {"k": message.key, "p": message.payload})
        arrived += 1

    async def load(many: int) -> None:
        await storage.pool.execute(
            "insert into txoutbox (topic, key, payload)"
            f" select 't', 'k' || n % {AGGREGATES}, convert_to($1, 'UTF8')"
            f" from generate_series(1, {many}) n",
            PAYLOAD,
        )

    async def drain(many: int) -> None:
        nonlocal arrived
        arrived = 0
        relay = Relay(storage, publish, config=RelayConfig(batch_size=50, concurrency=10))
        while arrived < many:
            await relay.run_once()

    try:
        yield Open(load, drain)
    finally:
        await client.aclose()
        await storage.pool.close()


@contextlib.asynccontextmanager
async def faststream_outbox(database: str, url: str) -> AsyncIterator[Open]:
    from faststream_outbox import OutboxBroker, make_outbox_table
    from sqlalchemy import MetaData
    from sqlalchemy.ext.asyncio import create_async_engine

    metadata = MetaData()
    table = make_outbox_table(metadata, table_name="fsoutbox")
    engine = create_async_engine(database.replace("postgresql:", "postgresql+asyncpg:"))
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    client = redis.asyncio.Redis.from_url(url)
    await client.delete("fsoutbox")
    arrived = 0
    broker = OutboxBroker(engine, outbox_table=table, logger=None)

    @broker.subscriber(
        "orders",
        max_workers=4,
        fetch_batch_size=500,
        min_fetch_interval=0.01,
        max_fetch_interval=0.05,
        terminal_flush_batch_size=100,
    )
    async def relay(_: dict[str, Any]) -> None:
        nonlocal arrived
        await client.xadd("fsoutbox", {"p": PAYLOAD})
        arrived += 1

    async def load(many: int) -> None:
        async with engine.begin() as connection:
            for start in range(0, many, 500):
                bodies = [{"x": "a" * 190}] * min(500, many - start)
                await broker.publish_batch(*bodies, queue="orders", session=connection)

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
        await engine.dispose()


# --- queues, whose handler does nothing ---------------------------------------------------------


@contextlib.asynccontextmanager
async def pgqueuer(database: str, _url: str) -> AsyncIterator[Open]:
    from pgqueuer import PgQueuer
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.queries import Queries

    link = await asyncpg.connect(database)
    driver = AsyncpgDriver(link)
    queries = Queries(driver)
    await queries.install()
    arrived = 0

    async def load(many: int) -> None:
        await queries.enqueue(["order"] * many, [PAYLOAD.encode()] * many, [0] * many)

    async def count() -> int:
        return arrived

    async def drain(many: int) -> None:
        nonlocal arrived
        arrived = 0
        queue = PgQueuer(driver)

        @queue.entrypoint("order")
        async def order(_: Any) -> None:
            nonlocal arrived
            arrived += 1

        running = asyncio.create_task(queue.run(batch_size=100))
        await until(count, many)
        queue.shutdown.set()
        await running

    try:
        yield Open(load, drain)
    finally:
        await link.close()


@contextlib.asynccontextmanager
async def procrastinate(database: str, _url: str) -> AsyncIterator[Open]:
    from procrastinate import App, PsycopgConnector

    logging.getLogger("procrastinate").setLevel(logging.WARNING)
    app = App(connector=PsycopgConnector(conninfo=database))
    arrived = 0

    @app.task(name="order")
    async def order(data: str) -> None:  # noqa: ARG001 - called by this name
        nonlocal arrived
        arrived += 1

    async def load(many: int) -> None:
        await order.batch_defer_async(*[{"data": PAYLOAD}] * many)

    async def drain(many: int) -> None:
        nonlocal arrived
        arrived = 0
        await app.run_worker_async(concurrency=10, wait=False, install_signal_handlers=False)
        if arrived < many:
            raise RuntimeError(f"{arrived} of {many} were run")

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        yield Open(load, drain)


ENTRANTS = (
    Entrant("cursor, fenced append", "floor", floor, "the bare commands, without retries or order"),
    Entrant("semel", "us", semel, "ordered, fenced, healed, CloudEvents"),
    Entrant("txoutbox, strict", "peer", txoutbox, "ordered by key", 0.15),
    Entrant("faststream-outbox", "peer", faststream_outbox, "tuned; no order", 0.15),
    Entrant("pgqueuer", "queue", pgqueuer, "publishes nowhere; no order", 0.3),
    Entrant("procrastinate", "queue", procrastinate, "publishes nowhere", 0.02),
)
