"""The doctor: every row driven red and green, on real databases and brokers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from semel.brokers import connect
from semel.brokers.memory import MemoryBroker
from semel.brokers.redis import RedisBroker
from semel.brokers.sqlite import SQLiteBroker
from semel.colour import ASYNC
from semel.doctor import ROWS, Check, Thresholds, Visit, canary, examine
from semel.doctor import broker as broker_checks
from semel.doctor import outbox as outbox_checks
from semel.doctor.patient import Patient
from semel.errors import BrokerUnavailableError
from semel.inbox import PoisonError, SQLInbox
from semel.messages import CANARY, Batch, Message, Tail
from semel.outbox import Event, Outbox
from semel.parked import Parked
from semel.relay import Relay
from semel.shards import owners
from semel.stores.owners import key_of
from semel.stores.sql import SQLStore, init
from semel.stores.sql.doctor import ask, numbers
from semel.stores.sql.lines import open_engine, parse, with_driver
from semel.stores.sql.outbox_reading import OutboxReader
from semel.stores.sql.outbox_watermark import LOCKED
from semel.stores.sql.schema import ID_SEQUENCE
from semel.stores.sqlite import SQLiteStore
from semel.values import Terms
from semel.worker import Worker

OUTBOX = Outbox()
TABLES = (
    "event_outbox",
    "event_outbox_seq",
    "event_outbox_cursor",
    "event_outbox_mark",
    "event_parked",
    "inbox_mark",
    "inbox_message",
    "idempotency",
)


def placed(aggregate: object = 1, topic: str = "orders", **more: Any) -> Event:
    return Event("placed", "order", str(aggregate), {}, topic=topic, **more)


# --- databases ----------------------------------------------------------------------------------


class Desk:
    """A database with the tables in it, its producers, and whoever meddles with it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.kind = url.partition(":")[0]
        self.own = open_engine(parse(url))
        options = {"connect_args": {"timeout": 60}} if self.kind == "sqlite" else {}
        self.engine = sa.create_engine(with_driver(parse(url), "sync"), **options)
        emptied = "TRUNCATE" if self.kind == "postgresql" else "DELETE FROM"  # no dead rows
        self.do(*(f"{emptied} {table}" for table in TABLES))

    async def commit(self, *events: Event) -> None:
        await asyncio.to_thread(self._commit, events)

    def _commit(self, events: Sequence[Event]) -> None:
        with Session(self.engine) as session:
            for event in events:
                OUTBOX.add(session, event)
            session.commit()

    def do(self, *statements: str) -> None:
        with self.own.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def ask(self, select: str) -> list[Any]:
        with self.own.connect() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(select)]

    def count(self, table: str) -> int:
        return int(self.ask(f"SELECT COUNT(*) FROM {table}")[0][0])

    def age(self, table: str, column: str, **ago: float) -> None:
        """Make everything in it as old as this."""
        then = datetime.now(UTC) - timedelta(**ago)
        self.do(f"UPDATE {table} SET {column} = '{then:%Y-%m-%d %H:%M:%S.%f}'" + self._zone)

    @property
    def _zone(self) -> str:
        return "::timestamp AT TIME ZONE 'UTC'" if self.kind == "postgresql" else ""

    async def sweep(self) -> None:
        store = SQLStore(self.url)
        await OutboxReader(store).sweep(keep_s=0)
        await store.aclose()

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


def _url(request: pytest.FixtureRequest, kind: str) -> str:
    if kind == "sqlite":
        init(url := f"sqlite:///{request.getfixturevalue('tmp_path')}/shop.db")
        return url
    databases, server = (request.getfixturevalue(f) for f in ("databases", f"{kind}_server"))
    server.ensure_running()
    if kind not in databases:
        server.create_database(name := f"doctor_{uuid.uuid4().hex[:12]}")
        databases[kind] = server, name
        init(server.url(name))
    return str(server.url(databases[kind][1]))


@contextlib.contextmanager
def _desk(request: pytest.FixtureRequest, kind: str) -> Iterator[Desk]:
    desk = Desk(_url(request, kind))
    yield desk
    desk.close()


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    with _desk(request, request.param) as desk:
        yield desk


@pytest.fixture
def postgres(request: pytest.FixtureRequest) -> Iterator[Desk]:
    with _desk(request, "postgres") as desk:
        yield desk


@pytest.fixture
def small(request: pytest.FixtureRequest) -> Iterator[Desk]:
    """Where the database makes no difference."""
    with _desk(request, "sqlite") as desk:
        yield desk


@pytest.fixture(params=["postgres and redis", "mariadb and redis", "sqlite and sqlite"])
async def both(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Desk, Any]]:
    database, _, kind = request.param.partition(" and ")
    url = request.getfixturevalue("redis_url" if kind == "redis" else "tmp_path")
    to = url if kind == "redis" else f"sqlite:///{url}/broker.db"
    with _desk(request, database) as desk:
        broker = connect(to, shards=4)
        yield desk, broker
        await broker.aclose()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[RedisBroker]:
    broker = RedisBroker(redis_url, shards=2, maxlen=10)
    yield broker
    await broker.aclose()


# --- examining ----------------------------------------------------------------------------------


async def checks_of(desk: Desk, broker: Any = None, **settings: Any) -> dict[str, Check]:
    settings.setdefault("canary", False)
    settings.setdefault("wait_s", 30.0)
    found = await examine(desk.url, broker, **settings)
    assert [check.row for check in found] == [row.name for row in ROWS]
    return {check.row: check for check in found}


async def row(
    name: str,
    desk: Desk,
    broker: Any = None,
    *,
    consumers: Sequence[str] = (),
    relays: str = "default",
    wait_s: float = 30.0,
    thresholds: Thresholds | None = None,
) -> Check:
    """One row, as `examine` has it."""
    [wanted] = [row for row in ROWS if row.name == name]
    store = SQLStore(desk.url)
    limits = thresholds or Thresholds()
    try:
        return await Visit(Patient(store, broker, consumers, relays, wait_s, limits)).check(wanted)
    finally:
        await store.aclose()


@contextlib.asynccontextmanager
async def relaying(desk: Desk, broker: Any, **settings: Any) -> AsyncIterator[Relay]:
    """A relay that owns every shard."""
    relay = Relay(desk.url, broker, **{"lease_s": 2.0, **settings})
    running = asyncio.create_task(relay.run())
    try:
        await until(lambda: running.done() or taken(desk, relay.name) == broker.shards, 0.05)
        yield relay
    finally:
        relay.stop()
        await running


