"""Transactions that are used in ways nobody thought of: rows, events and record stay together."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool

from semel import SettingsError
from semel.colour import SYNC, run
from semel.http.sqlalchemy import SqlAlchemyIdempotency
from semel.keys import make_key, new_attempt
from semel.outbox import Event, Outbox
from semel.stores.sql import SQLStore, init
from semel.stores.sql.bound import bound_link
from semel.stores.sql.lines import parse, with_driver
from semel.stores.sql.outbox_watermark import decided
from semel.values import Outcome, Terms

OUTBOX = Outbox(routes={"placed": "orders"})
CHARGE = sa.text("INSERT INTO charge VALUES (40)")

pytestmark = pytest.mark.timeout(60)


class Shop:
    """A database with our tables and one of its own, and engines of both colours."""

    def __init__(self, url):
        self.url = parse(url)
        self.engine = sa.create_engine(with_driver(self.url, "sync"), poolclass=QueuePool)
        self.async_engine = create_async_engine(with_driver(self.url, "async"))
        init(url)
        with self.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE charge (amount INTEGER)")

    def ask(self, select):
        with self.engine.connect() as connection:
            return connection.exec_driver_sql(select).scalars().all()

    def charges(self):
        return len(self.ask("SELECT amount FROM charge"))

    def told(self):
        """Payloads in the order of their numbers."""
        return self.ask("SELECT payload FROM event_outbox ORDER BY seq")

    def close(self):
        asyncio.run(self.async_engine.dispose())
        self.engine.dispose()


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shop.db"
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def shop(url):
    shop = Shop(url)
    yield shop
    shop.close()


def numbered(payload):
    return Event("placed", "order", "7", payload)


# --- events -------------------------------------------------------------------------------------


async def work_async(shop, work):
    async with AsyncSession(shop.async_engine) as session:
        await work(session)
    await shop.async_engine.dispose()


def test_events_are_numbered_as_they_were_added_wherever_they_waited(shop):
    async def work(session):
        OUTBOX.add(session, numbered(1))
        async with session.begin_nested():
            OUTBOX.add(session, numbered(2))
        OUTBOX.add(session, numbered(3))
        await session.run_sync(lambda sync: OUTBOX.add(sync, numbered(4)))
        OUTBOX.add(session, numbered(5))
        event.listen(session.sync_session, "before_commit", last_of_all, insert=True)
        await session.commit()

    def last_of_all(session):
        OUTBOX.add(session, numbered(6))

    asyncio.run(work_async(shop, work))
    assert shop.told() == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("joined", [False, True])
def test_a_block_that_ends_with_a_savepoint_open_loses_no_event(shop, joined):
    async def work(session):
        async with session.begin():
            OUTBOX.add(session, numbered(1))
            await session.begin_nested()
            OUTBOX.add(session, numbered(2))

    async def work_joined(_):
        async with shop.async_engine.begin() as connection, AsyncSession(connection) as session:
            await work(session)

    asyncio.run(work_async(shop, work_joined if joined else work))
    assert shop.told() == ["1", "2"]


def test_what_waits_outside_of_a_savepoint_does_not_go_with_it(shop):
    async def work(session):
        OUTBOX.add(session, numbered(1))
        outer = await session.begin_nested()
        OUTBOX.add(session, numbered(2))
        async with session.begin_nested():
            OUTBOX.add(session, numbered(3))
        await outer.rollback()
        await session.commit()

    asyncio.run(work_async(shop, work))
    assert shop.told() == ["1"]


def test_an_event_that_comes_too_late_for_its_commit_is_refused(shop):
    with Session(shop.engine) as session:
        session.execute(CHARGE)
        OUTBOX.add(session, numbered(1))
        event.listen(shop.engine, "commit", lambda late: OUTBOX.add(late, numbered(2)))
        with pytest.raises(SettingsError, match="Add it before"):
            session.commit()
    assert (shop.charges(), shop.told()) == (0, [])


def test_an_event_of_a_listener_on_the_connection_is_in_time(shop):
    with Session(shop.engine) as session:
        session.execute(CHARGE)
        OUTBOX.add(session, numbered(1))
        connection = session.connection()
        event.listen(connection, "commit", lambda late: OUTBOX.add(late, numbered(2)))
        session.commit()
    assert (shop.charges(), shop.told()) == (1, ["1", "2"])


# --- commits that are none ----------------------------------------------------------------------

TERMS = Terms(lease_s=60, ttl_s=600)
CREATED = Outcome("value", b"{}", 201)


class Handler:
    """What a session does between claim and answer, with a door's binding or step by step."""

    def __init__(self, shop, session):
        self.shop, self.session = shop, session

    def record(self):
        [state] = self.shop.ask("SELECT state FROM idempotency")
        return state


