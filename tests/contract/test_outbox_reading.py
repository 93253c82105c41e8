"""Reading the outbox on PostgreSQL, MariaDB and SQLite: in order, to the end, by the owner only."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import re
import threading
import uuid
from collections import defaultdict
from datetime import UTC, datetime
from functools import partial

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel.colour import ASYNC
from semel.errors import SettingsError
from semel.messages import Tail, shard_of
from semel.outbox import BlockingEventReader, Event, EventReader, Outbox
from semel.stores.owners import key_of
from semel.stores.sql import SQLStore, init, notify, outbox_lag, outbox_pages, outbox_placing
from semel.stores.sql import outbox_cursor as cursors
from semel.stores.sql import outbox_reading as reading
from semel.stores.sql.lines import open_engine, parse, with_driver
from semel.stores.sql.outbox_bell import listen
from semel.stores.sql.outbox_reading import Lane, OutboxReader
from semel.values import Terms
from support.servers import driver_settings

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
        given = driver_settings(self.url)
        return sa.create_engine(with_driver(parse(self.url), "sync"), connect_args=given)

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


@pytest.fixture(params=["postgres", "pgbouncer", "mariadb", "sqlite"])
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


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("wrong", [{"shards": 0}, {"shards": 257}, {"name": ""}, {"name": " a"}])
async def test_what_cannot_be_a_reader_is_refused(desk, wrong):
    with pytest.raises(SettingsError):
        desk.reader(**wrong)
    with pytest.raises(SettingsError, match="no shard 2"):
        await desk.reader(shards=2).take(2, 1)


async def test_without_its_tables_it_says_what_to_do(tmp_path):
    store = SQLStore(f"sqlite:///{tmp_path}/empty.db")
    with pytest.raises(SettingsError, match="semel db init"):
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


# --- the order of commits -----------------------------------------------------------------------


class Paused:
    """Holds one commit back after its rows were written and before COMMIT is sent."""

    def __init__(self, desk):
        self.written, self.go_on = threading.Event(), threading.Event()
        self.engine = desk.new_engine()
        self.fails = False

    def pause(self, connection):
        there = connection.exec_driver_sql("SELECT aggregate_id FROM event_outbox").scalars().all()
        if not {event.aggregate_id for event in self.events} <= {*there}:
            return  # too early: nobody is told, and the test fails
        self.written.set()
        assert self.go_on.wait(60)
        if self.fails:
            raise LookupError

    def commit(self, *events):
        self.events = events
        with contextlib.suppress(LookupError), Session(self.engine) as session:
            for event in events:
                OUTBOX.add(session, event)
            # Behind the outbox, which listens since the first event.
            sa.event.listen(self.engine, "commit", self.pause)
            session.commit()

    @contextlib.asynccontextmanager
    async def holding(self, *events):
        worker = threading.Thread(target=self.commit, args=events)
        worker.start()
        try:
            assert await asyncio.to_thread(self.written.wait, 60)
            yield self
        finally:
            self.go_on.set()
            await asyncio.to_thread(worker.join, 60)
            self.engine.dispose()


def one_at_a_time(desk):
    """On SQLite nobody else can write while somebody does."""
    return desk.name == "sqlite"


async def test_what_is_committed_later_with_an_earlier_id_is_not_passed_over(desk):
    follower = await follow(desk)
    desk.commit(placed("0"))
    await follower.go_on()
    async with Paused(desk).holding(placed("first")):
        if one_at_a_time(desk):
            assert await follower.reader.news() == follower.cursor.position
        else:
            desk.commit(placed("second"))
            await follower.go_on()
        assert "first" not in [m.aggregate_id for m in follower.seen]
    await follower.go_on()
    assert {m.aggregate_id for m in follower.seen} - {"second"} == {"0", "first"}
    assert len(follower.seen) == (2 if one_at_a_time(desk) else 3)
    positions = [m.position for m in follower.seen]
    assert positions == sorted(set(positions))


async def test_what_is_rolled_back_at_last_leaves_a_gap_that_stops_nobody(desk):
    follower = await follow(desk)
    held = Paused(desk)
    held.fails = True
    async with held.holding(placed("never")):
        if not one_at_a_time(desk):
            desk.commit(placed("second"))
            await follower.go_on()
    desk.commit(placed("third"))
    await follower.go_on()
    expected = ["third"] if one_at_a_time(desk) else ["second", "third"]
    assert [m.aggregate_id for m in follower.seen] == expected


async def test_a_long_transaction_of_somebody_else_holds_nobody_up(desk):
    desk.do("CREATE TABLE IF NOT EXISTS theirs (id INTEGER)")
    follower = await follow(desk)
    with desk.own.connect() as other:
        other.exec_driver_sql("BEGIN")
        if one_at_a_time(desk):
            other.exec_driver_sql("SELECT * FROM event_outbox").all()
        else:
            other.exec_driver_sql("INSERT INTO theirs VALUES (1)")
        desk.commit(placed("1"))
        await follower.go_on()
        assert follower.told == [("1", 1)]
        other.exec_driver_sql("ROLLBACK")


def write_randomly(engine, seed, rounds):
    dice = random.Random(seed)
    for n in range(rounds):
        with Session(engine) as session:
            for _ in range(dice.randint(1, 3)):
                aggregate = f"{dice.randint(0, 9)}"
                OUTBOX.add(session, placed(aggregate, {"n": n}, ordered=dice.random() < 0.9))
            if dice.random() < 0.1:
                session.rollback()
            else:
                session.commit()


class Turns:
    """Owners of one shard that depose each other all the time, and die in the middle.

    What they read goes to a broker that refuses what it has: by position, from whomever it comes.
    """

    def __init__(self, desk, shard):
        self.desk, self.shard = desk, shard
        self.published = []
        self.over = asyncio.Event()

    async def read(self, seed):
        reader, fence, dice = self.desk.reader(shards=3), seed, random.Random(seed)
        while True:
            last = self.over.is_set()
            fence += 2
            cursor = await reader.take(self.shard, fence)
            if cursor and await self._to_the_end(reader, cursor, dice) and last:
                return
            await asyncio.sleep(0)

    async def _to_the_end(self, reader, cursor, dice):
        more = True
        while more:
            bound = await reader.news()
            lane = Lane("", cursor.position)
            page = await reader.read(cursor, lane, limit=7, bound=bound)
            there = self.published[-1].position if self.published else 0
            self.published += [m for m in page.messages if m.position > there]
            if dice.random() < 0.2:
                return False  # it dies before it has moved the cursor
            cursor = await reader.advance(cursor, position=page.upto, tails={}, lanes={})
            if cursor is None:
                return False
            more = page.more
        return True


async def test_many_writers_and_owners_that_take_turns_lose_and_turn_round_nothing(desk):
    engine, shards = desk.new_engine(), [Turns(desk, shard) for shard in range(3)]
    rounds = 6 if one_at_a_time(desk) else 25
    readers = [asyncio.create_task(shard.read(seed)) for shard in shards for seed in (1, 2)]
    writing = [asyncio.to_thread(write_randomly, engine, seed, rounds) for seed in range(5)]
    await asyncio.gather(*writing)
    for shard in shards:
        shard.over.set()
    await asyncio.gather(*readers)
    engine.dispose()
    rows = desk.ask("SELECT * FROM event_outbox")
    seen = [m for shard in shards for m in shard.published]
    assert sorted(m.id for m in seen) == sorted(row["event_id"] for row in rows)
    numbers = defaultdict(list)
    for message in seen:
        if message.seq is not None:
            numbers[message.aggregate_id].append(message.seq)
    assert numbers
    for of_one in numbers.values():
        assert of_one == list(range(1, len(of_one) + 1))


# --- sweeping -----------------------------------------------------------------------------------


def ids(desk):
    return [row["aggregate_id"] for row in desk.ask("SELECT * FROM event_outbox ORDER BY id")]


async def moved(desk, upto, lanes=None, **options):
    """A reader that has published so many events from the first on."""
    reader = desk.reader(**options)
    cursor = await reader.take(0, 1)
    page = await reader.read(cursor, Lane("", cursor.position), limit=upto)
    positions = [m.position for m in page.messages]
    given = {topic: positions[n] for topic, n in (lanes or {}).items()}
    await reader.advance(cursor, position=positions[-1], tails={}, lanes=given)
    return reader, positions


async def test_what_is_published_and_old_is_deleted_and_remembered(desk):
    desk.commit(*[placed(str(n)) for n in range(6)])
    reader, positions = await moved(desk, 4)
    assert await reader.sweep(keep_s=3600) == 0
    assert await reader.swept_to() == 0
    assert await reader.sweep(keep_s=0) == 4
    assert await reader.swept_to() == positions[3]
    assert ids(desk) == ["4", "5"]
    assert await reader.sweep(keep_s=0) == 0
    follower = await follow(desk, fence=2)
    await follower.go_on()
    assert follower.told == [("4", 1), ("5", 1)]
    assert await reader.sweep(keep_s=0) == 2
    desk.commit(placed("6"))
    await follower.go_on()
    assert follower.told[2:] == [("6", 1)]
    assert follower.seen[-1].position > positions[-1]


async def test_what_a_broker_has_refused_is_kept(desk):
    desk.commit(*[placed(str(n)) for n in range(6)])
    reader, positions = await moved(desk, 5)
    for _ in range(2):  # a relay may die behind it, and the next one does it again
        await reader.keep(positions[1])
    assert await reader.sweep(keep_s=0) == 4
    assert ids(desk) == ["1", "5"]
    assert await reader.swept_to() == positions[4]


async def test_a_sweep_keeps_to_its_limit_and_goes_in_chunks(desk, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK", 3)
    desk.commit(*[placed(str(n)) for n in range(10)])
    reader, _ = await moved(desk, 10)
    assert await reader.sweep(keep_s=0, limit=7) == 7
    assert ids(desk) == ["7", "8", "9"]
    assert await reader.sweep(keep_s=0) == 3


async def test_without_a_reader_nothing_is_deleted(desk):
    desk.commit(placed("1"))
    assert await desk.reader().sweep(keep_s=0) == 0
    assert ids(desk) == ["1"]


async def test_a_sweep_waits_for_the_slowest_of_every_name(desk):
    desk.commit(*[placed(str(n)) for n in range(6)])
    reader, _ = await moved(desk, 6)
    await moved(desk, 2, name="audit")
    assert await reader.sweep(keep_s=0) == 2
    assert ids(desk) == ["2", "3", "4", "5"]


async def test_a_sweep_waits_for_a_lane(desk):
    desk.commit(*[placed(str(n)) for n in range(6)])
    reader, positions = await moved(desk, 6, lanes={"orders": 2})
    assert await reader.sweep(keep_s=0) == 3
    assert await reader.swept_to() == positions[2]


async def test_a_sweep_waits_for_shards_that_nobody_has_taken_yet(desk):
    desk.commit(*[placed(str(n)) for n in range(6)])
    reader = desk.reader(shards=2)
    bound = await reader.news()
    for shard in (1, 0):
        cursor = await reader.take(shard, 1)
        assert await reader.sweep(keep_s=0) == 0
        await reader.advance(cursor, position=bound, tails={}, lanes={})
    assert await reader.sweep(keep_s=0) == 6


async def test_a_name_that_comes_later_begins_where_the_rows_begin(desk):
    desk.commit(*[placed(str(n)) for n in range(4)])
    reader, positions = await moved(desk, 3)
    await reader.sweep(keep_s=0)
    late = await follow(desk, name="late")
    assert late.cursor.position == positions[2]
    await late.go_on()
    assert late.told == [("3", 1)]


class Slow(OutboxReader):
    """Lets something else happen, if it can, behind its first statement that has this word."""

    word, meanwhile, happening = "", None, None

    async def _run(self, work):
        return await super()._run(lambda link: work(_SlowLink(link, self)))

    async def let_happen(self):
        self.happening = asyncio.create_task(self.meanwhile())
        await asyncio.wait([self.happening], timeout=0.2)


class _SlowLink:
    def __init__(self, link, reader):
        self._link, self._reader, self.dialect = link, reader, link.dialect

    def __getattr__(self, verb):
        async def say(statement, *params):
            answer = await getattr(self._link, verb)(statement, *params)
            if self._reader.word in statement and self._reader.happening is None:
                await self._reader.let_happen()
            return answer

        return say


async def test_who_goes_back_behind_what_is_being_swept_sees_that_it_is_gone(desk):
    """The sweep has looked where everybody is; what it deletes then is not needed by anybody."""
    desk.commit(*[placed(str(n)) for n in range(6)])
    reader, positions = await moved(desk, 6)
    cursor = await reader.take(0, 2)

    async def go_back():
        lanes = {"orders": positions[0] - 1}
        await reader.advance(cursor, position=cursor.position, tails={}, lanes=lanes)
        return await reader.swept_to()

    sweeper = Slow(desk.store)
    sweeper.word, sweeper.meanwhile = "MIN(lowest)", go_back
    assert await sweeper.sweep(keep_s=0) == 6
    assert await sweeper.happening == positions[-1]


async def test_who_has_gone_back_before_the_sweep_looks_keeps_its_rows(desk):
    desk.commit(*[placed(str(n)) for n in range(6)])
    reader, positions = await moved(desk, 6)
    cursor = await reader.take(0, 2)
    lanes = {"orders": positions[0] - 1}
    cursor = await reader.advance(cursor, position=cursor.position, tails={}, lanes=lanes)
    assert await reader.swept_to() == 0
    assert await reader.sweep(keep_s=0) == 0
    page = await reader.read(cursor, Lane("orders", positions[0] - 1), limit=100)
    assert [m.position for m in page.messages] == positions


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("keep_s", [-1, float("inf"), float("nan")])
async def test_how_long_to_keep_is_a_time(desk, keep_s):
    with pytest.raises(SettingsError, match="keep_s"):
        await desk.reader().sweep(keep_s=keep_s)


# --- dividing anew ------------------------------------------------------------------------------


async def drained(desk, shards, name="default", fence=1):
    reader = desk.reader(name=name, shards=shards)
    followers = [Follower(reader, await reader.take(shard, fence)) for shard in range(shards)]
    for follower in followers:
        await follower.go_on()
    return reader, followers


@pytest.mark.parametrize(("before", "after"), [(2, 5), (4, 1), (3, 3)])
async def test_shards_are_divided_anew_and_each_goes_on_where_all_were(desk, before, after):
    desk.commit(*[placed(str(n)) for n in range(40)])
    reader, _ = await drained(desk, before)
    news = await reader.news()
    await reader.reshard(after)
    desk.commit(*[placed(str(n)) for n in range(40)])
    _, followers = await drained(desk, after, fence=2**50)
    told = sorted(told for follower in followers for told in follower.told)
    assert told == sorted((str(n), 2) for n in range(40))
    assert all(m.position > news for follower in followers for m in follower.seen)
    if before != after:
        with pytest.raises(SettingsError, match=f"have {after} shards"):
            await desk.reader(shards=before).take(0, 2**51)


async def test_tails_of_shards_that_stay_are_kept(desk):
    desk.commit(*[placed(str(n)) for n in range(40)])
    reader, followers = await drained(desk, 2)
    await reader.reshard(1)
    cursor = await reader.take(0, 2**50)
    assert cursor.tails == followers[0].cursor.tails


async def test_nothing_is_divided_anew_before_everything_is_published(desk):
    reader, _ = await drained(desk, 2)
    desk.commit(*[placed(str(n)) for n in range(10)])
    with pytest.raises(SettingsError, match="has not published everything"):
        await reader.reshard(4)
    _, followers = await drained(desk, 2, fence=2**50)
    cursor = followers[0].cursor
    lanes = {"orders": cursor.position}
    cursor = await reader.advance(cursor, position=cursor.position, tails={}, lanes=lanes)
    with pytest.raises(SettingsError, match="orders lags behind"):
        await reader.reshard(4)
    assert await desk.reader(shards=2).take(0, 2**51)


async def test_who_is_at_work_while_shards_are_divided_reads_and_moves_nothing_more(desk):
    desk.commit(*[placed(str(n)) for n in range(10)])
    _, followers = await drained(desk, 2)
    await desk.reader(shards=2).reshard(4)
    desk.commit(*[placed(str(n)) for n in range(10)])
    for follower in followers:
        lane = Lane("", follower.cursor.position)
        assert (await follower.reader.read(follower.cursor, lane, limit=10)).messages == []
        position = follower.cursor.position + 1
        assert not await follower.reader.advance(
            follower.cursor, position=position, tails={}, lanes={}
        )


async def test_nothing_is_divided_anew_while_somebody_owns_a_shard(desk):
    reader, followers = await drained(desk, 2)
    key = key_of("relay:default", "shard 1")
    ledger = desk.store.ledger(ASYNC)
    claim = (await ledger.claim(key, attempt="web-1:7/x", terms=Terms(lease_s=60, ttl_s=60))).claim
    with pytest.raises(SettingsError, match=r"shard 1 is owned by web-1:7.*stop"):
        await desk.reader().reshard(4)
    first = followers[0].cursor
    assert await reader.advance(first, position=first.position, tails={}, lanes={})
    await ledger.release(claim)
    await desk.reader().reshard(4)
    assert await reader.relays() == {"default": 4}


async def test_a_name_that_nobody_has_used_is_divided_by_who_comes_first(desk):
    await desk.reader().reshard(4)
    assert await desk.reader(shards=8).take(0, 1)


# --- how far behind -----------------------------------------------------------------------------


async def test_lag_is_what_is_not_published(desk):
    reader = desk.reader(shards=2)
    lag = await reader.lag()
    assert (lag.unpublished, lag.age_s, lag.rows) == (0, 0.0, 0)
    assert (lag.positions, lag.behind) == ({0: 0, 1: 0}, [])
    desk.commit(*[placed(str(n)) for n in range(30)])
    lag = await reader.lag()
    assert (lag.unpublished, lag.rows) == (30, 30)
    assert 0 < lag.age_s < 60
    _, followers = await drained(desk, 2)
    lag = await reader.lag()
    assert (lag.unpublished, lag.age_s, lag.rows) == (0, 0.0, 30)
    assert lag.positions == {n: f.cursor.position for n, f in enumerate(followers)}
    first = followers[0]
    lanes = {"orders": first.seen[2].position}
    await reader.advance(first.cursor, position=first.cursor.position, tails={}, lanes=lanes)
    lag = await reader.lag()
    assert (lag.unpublished, lag.behind) == (len(first.seen) - 3, ["orders"])
    assert (lag.bytes is None) == (desk.name == "sqlite")
    json.dumps(dataclasses.asdict(lag))


async def test_lag_is_not_counted_further_than_anybody_wants_to_know(desk, monkeypatch):
    monkeypatch.setattr(outbox_lag, "COUNTED", 10)
    desk.commit(*[placed(str(n)) for n in range(30)])
    lag = await desk.reader(shards=3).lag()
    assert lag.unpublished == 11
    assert lag.age_s > 0


async def test_age_is_by_the_databases_clock(desk):
    desk.commit(placed("1"))
    changed = {
        "postgresql": "created_at - INTERVAL '1 hour'",
        "mysql": "created_at - INTERVAL 1 HOUR",
        "sqlite": "strftime('%Y-%m-%d %H:%M:%f000', created_at, '-1 hour')",
    }
    desk.do(f"UPDATE event_outbox SET created_at = {changed[desk.name]}")
    assert 3600 <= (await desk.reader().lag()).age_s < 3700
    reader, _ = await moved(desk, 1)
    assert await reader.sweep(keep_s=3700) == 0
    assert await reader.sweep(keep_s=3600) == 1


async def test_a_writer_that_readers_cannot_pass_is_named(desk):
    reader = desk.reader()
    if one_at_a_time(desk):
        assert (await reader.lag()).holders == ()
        return
    desk.commit(placed("0"))
    async with Paused(desk).holding(placed("1")):
        desk.commit(placed("2"))
        lag = await reader.lag()
    if desk.name == "postgresql":
        [holder] = lag.holders
        assert holder.pid > 0
        assert (holder.state, holder.open_s < 60) == ("idle in transaction", True)
        assert lag.unpublished == 2
    else:
        assert lag.holders == ()
    assert (await reader.lag()).holders in ((), [])


async def test_long_transactions_are_named_by_pid(desk):
    reader = desk.reader()
    with desk.own.connect() as other:
        other.exec_driver_sql("BEGIN")
        other.exec_driver_sql("SELECT * FROM event_outbox").all()
        if desk.name == "sqlite":
            assert await reader.long_transactions(0) == ()
        else:
            mine = "pg_backend_pid()" if desk.name == "postgresql" else "CONNECTION_ID()"
            pid = other.exec_driver_sql(f"SELECT {mine}").scalar_one()
            found = await reader.long_transactions(0)
            assert [holder.pid for holder in found] == [pid]
            assert found[0].open_s > 0
            assert await reader.long_transactions(60) == []
        other.exec_driver_sql("ROLLBACK")


# --- killed in the middle -----------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here; its connection breaks."""


