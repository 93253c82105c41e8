"""How long an event takes from its COMMIT to the stream, at a steady rate.

Producers and relay are processes of their own: what is measured is what a reader of the stream,
woken by Redis itself, sees. An event carries the moment just before its COMMIT, so the time found
holds the COMMIT itself too.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from typing import Any

import redis.asyncio

RATE = 500
CLIENTS = 2


def _produce(url: str, each_s: float, pipe: Any) -> None:
    import sqlalchemy as sa
    from sqlalchemy.orm import Session

    from semel.outbox import Event, Outbox
    from semel.stores.sql.lines import parse, with_driver

    outbox = Outbox()
    session = Session(sa.create_engine(with_driver(parse(url), "sync")))
    session.execute(sa.text("SELECT 1"))
    session.commit()
    pipe.send("ready")
    seconds = pipe.recv()
    begin = time.perf_counter()
    for n in range(int(seconds / each_s)):
        if (wait_s := begin + n * each_s - time.perf_counter()) > 0:
            time.sleep(wait_s)
        event = Event(
            type="order.placed",
            aggregate_type="order",
            aggregate_id=n % 500,
            payload={"sent_ns": time.time_ns(), "note": "a" * 170},
            topic="way",
        )
        outbox.add(session, event)
        session.commit()
    pipe.send("done")


def _relay(database: str, url: str, pipe: Any) -> None:
    from semel.brokers.redis import RedisBroker
    from semel.relay import Relay

    async def main() -> None:
        broker = RedisBroker(url, maxlen=None)
        relay = Relay(database, broker)
        running = asyncio.create_task(relay.run())
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        relay.stop()
        await running
        await broker.aclose()

    asyncio.run(main())


async def run(database: str, url: str, *, seconds: float) -> list[float]:
    """The time of every event, in seconds."""
    from semel.stores.sql import init

    init(database)
    spawn = multiprocessing.get_context("spawn")
    started = []
    for work, args in [(_relay, (database, url))] + [
        (_produce, (database, CLIENTS / RATE)) for _ in range(CLIENTS)
    ]:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=work, args=(*args, theirs), daemon=True)
        process.start()
        ours.recv()
        started.append((ours, process))
    await asyncio.sleep(1.0)  # the relay takes its shards
    relay, *producers = started
    reading = asyncio.create_task(_read(url))
    for pipe, _ in producers:
        pipe.send(seconds)
    for pipe, _ in producers:
        await asyncio.to_thread(pipe.recv)
    await asyncio.sleep(1.0)
    reading.cancel()
    relay[0].send(None)
    for _, process in started:
        await asyncio.to_thread(process.join, 20)
    return _times


_times: list[float] = []


async def _read(url: str) -> None:
    _times.clear()
    client = redis.asyncio.Redis.from_url(url)
    last = "0-0"
    while True:
        for _, entries in await client.xread({"way": last}, count=100, block=1000):
            now = time.time_ns()
            for id, fields in entries:
                sent = json.loads(fields[b"event"])["data"]["sent_ns"]
                _times.append((now - sent) / 1e9)
                last = id
