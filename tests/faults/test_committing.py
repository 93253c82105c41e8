"""`bind(session, commit=True)`: rows and record are committed by one call, or neither is there.

Each test runs for a sync session, an async one, and a sync one under an event loop. Started as a
program, this file is a process that can be killed around the commit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session
from sqlalchemy.orm import sessionmaker as make_sessions

from semel import DuplicateExecutionError, SettingsError, StoreUnavailableError, once
from semel.colour import ASYNC, SYNC, run
from semel.keys import make_key, new_attempt
from semel.stores.sql import SQLStore, committing, init
from semel.stores.sql.lines import parse, with_driver
from semel.values import Busy, Done, Kept, Lost, Outcome, State, Terms, Won
from support.process import wait_until
from support.proxy import Proxy

TESTS = Path(__file__).parents[1]
KEY = make_key("order-1", operation="pay")
TERMS = Terms(lease_s=60, ttl_s=600)
CREATED = Outcome("value", b'{"paid":true}', 201)
REFUSED = Outcome("value", b'{"paid":false}', 422)
INSERT = "INSERT INTO charge VALUES (40)"

pytestmark = pytest.mark.timeout(60)


class Base(DeclarativeBase):
    pass


class Charge(Base):
    __tablename__ = "receipt"
    id: Mapped[int] = mapped_column(primary_key=True)


# --- one desk per colour ------------------------------------------------------------------------


class Desk:
    """A session, the store, and what a test does with them."""

    colour = ASYNC

    def __init__(self, url, through=None, own=None, **options):
        self.store = SQLStore(own or url)
        self.engine = self.connect(through or url, **options)
        self.log = []
        self.watch(self.sync_engine)
        self.session = self.make_session()

    def connect(self, url, **options):
        return sa.create_engine(with_driver(parse(url), "sync"), **options)

    def make_session(self):
        return Session(self.engine)

    @property
    def sync_engine(self):
        return self.engine

    def watch(self, engine):
        event.listen(engine, "before_cursor_execute", self._said)
        for name in ("commit", "rollback"):
            event.listen(engine, name, lambda _, name=name: self.log.append(name.upper()))

    def _said(self, connection, cursor, statement, *rest):
        self.log.append(" ".join(statement.split()[:2]))

    def bind(self):
        self.ledger = self.store.bind(self.session, commit=True).ledger(self.colour)
        return self.ledger

    async def on(self, work):
        """What a handler does with its session: `work` gets it as a sync one."""
        return work(self.session)

    async def insert(self, statement=INSERT):
        await self.on(lambda session: session.execute(sa.text(statement)))

    async def claim(self, terms=TERMS):
        return await self.store.ledger(self.colour).claim(
            KEY, attempt=new_attempt(), fingerprint=b"", terms=terms
        )

    async def close(self):
        self.session.close()
        self.engine.dispose()
        await self.store.aclose()


class SyncDesk(Desk):
    colour = SYNC


class ThreadDesk(Desk):
    """A sync session under an event loop, as in a FastAPI endpoint that is a plain function."""


class AsyncDesk(Desk):
    def connect(self, url, **options):
        return create_async_engine(with_driver(parse(url), "async"), **options)

    def make_session(self):
        return AsyncSession(self.engine)

    @property
    def sync_engine(self):
        return self.engine.sync_engine

    async def on(self, work):
        return await self.session.run_sync(work)

    async def close(self):
        await self.session.close()
        await self.engine.dispose()
        await self.store.aclose()


# For what is decided before the database is asked.
on_one_database = pytest.mark.parametrize("url", ["sqlite"], indirect=True)

DESKS = {"sync": SyncDesk, "async": AsyncDesk, "thread": ThreadDesk}


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def url(request, tmp_path):
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/ledger.db"
    else:
        url = request.getfixturevalue(f"{request.param}_url")
    prepare(url)
    return url


def prepare(url):
    init(url)
    with engine_to(url).begin() as connection:
        connection.exec_driver_sql("CREATE TABLE charge (amount INTEGER)")
        connection.exec_driver_sql("CREATE TABLE receipt (id INTEGER PRIMARY KEY)")


def engine_to(url):
    return sa.create_engine(with_driver(parse(url), "sync"), poolclass=sa.NullPool)


@pytest.fixture(params=DESKS)
def mode(request):
    return request.param


@pytest.fixture
async def desk(url, mode):
    desk = DESKS[mode](url)
    yield desk
    await desk.close()


def charges(url):
    with engine_to(url).connect() as connection:
        return connection.exec_driver_sql("SELECT count(*) FROM charge").scalar_one()


def record(url):
    store = SQLStore(url)
    try:
        return run(store.ledger(SYNC).look(KEY.id))
    finally:
        store.close()


def claimed(url, terms=TERMS):
    """Another request's claim."""
    store = SQLStore(url)
    try:
        return run(
            store.ledger(SYNC).claim(KEY, attempt=new_attempt(), fingerprint=b"", terms=terms)
        )
    finally:
        store.close()