class Dying:
    """A link whose process dies before its nth statement, or right behind it."""

    def __init__(self, link, left, behind):
        self._link, self.dialect = link, link.dialect
        self._left, self._behind = left, behind

    def __getattr__(self, verb):
        async def say(*words):
            if not self._behind and next(self._left) == 0:
                raise Killed
            answer = await getattr(self._link, verb)(*words)
            if self._behind and next(self._left) == 0:
                raise Killed
            return answer

        return say


class Mortal(OutboxReader):
    """Dies at its nth statement."""

    def __init__(self, store, n, *, behind, **options):
        super().__init__(store, **options)
        self._left, self._behind_it = itertools.count(n, -1), behind

    async def _run(self, work):
        return await super()._run(lambda link: work(Dying(link, self._left, self._behind_it)))


async def dies_everywhere(desk, verb, check, **options):
    """Let `verb(reader)` be killed at each of its statements in turn, until it gets through."""
    for behind in (False, True):
        for n in range(100):
            reader = Mortal(desk.store, n, behind=behind, **options)
            try:
                await verb(reader)
            except Killed:
                await check()
                continue
            assert n > 0
            break
        else:
            raise AssertionError("it never got through")


async def test_killed_anywhere_a_relay_leaves_everything_to_its_successor(desk):
    fences, seen = itertools.count(10), []

    async def relay_once(reader):
        cursor = await reader.take(0, next(fences))
        bound = await reader.news()
        page = await reader.read(cursor, Lane("", cursor.position), limit=2, bound=bound)
        there = seen[-1].position if seen else 0
        seen.extend(m for m in page.messages if m.position > there)
        tails = {m.topic: Tail(m.position, m.id) for m in page.messages}
        lanes = {"audit": None if cursor.lanes else cursor.position}
        await reader.advance(cursor, position=page.upto, tails=tails, lanes=lanes)

    async def more():
        desk.commit(placed("1"), placed("2"))

    await more()
    await dies_everywhere(desk, relay_once, more)
    successor = await follow(desk, fence=10_000)
    successor.seen = seen
    position = seen[-1].position
    before = len(seen)
    await successor.go_on()
    fresh = [m for m in successor.seen[before:] if m.position > position]
    told = [m.id for m in successor.seen[:before]] + [m.id for m in fresh]
    column = "position" if desk.name == "mysql" else "id"
    rows = desk.ask(f"SELECT event_id FROM event_outbox ORDER BY {column}")
    assert told == [row["event_id"] for row in rows]


