"""PostgreSQL behind PgBouncer: what belongs to a session must not outlive a transaction.

The contracts run there too: `pgbouncer` in tests/contract. Here is what only a pooler can break.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from semel import idempotent
from semel.brokers.memory import MemoryBroker
from semel.cli.app import app
from semel.cloudevents import from_json
from semel.colour import ASYNC
from semel.errors import SettingsError
from semel.inbox import SQLInbox
from semel.outbox import Event, Outbox
from semel.relay import Relay
from semel.stores.sql import SQLStore, init
from semel.stores.sql.lines import open_engine, parse, with_driver
from semel.stores.sql.outbox_reading import OutboxReader
from semel.stores.sql.pooler import POOLED
from semel.testing.inboxes import messages
from support import servers

POOL = 2

# PgBouncer itself sets these on a server connection to what each client has asked for.
OF_THE_POOLER = {
    "application_name",
    "client_encoding",
    "DateStyle",
    "standard_conforming_strings",
    "TimeZone",
}


@pytest.fixture(scope="module")
def poolers(postgres_server):
    """Pools of two server connections, by their mode."""
    with ExitStack() as stack:
        made = {}
        for mode in ("transaction", "session", "statement"):
            made[mode] = servers.start_pgbouncer(postgres_server, mode, POOL)
            stack.callback(made[mode].stop)
        yield made


@pytest.fixture
def database(postgres_tables_url):
    return parse(postgres_tables_url).database


@pytest.fixture
def url(poolers, database):
    return poolers["transaction"].url(database)


@pytest.fixture
def fresh_url(poolers, postgres_url):
    """A database of its own, and so server connections that no other test has used."""
    init(postgres_url)
    return poolers["transaction"].url(parse(postgres_url).database)


@asynccontextmanager
async def opened(url):
    store = SQLStore(url)
    try:
        yield store
    finally:
        await store.aclose()


def semel(*words):
    return CliRunner().invoke(app, list(words))


# --- recognising a pooler -----------------------------------------------------------------------


async def found_by(url):
    """Whether the sync and the async engine of this URL recognise a pooler."""
    store = SQLStore(url)
    with closing(open_engine(parse(url)).connect()) as connection:
        found = [connection.info[POOLED]]
    engine = store._async_lines()._engine
    async with engine.connect() as connection:
        found.append((await connection.get_raw_connection()).info[POOLED])
    await engine.dispose()
    return found


@pytest.mark.parametrize(
    ("mode", "option", "expected"),
    [
        (None, "", False),
        (None, "?pooler=transaction", True),
        ("transaction", "", True),
        ("transaction", "?pooler=transaction", True),
        ("session", "", True),
        ("session", "?pooler=session", False),
    ],
)
async def test_new_connection_recognises_pooler_unless_url_overrides(
    mode, option, expected, poolers, postgres_server, database
):
    server = poolers[mode] if mode else postgres_server
    assert await found_by(server.url(database) + option) == [expected, expected]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("postgresql://a@b/c?pooler=statement", "write pooler=transaction, pooler=session"),
        ("postgresql://a@b/c?pooler=", "write pooler=transaction, pooler=session"),
        ("postgresql://a@b/c?pooler&sslmode=allow", "write pooler=transaction"),
        ("mysql://a@b/c?pooler=transaction", "is for PostgreSQL, not for mysql"),
        ("sqlite:///c.db?pooler=session", "is for PostgreSQL, not for sqlite"),
    ],
)
def test_unknown_pooler_option_is_refused(given, message):
    with pytest.raises(SettingsError, match=message):
        SQLStore(given)


# --- db init ------------------------------------------------------------------------------------


def test_concurrent_db_init_through_pooler_leaves_no_lock(poolers, postgres_url):
    pooled = poolers["transaction"].url(parse(postgres_url).database)
    with ThreadPoolExecutor(6) as threads:
        reports = list(threads.map(lambda _: init(pooled), range(6)))
    assert all(report.ok for report in reports), reports
    with psycopg.connect(postgres_url) as connection:
        locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        assert connection.execute(locks).fetchone() == (0,)
    for url in (pooled, postgres_url):
        again = semel("db", "init", url)
        assert again.exit_code == 0, again.stderr


def test_concurrent_db_init_succeeds_where_transactions_are_serializable_by_default(
    postgres_server, postgres_url
):
    name = parse(postgres_url).database
    postgres_server.execute(
        f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'"
    )
    with ThreadPoolExecutor(6) as threads:
        reports = list(threads.map(lambda _: init(postgres_url), range(6)))
    assert all(report.ok for report in reports), reports


def test_failed_db_init_leaves_no_transaction_open(postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE VIEW idempotency AS SELECT 1 AS one")
    engine = sa.create_engine(with_driver(parse(postgres_url), "sync"), pool_size=1, max_overflow=0)
    with pytest.raises(Exception, match="idempotency"):
        init(engine)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
        connection.exec_driver_sql("DROP VIEW idempotency")
        connection.commit()
    assert init(engine).ok
    engine.dispose()


# --- statements ---------------------------------------------------------------------------------

EVENTS = 900
WRITERS = 6


def write_events(url, writer):
    given = {"prepare_threshold": None}
    engine = sa.create_engine(with_driver(parse(url), "sync"), connect_args=given)
    outbox = Outbox()
    for number in range(EVENTS // WRITERS):
        with Session(engine) as session:
            outbox.add(
                session, Event("placed", "order", f"{writer}", {"n": number}, topic="orders")
            )
            session.commit()
    engine.dispose()


async def test_two_relays_behind_pooler_publish_all_events_in_order(url, caplog):
    caplog.set_level(logging.INFO, "semel")
    brokers = [MemoryBroker(shards=4, maxlen=None) for _ in range(2)]
    relays = [Relay(SQLStore(url), broker, name=f"{n}") for n, broker in enumerate(brokers)]
    running = [asyncio.create_task(relay.run()) for relay in relays]
    try:
        async with asyncio.timeout(90):
            await asyncio.gather(*(asyncio.to_thread(write_events, url, n) for n in range(WRITERS)))
            while any(len(entries_of(broker)) < EVENTS for broker in brokers):
                await asyncio.sleep(0.05)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    numbers = list(range(EVENTS // WRITERS))
    for broker in brokers:
        published = defaultdict(list)
        for entry in entries_of(broker):
            message = from_json(entry.raw)
            published[message.aggregate_id].append(message.data["n"])
        assert dict(published) == {str(writer): numbers for writer in range(WRITERS)}
    assert "prepared statement" not in caplog.text


def entries_of(broker):
    return [entry for log in broker._logs.values() for entry in log.entries]


def run_crowd(url, effects):
    """Call a guarded function for each of 30 keys from 12 threads with three stores."""
    stores = [SQLStore(url) for _ in range(3)]
    guarded = []
    for store in stores:

        @idempotent(store=store, key="pay:{order}", on_duplicate="wait")
        def pay(order):
            effects.append(order)
            return {"paid": order}

        guarded.append(pay)

    def call(thread):
        return [guarded[thread % 3](order) for order in range(30)]

    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(call, range(12)))
    for store in stores:
        store.close()
    return answers


@pytest.mark.parametrize("option", ["", "?pooler=session"], ids=["recognised", "not_recognised"])
def test_crowd_behind_pooler_has_each_effect_once(fresh_url, option):
    """Also where the pooler is not recognised, which the wrong option imitates."""
    effects = []
    answers = run_crowd(fresh_url + option, effects)
    assert Counter(effects) == dict.fromkeys(range(30), 1)
    assert answers == [[{"paid": order} for order in range(30)]] * 12


async def test_log_behind_pooler_that_is_not_recognised_appends_each_entry_once(fresh_url):
    url = fresh_url + "?pooler=session"
    async with opened(url) as one, opened(url) as other:

        async def append(store, name):
            for number in range(40):
                await store.log(ASYNC).append("s", b"x", id=f"{name}-{number}")

        await asyncio.gather(append(one, "one"), append(other, "other"), append(one, "third"))
        page = await other.log(ASYNC).read("s", limit=500)
        assert len({entry.id for entry in page.entries}) == len(page.entries) == 120


async def test_restarted_pooler_is_found_again_without_an_error(poolers, url):
    async with opened(url) as store:

        @idempotent(store=store, key="sync:{n}")
        def call(n):
            return n

        @idempotent(store=store, key="async:{n}")
        async def call_async(n):
            return n

        for number in range(2):
            assert await asyncio.to_thread(call, number) == number
            assert await call_async(number) == number
            await asyncio.to_thread(poolers["transaction"].restart)
        assert await asyncio.to_thread(call, 0) == 0
        assert await call_async(0) == 0


# --- settings -----------------------------------------------------------------------------------


def left_behind(url):
    """Settings and prepared statements on the pool's server connections that are not its own."""
    with ExitStack() as stack:
        found = set()
        for _ in range(POOL):  # each keeps a server connection in a transaction
            connection = stack.enter_context(psycopg.connect(url, prepare_threshold=None))
            pid = connection.execute("SELECT pg_backend_pid()").fetchone()
            settings = "SELECT name, setting FROM pg_settings WHERE source = 'session'"
            found |= {row for row in connection.execute(settings) if row[0] not in OF_THE_POOLER}
            found |= set(connection.execute("SELECT name FROM pg_prepared_statements"))
            found |= set(connection.execute("SELECT pg_listening_channels()"))
            locks = "SELECT locktype FROM pg_locks WHERE locktype = 'advisory' AND pid = %s"
            found |= set(connection.execute(locks, pid))
        return found