def is_free(url):
    """Is nothing there, and may the next request run at once?"""
    assert charges(url) == 0
    assert record(url).state is State.FAILED
    return isinstance(claimed(url), Won)


# --- committed together -------------------------------------------------------------------------


async def test_rows_and_record_are_committed_by_one_call(url, desk):
    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    assert charges(url) == 0
    desk.log.clear()
    assert await ledger.complete(won.claim, CREATED) == Kept()
    # MariaDB is asked once per engine how much fits into one statement.
    assert [said for said in desk.log if not said.startswith("SELECT")] == [
        "UPDATE idempotency",
        "COMMIT",
    ]
    assert charges(url) == 1
    assert record(url).outcome == CREATED


async def test_the_second_commit_of_an_engine_takes_one_update_and_one_commit(url, desk):
    for _ in range(2):
        won = await desk.claim(Terms(ttl_s=0.000001))
        ledger = desk.bind()
        await desk.insert()
        desk.log.clear()
        assert await ledger.complete(won.claim, CREATED) == Kept()
    assert desk.log == ["UPDATE idempotency", "COMMIT"]
    assert charges(url) == 2


@on_one_database
async def test_pending_objects_are_written_before_the_record(url, desk):
    won = await desk.claim()
    ledger = desk.bind()
    await desk.on(lambda session: session.add(Charge(id=7)))
    assert await ledger.complete(won.claim, CREATED) == Kept()
    assert desk.log[0] == "INSERT INTO"
    assert desk.log[-2:] == ["UPDATE idempotency", "COMMIT"]


async def test_a_session_that_was_not_used_carries_the_record_alone(url, desk):
    won = await desk.claim()
    assert await desk.bind().complete(won.claim, CREATED) == Kept()
    assert record(url).outcome == CREATED


async def test_a_second_request_is_busy_at_once_while_rows_and_record_wait_for_the_commit(
    url, desk
):
    """Told from the lease: who meets a locked row is told to ask again in a tenth of a second."""
    answers = []
    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    answers.append(claimed(url))
    event.listen(desk.sync_engine, "commit", lambda _: answers.append(claimed(url)))
    assert await ledger.complete(won.claim, CREATED) == Kept()
    assert all(isinstance(answer, Busy) and answer.left_s > 10 for answer in answers), answers
    assert len(answers) == 2
    assert isinstance(claimed(url), Done)


async def test_renewals_go_on_while_the_session_has_rows(url, desk):
    won = await desk.claim()
    ledger = desk.bind()
    if url.startswith("sqlite"):  # one writer at a time: before the session is it
        assert await ledger.renew(won.claim) == Kept()
    await desk.insert()
    if not url.startswith("sqlite"):
        assert await ledger.renew(won.claim) == Kept()
    assert await ledger.complete(won.claim, CREATED) == Kept()


@pytest.mark.parametrize(
    "outcome", [REFUSED, Outcome("error", b'{"type":"x"}')], ids=["status", "error"]
)
async def test_an_error_answer_is_recorded_without_the_rows(url, desk, outcome):
    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    desk.log.clear()
    assert await ledger.complete(won.claim, outcome) == Kept()
    assert desk.log == ["ROLLBACK"]
    assert charges(url) == 0
    assert record(url).outcome == outcome


async def test_a_claim_that_was_taken_over_takes_its_rows_along(url, desk):
    won = await desk.claim(Terms(lease_s=0.000001))
    ledger = desk.bind()
    other = claimed(url)
    store = SQLStore(url)
    try:
        run(store.ledger(SYNC).complete(other.claim, REFUSED))
    finally:
        store.close()
    await desk.insert()
    assert await ledger.complete(won.claim, CREATED) == Lost(REFUSED)
    assert charges(url) == 0


async def test_released_or_given_up_the_rows_are_gone_first(url, desk):
    for end in ("release", "renew"):
        won = await desk.claim()
        ledger = desk.bind()
        await desk.insert()
        settings = {"error": "no funds"} if end == "release" else {"lease_s": 0}
        assert await getattr(ledger, end)(won.claim, **settings) == Kept()
        assert charges(url) == 0
        await desk.on(lambda session: session.commit())  # it is its owner's again


# --- who may commit -----------------------------------------------------------------------------


def commit_below(session):
    session.connection().commit()


def commit_in_a_block(session):
    session.rollback()
    with session.begin():
        session.execute(sa.text(INSERT))