async def test_killed_anywhere_a_sweep_has_deleted_no_more_than_it_says(desk):
    desk.commit(*[placed(str(n)) for n in range(60)])
    reader, positions = await moved(desk, 60)

    async def consistent():
        swept = await reader.swept_to()
        assert len(ids(desk)) == len([p for p in positions if p > swept])

    await dies_everywhere(desk, lambda r: r.sweep(keep_s=0, limit=4), consistent)
    await consistent()
    assert await reader.swept_to() > 0


async def test_killed_anywhere_dividing_anew_is_done_or_not(desk):
    desk.commit(*[placed(str(n)) for n in range(20)])
    await drained(desk, 2)
    fences = itertools.count(2**50, 10)

    async def whole():
        rows = desk.ask("SELECT shard, shards FROM event_outbox_cursor")
        shards = rows[0]["shards"]
        assert shards in (2, 3)
        assert sorted(row["shard"] for row in rows) == list(range(shards))
        assert {row["shards"] for row in rows} == {shards}
        assert await desk.reader(shards=shards).take(0, next(fences))
        if shards == 3:
            await desk.reader(shards=3).reshard(2)

    await dies_everywhere(desk, lambda r: r.reshard(3), whole, shards=2)


# --- positions on MariaDB -----------------------------------------------------------------------