@contextlib.asynccontextmanager
async def working(desk: Desk, broker: Any, group: str = "billing") -> AsyncIterator[Worker]:
    """A worker that owns every shard, and does nothing about what it is handed."""
    inbox = SQLInbox(desk.url)
    worker = Worker(broker, group, inbox, lease_s=2.0)
    worker.on(topic="orders")(lambda message: None)
    running = asyncio.create_task(worker.run())
    try:
        await until(lambda: running.done() or len(worker.status().owned) == broker.shards, 0.05)
        yield worker
    finally:
        worker.stop()
        await running
        await inbox.aclose()


async def until(condition: Any, every_s: float = 0.005) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(every_s)


def taken(desk: Desk, name: str) -> int:
    """How many shards were ever taken by relays of this name."""
    cursors = f"event_outbox_cursor WHERE name = '{name}' AND fence > 0"
    return desk.count(cursors)


def published(desk: Desk) -> bool:
    """Has every shard moved?"""
    cursors = desk.ask("SELECT shards, position FROM event_outbox_cursor")
    return bool(cursors) and len(cursors) == cursors[0][0] and all(at for _, at in cursors)


async def relay_all(desk: Desk, broker: Any, **settings: Any) -> None:
    """Relay what there is, and stop."""
    store = SQLStore(desk.url)
    name = settings.get("name", "default")
    reader = OutboxReader(store, name=name, shards=broker.shards)
    async with relaying(desk, broker, **settings), asyncio.timeout(30):
        while (await reader.lag()).unpublished:
            await asyncio.sleep(0.01)
    await store.aclose()


async def read_all(broker: Any, topic: str = "orders", group: str = "billing") -> None:
    for shard in range(broker.shards):
        reader = await broker.consumer(topic, group, shard, name="test", fence=1)
        while page := await reader.read(1000):
            await reader.ack(page)
        await reader.close()


async def test_where_all_is_well_every_row_is_green(both: tuple[Desk, Any]) -> None:
    desk, broker = both
    await broker.join("orders", "billing")
    await desk.commit(*(placed(n) for n in range(20)))
    async with relaying(desk, broker), working(desk, broker):
        await until(lambda: published(desk), 0.05)
        checks = await checks_of(desk, broker, canary=True, consumers=["billing"])
    sound = {name for name, check in checks.items() if check.verdict == "ok"}
    sqlite = {"long transactions", "durability"} if desk.kind == "sqlite" else set()
    assert sound == {row.name for row in ROWS} - sqlite, checks
    assert {checks[name].verdict for name in sqlite} <= {"not checked"}
    assert not any(check.advice for check in checks.values())
    assert checks["canary"].figure.startswith("4 of 4 shards, in ")


async def test_without_a_broker_its_rows_are_not_checked(small: Desk) -> None:
    checks = await checks_of(small, canary=True)
    unchecked = {name for name, check in checks.items() if check.verdict == "not checked"}
    assert {row.name for row in ROWS if row.broker} <= unchecked
    assert checks["canary"].advice == "give its URL with --broker"


async def test_a_database_that_is_down_is_one_red_row() -> None:
    first, *rest = await examine("postgresql://127.0.0.1:1/shop")
    assert (first.row, first.verdict) == ("schema", "failed")
    assert "did not answer" in first.figure
    assert {check.verdict for check in rest} == {"not checked"}


async def test_a_table_that_may_not_be_read_is_not_a_database_that_is_down(
    postgres: Desk,
) -> None:
    user = f"reader_{uuid.uuid4().hex[:12]}"
    granted = [table for table in TABLES if table != "event_parked"]
    postgres.do(
        f"CREATE USER {user}",
        f"GRANT SELECT ON semel_schema, {', '.join(granted)} TO {user}",
        f"GRANT SELECT ON {ID_SEQUENCE} TO {user}",
    )
    try:
        url = parse(postgres.url).set(username=user, password=None)
        found = await examine(url.render_as_string(), canary=False)
    finally:
        postgres.do(f"DROP OWNED BY {user}", f"DROP USER {user}")
    checks = {check.row: check for check in found}
    assert checks["parked"].verdict == "failed"
    assert "permission denied for table event_parked" in checks["parked"].figure
    assert checks["lag"].verdict == checks["duplicates"].verdict == "ok"


async def test_an_engine_of_the_callers_will_do(small: Desk) -> None:
    engine = create_async_engine(with_driver(parse(small.url), "async"))
    broker = MemoryBroker()
    async with relaying(small, broker):
        found = await examine(engine, broker)
    assert [check.row for check in found if check.verdict not in ("ok", "not checked")] == []
    await engine.dispose()


async def test_a_store_of_the_callers_stays_open(small: Desk) -> None:
    store = SQLStore(small.url)
    await examine(store, canary=False)
    assert await owners(store, "relay:default", 1) == {}
    await store.aclose()


