"""The outbox on PostgreSQL, MariaDB and SQLite, with sync and with async sessions."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import random
import subprocess
import sys
import threading
import uuid
from collections import defaultdict
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import pairwise

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from semel.colour import SYNC, run
from semel.errors import IdempotencyConflictError, SettingsError
from semel.keys import make_key, new_attempt
from semel.outbox import Event, Outbox
from semel.stores.sql import SQLStore, init
from semel.stores.sql.lines import SyncLines, carry, open_engine, parse, with_driver
from semel.stores.sql.outbox_watermark import KEY, LOCKED, decided
from semel.values import Kept, Outcome, State, Terms
from support.servers import driver_settings

pytestmark = pytest.mark.contract

OUTBOX = Outbox(routes={"placed": "orders", "paid": "orders"})
INSERT = sa.text("INSERT INTO orders VALUES (1)")


def placed(aggregate="7", payload=None, **more):
    return Event("placed", "order", aggregate, {} if payload is None else payload, **more)


# --- both colours by one test -------------------------------------------------------------------


async def done(result):
    return await result if inspect.isawaitable(result) else result


@asynccontextmanager
async def entered(manager):
    if hasattr(manager, "__aenter__"):
        async with manager as given:
            yield given
    else:
        with manager as given:
            yield given


class Desk:
    """A database with the tables in it, an engine of the colour, and a look at the rows."""

    def __init__(self, url, colour):
        self.url, self.colour = parse(url), colour
        self.lines = SyncLines(open_engine(self.url), own=True)
        if not sa.inspect(self.lines.engine).has_table("orders"):
            init(url)
            self.do("CREATE TABLE orders (id INTEGER)")
        self.engine = self.new_engine()

    def do(self, *statements):
        with self.lines.engine.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def new_engine(self, **options):
        make = sa.create_engine if self.colour == "sync" else create_async_engine
        options.setdefault("connect_args", driver_settings(str(self.url)))
        return make(with_driver(self.url, self.colour), **options)

    @property
    def sync_engine(self):
        return getattr(self.engine, "sync_engine", self.engine)

    def session(self, bind=None, **options):
        kind = Session if self.colour == "sync" else AsyncSession
        return kind(bind if bind is not None else self.engine, **options)

    async def add_and_commit(self, *events, before=None):
        async with entered(self.session()) as session:
            if before is not None:
                await done(session.execute(before))
            for event in events:
                OUTBOX.add(session, event)
            await done(session.commit())

    def ask(self, select):
        with self.lines.engine.connect() as connection:
            return connection.exec_driver_sql(select).mappings().all()

    def rows(self):
        return self.ask("SELECT * FROM event_outbox ORDER BY id")

    def told(self):
        """Aggregate and number, in the order of their ids."""
        return [(row["aggregate_id"], row["seq"]) for row in self.rows()]

    def orders(self):
        return len(self.ask("SELECT * FROM orders"))

    def decided(self):
        return run(carry(self.lines, decided, SYNC))

    async def close(self):
        await done(self.engine.dispose())
        self.lines.close()
        self.lines.engine.dispose()


TABLES = ("event_outbox", "event_outbox_seq", "orders")


class Databases:
    """One per server for the whole file: making the tables takes longer than most tests here."""

    def __init__(self):
        self.made = {}

    def get(self, server):
        server.ensure_running()
        if server.name not in self.made:
            name = f"outbox_{uuid.uuid4().hex[:12]}"
            server.create_database(name)
            self.made[server.name] = server, name
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
        return f"sqlite:///{tmp_path}/orders.db"
    return databases.get(request.getfixturevalue(f"{request.param}_server"))


async def opened(url, colour):
    desk = Desk(url, colour)
    desk.do(*(f"DELETE FROM {table}" for table in TABLES))
    yield desk
    await desk.close()


@pytest.fixture(params=["sync", "async"])
async def desk(request, database_url):
    async for desk in opened(database_url, request.param):
        yield desk


@pytest.fixture
async def sync_desk(database_url):
    async for desk in opened(database_url, "sync"):
        yield desk


# --- what is written ----------------------------------------------------------------------------


async def test_an_event_is_written_as_it_was_given(desk):
    text = '{"b":  1.50, "a": "\\u00e9 é"}'
    async with entered(desk.session()) as session:
        added = OUTBOX.add(
            session,
            Event(
                type="paid",
                aggregate_type="order",
                aggregate_id=7,
                payload=text,
                tenant="acme",
                headers={"traceparent": "00-é"},
            ),
        )
        await done(session.commit())
    [row] = desk.rows()
    assert row["payload"] == text
    assert json.loads(row["headers"]) == {"traceparent": "00-é"}
    assert (row["tenant_id"], row["topic"], row["event_type"]) == ("acme", "orders", "paid")
    assert (row["aggregate_type"], row["aggregate_id"], row["seq"]) == ("order", "7", 1)
    assert (row["event_id"], added.topic) == (added.id, "orders")
    assert 0 <= row["shard"] < 256
    made = row["created_at"]
    made = datetime.fromisoformat(made) if isinstance(made, str) else made
    age = datetime.now(UTC) - (made if made.tzinfo else made.replace(tzinfo=UTC))
    assert abs(age.total_seconds()) < 60


async def test_events_keep_their_order_and_are_numbered_per_aggregate(desk):
    await desk.add_and_commit(placed("b"), placed("a"), placed("b"), placed("c"), placed("b"))
    await desk.add_and_commit(placed("a"), placed("b"))
    assert desk.told() == [("b", 1), ("a", 1), ("b", 2), ("c", 1), ("b", 3), ("a", 2), ("b", 4)]


async def test_tenants_topics_and_kinds_of_aggregate_have_numbers_of_their_own(desk):
    await desk.add_and_commit(
        placed("1"),
        placed("1", tenant="acme"),
        placed("1", topic="audit"),
        Event("placed", "invoice", "1", {}),
        placed("1"),
        placed("A"),
        placed("a"),
    )
    assert [row["seq"] for row in desk.rows()] == [1, 1, 1, 1, 2, 1, 1]


async def test_unordered_events_have_no_number_and_move_none(desk):
    await desk.add_and_commit(placed("1"), placed("1", ordered=False), placed("1"))
    await desk.add_and_commit(placed("2", ordered=False))
    assert sorted(desk.told(), key=str) == [("1", 1), ("1", 2), ("1", None), ("2", None)]


async def test_a_transaction_with_nothing_but_events_is_committed(desk):
    async with entered(desk.session()) as session, entered(session.begin()):
        OUTBOX.add(session, placed())
    assert desk.told() == [("7", 1)]


async def test_many_and_large_events_in_one_commit(desk):
    large = [placed("1", {"fill": "x" * 400_000, "n": n}) for n in range(5)]
    small = [placed(str(n % 700)) for n in range(1_300)]
    await desk.add_and_commit(*large, *small)
    rows = desk.rows()
    assert len(rows) == 1_305
    assert [json.loads(row["payload"])["n"] for row in rows[:5]] == [0, 1, 2, 3, 4]
    assert [row["aggregate_id"] for row in rows[5:]] == [str(n % 700) for n in range(1_300)]
    gap_free(rows)


def gap_free(rows):
    numbers = defaultdict(list)
    for row in rows:
        numbers[row["tenant_id"], row["topic"], row["aggregate_id"]].append(row["seq"])
    for of_one in numbers.values():
        assert of_one == list(range(1, len(of_one) + 1))


# --- with the transaction, or not at all --------------------------------------------------------


async def test_a_rollback_drops_events_with_the_rows_and_leaves_no_gap(desk):
    await desk.add_and_commit(placed())
    async with entered(desk.session()) as session:
        await done(session.execute(INSERT))
        OUTBOX.add(session, placed())
        await done(session.rollback())
        assert desk.orders() == 0
        OUTBOX.add(session, placed("8"))
        await done(session.commit())
    async with entered(desk.session()) as session:
        OUTBOX.add(session, placed())  # closed without a word
    await desk.add_and_commit(placed())
    assert desk.told() == [("7", 1), ("8", 1), ("7", 2)]


async def test_an_error_in_the_block_drops_the_events(desk):
    with pytest.raises(LookupError):
        async with entered(desk.session()) as session, entered(session.begin()):
            OUTBOX.add(session, placed())
            await done(session.execute(INSERT))
            raise LookupError
    assert (desk.told(), desk.orders()) == ([], 0)


async def test_two_transactions_of_one_session_do_not_mix(desk):
    async with entered(desk.session()) as session:
        OUTBOX.add(session, placed("1"))
        await done(session.commit())
        await done(session.execute(INSERT))
        await done(session.commit())
        OUTBOX.add(session, placed("1"))
        await done(session.commit())
    assert desk.told() == [("1", 1), ("1", 2)]


@pytest.mark.parametrize("begun", [True, False], ids=["statement-first", "event-first"])
async def test_savepoints_drop_or_keep_their_own(desk, begun):
    async with entered(desk.session()) as session, entered(session.begin()):
        if begun:
            await done(session.execute(INSERT))
        OUTBOX.add(session, placed("kept"))
        with contextlib.suppress(LookupError):
            async with entered(session.begin_nested()):
                OUTBOX.add(session, placed("dropped"))
                raise LookupError
        async with entered(session.begin_nested()):
            OUTBOX.add(session, placed("released"))
        async with entered(session.begin_nested()):
            OUTBOX.add(session, placed("outer"))
            with contextlib.suppress(LookupError):
                async with entered(session.begin_nested()):
                    await done(session.execute(INSERT))
                    OUTBOX.add(session, placed("dropped"))
                    async with entered(session.begin_nested()):
                        OUTBOX.add(session, placed("dropped"))
                    raise LookupError
            async with entered(session.begin_nested()):
                OUTBOX.add(session, placed("inner"))
        OUTBOX.add(session, placed("last"))
    assert sorted(desk.told()) == [(n, 1) for n in ("inner", "kept", "last", "outer", "released")]


async def test_what_was_released_goes_with_the_savepoint_around_it(desk):
    async with entered(desk.session()) as session, entered(session.begin()):
        await done(session.execute(INSERT))
        with contextlib.suppress(LookupError):
            async with entered(session.begin_nested()):
                async with entered(session.begin_nested()):
                    OUTBOX.add(session, placed("dropped"))
                raise LookupError
        OUTBOX.add(session, placed("kept"))
    assert desk.told() == [("kept", 1)]


async def test_a_savepoint_that_is_open_at_the_commit_is_committed(desk):
    async with entered(desk.engine.connect()) as connection:
        await done(connection.begin())
        await done(connection.begin_nested())
        OUTBOX.add(connection, placed())
        transaction = connection.get_transaction()
        await done(transaction.commit())
    assert desk.told() == [("7", 1)]


# --- every way to have a transaction ------------------------------------------------------------


async def test_a_connection_will_do(desk):
    async with entered(desk.engine.begin()) as connection:
        OUTBOX.add(connection, placed("begin"))
    async with entered(desk.engine.connect()) as connection:
        OUTBOX.add(connection, placed("as you go"))
        await done(connection.commit())
        OUTBOX.add(connection, placed("not"))
        await done(connection.rollback())
        await done(connection.execute(INSERT))
        OUTBOX.add(connection, placed("after"))
        await done(connection.commit())
    assert desk.told() == [("begin", 1), ("as you go", 1), ("after", 1)]
    assert desk.orders() == 1


async def test_an_engine_with_options_will_do(desk):
    engine = desk.engine.execution_options(compiled_cache=None)
    async with entered(desk.session(engine)) as session:
        OUTBOX.add(session, placed())
        await done(session.commit())
    await desk.add_and_commit(placed())
    assert desk.told() == [("7", 1), ("7", 2)]


async def test_a_scoped_session_will_do(desk):
    if desk.colour == "sync":
        scoped = scoped_session(sessionmaker(desk.engine))
    else:
        scoped = async_scoped_session(lambda: AsyncSession(desk.engine), asyncio.current_task)
    OUTBOX.add(scoped, placed())
    await done(scoped.commit())
    await done(scoped.remove())
    assert desk.told() == [("7", 1)]


MODES = ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("begun", [True, False], ids=["statement-first", "event-first"])
async def test_a_session_joined_to_a_connection_goes_by_that_one(desk, mode, begun):
    async with entered(desk.engine.connect()) as connection:
        for how in ("commit", "rollback"):
            outer = await done(connection.begin())
            async with entered(desk.session(connection, join_transaction_mode=mode)) as session:
                if begun:
                    await done(session.execute(INSERT))
                OUTBOX.add(session, placed(how))
                await done(session.commit())
                if mode != "control_fully":
                    assert desk.told() == []
            if mode != "control_fully":
                await done(getattr(outer, how)())
                assert desk.told() == ([("commit", 1)] if how == "commit" else [])
                await done(connection.execute(sa.text("DELETE FROM event_outbox")))
                await done(connection.commit())
    if mode == "control_fully":
        assert desk.told() == [("commit", 1), ("rollback", 1)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("begun", [True, False], ids=["statement-first", "event-first"])
async def test_a_joined_session_that_is_rolled_back_takes_its_events_along(desk, mode, begun):
    async with entered(desk.engine.connect()) as connection:
        await done(connection.begin())
        async with entered(desk.session(connection, join_transaction_mode=mode)) as session:
            if begun:
                await done(session.execute(INSERT))
            OUTBOX.add(session, placed())
            await done(session.rollback())
        await done(connection.commit())
    assert (desk.told(), desk.orders()) == ([], 0)


@pytest.mark.parametrize("begun", [True, False], ids=["statement-first", "event-first"])
async def test_a_connection_that_commits_under_its_session_commits_its_events(desk, begun):
    async with entered(desk.engine.connect()) as connection:
        await done(connection.begin())
        session = desk.session(connection)
        if begun:
            await done(session.execute(INSERT))
        OUTBOX.add(session, placed())
        await done(connection.get_transaction().commit())
        assert desk.told() == [("7", 1)]
        await done(session.close())


async def test_a_savepoint_of_the_connection_drops_events_of_a_joined_session(desk):
    async with entered(desk.engine.connect()) as connection:
        outer = await done(connection.begin())
        nested = await done(connection.begin_nested())
        session = desk.session(connection, join_transaction_mode="rollback_only")
        OUTBOX.add(session, placed())
        await done(nested.rollback())
        await done(outer.commit())
        await done(session.close())
    assert desk.told() == []


@pytest.mark.parametrize("desk", ["async"], indirect=True)
async def test_a_session_whose_connection_began_anew_commits_its_events(desk):
    async with desk.engine.connect() as connection:
        await connection.begin()
        async with desk.session(connection, join_transaction_mode="control_fully") as session:
            OUTBOX.add(session, placed())
            await connection.rollback()
            await connection.begin()
            await session.commit()
    assert desk.told() == [("7", 1)]


async def test_events_added_while_the_session_flushes_are_committed(desk):
    """As a listener of the application's own does it, in the middle of a commit."""
    registry = sa.orm.registry()
    table = sa.Table("orders", registry.metadata, sa.Column("id", sa.Integer, primary_key=True))

    class Order:
        pass

    registry.map_imperatively(Order, table)

    @sa.event.listens_for(Order, "after_insert")
    def tell(mapper, connection, order):
        OUTBOX.add(sa.orm.object_session(order), placed(order.id))

    async with entered(desk.session()) as session:
        order = Order()
        order.id = 5
        session.add(order)
        await done(session.commit())
    assert (desk.told(), desk.orders()) == ([("5", 1)], 1)
    registry.dispose()