@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
async def test_positions_go_on_when_the_mark_is_lost(desk):
    follower = await follow(desk)
    desk.commit(placed("1"), placed("2"))
    await follower.go_on()
    assert await follower.reader.sweep(keep_s=0) == 2
    desk.do("DELETE FROM event_outbox_mark")
    desk.commit(placed("3"))
    await follower.go_on()
    assert [m.aggregate_id for m in follower.seen] == ["1", "2", "3"]
    positions = [m.position for m in follower.seen]
    assert positions == sorted(set(positions))


@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
async def test_whoever_finds_somebody_giving_positions_does_not_wait(desk):
    reader = desk.reader()
    desk.commit(placed("1"))
    before = await reader.news()
    desk.commit(placed("2"))
    with desk.own.connect() as other:
        other.exec_driver_sql("BEGIN")
        other.exec_driver_sql("SELECT * FROM event_outbox_mark WHERE id = 'placed' FOR UPDATE")
        assert await reader.news() == before
        other.exec_driver_sql("ROLLBACK")
    assert await reader.news() == before + 1


@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
async def test_many_at_once_give_each_row_one_position(desk, monkeypatch):
    monkeypatch.setattr(outbox_placing, "ROWS", 7)
    desk.commit(*[placed(str(n)) for n in range(100)])
    readers = [desk.reader(name=f"r{n}") for n in range(4)]

    async def place(reader):
        for _ in range(40):
            await reader.news()

    await asyncio.gather(*(place(reader) for reader in readers))
    rows = desk.ask("SELECT id, position FROM event_outbox ORDER BY id")
    first = rows[0]["position"]
    assert [row["position"] for row in rows] == list(range(first, first + 100))


