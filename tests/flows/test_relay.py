"""From the outbox to a broker on PostgreSQL, MariaDB and SQLite: all of it, once, in order.

What dies, freezes and fails at any other moment is in `tests/simulation/test_relay_simulation.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest
import redis.asyncio
import sqlalchemy as sa
from sqlalchemy.orm import Session

from semel import relay as relay_module
from semel.brokers import NatsBroker, RabbitBroker, RedisBroker
from semel.brokers.memory import MemoryBroker
from semel.brokers.rules import TopicError
from semel.cloudevents import from_json
from semel.colour import ASYNC
from semel.errors import BrokerUnavailableError, SettingsError
from semel.inbox import MemoryInbox
from semel.messages import Batch, Full, Message, Receipt, Refused, Tail
from semel.outbox import Event, Outbox
from semel.parked import Parked
from semel.relay import Relay
from semel.relay import shard as relay_shard
from semel.stores.sql import SQLStore, init
from semel.stores.sql.lines import open_engine, parse, with_driver
from semel.stores.sql.outbox_reading import OutboxReader
from semel.worker import Worker
from support import servers

OUTBOX = Outbox(max_payload=2 * servers.RABBIT_TAKES)
BOTH = ("orders", "bills")
TABLES = (
    "event_outbox",
    "event_outbox_seq",
    "event_outbox_cursor",
    "event_outbox_mark",
    "idempotency",
)


def placed(aggregate: object = 1, topic: str = "orders", **payload: Any) -> Event:
    return Event("placed", "order", str(aggregate), payload, topic=topic)


class Desk:
    """A database with the tables in it, and producers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.own = open_engine(parse(url))
        options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
        self.engine = sa.create_engine(with_driver(parse(url), "sync"), **options)
        with self.own.connect() as connection:
            for table in TABLES:
                connection.exec_driver_sql(f"DELETE FROM {table}")

    async def commit(self, *events: Event) -> None:
        """In a thread: on SQLite the relay may have a transaction open, and needs its loop."""
        await asyncio.to_thread(self._commit, events)

    def _commit(self, events: Sequence[Event]) -> None:
        with Session(self.engine) as session:
            for event in events:
                OUTBOX.add(session, event)
            session.commit()

    def ask(self, select: str) -> list[Any]:
        with self.own.connect() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(select)]

    def do(self, statement: str) -> None:
        with self.engine.begin() as connection:
            connection.exec_driver_sql(statement)

    def rows(self) -> int:
        return int(self.ask("SELECT COUNT(*) FROM event_outbox")[0][0])

    def events(self) -> list[tuple[str, ...]]:
        """Everything that was ever committed and is still there: topic, aggregate, seq, id."""
        return self.ask("SELECT topic, aggregate_id, seq, event_id FROM event_outbox")

    def payloads(self) -> list[tuple[str, str]]:
        return self.ask("SELECT event_id, payload FROM event_outbox")

    def close(self) -> None:
        self.engine.dispose()
        self.own.dispose()


@pytest.fixture(scope="module")
def databases() -> Iterator[dict[str, Any]]:
    made: dict[str, Any] = {}
    yield made
    for server, name in made.values():
        server.ensure_running()
        server.drop_database(name)


def _url(request: pytest.FixtureRequest, kind: str, databases: dict[str, Any]) -> str:
    if kind == "sqlite":
        init(url := f"sqlite:///{request.getfixturevalue('tmp_path')}/shop.db")
        return url
    server = request.getfixturevalue(f"{kind}_server")
    server.ensure_running()
    if kind not in databases:
        server.create_database(name := f"relay_{uuid.uuid4().hex[:12]}")
        databases[kind] = server, name
        init(server.url(name))
    return str(server.url(databases[kind][1]))


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def desk(request: pytest.FixtureRequest, databases: dict[str, Any]) -> Iterator[Desk]:
    desk = Desk(_url(request, request.param, databases))
    yield desk
    desk.close()


@pytest.fixture
def small(request: pytest.FixtureRequest) -> Iterator[Desk]:
    """Where the database makes no difference."""
    desk = Desk(_url(request, "sqlite", {}))
    yield desk
    desk.close()


class Broker(MemoryBroker):
    """One that can be made to fail, to be full, and to forget."""

    def __init__(self, shards: int = 1) -> None:
        super().__init__(shards=shards, maxlen=None)
        self.down = False
        self.loses_replies = False
        self.full: set[str] = set()
        self.refuses: set[str] = set()
        self.most: int | None = None
        self.calls = 0
        self.before: Callable[[Batch], Any] | None = None

    async def publish(self, batch: Batch) -> Receipt:
        self.calls += 1
        if self.before is not None:
            await self.before(batch)
        if self.down:
            raise BrokerUnavailableError("refused")
        if batch.topic in self.full:
            return Full(1, "nobody reads")
        for number, message in enumerate(batch.messages):
            if message.aggregate_id in self.refuses or self._is_large(message):
                some = Batch(
                    batch.topic, batch.shard, batch.fence, batch.follows, batch.messages[:number]
                )
                await super().publish(some)
                return Refused(message, "too odd")
        receipt = await super().publish(batch)
        if self.loses_replies:
            raise BrokerUnavailableError("no reply")
        return receipt

    def _is_large(self, message: Message) -> bool:
        return self.most is not None and len(message.payload) > self.most

    async def tail(self, topic: str, shard: int) -> Tail:
        if self.down:
            raise BrokerUnavailableError("refused")
        return await super().tail(topic, shard)

    def lose(self, count: int, topic: str = "orders", shard: int = 0) -> None:
        """The last so many entries were never written to disk."""
        log = self._log(topic, shard)
        del log.entries[len(log.entries) - count :]
        last = log.entries[-1] if log.entries else None
        log.tail = Tail(last.position, last.id) if last else Tail()

    def stream(self, topic: str = "orders") -> list[Message]:
        logs = [log for (name, _), log in sorted(self._logs.items()) if name == topic]
        return [from_json(entry.raw) for log in logs for entry in log.entries]

    def numbers(self, topic: str = "orders") -> list[Any]:
        return [message.data.get("n") for message in self.stream(topic)]