@pytest.mark.parametrize("desk", ["async"], indirect=True)
async def test_the_sync_side_of_an_async_session_will_do(desk):
    async with desk.session() as session:
        OUTBOX.add(session.sync_session, placed())
        await session.commit()
        await session.run_sync(lambda sync: OUTBOX.add(sync, placed("8")))
        await session.commit()
    assert desk.told() == [("7", 1), ("8", 1)]


# --- refused ------------------------------------------------------------------------------------


async def test_autocommit_is_refused(desk):
    options = [
        desk.engine.execution_options(isolation_level="AUTOCOMMIT"),
        made := desk.new_engine(isolation_level="AUTOCOMMIT"),
    ]
    for engine in options:
        async with entered(desk.session(engine)) as session:
            with pytest.raises(SettingsError, match="AUTOCOMMIT"):
                OUTBOX.add(session, placed())
        async with entered(engine.connect()) as connection:
            with pytest.raises(SettingsError, match="AUTOCOMMIT"):
                OUTBOX.add(connection, placed())
    await done(made.dispose())


async def test_autocommit_that_only_the_driver_knows_of_fails_the_commit(sync_desk):
    desk = sync_desk
    engine = desk.new_engine()

    @sa.event.listens_for(engine, "connect")
    def connected(driver, _):
        if engine.dialect.name == "sqlite":
            driver.isolation_level = None
        elif engine.dialect.name == "postgresql":
            driver.autocommit = True
        else:
            driver.autocommit(True)

    with Session(engine) as session:
        session.execute(INSERT)
        OUTBOX.add(session, placed())
        with pytest.raises(SettingsError, match="autocommit"):
            session.commit()
    assert desk.told() == []
    assert desk.ask("SELECT * FROM event_outbox_seq") == []
    engine.dispose()