# --- what it costs ------------------------------------------------------------------------------


def many_rows(desk, many):
    """Without the outbox, which would take a while."""
    columns = "tenant_id, topic, aggregate_type, aggregate_id, seq, event_type, payload, created_at"
    values = "'', 't', 'o', '1', n, 'placed', '{}', '2026-01-01 00:00:00.000000'"
    if desk.name == "mysql":
        columns, numbers = f"{columns}, position", f"(SELECT seq AS n FROM seq_1_to_{many}) AS s"
        values, text = f"{values}, n", "CONCAT(n)"
    else:
        text = "CAST(n AS VARCHAR(20))"
        numbers = (
            "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s "
            f"WHERE n < {many}) SELECT n FROM s) AS s"
        )
    desk.do(
        f"INSERT INTO event_outbox (shard, event_id, {columns}) "
        f"SELECT {'MOD(n, 256)' if desk.name != 'sqlite' else 'n & 255'}, {text}, {values} "
        f"FROM {numbers}"
    )


PLANS = {"postgresql": "EXPLAIN ", "mysql": "EXPLAIN ", "sqlite": "EXPLAIN QUERY PLAN "}


@pytest.mark.parametrize(("shards", "topic"), [(1, ""), (8, "t")])
async def test_a_page_is_read_by_position_and_nothing_is_sorted(desk, shards, topic, monkeypatch):
    if desk.name == "postgresql":  # room of rows that were deleted would be filled in any order
        desk.do("TRUNCATE event_outbox")
    many_rows(desk, 5_000)
    if desk.name != "sqlite":
        desk.do("ANALYZE TABLE event_outbox" if desk.name == "mysql" else "ANALYZE event_outbox")
    reader = desk.reader(shards=shards)
    cursor, plans = await reader.take(0, 1), []
    cursor = await reader.advance(cursor, position=2**40, tails={}, lanes={})
    fetch = outbox_pages.fetch

    async def explained(link, *rest):
        class Explaining:
            dialect = link.dialect

            async def fetch(self, statement, params=()):
                plans.append(await link.fetch(PLANS[desk.name] + statement, params))
                return await link.fetch(statement, params)

            ask = fetch

        return await fetch(Explaining(), *rest)

    monkeypatch.setattr(reading, "fetch", explained)
    last = desk.ask("SELECT MAX(id) AS id FROM event_outbox")[0]["id"]
    last = 5_000 if desk.name == "mysql" else last
    page = await reader.read(cursor, Lane(topic, last - 1_000), limit=100, bound=last)
    assert page.messages
    assert plans
    for plan in plans:
        text = "\n".join(str(tuple(row)) for row in plan)
        if desk.name == "postgresql":
            assert "Index Scan using event_outbox_pkey on event_outbox" in text
            assert not re.search(r"Seq Scan on event_outbox\b", text)
            assert "Sort" not in text
        elif desk.name == "mysql":
            assert "'range', 'ux_event_outbox_position', 'ux_event_outbox_position'" in text
            assert "filesort" not in text
        else:
            assert "SEARCH event_outbox USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)" in text
            assert "TEMP B-TREE" not in text


