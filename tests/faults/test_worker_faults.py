"""Workers as processes that are killed, frozen and cut off: effects once, in order."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from semel.brokers.redis import RedisBroker
from semel.inbox import Retry, SQLInbox
from semel.keys import identity
from semel.messages import Batch, Message, Tail, Taken, shard_of
from semel.stores.redis import RedisStore
from semel.stores.redis.inbox import RedisInbox
from semel.stores.sql import schema
from semel.stores.sql.lines import parse, with_driver
from semel.worker import Worker
from support.nursery import Nursery
from support.process import wait_until
from support.worker_process import EFFECTS, GROUP, TOPIC

TESTS = Path(__file__).parents[1]
SHARDS = 2
CASES = 6
LEASE_S = 1.0


class Workers(Nursery):
    """Forks workers, and hears where they are trapped."""

    def go(self, **asked: Any) -> int:
        return self.start(**({"shards": SHARDS, "batch": 5, "lease_s": LEASE_S} | asked))

    def trapped(self, pid: int, within_s: float = 30.0) -> Any:
        return self.heard("trap", pid=pid, within_s=within_s)["trap"]


@pytest.fixture(scope="module")
def forks() -> Iterator[Workers]:
    made = Workers("support.worker_process")
    yield made
    made.close()


@pytest.fixture
def nursery(forks: Workers) -> Iterator[Workers]:
    yield forks
    forks.end_all()


class Source:
    """Publishes as a relay does: each case's messages numbered without gaps."""

    def __init__(self, url: str) -> None:
        self.broker = RedisBroker(url, shards=SHARDS, groups={TOPIC: [GROUP]})
        self._tails = [Tail() for _ in range(SHARDS)]
        self.numbers = [0] * CASES

    async def publish(self, rounds: int) -> None:
        for _ in range(rounds):
            for case in range(CASES):
                self.numbers[case] += 1
                await self._publish(str(case), self.numbers[case])

    async def _publish(self, case: str, seq: int) -> None:
        slot = identity("", TOPIC.encode(), b"case", case.encode())[0]
        shard = shard_of(slot, SHARDS)
        tail = self._tails[shard]
        message = Message(
            position=tail.position + 1,
            id=f"{case}-{seq}",
            type="case.changed",
            topic=TOPIC,
            tenant="",
            aggregate_type="case",
            aggregate_id=case,
            seq=seq,
            payload="{}",
            time=datetime.now(UTC),
        )
        assert await self.broker.publish(Batch(TOPIC, shard, 1, tail, [message])) == Taken(1)
        self._tails[shard] = Tail(message.position, message.id)

    async def unfinished(self) -> int:
        found = [await self.broker.backlog(TOPIC, shard) for shard in range(SHARDS)]
        groups = [group for log in found for group in log.groups]
        return sum(group.pending + (group.unread or 0) for group in groups)


class Effects:
    """What the workers have done, in PostgreSQL."""

    def __init__(self, url: str) -> None:
        schema.init(url)
        self._engine = sa.create_engine(with_driver(parse(url), "sync"), pool_pre_ping=True)
        with self._engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE effect (id serial PRIMARY KEY, said text)"))

    def all(self) -> list[str]:
        with self._engine.connect() as connection:
            return list(
                connection.execute(sa.text("SELECT said FROM effect ORDER BY id")).scalars()
            )

    def count(self) -> int:
        return len(self.all())

    def close(self) -> None:
        self._engine.dispose()


@pytest.fixture
def effects(postgres_url: str) -> Iterator[Effects]:
    made = Effects(postgres_url)
    yield made
    made.close()


@pytest.fixture
async def source(redis_url: str) -> Any:
    made = Source(redis_url)
    yield made
    await made.broker.aclose()


def in_order(found: list[str], upto: list[int]) -> None:
    """Each case's numbers, once each, one behind the other."""
    for case, last in enumerate(upto):
        mine = [int(said.partition(":")[2]) for said in found if said.startswith(f"{case}:")]
        assert mine == list(range(1, last + 1)), f"case {case}"


async def finished(source: Source, within_s: float = 40.0) -> None:
    deadline = time.monotonic() + within_s
    while await source.unfinished():
        assert time.monotonic() < deadline, "something is left over"
        await asyncio.sleep(0.05)


# --- killed and frozen between any two lines ----------------------------------------------------


@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize("point", ["read", "handler", "applied", "acked"])
async def test_whatever_a_worker_was_at_when_it_vanished_the_next_one_goes_on_from_there(
    nursery, source, effects, redis_url, postgres_url, point, action
):
    await source.publish(5)
    where = {"broker": redis_url, "database": postgres_url}
    first = nursery.go(**where, at=point, action=action)
    assert nursery.trapped(first) == point
    second = nursery.go(**where)
    await asyncio.to_thread(wait_until, lambda: effects.count() == 30, "all effects")
    if action == "stop":
        nursery.signal(first, signal.SIGCONT)
        await source.publish(2)
        await asyncio.to_thread(wait_until, lambda: effects.count() == 42, "all effects")
    await finished(source)
    nursery.signal(second, signal.SIGTERM)
    in_order(effects.all(), source.numbers)


async def test_killed_again_and_again_every_effect_happens_once(
    nursery, source, effects, redis_url, postgres_url
):
    where = {"broker": redis_url, "database": postgres_url, "lease_s": 0.7}
    await source.publish(30)
    for point in ("handler", "applied", "read", "acked", "applied"):
        assert nursery.trapped(nursery.go(**where, at=point)) == point
    nursery.go(**where)
    await asyncio.to_thread(wait_until, lambda: effects.count() >= 180, "all effects")
    await finished(source)
    in_order(effects.all(), source.numbers)