def commit_with_a_savepoint_open(session):
    transaction = session.get_transaction()
    session.begin_nested()
    transaction.commit()


@pytest.mark.parametrize(
    "way",
    [Session.commit, commit_below, commit_in_a_block, commit_with_a_savepoint_open],
    ids=["session", "connection", "block", "savepoint"],
)
@on_one_database
async def test_nobody_else_commits_a_bound_session(url, desk, way):
    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    with pytest.raises(SettingsError, match="Return instead: the commit is made together"):
        await desk.on(way)
    await ledger.release(won.claim, error="failed")
    assert is_free(url)


@on_one_database
async def test_who_swallows_the_refusal_gets_the_commit_with_the_response(url, desk):
    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    with pytest.raises(SettingsError):
        await desk.on(Session.commit)
    assert charges(url) == 0
    assert await ledger.complete(won.claim, CREATED) == Kept()
    assert charges(url) == 1


@on_one_database
async def test_savepoints_are_the_handlers_own(url, desk):
    def work(session):
        with session.begin_nested():
            session.execute(sa.text(INSERT))
        with pytest.raises(LookupError), session.begin_nested():
            session.execute(sa.text(INSERT))
            raise LookupError

    won = await desk.claim()
    ledger = desk.bind()
    await desk.on(work)
    assert charges(url) == 0
    assert await ledger.complete(won.claim, CREATED) == Kept()
    assert charges(url) == 1


def insert_in_a_savepoint(session):
    with session.begin_nested():
        session.execute(sa.text(INSERT))


@on_one_database
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
async def test_a_released_savepoint_commits_nothing_by_itself(url, desk, used):
    """Python's SQLite driver begins no transaction for a savepoint, and its release is a commit."""
    if used:  # by whoever looked up the user
        await desk.insert("SELECT count(*) FROM charge")
    won = await desk.claim()
    ledger = desk.bind()
    await desk.on(insert_in_a_savepoint)
    assert charges(url) == 0
    await ledger.release(won.claim)
    assert charges(url) == 0


@on_one_database
async def test_nor_does_it_in_a_session_that_is_bound_without_a_commit(url, mode):
    desk = DESKS[mode](url)
    if mode == "thread":
        desk.colour = SYNC
    try:
        ledger = desk.store.bind(desk.session).ledger(desk.colour)
        won = await ledger.claim(KEY, attempt=new_attempt(), terms=TERMS)
        await desk.on(insert_in_a_savepoint)
        assert charges(url) == 0
        assert await ledger.complete(won.claim, CREATED) == Kept()
        assert (charges(url), record(url).state) == (0, State.PENDING)
        await desk.on(Session.commit)
        assert (charges(url), record(url).state) == (1, State.COMPLETED)
    finally:
        await desk.close()


@on_one_database
async def test_a_commit_past_a_session_that_was_used_before_it_was_bound(url, desk):
    await desk.insert("SELECT count(*) FROM charge")
    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    with pytest.raises(SettingsError, match="Return instead"):
        await desk.on(commit_below)
    await ledger.release(won.claim)
    assert charges(url) == 0


@on_one_database
async def test_after_the_claim_has_ended_the_session_is_its_owners_again(url, desk):
    won = await desk.claim()
    ledger = desk.bind()
    assert await ledger.complete(won.claim, CREATED) == Kept()
    await desk.insert()
    await desk.on(Session.commit)
    assert charges(url) == 1


@on_one_database
async def test_a_session_that_outlives_its_binding_is_free(url, desk):
    desk.bind()
    del desk.ledger
    await desk.insert()
    await desk.on(Session.commit)
    assert charges(url) == 1


@on_one_database
async def test_a_claim_that_was_not_won_binds_nothing(url, desk):
    held = claimed(url)
    ledger = desk.bind()
    asked = {"attempt": new_attempt(), "fingerprint": b"", "terms": TERMS}
    assert isinstance(await ledger.claim(KEY, **asked), Busy)
    await desk.insert()
    await desk.on(Session.commit)
    await desk.store.ledger(desk.colour).release(held.claim)
    won = await ledger.claim(KEY, **{**asked, "attempt": new_attempt()})
    await desk.insert()
    with pytest.raises(SettingsError):
        await desk.on(Session.commit)
    assert await ledger.complete(won.claim, CREATED) == Kept()
    assert charges(url) == 2


# --- a session that ended too early -------------------------------------------------------------


@pytest.mark.parametrize("end", [Session.close, Session.rollback, Session.invalidate])
@on_one_database
async def test_a_session_ended_before_its_response_is_said_to_be(url, desk, end):
    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    await desk.on(end)
    with pytest.raises(SettingsError, match="ended before the response"):
        await ledger.complete(won.claim, CREATED)
    assert is_free(url)