class Counted:
    """A link that counts what it says."""

    def __init__(self, link, said):
        self._link, self._said, self.dialect = link, said, link.dialect

    def __getattr__(self, verb):
        self._said.append(verb)
        return getattr(self._link, verb)


class Counting(OutboxReader):
    said: list

    async def _run(self, work):
        return await super()._run(lambda link: work(Counted(link, self.said)))


async def test_statements_of_a_batch(desk):
    desk.commit(*[placed(str(n)) for n in range(10)])
    reader = Counting(desk.store)
    reader.said = []
    cursor, bound = await reader.take(0, 1), await reader.news()
    counts = []
    for _ in range(2):
        reader.said.clear()
        await reader.news()
        page = await reader.read(cursor, Lane("", cursor.position), limit=5, bound=bound)
        read = len(reader.said)
        tails = {"orders": Tail(page.upto, "e"), "audit": Tail(1, "e")}
        cursor = await reader.advance(cursor, position=page.upto, tails=tails, lanes={})
        counts.append((read, len(reader.said) - read))
    assert counts == [(3, 1), (3, 1)]


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
async def test_a_cursor_that_was_written_by_somebody_else_is_found_again(desk):
    """Its owner remembers where the row lies; it need not be there any more."""
    desk.commit(*[placed(str(n)) for n in range(4)])
    follower = await follow(desk, limit=1)
    reader, cursor = follower.reader, follower.cursor
    bound = await reader.news()
    seen = []
    for _ in range(4):
        page = await reader.read(cursor, Lane("", cursor.position), limit=1, bound=bound)
        seen += [m.aggregate_id for m in page.messages]
        cursor = await reader.advance(cursor, position=page.upto, tails={}, lanes={})
        desk.do("UPDATE event_outbox_cursor SET updated_at = now()")
    assert seen == ["0", "1", "2", "3"]
    desk.commit(placed("4"))
    page = await reader.read(cursor, Lane("", cursor.position), limit=9)
    assert [m.aggregate_id for m in page.messages] == ["4"]


# --- waking up ----------------------------------------------------------------------------------


async def test_a_commit_with_events_rings_whoever_listens(desk):
    with listen() as bell:
        assert not await bell.wait(0)
        await asyncio.to_thread(desk.commit, placed("1"))
        assert await bell.wait(5)
        with Session(desk.engine) as session:
            session.execute(sa.text("SELECT 1"))
            session.commit()
            OUTBOX.add(session, placed("2"))
            session.rollback()
        assert not await bell.wait(0)