async def test_a_message_that_kills_its_worker_is_found_out_and_stops_its_own_case_only(
    nursery, source, effects, redis_url, postgres_url
):
    where = {"broker": redis_url, "database": postgres_url, "lease_s": 0.7}
    await source.publish(4)
    inbox = SQLInbox(postgres_url)
    killed = 0
    pid = nursery.go(**where, at="always-3-2")
    while not [each for each in await inbox.sequences() if each.head.why == "crash"]:
        with contextlib.suppress(queue.Empty):
            assert nursery.trapped(pid, within_s=0.2) == "always-3-2"
            killed += 1
            pid = nursery.go(**where, at="always-3-2")
    await asyncio.to_thread(wait_until, lambda: effects.count() == 21, "all other effects")
    (parked,) = await inbox.sequences()
    await inbox.aclose()
    assert (parked.head.message.id, parked.head.state, parked.behind) == ("3-2", "parked", 2)
    assert 3 <= killed <= 5, "three times alone, and before that with others"
    in_order(effects.all(), [4, 4, 4, 1, 4, 4])


async def test_without_a_transaction_a_killed_effect_is_repeated_and_none_is_lost(
    nursery, source, redis_url
):
    client = redis.Redis.from_url(redis_url, decode_responses=True, socket_timeout=5)
    await source.publish(10)
    where = {"broker": redis_url, "lease_s": 0.7}
    for point in ("handler", "applied", "handler"):
        assert nursery.trapped(nursery.go(**where, at=point)) == point
    nursery.go(**where)
    await finished(source)
    found = client.lrange(EFFECTS, 0, -1)
    client.close()
    in_order(list(dict.fromkeys(found)), source.numbers)
    assert len(found) == 60 + 2, "each effect that was not remembered, once more"


# --- servers that do not answer -----------------------------------------------------------------


@contextlib.asynccontextmanager
async def a_worker(source: Source, url: str, inbox: Any, **settings: Any) -> Any:
    broker = RedisBroker(url, shards=SHARDS, timeout_s=0.5)
    store = RedisStore(url, timeout_s=0.5)
    worker = Worker(broker, GROUP, inbox, store, batch=5, lease_s=2.0, **settings)

    @worker.on(topic=TOPIC)
    async def handle(message: Any, session: Any) -> None:
        said = f"{message.aggregate_id}:{message.seq}"
        await session.execute(sa.text("INSERT INTO effect (said) VALUES (:said)"), {"said": said})

    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await task
        await inbox.aclose()
        await broker.aclose()
        await store.aclose()


async def until(condition: Any, what: str, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


async def test_a_frozen_redis_holds_everything_up_and_nothing_against_anybody(
    source, effects, redis_server, redis_url, postgres_url, caplog
):
    inbox = SQLInbox(postgres_url, retry=Retry(first_s=0.1))
    async with a_worker(source, redis_url, inbox) as worker:
        await source.publish(3)
        await until(lambda: effects.count() == 18, "the first effects")
        with redis_server.paused():
            await until(lambda: worker.status().outage, "it to notice")
            await asyncio.sleep(3)  # longer than the lease
        await source.publish(3)
        await until(lambda: effects.count() == 36, "all effects")
        await until(lambda: worker.status().ready, "it to be ready")
        assert worker.status().topics[TOPIC].held == 0
        assert list(await inbox.sequences()) == []
    in_order(effects.all(), source.numbers)
    assert await source.unfinished() == 0


async def test_a_crashed_postgres_holds_everything_up_and_nothing_against_anybody(
    source, effects, redis_url, postgres_server, postgres_url
):
    inbox = SQLInbox(postgres_url, retry=Retry(first_s=0.1))
    async with a_worker(source, redis_url, inbox) as worker:
        await source.publish(3)
        await until(lambda: effects.count() == 18, "the first effects")
        postgres_server.kill()
        await source.publish(3)
        await until(lambda: worker.status().outage, "it to notice")
        await asyncio.to_thread(postgres_server.start)
        await until(lambda: effects.count() == 36, "all effects")
        await until(lambda: worker.status().ready, "it to be ready")
        assert worker.status().topics[TOPIC].held == 0
        assert list(await inbox.sequences()) == []
    in_order(effects.all(), source.numbers)


async def test_an_inbox_on_a_frozen_redis_counts_no_attempt(source, redis_server, redis_url):
    inbox = RedisInbox(redis_url, lease_s=1.0, timeout_s=0.5)
    broker = RedisBroker(redis_url, shards=SHARDS, timeout_s=0.5)
    worker = Worker(broker, GROUP, inbox, batch=5, lease_s=3.0)
    found: list[str] = []

    @worker.on(topic=TOPIC)
    async def handle(message: Any) -> None:
        found.append(f"{message.aggregate_id}:{message.seq}")
        await asyncio.sleep(0.005)

    await source.publish(10)
    task = asyncio.create_task(worker.run())
    await until(lambda: len(found) > 10, "the first effects")
    with redis_server.paused():
        await until(lambda: worker.status().outage, "it to notice")
        await asyncio.sleep(2)
    await finished(source)
    assert list(await inbox.sequences()) == []
    worker.stop()
    await task
    await inbox.aclose()
    await broker.aclose()
    in_order(list(dict.fromkeys(found)), source.numbers)