class AtTheDoor(Handler):
    def begin(self, name="order-1"):
        store = SQLStore(self.shop.engine)
        key = make_key(name, operation="pay")
        claim = {"attempt": new_attempt(), "terms": TERMS}
        self.won = run(store.ledger(SYNC).claim(key, **claim))
        self.ledger = store.bind(self.session, commit=True).ledger(SYNC)

    def end(self):
        run(self.ledger.complete(self.won.claim, CREATED))


class StepByStep(Handler):
    def begin(self):
        self.idempotency = SqlAlchemyIdempotency(self.session)
        self.idempotency.lock(idempotency_key="order-1", operation="pay")

    def store(self):
        self.idempotency.store_response(idempotency_key="order-1", response={}, status_code=201)

    def end(self):
        self.store()
        self.session.commit()


@pytest.fixture(params=[AtTheDoor, StepByStep])
def handler(request, shop):
    with Session(shop.engine) as session:
        yield request.param(shop, session)


@pytest.fixture
def steps(shop):
    with Session(shop.engine) as session:
        yield StepByStep(shop, session)


def test_a_commit_that_was_refused_is_not_made_by_the_next_one_on_that_connection(shop, handler):
    handler.begin()
    handler.session.execute(CHARGE)
    with pytest.raises(SettingsError):
        handler.session.connection().commit()
    handler.session.close()
    for _ in range(3):
        with shop.engine.begin() as connection:
            connection.exec_driver_sql("SELECT 1")
    assert shop.charges() == 0


def fail_quietly(session):
    with contextlib.suppress(sa.exc.DBAPIError):
        session.execute(sa.text("INSERT INTO there_is_no_such_table VALUES (1)"))


def test_an_error_that_was_swallowed_is_no_commit(shop, handler):
    """PostgreSQL answers such a COMMIT with ROLLBACK; the others go on as if nothing was."""
    handler.begin()
    handler.session.execute(CHARGE)
    event.listen(handler.session, "before_commit", fail_quietly)
    if shop.url.drivername.startswith("postgresql"):
        with pytest.raises(SettingsError, match="its error was swallowed"):
            handler.end()
        assert (shop.charges(), handler.record()) != (1, "COMPLETED")
    else:
        handler.end()
        assert (shop.charges(), handler.record()) == (1, "COMPLETED")


def test_after_a_deadlock_that_was_swallowed_nothing_is_committed(mariadb_url):
    """MariaDB has rolled everything back, and begins another transaction without a word."""
    shop = Shop(mariadb_url)
    with shop.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE stock (id INTEGER PRIMARY KEY, n INTEGER)")
        connection.exec_driver_sql("INSERT INTO stock VALUES (1, 0), (2, 0)")
    for kind in (AtTheDoor, StepByStep, None):
        with Session(shop.engine) as session:
            handler = None if kind is None else kind(shop, session)
            if handler is not None:
                handler.begin()
            session.execute(CHARGE)
            OUTBOX.add(session, numbered(1))
            lose_a_deadlock(shop, session)
            with pytest.raises(SettingsError, match="its error was swallowed"):
                session.commit() if handler is None else handler.end()
        assert (shop.charges(), shop.told()) == (0, [])
        with shop.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM idempotency")
    shop.close()


def lose_a_deadlock(shop, session):
    """The server ends the transaction that has written less."""
    take = "UPDATE stock SET n = n + 1 WHERE id = {}"
    with shop.engine.connect() as other:
        session.execute(sa.text(take.format(1)))
        for _ in range(50):
            other.exec_driver_sql("INSERT INTO charge VALUES (1)")
        other.exec_driver_sql(take.format(2))
        waits = threading.Thread(target=other.exec_driver_sql, args=[take.format(1)])
        waits.start()
        with contextlib.suppress(sa.exc.OperationalError):
            session.execute(sa.text(take.format(2)))
        waits.join()
        other.rollback()


@pytest.mark.parametrize(
    "text", ["COMMIT", " rollback", "END", "ROLLBACK WORK", "/* x */ commit", "-- x\n COMMIT"]
)
def test_a_transaction_is_not_ended_in_the_text_of_a_statement(shop, handler, text):
    handler.begin()
    handler.session.execute(CHARGE)
    with pytest.raises(SettingsError):
        handler.session.execute(sa.text(text))
    handler.end()
    assert (shop.charges(), handler.record()) == (1, "COMPLETED")


