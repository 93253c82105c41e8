"""SQL servers with settings of their own: quotes, isolation levels."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager, suppress

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import idempotent, step
from semel.colour import SYNC, run
from semel.errors import ResultLostError, SettingsError, StoreUnavailableError
from semel.keys import make_key
from semel.stores.sql import SQLStore, check, init
from semel.stores.sql.lines import parse, with_driver
from semel.values import Kept, Outcome, State, Terms

pytestmark = pytest.mark.contract

KEYS = [f"key {number}" for number in range(60)]


# --- MariaDB with ANSI_QUOTES -------------------------------------------------------------------


@pytest.fixture
def ansi_quotes_url(mariadb_server, mariadb_url):
    """A server on which "a" is a name and not a text."""
    mariadb_server.execute("SET @@GLOBAL.sql_mode = CONCAT(@@GLOBAL.sql_mode, ',ANSI_QUOTES')")
    yield mariadb_url
    mariadb_server.execute("SET @@GLOBAL.sql_mode = DEFAULT")


@pytest.mark.parametrize("given", ["url", "engine"])
def test_tables_are_made_and_checked_under_ansi_quotes(ansi_quotes_url, given):
    where = ansi_quotes_url
    if given == "engine":
        where = sa.create_engine(with_driver(parse(ansi_quotes_url), "sync"))
    assert init(where).problems == ()
    assert check(where).problems == ()
    calls = []
    store = SQLStore(where)

    @idempotent(store=store, key="{number}")
    def pay(number):
        calls.append(number)
        return "paid"

    assert [pay(1), pay(1)] == ["paid", "paid"]
    assert calls == [1]
    store.close()
    if given == "engine":
        where.dispose()


# --- MariaDB with NO_BACKSLASH_ESCAPES ----------------------------------------------------------


@pytest.fixture
def no_backslash_escapes_url(mariadb_server, mariadb_url):
    """A server on which a backslash in a text is a backslash."""
    mariadb_server.execute("SET @@GLOBAL.sql_mode = 'NO_BACKSLASH_ESCAPES'")
    init(mariadb_url)
    yield mariadb_url
    mariadb_server.execute("SET @@GLOBAL.sql_mode = DEFAULT")


@pytest.mark.parametrize("given", ["url", "engine"])
def test_calls_happen_once_under_no_backslash_escapes(no_backslash_escapes_url, given):
    where = no_backslash_escapes_url
    if given == "engine":
        where = sa.create_engine(with_driver(parse(where), "sync"))
    calls = []
    store = SQLStore(where)

    @idempotent(store=store, key="{key}")
    def pay(key):
        calls.append(key)
        return b"'\\\0" + key.encode()

    asked = [pay(key) for key in KEYS * 2]
    assert asked == [b"'\\\0" + key.encode() for key in KEYS * 2]
    assert calls == KEYS
    store.close()
    if given == "engine":
        where.dispose()


async def test_async_engine_that_damages_bytes_under_no_backslash_escapes_is_refused(
    no_backslash_escapes_url,
):
    """asyncmy escapes bytes with backslashes, which this server reads literally."""
    url = with_driver(parse(no_backslash_escapes_url), "async")
    engine = create_async_engine(url)
    calls = []

    @idempotent(store=SQLStore(engine), key="{key}")
    async def pay(key):
        calls.append(key)

    with pytest.raises(SettingsError, match="NO_BACKSLASH_ESCAPES") as refused:
        await pay("a")
    await engine.dispose()
    assert calls == []

    assert 'connect_args={"sql_mode": "STRICT_ALL_TABLES"}' in str(refused.value)
    engine = create_async_engine(url, connect_args={"sql_mode": "STRICT_ALL_TABLES"})
    store = SQLStore(engine)

    @idempotent(store=store, key="{key}")
    async def say(key):
        calls.append(key)
        return key.encode()

    assert [await say(key) for key in KEYS * 2] == [key.encode() for key in KEYS * 2]
    assert calls == KEYS
    await engine.dispose()


# --- PostgreSQL whose transactions are SERIALIZABLE by default ----------------------------------


@pytest.fixture
def serializable_url(postgres_server, postgres_url):
    init(postgres_url)
    name = parse(postgres_url).database
    postgres_server.execute(
        f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'"
    )
    with closing_engine(postgres_url) as engine, engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE paid (number text)")
    return postgres_url


@contextmanager
def closing_engine(url):
    engine = sa.create_engine(with_driver(parse(url), "sync"), pool_size=20)
    yield engine
    engine.dispose()


def unfinished(url):
    with closing(SQLStore(url)) as store:
        found = run(store.ledger(SYNC).records(limit=1000))
        return [record.key.text for record in found if record.state is State.PENDING]


def test_crowd_under_serializable_leaves_no_key_leased(serializable_url):
    calls = []
    store = SQLStore(serializable_url)

    @idempotent(store=store, key="{key}", on_duplicate="wait", lease=30)
    def pay(key):
        calls.append(key)
        return key

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(pay, KEYS * 16)) == KEYS * 16
    assert sorted(calls) == sorted(KEYS)
    assert unfinished(serializable_url) == []
    store.close()


@pytest.mark.parametrize("failed_before", [False, True])
async def test_async_crowd_under_serializable_leaves_no_key_leased(serializable_url, failed_before):
    calls = []
    stores = [SQLStore(serializable_url) for _ in range(4)]

    def guarded(store):
        @idempotent(store=store, key="{key}", on_duplicate="wait", lease=30)
        async def pay(key):
            if fails:
                raise ValueError(key)
            calls.append(key)
            return key

        return pay

    if fails := failed_before:
        first = [guarded(stores[0])(key) for key in KEYS]
        await asyncio.gather(*first, return_exceptions=True)
        fails = False
    asked = [guarded(store)(key) for store in stores for key in KEYS * 4]
    assert await asyncio.gather(*asked) == KEYS * 16
    assert sorted(calls) == sorted(KEYS)
    assert unfinished(serializable_url) == []
    for store in stores:
        await store.aclose()


def test_crowd_of_bound_sessions_under_serializable_leaves_no_key_leased(serializable_url):
    """Their COMMITs fail often: each session reads what the others write."""
    store, failed = SQLStore(serializable_url), []

    def pay(key):
        with Session(engine) as session:

            @idempotent(store=store.bind(session), key="{key}", on_duplicate="wait", lease=600)
            def body(key):
                session.execute(sa.text("SELECT count(*) FROM paid")).all()
                session.execute(sa.text("INSERT INTO paid VALUES (:key)"), {"key": key})
                return key

            body(key)
            session.commit()

    def until_paid(key):
        for _ in range(200):
            try:
                return pay(key)
            except (sa.exc.OperationalError, StoreUnavailableError) as error:
                failed.append(error)
        raise AssertionError(f"{key} was never paid")

    with closing_engine(serializable_url) as engine, ThreadPoolExecutor(8) as threads:
        list(threads.map(until_paid, KEYS * 2))
        with engine.connect() as connection:
            paid = connection.exec_driver_sql("SELECT number FROM paid").scalars().all()
    assert failed, "no transaction failed, so this test shows nothing"
    assert sorted(paid) == sorted(KEYS)
    assert unfinished(serializable_url) == []
    store.close()


async def test_failed_commit_of_an_async_bound_session_releases_the_claim(serializable_url):
    engine = create_async_engine(with_driver(parse(serializable_url), "async"))
    store = SQLStore(serializable_url)

    @asynccontextmanager
    async def bound(key):
        async with AsyncSession(engine) as session:

            @idempotent(store=store.bind(session), key="{key}", lease=600)
            async def body(key):
                (await session.execute(sa.text("SELECT count(*) FROM paid"))).all()
                await session.execute(sa.text("INSERT INTO paid VALUES (:key)"), {"key": key})

            await body(key)
            yield session

    failed = []
    async with bound("a") as first, bound("b") as second:
        for key, session in {"a": first, "b": second}.items():
            try:
                await session.commit()
            except sa.exc.OperationalError:
                failed.append(key)
    [key] = failed
    assert unfinished(serializable_url) == []
    async with bound(key) as third:
        await third.commit()
    await store.aclose()
    await engine.dispose()


# --- MariaDB with a small max_allowed_packet ----------------------------------------------------

PACKET = 65_536


@contextmanager
def packets_of(server, most):
    """Set the limit of new connections; restore it afterwards."""
    [(before,)] = _rows(server.url(), "SELECT @@GLOBAL.max_allowed_packet")
    server.execute(f"SET GLOBAL max_allowed_packet = {most}")
    try:
        yield
    finally:
        server.execute(f"SET GLOBAL max_allowed_packet = {before}")


def _rows(url, select):
    engine = sa.create_engine(with_driver(parse(url), "sync"))
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(select).all()
    engine.dispose()
    return rows


@pytest.fixture
def small_packets_url(mariadb_server, mariadb_url):
    """A server that takes no statement of more than 64 KiB."""
    init(mariadb_url)
    with packets_of(mariadb_server, PACKET):
        yield mariadb_url


def test_steps_that_outgrow_the_packet_run_once_and_are_recorded_as_lost(small_packets_url):
    ran = []
    store = SQLStore(small_packets_url)

    @idempotent(store=store, key="k", lease=5)
    def work():
        for number in range(20):
            step(f"step {number}", lambda number=number: ran.append(number) or "y" * 5_000)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        work()
    with pytest.raises(ResultLostError, match="of step 'step 8'"):
        work()
    assert ran == list(range(20))
    [record] = run(store.ledger(SYNC).records())
    assert record.state is State.FAILED
    store.close()


async def test_steps_that_outgrow_the_packet_do_not_spoil_their_batch(small_packets_url):
    ran = []
    store = SQLStore(small_packets_url)

    @idempotent(store=store, key="{key}", lease=5)
    async def work(key, size):
        for number in range(15):
            await step(f"{number}", lambda number=number: ran.append((key, number)) or "y" * size)
        return key

    calls = [work(f"{number}", 5_000 if number == 3 else 5) for number in range(8)]
    assert await asyncio.gather(*calls) == [f"{number}" for number in range(8)]
    assert len(ran) == len(set(ran)) == 120
    await store.aclose()


@pytest.mark.parametrize("size", [PACKET // 2 - 1_000, PACKET // 2, PACKET * 3 // 4])
def test_result_between_half_a_packet_and_a_whole_runs_once(small_packets_url, size):
    """PyMySQL sends two hex digits for each byte."""
    calls = []
    store = SQLStore(small_packets_url)

    @idempotent(store=store, key="k", lease=1, codec=Raw())
    def work():
        calls.append(1)
        return b"\xff" * size

    assert work() == b"\xff" * size
    with suppress(ResultLostError):
        assert work() == b"\xff" * size
    assert calls == [1]
    store.close()


class Raw:
    """A codec whose data is not JSON."""

    def encode(self, value):
        return value

    def decode(self, data):
        return data


def test_record_with_a_full_packet_of_steps_can_be_released_and_claimed(small_packets_url):
    store = SQLStore(small_packets_url)
    ledger, key, terms = store.ledger(SYNC), make_key("k"), Terms(lease_s=30, ttl_s=600)
    claim = run(ledger.claim(key, attempt="a", terms=terms)).claim
    with pytest.raises(StoreUnavailableError, match="max_allowed_packet") as caught:
        for number in range(1_000):
            run(ledger.note(claim, f"step {number}", b"x" * 128))
    assert not caught.value.again
    assert run(ledger.release(claim, error="'" * 1_000)) == Kept()
    won = run(ledger.claim(key, attempt="b", terms=terms))
    assert len(won.steps) > 250
    assert run(ledger.complete(won.claim, Outcome("value", b"x" * 30_000))) == Kept()
    store.close()


def test_limit_lowered_while_connected_does_not_repeat_a_step_or_a_call(
    mariadb_server, mariadb_url
):
    """The limit was read once; the server refuses, and it is read again."""
    init(mariadb_url)
    ran = []
    store = SQLStore(mariadb_url)

    @idempotent(store=store, key="{key}", lease=5)
    def work(key, size):
        step("effect", lambda: ran.append(key) or "y" * size)
        return "z" * size

    work("before", 5)
    with packets_of(mariadb_server, PACKET):
        for (number,) in _rows(
            mariadb_url,
            "SELECT id FROM information_schema.processlist "
            "WHERE db = DATABASE() AND id <> CONNECTION_ID()",
        ):
            mariadb_server.execute(f"KILL {number}")
        assert work("after", 200_000) == "z" * 200_000
        with pytest.raises(ResultLostError, match="max_allowed_packet"):
            work("after", 200_000)
    assert ran == ["before", "after"]
    store.close()