@on_one_database
async def test_rolled_back_and_begun_anew_is_fine(url, desk):
    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    await desk.on(Session.rollback)
    await desk.insert()
    assert await ledger.complete(won.claim, CREATED) == Kept()
    assert charges(url) == 1


# --- rows that cannot be committed --------------------------------------------------------------


async def test_rows_that_violate_a_constraint_are_the_handlers_error(url, desk):
    with engine_to(url).begin() as connection:
        connection.exec_driver_sql("INSERT INTO receipt VALUES (7)")
    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    await desk.on(lambda session: session.add(Charge(id=7)))
    with pytest.raises(sa.exc.IntegrityError):
        await ledger.complete(won.claim, CREATED)
    assert is_free(url)


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
async def test_a_constraint_that_is_checked_at_the_commit_too(url, desk):
    with engine_to(url).begin() as connection:
        connection.exec_driver_sql(
            "ALTER TABLE charge ADD UNIQUE (amount) DEFERRABLE INITIALLY DEFERRED"
        )
    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    await desk.insert()
    with pytest.raises(sa.exc.IntegrityError):
        await ledger.complete(won.claim, CREATED)
    assert is_free(url)


@on_one_database
async def test_what_a_hook_of_the_session_raises_before_the_commit_comes_through(url, desk):
    def refuse(session):
        raise LookupError("not today")

    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    sync = getattr(desk.session, "sync_session", desk.session)
    event.listen(sync, "before_commit", refuse)
    with pytest.raises(LookupError, match="not today"):
        await ledger.complete(won.claim, CREATED)
    assert is_free(url)


@on_one_database
async def test_what_a_hook_raises_after_the_commit_does_not_undo_it(url, desk, caplog):
    def fail(session):
        raise LookupError("the queue is down")

    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    sync = getattr(desk.session, "sync_session", desk.session)
    event.listen(sync, "after_commit", fail)
    assert await ledger.complete(won.claim, CREATED) == Kept()
    assert "the queue is down" in caplog.text
    assert (charges(url), record(url).outcome) == (1, CREATED)


async def test_a_record_that_cannot_be_written_takes_the_rows_along(url, desk):
    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    rename = "ALTER TABLE idempotency RENAME COLUMN outcome TO ending"
    if url.startswith("sqlite"):  # its one writer is the session, so it does it itself
        await desk.insert(rename)
    else:
        with engine_to(url).begin() as connection:
            connection.exec_driver_sql(rename)
    with pytest.raises(StoreUnavailableError, match="Nothing has happened") as caught:
        await ledger.complete(won.claim, CREATED)
    assert not caught.value.again
    assert charges(url) == 0


# 40001 at COMMIT, 1213 and SQLITE_BUSY at the UPDATE: the transaction is rolled back by then.


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
async def test_a_serialization_failure_at_the_commit_is_a_definite_no(url, mode):
    desk = DESKS[mode](url, isolation_level="SERIALIZABLE")
    try:
        won = await desk.claim()
        ledger = desk.bind()
        await desk.insert("SELECT count(*) FROM receipt")
        await desk.insert()
        with engine_to(url).connect() as other:
            other.execution_options(isolation_level="SERIALIZABLE")
            other.exec_driver_sql("SELECT count(*) FROM charge").all()
            other.exec_driver_sql("INSERT INTO receipt VALUES (1)")
            # Ours has read what this one writes and the other way round: one of them has to go.
            event.listen(desk.sync_engine, "commit", lambda _: other.commit())
            with pytest.raises(
                StoreUnavailableError, match="Nothing has happened; call again"
            ) as e:
                await ledger.complete(won.claim, CREATED)
        assert not e.value.again
        assert e.value.__cause__.orig.sqlstate == "40001"
        assert desk.log[-1] == "COMMIT"
        assert is_free(url)
    finally:
        await desk.close()


@pytest.mark.parametrize("url", ["mariadb"], indirect=True)
async def test_a_deadlock_is_a_definite_no(url, desk):
    """The record waits for somebody who waits for our rows; the server ends ours."""
    with engine_to(url).begin() as connection:
        connection.exec_driver_sql("INSERT INTO receipt VALUES (1)")
        connection.exec_driver_sql(
            "INSERT INTO charge WITH RECURSIVE n AS (SELECT 1 AS i UNION "
            "SELECT i + 1 FROM n WHERE i < 50) SELECT i FROM n"
        )
    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert("UPDATE receipt SET id = 2")
    with engine_to(url).connect() as other:
        # The heavier transaction is the one that stays.
        other.exec_driver_sql("DELETE FROM charge")
        other.exec_driver_sql("SELECT id FROM idempotency FOR UPDATE").all()
        waits = threading.Thread(
            target=lambda: other.exec_driver_sql("SELECT id FROM receipt FOR UPDATE").all()
        )
        waits.start()
        wait_until(lambda: waiting(url) == 1, "the other to wait for our row")
        with pytest.raises(StoreUnavailableError, match="Nothing has happened; call again") as e:
            await ledger.complete(won.claim, CREATED)
        waits.join()
        assert e.value.__cause__.orig.args[0] == 1213
        other.rollback()
    assert record(url).state in (State.FAILED, State.PENDING)
    with engine_to(url).connect() as connection:
        assert connection.exec_driver_sql("SELECT id FROM receipt").scalar_one() == 1


