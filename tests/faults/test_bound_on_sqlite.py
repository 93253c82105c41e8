"""A session on SQLite that has written is its only writer: no step can be recorded beside it."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncSession,
    async_scoped_session,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from semel import SettingsError, once, step
from semel.colour import ASYNC, SYNC
from semel.keys import make_key, new_attempt
from semel.stores.sql import SQLStore, init
from semel.values import Kept, Outcome, Terms

pytestmark = pytest.mark.timeout(20)  # who waits for the lock waits a minute

KEY = make_key("order-1", operation="pay")
TERMS = Terms(lease_s=60, ttl_s=600)
CREATED = Outcome("value", b'{"paid":true}', 201)


# --- who can be bound ---------------------------------------------------------------------------


class Desk:
    """A session or a connection, bound, and what a test does with it."""

    def __init__(self, url, make, *, commit, colour=None):
        is_async = issubclass(make, AsyncSession | AsyncConnection | async_scoped_session)
        create = create_async_engine if is_async else sa.create_engine
        self.engine = create(url.replace("sqlite", "sqlite+aiosqlite") if is_async else url)
        self.is_async = is_async
        self.make = make
        self.commit = commit
        self.colour = colour or (ASYNC if is_async else SYNC)
        self.store = SQLStore(url)

    async def __aenter__(self):
        if self.make in (sa.Connection, AsyncConnection):
            self.session = self.engine.connect()
            if self.is_async:
                await self.session.start()
        elif self.make in (scoped_session, async_scoped_session):
            scope = {"scopefunc": lambda: 1} if self.is_async else {}
            made = AsyncSession if self.is_async else Session
            self.session = self.make(sessionmaker(self.engine, class_=made), **scope)
        else:
            self.session = self.make(self.engine)
        self.ledger = self.store.bind(self.session, commit=self.commit).ledger(self.colour)
        return self

    async def __aexit__(self, *_):
        await self.maybe(self.session.close())
        await self.maybe(self.engine.dispose())
        await self.store.aclose()

    async def maybe(self, answer):
        return await answer if self.is_async else answer

    async def say(self, statement):
        await self.maybe(self.session.execute(sa.text(statement)))

    async def claim(self):
        return (await self.ledger.claim(KEY, attempt=new_attempt(), terms=TERMS)).claim

    async def in_savepoint(self, statement):
        if self.is_async:
            async with self.session.begin_nested():
                await self.say(statement)
        else:
            with self.session.begin_nested():
                await self.say(statement)


WAYS = {
    "session": (Session, {"commit": False}),
    "session, commit": (Session, {"commit": True}),
    "session, commit, loop": (Session, {"commit": True, "colour": ASYNC}),
    "async session": (AsyncSession, {"commit": False}),
    "async session, commit": (AsyncSession, {"commit": True}),
    "registry": (scoped_session, {"commit": False}),
    "async registry": (async_scoped_session, {"commit": False}),
    "connection": (sa.Connection, {"commit": False}),
    "async connection": (AsyncConnection, {"commit": False}),
}


@pytest.fixture
def url(tmp_path):
    url = f"sqlite:///{tmp_path}/shop.db"
    init(url)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE charge (amount INTEGER)")
    engine.dispose()
    return url


@pytest.fixture(params=WAYS)
async def desk(request, url):
    make, options = WAYS[request.param]
    async with Desk(url, make, **options) as desk:
        yield desk


def begins_by_hand(engine):
    """As SQLAlchemy's manual has it for savepoints: the driver begins nothing, BEGIN is said."""
    engine = getattr(engine, "sync_engine", engine)

    @event.listens_for(engine, "connect")
    def quiet(driver, _):
        driver.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection):
        connection.exec_driver_sql("BEGIN")


# --- who has written ----------------------------------------------------------------------------

READ = "SELECT count(*) FROM charge"
WRITE = "INSERT INTO charge VALUES (40)"
WRITE_NOTHING = "UPDATE charge SET amount = 1 WHERE amount = -1"


async def refused(desk, claim):
    with pytest.raises(SettingsError, match=r"step 'a' .* take steps before its first write"):
        await desk.ledger.note(claim, "a", b"1")


@pytest.mark.parametrize("statement", [WRITE, WRITE_NOTHING])
async def test_a_step_after_the_first_write_is_refused_at_once(desk, statement):
    claim = await desk.claim()
    await desk.say(statement)
    await refused(desk, claim)
    assert await desk.ledger.complete(claim, CREATED) == Kept()