def test_a_savepoint_in_the_text_of_a_statement_is_the_handlers_own(shop, handler):
    handler.begin()
    handler.session.execute(CHARGE)
    for text in ("SAVEPOINT mine", "ROLLBACK TO SAVEPOINT mine", "ROLLBACK WORK TO mine"):
        if "WORK" not in text or not shop.url.drivername.startswith("sqlite"):
            handler.session.execute(sa.text(text))
    handler.end()
    assert (shop.charges(), handler.record()) == (1, "COMPLETED")


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "create_savepoint"])
def test_a_session_that_leaves_the_commit_to_others_cannot_carry_a_response(shop, mode):
    with (
        shop.engine.begin() as connection,
        Session(connection, join_transaction_mode=mode) as session,
    ):
        handler = AtTheDoor(shop, session)
        handler.begin()
        with pytest.raises(SettingsError, match="somebody else commits"):
            handler.end()
    assert handler.record() == "FAILED"


def test_a_session_that_controls_its_connection_can(shop):
    with shop.engine.connect() as connection, connection.begin():
        with Session(connection, join_transaction_mode="control_fully") as session:
            handler = AtTheDoor(shop, session)
            handler.begin()
            session.execute(CHARGE)
            handler.end()
        assert (shop.charges(), handler.record()) == (1, "COMPLETED")


def test_a_connection_that_sees_many_sessions_keeps_nothing_of_them(shop):
    with shop.engine.connect() as connection:
        heard = []
        for number in range(3):
            with Session(connection) as session:
                handler = AtTheDoor(shop, session)
                handler.begin(f"order-{number}")
                OUTBOX.add(session, numbered(number))
                handler.end()
            heard.append(len([*connection.dispatch.commit]))
    assert heard[0] == heard[2]


# --- a response that is not there any more ------------------------------------------------------


def test_after_a_rollback_the_response_has_to_be_stored_again(shop, steps):
    steps.begin()
    steps.session.execute(CHARGE)
    steps.store()
    steps.session.rollback()
    steps.session.execute(CHARGE)
    with pytest.raises(SettingsError, match="Call store_response first"):
        steps.session.commit()
    steps.store()
    steps.session.commit()
    assert (shop.charges(), steps.record()) == (1, "COMPLETED")


def test_a_response_goes_with_the_savepoint_that_it_was_stored_in(shop, steps):
    steps.begin()
    steps.session.execute(CHARGE)
    around = steps.session.begin_nested()
    with steps.session.begin_nested():
        steps.store()
    around.rollback()
    with pytest.raises(SettingsError, match="Call store_response first"):
        steps.session.commit()
    assert (shop.charges(), steps.record()) == (0, "PENDING")


def test_a_response_stays_when_another_savepoint_goes(shop, steps):
    steps.begin()
    steps.session.execute(CHARGE)
    with steps.session.begin_nested():
        steps.store()
    steps.session.begin_nested().rollback()
    steps.session.commit()
    assert (shop.charges(), steps.record()) == (1, "COMPLETED")


# --- readers of the outbox ----------------------------------------------------------------------


def far(connection):
    return run(decided(bound_link(connection)))


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_reader_with_one_snapshot_for_everything_is_refused(postgres_url, level):
    """It would be told of ids whose rows it cannot see, and go on behind them."""
    shop = Shop(postgres_url)
    old = shop.engine.execution_options(isolation_level=level)
    with old.connect() as connection, pytest.raises(SettingsError, match="READ COMMITTED"):
        far(connection)
    with shop.engine.connect() as connection:
        assert far(connection) == 0
    alone = shop.engine.execution_options(isolation_level="AUTOCOMMIT")
    with alone.connect() as connection:
        connection.exec_driver_sql(f"SET default_transaction_isolation TO '{level}'")
        assert far(connection) == 0
        connection.invalidate()
    shop.close()


def test_ids_that_are_given_out_in_bundles_are_refused(postgres_url):
    """One connection's bundle lies below what another has committed long ago."""
    shop = Shop(postgres_url)
    with shop.engine.begin() as connection:
        connection.exec_driver_sql("ALTER SEQUENCE event_outbox_id_seq CACHE 10")
    with shop.engine.connect() as connection, pytest.raises(SettingsError, match="CACHE 1"):
        far(connection)
    shop.close()
