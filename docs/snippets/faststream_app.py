import asyncio
import os
from contextlib import suppress

import sqlalchemy as sa
from faststream.redis import RedisBroker, StreamSub, TestRedisBroker
from sqlalchemy.ext.asyncio import create_async_engine

from semel.cloudevents import from_json, to_json
from semel.inbox import SQLInbox
from semel.messages import Message
from semel.stores.sql import init

init("sqlite+pysqlite:///faststream-semel.db")
engine = create_async_engine("sqlite+aiosqlite:///faststream-semel.db")
inbox = SQLInbox(engine)
GROUP = "billing"


# --- the effect, in the inbox' own transaction
async def invoice(message, session):
    await session.execute(
        sa.text("INSERT INTO invoices VALUES (:id, :total)"),
        {"id": message.aggregate_id, "total": message.data["total"]},
    )


# --- where messages come in
broker = RedisBroker(os.environ.get("REDIS_URL", "redis://localhost:6379"), logger=None)


@broker.subscriber(stream=StreamSub("orders", group=GROUP, consumer="billing-1", max_records=100))
async def receive(body: dict):
    await inbox.apply(GROUP, [from_json(body["event"])], invoice)


# --- what failed, and what waited behind it
async def try_again():
    while True:
        await inbox.retry(GROUP, (0, 255), invoice)
        await asyncio.sleep(1)


# --- the same message three times: one invoice
async def main():
    async with engine.begin() as connection:
        await connection.execute(
            sa.text("CREATE TABLE IF NOT EXISTS invoices (id TEXT, total INT)")
        )
        await connection.execute(sa.text("DELETE FROM invoices"))
    again = asyncio.create_task(try_again())
    message = next_message()
    async with TestRedisBroker(broker) as redis:
        for _ in range(3):
            await redis.publish({"event": to_json(message)}, stream="orders")
    async with engine.connect() as connection:
        assert await connection.scalar(sa.text("SELECT count(*) FROM invoices")) == 1
    again.cancel()
    with suppress(asyncio.CancelledError):
        await again
    await engine.dispose()


def next_message():
    from datetime import UTC, datetime
    from uuid import uuid4

    order = str(uuid4())
    return Message(
        position=1,
        id=str(uuid4()),
        type="order.placed",
        topic="orders",
        tenant="",
        aggregate_type="order",
        aggregate_id=order,
        seq=1,
        payload='{"total": 40}',
        time=datetime.now(UTC),
    )


if __name__ == "__main__":
    asyncio.run(main())