def waiting(url):
    with engine_to(url).connect() as connection:
        # innodb_trx tells the same for as long as it is asked more often than every 0.1 s.
        status = "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'"
        return int(connection.exec_driver_sql(status).one()[1])


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_a_busy_file_is_a_definite_no(url, mode):
    """Its snapshot is older than somebody's write: SQLite can only refuse."""
    desk = DESKS[mode](url, connect_args={"timeout": 0.1})
    try:
        won = await desk.claim()
        ledger = desk.bind()
        await desk.insert("BEGIN")
        await desk.insert("SELECT count(*) FROM charge")
        with engine_to(url).begin() as other:
            other.exec_driver_sql("INSERT INTO receipt VALUES (1)")
        with pytest.raises(StoreUnavailableError, match="Nothing has happened; call again") as e:
            await ledger.complete(won.claim, CREATED)
        assert e.value.__cause__.orig.sqlite_errorname.startswith("SQLITE_BUSY")
        assert is_free(url)
    finally:
        await desk.close()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_a_file_that_is_busy_at_the_commit_is_one_too(url):
    """Without a write-ahead log, whoever reads keeps the file from being written."""
    with engine_to(url).connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = DELETE")
    engine = sa.create_engine(url, connect_args={"timeout": 0.05})
    store, reader = SQLStore(engine), engine_to(url).connect()
    try:
        won = run(store.ledger(SYNC).claim(KEY, attempt=new_attempt(), terms=TERMS))
        with Session(engine) as session:
            ledger = store.bind(session, commit=True).ledger(SYNC)
            session.execute(sa.text(INSERT))
            reader.exec_driver_sql("BEGIN")
            reader.exec_driver_sql("SELECT count(*) FROM charge").all()
            event.listen(session, "after_rollback", lambda _: reader.rollback())
            with pytest.raises(StoreUnavailableError, match="Nothing has happened") as caught:
                run(ledger.complete(won.claim, CREATED))
        assert caught.value.__cause__.orig.sqlite_errorname == "SQLITE_BUSY"
        assert charges(url) == 0
    finally:
        reader.close()
        engine.dispose()


# --- a COMMIT without an answer -----------------------------------------------------------------


@pytest.fixture(params=["postgres", "mariadb"])
def served(request):
    url = request.getfixturevalue(f"{request.param}_url")
    prepare(url)
    return url


@pytest.fixture
def network(served):
    """The same database, through a network that can fail."""
    direct = make_url(served)
    with Proxy(direct.port) as proxy:
        proxy.url = direct.set(port=proxy.port).render_as_string(hide_password=False)
        yield proxy


async def test_a_commit_whose_answer_is_lost_has_happened(served, network, mode, caplog):
    desk = DESKS[mode](served, through=network.url)
    try:
        won = await desk.claim()
        ledger = desk.bind()
        await desk.insert()
        network.cut_after_request(b"COMMIT")
        assert await ledger.complete(won.claim, CREATED) == Kept()
        assert network.cuts == 1
        assert desk.log.count("COMMIT") == 1
        assert (charges(served), record(served).outcome) == (1, CREATED)
    finally:
        await desk.close()


async def test_a_commit_that_never_arrives_has_not_happened(served, network, mode):
    desk = DESKS[mode](served, through=network.url)
    try:
        won = await desk.claim()
        ledger = desk.bind()
        await desk.insert()
        network.cut_before_request(b"COMMIT")
        with pytest.raises(StoreUnavailableError, match="Nothing has happened; call again") as e:
            await ledger.complete(won.claim, CREATED)
        assert network.cuts == 1
        assert not e.value.again
        assert desk.log.count("COMMIT") == 1
        assert is_free(served)
    finally:
        await desk.close()


def answer_for_it(url):
    """Somebody else takes over and is done first."""
    answers = []
    wait_until(
        lambda: answers.append(claimed(url)) or isinstance(answers[-1], Won), "the row to be free"
    )
    store = SQLStore(url)
    try:
        assert run(store.ledger(SYNC).complete(answers[-1].claim, REFUSED)) == Kept()
    finally:
        store.close()