async def test_two_phases_are_refused(desk):
    async with entered(desk.session(twophase=True)) as session:
        with pytest.raises(SettingsError, match="two-phase"):
            OUTBOX.add(session, placed())
    if desk.engine.dialect.name == "sqlite":
        return  # it has none
    sync = sa.create_engine(with_driver(desk.url, "sync"))
    with sync.connect() as connection:
        connection.begin_twophase()
        with pytest.raises(SettingsError, match="two-phase"):
            OUTBOX.add(connection, placed())
    sync.dispose()


async def test_without_the_tables_the_commit_says_what_to_do(desk):
    for table in ("event_outbox_seq", "event_outbox"):
        desk.do(f"ALTER TABLE {table} RENAME TO away")
        try:
            with pytest.raises(SettingsError, match="semel db init"):
                await desk.add_and_commit(placed(), before=INSERT)
        finally:
            desk.do(f"ALTER TABLE away RENAME TO {table}")
    assert desk.orders() == 0
    await desk.add_and_commit(placed())
    assert desk.told() == [("7", 1)]


# --- a commit that fails ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["session", "block", "connection"])
async def test_what_cannot_be_written_takes_the_rows_back(desk, how):
    await desk.add_and_commit(placed("1", {"n": 1}, id="e-1"))
    bad = placed("1", {"n": 2}, id="e-1")

    async def fail():
        if how == "session":
            async with entered(desk.session()) as session:
                await done(session.execute(INSERT))
                OUTBOX.add(session, bad)
                await done(session.commit())
        elif how == "block":
            async with entered(desk.session()) as session, entered(session.begin()):
                await done(session.execute(INSERT))
                OUTBOX.add(session, bad)
        else:
            async with entered(desk.engine.begin()) as connection:
                await done(connection.execute(INSERT))
                OUTBOX.add(connection, bad)

    with pytest.raises(IdempotencyConflictError, match="e-1"):
        await fail()
    await desk.add_and_commit(placed("1"))
    assert desk.orders() == 0
    assert desk.told() == [("1", 1), ("1", 2)]