async def use_everything(store_of, inbox, url):
    """A guarded call, a log, an outbox, an inbox and a listener."""
    store = store_of()
    ledger_key = f"key:{id(store)}"

    @idempotent(store=store, key=ledger_key)
    async def call():
        return 1

    for number in range(8):  # psycopg prepares what it runs more than five times
        await call()
        await store.log(ASYNC).append("s", b"x", id=f"{number}")
        await store.log(ASYNC).read("s")
        await OutboxReader(store).news()
    await inbox.apply("stock", messages(1, 2, 3), lambda message, session: None)
    write_events(url, 1)
    bell = store.bell()
    await bell.listen("s", lambda: None)
    await asyncio.sleep(0.3)
    await bell.aclose()
    await inbox.aclose()
    await store.aclose()


async def test_work_by_url_leaves_nothing_on_server_connections(fresh_url):
    await use_everything(lambda: SQLStore(fresh_url), SQLInbox(fresh_url), fresh_url)
    assert await asyncio.to_thread(left_behind, fresh_url) == set()


async def test_work_on_given_engines_leaves_nothing_on_server_connections(fresh_url):
    """Without `prepare_threshold=None`, too: our own statements are not prepared there."""
    engine = create_async_engine(with_driver(parse(fresh_url), "async"))
    own = create_async_engine(
        with_driver(parse(fresh_url), "async"), connect_args={"prepare_threshold": None}
    )
    await use_everything(lambda: SQLStore(engine), SQLInbox(own), fresh_url)
    await engine.dispose()
    await own.dispose()
    assert await asyncio.to_thread(left_behind, fresh_url) == set()