async def test_a_commit_that_never_arrives_adopts_what_another_has_answered(served, network):
    desk = SyncDesk(served, through=network.url)
    try:
        won = await desk.claim(Terms(lease_s=0.000001))
        ledger = desk.bind()
        await desk.insert()
        network.cut_before_request(b"COMMIT")
        event.listen(desk.session, "after_soft_rollback", lambda *_: answer_for_it(served))
        assert await ledger.complete(won.claim, CREATED) == Lost(REFUSED)
        assert network.cuts == 1
        assert charges(served) == 0
    finally:
        await desk.close()


@pytest.mark.parametrize("cut", ["cut_before_request", "cut_after_request"])
async def test_when_nobody_can_be_asked_a_retry_finds_out(served, network, mode, cut, monkeypatch):
    monkeypatch.setattr(committing, "RESOLVE_WITHIN_S", 0.3)
    direct = make_url(served)
    with Proxy(direct.port) as own:
        own_url = direct.set(port=own.port).render_as_string(hide_password=False)
        desk = DESKS[mode](served, through=network.url, own=own_url)
        try:
            won = await desk.claim(Terms(lease_s=0.5))
            ledger = desk.bind()
            await desk.insert()
            getattr(network, cut)(b"COMMIT")
            own.refuse()
            with pytest.raises(StoreUnavailableError, match="Call again with the same key") as e:
                await ledger.complete(won.claim, CREATED)
            assert not e.value.again
        finally:
            await desk.close()
    if cut == "cut_after_request":
        assert claimed(served) == Done(CREATED, won.claim.fence)
        assert charges(served) == 1
    else:
        wait_until(lambda: isinstance(claimed(served), Won), "the lease to end")
        assert charges(served) == 0


@pytest.mark.parametrize("commit", [False, True])
async def test_a_lost_claim_that_cannot_be_asked_for_has_not_happened(served, commit):
    """Its rows are gone by then: whoever says that it has happened would be lying."""
    direct = make_url(served)
    with Proxy(direct.port) as own:
        own_url = direct.set(port=own.port).render_as_string(hide_password=False)
        desk = SyncDesk(served, own=own_url)
        try:
            won = await desk.claim(Terms(lease_s=0.000001))
            assert isinstance(claimed(served), Won)
            ledger = desk.store.bind(desk.session, commit=commit).ledger(SYNC)
            await desk.insert()
            own.refuse()
            with pytest.raises(StoreUnavailableError, match="Nothing of it has happened") as e:
                await ledger.complete(won.claim, CREATED)
            assert not e.value.again
        finally:
            await desk.close()
    assert charges(served) == 0


def hang_up(connection):
    driver = connection.connection.driver_connection
    number = driver.fileno() if hasattr(driver, "fileno") else driver._sock.fileno()
    with socket.socket(fileno=os.dup(number)) as line:
        line.shutdown(socket.SHUT_RDWR)


def cut_off_while_committing(desk, network):
    """The COMMIT is on its way when its sender is gone; the server knows of neither."""

    def later(connection):
        network.freeze()
        threading.Timer(0.2, hang_up, (connection,)).start()

    event.listen(desk.sync_engine, "commit", later)


async def test_nobody_is_told_that_nothing_happened_while_it_can_still_be_committed(
    served, network
):
    """The row is locked by the transaction whose COMMIT is still on its way."""
    desk = SyncDesk(served, through=network.url)
    try:
        won = await desk.claim()
        ledger = desk.bind()
        await desk.insert()
        cut_off_while_committing(desk, network)
        threading.Timer(1.5, network.pass_through).start()
        assert await ledger.complete(won.claim, CREATED) == Kept()
        assert charges(served) == 1
    finally:
        await desk.close()


async def test_a_transaction_that_nobody_ends_is_unknown_and_nobody_takes_over(
    served, network, monkeypatch
):
    monkeypatch.setattr(committing, "RESOLVE_WITHIN_S", 0.3)
    desk = SyncDesk(served, through=network.url)
    try:
        won = await desk.claim(Terms(lease_s=0.5))
        ledger = desk.bind()
        await desk.insert()
        cut_off_while_committing(desk, network)
        with pytest.raises(StoreUnavailableError, match="locked by another transaction"):
            await ledger.complete(won.claim, CREATED)
        assert isinstance(claimed(served), Busy)
        network.pass_through()
        wait_until(lambda: claimed(served) == Done(CREATED, won.claim.fence), "the commit to come")
        assert charges(served) == 1
    finally:
        await desk.close()