@contextlib.asynccontextmanager
async def relaying(desk: Desk, broker: MemoryBroker, **settings: Any) -> AsyncIterator[Relay]:
    """A relay at work; its end is part of every test."""
    relay = Relay(SQLStore(desk.url), broker, **settings)
    _watch_cursors(relay)
    running = asyncio.create_task(relay.run())
    try:
        yield relay
    finally:
        relay.stop()
        async with asyncio.timeout(20):
            await running
        await relay._store.aclose()


def _watch_cursors(relay: Relay) -> None:
    """`relay.cursors` has what was last written down of each shard."""
    relay.cursors = {}  # type: ignore[attr-defined]
    advance = relay.reader.advance

    async def watched(cursor: Any, **how: Any) -> Any:
        moved = await advance(cursor, **how)
        if moved is not None:
            relay.cursors[moved.shard] = moved  # type: ignore[attr-defined]
        return moved

    relay.reader.advance = watched  # type: ignore[method-assign]


async def until(condition: Callable[[], Any], within_s: float = 30.0) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.005)
    assert condition()


def in_order(desk: Desk, broker: Broker) -> None:
    """Each aggregate's events, all of them, once, and in the order of their numbers."""
    committed: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for topic, aggregate, seq, id in desk.events():
        committed[topic, aggregate].append((int(seq), id))
    arrived: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for topic in {topic for topic, _ in broker._logs}:
        for message in broker.stream(topic):
            assert message.seq is not None
            arrived[topic, message.aggregate_id].append((message.seq, message.id))
    assert {key: sorted(events) for key, events in committed.items()} == arrived


# --- everything, once, in order -----------------------------------------------------------------


def _produce(desk: Desk, seed: int, count: int) -> None:
    """Transactions of one to three events, some of them rolled back."""
    chance = random.Random(seed)
    for number in range(count):
        with Session(desk.engine) as session:
            for _ in range(chance.randint(1, 3)):
                topic = chance.choice(["orders", "bills"])
                OUTBOX.add(session, placed(chance.randint(1, 6), topic, n=number, by=seed))
            if chance.random() < 0.2:
                session.rollback()
            else:
                session.commit()


async def test_everything_committed_arrives_once_and_in_order(desk: Desk) -> None:
    broker = Broker(shards=3)
    async with (
        relaying(desk, broker, batch=20, lease_s=3.0) as one,
        relaying(desk, broker, batch=20, lease_s=3.0) as other,
    ):
        producers = [asyncio.to_thread(_produce, desk, seed, 25) for seed in range(4)]
        await asyncio.gather(*producers)
        count = desk.rows()
        await until(lambda: sum(len(log.entries) for log in broker._logs.values()) == count)
        in_order(desk, broker)
        await until(lambda: len(one.status().owned) + len(other.status().owned) == 3)
        await until(lambda: one.status().members == 2)
        assert one.status().ready
    assert one.counts["published"] + other.counts["published"] == count
    assert one.status().owned == ()


async def test_what_came_while_a_page_was_read_ahead_is_not_left_for_later(small: Desk) -> None:
    """A page read ahead knows older news, and nothing comes that would make it look again."""
    broker = Broker()
    await small.commit(*(placed(n=n) for n in range(3)))

    async def commit_one_more(batch: Batch) -> None:
        if broker.calls == 1:
            news = relay.news
            await small.commit(placed(n=3))
            await until(lambda: relay.news != news)

    broker.before = commit_one_more
    async with relaying(small, broker, batch=2) as relay:
        await until(lambda: broker.numbers() == [0, 1, 2, 3], within_s=5.0)


async def test_a_commit_in_this_process_is_heard_of_at_once(desk: Desk) -> None:
    broker = Broker()
    async with relaying(desk, broker, idle_s=60.0) as relay:
        await until(lambda: relay.news >= 0)
        await desk.commit(placed(n=1))
        await until(lambda: broker.numbers() == [1])
        # Back at rest: it looks ever more seldom, and once in a minute in the end.
        relay_looks = _count_looks(relay)
        await asyncio.sleep(1.0)
        assert relay_looks() < 40
        await desk.commit(placed(n=2))
        await until(lambda: broker.numbers() == [1, 2], within_s=20.0)


def _count_looks(relay: Relay) -> Callable[[], int]:
    looks, look = [], relay._look

    async def counted() -> bool:
        looks.append(1)
        return await look()

    relay._look = counted  # type: ignore[method-assign]
    return lambda: len(looks)


