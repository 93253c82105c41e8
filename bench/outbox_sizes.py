"""Do the table and the stream stay bounded? Events flow, are read, and are swept, at full speed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import asyncpg
import redis.asyncio

from bench.outbox_relays import PAYLOAD

LOOKS = 10
CHUNK = 2_000
AHEAD = 20_000
KEEP_S = 2.0


@dataclass(frozen=True)
class Look:
    """What there was at one moment."""

    published: int
    rows: int
    table_mib: float
    entries: int
    redis_mib: float


async def run(database: str, url: str, *, many: int) -> list[Look]:
    from semel.brokers.redis import RedisBroker
    from semel.relay import Relay
    from semel.stores.sql import SQLStore, init

    init(database)
    link = await asyncpg.connect(database)
    client = redis.asyncio.Redis.from_url(url)
    broker, store = RedisBroker(url), SQLStore(database)
    await broker.join("kept", "g")
    relay = Relay(store, broker, keep_s=KEEP_S)
    tasks = [asyncio.create_task(relay.run()), asyncio.create_task(_read(client))]
    looks: list[Look] = []
    made = 0
    while relay.counts["published"] < many:
        for task in tasks:
            if task.done():
                await task
        if made < many and made - relay.counts["published"] < AHEAD:
            await _put(link, made, CHUNK)
            made += CHUNK
        else:
            await asyncio.sleep(0.005)
        if relay.counts["published"] >= many * (len(looks) + 1) / LOOKS:
            looks.append(await _look(link, client, relay.counts["published"]))
    if len(looks) < LOOKS:
        looks.append(await _look(link, client, relay.counts["published"]))
    relay.stop()
    await tasks[0]
    tasks[1].cancel()
    await broker.aclose()
    await store.aclose()
    await link.close()
    await client.aclose()
    return looks


async def _put(link: asyncpg.Connection, made: int, many: int) -> None:
    """Behind a lock, as `Outbox.add` does: relays do not pass what is not committed yet."""
    from semel.stores.sql.outbox_watermark import ID_SEQUENCE, LOCKED

    async with link.transaction():
        await link.execute(f"select {LOCKED} from {ID_SEQUENCE} as s")
        await _insert(link, made, many)


async def _insert(link: asyncpg.Connection, made: int, many: int) -> None:
    await link.execute(
        "insert into event_outbox (shard, tenant_id, topic, aggregate_type, aggregate_id, seq,"
        " event_id, event_type, payload, created_at)"
        " select n % 256, '', 'kept', 'order', 'k' || n % 500, n, gen_random_uuid(),"
        f" 'order.placed', $1, clock_timestamp() from generate_series({made + 1}, {made + many}) n",
        PAYLOAD,
    )


async def _read(client: redis.asyncio.Redis) -> None:
    while True:
        found = await client.xreadgroup("g", "c", {"kept": ">"}, count=1000, block=100)
        for _, entries in found:
            await client.xack("kept", "g", *[id for id, _ in entries])


async def _look(link: asyncpg.Connection, client: redis.asyncio.Redis, published: int) -> Look:
    mib = 1 << 20
    return Look(
        published,
        await link.fetchval("select count(*) from event_outbox"),
        await link.fetchval("select pg_total_relation_size('event_outbox')") / mib,
        await client.xlen("kept"),
        (await client.info("memory"))["used_memory"] / mib,
    )
