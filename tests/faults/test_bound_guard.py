"""`once` over a bound session: when the block ends badly, its rows are gone before its claim is."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import OutcomeUnknownError, SettingsError, StoreUnavailableError, once
from semel.colour import SYNC, run
from semel.keys import make_key
from semel.stores.sql import SQLStore, init
from semel.values import State


class Cut(BaseException):
    """A process on its way out."""


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def url(request, tmp_path):
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/ledger.db"
    else:
        url = request.getfixturevalue(f"{request.param}_url")
    init(url)
    return url


def _driver(url):
    return url.replace("postgresql://", "postgresql+psycopg://").replace(
        "mysql://", "mysql+pymysql://"
    )


@pytest.fixture
def engine(url):
    engine = sa.create_engine(_driver(url))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE charge (amount INTEGER)")
    yield engine
    engine.dispose()


@pytest.fixture
def store(url):
    store = SQLStore(url)
    yield store
    store.close()


def charges(engine):
    with engine.connect() as connection:
        return connection.exec_driver_sql("SELECT count(*) FROM charge").scalar_one()


def record(store):
    return run(store.ledger(SYNC).look(make_key("k").id))


INSERT = sa.text("INSERT INTO charge VALUES (40)")


@pytest.mark.timeout(25)  # it used to wait 30 s on SQLite, behind its own session's write lock
def test_a_block_that_raises_takes_its_rows_along_and_frees_the_key_at_once(engine, store):
    with (
        pytest.raises(ValueError, match="no funds"),
        Session(engine) as session,
        session.begin(),
        once("k", store=store.bind(session)),
    ):
        session.execute(INSERT)
        raise ValueError("no funds")
    assert charges(engine) == 0
    assert record(store).state is State.FAILED
    with Session(engine) as session, session.begin(), once("k", store=store.bind(session)):
        session.execute(INSERT)
    assert charges(engine) == 1
    assert record(store).state is State.COMPLETED


@pytest.mark.timeout(25)
def test_a_block_cut_off_under_hold_takes_its_rows_along_and_is_unknown(store, engine):
    with (
        pytest.raises(Cut),
        Session(engine) as session,
        session.begin(),
        once("k", store=store.bind(session), on_crash="hold"),
    ):
        session.execute(INSERT)
        raise Cut
    assert charges(engine) == 0
    assert record(store).state is State.UNKNOWN
    with (
        pytest.raises(OutcomeUnknownError),
        Session(engine) as session,
        once("k", store=store.bind(session), on_crash="hold"),
    ):
        raise AssertionError("must not be entered")


@pytest.mark.timeout(25)
async def test_the_same_in_async(url, store, engine):
    own = SQLStore(url)
    driver = (
        url.replace("postgresql://", "postgresql+psycopg://")
        .replace("mysql://", "mysql+asyncmy://")
        .replace("sqlite://", "sqlite+aiosqlite://")
    )
    async_engine = create_async_engine(driver)
    try:
        with pytest.raises(ValueError, match="no funds"):
            async with (
                AsyncSession(async_engine) as session,
                session.begin(),
                once("k", store=own.bind(session)),
            ):
                await session.execute(INSERT)
                raise ValueError("no funds")
        assert charges(engine) == 0
        assert record(store).state is State.FAILED
    finally:
        await async_engine.dispose()
        await own.aclose()


def test_a_session_that_cannot_carry_the_outcome_is_refused_before_anything_runs(url, store):
    engine = sa.create_engine(_driver(url), isolation_level="AUTOCOMMIT")
    try:
        for _ in range(2):
            with (
                pytest.raises(SettingsError, match="AUTOCOMMIT"),
                Session(engine) as session,
                once("k", store=store.bind(session)),
            ):
                raise AssertionError("must not be entered")
        assert record(store) is None
    finally:
        engine.dispose()
    with pytest.raises(SettingsError, match="int"):
        store.bind(5)


# --- a transaction that dies at the last moment -------------------------------------------------


def _end_connection(session, engine):
    """Ended by the server, between the block's last statement and its outcome."""
    number = {"postgresql": "pg_backend_pid()", "mysql": "connection_id()"}[engine.dialect.name]
    pid = session.execute(sa.text(f"SELECT {number}")).scalar_one()
    end = {"postgresql": "SELECT pg_terminate_backend({0})", "mysql": "KILL {0}"}
    with engine.connect() as other:
        other.exec_driver_sql(end[engine.dialect.name].format(pid))


@pytest.mark.timeout(25)
@pytest.mark.parametrize("url", ["postgres", "mariadb"], indirect=True)
def test_a_dead_transaction_is_said_to_be_dead_and_the_call_can_be_made_again(engine, store):
    with (
        pytest.raises(StoreUnavailableError, match=r"dead.*roll it back and call again") as caught,
        Session(engine) as session,
        once("k", store=store.bind(session)),
    ):
        session.execute(INSERT)
        _end_connection(session, engine)
    assert not caught.value.again
    assert not caught.value.happened
    assert charges(engine) == 0
    with Session(engine) as session, session.begin(), once("k", store=store.bind(session)):
        session.execute(INSERT)
    assert charges(engine) == 1


@pytest.mark.timeout(25)
def test_what_cannot_be_recorded_cannot_be_committed_either(engine, store):
    """The statement fails, the connection lives: on MariaDB and SQLite the rows could still go."""
    session = Session(engine)
    with (
        pytest.raises(StoreUnavailableError, match="nothing of it has happened"),
        once("k", store=store.bind(session)),
    ):
        session.execute(INSERT)
        with engine.connect() as other:  # SQLite's one writer is the session, so it does it itself
            ruin = session if engine.dialect.name == "sqlite" else other
            ruin.execute(sa.text("ALTER TABLE idempotency RENAME COLUMN outcome TO ending"))
            other.commit()
    session.commit()
    session.close()
    assert charges(engine) == 0


def test_a_session_that_cannot_connect_is_refused_before_anything_runs(store):
    nowhere = sa.create_engine("postgresql+psycopg://nobody@127.0.0.1:1/x")
    with (
        pytest.raises(StoreUnavailableError, match="nothing has happened") as caught,
        Session(nowhere) as session,
        once("k", store=store.bind(session)),
    ):
        raise AssertionError("must not be entered")
    assert not caught.value.again
    assert record(store) is None
