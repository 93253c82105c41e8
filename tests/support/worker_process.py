"""Workers that are killed or frozen at a named point.

    Nursery("support.worker_process").start(broker=..., at=...)

Points: `read` (messages were handed out), `handler` (the effect is sent), `applied` (effect and
mark are there, nothing is acknowledged), `acked`. Or `always-<id>`: whenever that message is
handled.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import redis
import sqlalchemy as sa

from semel.brokers.redis import RedisBroker
from semel.inbox import RedisInbox, Retry, SQLInbox
from semel.stores.redis import RedisStore
from semel.worker import Worker
from support.nursery import say, serve

TOPIC = "axiom:events"
GROUP = "vision"
EFFECTS = "effects"
INSERT = sa.text("INSERT INTO effect (said) VALUES (:said)")


class Trap:
    def __init__(self, asked: dict[str, Any]) -> None:
        self.point, self._action = asked.get("at", ""), asked.get("action", "kill")

    def at(self, point: str) -> None:
        if point != self.point:
            return
        if not point.startswith("always"):
            self.point = ""
        say(trap=point)
        if self._action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        # To this very thread: sent to the process, another one might take it, a little later.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


class Consumer:
    """Somebody's consumer, with traps behind its verbs."""

    def __init__(self, inner: Any, trap: Trap) -> None:
        self._inner, self._trap = inner, trap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def read(self, limit: int, *, wait_s: float = 0.0) -> Any:
        found = await self._inner.read(limit, wait_s=wait_s)
        if found:
            self._trap.at("read")
        return found

    async def ack(self, deliveries: Any) -> None:
        self._trap.at("applied")
        await self._inner.ack(deliveries)
        self._trap.at("acked")


class Broker:
    def __init__(self, inner: RedisBroker, trap: Trap) -> None:
        self._inner, self._trap = inner, trap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def consumer(self, *args: Any, **settings: Any) -> Consumer:
        return Consumer(await self._inner.consumer(*args, **settings), self._trap)


async def work(asked: dict[str, Any]) -> None:
    trap = Trap(asked)
    broker = Broker(RedisBroker(asked["broker"], shards=asked["shards"]), trap)
    retry = Retry(first_s=0.1)
    inbox: Any
    if "database" in asked:
        # A frozen worker's open transaction holds its marks until the server ends it.
        inbox = SQLInbox(asked["database"], retry=retry, idle_s=2.0)
    else:
        inbox = RedisInbox(asked["broker"], retry=retry, lease_s=asked["lease_s"])
    store = RedisStore(asked["broker"])
    worker = Worker(broker, GROUP, inbox, store, batch=asked["batch"], lease_s=asked["lease_s"])
    client = redis.Redis.from_url(asked["broker"], socket_timeout=5)

    @worker.on(topic=TOPIC)
    async def handle(message: Any, session: Any) -> None:
        said = f"{message.aggregate_id}:{message.seq}"
        if session is None:
            client.rpush(EFFECTS, said)
        else:
            await session.execute(
                sa.text("INSERT INTO effect (said) VALUES (:said)"), {"said": said}
            )
        trap.at("handler")
        trap.at(f"always-{message.id}")

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run()


if __name__ == "__main__":
    serve(lambda asked: asyncio.run(work(asked)))