async def test_a_server_that_dies_with_the_commit_leaves_both_or_neither(request, mode):
    process = request.getfixturevalue("postgres_server")
    url = request.getfixturevalue("postgres_url")
    prepare(url)
    desk = DESKS[mode](url)

    def restart(connection):
        process.kill()
        threading.Timer(0.5, process.ensure_running).start()

    try:
        won = await desk.claim()
        ledger = desk.bind()
        await desk.insert()
        event.listen(desk.sync_engine, "commit", restart)
        with pytest.raises(StoreUnavailableError, match="Nothing has happened; call again"):
            await ledger.complete(won.claim, CREATED)
        assert is_free(url)
    finally:
        await desk.close()


# --- cut off in the middle ----------------------------------------------------------------------


class Cut(BaseException):
    """A signal's error, at the worst moment."""


@pytest.mark.parametrize("mode", ["async", "thread"])
async def test_a_cancelled_commit_is_finished_and_repeating_it_writes_nothing(url, desk):
    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    loop = asyncio.get_running_loop()
    event.listen(desk.sync_engine, "commit", lambda _: loop.call_soon_threadsafe(task.cancel))
    task = asyncio.ensure_future(ledger.complete(won.claim, CREATED))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (charges(url), record(url).outcome) == (1, CREATED)
    desk.log.clear()
    assert await ledger.complete(won.claim, CREATED) == Kept()
    assert desk.log == []
    assert charges(url) == 1


@pytest.mark.parametrize("mode", ["async", "thread"])
async def test_a_cancelled_commit_waits_for_its_answer(served, network, mode):
    desk = DESKS[mode](served, through=network.url)
    try:
        won = await desk.claim()
        ledger = desk.bind()
        await desk.insert()
        event.listen(desk.sync_engine, "commit", lambda _: network.freeze())
        task = asyncio.ensure_future(ledger.complete(won.claim, CREATED))
        while "COMMIT" not in desk.log:
            await asyncio.sleep(0.01)
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not task.done()
        network.pass_through()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (charges(served), record(served).outcome) == (1, CREATED)
    finally:
        network.pass_through()
        await desk.close()


@pytest.mark.parametrize("mode", ["sync"])
@pytest.mark.parametrize("point", ["before", "after"])
async def test_a_commit_cut_off_by_a_signal_is_resolved_not_repeated(url, desk, point):
    def cut(_):
        event.remove(*heard)
        raise Cut

    heard = (
        (desk.sync_engine, "commit", cut)
        if point == "before"
        else (desk.session, "after_commit", cut)
    )
    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    event.listen(*heard)
    with pytest.raises(Cut):
        await ledger.complete(won.claim, CREATED)
    desk.log.clear()
    if point == "after":
        assert await ledger.complete(won.claim, CREATED) == Kept()
        assert charges(url) == 1
    else:
        with pytest.raises(StoreUnavailableError, match="Nothing has happened"):
            await ledger.complete(won.claim, CREATED)
        assert is_free(url)
    assert "UPDATE idempotency" not in desk.log


@pytest.mark.parametrize("mode", ["sync"])
async def test_a_signal_before_the_commit_is_followed_by_the_commit(url, desk):
    """Between record and COMMIT: the record is there already, in this transaction."""

    def cut(session):
        event.remove(desk.session, "before_commit", cut)
        ledger._sent = None  # as if it came one line earlier
        raise Cut

    won = await desk.claim()
    ledger = desk.bind()
    await desk.insert()
    event.listen(desk.session, "before_commit", cut)
    with pytest.raises(Cut):
        await ledger.complete(won.claim, CREATED)
    assert await ledger.complete(won.claim, CREATED) == Kept()
    assert (charges(url), record(url).outcome) == (1, CREATED)


# --- under a guard ------------------------------------------------------------------------------


@on_one_database
async def test_once_commits_its_session(url, mode):
    desk = DESKS[mode](url)
    try:
        for turn in range(2):
            block = once("order-1", store=desk.store.bind(desk.session, commit=True))
            if mode == "sync":
                with DuplicateIf(turn), block as attempt:
                    await desk.insert()
                    attempt.done("paid")
            else:
                with DuplicateIf(turn):
                    async with block as attempt:
                        await desk.insert()
                        attempt.done("paid")
            assert charges(url) == 1
    finally:
        await desk.close()


def DuplicateIf(turn):  # noqa: N802 - reads as a context
    from contextlib import nullcontext

    return pytest.raises(DuplicateExecutionError) if turn else nullcontext()


@on_one_database
async def test_a_block_that_fails_takes_its_rows_along(url, mode):
    desk = DESKS[mode](url)
    try:
        block = once("order-1", store=desk.store.bind(desk.session, commit=True))
        with pytest.raises(LookupError):
            if mode == "sync":
                with block:
                    await desk.insert()
                    raise LookupError
            async with block:
                await desk.insert()
                raise LookupError
        assert charges(url) == 0
        await desk.on(Session.commit)
        assert charges(url) == 0
    finally:
        await desk.close()