def test_given_engine_keeps_its_session_settings(postgres_tables_url):
    url = with_driver(parse(postgres_tables_url), "sync")
    engine = sa.create_engine(url, pool_size=1, max_overflow=0)
    settings = sa.text("SELECT name, setting FROM pg_settings ORDER BY name")
    with engine.connect() as connection:
        before = connection.execute(settings).all()
    store = SQLStore(engine)

    @idempotent(store=store, key="key:{n}")
    def call(n):
        return n

    for n in range(3):
        call(n)
    with engine.connect() as connection:
        assert connection.execute(settings).all() == before
        assert not connection.connection.driver_connection.autocommit
    engine.dispose()


# --- LISTEN -------------------------------------------------------------------------------------


async def test_bell_behind_pooler_polls_and_says_so_once(url, caplog):
    caplog.set_level(logging.WARNING, "semel")
    async with opened(url) as store, opened(url) as other:
        bell, rang = store.bell(), asyncio.Event()
        for number in range(2):  # the second one opens what the first one has closed
            await bell.listen("s", rang.set)
            await other.log(ASYNC).append("s", b"x", id=f"{number}")
            async with asyncio.timeout(20):
                await rang.wait()
            rang.clear()
            await bell.leave("s", rang.set)
        await bell.aclose()
    said = [record.message for record in caplog.records if "LISTEN" in record.message]
    assert len(said) == 1
    assert "behind a transaction pooler, where LISTEN does not work; readers poll" in said[0]


async def test_outbox_listener_behind_pooler_returns_and_says_so(url, caplog):
    async with opened(url) as store, asyncio.timeout(20):
        await OutboxReader(store).listen(ASYNC.waiter())
    assert "readers poll instead" in caplog.text


async def test_bell_behind_session_pooler_listens_when_url_says_so(poolers, database, caplog):
    url = poolers["session"].url(database) + "?pooler=session"
    bell = SQLStore(url).bell()
    rang = asyncio.Event()
    await bell.listen("s", rang.set)
    async with asyncio.timeout(20):
        await rang.wait()  # once it listens
    assert not bell._is_polling
    await bell.aclose()
    assert "LISTEN" not in caplog.text


# --- statement pooling --------------------------------------------------------------------------

REFUSED = "PgBouncer in statement pooling mode.*set pool_mode = transaction"


async def test_statement_pooling_is_refused_with_name_of_pooler(poolers, database):
    url = poolers["statement"].url(database)
    async with opened(url) as store:
        with pytest.raises(SettingsError, match=REFUSED):
            await store.log(ASYNC).read("s")
        with pytest.raises(SettingsError, match=REFUSED):
            await asyncio.to_thread(init, url)
        with pytest.raises(SettingsError, match=REFUSED):
            await asyncio.to_thread(init, url + "?pooler=transaction")
    inbox = SQLInbox(url)
    with pytest.raises(SettingsError, match=REFUSED):
        await inbox.apply("stock", messages(1), lambda message, session: None)
    await inbox.aclose()


async def test_statement_pooling_under_given_engine_is_refused_with_name_of_pooler(
    poolers, database
):
    url = with_driver(parse(poolers["statement"].url(database)), "async")
    engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
    store = SQLStore(engine)
    with pytest.raises(SettingsError, match=REFUSED):
        await store.log(ASYNC).append("s", b"x", id="1")
    await engine.dispose()


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["", "?pooler=transaction"])
def test_command_line_works_behind_pooler(url, option):
    for words in (("db", "check"), ("ledger", "list"), ("outbox", "status")):
        done = semel(*words, url + option)
        assert done.exit_code == 0, (words, done.stdout, done.stderr)


def test_command_line_names_statement_pooling(poolers, database):
    done = semel("db", "init", poolers["statement"].url(database))
    assert done.exit_code != 0
    assert "PgBouncer in statement pooling mode" in done.stderr