async def test_a_connection_used_again_after_it_brings_no_rows_in_without_their_events(desk):
    await desk.add_and_commit(placed("1", id="e-1"))
    async with entered(desk.engine.connect()) as connection:
        await done(connection.execute(INSERT))
        OUTBOX.add(connection, placed("2", id="e-1"))
        with pytest.raises(IdempotencyConflictError):
            await done(connection.commit())
        await done(connection.rollback())
        OUTBOX.add(connection, placed("1"))
        await done(connection.commit())
    assert desk.orders() == 0
    assert desk.told() == [("1", 1), ("1", 2)]


# --- ids of one's own ---------------------------------------------------------------------------


async def test_an_event_that_is_there_is_not_added_again(desk):
    again = placed("1", '{"a": 1, "b": 2}', id="e-1")
    await desk.add_and_commit(again, placed("1"))
    await desk.add_and_commit(placed("1"), again, placed("1"), again, before=INSERT)
    await desk.add_and_commit(placed("1", {"b": 2, "a": 1}, id="e-1", headers={"trace": "2"}))
    assert desk.orders() == 1
    assert desk.told() == [("1", 1), ("1", 2), ("1", 3), ("1", 4)]
    assert [row["event_id"] for row in desk.rows()].count("e-1") == 1


@pytest.mark.parametrize(
    "other",
    [
        {"payload": {"n": 1.0}},
        {"payload": {"n": "1"}},
        {"payload": {"n": True}},
        {"aggregate": "2"},
        {"tenant": "acme"},
        {"topic": "audit"},
        {"ordered": False},
    ],
    ids=str,
)
async def test_an_id_with_another_content_is_a_conflict(desk, other):
    await desk.add_and_commit(placed("1", {"n": 1}, id="e-1"))
    event = {"aggregate": "1", "payload": {"n": 1}, "id": "e-1"} | other
    for events in ([placed(**event)], [placed("1"), placed(**event)]):
        with pytest.raises(IdempotencyConflictError, match="another content"):
            await desk.add_and_commit(*events)
    with pytest.raises(IdempotencyConflictError):
        await desk.add_and_commit(placed("1", id="e-2"), placed("2", id="e-2"))
    assert desk.told() == [("1", 1)]