async def test_by_the_last_ring_the_events_can_be_seen(desk):
    reader = desk.reader()
    before, heard = await reader.news(), []
    with listen() as bell:
        writing = asyncio.create_task(asyncio.to_thread(desk.commit, placed("1")))
        while not writing.done() or await bell.wait(0):
            await bell.wait(0.01)
            heard.append(await reader.news())
        assert heard[-1] > before


async def test_async_sessions_and_kept_connections_ring_too(desk):
    engine = create_async_engine(with_driver(parse(desk.url), "async"))
    with listen() as bell:
        async with AsyncSession(engine) as session:
            OUTBOX.add(session, placed("1"))
            await session.commit()
        assert await bell.wait(5)
        with desk.engine.connect() as connection:
            await bell.wait(0)
            OUTBOX.add(connection, placed("2"))
            connection.commit()
            assert await bell.wait(5)
    await engine.dispose()


async def test_who_does_not_listen_any_more_is_not_rung(desk):
    with listen() as bell:
        pass
    desk.commit(placed("1"))
    assert not await bell.wait(0)


NOTIFIED = Outbox(routes={"placed": "orders"}, notify=True)


def commit_notified(desk, *events):
    with Session(desk.engine) as session:
        for event in events:
            NOTIFIED.add(session, event)
        session.commit()


@pytest.mark.parametrize("database_url", ["postgres", "mariadb", "sqlite"], indirect=True)
@pytest.mark.parametrize("ordered", [True, False])
async def test_notify_is_heard_elsewhere_and_by_nobody_without_it(desk, ordered):
    reader, bell = desk.reader(), ASYNC.waiter()
    listening = asyncio.create_task(reader.listen(bell))
    if desk.name != "postgresql":
        await listening  # there is nothing to hear
        commit_notified(desk, placed("1", ordered=ordered))
        assert not await bell.wait(0)
        return
    assert await bell.wait(30), "once it listens: something may have been said before"
    desk.commit(placed("0"))
    assert not await bell.wait(0.2)
    commit_notified(desk, placed("1", ordered=ordered))
    assert await bell.wait(30)
    commit_notified(desk, *[placed(str(n), ordered=ordered) for n in range(30)])
    assert await bell.wait(30)
    assert not await bell.wait(0.1), "once per transaction"
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
async def test_a_listener_whose_connection_breaks_connects_anew(desk, monkeypatch):
    monkeypatch.setattr(notify, "SOON_S", 0.01)
    bell = ASYNC.waiter()
    listening = asyncio.create_task(desk.reader().listen(bell))
    assert await bell.wait(30)
    desk.ask(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE query = 'LISTEN semel_outbox' AND datname = current_database()"
    )
    assert await bell.wait(30)
    commit_notified(desk, placed("1"))
    assert await bell.wait(30)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


# --- EventReader: a relay of one's own ----------------------------------------------------------


@pytest.fixture(params=["async", "sync"])
def reading_from(request):
    """Makes an EventReader or a BlockingEventReader, and returns its `read`, to be awaited."""

    def read_of(store):
        if request.param == "async":
            return EventReader(store).read
        return partial(asyncio.to_thread, BlockingEventReader(store).read)

    return read_of


def aggregates(events):
    return [event.aggregate_id for event in events]


async def test_event_reader_returns_event_as_written_and_writes_no_cursor(desk, reading_from):
    text = '{"b":  1.50, "a": "\\u00e9 é"}'
    with Session(desk.engine) as session:
        headers = {"traceparent": "00-é"}
        added = OUTBOX.add(session, placed(7, text, tenant="acme", headers=headers))
        session.commit()
    [event] = await reading_from(desk.store)()
    assert (event.id, event.type, event.topic, event.tenant) == (
        added.id,
        "placed",
        "orders",
        "acme",
    )
    assert (event.aggregate_type, event.aggregate_id, event.seq) == ("order", "7", 1)
    assert (event.payload, event.headers) == (text, headers)
    assert event.data == {"b": 1.5, "a": "é é"}
    assert event.time.tzinfo is UTC
    assert desk.ask("SELECT * FROM event_outbox_cursor") == []


async def test_event_reader_does_not_pass_earlier_open_transaction(desk, reading_from):
    read = reading_from(desk.store)
    async with Paused(desk).holding(placed("first")):
        if not one_at_a_time(desk):
            desk.commit(placed("second"))
        before = await read()
        # MariaDB gives out positions after the commit, so there is no gap before "second".
        assert aggregates(before) == (["second"] if desk.name == "mysql" else [])
    if one_at_a_time(desk):
        desk.commit(placed("second"))
    after = await read(after=before[-1].position if before else None)
    assert aggregates(after) == (["first"] if before else ["first", "second"])
    positions = [event.position for event in [*before, *after]]
    assert positions == sorted(set(positions))


async def test_event_reader_passes_gap_of_transaction_that_was_rolled_back(desk, reading_from):
    read, held = reading_from(desk.store), Paused(desk)
    held.fails = True
    async with held.holding(placed("never")):
        if not one_at_a_time(desk):
            desk.commit(placed("second"))
            assert aggregates(await read()) == (["second"] if desk.name == "mysql" else [])
    desk.commit(placed("third"))
    expected = ["third"] if one_at_a_time(desk) else ["second", "third"]
    assert aggregates(await read()) == expected


