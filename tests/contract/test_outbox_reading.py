"""Reading the outbox on PostgreSQL, MariaDB and SQLite: in order, to the end, by the owner only."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import uuid
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from semel.errors import SettingsError
from semel.messages import SLOTS, Tail, shard_of
from semel.outbox import Event, Outbox
from semel.stores.sql import SQLStore, init
from semel.stores.sql import outbox_cursor as cursors
from semel.stores.sql import outbox_reading as reading
from semel.stores.sql.lines import open_engine, parse, with_driver
from semel.stores.sql.outbox_reading import Lane, OutboxReader

pytestmark = pytest.mark.contract

OUTBOX = Outbox(routes={"placed": "orders"})
TABLES = ("event_outbox", "event_outbox_seq", "event_outbox_cursor", "event_outbox_mark")


def placed(aggregate="7", payload=None, **more):
    return Event("placed", "order", aggregate, {} if payload is None else payload, **more)


class Desk:
    """A database with the tables in it, and ways to write to it and to look."""

    def __init__(self, url):
        self.url = url
        self.own = open_engine(parse(url))
        self.engine = self.new_engine()
        self.store = SQLStore(url)

    def new_engine(self):
        options = {"connect_args": {"timeout": 60}} if self.url.startswith("sqlite") else {}
        return sa.create_engine(with_driver(parse(self.url), "sync"), **options)

    @property
    def name(self):
        return parse(self.url).drivername.replace("mariadb", "mysql")

    def commit(self, *events):
        with Session(self.engine) as session:
            for event in events:
                OUTBOX.add(session, event)
            session.commit()

    def do(self, *statements):
        with self.own.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def ask(self, select):
        with self.own.connect() as connection:
            return connection.exec_driver_sql(select).mappings().all()

    def reader(self, **options):
        return OutboxReader(self.store, **options)

    async def close(self):
        await self.store.aclose()
        self.engine.dispose()
        self.own.dispose()


class Databases:
    """One per server for the whole file: making the tables takes longer than most tests here."""

    def __init__(self):
        self.made = {}

    def get(self, server):
        server.ensure_running()
        if server.name not in self.made:
            name = f"reading_{uuid.uuid4().hex[:12]}"
            server.create_database(name)
            self.made[server.name] = server, name
            init(server.url(name))
        return server.url(self.made[server.name][1])

    def drop(self):
        for server, name in self.made.values():
            server.ensure_running()
            server.drop_database(name)


@pytest.fixture(scope="module")
def databases():
    databases = Databases()
    yield databases
    databases.drop()


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def database_url(request, tmp_path, databases):
    if request.param == "sqlite":
        init(url := f"sqlite:///{tmp_path}/orders.db")
        return url
    return databases.get(request.getfixturevalue(f"{request.param}_server"))


@pytest.fixture
async def desk(database_url):
    desk = Desk(database_url)
    desk.do(*(f"DELETE FROM {table}" for table in TABLES))
    yield desk
    await desk.close()


class Follower:
    """Reads a shard to its end, again and again, and moves the cursor as a relay would."""

    def __init__(self, reader, cursor, limit=100):
        self.reader, self.cursor, self.limit = reader, cursor, limit
        self.seen = []

    async def go_on(self):
        bound, more = await self.reader.news(), True
        while more:
            lane = Lane("", self.cursor.position)
            page = await self.reader.read(self.cursor, lane, limit=self.limit, bound=bound)
            self.seen += page.messages
            tails = {m.topic: Tail(m.position, m.id) for m in page.messages}
            self.cursor = await self.reader.advance(
                self.cursor, position=page.upto, tails=tails, lanes={}
            )
            more = page.more
        return self.seen

    @property
    def told(self):
        return [(m.aggregate_id, m.seq) for m in self.seen]


async def follow(desk, shard=0, fence=1, limit=100, **options):
    reader = desk.reader(**options)
    return Follower(reader, await reader.take(shard, fence), limit)


# --- pages --------------------------------------------------------------------------------------


async def test_a_message_is_the_event_as_it_was_written(desk):
    text = '{"b":  1.50, "a": "\\u00e9 é"}'
    with Session(desk.engine) as session:
        event = placed(7, text, tenant="acme", headers={"traceparent": "00-é"})
        added = OUTBOX.add(session, event)
        OUTBOX.add(session, placed("8", ordered=False))
        session.commit()
    follower = await follow(desk, source="/shop")
    first, second = await follower.go_on()
    assert (first.id, first.type, first.topic, first.tenant) == (
        added.id,
        "placed",
        "orders",
        "acme",
    )
    assert (first.aggregate_type, first.aggregate_id, first.seq) == ("order", "7", 1)
    assert (first.payload, first.headers, first.source) == (text, {"traceparent": "00-é"}, "/shop")
    assert first.time.tzinfo is UTC
    assert abs((datetime.now(UTC) - first.time).total_seconds()) < 60
    assert (second.seq, second.headers, second.payload) == (None, {}, "{}")
    assert first.position < second.position


async def test_pages_follow_each_other_without_gap_or_twin(desk):
    desk.commit(*[placed(str(n)) for n in range(25)])
    reader = desk.reader()
    cursor, bound = await reader.take(0, 1), await reader.news()
    lane, sizes, found = Lane("", cursor.position), [], []
    while True:
        page = await reader.read(cursor, lane, limit=10, bound=bound)
        sizes.append((len(page.messages), page.more))
        found += [m.aggregate_id for m in page.messages]
        lane = Lane("", page.upto)
        if not page.more:
            break
    assert sizes == [(10, True), (10, True), (5, False)]
    assert found == [str(n) for n in range(25)]
    assert page.upto == bound


async def test_a_page_that_ends_at_the_limit_and_at_the_bound_is_the_last(desk):
    desk.commit(*[placed(str(n)) for n in range(10)])
    reader = desk.reader()
    cursor = await reader.take(0, 1)
    page = await reader.read(cursor, Lane("", 0), limit=10, bound=await reader.news())
    assert (len(page.messages), page.more) == (10, False)


async def test_nothing_is_read_above_the_bound(desk):
    desk.commit(placed("1"))
    reader = desk.reader()
    cursor, bound = await reader.take(0, 1), await reader.news()
    desk.commit(placed("2"))
    page = await reader.read(cursor, Lane("", 0), limit=10, bound=bound)
    assert [m.aggregate_id for m in page.messages] == ["1"]
    assert (page.upto, page.more) == (bound, False)
    for below in (-1, 0, bound):
        page = await reader.read(cursor, Lane("", bound), limit=10, bound=below)
        assert (page.messages, page.upto, page.more) == ((), bound, False)
    page = await reader.read(cursor, Lane("", 0), limit=10)
    assert [m.aggregate_id for m in page.messages] == ["1", "2"]


async def test_news_change_with_every_commit_and_stand_still_otherwise(desk):
    reader = desk.reader()
    before = await reader.news()
    assert await reader.news() == before
    for n in range(3):
        desk.commit(placed(str(n)))
        after = await reader.news()
        assert after > before
        before = after
    assert await reader.news() == before


async def test_shards_share_the_events_and_keep_aggregates_together(desk):
    desk.commit(*[placed(str(n % 40)) for n in range(120)])
    slots = {row["event_id"]: row["shard"] for row in desk.ask("SELECT * FROM event_outbox")}
    for shards in (1, 3, 7):
        seen = []
        for shard in range(shards):
            follower = await follow(desk, shard, name=f"of {shards}", shards=shards, limit=7)
            await follower.go_on()
            assert {shard_of(slots[m.id], shards) for m in follower.seen} <= {shard}
            seen += follower.told
        assert sorted(seen) == sorted((str(n), seq) for n in range(40) for seq in (1, 2, 3))


async def test_a_page_ends_when_it_is_heavy(desk, monkeypatch):
    monkeypatch.setattr(reading, "PAGE_BYTES", 5_000)
    desk.commit(*[placed(str(n), {"fill": "x" * (2_000 if n else 9_000)}) for n in range(7)])
    reader = desk.reader()
    cursor, bound = await reader.take(0, 1), await reader.news()
    at, sizes = 0, []
    while at < bound:
        page = await reader.read(cursor, Lane("", at), limit=100, bound=bound)
        sizes.append(len(page.messages))
        at = page.upto
    assert sizes == [1, 3, 3]


async def test_a_long_way_without_events_is_gone_in_steps(desk, monkeypatch):
    monkeypatch.setattr(reading, "SPAN", 10)
    desk.commit(*[placed("same") for n in range(35)], placed("other", topic="rare"))
    reader = desk.reader()
    cursor, bound = await reader.take(0, 1), await reader.news()
    cursor = await reader.advance(cursor, position=bound, tails={}, lanes={"rare": bound - 36})
    steps, lane = [], Lane("rare", bound - 36)
    while True:
        page = await reader.read(cursor, lane, limit=5)
        steps.append(len(page.messages))
        lane = Lane("rare", page.upto)
        if not page.more:
            break
    assert sum(steps) == 1
    assert len(steps) == 4
    assert lane.position == cursor.position


# --- the cursor ---------------------------------------------------------------------------------


async def test_a_taken_shard_is_where_it_was_left(desk):
    reader = desk.reader()
    first = await reader.take(0, 3)
    assert (first.position, first.tails, first.lanes) == (0, {}, {})
    tails = {"orders": Tail(7, "e-7"), "audit": Tail(5, "e-5")}
    moved = await reader.advance(first, position=9, tails=tails, lanes={"audit": 5})
    assert (moved.position, moved.tails, moved.lanes) == (9, tails, {"audit": 5})
    assert await desk.reader().take(0, 3) == moved
    again = await desk.reader().take(0, 4)
    assert (again.position, again.tails, again.lanes) == (9, tails, {"audit": 5})
    caught_up = await reader.advance(
        again, position=9, tails={"audit": Tail(8, "e-8")}, lanes={"audit": None}
    )
    assert caught_up.lanes == {}
    assert await desk.reader().take(0, 5) == cursors.Cursor(
        0, 5, 9, {"orders": Tail(7, "e-7"), "audit": Tail(8, "e-8")}, {}
    )


async def test_a_broker_that_is_empty_again_has_no_tail(desk):
    reader = desk.reader()
    cursor = await reader.take(0, 1)
    tails = {"orders": Tail(7, "e-7")}
    cursor = await reader.advance(cursor, position=9, tails=tails, lanes={})
    cursor = await reader.advance(cursor, position=9, tails={"orders": Tail()}, lanes={"orders": 0})
    again = await reader.take(0, 2)
    assert (again.tails, again.lanes) == ({}, {"orders": 0})


async def test_who_was_deposed_reads_and_moves_nothing(desk):
    desk.commit(placed("1"))
    reader = desk.reader()
    zombie = await reader.take(0, 1)
    owner = await reader.take(0, 2)
    page = await reader.read(zombie, Lane("", 0), limit=10)
    assert page.messages == []
    gone = await reader.advance(
        zombie, position=9, tails={"orders": Tail(9, "e")}, lanes={"orders": 3}
    )
    assert gone is None
    assert await reader.take(0, 1) is None
    assert await reader.take(0, 2) == owner
    assert [m.aggregate_id for m in (await reader.read(owner, Lane("", 0), limit=10)).messages]


async def test_shards_and_names_have_fences_of_their_own(desk):
    reader = desk.reader(shards=2)
    other = desk.reader(name="audit")
    assert await reader.take(1, 5)
    assert (await reader.take(0, 1)).fence == 1
    assert (await other.take(0, 1)).fence == 1
    first = await reader.take(0, 2)
    await reader.advance(first, position=8, tails={"orders": Tail(1, "e")}, lanes={})
    assert (await reader.take(1, 6)).position == 0
    assert (await other.take(0, 2)).tails == {}


async def test_of_many_who_take_a_shard_the_largest_fence_has_it(desk):
    readers = [desk.reader() for _ in range(8)]
    fences = random.Random(1).sample(range(1, 9), 8)
    await asyncio.gather(*(r.take(0, f) for r, f in zip(readers, fences, strict=True)))
    assert [await readers[0].take(0, fence) for fence in range(1, 8)] == [None] * 7
    assert await readers[0].take(0, 8)


async def test_a_position_never_goes_back(desk):
    reader = desk.reader()
    cursor = await reader.take(0, 1)
    cursor = await reader.advance(cursor, position=5, tails={}, lanes={})
    with pytest.raises(ValueError, match="lane"):
        await reader.advance(cursor, position=4, tails={}, lanes={})


async def test_another_number_of_shards_is_refused_with_both_numbers(desk):
    await desk.reader(shards=4).take(2, 1)
    with pytest.raises(SettingsError, match=r"have 4 shards.*told 8.*semel outbox reshard"):
        await desk.reader(shards=8).take(0, 1)
    assert await desk.reader(shards=4).take(0, 1)
    assert await desk.reader(name="other", shards=8).take(7, 1)


@pytest.mark.parametrize("wrong", [{"shards": 0}, {"shards": 257}, {"name": ""}, {"name": " a"}])
async def test_what_cannot_be_a_reader_is_refused(desk, wrong):
    with pytest.raises(SettingsError):
        desk.reader(**wrong)
    with pytest.raises(SettingsError, match="no shard 2"):
        await desk.reader(shards=2).take(2, 1)


async def test_without_its_tables_it_says_what_to_do(tmp_path):
    store = SQLStore(f"sqlite:///{tmp_path}/empty.db")
    with pytest.raises(SettingsError, match="semel db upgrade"):
        await OutboxReader(store).take(0, 1)
    await store.aclose()
    store = SQLStore(f"sqlite:///{tmp_path}/empty.db", create=True)
    assert await OutboxReader(store).take(0, 1)
    await store.aclose()


async def test_an_engine_of_the_applications_own_will_do(desk):
    desk.commit(placed("1"), placed("2"))
    engine = create_async_engine(with_driver(parse(desk.url), "async"))
    store = SQLStore(engine)
    reader = OutboxReader(store)
    follower = Follower(reader, await reader.take(0, 1), limit=1)
    await follower.go_on()
    assert follower.told == [("1", 1), ("2", 1)]
    assert (await reader.take(0, 2)).tails == follower.cursor.tails
    await store.aclose()
    await engine.dispose()