class Paused:
    """Holds one commit back after its rows were written and before COMMIT is sent."""

    def __init__(self, desk):
        self.desk = desk
        self.written, self.go_on = threading.Event(), threading.Event()
        self.engine = desk.new_engine()

    def pause(self, connection):
        [count] = connection.exec_driver_sql("SELECT count(*) FROM event_outbox").one()
        if count == 0:
            return  # too early: nobody is told, and the test fails
        self.written.set()
        assert self.go_on.wait(60)

    def commit(self, *events):
        with Session(self.engine) as session:
            for event in events:
                OUTBOX.add(session, event)
            self.commit_paused(session)

    def commit_paused(self, session):
        # Behind the outbox, which listens since the first event.
        sa.event.listen(self.engine, "commit", self.pause)
        session.commit()

    @contextlib.contextmanager
    def holding(self, *events):
        worker = threading.Thread(target=self.commit, args=events)
        worker.start()
        try:
            assert self.written.wait(60)
            yield self
        finally:
            self.go_on.set()
            worker.join(60)
            self.engine.dispose()


@pytest.mark.parametrize("ordered", [True, False])
async def test_one_id_added_by_two_at_once_is_one_row_and_leaves_no_gap(sync_desk, ordered):
    desk = sync_desk
    await desk.add_and_commit(placed("1"))
    same = placed("1", id="e-1", ordered=ordered)
    failed = []

    def second():
        try:
            with Session(desk.engine) as session:
                # Its snapshot is older than what it will run into.
                session.execute(sa.text("SELECT * FROM orders")).all()
                if desk.engine.dialect.name == "sqlite":
                    session.rollback()  # there, an old snapshot cannot write at all
                began.set()
                for event in (placed("1"), same, placed("1")):
                    OUTBOX.add(session, event)
                session.commit()
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    began = threading.Event()
    worker = threading.Thread(target=second)
    with Paused(desk).holding(same):
        worker.start()
        assert began.wait(60)
        worker.join(0.3)
        assert worker.is_alive(), "it waits for whoever has the id or the counter"
    worker.join(60)
    assert failed == []
    await desk.add_and_commit(placed("1"))
    numbers = [row["seq"] for row in desk.rows() if row["seq"]]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert len(desk.rows()) == 5
    assert [row["event_id"] for row in desk.rows()].count("e-1") == 1