async def test_event_reader_with_stored_position_continues_after_restart(desk, reading_from):
    desk.commit(*[placed(str(n)) for n in range(5)])
    stored, seen = None, []
    for limit in (2, 2, 1, 5):
        store = SQLStore(desk.url)
        events = await reading_from(store)(after=stored, limit=limit)
        await store.aclose()
        seen.append(aggregates(events))
        stored = events[-1].position if events else stored
    assert seen == [["0", "1"], ["2", "3"], ["4"], []]
    desk.commit(placed("5"))
    assert aggregates(await reading_from(desk.store)(after=stored)) == ["5"]


async def test_event_reader_page_ends_early_when_payloads_are_large(
    desk, reading_from, monkeypatch
):
    monkeypatch.setattr(reading, "PAGE_BYTES", 5_000)
    desk.commit(*[placed(str(n), {"fill": "x" * (2_000 if n else 9_000)}) for n in range(7)])
    read, position, sizes = reading_from(desk.store), None, []
    while events := await read(after=position):
        sizes.append(len(events))
        position = events[-1].position
    assert sizes == [1, 3, 3]


async def test_two_event_readers_and_relay_keep_positions_of_their_own(desk, reading_from):
    desk.commit(*[placed(str(n)) for n in range(4)])
    one, other = reading_from(desk.store), reading_from(desk.store)
    first = await one(limit=3)
    assert aggregates(first) == ["0", "1", "2"]
    assert aggregates(await other()) == ["0", "1", "2", "3"]
    follower = await follow(desk)
    await follower.go_on()
    assert follower.told == [(str(n), 1) for n in range(4)]
    assert aggregates(await one(after=first[-1].position)) == ["3"]


async def test_event_reader_behind_swept_events_is_refused(desk, reading_from):
    desk.commit(*[placed(str(n)) for n in range(4)])
    read = reading_from(desk.store)
    first = await read(limit=2)
    reader, positions = await moved(desk, 3)
    await reader.sweep(keep_s=0)
    with pytest.raises(SettingsError, match=f"up to position {positions[2]} .* after=None"):
        await read(after=first[-1].position)
    assert aggregates(await read()) == ["3"]
    assert aggregates(await read(after=positions[2])) == ["3"]


async def test_event_reader_loses_nothing_while_many_write(desk, reading_from):
    engine, read = desk.new_engine(), reading_from(desk.store)
    rounds = 6 if one_at_a_time(desk) else 25
    writing = asyncio.gather(
        *(asyncio.to_thread(write_randomly, engine, seed, rounds) for seed in range(5))
    )
    seen, position, last, events = [], None, False, []
    while not last or events:
        last = writing.done()
        events = await read(after=position, limit=7)
        seen += events
        position = events[-1].position if events else position
        await asyncio.sleep(0)
    await writing
    engine.dispose()
    rows = desk.ask("SELECT * FROM event_outbox")
    assert sorted(event.id for event in seen) == sorted(row["event_id"] for row in rows)
    numbers = defaultdict(list)
    for event in seen:
        if event.seq is not None:
            numbers[event.aggregate_id].append(event.seq)
    for of_one in numbers.values():
        assert of_one == list(range(1, len(of_one) + 1))


async def test_event_reader_reads_through_engine_of_application(desk):
    desk.commit(placed("1"))
    assert aggregates(BlockingEventReader(SQLStore(desk.engine)).read()) == ["1"]
    engine = create_async_engine(with_driver(parse(desk.url), "async"))
    store = SQLStore(engine)
    assert aggregates(await EventReader(store).read()) == ["1"]
    await store.aclose()
    await engine.dispose()


GRANTS = {
    "postgresql": ["SELECT ON event_outbox, event_outbox_mark, event_outbox_id_seq"],
    "mysql": [
        "SELECT, UPDATE ON event_outbox",
        "SELECT, INSERT, UPDATE ON event_outbox_mark",
        "SELECT ON event_outbox_cursor",
    ],
}


@pytest.mark.parametrize("database_url", ["postgres", "mariadb"], indirect=True)
async def test_event_reader_needs_the_documented_grants_only(desk, reading_from):
    desk.commit(placed("1"))
    user = f"u{uuid.uuid4().hex[:12]}"
    password = "PASSWORD" if desk.name == "postgresql" else "IDENTIFIED BY"
    drop = [f"DROP OWNED BY {user}"] if desk.name == "postgresql" else []
    desk.do(f"CREATE USER {user} {password} 'pw'")
    url = parse(desk.url).set(username=user, password="pw")
    store = SQLStore(url.render_as_string(hide_password=False))
    try:
        desk.do(*(f"GRANT {grant} TO {user}" for grant in GRANTS[desk.name]))
        [event] = await reading_from(store)()
        assert await reading_from(store)(after=event.position) == []
    finally:
        await store.aclose()
        desk.do(*drop, f"DROP USER {user}")


@pytest.mark.parametrize("made", [EventReader, BlockingEventReader])
async def test_event_reader_without_sql_store_is_refused(made):
    with pytest.raises(SettingsError, match=r"takes an SQLStore, not a str.*SQLStore\(url\)"):
        made("sqlite:///x.db")


async def test_event_reader_without_tables_or_with_empty_page_is_refused(tmp_path, reading_from):
    store = SQLStore(f"sqlite:///{tmp_path}/empty.db")
    read = reading_from(store)
    with pytest.raises(SettingsError, match="semel db init"):
        await read()
    for limit in (0, True, "3"):
        with pytest.raises(SettingsError, match="limit"):
            await read(limit=limit)
    for after in ("12", b"12", True, 1.0):
        with pytest.raises(SettingsError, match="after is an int"):
            await read(after=after)
    await store.aclose()
