"""Transactions that are used in ways nobody thought of: rows, events and record stay together."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool

from semel import SettingsError
from semel.outbox import Event, Outbox
from semel.stores.sql import init
from semel.stores.sql.lines import parse, with_driver

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
        connection = session.connection()
        event.listen(connection, "commit", lambda late: OUTBOX.add(late, numbered(2)))
        with pytest.raises(SettingsError, match="Add it before"):
            session.commit()
    assert (shop.charges(), shop.told()) == (0, [])