async def test_two_names_publish_the_same_outbox_each_to_its_broker(small: Desk) -> None:
    ours, theirs = Broker(), Broker(shards=4)
    await small.commit(*(placed(n, n=n) for n in range(20)))
    async with (
        relaying(small, ours, name="ours", source="/shop"),
        relaying(small, theirs, name="theirs"),
    ):
        await until(lambda: len(ours.stream()) == len(theirs.stream()) == 20)
    assert {message.source for message in ours.stream()} == {"/shop"}
    assert {message.source for message in theirs.stream()} == {"/semel/outbox"}


# --- who dies, and who wakes up -----------------------------------------------------------------


@contextlib.asynccontextmanager
async def frozen(relay: Relay, verb: str) -> AsyncIterator[Callable[[], None]]:
    """The relay stops in front of this call of its reader, until thawed; its leases are over."""
    thawed = asyncio.Event()
    call = getattr(relay.reader, verb)

    async def later(*args: Any, **more: Any) -> Any:
        await thawed.wait()
        return await call(*args, **more)

    async def never(*args: Any) -> bool:
        await thawed.wait()
        return True

    shards = relay._shards
    assert shards._seat is not None
    holds = [shards._seat, *shards._holds.values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay.reader, verb, later)
        patch.setattr(shards, "_renew", never)
        patch.setattr(shards, "_turn", never)
        for hold in holds:  # nor does it see them end
            patch.setattr(hold, "_good_until", float("inf"))
            await relay._store.ledger(ASYNC).forget(hold.claim.key.id, force=True)
        try:
            yield thawed.set
        finally:
            thawed.set()


async def test_who_died_between_publishing_and_the_cursor_is_taken_over_from(desk: Desk) -> None:
    broker = Broker()
    async with relaying(desk, broker) as first:
        await desk.commit(placed(n=0))
        await until(lambda: broker.numbers() == [0])
        await until(lambda: first.cursors and "orders" in first.cursors[0].tails)
        async with frozen(first, "advance") as thaw:
            await desk.commit(*(placed(n % 2, n=n) for n in range(1, 4)))
            await until(lambda: len(broker.stream()) == 4)
            async with relaying(desk, broker) as second:
                await desk.commit(placed(n=4))
                await until(lambda: len(broker.stream()) == 5)
                await until(lambda: second.counts["published"] == 1)
                assert second.counts["repeated"] == 3
                thaw()
                await desk.commit(placed(n=5))
                await until(lambda: len(broker.stream()) == 6)
    in_order(desk, broker)


