import asyncio
from datetime import UTC, datetime
from uuid import uuid4

from celery import Celery
from celery.contrib.testing.worker import start_worker

import semel
from semel.brokers import MemoryBroker
from semel.inbox import MemoryInbox
from semel.messages import Batch, Message, Tail
from semel.worker import Worker

semel.configure(store="sqlite:///celery-semel.db")

app = Celery("shop", broker="memory://", backend="cache+memory://")
bank = []  # one line per effect


@app.task
@semel.idempotent(key="charge-of:{order}")
def charge(order, total):
    bank.append((order, total))


# --- the worker: here in memory; yours has a broker's URL and an SQLInbox
broker = MemoryBroker()
worker = Worker(broker, "shop", MemoryInbox(), "sqlite:///celery-semel.db")


@worker.on("order.placed", topic="orders", outside=True)
def placed(message):
    charge.apply_async((message.aggregate_id, message.data["total"]), task_id=message.id)


# --- the same event twice, as after a crash of the relay: one charge
async def main():
    order, running = str(uuid4()), asyncio.create_task(worker.run())
    for position in (1, 2):
        placed = Message(
            position,
            f"{order}-placed",
            "order.placed",
            "orders",
            "",
            "order",
            order,
            1,
            '{"total": 40}',
            datetime.now(UTC),
        )
        before = await broker.tail("orders", 0) or Tail()
        await broker.publish(Batch("orders", 0, 1, before, [placed]))
    async with asyncio.timeout(30):
        while not bank or worker.status().topics["orders"].seen == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert bank == [(order, 40)]
    worker.stop()
    await running


if __name__ == "__main__":
    with start_worker(app, perform_ping_check=False):
        asyncio.run(main())