# --- schema -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["postgres", "mariadb", "sqlite"])
async def test_schema(request: pytest.FixtureRequest, kind: str, tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/own.db"
    if kind != "sqlite":
        url = request.getfixturevalue(f"{kind}_url")
    missing = (await examine(url, canary=False))[0]
    assert (missing.row, missing.verdict) == ("schema", "failed")
    assert "semel db init" in missing.advice

    init(url)
    desk = Desk(url)
    assert (await row("schema", desk)).verdict == "ok"
    desk.do("DROP TABLE inbox_mark", "DROP TABLE event_parked")
    gone = await row("schema", desk)
    assert gone.verdict == "failed"
    assert "table inbox_mark was made and is gone" in gone.figure
    assert (await row("lag", desk)).verdict == "ok"
    parked = await row("parked", desk)
    assert (parked.verdict, parked.advice) == ("not checked", "see `schema`")
    desk.close()


# --- shards -------------------------------------------------------------------------------------


async def test_shards(both: tuple[Desk, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    desk, broker = both
    never = await row("shards", desk, broker)
    assert never.verdict == "failed"
    assert never.figure == "no relay called 'default' has ever read this outbox"

    async with relaying(desk, broker) as relay:
        assert (await row("shards", desk, broker)).figure.startswith("4, owned by ")
        with monkeypatch.context() as patch:
            patch.setattr(outbox_checks, "HANDED_OVER_WITHIN_S", 0.0)
            patch.setattr(relay._shards, "_take", _nothing)
            await let_go(relay, 3)
            lost = await row("shards", desk, broker)
            assert (lost.verdict, lost.figure) == ("failed", "no relay owns shard 3")
        # Its owner takes it again, and who looks meanwhile looks twice.
        assert (await row("shards", desk, broker)).verdict == "ok"
    stopped = await row("shards", desk, broker)
    assert (stopped.verdict, stopped.figure) == ("failed", "no relay owns shard 0, 1, 2, 3")


async def _nothing(*_: Any) -> None: ...


async def let_go(relay: Relay, shard: int) -> None:
    relay._shards._holds[shard].over()
    await until(lambda: shard not in relay._shards._holds)


async def test_another_number_of_shards_is_told_once(small: Desk) -> None:
    await relay_all(small, MemoryBroker(shards=2))
    checks = await checks_of(small, MemoryBroker(shards=3), canary=True)
    assert checks["shards"].verdict == "failed"
    assert "have 2 shards, and the broker was opened with 3" in checks["shards"].figure
    for name in ("pending", "fullness", "tails", "canary"):
        assert (checks[name].verdict, checks[name].advice) == ("not checked", "see `shards`")
    assert small.count("event_outbox") == 0, "no canary was sent"


# --- lag, and who holds it up -------------------------------------------------------------------


async def test_lag(desk: Desk) -> None:
    broker = MemoryBroker()
    assert (await row("lag", desk)).figure == "0 ms, 0 unpublished"
    await desk.commit(placed(), placed())
    assert (await row("lag", desk)).verdict == "ok"
    desk.age("event_outbox", "created_at", seconds=30)
    late = await row("lag", desk)
    assert late.verdict == "warning"
    assert late.figure.endswith(" s, 2 unpublished")
    desk.age("event_outbox", "created_at", minutes=5)
    assert (await row("lag", desk)).verdict == "failed"
    assert (await row("lag", desk, thresholds=Thresholds(lag_s=600))).verdict == "warning"
    await relay_all(desk, broker)
    assert (await row("lag", desk)).verdict == "ok"


async def test_ids_that_begin_anew_are_no_lag_and_are_told(postgres: Desk) -> None:
    await postgres.commit(*[placed() for _ in range(5)])
    await relay_all(postgres, MemoryBroker())
    with postgres.engine.begin() as connection:
        connection.exec_driver_sql("TRUNCATE event_outbox RESTART IDENTITY")
    await postgres.commit(placed())
    found = await row("lag", postgres)
    assert (found.verdict, "began anew" in found.figure) == ("failed", True)


async def test_a_writer_that_relays_do_not_pass_is_named(postgres: Desk) -> None:
    limits = Thresholds(held_up_s=0.0)
    assert (await row("held up", postgres, thresholds=limits)).figure == "by nobody"
    with postgres.engine.connect() as connection:
        connection.exec_driver_sql(f"SELECT {LOCKED} FROM {ID_SEQUENCE} AS s")
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        held = await row("held up", postgres, thresholds=limits)
        assert held.verdict == "failed"
        assert held.figure.startswith(f"pid {pid} for ")
        assert "(idle in transaction): SELECT pg_backend_pid()" in held.figure
        assert held.advice == f"end it: SELECT pg_terminate_backend({pid})"
        assert (await row("held up", postgres)).verdict == "ok", "not for five seconds yet"
        connection.rollback()
    assert (await row("held up", postgres, thresholds=limits)).verdict == "ok"


# MariaDB shows what it saw before to whoever looks again within 0.1 s.
LOOK_S = 0.2


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
async def test_long_transactions(request: pytest.FixtureRequest, kind: str) -> None:
    me = "pg_backend_pid()" if kind == "postgres" else "CONNECTION_ID()"
    with _desk(request, kind) as desk:

        async def told() -> Check:
            await asyncio.sleep(LOOK_S)
            return await row("long transactions", desk, thresholds=Thresholds(open_s=0.05))

        with desk.engine.connect() as connection:
            connection.exec_driver_sql("INSERT INTO event_outbox_mark VALUES ('a', 1, NOW())")
            pid = connection.exec_driver_sql(f"SELECT {me}").scalar_one()
            async with asyncio.timeout(20):
                while f"pid {pid} for " not in (found := await told()).figure:
                    pass
            assert found.verdict == "warning"
            assert str(pid) in found.advice
            assert (await row("long transactions", desk)).verdict == "ok", "not for a minute yet"
            connection.rollback()
        async with asyncio.timeout(20):
            while f"pid {pid} for " in (await told()).figure:
                pass


async def test_who_may_not_see_transactions_is_told(
    request: pytest.FixtureRequest, mariadb_server: Any
) -> None:
    user = f"u{uuid.uuid4().hex[:12]}"
    with _desk(request, "mariadb") as desk:
        name = parse(desk.url).database
        desk.do(
            f"CREATE USER {user}@'%%' IDENTIFIED BY 'pw'",
            f"GRANT ALL ON {name}.* TO {user}@'%%'",
        )
        try:
            url = parse(desk.url).set(username=user, password="pw")
            found = await examine(url.render_as_string(hide_password=False), canary=False)
        finally:
            desk.do(f"DROP USER {user}@'%%'")
    checks = {check.row: check for check in found}
    assert checks["long transactions"].verdict == "not checked"
    assert "GRANT PROCESS" in checks["long transactions"].figure
    assert checks["lag"].verdict == "ok"


# --- numbers ------------------------------------------------------------------------------------


async def test_an_event_that_somebody_deleted_is_missed(desk: Desk) -> None:
    await desk.commit(*(placed(n) for n in (1, 1, 1, 2, 2)), placed(3, ordered=False))
    assert (await row("gaps", desk)).verdict == "ok"

    desk.do("DELETE FROM event_outbox WHERE aggregate_id = '1' AND seq = 2")
    hole = await row("gaps", desk)
    assert hole.verdict == "failed"
    assert "orders order/1: 1 of its numbers 1 to 3 are not in the outbox" in hole.figure
    desk.do("DELETE FROM event_outbox WHERE aggregate_id = '1'")
    assert (await row("gaps", desk)).verdict == "ok", "swept, as far as one can see"

    desk.do("DELETE FROM event_outbox WHERE aggregate_id = '2' AND seq = 2")
    last = await row("gaps", desk)
    assert "orders order/2: 1 of its numbers 1 to 2 are not in the outbox" in last.figure


async def test_what_is_swept_is_not_missed(desk: Desk) -> None:
    await desk.commit(*(placed(n % 3) for n in range(9)))
    await relay_all(desk, MemoryBroker())
    await desk.commit(placed(0), placed(1))
    await desk.sweep()
    assert 0 < desk.count("event_outbox") < 11
    assert (await row("gaps", desk)).verdict == (await row("duplicates", desk)).verdict == "ok"


async def test_commits_in_the_meantime_are_no_holes(postgres: Desk) -> None:
    """Rows and counters are from one moment."""
    stop = asyncio.Event()

    async def produce() -> None:
        while not stop.is_set():
            await postgres.commit(*(placed(n) for n in range(20)))

    producing = [asyncio.create_task(produce()) for _ in range(2)]
    store = SQLStore(postgres.url)
    try:
        for _ in range(30):
            assert await ask(store, numbers) == []
    finally:
        stop.set()
        await asyncio.gather(*producing)
        await store.aclose()


COPIED = (
    "shard, tenant_id, topic, aggregate_type, aggregate_id, seq, event_type, payload, headers, "
    "created_at"
)


async def test_duplicates(desk: Desk) -> None:
    await desk.commit(placed(), placed(), placed(2))
    assert (await row("duplicates", desk)).verdict == "ok"
    desk.do(
        f"INSERT INTO event_outbox ({COPIED}, event_id) SELECT {COPIED}, 'twice' "
        "FROM event_outbox WHERE aggregate_id = '1' AND seq = 2"
    )
    twice = await row("duplicates", desk)
    assert twice.verdict == "failed"
    assert twice.figure == "orders order/1: 1 of its numbers are there twice"

    desk.do("DELETE FROM event_outbox WHERE event_id = 'twice'")
    desk.do("UPDATE event_outbox_seq SET seq = 1 WHERE aggregate_id = '1'")
    behind = await row("duplicates", desk)
    assert behind.figure == "orders order/1: counter at 1, and 2 is taken"
    desk.do("DELETE FROM event_outbox_seq WHERE aggregate_id = '1'")
    assert "counter at 0" in (await row("duplicates", desk)).figure

    desk.do("DELETE FROM event_outbox WHERE aggregate_id = '1'")
    assert (await row("duplicates", desk)).verdict == "ok"


# --- what waits ---------------------------------------------------------------------------------


def message(seq: int | None = 1, aggregate: str = "1") -> Message:
    return Message(
        position=seq or 1,
        id=str(uuid.uuid4()),
        type="placed",
        topic="orders",
        tenant="",
        aggregate_type="order",
        aggregate_id=aggregate,
        seq=seq,
        payload="{}",
        time=datetime.now(UTC),
    )


async def fine(message: Message, session: Any) -> None: ...


async def poison(message: Message, session: Any) -> None:
    raise PoisonError("no such product")


async def test_a_consumer_that_waits_for_an_event_is_told_of(desk: Desk) -> None:
    inbox = SQLInbox(desk.url)
    await inbox.apply("billing", [message(1), message(3)], fine)
    waits = await row("gaps", desk)
    assert waits.verdict == "warning"
    assert "billing: 1 wait for one that has not come" in waits.figure
    assert (await row("gaps", desk, consumers=["mail"])).verdict == "ok"
    desk.age("event_parked", "parked_at", minutes=10)
    assert (await row("gaps", desk)).verdict == "failed"
    assert (await row("parked", desk)).verdict == "ok", "nobody has to do anything but find it"

    await inbox.apply("billing", [message(2)], fine)
    await inbox.retry("billing", (0, 255), fine)
    assert (await row("gaps", desk)).verdict == "ok"
    await inbox.aclose()


async def test_parked(desk: Desk) -> None:
    inbox = SQLInbox(desk.url)
    assert (await row("parked", desk)).figure == "nothing of anybody"
    await inbox.apply("billing", [message(1, "a"), message(2, "a"), message(1, "b")], poison)
    found = await row("parked", desk, consumers=["billing"])
    assert found.verdict == "warning"
    assert found.figure.startswith("billing: 2, the oldest for ")
    assert "semel parked list URL --consumer billing --state parked" in found.advice
    assert (await row("parked", desk, consumers=["mail"])).figure == "nothing of mail"
    desk.age("event_parked", "parked_at", days=3)
    assert (await row("parked", desk)).verdict == "failed"
    assert "the oldest for 3 d" in (await row("parked", desk)).figure

    parked = Parked(inbox)
    for each in await parked.list(consumer="billing"):
        await parked.skip(each.sequence)
    await inbox.retry("billing", (0, 255), fine)
    assert (await row("parked", desk)).verdict == "ok"
    await inbox.aclose()


async def test_retention(desk: Desk) -> None:
    inbox = SQLInbox(desk.url)
    assert "the outbox is empty" in (await row("retention", desk)).figure
    await desk.commit(placed())
    await inbox.apply("billing", [message(None), message(1)], poison)
    desk.age("event_parked", "parked_at", days=6)
    assert (await row("retention", desk)).verdict == "ok"
    desk.age("event_parked", "parked_at", days=8)
    old = await row("retention", desk)
    assert old.verdict == "warning"
    assert old.figure.startswith("billing: an event without a number waits for 8 d")
    desk.do("DELETE FROM event_parked WHERE seq = 0")
    assert (await row("retention", desk)).verdict == "ok", "numbers are remembered for ever"

    desk.age("event_outbox", "created_at", days=8)
    assert "the outbox goes back 8 d" in (await row("retention", desk)).figure
    longer = Thresholds(retention_s=30 * 86_400)
    assert (await row("retention", desk, thresholds=longer)).verdict == "ok"
    await inbox.aclose()


# --- bloat --------------------------------------------------------------------------------------


async def test_dead_rows(postgres: Desk) -> None:
    limits = Thresholds(dead_rows=100)
    assert (await row("bloat", postgres, thresholds=limits)).verdict == "ok"
    await postgres.commit(*(placed() for _ in range(300)))
    postgres.do("DELETE FROM event_outbox")
    # A server tells of what it has counted a little later.
    async with asyncio.timeout(30):
        while (found := await row("bloat", postgres, thresholds=limits)).verdict == "ok":
            await asyncio.sleep(0.1)
    assert found.verdict == "warning"
    assert "event_outbox" in found.figure
    assert " dead rows beside 0 live ones, vacuumed " in found.figure
    assert (await row("bloat", postgres)).verdict == "ok", "too few to be worth a word"
    postgres.do("VACUUM event_outbox")
    async with asyncio.timeout(30):
        while (await row("bloat", postgres, thresholds=limits)).verdict != "ok":
            await asyncio.sleep(0.1)


async def test_what_nobody_sweeps_is_told(desk: Desk) -> None:
    broker = MemoryBroker()
    await desk.commit(placed())
    await relay_all(desk, broker)
    desk.age("event_outbox", "created_at", hours=2)
    assert (await row("bloat", desk)).verdict == "ok"
    desk.age("event_outbox", "created_at", hours=3)
    left = await row("bloat", desk)
    assert left.verdict == "warning"
    assert "the oldest event is 3 h old, published, and not swept" in left.figure
    for keep_s in (None, 86_400.0):
        thresholds = Thresholds(keep_s=keep_s)
        assert (await row("bloat", desk, thresholds=thresholds)).verdict == "ok"
    await desk.sweep()
    assert (await row("bloat", desk)).verdict == "ok"


async def test_relays_that_nobody_runs_any_more_keep_everything(small: Desk) -> None:
    await relay_all(small, MemoryBroker(), name="audit")
    await small.commit(placed())
    await relay_all(small, MemoryBroker())
    small.age("event_outbox", "created_at", hours=3)
    kept = await row("bloat", small)
    assert kept.verdict == "warning"
    assert "kept for the relays 'audit'" in kept.figure
    small.do("DELETE FROM event_outbox_cursor WHERE name = 'audit'")
    await small.sweep()
    assert (await row("bloat", small)).verdict == "ok"


async def test_an_inbox_that_nobody_sweeps_is_told(desk: Desk) -> None:
    inbox = SQLInbox(desk.url)
    await inbox.apply("billing", [message(None)], fine)
    desk.age("inbox_message", "received_at", days=6.9)
    assert (await row("bloat", desk)).verdict == "ok"
    desk.age("inbox_message", "received_at", days=8)
    assert "inbox_message goes back 8 d, and is not swept" in (await row("bloat", desk)).figure
    assert await inbox.sweep() == 1
    assert (await row("bloat", desk)).verdict == "ok"
    await inbox.aclose()


# --- the broker ---------------------------------------------------------------------------------


async def test_pending_at_redis(postgres: Desk, redis: RedisBroker, redis_server: Any) -> None:
    await redis.join("orders", "billing")
    await postgres.commit(placed())
    await relay_all(postgres, redis)
    assert (await row("pending", postgres, redis)).figure == "billing: 1 unread, 0 pending"
    [shard] = [n for n in range(2) if (await redis.backlog("orders", n)).length]
    reader = await redis.consumer("orders", "billing", shard, name="me", fence=1)
    [delivery] = await reader.read(10)
    assert (await row("pending", postgres, redis)).figure == "billing: 0 unread, 1 pending"

    idle = ("IDLE", str(600_000), "JUSTID")
    key, id = f"orders:{shard}", delivery.token.decode()
    [row_] = await _redis(redis_server, "XPENDING", key, "billing", "-", "+", 1)
    await _redis(redis_server, "XCLAIM", key, "billing", row_[1], 0, id, *idle)
    late = await row("pending", postgres, redis)
    assert late.verdict == "failed"
    assert late.figure == f"billing: 1 pending in shard {shard} of orders, the oldest for 10 min"
    assert (await row("pending", postgres, redis, consumers=["mail"])).verdict == "warning"

    await reader.ack([delivery])
    assert (await row("pending", postgres, redis)).verdict == "ok"


async def _redis(server: Any, *words: Any) -> Any:
    from support.servers import command

    return await asyncio.to_thread(command, server.port, *words)


async def test_pending_at_sqlite(small: Desk, tmp_path: Any) -> None:
    broker = SQLiteBroker(tmp_path / "broker.db")
    await small.commit(placed())
    await relay_all(small, broker)
    reader = await broker.consumer("orders", "billing", 0, name="me", fence=1)
    found = await reader.read(10)
    assert (await row("pending", small, broker)).verdict == "ok"
    broker._connections.write(lambda c: c.execute("UPDATE broker_pending SET since = since - 600"))
    assert (await row("pending", small, broker)).verdict == "failed"
    await reader.ack(found)
    assert (await row("pending", small, broker)).verdict == "ok"
    await broker.aclose()


async def test_a_consumer_that_nobody_knows_is_told_of(small: Desk) -> None:
    broker = MemoryBroker()
    await broker.join("orders", "billing")
    await small.commit(placed())
    await relay_all(small, broker)
    known = await row("pending", small, broker, consumers=["billing"])
    unknown = await row("pending", small, broker, consumers=["billing", "mial"])
    assert (known.verdict, unknown.verdict) == ("ok", "warning")
    assert unknown.figure == "mial has joined none of the topics that were published to"


async def test_a_group_with_something_to_do_and_no_worker_is_told_of(
    both: tuple[Desk, Any],
) -> None:
    desk, broker = both
    await broker.join("orders", "billing")
    await broker.join("orders", "mail")
    await relay_all(desk, broker)
    assert (await row("workers", desk, broker)).verdict == "ok"
    await desk.commit(*(placed(n) for n in range(20)))
    await relay_all(desk, broker)
    await read_all(broker, group="mail")
    nobody = await row("workers", desk, broker)
    assert nobody.verdict == "warning"
    assert nobody.figure.startswith("billing: 20 unread, and no worker of it is seen")
    assert "mail: nothing to do, no worker" in nobody.figure
    assert nobody.advice.startswith("start its workers")
    assert (await row("workers", desk, broker, consumers=["mail"])).verdict == "ok"
    async with working(desk, broker) as worker:
        found = await row("workers", desk, broker, consumers=["billing"])
        assert (found.verdict, found.advice) == ("ok", "")
        assert found.figure.startswith("billing: 4 of 4 shards owned by ")
        await until(lambda: worker.status().topics["orders"].applied == 20)
    assert (await row("workers", desk, broker)).verdict == "ok"


async def test_what_is_due_in_an_inbox_without_a_worker_is_told_of(small: Desk) -> None:
    broker, inbox = MemoryBroker(), SQLInbox(small.url)
    await broker.join("orders", "billing")

    def fail(message: Message, session: Any) -> None:
        raise PoisonError("bad")

    await small.commit(placed())
    await relay_all(small, broker)
    await read_all(broker)
    await inbox.apply("billing", [message()], fail)
    assert (await row("workers", small, broker)).verdict == "ok"  # it waits for people
    [parked] = await Parked(inbox).list()
    await Parked(inbox).replay(parked.sequence)
    found = await row("workers", small, broker)
    assert found.verdict == "warning"
    assert found.figure.startswith("billing: 1 to be tried again, and no worker of it is seen")
    await inbox.aclose()


async def test_a_shard_of_a_group_that_nobody_owns_is_told_of(
    small: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_checks, "HANDED_OVER_WITHIN_S", 0.0)
    broker = MemoryBroker(shards=2)
    await broker.join("orders", "billing")
    await small.commit(*(placed(n) for n in range(20)))
    await relay_all(small, broker)
    store = SQLiteStore(f"{parse(small.url).database}-workers")
    terms = Terms(lease_s=60, ttl_s=60)
    for shard, verdict in ((0, "warning"), (1, "ok")):
        key = key_of("worker:billing", f"shard {shard}")
        await store.ledger(ASYNC).claim(key, attempt=f"web-1:{shard}/x", terms=terms)
        found = await row("workers", small, broker)
        assert found.verdict == verdict, found
        told = "no worker of it is seen on shard 1" if shard == 0 else "owned by web-1:0, web-1:1"
        assert told in found.figure
    store.close()


@pytest.mark.parametrize("kind", ["redis", "sqlite"])
async def test_fullness(request: pytest.FixtureRequest, small: Desk, kind: str) -> None:
    where = request.getfixturevalue("redis_url" if kind == "redis" else "tmp_path")
    to = where if kind == "redis" else f"sqlite:///{where}/broker.db"
    broker = connect(to, maxlen=10)
    empty = await row("fullness", small, broker)
    assert (empty.verdict, empty.figure) == ("ok", "nothing was published yet")

    async with relaying(small, broker, batch=1):
        await small.commit(placed())
        await until(lambda: published(small), 0.05)
        nobody = await row("fullness", small, broker)
        assert nobody.verdict == "warning"
        assert nobody.figure == "orders has 1 entries and no group, so nothing of it may be trimmed"

        await broker.join("orders", "billing")
        assert (await row("fullness", small, broker)).figure == "at most 1 in a shard, target 10"
        await small.commit(*(placed() for _ in range(11)))
        await _until_length(broker, 12)
        long = await row("fullness", small, broker)
        assert long.verdict == "warning"
        assert "has 12 entries, 12 of them for group billing" in long.figure

        await small.commit(*(placed() for _ in range(20)))
        await _until_length(broker, 20)
        full = await row("fullness", small, broker)
        assert full.verdict == "failed"
        assert "20 entries, twice its target: the relay waits for group billing" in full.figure
        async with asyncio.timeout(30):
            while (await row("fullness", small, broker)).verdict != "ok":
                await read_all(broker)
    await broker.aclose()


async def _until_length(broker: Any, length: int) -> None:
    async with asyncio.timeout(30):
        while (await broker.backlog("orders", 0)).length < length:
            await asyncio.sleep(0.01)


async def test_a_full_topic_without_a_group_has_failed(small: Desk) -> None:
    broker = MemoryBroker(maxlen=2)
    async with relaying(small, broker, batch=1):
        await small.commit(*(placed() for _ in range(9)))
        await _until_length(broker, 4)
        checks = await checks_of(small, broker)
    assert checks["fullness"].verdict == "failed"
    assert checks["lag"].figure.endswith("5 unpublished; behind the others: orders")


async def test_a_busy_topic_of_the_length_it_aims_at_is_well(small: Desk) -> None:
    broker = MemoryBroker(maxlen=10)
    await broker.join("orders", "billing")
    async with relaying(small, broker, batch=1):
        for _ in range(15):
            await small.commit(placed())
            async with asyncio.timeout(30):
                while not (await broker.backlog("orders", 0)).groups[0].unread:
                    await asyncio.sleep(0.005)
            await read_all(broker)
        assert (await broker.backlog("orders", 0)).length >= 10
        assert (await row("fullness", small, broker)).verdict == "ok"


async def test_durability_of_redis(small: Desk, redis: RedisBroker, redis_server: Any) -> None:
    async def config(**settings: str) -> None:
        for name, said in settings.items():
            await _redis(redis_server, "CONFIG", "SET", name.replace("_", "-"), said)

    assert (await row("durability", small, redis)).verdict == "ok"
    try:
        await config(maxmemory="100mb", maxmemory_policy="volatile-lru")
        assert (await row("durability", small, redis)).verdict == "ok", "streams do not expire"
        await config(maxmemory_policy="allkeys-lru")
        evicts = await row("durability", small, redis)
        assert evicts.verdict == "failed"
        assert evicts.figure.startswith("eviction: maxmemory-policy allkeys-lru deletes streams")
        assert evicts.advice == "set maxmemory-policy noeviction"
        await config(maxmemory="0")
        assert (await row("durability", small, redis)).verdict == "ok"
        await config(appendonly="no")
        forgets = await row("durability", small, redis)
        assert forgets.verdict == "warning"
        assert forgets.advice == "set appendonly yes"
        await config(save="3600 1")
        assert (await row("durability", small, redis)).verdict == "ok"
    finally:
        await config(maxmemory="0", maxmemory_policy="noeviction", appendonly="yes", save="")


async def test_a_broker_that_is_down_is_a_red_row(
    small: Desk, redis: RedisBroker, redis_server: Any
) -> None:
    await small.commit(placed())
    await relay_all(small, redis)
    redis_server.kill()
    checks = await checks_of(small, redis, canary=True, wait_s=0.5)
    assert checks["pending"].verdict == checks["canary"].verdict == "failed"
    assert checks["pending"].advice == "see that the broker is up, and its URL"
    assert {checks[name].verdict for name in ("fullness", "durability", "tails")} == {"not checked"}
    assert small.count("event_outbox") == 1, "a canary that nobody could read is not sent"


# --- the broker against the outbox --------------------------------------------------------------


@pytest.fixture
def looks_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_checks, "LOOK_AGAIN_S", 0.05)


@pytest.mark.usefixtures("looks_again_soon")
async def test_a_broker_that_has_lost_its_end_is_told_of(
    both: tuple[Desk, Any], request: pytest.FixtureRequest
) -> None:
    desk, broker = both
    await desk.commit(*(placed(n) for n in range(8)))
    await relay_all(desk, broker)
    assert (await row("tails", desk, broker)).verdict == "ok"
    if isinstance(broker, RedisBroker):
        await _redis(request.getfixturevalue("redis_server"), "FLUSHALL")
    else:
        tables = ("broker_shard", "broker_entry")
        for table in tables:
            broker._connections.write(lambda c, table=table: c.execute(f"DELETE FROM {table}"))
    lost = await row("tails", desk, broker)
    assert lost.verdict == "failed"
    assert "of orders ends at 0, and " in lost.figure
    assert "are swept and gone" not in lost.figure
    await desk.sweep()
    assert "are swept and gone" in (await row("tails", desk, broker)).figure
    await desk.commit(*(placed(n) for n in range(8)))
    await relay_all(desk, broker)
    assert (await row("tails", desk, broker)).verdict == "ok"


@pytest.mark.usefixtures("looks_again_soon")
async def test_an_outbox_from_an_older_copy_is_told_of(both: tuple[Desk, Any]) -> None:
    desk, broker = both
    await desk.commit(placed())
    await relay_all(desk, broker)
    [cursor] = [c for c in desk.ask("SELECT shard, tails FROM event_outbox_cursor") if "or" in c[1]]
    shard, tails = cursor
    other = json.dumps({"orders": [json.loads(tails)["orders"][0], "another"]})
    desk.do(f"UPDATE event_outbox_cursor SET tails = '{other}' WHERE shard = {shard}")
    forked = await row("tails", desk, broker)
    assert forked.verdict == "failed"
    assert "the outbox has not" in forked.figure
    desk.do(f"UPDATE event_outbox_cursor SET tails = '{tails}' WHERE shard = {shard}")
    assert (await row("tails", desk, broker)).verdict == "ok"


@pytest.mark.usefixtures("looks_again_soon")
async def test_a_broker_that_is_ahead_is_told_of_unless_a_relay_is_just_at_it(
    both: tuple[Desk, Any],
) -> None:
    desk, broker = both
    await desk.commit(placed())
    await relay_all(desk, broker)
    await desk.commit(placed())
    store = SQLStore(desk.url)
    await OutboxReader(store, shards=4).news()  # which gives out positions on MariaDB
    await store.aclose()
    place = "position" if desk.kind == "mysql" else "id"
    [(position, id)] = desk.ask(f"SELECT {place}, event_id FROM event_outbox WHERE seq = 2")
    [shard] = [n for n in range(4) if (await broker.backlog("orders", n)).length]

    async def publish(at: int, id: str) -> None:
        follows = await broker.tail("orders", shard)
        more = Message(at, id, "placed", "orders", "", "order", "1", 2, "{}", datetime.now(UTC))
        await broker.publish(Batch("orders", shard, 2**60, follows, [more]))

    await publish(position, id)
    assert (await row("tails", desk, broker)).verdict == "ok", "published, and not written down"
    await publish(position + 1000, "nobody-s")
    ahead = await row("tails", desk, broker)
    assert ahead.verdict == "failed"
    assert f"event nobody-s at {position + 1000}, the outbox has not" in ahead.figure


@pytest.mark.usefixtures("looks_again_soon")
async def test_an_entry_of_a_stranger_is_told_of(
    small: Desk, redis_url: str, redis_server: Any
) -> None:
    broker = RedisBroker(redis_url)
    await small.commit(placed())
    await relay_all(small, broker)
    await _redis(redis_server, "XADD", "orders", "*", "hello", "world")
    strange = await row("tails", small, broker)
    assert strange.verdict == "failed"
    assert "has event unknown at " in strange.figure
    await broker.aclose()


# --- the canary ---------------------------------------------------------------------------------


def canaries_in(desk: Desk) -> int:
    return int(
        desk.ask("SELECT COUNT(*) FROM event_outbox WHERE topic LIKE 'semel.canary.%%'")[0][0]
    )


async def test_without_a_relay_every_shard_is_named_and_nothing_piles_up(
    both: tuple[Desk, Any],
) -> None:
    desk, broker = both
    for _ in range(3):
        dead = await row("canary", desk, broker, wait_s=0.05)
        assert dead.verdict == "failed"
        assert dead.figure == "shard 0, 1, 2, 3: not here after 50 ms"
        assert dead.advice == "no relay owns it: start `semel relay URL --to URL --name default`"
    assert canaries_in(desk) == 4

    waits = asyncio.create_task(row("canary", desk, broker))
    await asyncio.sleep(0.2)
    async with relaying(desk, broker):
        alive = await waits
        assert (alive.verdict, alive.figure[:15]) == ("ok", "4 of 4 shards, ")
        assert canaries_in(desk) == 4, "those that were on their way have come"
        assert (await row("canary", desk, broker)).verdict == "ok"
        assert canaries_in(desk) == 8


async def test_one_that_has_come_before_its_relay_wrote_that_down_is_not_waited_for(
    small: Desk,
) -> None:
    broker = MemoryBroker()
    async with relaying(small, broker) as relay:
        free, advance = asyncio.Event(), relay.reader.advance

        async def late(*args: Any, **more: Any) -> Any:
            await free.wait()
            return await advance(*args, **more)

        relay.reader.advance = late  # type: ignore[method-assign]
        assert (await row("canary", small, broker)).verdict == "ok"
        another = asyncio.create_task(row("canary", small, broker, wait_s=10.0))
        await until(lambda: canaries_in(small) == 2 or another.done(), 0.05)
        free.set()
        assert (await another).verdict == "ok"


async def test_one_shard_that_nobody_owns_is_named(small: Desk) -> None:
    broker = MemoryBroker(shards=2)
    async with relaying(small, broker) as relay:
        relay._shards._take = _nothing  # type: ignore[method-assign]
        await let_go(relay, 1)
        found = await row("canary", small, broker, wait_s=0.5)
        assert found.verdict == "failed"
        assert found.figure.startswith("shard 1: not here after 500 ms; 1 of 2 shards, in ")
        assert "no relay owns it" in found.advice


class Stubborn(MemoryBroker):
    """Takes nothing."""

    async def publish(self, batch: Batch) -> Any:
        raise BrokerUnavailableError("not now")


async def test_a_relay_that_stands_still_is_named(small: Desk) -> None:
    broker = Stubborn()
    async with relaying(small, broker):
        stuck = await row("canary", small, broker, wait_s=0.1)
    assert stuck.verdict == "failed"
    assert "does not publish it: see its log and /readyz" in stuck.advice


async def test_the_broker_of_somebody_else_is_told_and_sent_to_once(small: Desk) -> None:
    theirs, other = MemoryBroker(), MemoryBroker()
    async with relaying(small, theirs):
        first = await row("canary", small, other, wait_s=1.0)
        assert (first.verdict, first.advice) == ("failed", canary.ELSEWHERE)
        for _ in range(3):
            again = await row("canary", small, other, wait_s=0.1)
            assert (again.verdict, again.advice) == ("failed", canary.ELSEWHERE)
            assert again.figure == "shard 0: the last one never came"
        assert canaries_in(small) == 1
        assert (await row("canary", small, theirs)).verdict == "ok"


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis", "nats"])
async def test_however_often_it_is_run_little_stays(
    request: pytest.FixtureRequest, small: Desk, kind: str
) -> None:
    to = {
        "memory": lambda: "memory://",
        "sqlite": lambda: f"sqlite:///{request.getfixturevalue('tmp_path')}/broker.db",
        "redis": lambda: request.getfixturevalue("redis_url"),
        "nats": lambda: request.getfixturevalue("nats_url"),
    }[kind]()
    broker = connect(to, shards=2)
    async with relaying(small, broker):
        for _ in range(canary.KEPT + 3):
            found = await row("canary", small, broker)
            assert found.verdict == "ok", found
    [(topic,)] = small.ask("SELECT DISTINCT topic FROM event_outbox")
    for shard in range(2):
        backlog = await broker.backlog(topic, shard)
        assert backlog.length == canary.KEPT
        [group] = backlog.groups
        assert (group.group, group.unread, group.pending) == (canary.GROUP, 0, 0)
    assert small.count("event_outbox_seq") == 2
    await small.sweep()
    assert small.count("event_outbox") == 0
    assert small.count("idempotency") == 1 + 2 + 1, "the doctor's, two shards and a seat"
    await broker.aclose()


async def test_trimming_passes_nothing_that_is_not_read(small: Desk, redis: RedisBroker) -> None:
    memory = MemoryBroker(shards=2)
    for broker in (redis, memory):
        small.do(*(f"DELETE FROM {table}" for table in TABLES))
        await broker.join("orders", "slow")
        await small.commit(*(placed(n) for n in range(8)))
        await relay_all(small, broker)
        await broker.trim("orders", 0)
        assert sum([(await broker.backlog("orders", n)).length for n in range(2)]) == 8
        await read_all(broker, group="slow")
        await broker.trim("orders", 1)
        assert [(await broker.backlog("orders", n)).length for n in range(2)] == [1, 1]
        await broker.trim("nowhere", 0)


async def test_two_doctors_do_not_take_each_others_canary(small: Desk) -> None:
    broker = MemoryBroker()
    async with relaying(small, broker):
        both = await asyncio.gather(*(row("canary", small, broker, wait_s=5.0) for _ in range(2)))
    verdicts = sorted(check.verdict for check in both)
    assert verdicts in (["not checked", "ok"], ["ok", "ok"])
    store = SQLStore(small.url)
    claim = await store.ledger(ASYNC).claim(
        _doctors_key(), attempt="a/1", terms=canary.Terms(lease_s=60)
    )
    assert isinstance(claim, canary.Won)
    busy = await row("canary", small, broker)
    assert (busy.verdict, busy.figure) == ("not checked", BUSY)
    await store.aclose()


def _doctors_key() -> Any:
    return canary.make_key("canary default", operation="semel.doctor", per_operation=True)


async def test_relays_of_another_name_pass_the_canary_over(small: Desk) -> None:
    ours, theirs = MemoryBroker(), MemoryBroker(shards=3)
    async with relaying(small, ours), relaying(small, theirs, name="audit"):
        assert (await row("canary", small, ours)).verdict == "ok"
        audit = await row("canary", small, theirs, relays="audit")
        assert audit.figure.startswith("3 of 3 shards")
        await small.commit(placed())
        async with asyncio.timeout(30):
            while not (await ours.tail("orders", 0)).position:
                await asyncio.sleep(0.01)
    assert _topics(ours) & _topics(theirs) <= {"orders"}
    assert len([topic for topic in _topics(ours) if topic.startswith(CANARY)]) == 1


def _topics(broker: MemoryBroker) -> set[str]:
    return {topic for (topic, _), log in broker._logs.items() if log.entries}


async def test_two_outboxes_may_have_one_broker(small: Desk, tmp_path: Any) -> None:
    """In one topic, each would take the other's canary for a fork, and stand still."""
    init(url := f"sqlite:///{tmp_path}/other.db")
    other, broker = Desk(url), MemoryBroker()
    async with relaying(small, broker) as one, relaying(other, broker) as two:
        for desk in (small, other, small, other):
            assert (await row("canary", desk, broker)).verdict == "ok"
        assert one.status().ready
        assert two.status().ready
    other.close()


# --- a doctor that dies -------------------------------------------------------------------------


class DiedError(BaseException):
    """Nothing is said any more, as after kill -9."""


class Mortal:
    """Passes calls on, and after so many of them nothing."""

    def __init__(self, real: Any, life: list[int]) -> None:
        self._real = real
        self._life = life

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **more: Any) -> Any:
            self._live_on()  # or die before it was heard
            answer = await found(*args, **more)
            self._live_on()  # or before it has answered
            return Mortal(answer, self._life) if name == "consumer" else answer

        return call

    def _live_on(self) -> None:
        self._life[0] -= 1
        if self._life[0] < 0:
            raise DiedError


async def test_a_doctor_may_die_at_any_moment(small: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is green, and there is not one canary more than doctors."""
    monkeypatch.setattr(canary, "LEASE_S", -4.9)  # with wait_s, a lease of 0.1 s
    broker, died = MemoryBroker(), 0
    async with relaying(small, broker):
        while await _dies_after(died, small, broker):
            died += 1
            async with asyncio.timeout(10):
                while (found := await row("canary", small, broker, wait_s=5.0)).figure == BUSY:
                    await asyncio.sleep(0.02)
            assert found.verdict == "ok", (died, found)
            assert canaries_in(small) <= 2 * died
    assert died > 10


BUSY = "another doctor is at it"


async def _dies_after(calls: int, desk: Desk, broker: MemoryBroker) -> bool:
    store, life = SQLStore(desk.url), [calls]
    ledger = Mortal(store.ledger(ASYNC), life)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "ledger", lambda _: ledger)
        patient = Patient(store, Mortal(broker, life), [], "default", 5.0, Thresholds())
        try:
            await canary.canary(patient)
        except DiedError:
            return True
        else:
            return False
        finally:
            await store.aclose()


async def test_a_tail_is_what_it_was(small: Desk) -> None:
    """Nothing but the canary changes anything."""
    broker = MemoryBroker()
    await broker.join("orders", "billing")
    await small.commit(*(placed(n) for n in range(5)))
    await relay_all(small, broker)
    before = {table: small.ask(f"SELECT * FROM {table}") for table in TABLES}
    tail = await broker.tail("orders", 0)
    await examine(small.url, broker, canary=False)
    assert {table: small.ask(f"SELECT * FROM {table}") for table in TABLES} == before
    assert await broker.tail("orders", 0) == tail != Tail()