async def test_another_unique_key_in_the_way_is_the_databases_own_error(desk):
    desk.do("CREATE UNIQUE INDEX theirs ON event_outbox (aggregate_id)")
    try:
        await desk.add_and_commit(placed("1"))
        for event in (placed("1", id="e-1"), placed("1")):
            with pytest.raises(sa.exc.IntegrityError):
                await desk.add_and_commit(event, before=INSERT)
    finally:
        on = " ON event_outbox" if desk.engine.dialect.name in {"mysql", "mariadb"} else ""
        desk.do(f"DROP INDEX theirs{on}")
    await desk.add_and_commit(placed("1"))
    assert (desk.told(), desk.orders()) == ([("1", 1), ("1", 2)], 0)


async def test_an_id_taken_in_a_later_piece_takes_the_earlier_pieces_back(sync_desk):
    """Many large events, of which the last one turns out to be there already."""
    desk = sync_desk
    large = [placed("1", {"fill": "x" * 600_000, "n": n}, id=f"l-{n}") for n in range(3)]
    failed = []

    def second():
        try:
            run(desk.add_and_commit(*large, placed("1"), last))
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    last = placed("2", id="e-1", ordered=False)
    worker = threading.Thread(target=second)
    with Paused(desk).holding(last):
        worker.start()
        worker.join(0.5)
        assert worker.is_alive()
    worker.join(60)
    assert failed == []
    assert [told for told in desk.told() if told[0] == "1"] == [("1", n) for n in range(1, 5)]
    assert desk.told().count(("2", None)) == 1


# --- together with a recorded response ----------------------------------------------------------


async def test_a_record_rows_and_events_are_committed_by_one_call(sync_desk):
    desk = sync_desk
    store = SQLStore(desk.url.render_as_string(hide_password=False))
    desk.do("DELETE FROM idempotency")

    def request(key, event):
        with Session(desk.engine) as session:
            ledger = store.bind(session, commit=True).ledger(SYNC)
            key = make_key(key)
            won = run(ledger.claim(key, attempt=new_attempt(), terms=Terms()))
            session.execute(INSERT)
            OUTBOX.add(session, event)
            return run(ledger.complete(won.claim, Outcome("value", b"1", 201)))

    assert request("k-1", placed("1", id="e-1")) == Kept()
    with pytest.raises(IdempotencyConflictError):
        request("k-2", placed("2", id="e-1"))
    assert (desk.told(), desk.orders()) == ([("1", 1)], 1)
    assert run(store.ledger(SYNC).look(make_key("k-1").id)).state is State.COMPLETED
    assert run(store.ledger(SYNC).look(make_key("k-2").id)).state is State.FAILED
    store.close()


# --- what it costs ------------------------------------------------------------------------------


async def commit_counted(desk, *events):
    said = []

    def count(conn, cursor, statement, *_):
        said.append(statement.split()[0])

    async with entered(desk.session()) as session:
        await done(session.execute(INSERT))
        for event in events:
            OUTBOX.add(session, event)
        sa.event.listen(desk.sync_engine, "before_cursor_execute", count)
        try:
            await done(session.commit())
        finally:
            sa.event.remove(desk.sync_engine, "before_cursor_execute", count)
    return len(said)


@pytest.mark.parametrize("many", [1, 2, 400])
async def test_statements_of_a_commit(desk, many):
    plain = 2 if desk.engine.dialect.name == "postgresql" else 3
    alone = plain == 2 and many == 1
    numbered = [placed(str(n % 90)) for n in range(many)]
    assert await commit_counted(desk, *numbered) == (1 if alone else plain)
    unordered = [placed(str(n % 90), ordered=False) for n in range(many)]
    assert await commit_counted(desk, *unordered) == (2 if plain == 2 and not alone else 1)
    given = [placed(str(n % 90), id=f"e-{n}") for n in range(many)]
    assert await commit_counted(desk, *given) == plain + 1
    assert await commit_counted(desk, *given) == 1, "all there: nothing but a look"
    assert await commit_counted(desk, *given, placed("1")) == plain + 1
    assert await commit_counted(desk) == 0
    gap_free([row for row in desk.rows() if row["seq"]])


# --- many at once -------------------------------------------------------------------------------

AGGREGATES = [f"agg-{n}" for n in range(6)]


async def test_writers_of_overlapping_aggregates_never_deadlock(desk):
    """Each adds in an order of its own; only the sorted counters keep them apart."""

    async def writer(seed):
        dice = random.Random(seed)
        for _ in range(8):
            chosen = dice.sample(AGGREGATES, 4)
            await desk.add_and_commit(*map(placed, chosen + chosen[:1]))

    if desk.colour == "sync":
        await asyncio.gather(*(asyncio.to_thread(asyncio.run, writer(n)) for n in range(8)))
    else:
        await asyncio.gather(*(writer(n) for n in range(8)))
    rows = desk.rows()
    assert len(rows) == 8 * 8 * 5
    for of_one in AGGREGATES:
        numbers = [row["seq"] for row in rows if row["aggregate_id"] == of_one]
        assert numbers == list(range(1, len(numbers) + 1)), "ids and numbers in the same order"