# --- what can be bound --------------------------------------------------------------------------


async def test_a_sync_session_needs_no_more_of_an_async_app_than_its_async_engine(url):
    own = create_async_engine(with_driver(parse(url), "async"))
    store = SQLStore(own)
    engine = engine_to(url)
    try:
        won = await store.ledger(ASYNC).claim(KEY, attempt=new_attempt(), terms=TERMS)
        with Session(engine) as session:
            bound = store.bind(session, commit=True)
            session.execute(sa.text(INSERT))
            assert await bound.ledger(ASYNC).complete(won.claim, CREATED) == Kept()
        assert (charges(url), record(url).outcome) == (1, CREATED)
        with pytest.raises(SettingsError, match="AsyncEngine"), Session(engine) as session:
            store.bind(session)
    finally:
        await store.aclose()
        await own.dispose()


@pytest.fixture
def lite(tmp_path):
    url = f"sqlite:///{tmp_path}/ledger.db"
    prepare(url)
    return url


async def test_sessions_behind_a_registry(lite):
    engine, own = engine_to(lite), SQLStore(lite)
    async_engine = create_async_engine(with_driver(parse(lite), "async"))
    sync = scoped_session(make_sessions(engine))
    asynchronous = async_scoped_session(
        make_sessions(class_=AsyncSession, bind=async_engine), scopefunc=asyncio.current_task
    )
    try:
        won = await own.ledger(ASYNC).claim(KEY, attempt=new_attempt(), terms=TERMS)
        bound = own.bind(asynchronous, commit=True)
        await asynchronous.execute(sa.text(INSERT))
        assert await bound.ledger(ASYNC).complete(won.claim, CREATED) == Kept()
        other = make_key("order-2")
        won = await own.ledger(ASYNC).claim(other, attempt=new_attempt(), terms=TERMS)
        bound = own.bind(sync, commit=True)
        sync.execute(sa.text(INSERT))
        assert run(bound.ledger(SYNC).complete(won.claim, CREATED)) == Kept()
        assert charges(lite) == 2
    finally:
        sync.remove()
        await asynchronous.remove()
        await async_engine.dispose()
        await own.aclose()


async def test_what_cannot_be_bound_is_refused(lite):
    store, engine = SQLStore(lite), engine_to(lite)
    async_engine = create_async_engine(with_driver(parse(lite), "async"))
    try:
        with pytest.raises(SettingsError, match="Connection"), engine.connect() as connection:
            store.bind(connection, commit=True)
        with pytest.raises(SettingsError, match="int"):
            store.bind(5, commit=True)
        async with AsyncSession(async_engine) as session:
            bound = store.bind(session, commit=True)
            with pytest.raises(SettingsError, match="serves async code"):
                bound.ledger(SYNC)
        each = engine.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(SettingsError, match="AUTOCOMMIT"), Session(each) as session:
            store.bind(session, commit=True)
        with Session(engine) as session:
            bound = store.bind(session, commit=True)
            with pytest.raises(SettingsError, match="AUTOCOMMIT"):
                session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
    finally:
        await async_engine.dispose()
        await store.aclose()


# --- killed -------------------------------------------------------------------------------------

POINTS = ("rows", "commit", "after_commit", "completed")


def hold(url, point):
    """The program: charge in one transaction with the record, and die at a point."""

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    store, engine = SQLStore(url), engine_to(url)
    won = run(store.ledger(SYNC).claim(KEY, attempt=new_attempt(), terms=Terms(lease_s=0.5)))
    session = Session(engine)
    ledger = store.bind(session, commit=True).ledger(SYNC)
    session.execute(sa.text(INSERT))
    if point == "rows":
        die()
    if point == "commit":
        event.listen(engine, "commit", die)
    if point == "after_commit":
        event.listen(session, "after_commit", die)
    run(ledger.complete(won.claim, CREATED))
    die()


@pytest.mark.parametrize("point", POINTS)
def test_killed_around_the_commit_both_are_there_or_neither(url, point):
    child = subprocess.run(
        [sys.executable, __file__, url, point],
        cwd=TESTS,
        timeout=50,
        check=False,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    assert child.returncode == -signal.SIGKILL
    if point in ("rows", "commit"):
        assert (charges(url), record(url).state) == (0, State.PENDING)
        wait_until(lambda: isinstance(claimed(url), Won), "the lease to end")
    else:
        assert (charges(url), record(url).outcome) == (1, CREATED)
        assert isinstance(claimed(url), Done)


if __name__ == "__main__":
    hold(*sys.argv[1:])