async def test_after_a_write_in_a_savepoint_too(desk):
    claim = await desk.claim()
    await desk.in_savepoint(WRITE)
    await refused(desk, claim)


async def test_a_step_after_reading_is_recorded(desk):
    claim = await desk.claim()
    await desk.say(READ)
    assert await desk.ledger.note(claim, "a", b"1") == Kept()
    await desk.in_savepoint(READ)
    assert await desk.ledger.note(claim, "b", b"1") == Kept()


async def test_a_step_after_a_write_that_was_rolled_back_is_recorded(desk):
    claim = await desk.claim()
    await desk.say(WRITE)
    await desk.maybe(desk.session.rollback())
    await desk.say(READ)
    assert await desk.ledger.note(claim, "a", b"1") == Kept()


@pytest.fixture
async def by_hand(desk):
    await desk.maybe(desk.session.close())
    await desk.maybe(desk.engine.dispose())
    begins_by_hand(desk.engine)
    async with desk:
        yield desk


async def test_where_every_transaction_is_begun_by_hand_a_write_counts(by_hand):
    claim = await by_hand.claim()
    await by_hand.say(WRITE)
    await refused(by_hand, claim)


async def test_where_every_transaction_is_begun_by_hand_the_begin_does_not(by_hand):
    claim = await by_hand.claim()
    await by_hand.say(READ)
    assert await by_hand.ledger.note(claim, "a", b"1") == Kept()
    await by_hand.maybe(by_hand.session.rollback())
    await by_hand.say(WRITE)
    await by_hand.maybe(by_hand.session.rollback())
    await by_hand.say(READ)
    assert await by_hand.ledger.note(claim, "b", b"1") == Kept()


async def test_what_is_written_to_another_file_holds_nobody_up(url, tmp_path):
    other = sa.create_engine(f"sqlite:///{tmp_path}/other.db")
    books = sa.Table("books", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))
    books.create(other)
    engine, store = sa.create_engine(url), SQLStore(url)
    with Session(engine, binds={books: other}) as session:
        ledger = store.bind(session).ledger(SYNC)
        claim = (await ledger.claim(KEY, attempt=new_attempt(), terms=TERMS)).claim
        session.execute(books.insert().values(id=1))
        assert await ledger.note(claim, "a", b"1") == Kept()
    store.close()
    engine.dispose()
    other.dispose()


def test_the_step_of_a_guarded_block_says_so(url):
    engine, store = sa.create_engine(url), SQLStore(url)
    with (
        pytest.raises(SettingsError, match="step 'mail' cannot be recorded"),
        Session(engine) as session,
        session.begin(),
        once("k", store=store.bind(session)),
    ):
        session.execute(sa.text(WRITE))
        step("mail", lambda: "sent")
    store.close()
    engine.dispose()


# --- a store over another database than the session's -------------------------------------------


async def test_a_store_over_another_database_is_a_mistake_in_the_settings(desk, tmp_path):
    elsewhere = SQLStore(f"sqlite:///{tmp_path}/elsewhere.db", create=True)
    engine = desk.engine
    try:
        async with engine.begin() if desk.is_async else Now(engine.begin()) as connection:
            await desk.maybe(connection.execute(sa.text("DROP TABLE idempotency")))
        ledger = elsewhere.bind(desk.session, commit=desk.commit).ledger(desk.colour)
        claim = (await ledger.claim(KEY, attempt=new_attempt(), terms=TERMS)).claim
        await desk.say(WRITE)
        with pytest.raises(SettingsError, match=r"the same database as the session\?"):
            await ledger.complete(claim, CREATED)
        found = await elsewhere.ledger(desk.colour).look(KEY.id)
        assert found.state == "FAILED"
    finally:
        await elsewhere.aclose()


class Now:
    """A sync context in an async one's place."""

    def __init__(self, context):
        self.context = context

    async def __aenter__(self):
        return self.context.__enter__()

    async def __aexit__(self, *what):
        return self.context.__exit__(*what)


async def test_another_database_with_a_ledger_of_its_own_is_one_too(desk, tmp_path):
    elsewhere = SQLStore(f"sqlite:///{tmp_path}/elsewhere.db", create=True)
    try:
        ledger = elsewhere.bind(desk.session, commit=desk.commit).ledger(desk.colour)
        claim = (await ledger.claim(KEY, attempt=new_attempt(), terms=TERMS)).claim
        await desk.say(WRITE)
        with pytest.raises(SettingsError, match="over another database"):
            await ledger.complete(claim, CREATED)
    finally:
        await elsewhere.aclose()