async def test_writers_of_the_same_unordered_ids_never_deadlock(desk):
    """No counter keeps these apart, and each waits for whoever has put an id before."""

    async def writer(seed, ids):
        shuffled = random.Random(seed).sample(ids, len(ids))
        await desk.add_and_commit(*(placed(id=id, ordered=False) for id in shuffled))

    ids = [f"e-{n}" for n in range(400)]
    if desk.colour == "sync":
        runs = [asyncio.to_thread(asyncio.run, writer(n, ids)) for n in range(6)]
    else:
        runs = [writer(n, ids) for n in range(6)]
    await asyncio.gather(*runs)
    assert len(desk.rows()) == len(ids)


# --- how far a reader may go --------------------------------------------------------------------


@pytest.fixture
async def postgres_desk(postgres_url):
    desk = Desk(postgres_url, "sync")
    yield desk
    await desk.close()


class Reader:
    """Goes on from where it was, and never comes back."""

    def __init__(self, desk):
        self.desk, self.at, self.seen = desk, 0, []

    def go_on(self):
        until = self.desk.decided()
        rows = self.desk.ask(
            f"SELECT id, aggregate_id FROM event_outbox WHERE id > {self.at} AND id <= {until} "
            "ORDER BY id"
        )
        self.at = max(self.at, until)
        self.seen += [row["aggregate_id"] for row in rows]
        return self.seen


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh-sequence", "used-sequence"])
async def test_commits_in_the_reversed_order_are_not_passed_over(postgres_desk, fresh):
    desk, expected = postgres_desk, []
    reader = Reader(desk)
    if not fresh:
        await desk.add_and_commit(placed("0"))
        expected = ["0"]
    with Paused(desk).holding(placed("first")):
        await desk.add_and_commit(placed("second"))
        assert [row["aggregate_id"] for row in desk.rows()] == [*expected, "second"]
        assert reader.go_on() == expected, "an id below the second's may still appear"
    assert reader.go_on() == [*expected, "first", "second"]


async def test_a_savepoint_that_was_rolled_back_leaves_the_writer_guarded(postgres_desk):
    desk = postgres_desk
    reader, held = Reader(desk), Paused(desk)

    def commit():
        with Session(held.engine) as session:
            with contextlib.suppress(LookupError), session.begin_nested():
                session.execute(INSERT)
                OUTBOX.add(session, placed("dropped"))
                raise LookupError
            OUTBOX.add(session, placed("first"))
            held.commit_paused(session)

    held.commit = commit
    with held.holding():
        await desk.add_and_commit(placed("second"))
        assert reader.go_on() == []
    assert reader.go_on() == ["first", "second"]


async def test_a_writer_that_is_rolled_back_at_last_holds_nobody_up(postgres_desk):
    desk = postgres_desk
    reader, held = Reader(desk), Paused(desk)

    def refuse(_):
        held.pause(_)
        raise LookupError

    def commit():
        with contextlib.suppress(LookupError), Session(held.engine) as session:
            OUTBOX.add(session, placed("never"))
            sa.event.listen(held.engine, "commit", refuse)
            session.commit()

    held.commit = commit
    with held.holding():
        await desk.add_and_commit(placed("second"))
        assert reader.go_on() == []
    assert reader.go_on() == ["second"]
    assert reader.at == 2


async def test_strangers_hold_nobody_up(postgres_desk):
    """Neither a long transaction of theirs, nor their advisory locks, nor another schema."""
    desk = postgres_desk
    engine = open_engine(desk.url)
    with engine.connect() as other, engine.connect() as schema:
        other.exec_driver_sql("BEGIN")
        other.exec_driver_sql("INSERT INTO orders VALUES (1)")
        other.exec_driver_sql("SELECT pg_advisory_xact_lock(0), pg_advisory_xact_lock_shared(1)")
        other.exec_driver_sql("SELECT pg_advisory_xact_lock(7711, 0)")
        schema.exec_driver_sql("CREATE SCHEMA elsewhere")
        schema.exec_driver_sql("SET search_path = elsewhere")
        schema.exec_driver_sql("CREATE SEQUENCE event_outbox_id_seq")
        schema.exec_driver_sql("BEGIN")
        schema.exec_driver_sql(f"SELECT {LOCKED} FROM event_outbox_id_seq AS s")
        await desk.add_and_commit(placed("1"))
        await desk.add_and_commit(placed("2"))
        assert Reader(desk).go_on() == ["1", "2"]
        assert desk.decided() == 2
    engine.dispose()


