"""A worker: each message has its effect once, in order, whoever is slow, fails or is gone.

Time-dependent behaviour runs on a simulated loop, where ten minutes take none.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from semel.brokers.memory import MemoryBroker
from semel.colour import ASYNC
from semel.errors import BrokerUnavailableError, SettingsError, StoreUnavailableError
from semel.guard import current
from semel.inbox import MemoryInbox, PoisonError, Retry, SQLInbox
from semel.keys import identity
from semel.messages import Batch, Delivery, Held, Message, Tail, Taken, shard_of
from semel.stores.memory import MemoryStore
from semel.stores.sql import init
from semel.stores.sql.lines import parse, with_driver
from semel.testing.simulator import Host, SimClock, SimLoop
from semel.worker import TopicStatus, Worker

TOPIC = "axiom:events"
FAST = {"first_s": 0.1, "most_s": 1.0}


def message(
    number: int,
    *,
    case: str = "1",
    kind: str = "case.created",
    topic: str = TOPIC,
    seq: bool = True,
) -> Message:
    return Message(
        position=0,
        id=f"{topic}-{case}-{number}",
        type=kind,
        topic=topic,
        tenant="",
        aggregate_type="case",
        aggregate_id=case,
        seq=number if seq else None,
        payload=f'{{"case":"{case}","number":{number}}}',
        time=datetime.now(UTC),
        source="/axiom",
    )


class World:
    """A broker, a store and an inbox, and who publishes what."""

    def __init__(self, loop: SimLoop | None = None, *, shards: int = 1, retry: Retry | None = None):
        self.real_broker = MemoryBroker(shards=shards)
        self.broker: Any = self.real_broker
        self.store = MemoryStore(clock=None if loop is None else SimClock(loop))
        self.real_inbox = MemoryInbox(retry=retry or Retry(**FAST, jitter=0.0))
        self.inbox: Any = self.real_inbox

    def worker(self, **settings: Any) -> Worker:
        return Worker(self.broker, "vision", self.inbox, self.store, **settings)

    def recording(self, **settings: Any) -> Worker:
        """A worker whose handler writes down what it handled, in its session."""
        worker = self.worker(**settings)

        @worker.on(topic=TOPIC)
        async def handle(message: Message, session: list[Any]) -> None:
            await asyncio.sleep(0.02)  # long enough for somebody to die or freeze meanwhile
            session.append((message.aggregate_id, message.seq))

        return worker

    @property
    def effects(self) -> list[Any]:
        return self.real_inbox.effects

    async def publish(self, *messages: Message) -> None:
        for each in messages:
            parts = (each.topic, each.aggregate_type, each.aggregate_id)
            slot = identity(each.tenant, *(part.encode() for part in parts))[0]
            shard = shard_of(slot, self.broker.shards)
            tail = await self.real_broker.tail(each.topic, shard)
            placed = replace(each, position=tail.position + 1)
            batch = Batch(each.topic, shard, 1, tail, [placed])
            assert await self.real_broker.publish(batch) == Taken(1)

    async def pending(self, topic: str = TOPIC) -> int:
        found = [await self.real_broker.backlog(topic, s) for s in range(self.broker.shards)]
        return sum(group.pending + (group.unread or 0) for log in found for group in log.groups)


async def until(condition: Callable[[], Any], within_s: float = 30.0) -> None:
    deadline = ASYNC.now() + within_s
    while not condition():
        assert ASYNC.now() < deadline, "it did not come about"
        await asyncio.sleep(0.01)


async def running(worker: Worker, body: Callable[[], Awaitable[None]]) -> None:
    task = asyncio.ensure_future(worker.run())
    try:
        await body()
    finally:
        worker.stop()
        await task


def simulate(main: Callable[[SimLoop], Any], seed: int = 1) -> Any:
    loop = SimLoop(seed, budget=400_000)
    return loop.run(main(loop))


# --- handlers -----------------------------------------------------------------------------------


async def test_a_message_goes_to_the_handler_of_its_type_and_topic_and_others_do_nothing():
    world = World()
    worker = world.worker()
    calls: list[tuple[str, str]] = []

    @worker.on("case.created", "case.closed", topic=TOPIC)
    async def two(message):
        calls.append(("two", message.type))

    @worker.on(topic=["axiom:watches", "axiom:workers"])
    async def rest(message):
        calls.append(("rest", message.topic))

    await world.publish(
        message(1),
        message(2, kind="case.renamed"),
        message(3, kind="case.closed"),
        message(1, topic="axiom:watches"),
        message(1, topic="axiom:workers", kind="whatever"),
    )

    async def body():
        await until(lambda: len(calls) == 4)

    await running(worker, body)
    assert [call for call in calls if call[0] == "two"] == [
        ("two", "case.created"),
        ("two", "case.closed"),
    ]
    assert {call[1] for call in calls if call[0] == "rest"} == {"axiom:watches", "axiom:workers"}
    assert await world.pending() == 0
    assert worker.status().topics[TOPIC] == TopicStatus(applied=3)


async def test_a_handler_that_is_not_async_runs_in_a_thread_and_may_take_the_session():
    world = World()
    worker = world.worker()
    threads: set[str] = set()

    @worker.on("case.created", topic=TOPIC)
    def created(message, session):
        threads.add(threading.current_thread().name)
        session.append(message.seq)

    @worker.on("case.closed", topic=TOPIC)
    def closed(message):
        threads.add(threading.current_thread().name)

    await world.publish(message(1), message(2, kind="case.closed"), message(3))

    async def body():
        await until(lambda: world.effects == [1, 3])

    await running(worker, body)
    assert threading.main_thread().name not in threads


async def test_without_a_session_a_sync_handler_leaves_the_loop_for_a_thread():
    worker = World().worker()
    names: list[str] = []

    @worker.on("case.created", topic=TOPIC)
    def created(message, session):
        names.append(threading.current_thread().name)
        assert session is None

    @worker.on("case.closed", topic=TOPIC)
    def closed(message):
        raise StopIteration

    await worker.handlers(message(1), None)  # type: ignore[misc]
    assert names[0] != threading.main_thread().name
    with pytest.raises(RuntimeError, match="StopIteration"):
        await worker.handlers(message(1, kind="case.closed"), None)  # type: ignore[misc]


async def test_a_thread_that_is_cut_off_is_waited_for():
    worker = World().worker()
    inside, go_on = threading.Event(), threading.Event()

    @worker.on(topic=TOPIC)
    def slow(message):
        inside.set()
        go_on.wait(10)

    task = asyncio.ensure_future(worker.handlers(message(1), None))  # type: ignore[arg-type]
    await until(inside.is_set)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done(), "nobody else may begin before it has ended"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "fn",
    [
        lambda: None,
        lambda message, session, third: None,
        lambda *, message: None,
        lambda message, *, needed: None,
        "not a function",
    ],
)
def test_what_cannot_be_called_with_a_message_is_no_handler(fn):
    with pytest.raises(SettingsError, match="handler"):
        World().worker().on(topic=TOPIC)(fn)


async def test_a_second_parameter_with_a_default_is_left_alone_unless_it_is_the_session():
    worker = World().worker()
    seen: list[Any] = []

    @worker.on("a", topic=TOPIC)
    async def one(message, tries=3):
        seen.append(tries)

    @worker.on("b", topic=TOPIC)
    async def two(message, session=None):
        seen.append(session)

    await worker.handlers(message(1, kind="a"), "session")  # type: ignore[misc]
    await worker.handlers(message(1, kind="b"), "session")  # type: ignore[misc]
    assert seen == [3, "session"]


def test_two_handlers_for_one_message_are_refused():
    worker = World().worker()
    worker.on("case.created", topic=TOPIC)(lambda message: None)
    worker.on(topic=TOPIC)(lambda message: None)
    with pytest.raises(SettingsError, match="of topic 'axiom:events' has a handler"):
        worker.on("case.created", topic=TOPIC)(lambda message: None)
    with pytest.raises(SettingsError, match="every other type of topic"):
        worker.on(topic=TOPIC)(lambda message: None)


class Storeless(MemoryInbox):
    store = None  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


async def test_settings_that_cannot_work_are_refused():
    world = World()
    with pytest.raises(SettingsError, match="Storeless brings none: give store="):
        Worker(world.broker, "vision", Storeless())  # type: ignore[arg-type]
    for wrong in ({"batch": 0}, {"begin": "newest"}, {"lease_s": 0}, {"grace_s": float("inf")}):
        with pytest.raises(SettingsError):
            world.worker(**wrong)
    with pytest.raises(SettingsError, match="no name"):
        Worker(world.broker, "", world.inbox, world.store)
    with pytest.raises(SettingsError, match="has no handler"):
        await world.worker().run()
    with pytest.raises(SettingsError, match="is no topic"):
        world.worker().on(topic=[])
    with pytest.raises(SettingsError, match="copied there again"):
        world.worker(dead_letter="axiom:dead").on(topic="axiom:dead")
    with pytest.raises(SettingsError, match="outside=True"):
        world.worker().on(topic=TOPIC, on_crash="hold")(lambda message: None)

    worker = world.recording()

    async def body():
        await until(lambda: worker.status().owned)
        with pytest.raises(SettingsError, match="running already"):
            await worker.run()
        with pytest.raises(SettingsError, match="running already"):
            worker.on(topic="other")

    await running(worker, body)


# --- what it is made of -------------------------------------------------------------------------


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_handler_whose_session_the_inbox_cannot_make_is_refused_at_once(tmp_path, colour):
    url = f"{tmp_path}/shop.db"
    engine: Any = sa.create_engine(f"sqlite:///{url}")
    if colour == "sync":
        engine = create_async_engine(f"sqlite+aiosqlite:///{url}")
    worker = Worker(MemoryBroker(), "vision", SQLInbox(engine))

    def sync(message, session): ...
    def sync_alone(message): ...
    async def asynchronous(message, session): ...
    async def asynchronous_alone(message): ...

    wrong, right, other = (
        (sync, asynchronous, sync_alone)
        if colour == "sync"
        else (asynchronous, sync, asynchronous_alone)
    )
    with pytest.raises(SettingsError, match=f"{wrong.__name__} .*open it by URL"):
        worker.on("case.created", topic=TOPIC)(wrong)
    worker.on("case.created", topic=TOPIC)(right)
    worker.on("case.closed", topic=TOPIC)(other)


async def test_over_an_engine_for_sync_code_the_leases_have_connections_of_their_own(
    postgres_tables_url,
):
    engine = sa.create_engine(with_driver(parse(postgres_tables_url), "sync"))
    world = World()
    inbox = SQLInbox(engine)
    worker = Worker(world.broker, "vision", inbox)
    seen: list[Any] = []

    @worker.on(topic=TOPIC)
    def handle(message, session):
        seen.append(session.scalar(sa.text("SELECT 7")))

    await world.publish(message(1))

    async def body():
        await until(lambda: worker.status().topics[TOPIC].applied == 1)

    await running(worker, body)
    assert seen == [7]
    await inbox.aclose()
    engine.dispose()


async def test_broker_and_inbox_may_be_urls_and_are_closed_with_the_run(tmp_path):
    place = f"sqlite:///{tmp_path}"
    init(sa.create_engine(f"{place}/shop.db"))
    worker = Worker(f"{place}/broker.db?shards=2", "vision", f"{place}/shop.db")
    seen: list[Any] = []

    @worker.on(topic=TOPIC)
    async def handle(message, session):
        seen.append((await session.execute(sa.text("SELECT 7"))).scalar())

    tail = await worker.broker.tail(TOPIC, 0)
    await worker.broker.publish(
        Batch(TOPIC, 0, 1, tail or Tail(), [replace(message(1), position=1)])
    )

    async def body():
        await until(lambda: worker.status().topics[TOPIC].applied == 1)

    await running(worker, body)
    assert (seen, worker.broker.shards) == ([7], 2)


@pytest.mark.parametrize(
    ("broker", "inbox", "says"),
    [
        (object(), MemoryInbox(), r"a broker or its URL, not a object: connect\("),
        ("postgresql://u:secret@h/db", MemoryInbox(), "holds the outbox"),
        (MemoryBroker(), 7, r"an inbox or its URL, not a int: SQLInbox\("),
        (MemoryBroker(), MemoryStore(), r"an inbox or its URL, not a MemoryStore: SQLInbox\("),
    ],
)
def test_what_is_neither_broker_nor_inbox_says_what_to_write(broker, inbox, says):
    with pytest.raises(SettingsError, match=says) as caught:
        Worker(broker, "vision", inbox)
    assert "secret" not in str(caught.value)


async def test_an_inbox_in_redis_may_be_a_url():
    worker = Worker(MemoryBroker(), "vision", "redis://localhost:1")
    assert type(worker.inbox).__name__ == "RedisInbox"


async def test_a_stop_that_comes_before_the_run_is_heard():
    worker = World().recording()
    worker.stop()
    await worker.run()

    async def body():
        await until(lambda: worker.status().owned)

    await running(worker, body)  # and only once


# --- order, and what was left over --------------------------------------------------------------


async def test_messages_of_a_case_are_handled_in_order_over_several_shards():
    world = World(shards=4)
    worker = world.recording(batch=7)
    await world.publish(*(message(n, case=str(c)) for n in range(1, 21) for c in range(10)))

    async def body():
        await until(lambda: len(world.effects) == 200)

    await running(worker, body)
    for case in map(str, range(10)):
        assert [n for c, n in world.effects if c == case] == list(range(1, 21))
    assert worker.status().topics[TOPIC].applied == 200
    assert await world.pending() == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_worker_that_dies_is_followed_by_another_which_begins_with_what_was_left_over(seed):
    async def main(loop):
        world = World(loop, shards=2)
        first, second = world.recording(batch=5), world.recording(batch=5)
        await world.publish(*(message(n, case=str(c)) for n in range(1, 31) for c in range(4)))
        host, other = Host("first"), Host("second")
        loop.spawn(host, first.run())
        await until(lambda: len(world.effects) > 20)
        host.dead = True
        died = ASYNC.now()
        task = loop.spawn(other, second.run())
        await until(lambda: len(world.effects) == 120, within_s=60.0)
        second.stop()
        await task
        return world, ASYNC.now() - died, await world.pending()

    world, took, pending = simulate(main, seed)
    for case in map(str, range(4)):
        assert [n for c, n in world.effects if c == case] == list(range(1, 31))
    assert took < 30, "no later than the lease, and a little"
    assert pending == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_worker_that_was_frozen_finds_itself_replaced_and_does_nothing_twice(seed):
    async def main(loop):
        world = World(loop)
        first, second = world.recording(batch=5), world.recording(batch=5)
        await world.publish(*(message(n) for n in range(1, 41)))
        host, other = Host("first"), Host("second")
        one = loop.spawn(host, first.run())
        await until(lambda: len(world.effects) > 7)
        host.paused_until = loop.clock_s + 60
        two = loop.spawn(other, second.run())
        await until(lambda: len(world.effects) == 40, within_s=50.0)
        await asyncio.sleep(60)
        assert host.paused_until < loop.clock_s
        await world.publish(message(41))
        await until(lambda: len(world.effects) == 41)
        first.stop()
        second.stop()
        await asyncio.wait([one, two])
        return world

    world = simulate(main, seed)
    assert world.effects == [("1", n) for n in range(1, 42)]


@pytest.mark.parametrize("seed", range(3))
def test_who_was_frozen_between_reading_and_handling_begins_nothing_that_is_not_its_own(seed):
    async def main(loop):
        world = World(loop)
        host = Host("frozen")
        frozen = begun_by_others = 0

        class Freezing:
            def __init__(self, inner):
                self._inner = inner

            def __getattr__(self, name):
                return getattr(self._inner, name)

            async def read(self, limit, *, wait_s=0.0):
                nonlocal frozen
                found = await self._inner.read(limit, wait_s=wait_s)
                if found and not frozen:
                    frozen += 1
                    host.paused_until = loop.clock_s + 60
                    await asyncio.sleep(0)
                return found

        class Broker(Flaky):
            async def consumer(self, *args, **settings):
                return Freezing(await world.real_broker.consumer(*args, **settings))

        class Inbox(Flaky):
            async def apply(self, *args, **settings):
                nonlocal begun_by_others
                begun_by_others += worker.status().owned == ()
                return await self._inner.apply(*args, **settings)

        world.broker = Broker(world.real_broker, BrokerUnavailableError)
        world.inbox = Inbox(world.real_inbox, StoreUnavailableError)
        worker = world.recording()
        await world.publish(*(message(n) for n in range(1, 6)))
        task = loop.spawn(host, worker.run())
        await until(lambda: len(world.effects) == 5, within_s=120)
        worker.stop()
        await task
        assert frozen == 1
        return begun_by_others

    assert simulate(main, seed) == 0


@pytest.mark.parametrize("seed", range(5))
def test_workers_share_the_shards_and_hand_over_gracefully(seed):
    async def main(loop):
        world = World(loop, shards=4)
        workers = [world.recording(batch=5, name=f"w{n}") for n in range(2)]
        one = asyncio.ensure_future(workers[0].run())
        await until(lambda: len(workers[0].status().owned) == 4)
        await world.publish(*(message(n, case=str(c)) for n in range(1, 11) for c in range(8)))
        two = asyncio.ensure_future(workers[1].run())
        await until(lambda: [len(w.status().owned) for w in workers] == [2, 2])
        assert not set(workers[0].status().owned) & set(workers[1].status().owned)
        await world.publish(*(message(n, case=str(c)) for n in range(11, 21) for c in range(8)))
        await until(lambda: len(world.effects) == 160)
        workers[0].stop()
        await one
        await until(lambda: len(workers[1].status().owned) == 4)
        await world.publish(*(message(n, case=str(c)) for n in range(21, 31) for c in range(8)))
        await until(lambda: len(world.effects) == 240)
        workers[1].stop()
        await two
        return world, [w.status().topics[TOPIC] for w in workers]

    world, counted = simulate(main, seed)
    for case in map(str, range(8)):
        assert [n for c, n in world.effects if c == case] == list(range(1, 31))
    assert sum(each.applied for each in counted) == 240
    assert all(each.held == 0 for each in counted)


@pytest.mark.parametrize("seed", range(3))
def test_what_was_begun_before_runs_alone_so_that_a_crash_has_one_culprit(seed):
    async def main(loop):
        world = World(loop, shards=4)
        await world.publish(*(message(n, case=str(c)) for n in (1, 2) for c in range(8)))
        for shard in range(4):
            dead = await world.broker.consumer(TOPIC, "vision", shard, name="dead", fence=1)
            await dead.read(100)
        worker = world.worker()
        now = most = 0

        @worker.on(topic=TOPIC)
        async def handle(message, session):
            nonlocal now, most
            now += 1
            most = max(now, most)
            await asyncio.sleep(0.1)
            now -= 1
            session.append((message.aggregate_id, message.seq))

        task = asyncio.ensure_future(worker.run())
        await until(lambda: len(world.effects) == 16)
        begun_before, most = most, 0
        await world.publish(*(message(3, case=str(c)) for c in range(8)))
        await until(lambda: len(world.effects) == 24)
        worker.stop()
        await task
        return begun_before, most

    begun_before, new = simulate(main, seed)
    assert begun_before == 1
    assert new > 1


@pytest.mark.parametrize("seed", range(3))
def test_an_outage_of_one_topic_does_not_hold_up_what_was_left_over_of_another(seed):
    async def main(loop):
        world = World(loop)
        topics = ("down", "up")
        await world.publish(*(message(n, topic=t) for n in (1, 2) for t in topics))
        for topic in topics:
            dead = await world.broker.consumer(topic, "vision", 0, name="dead", fence=1)
            await dead.read(100)
        worker = world.worker()

        @worker.on(topic=topics)
        async def handle(message, session):
            if message.topic == "down" and ASYNC.now() < 60:
                raise StoreUnavailableError("of this topic only")
            session.append(message.topic)

        task = asyncio.ensure_future(worker.run())
        await until(lambda: world.effects == ["up", "up"], within_s=10)
        await until(lambda: world.effects == ["up", "up", "down", "down"], within_s=80)
        worker.stop()
        await task

    simulate(main, seed)


async def test_stop_finishes_what_is_in_hand_and_leaves_the_rest():
    world = World()
    worker = world.worker(batch=3)
    inside, go_on = asyncio.Event(), asyncio.Event()

    @worker.on(topic=TOPIC)
    async def handle(message, session):
        inside.set()
        await go_on.wait()
        session.append(message.seq)

    await world.publish(*(message(n) for n in range(1, 11)))
    task = asyncio.create_task(worker.run())
    await inside.wait()
    worker.stop()
    await asyncio.sleep(0.05)
    assert not task.done()
    go_on.set()
    await task
    assert world.effects == [1, 2, 3]
    assert await world.pending() == 7

    async def rest():
        await until(lambda: len(world.effects) == 10)

    await running(world.recording(), rest)
    assert world.effects[3:] == [("1", n) for n in range(4, 11)]


async def test_cancelled_it_drops_everything_at_once_and_the_next_one_begins_there():
    world = World()
    worker = world.worker(batch=3)
    inside = asyncio.Event()

    @worker.on(topic=TOPIC)
    async def handle(message, session):
        session.append("never committed")
        inside.set()
        await asyncio.Event().wait()

    await world.publish(*(message(n) for n in range(1, 4)))
    task = asyncio.create_task(worker.run())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.effects == []
    assert worker.status().owned == ()

    async def rest():
        await until(lambda: len(world.effects) == 3)

    await running(world.recording(), rest)
    assert world.effects == [("1", n) for n in (1, 2, 3)]


def test_what_is_in_hand_has_its_grace_and_no_more():
    async def main(loop, takes_s, grace_s):
        world = World(loop)
        worker = world.worker(grace_s=grace_s, lease_s=10.0)
        inside = asyncio.Event()

        @worker.on(topic=TOPIC)
        async def handle(message, session):
            inside.set()
            await asyncio.sleep(takes_s)
            session.append(message.seq)

        await world.publish(message(1))
        task = asyncio.ensure_future(worker.run())
        await inside.wait()
        stopped = ASYNC.now()
        worker.stop()
        await task
        return world.effects, ASYNC.now() - stopped

    effects, took = simulate(lambda loop: main(loop, 20, 25))
    assert effects == [1]
    assert 19 < took < 22
    effects, took = simulate(lambda loop: main(loop, 60, 25))
    assert effects == []
    assert 24 < took < 28


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_topic_does_not_hold_up_another(seed):
    async def main(loop):
        world = World(loop)
        worker = world.worker()

        @worker.on(topic="slow")
        async def slow(message, session):
            await asyncio.sleep(30)
            session.append(("slow", message.seq))

        @worker.on(topic="quick")
        async def quick(message, session):
            session.append(("quick", message.seq))

        await world.publish(*(message(n, topic=t) for n in range(1, 6) for t in ("slow", "quick")))
        task = asyncio.ensure_future(worker.run())
        await until(lambda: len(world.effects) == 5, within_s=5)
        assert all(topic == "quick" for topic, _ in world.effects)
        await until(lambda: len(world.effects) == 10, within_s=200)
        worker.stop()
        await task

    simulate(main, seed)


def test_a_message_that_says_no_topic_belongs_to_the_one_it_came_on():
    async def main(loop):
        world = World(loop)
        worker = world.recording()
        nameless = replace(message(1), topic="")
        batch = Batch(TOPIC, 0, 1, Tail(), [replace(nameless, position=1)])
        await world.broker.publish(batch)

        async def body():
            await until(lambda: world.effects == [("1", 1)])

        await running(worker, body)

    simulate(main)


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_message_that_fails_is_tried_again_and_only_its_own_case_waits(seed, caplog):
    async def main(loop):
        world = World(loop)
        worker = world.worker()
        failures = 3

        @worker.on(topic=TOPIC)
        async def handle(message, session):
            nonlocal failures
            if (message.aggregate_id, message.seq) == ("1", 2) and failures:
                failures -= 1
                raise ValueError("not yet")
            session.append((message.aggregate_id, message.seq))

        await world.publish(*(message(n, case=c) for n in range(1, 5) for c in ("1", "2")))
        task = asyncio.ensure_future(worker.run())
        await until(lambda: len([e for e in world.effects if e[0] == "2"]) == 4, within_s=1)
        assert [e for e in world.effects if e[0] == "1"] == [("1", 1)]
        await until(lambda: len(world.effects) == 8)
        worker.stop()
        await task
        return world, worker.status()

    world, status = simulate(main, seed)
    assert [n for c, n in world.effects if c == "1"] == [1, 2, 3, 4]
    counted = status.topics[TOPIC]
    assert (counted.applied, counted.failed, counted.held) == (8, 3, 3)
    assert "ValueError: not yet" in status.error
    assert "of case/1 failed (it is tried again): ValueError" in caplog.text


def test_what_is_parked_for_good_is_copied_to_the_dead_letter_topic():
    async def main(loop):
        world = World(loop, retry=Retry(attempts=2, **FAST))
        worker = world.worker(dead_letter="axiom:dead")

        @worker.on(topic=TOPIC)
        async def handle(message):
            if message.aggregate_id == "1" and message.seq == 1:
                raise PoisonError("never")
            if message.aggregate_id == "2":
                raise ValueError("not today")

        await world.publish(message(1), message(2), message(1, case="2"), message(1, case="3"))
        dead: list[Message] = []
        other = Worker(world.broker, "mourners", world.inbox, world.store)

        @other.on(topic="axiom:dead")
        async def mourn(message):
            dead.append(message)

        tasks = [asyncio.ensure_future(w.run()) for w in (worker, other)]
        await until(lambda: len(dead) == 2)
        worker.stop()
        other.stop()
        await asyncio.wait(tasks)
        return dead, await world.inbox.sequences()

    dead, left = simulate(main)
    assert {each.id for each in dead} == {f"{TOPIC}-1-1", f"{TOPIC}-2-1"}
    told = {each.id: each.headers for each in dead}[f"{TOPIC}-1-1"]
    assert told["semel-why"] == "poison"
    assert told["semel-error"].startswith("PoisonError: never")
    assert (told["semel-topic"], told["semel-group"], told["semel-seq"]) == (TOPIC, "vision", "1")
    assert {(p.head.message.id, p.head.state, p.behind) for p in left} == {
        (f"{TOPIC}-1-1", "parked", 1),
        (f"{TOPIC}-2-1", "parked", 0),
    }


def test_what_was_parked_by_a_worker_that_died_before_it_could_copy_it_is_copied_by_the_next():
    async def main(loop):
        world = World(loop)

        async def fails(message, session):
            raise PoisonError("never")

        await world.publish(message(1), message(2))
        dead = await world.broker.consumer(TOPIC, "vision", 0, name="dead", fence=1)
        read = [each.message for each in await dead.read(10)]
        await world.inbox.apply("vision", read, fails)  # and dies before it acknowledges
        worker = world.recording(dead_letter="axiom:dead")

        async def body():
            await until(lambda: worker.status().topics[TOPIC].held == 2)

        await running(worker, body)
        consumer = await world.broker.consumer("axiom:dead", "mourners", 0, name="m", fence=1)
        return [each.message for each in await consumer.read(10)]

    (copy,) = simulate(main)
    assert copy.id == f"{TOPIC}-1-1"
    assert copy.headers["semel-error"].startswith("PoisonError: never")


@pytest.mark.parametrize("seed", range(5))
def test_two_groups_copy_to_one_dead_letter_topic(seed):
    async def main(loop):
        world = World(loop)
        workers = [
            Worker(world.broker, name, MemoryInbox(), world.store, dead_letter="axiom:dead")
            for name in ("one", "two")
        ]
        for worker in workers:

            @worker.on(topic=TOPIC)
            async def handle(message):
                raise PoisonError("never")

        tasks = [asyncio.ensure_future(w.run()) for w in workers]
        await world.publish(*(message(1, case=str(n)) for n in range(1, 21)))
        await until(lambda: all(w.status().topics[TOPIC].failed == 20 for w in workers))
        for worker in workers:
            worker.stop()
        await asyncio.wait(tasks)
        return (await world.broker.backlog("axiom:dead", 0)).length

    assert simulate(main, seed) == 40


def test_a_full_dead_letter_topic_holds_up_nobody_and_is_filled_later(caplog):
    async def main(loop):
        world = World(loop)
        full = MemoryBroker(maxlen=1)

        class Two:
            """The dead-letter topic is small."""

            features, shards = MemoryBroker.features, 1

            def __getattr__(self, name):
                def verb(first, *args, **settings):
                    topic = first.topic if isinstance(first, Batch) else first
                    broker = full if topic == "axiom:dead" else world.real_broker
                    return getattr(broker, name)(first, *args, **settings)

                return verb

        world.broker = Two()
        worker = world.worker(dead_letter="axiom:dead")

        @worker.on(topic=TOPIC)
        async def handle(message, session):
            if message.seq == 1:
                raise PoisonError("never")
            session.append(message.seq)

        await world.publish(*(message(1, case=str(n)) for n in range(1, 6)))
        await world.publish(message(2, seq=False))
        task = asyncio.ensure_future(worker.run())
        await until(lambda: worker.status().topics[TOPIC].held == 5)
        await until(lambda: worker.status().topics[TOPIC].applied == 1, within_s=1)
        assert await world.pending() == 0
        copied = []
        await full.join("axiom:dead", "mourners")
        mourner = await full.consumer("axiom:dead", "mourners", 0, name="m", fence=1)
        while len(copied) < 5:
            page = await mourner.read(10, wait_s=5.0)
            assert page, "the rest is copied when there is room"
            copied += [each.message.id for each in page]
            await mourner.ack(page)
        worker.stop()
        await task
        return copied

    copied = simulate(main)
    assert sorted(copied) == sorted(f"{TOPIC}-{n}-1" for n in range(1, 6))
    assert caplog.text.count("takes no copies") <= 2


def test_what_is_no_event_is_parked_alone_and_holds_up_nobody(caplog):
    async def main(loop):
        world = World(loop)
        worker = world.recording(dead_letter="axiom:dead")
        await world.publish(message(1))
        log = world.broker._logs[TOPIC, 0]
        log.append(2, "odd", b"<xml/>")
        await world.publish(message(2))

        async def body():
            await until(lambda: len(world.effects) == 2)
            await until(lambda: (worker.status().topics[TOPIC].held) == 1)

        await running(worker, body)
        (parked,) = await world.inbox.sequences()
        dead = await world.broker.backlog("axiom:dead", 0)
        return world, worker.status(), parked, dead, await world.pending()

    world, status, parked, dead, pending = simulate(main)
    assert world.effects == [("1", 1), ("1", 2)]
    assert status.topics[TOPIC].unreadable == 1
    assert parked.head.state == "parked"
    assert parked.head.message.type == "semel.unreadable"
    assert parked.head.message.data["raw"] == "PHhtbC8+"
    assert "no CloudEvent" in parked.head.error
    assert dead.length == 1
    assert pending == 0
    assert "has what is no event" in caplog.text


def stand_in(*args, **more) -> Message:
    return replace(message(*args, **more), payload="null", refused="it has 2 MB, and I take 1")


@pytest.mark.parametrize("kind", ["memory", "sql"])
@pytest.mark.parametrize("how", ["async", "sync", "outside", "of its type"])
async def test_a_stand_in_is_parked_at_once_with_its_case_and_no_handler_sees_it(
    how, kind, tmp_path
):
    seen: list[Any] = []
    dead: list[Message] = []

    def handle_sync(message):
        seen.append((message.aggregate_id, message.data["number"]))

    async def handle(message):
        handle_sync(message)

    world = World()
    if kind == "sql":
        world.inbox = SQLInbox(f"sqlite:///{tmp_path}/inbox.db", create=True)
    worker = world.worker(dead_letter="axiom:dead")
    types = ["case.created"] if how == "of its type" else []
    register = worker.on(*types, topic=TOPIC, outside=how == "outside")
    register(handle_sync if how == "sync" else handle)
    mourner = Worker(world.broker, "mourners", MemoryInbox(), world.store)

    @mourner.on(topic="axiom:dead")
    async def mourn(message):
        dead.append(message)

    await world.publish(
        message(1),
        stand_in(2),
        message(3),
        stand_in(1, case="2", kind="case.archived"),
        message(2, case="2"),
        stand_in(1, case="3", seq=False),
        message(2, case="3", seq=False),
    )
    # Of the archived one nobody asked for, nobody misses the payload.
    asked_for = {"1", "3"} if how == "of its type" else {"1", "2", "3"}

    async def body():
        await until(lambda: ("3", 2) in seen)
        await until(lambda: len(dead) == len(asked_for))

    await running(mourner, lambda: running(worker, body))
    parked = await world.inbox.sequences()
    waits = {each.head.message.aggregate_id: (each.head.why, each.behind) for each in parked}
    expected = {"1": ("poison", 1), "2": ("poison", 1), "3": ("poison", 0)}
    assert waits == {case: expected[case] for case in asked_for}
    once = list(dict.fromkeys(seen))  # a batch with a failure is rolled back and run again
    assert once == [("1", 1), *([] if "2" in asked_for else [("2", 2)]), ("3", 2)]
    for each in parked:
        assert (each.head.state, each.head.attempts) == ("parked", 1)
        assert "the broker refused it: it has 2 MB, and I take 1; its payload is kept in" in (
            each.head.error
        )
        assert "semel parked edit" in each.head.error
    assert {each.aggregate_id for each in dead} == asked_for
    assert {each.headers["semel-refused"] for each in dead} == {"it has 2 MB, and I take 1"}
    assert await world.pending() == 0
    await world.inbox.aclose()


def test_what_waits_of_a_topic_nobody_here_reads_is_not_taken_for_done():
    async def main(loop):
        world = World(loop)
        worker = world.recording()

        async def fails(message, session):
            raise ValueError("of a handler that is gone")

        endings = await world.inbox.apply("vision", [message(1, topic="gone")], fails)
        assert isinstance(endings[0], Held)

        async def body():
            await asyncio.sleep(5)

        await running(worker, body)
        (parked,) = await world.inbox.sequences()
        return parked

    parked = simulate(main)
    assert "here reads topic 'gone'" in parked.head.error


# --- outages ------------------------------------------------------------------------------------


class Flaky:
    """Something whose verbs fail while it is out."""

    def __init__(self, inner: Any, error: type[Exception], *verbs: str) -> None:
        self._inner = inner
        self._error = error
        self._verbs = verbs
        self.out = False
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name not in self._verbs:
            return attribute

        async def verb(*args: Any, **settings: Any) -> Any:
            if self.out:
                self.asked += 1
                raise self._error("it is out")
            answer = await attribute(*args, **settings)
            if name == "consumer":
                answer = Flaky(answer, self._error, "left_over", "read", "reclaim", "ack", "close")
                answer.out_of = self
            return answer

        return verb

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "out_of":
            object.__setattr__(self, "__class__", _Below)


class _Below(Flaky):
    """A consumer of a broker that is out is out, too."""

    out = property(lambda self: self.out_of.out, lambda self, value: None)  # type: ignore[assignment]


@pytest.mark.parametrize("seed", range(3))
def test_ten_minutes_without_the_broker_park_nothing_and_everything_flows_afterwards(seed, caplog):
    async def main(loop):
        world = World(loop, shards=2)
        world.broker = flaky = Flaky(
            world.real_broker, BrokerUnavailableError, "join", "consumer", "publish", "tail"
        )
        worker = world.recording(batch=5)
        await world.publish(*(message(n, case=str(c)) for n in range(1, 11) for c in range(4)))
        task = asyncio.ensure_future(worker.run())
        await until(lambda: len(world.effects) > 10)
        flaky.out = True
        await asyncio.sleep(1)
        before = len(world.effects)
        await asyncio.sleep(599)
        assert worker.status().outage == "it is out"
        assert not worker.status().ready
        assert len(world.effects) == before
        flaky.out = False
        await world.publish(*(message(n, case=str(c)) for n in range(11, 21) for c in range(4)))
        await until(lambda: len(world.effects) == 80, within_s=20)
        await until(lambda: worker.status().ready, within_s=10)
        worker.stop()
        await task
        assert await world.inbox.sequences() == []
        return world, worker.status(), flaky

    with caplog.at_level(logging.WARNING, "semel"):
        world, status, flaky = simulate(main, seed)
    for case in map(str, range(4)):
        assert [n for c, n in world.effects if c == case] == list(range(1, 21))
    assert status.topics[TOPIC].failed == status.topics[TOPIC].held == 0
    assert caplog.text.count("does not answer") == 1
    assert caplog.text.count("answers again after") == 1
    assert flaky.asked < 600, "it waits longer and longer"


@pytest.mark.parametrize("who", ["inbox", "handler"])
@pytest.mark.parametrize("seed", range(3))
def test_ten_minutes_without_a_store_park_nothing_and_everything_flows_afterwards(
    seed, who, caplog
):
    async def main(loop):
        world = World(loop)
        world.inbox = flaky = Flaky(world.real_inbox, StoreUnavailableError, "apply", "retry")
        worker = world.worker(batch=5)
        down = False

        @worker.on(topic=TOPIC)
        async def handle(message, session):
            if down:
                raise RuntimeError("no row") from StoreUnavailableError("the database is away")
            session.append((message.aggregate_id, message.seq))
            await asyncio.sleep(0.01)

        await world.publish(*(message(n) for n in range(1, 31)))
        task = asyncio.ensure_future(worker.run())
        await until(lambda: len(world.effects) > 10)
        flaky.out, down = (True, False) if who == "inbox" else (False, True)
        await asyncio.sleep(600)
        assert worker.status().outage.endswith("it is out" if who == "inbox" else "no row")
        assert len(world.effects) < 30
        flaky.out = down = False
        await until(lambda: len(world.effects) == 30, within_s=20)
        await until(lambda: worker.status().ready, within_s=10)
        worker.stop()
        await task
        assert await world.inbox.sequences() == []
        return world, worker.status()

    with caplog.at_level(logging.WARNING, "semel"):
        world, status = simulate(main, seed)
    assert world.effects == [("1", n) for n in range(1, 31)]
    assert status.topics[TOPIC].failed == 0
    assert caplog.text.count("does not answer") == 1
    assert caplog.text.count("answers again after") == 1


@pytest.mark.parametrize("seed", range(5))
def test_after_a_read_whose_reply_was_lost_what_it_had_read_comes_first(seed):
    async def main(loop):
        world = World(loop)
        lost = 0

        class Losing:
            def __init__(self, inner):
                self._inner = inner

            def __getattr__(self, name):
                return getattr(self._inner, name)

            async def read(self, limit, *, wait_s=0.0):
                nonlocal lost
                found = await self._inner.read(limit, wait_s=wait_s)
                if found and lost < 3:
                    lost += 1
                    raise BrokerUnavailableError("the reply is lost")
                return found

        class Broker(Flaky):
            async def consumer(self, *args, **settings):
                return Losing(await world.real_broker.consumer(*args, **settings))

        world.broker = Broker(world.real_broker, BrokerUnavailableError)
        worker = world.recording(batch=5)
        await world.publish(*(message(n) for n in range(1, 31)))

        async def body():
            await until(lambda: len(world.effects) == 30)

        await running(worker, body)
        assert lost == 3
        return world, worker.status()

    world, status = simulate(main, seed)
    assert world.effects == [("1", n) for n in range(1, 31)]
    assert status.topics[TOPIC].held == 0, "nothing overtook anything"


def test_a_defect_of_one_topic_does_not_end_the_others(caplog):
    async def main(loop):
        world = World(loop)

        class Odd(Flaky):
            async def apply(self, consumer, messages, handle, *, singly=False):
                if messages[0].topic == "odd" and ASYNC.now() < 30:
                    raise TypeError("a defect")
                return await self._inner.apply(consumer, messages, handle, singly=singly)

        world.inbox = Odd(world.real_inbox, StoreUnavailableError)
        worker = world.worker()

        @worker.on(topic=["odd", "even"])
        async def handle(message, session):
            session.append(message.topic)

        await world.publish(message(1, topic="odd"), message(1, topic="even"))

        async def body():
            await until(lambda: world.effects == ["even"], within_s=5)
            await until(lambda: world.effects == ["even", "odd"], within_s=60)

        await running(worker, body)
        return worker.status()

    assert simulate(main).error == "a defect"
    assert "'odd', shard 0 begins anew: a defect" in caplog.text


# --- idle, beginnings, ends ---------------------------------------------------------------------


def test_what_idles_in_other_hands_is_taken_over_and_told(caplog):
    async def main(loop):
        world = World(loop)
        pages = [[Delivery(1, replace(message(1), position=1), 2, "a stranger", 321.0)]]
        acked: list[Any] = []

        class Reclaiming:
            def __init__(self, inner):
                self._inner = inner

            def __getattr__(self, name):
                return getattr(self._inner, name)

            async def reclaim(self, idle_s, limit=100):
                assert idle_s == 300.0
                return pages.pop() if ASYNC.now() > 100 and pages else []

            async def ack(self, deliveries):
                acked.extend(each.token for each in deliveries)

        class Broker(Flaky):
            async def consumer(self, *args, **settings):
                return Reclaiming(await world.real_broker.consumer(*args, **settings))

        world.broker = Broker(world.real_broker, BrokerUnavailableError)
        worker = world.recording()

        async def body():
            await until(lambda: acked == [1], within_s=200)

        await running(worker, body)
        assert ASYNC.now() < 180, "it looks five times in the time that it lets things idle"
        return world

    with caplog.at_level(logging.INFO, "semel"):
        world = simulate(main)
    assert world.effects == [("1", 1)]
    assert (
        f"took over {TOPIC}-1-1, which a stranger had for 321.0 s; delivered 2 times" in caplog.text
    )


@pytest.mark.parametrize("begin", ["oldest", "seen"])
def test_a_new_group_waits_for_the_first_or_begins_with_what_it_sees(begin):
    async def main(loop):
        world = World(loop)
        worker = world.recording(begin=begin)
        await world.publish(message(5), message(6))
        all_of_it, none_of_it = TopicStatus(applied=2), TopicStatus(held=2)

        async def body():
            await until(lambda: worker.status().topics[TOPIC] in (all_of_it, none_of_it))

        await running(worker, body)
        return world.effects

    found = simulate(main)
    assert found == ([("1", 5), ("1", 6)] if begin == "seen" else [])


def test_a_baseline_is_set_when_the_store_is_back_and_not_before():
    async def main(loop):
        world = World(loop)
        world.inbox = flaky = Flaky(world.real_inbox, StoreUnavailableError, "baseline")
        flaky.out = True
        worker = world.recording(begin="seen")
        await world.publish(message(5))
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(60)
        assert worker.status().outage == "it is out"
        assert worker.status().owned == ()
        flaky.out = False
        await until(lambda: world.effects == [("1", 5)])
        worker.stop()
        await task
        flaky.out = True
        task = asyncio.ensure_future(worker.run())
        await asyncio.sleep(10)
        worker.stop()
        await task
        assert worker.status().ready

    simulate(main)


def test_the_owner_of_the_first_shard_has_the_inbox_swept():
    async def main(loop):
        world = World(loop)
        swept: list[int] = []

        class Swept(Flaky):
            async def sweep(self, *, older_than_s=None, limit=1000):
                assert older_than_s is None
                swept.append(limit)
                return limit if len(swept) == 1 else 3

        world.inbox = Swept(world.real_inbox, StoreUnavailableError)

        async def body():
            await asyncio.sleep(130)

        await running(world.recording(), body)
        return swept

    assert simulate(main) == [1000, 1000, 1000]


def test_the_status_tells_whose_leases_are_waited_for_after_a_crash():
    async def main(loop):
        world = World(loop, shards=4)
        host, dead, next_one = Host("crashes"), world.recording(), world.recording()
        loop.spawn(host, dead.run())
        await asyncio.sleep(5)
        host.dead = True
        running = asyncio.ensure_future(next_one.run())
        await asyncio.sleep(1)
        waits = next_one.status()
        await until(lambda: len(next_one.status().owned) == 4)
        works = next_one.status()
        next_one.stop()
        await running
        return waits, works

    waits, works = simulate(main)
    assert (waits.owned, len(waits.waits_for)) == ((), 1)
    assert works.waits_for == ()


def test_the_status_tells_of_shards_members_and_lag():
    async def main(loop):
        world = World(loop, shards=3)
        worker = world.recording(name="host:7")
        idle = worker.status()
        await world.publish(replace(message(1), time=datetime(2020, 1, 1, tzinfo=UTC)))

        async def body():
            await until(lambda: worker.status().lag_s is not None)
            seen.append(worker.status())

        seen: list[Any] = []
        await running(worker, body)
        return idle, seen[0]

    idle, busy = simulate(main)
    assert (idle.group, idle.name, idle.shards, idle.owned, idle.lag_s) == (
        "vision",
        "host:7",
        3,
        (),
        None,
    )
    assert (busy.owned, busy.members, busy.ready, busy.turning) == ((0, 1, 2), 1, True, True)
    assert busy.lag_s > 86_400 * 365
    assert busy.topics == {TOPIC: TopicStatus(applied=1)}


class Told(MemoryBroker):
    """Says what the relays have told it."""

    published: int | None = None
    error: Exception | None = None

    async def published_shards(self, topic: str) -> int | None:
        if self.error is not None:
            raise self.error
        return self.published


def told(loop: SimLoop, published: int | None) -> World:
    world = World(loop, shards=4)
    world.real_broker = world.broker = Told(shards=4)
    world.broker.published = published
    return world


def test_a_worker_with_another_number_of_shards_than_the_relays_is_refused():
    async def main(loop):
        world = told(loop, 2)
        with pytest.raises(SettingsError, match="4 shards") as refused:
            await world.recording().run()
        return str(refused.value)

    said = simulate(main)
    assert f"{TOPIC!r} is published in 2 shards" in said
    assert "shards=2" in said


def test_a_worker_ends_when_the_relays_begin_with_another_number_of_shards():
    """Before that, and while nobody can tell, it goes on."""

    async def main(loop):
        world = told(loop, None)
        running = asyncio.ensure_future(world.recording().run())
        await asyncio.sleep(60)
        world.broker.published = 4
        await asyncio.sleep(60)
        world.broker.error = BrokerUnavailableError("it is out")
        await asyncio.sleep(60)
        world.broker.error = None
        await world.publish(message(1))
        await until(lambda: world.effects == [("1", 1)])
        assert not running.done()
        world.broker.published = 8
        await asyncio.sleep(20)
        assert running.done()
        with pytest.raises(SettingsError, match="published in 8 shards"):
            await running

    simulate(main)


# --- effects outside the database ---------------------------------------------------------------


@pytest.mark.parametrize("colour", ["async", "sync"])
async def test_an_effect_outside_is_run_once_though_the_inbox_could_not_remember_it(colour):
    world = World()
    world.inbox = Flaky(world.real_inbox, StoreUnavailableError)
    forgets = 1
    real = world.real_inbox._commit

    def commit(course):
        nonlocal forgets
        if course.marks and forgets:
            forgets -= 1
            raise StoreUnavailableError("the commit failed")
        return real(course)

    world.real_inbox._commit = commit  # type: ignore[method-assign]
    worker = world.worker()
    mails: list[str] = []

    def send(message):
        mails.append(current().child_key("mail"))
        return object()  # of no interest, and nothing that could be stored

    if colour == "sync":
        worker.on(topic=TOPIC, outside=True)(send)
    else:

        @worker.on(topic=TOPIC, outside=True)
        async def send_async(message):
            return send(message)

    await world.publish(message(1))

    async def body():
        await until(lambda: worker.status().topics[TOPIC].applied == 1)

    await running(worker, body)
    assert forgets == 0
    assert len(mails) == 1


async def test_an_effect_outside_that_crashed_is_held_until_somebody_resolves_it():
    world = World(retry=Retry(attempts=1))
    worker = world.worker()
    calls: list[int] = []

    @worker.on(topic=TOPIC, outside=True, on_crash="hold")
    async def pay(message):
        calls.append(message.seq)
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await worker.handlers(message(1), None)  # type: ignore[misc]
    await world.publish(message(1))

    async def body():
        await until(lambda: worker.status().topics[TOPIC].held == 1)

    await running(worker, body)
    assert calls == [1]
    assert "nobody knows whether its effect happened" in worker.status().error


async def test_an_effect_outside_that_another_runs_right_now_is_an_outage_and_no_failure(
    monkeypatch,
):
    monkeypatch.setattr("semel.worker.handlers.PATIENCE_S", 0.05)
    world = World()
    worker = world.worker()
    inside, go_on = asyncio.Event(), asyncio.Event()

    @worker.on(topic=TOPIC, outside=True)
    async def pay(message):
        inside.set()
        await go_on.wait()

    first = asyncio.ensure_future(worker.handlers(message(1), None))  # type: ignore[arg-type]
    await inside.wait()
    with pytest.raises(StoreUnavailableError, match="is being handled by somebody else"):
        await worker.handlers(message(1), None)  # type: ignore[misc]
    go_on.set()
    await first
    await worker.handlers(message(1), None)  # type: ignore[misc]


async def test_on_sqlite_leases_and_guards_are_in_a_file_of_their_own(tmp_path, caplog):
    """A handler's transaction is the only writer of its file for as long as it takes."""
    world = World()
    inbox = SQLInbox(f"sqlite:///{tmp_path}/shop.db", create=True)
    worker = Worker(world.broker, "vision", inbox, lease_s=0.6)
    slow: list[int] = []
    mails: list[int] = []

    @worker.on("case.created", topic=TOPIC)
    async def created(message, session):
        await session.execute(sa.text("CREATE TABLE IF NOT EXISTS effect (n int)"))
        await session.execute(sa.text(f"INSERT INTO effect VALUES ({message.seq})"))
        slow.append(message.seq)
        await asyncio.sleep(1.5)

    @worker.on("case.closed", topic=TOPIC, outside=True)
    def closed(message):
        mails.append(message.seq)

    await world.publish(message(1), message(2, kind="case.closed"))

    async def body():
        await until(lambda: worker.status().topics[TOPIC].applied == 2)

    await running(worker, body)
    await inbox.aclose()
    assert (slow, mails) == ([1], [2])
    assert "lost" not in caplog.text
    assert (tmp_path / "shop.db-workers").exists()


def test_an_effect_outside_takes_no_session():
    worker = World().worker()
    with pytest.raises(SettingsError, match="takes a session, and outside=True"):
        worker.on(topic=TOPIC, outside=True)(lambda message, session: None)


def test_a_long_id_still_makes_a_key():
    worker = World().worker()
    calls: list[str] = []

    @worker.on(topic=TOPIC, outside=True)
    async def pay(message):
        calls.append(current().key)

    async def main(loop):
        for n in range(2):
            for _ in range(2):
                await worker.handlers(replace(message(1), id="é" * 120 + str(n)), None)  # type: ignore[misc]

    simulate(main)
    assert len(calls) == len(set(calls)) == 2