async def test_who_was_frozen_before_publishing_publishes_nothing_any_more(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    broker, thawed = Broker(), asyncio.Event()
    stuck: list[Batch] = []

    async def stop_the_first(batch: Batch) -> None:
        if not stuck:
            stuck.append(batch)
            await thawed.wait()

    async with relaying(desk, broker) as first:
        await desk.commit(placed(n=0))
        await until(lambda: broker.numbers() == [0])
        await until(lambda: first.cursors and "orders" in first.cursors[0].tails)
        broker.before = stop_the_first
        async with frozen(first, "advance") as thaw:
            await desk.commit(placed(n=1))
            await until(lambda: stuck)
            async with relaying(desk, broker):
                await until(lambda: broker.numbers() == [0, 1])
                await desk.commit(placed(n=2))
                await until(lambda: broker.numbers() == [0, 1, 2])
                thawed.set()
                thaw()
                await until(lambda: "a later owner (fence" in caplog.text)
    assert broker.numbers() == [0, 1, 2]
    in_order(desk, broker)


async def test_a_cursor_moves_for_its_owner_only(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """Frozen behind the publish: what it would write down is older than what is written."""
    broker = Broker()
    async with relaying(desk, broker) as first:
        await desk.commit(placed(n=0))
        await until(lambda: first.cursors and "orders" in first.cursors[0].tails)
        async with frozen(first, "advance") as thaw:
            await desk.commit(placed(n=1))
            await until(lambda: broker.numbers() == [0, 1])
            async with relaying(desk, broker) as second:
                await desk.commit(placed(n=2))
                await until(lambda: broker.numbers() == [0, 1, 2])
                last = max(message.position for message in broker.stream())
                await until(lambda: second.cursors and second.cursors[0].position >= last)
                thaw()
                await until(lambda: "a later owner has moved its cursor" in caplog.text)
    store = SQLStore(desk.url)
    cursor = await OutboxReader(store).take(0, 2**62)
    await store.aclose()
    assert cursor is not None
    assert cursor.position >= last
    assert cursor.tails["orders"].position == last


async def test_a_stop_finishes_what_is_in_hand_and_hands_over_at_once(desk: Desk) -> None:
    broker = Broker()
    async with relaying(desk, broker, lease_s=60.0) as first:
        await until(lambda: first.status().owned == (0,))

        async def stop_meanwhile(batch: Batch) -> None:
            first.stop()
            await asyncio.sleep(0.05)

        broker.before = stop_meanwhile
        await desk.commit(placed(n=0))
        await until(lambda: broker.numbers() == [0])
    broker.before = None
    await desk.commit(placed(n=1))
    async with relaying(desk, broker, lease_s=60.0) as second:
        await until(lambda: broker.numbers() == [0, 1])
    assert (second.counts["published"], second.counts["repeated"]) == (1, 0)


# --- brokers in trouble -------------------------------------------------------------------------


async def test_an_outage_of_the_broker_loses_and_turns_round_nothing(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker(shards=2)
    async with relaying(desk, broker, batch=3) as relay:
        await desk.commit(*(placed(n % 4, n=n) for n in range(8)))
        await until(lambda: len(broker.stream()) == 8)
        broker.down = True
        await desk.commit(*(placed(n % 4, n=n) for n in range(8, 20)))
        await until(lambda: relay.status().outage == "refused")
        assert not relay.status().ready
        calls = broker.calls
        await asyncio.sleep(0.5)
        assert broker.calls - calls < 2 * 12  # 50 ms, and twice as long each time
        broker.down = False
        await until(lambda: len(broker.stream()) == 20)
        await until(lambda: relay.status().ready)
    in_order(desk, broker)
    assert caplog.text.count("does not answer") == 1
    assert caplog.text.count("answers again") == 1


async def test_a_broker_that_does_not_answer_is_found_out_before_the_first_event(
    small: Desk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_shard, "COMPARE_EVERY_S", 0.05)
    broker = Broker(2)
    broker.down = True
    with caplog.at_level(logging.WARNING, "semel"):
        async with relaying(small, broker) as relay:
            await until(lambda: not relay.status().ready)
            assert relay.status().outage == "refused"
            broker.down = False
            await until(lambda: relay.status().ready)
            broker.down = True
            await until(lambda: not relay.status().ready)
    assert broker.calls == 0
    assert "the broker of relay default does not answer, waiting for it: refused" in caplog.text
    assert broker.stream() == []


async def test_who_is_stopped_during_an_outage_does_not_say_that_it_is_over(
    unused_tcp_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = SQLStore(f"postgresql://nobody@127.0.0.1:{unused_tcp_port}/nothing")
    relay = Relay(store, Broker())
    with caplog.at_level(logging.WARNING, "semel"):
        running = asyncio.create_task(relay.run())
        await until(lambda: not relay.status().ready)
        relay.stop()
        await running
    assert "the store of relay default does not answer, waiting for it: " in caplog.text
    assert "answers again" not in caplog.text
    assert all("\n" not in each and "\t" not in each for each in caplog.messages)
    await store.aclose()


async def test_a_broker_may_be_a_url_and_is_closed_with_the_run(small: Desk, tmp_path: Any) -> None:
    relay = Relay(small.url, f"sqlite:///{tmp_path}/broker.db?shards=2")
    running = asyncio.create_task(relay.run())
    await small.commit(placed(1, n=1))
    await until(lambda: relay.status().published == 1)
    relay.stop()
    await running
    assert relay.broker.shards == 2


def test_what_is_no_broker_says_what_to_write(small: Desk) -> None:
    with pytest.raises(SettingsError, match=r"a broker or its URL, not a object: connect\("):
        Relay(small.url, object())  # type: ignore[arg-type]


async def test_replies_that_get_lost_repeat_nothing_at_the_broker(desk: Desk) -> None:
    broker = Broker()
    broker.loses_replies = True
    async with relaying(desk, broker, batch=3):
        await desk.commit(*(placed(n % 4, n=n) for n in range(8)))
        await until(lambda: len(broker.stream()) >= 3)
        await desk.commit(*(placed(n % 4, n=n) for n in range(8, 12)))
        await until(lambda: broker.calls > 3)
        broker.loses_replies = False
        await until(lambda: len(broker.stream()) == 12)
        in_order(desk, broker)


async def test_one_topic_that_is_full_holds_up_no_other(desk: Desk) -> None:
    broker = Broker()
    broker.full = {"bills"}
    async with relaying(desk, broker, batch=5) as relay:
        for n in range(10):
            await desk.commit(placed(n % 3, n=n), placed(n % 3, "bills", n=n))
        await until(lambda: len(broker.stream()) == 10)
        assert broker.stream("bills") == []
        assert relay.status().held == {"bills": "nobody reads"}
        assert relay.status().ready
        broker.full = set()
        await until(lambda: len(broker.stream("bills")) == 10)
        await until(lambda: relay.status().held == {})
        await desk.commit(placed(n=10), placed(1, "bills", n=10))
        await until(lambda: len(broker.stream("bills")) == 11)
    in_order(desk, broker)
    assert broker.numbers("bills") == sorted(broker.numbers("bills"))


async def test_a_lane_is_remembered_by_whoever_comes_next(desk: Desk) -> None:
    broker = Broker()
    broker.full = {"bills"}
    async with relaying(desk, broker, batch=5) as relay:
        await desk.commit(*(placed(n % 3, topic, n=n) for n in range(6) for topic in BOTH))
        await until(lambda: len(broker.stream()) == 6)
        await until(lambda: "bills" in relay.cursors[0].lanes)
    broker.full = set()
    async with relaying(desk, broker, batch=5):
        await until(lambda: len(broker.stream("bills")) == 6)
        in_order(desk, broker)


# --- what the broker refuses --------------------------------------------------------------------

# Fits into the outbox, and into no broker here.
LARGE = "x" * servers.RABBIT_TAKES


@pytest.fixture(params=["memory", "nats", "rabbit", "redis"])
async def limited(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A broker that takes a mebibyte, or a few."""
    if request.param == "memory":
        broker = Broker()
        broker.most = 1 << 19
        yield broker
    elif request.param == "nats":
        nats = NatsBroker(request.getfixturevalue("nats_url"))
        yield nats
        await nats.aclose()
    elif request.param == "rabbit":
        rabbit = RabbitBroker(request.getfixturevalue("rabbit_url"))
        yield rabbit
        await rabbit.aclose()
    else:
        url = request.getfixturevalue("redis_url")
        async with redis.asyncio.Redis.from_url(url) as client:
            name = "proto-max-bulk-len"
            before = (await client.config_get(name))[name]
            await client.config_set(name, 1 << 20)
            streams = RedisBroker(url)
            try:
                yield streams
            finally:
                await client.config_set(name, before)
                await streams.aclose()


@contextlib.asynccontextmanager
async def working(broker: Any, inbox: MemoryInbox) -> AsyncIterator[None]:
    worker = Worker(broker, "billing", inbox)

    @worker.on(topic="orders")
    async def handle(message: Message, session: list[Any]) -> None:
        session.append((message.aggregate_id, message.data["n"]))

    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop()
        async with asyncio.timeout(20):
            await running


async def given_back(small: Desk, inbox: MemoryInbox) -> None:
    """What an operator does about the one that waits."""
    people = Parked(inbox)
    [waits] = await people.list()
    assert (waits.head.state, waits.head.why, waits.behind) == ("parked", "poison", 1)
    assert "the broker refused it" in waits.head.error
    id = waits.head.message.id
    found = [payload for event_id, payload in small.payloads() if event_id == id]
    assert [LARGE in payload for payload in found] == [True]
    await people.edit(waits.sequence, id, '{"n": 1}')
    await people.replay(waits.sequence)


async def test_an_event_that_is_refused_stops_its_aggregate_until_it_is_given_back(
    small: Desk, limited: Any, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = MemoryInbox()
    large = placed(7, n=1, text=LARGE)
    async with relaying(small, limited) as relay, working(limited, inbox):
        await small.commit(placed(1, n=0), large, placed(7, n=2), placed(1, n=3), placed(2, n=4))
        await until(lambda: inbox.effects == [("1", 0), ("1", 3), ("2", 4)])
        await until(lambda: relay.cursors and relay.cursors[0].position >= 5)
        assert await relay.reader.sweep(keep_s=0) == 4
        await given_back(small, inbox)
        await until(lambda: inbox.effects[3:] == [("7", 1), ("7", 2)])
        await small.commit(placed(7, n=5))
        await until(lambda: inbox.effects[5:] == [("7", 5)])
        assert (relay.status().refused, relay.status().held) == (1, {})
        # The worker may have it before the broker's word that it was taken is here.
        await until(lambda: relay.counts["published"] == 6)
        assert relay.counts["repeated"] == 0
    assert caplog.text.count("the broker refuses event") == 1
    assert "semel parked edit" in caplog.text


async def test_who_died_between_a_refusal_and_the_cursor_is_taken_over_from(
    small: Desk, limited: Any
) -> None:
    inbox = MemoryInbox()
    async with relaying(small, limited) as first, working(limited, inbox):
        await small.commit(placed(1, n=0))
        await until(lambda: inbox.effects == [("1", 0)])
        await until(lambda: first.cursors and "orders" in first.cursors[0].tails)
        async with frozen(first, "advance"):
            await small.commit(placed(7, n=1, text=LARGE), placed(7, n=2), placed(1, n=3))
            await until(lambda: inbox.effects == [("1", 0), ("1", 3)])
            async with relaying(small, limited) as second:
                await small.commit(placed(1, n=4))
                await until(lambda: inbox.effects == [("1", 0), ("1", 3), ("1", 4)])
                assert second.status().stopped == {}
                await given_back(small, inbox)
                await until(lambda: inbox.effects[3:] == [("7", 1), ("7", 2)])


async def test_who_died_between_a_refusal_and_its_stand_in_is_taken_over_from(
    small: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    broker, inbox = Broker(), MemoryInbox()
    broker.most = 1 << 19
    died = asyncio.Event()

    async def die(batch: Batch) -> None:
        if batch.messages[0].refused and not died.is_set():
            died.set()
            raise BrokerUnavailableError("gone")

    broker.before = die
    async with relaying(small, broker) as relay, working(broker, inbox):
        await small.commit(placed(1, n=0), placed(7, n=1, text=LARGE), placed(7, n=2))
        await small.commit(placed(1, n=3))
        await until(lambda: inbox.effects == [("1", 0), ("1", 3)])
        assert died.is_set()
        await given_back(small, inbox)
        await until(lambda: inbox.effects[2:] == [("7", 1), ("7", 2)])
        assert relay.status().refused == 1
    assert caplog.text.count("the broker refuses event") == 1


async def test_many_refused_events_in_one_batch_each_have_their_stand_in(desk: Desk) -> None:
    broker = Broker()
    broker.most = 100
    async with relaying(desk, broker) as relay:
        await desk.commit(*(placed(n % 4, n=n, text="x" * 100 * (n % 3)) for n in range(12)))
        await until(lambda: len(broker.stream()) == 12)
        await until(lambda: relay.status().refused == 8)
    in_order(desk, broker)
    there = {message.id: message for message in broker.stream()}
    large = [id for id, payload in desk.payloads() if len(payload) > 100]
    assert sorted(id for id, message in there.items() if message.refused) == sorted(large)
    assert {there[id].payload for id in large} == {"null"}
    assert {there[id].refused for id in large} == {"too odd"}


async def test_what_is_published_again_after_a_lost_tail_is_refused_again_and_told_once(
    small: Desk, comparing: None, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker()
    broker.most = 100
    async with relaying(small, broker) as relay:
        await small.commit(placed(1, n=0), placed(7, n=1, text="x" * 200), placed(1, n=2))
        await until(lambda: len(broker.stream()) == 3)
        broker.lose(2)
        await until(lambda: len(broker.stream()) == 3)
        assert relay.status().refused == 1
    assert [bool(message.refused) for message in broker.stream()] == [False, True, False]
    assert caplog.text.count("the broker refuses event") == 1


async def test_why_it_was_refused_is_told_whatever_the_broker_says(small: Desk) -> None:
    class Odd(Broker):
        async def publish(self, batch: Batch) -> Receipt:
            receipt = await super().publish(batch)
            if isinstance(receipt, Refused):
                why = {"1": "", "2": "\n", "3": "a\x00b\nc" + "x" * 9999}
                return Refused(receipt.message, why[receipt.message.aggregate_id])
            return receipt

    broker = Odd()
    broker.most = 50
    async with relaying(small, broker):
        await small.commit(*(placed(n, text="x" * 100) for n in (1, 2, 3)))
        await until(lambda: len(broker.stream()) == 3)
    first, second, third = (message.refused for message in broker.stream())
    assert first == second == "it did not say why"
    assert third.startswith("a b cxxx")
    assert len(third) == 500


async def test_an_event_that_is_refused_with_its_stand_in_holds_up_its_topic_and_is_told_of(
    small: Desk,
) -> None:
    broker = Broker()
    broker.refuses = {"7"}
    async with relaying(small, broker) as relay:
        await small.commit(placed(1, n=0), placed(7, n=1), placed(1, n=2), placed(1, "bills", n=3))
        await until(lambda: broker.numbers("bills") == [3])
        assert broker.numbers() == [0]
        await until(lambda: "the broker refuses event" in relay.status().held.get("orders", ""))
        assert "too odd" in relay.status().held["orders"]
        broker.refuses = set()
        await until(lambda: broker.numbers() == [0, 1, 2])
        await until(lambda: relay.status().held == {})


# --- a broker that forgets ----------------------------------------------------------------------


@pytest.fixture
def comparing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_shard, "COMPARE_EVERY_S", 0.1)


@pytest.fixture
def not_comparing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_shard, "COMPARE_EVERY_S", 1e6)


@pytest.mark.usefixtures("not_comparing")
async def test_a_lost_tail_is_published_again_with_the_next_event(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker()
    async with relaying(desk, broker, batch=4):
        await desk.commit(*(placed(n % 3, n=n) for n in range(10)))
        await until(lambda: len(broker.stream()) == 10)
        broker.lose(6)
        await desk.commit(placed(n=10), placed(0, "bills", n=11))
        await until(lambda: len(broker.stream()) == 11)
        await desk.commit(placed(n=12))
        await until(lambda: len(broker.stream()) == 12)
    in_order(desk, broker)
    assert caplog.text.count("has lost the end of orders") == 1
    assert "may be deleted" not in caplog.text


@pytest.mark.usefixtures("comparing")
async def test_relay_pointed_back_at_a_broker_with_an_older_part_says_so(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Broker(), Broker()
    for count, broker in ((2, first), (3, second), (4, first)):
        async with relaying(desk, broker):
            await desk.commit(placed(n=count))
            await until(lambda broker=broker, n=count: n in broker.numbers())
    caplog.clear()

    async with relaying(desk, second):
        await until(lambda: 4 in second.numbers())

    assert "the URL names another broker, which has an older part of it" in caplog.text


@pytest.mark.usefixtures("comparing")
async def test_relay_pointed_at_another_broker_names_both_reasons_and_the_remedy(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Broker(), Broker()
    async with relaying(desk, first):
        await desk.commit(placed(n=0), placed(n=1))
        await until(lambda: first.numbers() == [0, 1])

    async with relaying(desk, second):
        await until(lambda: second.numbers() == [0, 1])

    assert "another broker than before, or the broker has lost its data" in caplog.text
    assert "--name" in caplog.text
    assert "lost the end" not in caplog.text


@pytest.mark.usefixtures("comparing")
async def test_a_lost_tail_is_published_again_without_a_new_event(desk: Desk) -> None:
    broker = Broker(shards=2)
    async with relaying(desk, broker, batch=4) as relay:
        await desk.commit(
            *(placed(n, topic, n=n) for n in range(12) for topic in ("orders", "bills"))
        )
        await until(lambda: len(broker.stream()) == len(broker.stream("bills")) == 12)
        await until(lambda: relay.counts["published"] == 24)
        broker.lose(len(broker._log("orders", 0).entries), shard=0)
        broker.lose(1, shard=1)
        await until(lambda: len(broker.stream()) == 12)
    in_order(desk, broker)


@pytest.mark.usefixtures("comparing")
async def test_a_tail_that_is_lost_while_the_relay_is_away_is_published_again(desk: Desk) -> None:
    broker = Broker()
    async with relaying(desk, broker):
        await desk.commit(*(placed(n % 3, n=n) for n in range(10)))
        await until(lambda: len(broker.stream()) == 10)
    broker.lose(10)
    async with relaying(desk, broker):
        await until(lambda: len(broker.stream()) == 10)
    in_order(desk, broker)


@pytest.mark.usefixtures("comparing")
async def test_what_is_deleted_already_cannot_be_published_again_and_is_told_of(
    small: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker()
    async with relaying(small, broker) as relay:
        await small.commit(*(placed(n=n) for n in range(4)))
        await until(lambda: len(broker.stream()) == 4)
        await until(lambda: relay.cursors and relay.cursors[0].position == 4)
        assert await relay.reader.sweep(keep_s=0.0) == 4
        await small.commit(placed(n=4))
        await until(lambda: broker.numbers()[-1] == 4)
        broker.lose(3)
        await until(lambda: broker.numbers() == [0, 1, 4])
        assert "Events up to 4 may be deleted there and are lost" in caplog.text


async def test_another_event_at_the_same_place_stops_the_shard_and_no_other(
    small: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay_shard, "COMPARE_EVERY_S", 0.2)
    broker = Broker(shards=2)
    async with relaying(small, broker) as relay:
        await small.commit(*(placed(n, n=n) for n in range(12)))
        await until(lambda: len(broker.stream()) == 12)
        log = broker._log("orders", 0)
        right, log.tail = log.tail, Tail(log.tail.position, "another")
        await small.commit(*(placed(n, n=n) for n in range(12, 24)))
        await until(lambda: relay.status().stopped)
        assert list(relay.status().stopped) == [0]
        assert not relay.status().ready
        assert "has another event (another) than the outbox" in relay.status().stopped[0]
        mine = len(log.entries)
        await until(lambda: len(broker._log("orders", 1).entries) == 24 - _of_shard(small, 0))
        await asyncio.sleep(0.5)
        assert len(log.entries) == mine
        assert caplog.text.count("has another event") == 1
        log.tail = right
        await until(lambda: len(broker.stream()) == 24)
        await until(lambda: relay.status().ready)
    in_order(small, broker)


async def test_ids_that_begin_anew_stop_the_shard_and_are_told(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_shard, "COMPARE_EVERY_S", 0.2)
    init(postgres_url)
    desk, broker = Desk(postgres_url), Broker()
    async with relaying(desk, broker) as relay:
        await desk.commit(*(placed(n=n) for n in range(5)))
        await until(lambda: broker.numbers() == [0, 1, 2, 3, 4])
        desk.do("TRUNCATE event_outbox RESTART IDENTITY")
        await desk.commit(placed(n=5))
        await until(lambda: relay.status().stopped)
        assert "ids began anew" in relay.status().stopped[0]
        desk.do("SELECT setval('event_outbox_id_seq', 5)")
        desk.do("UPDATE event_outbox SET id = DEFAULT")
        await until(lambda: broker.numbers() == [0, 1, 2, 3, 4, 5])
    desk.close()


class Nameless(Broker):
    """One that has no name for a topic."""

    async def publish(self, batch: Batch) -> Any:
        if batch.topic == "orders":
            raise TopicError("choose a shorter one")
        return await super().publish(batch)


async def test_a_topic_that_the_broker_has_no_name_for_holds_up_no_other(small: Desk) -> None:
    broker = Nameless()
    async with relaying(small, broker) as relay:
        await small.commit(placed(1, n=0), placed(1, "bills", n=1), placed(1, n=2))
        await small.commit(placed(2, "bills", n=3))
        await until(lambda: broker.numbers("bills") == [1, 3])
        await until(lambda: relay.status().held == {"orders": "choose a shorter one"})


def _of_shard(desk: Desk, shard: int) -> int:
    slots = [row[0] for row in desk.ask("SELECT shard FROM event_outbox")]
    return sum(slot // 128 == shard for slot in slots)


@pytest.mark.usefixtures("comparing")
async def test_a_broker_that_forgot_and_has_another_event_is_not_published_over(
    small: Desk,
) -> None:
    """Its tail lies back, and what is there is not ours: two things were restored."""
    broker = Broker()
    async with relaying(small, broker) as relay:
        await small.commit(*(placed(n=n) for n in range(6)))
        await until(lambda: len(broker.stream()) == 6)
        broker.lose(3)
        log = broker._log("orders", 0)
        log.tail = Tail(log.tail.position, "another")
        await until(lambda: relay.status().stopped)
        assert len(broker.stream()) == 3
        broker.lose(3)  # the stream was deleted, to be filled anew
        await until(lambda: broker.numbers() == [0, 1, 2, 3, 4, 5])
        await until(lambda: not relay.status().stopped)


# --- sweeping, settings -------------------------------------------------------------------------


async def test_only_what_is_published_is_swept(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "SWEEP_EVERY_S", 0.05)
    broker = Broker(shards=2)
    broker.full = {"bills"}
    async with relaying(desk, broker, keep_s=0.0) as relay:
        await desk.commit(*(placed(n, n=n) for n in range(10)))
        await until(lambda: len(broker.stream()) == 10)
        await desk.commit(
            *(placed(n, topic, n=n) for n in range(10) for topic in ("bills", "orders"))
        )
        await until(lambda: len(broker.stream()) == 20)
        await until(lambda: relay.counts["swept"] >= 10)
        await asyncio.sleep(0.3)
        assert {row[0] for row in desk.events()} == {"bills", "orders"}
        assert sum(row[0] == "bills" for row in desk.events()) == 10
        broker.full = set()
        await until(lambda: len(broker.stream("bills")) == 10)
        await until(lambda: desk.rows() == 0)
    assert relay.counts["swept"] == 30


async def test_as_long_as_there_is_more_sweeping_goes_on(
    small: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a busy outbox would grow faster than it is swept."""
    monkeypatch.setattr(relay_module, "SWEEP_EVERY_S", 2.0)
    monkeypatch.setattr(relay_module, "SWEEP_ROWS", 2)
    broker, swept = Broker(), []
    async with relaying(small, broker, keep_s=0.0) as relay:
        sweep = relay.reader.sweep

        async def noted(**settings: Any) -> int:
            swept.append(ASYNC.now())
            return await sweep(**settings)

        monkeypatch.setattr(relay.reader, "sweep", noted)
        await small.commit(*(placed(n, n=n) for n in range(10)))
        await until(lambda: len(broker.stream()) == 10)
        await until(lambda: relay.counts["swept"] == 10)
    assert len(swept) >= 5
    assert swept[4] - swept[0] < 2.0


async def test_nothing_is_swept_where_somebody_else_does(
    small: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "SWEEP_EVERY_S", 0.02)
    broker = Broker()
    async with relaying(small, broker, keep_s=None):
        await small.commit(placed(n=1))
        await until(lambda: broker.numbers() == [1])
        await asyncio.sleep(0.3)
        assert small.rows() == 1


async def test_shards_are_divided_anew_there_and_back(desk: Desk) -> None:
    """What an earlier division left in a stream is no other story of the same outbox."""
    logs: dict[Any, Any] = {}
    for shards in (4, 2, 4):
        await _publish_in(desk, logs, shards)
    arrived = defaultdict(list)
    for message in Broker.stream(_over(logs, 4)):
        arrived[message.aggregate_id].append(message.seq)
    assert {tuple(sorted(seqs)) for seqs in arrived.values()} == {(1, 2, 3)}


def _over(logs: dict[Any, Any], shards: int) -> Broker:
    broker = Broker(shards)
    broker._logs = logs
    return broker


async def _publish_in(desk: Desk, logs: dict[Any, Any], shards: int) -> None:
    broker, store = _over(logs, shards), SQLStore(desk.url)
    await OutboxReader(store, shards=4).reshard(shards)
    await store.aclose()
    before = len(broker.stream())
    async with relaying(desk, broker) as relay:
        await desk.commit(*(placed(n, n=n) for n in range(16)))
        await until(lambda: len(broker.stream()) == before + 16)
        last = max(message.position for message in broker.stream())
        await until(lambda: set(relay.cursors) == set(range(shards)))
        await until(lambda: min(c.position for c in relay.cursors.values()) >= last)
        assert relay.status().ready


async def test_relays_of_another_name_go_on_where_those_before_were_swept(small: Desk) -> None:
    broker = Broker()
    async with relaying(small, broker, name="before") as relay:
        await small.commit(*(placed(n=n) for n in range(4)))
        await until(lambda: relay.cursors and relay.cursors[0].position == 4)
        assert await relay.reader.sweep(keep_s=0.0) == 4
    async with relaying(small, broker, name="after") as relay:
        await small.commit(*(placed(n=n) for n in range(4, 8)))
        await until(lambda: broker.numbers() == list(range(8)))
        assert relay.status().ready


async def test_another_number_of_shards_ends_the_relay_with_what_to_do(small: Desk) -> None:
    async with relaying(small, Broker(shards=2)) as relay:
        await until(lambda: relay.status().owned)
    with pytest.raises(SettingsError, match="have 2 shards, and this one was told 3"):
        await asyncio.wait_for(Relay(small.url, Broker(shards=3)).run(), 20)


async def test_a_relay_without_tables_says_what_to_do(tmp_path: Any) -> None:
    with pytest.raises(SettingsError, match="semel db"):
        await asyncio.wait_for(Relay(f"sqlite:///{tmp_path}/none.db", Broker()).run(), 20)


async def test_logs_of_a_quiet_life_are_empty(
    small: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    broker = Broker()
    async with relaying(small, broker):
        for n in range(20):
            await small.commit(placed(n=n))
        await until(lambda: len(broker.stream()) == 20)
    assert caplog.text == ""


def test_a_thread_can_tell_the_relay_to_stop(small: Desk) -> None:
    """As a signal handler of another loop would: through the loop it runs in."""
    broker = Broker()

    async def run() -> None:
        await small.commit(placed(n=1))
        async with relaying(small, broker) as relay:
            loop = asyncio.get_running_loop()
            await until(lambda: broker.numbers() == [1])
            threading.Thread(target=loop.call_soon_threadsafe, args=(relay.stop,)).start()
            await until(lambda: relay.status().owned == ())

    asyncio.run(run())