async def test_another_database_of_the_server_holds_nobody_up(postgres_desk, postgres_server):
    """One that was copied from ours has a sequence of the same number, and so the same keys."""
    desk = postgres_desk
    select = f"SELECT {KEY} AS key FROM event_outbox_id_seq AS s"
    [row] = desk.ask(select)
    engine = sa.create_engine(with_driver(desk.url.set(database="postgres"), "sync"))
    with engine.begin() as connection:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock_shared({row['key']})")
        await desk.add_and_commit(placed("1"))
        assert desk.decided() == 1
    engine.dispose()


@pytest.mark.parametrize("after", [1, 2])
async def test_a_writer_that_comes_while_the_reader_looks_is_not_passed_over(postgres_desk, after):
    """The sequence, then the locks: the other way round, it is in neither."""
    desk = postgres_desk
    reader, held, asked = Reader(desk), Paused(desk), []
    with contextlib.ExitStack() as held_back:

        class Meddled:
            dialect = desk.lines.dialect

            def __init__(self, link):
                self.link = link

            async def fetch(self, statement, params=()):
                rows = await self.link.fetch(statement, params)
                asked.append(statement)
                if len(asked) == after:
                    held_back.enter_context(held.holding(placed("1")))
                return rows

        desk.decided = lambda: run(carry(desk.lines, lambda link: decided(Meddled(link)), SYNC))
        assert reader.go_on() == []
    assert reader.go_on() == ["1"]


async def test_nothing_is_passed_over_while_many_write(postgres_desk):
    desk = postgres_desk
    engine = desk.new_engine(pool_size=8)
    reader, over = Reader(desk), threading.Event()

    def write(seed):
        dice = random.Random(seed)
        for n in range(40):
            with Session(engine) as session:
                for _ in range(dice.randint(1, 3)):
                    OUTBOX.add(session, placed(f"{seed}-{dice.randint(0, 4)}", {"n": n}))
                if dice.random() < 0.1:
                    session.rollback()
                else:
                    session.commit()

    def read():
        while not over.is_set():
            reader.go_on()

    watcher = threading.Thread(target=read)
    watcher.start()
    await asyncio.gather(*(asyncio.to_thread(write, seed) for seed in range(8)))
    over.set()
    watcher.join(60)
    reader.go_on()
    assert reader.seen == [row["aggregate_id"] for row in desk.rows()]
    engine.dispose()


async def test_a_standby_is_refused(postgres_desk):
    class Standby:
        dialect = postgres_desk.lines.dialect

        async def fetch(self, statement, params=()):
            return [(5, 1, True, 1, "now")]

    with pytest.raises(SettingsError, match="primary"):
        run(decided(Standby()))


async def test_on_sqlite_ids_are_decided_when_they_are_seen_and_never_come_again(tmp_path):
    desk = Desk(f"sqlite:///{tmp_path}/orders.db", "sync")
    assert desk.decided() == 0
    with Paused(desk).holding(placed("1")):
        assert desk.decided() == 0
    assert desk.decided() == 1
    desk.do("DELETE FROM event_outbox")
    await desk.add_and_commit(placed("2"))
    assert desk.decided() == 2
    assert Reader(desk).go_on() == ["2"]
    await desk.close()


async def test_on_mariadb_ids_decide_nothing(mariadb_url):
    desk = Desk(mariadb_url, "sync")
    await desk.add_and_commit(placed("1"))
    assert desk.decided() is None
    await desk.close()


# --- killed -------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import sqlalchemy as sa
from sqlalchemy.orm import Session
from semel.outbox import Event, Outbox

engine = sa.create_engine(sys.argv[1])
outbox = Outbox(routes={"placed": "orders"})

def kill(connection):
    [count] = connection.exec_driver_sql("SELECT count(*) FROM event_outbox").one()
    print("written", count, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

with Session(engine) as session, session.begin():
    session.execute(sa.text("INSERT INTO orders VALUES (1)"))
    outbox.add(session, Event("placed", "order", "7", {}))
    sa.event.listen(engine, "commit", kill)
"""


async def test_killed_between_its_rows_and_the_commit_it_leaves_nothing(sync_desk):
    desk = sync_desk
    url = with_driver(desk.url, "sync").render_as_string(hide_password=False)
    killed = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", KILLED, url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (killed.returncode, killed.stdout) == (-9, "written 1\n"), killed.stderr
    await desk.add_and_commit(placed("7"))
    assert (desk.told(), desk.orders()) == ([("7", 1)], 0)
    if desk.engine.dialect.name == "postgresql":
        assert desk.decided() == desk.rows()[-1]["id"]


def test_ids_of_one_commit_grow(tmp_path):
    desk = Desk(f"sqlite:///{tmp_path}/orders.db", "sync")
    run(desk.add_and_commit(*[placed(str(n)) for n in range(5)]))
    assert all(a["id"] < b["id"] for a, b in pairwise(desk.rows()))
    run(desk.close())
