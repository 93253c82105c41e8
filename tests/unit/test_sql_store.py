"""Opening a store, and how many statements its verbs take."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import _queries
from sqlalchemy.ext.asyncio import create_async_engine

from semel import stores
from semel.colour import ASYNC, SYNC, run
from semel.errors import CorruptRecordError, SettingsError, StoreUnavailableError
from semel.keys import make_key, new_attempt
from semel.stores.rules import Completing
from semel.stores.sql import SQLStore, init, lines, postgres
from semel.stores.sql.dialects import Postgres
from semel.stores.sql.ledger import BATCH_BYTES, chunks
from semel.stores.sql.lines import open_engine, parse, place, with_driver
from semel.values import Busy, Claim, Done, Kept, Outcome, State, Terms, Won

TERMS = Terms(lease_s=30, ttl_s=600)
VALUE = Outcome("value", b'{"paid":true}')
KEY = make_key("order-1", operation="pay")


@pytest.fixture
def sqlite_url(tmp_path):
    url = f"sqlite:///{tmp_path}/ledger.db"
    init(url)
    return url


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    return request.getfixturevalue(f"{request.param}_url")


def ask(ledger, key=KEY, *, attempt=None, terms=TERMS):
    return ledger.claim(key, attempt=attempt or new_attempt(), fingerprint=b"", terms=terms)


# --- opening ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "sync", "asynchronous"),
    [
        ("postgresql://u:p@db/x", "postgresql+psycopg", "postgresql+psycopg"),
        ("postgres://u:p@db/x", "postgresql+psycopg", "postgresql+psycopg"),
        ("postgresql+asyncpg://u:p@db/x", "postgresql+psycopg", "postgresql+psycopg"),
        ("mysql://u:p@db/x", "mysql+pymysql", "mysql+asyncmy"),
        ("mariadb://u:p@db/x", "mariadb+pymysql", "mariadb+asyncmy"),
        ("sqlite:///x.db", "sqlite+pysqlite", "sqlite+aiosqlite"),
    ],
)
def test_each_colour_gets_a_driver_of_its_own(url, sync, asynchronous):
    parsed = parse(url)
    assert with_driver(parsed, "sync").drivername == sync
    assert with_driver(parsed, "async").drivername == asynchronous


def test_without_asyncmy_aiomysql_will_do(monkeypatch):
    found = {"aiomysql"}
    monkeypatch.setattr(lines, "find_spec", lambda name: name if name in found else None)
    url = parse("mysql://db/x")
    assert with_driver(url, "async").drivername == "mysql+aiomysql"
    found.clear()
    with pytest.raises(SettingsError, match=r"pip install 'semel\[mysql\]'"):
        with_driver(url, "async")


@pytest.mark.parametrize(
    ("url", "extra"),
    [
        ("postgres://db/x", "postgres"),
        ("postgresql+psycopg://db/x", "postgres"),
        ("mysql://db/x", "mysql"),
        ("mariadb://db/x", "mysql"),
    ],
)
@pytest.mark.parametrize("home", [lines, stores], ids=["driver", "SQLAlchemy"])
def test_what_to_install_is_said_at_once(monkeypatch, url, extra, home):
    monkeypatch.setattr(home, "find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=rf"pip install 'semel\[{extra}\]'"):
        stores.connect(url)


@pytest.mark.parametrize(
    "url", ["", "nonsense", "oracle://db/x", "sqlite://", "sqlite:///:memory:"]
)
def test_a_url_that_cannot_work_is_refused(url):
    with pytest.raises(SettingsError):
        SQLStore(url)


def test_an_engine_that_cannot_work_is_refused():
    with pytest.raises(SettingsError, match="Engine"):
        SQLStore(42)


def test_passwords_are_not_shown():
    store = SQLStore("postgresql://me:secret@db:5432/shop?sslmode=require")
    assert repr(store) == "SQLStore('postgresql://db:5432/shop')"
    assert "secret" not in place(parse("mysql://me:secret@db/shop"))


def test_an_engine_serves_its_own_colour_only(tmp_path):
    sync = SQLStore(sa.create_engine(f"sqlite:///{tmp_path}/a.db"))
    with pytest.raises(SettingsError, match="create_async_engine"):
        sync.ledger(ASYNC)
    asynchronous = SQLStore(create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/a.db"))
    with pytest.raises(SettingsError, match="create_engine"):
        asynchronous.ledger(SYNC)


async def test_create_makes_the_tables_on_first_use(url):
    store = SQLStore(url, create=True)
    ledger = store.ledger(ASYNC)
    answers = await asyncio.gather(*(ask(ledger, make_key(str(i))) for i in range(8)))
    assert all(isinstance(answer, Won) for answer in answers)
    await store.aclose()


def test_many_threads_may_create_at_once(url):
    stores = [SQLStore(url, create=True) for _ in range(4)]

    async def all_at_once():
        work = [asyncio.to_thread(run, ask(s.ledger(SYNC), make_key("x"))) for s in stores]
        return await asyncio.gather(*work)

    answers = asyncio.run(all_at_once())
    assert sorted(type(answer).__name__ for answer in answers) == ["Busy"] * 3 + ["Won"]
    for store in stores:
        store.close()


def test_a_server_that_is_down_is_unavailable_and_never_won():
    store = SQLStore("postgresql://nobody@127.0.0.1:1/x")
    with pytest.raises(StoreUnavailableError, match="check that the server is up"):
        run(ask(store.ledger(SYNC)))
    with pytest.raises(StoreUnavailableError):
        asyncio.run(ask(store.ledger(ASYNC)))


def test_a_second_event_loop_and_the_sync_colour_share_the_records(url):
    store = SQLStore(url, create=True)

    async def claim_and_complete():
        won = await ask(store.ledger(ASYNC))
        return won, await store.ledger(ASYNC).complete(won.claim, VALUE)

    async def replay():
        return await ask(store.ledger(ASYNC))

    won, verdict = asyncio.run(claim_and_complete())
    assert verdict == Kept()
    assert asyncio.run(replay()) == Done(VALUE, won.claim.fence)
    assert run(ask(store.ledger(SYNC))) == Done(VALUE, won.claim.fence)
    asyncio.run(store.aclose())


def test_a_loop_that_was_closed_over_its_connections_is_left_behind(postgres_url):
    init(postgres_url)
    store = SQLStore(postgres_url)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(ask(store.ledger(ASYNC)))
    loop.close()
    assert isinstance(asyncio.run(ask(store.ledger(ASYNC))), Busy)
    asyncio.run(store.aclose())


# --- corrupt ------------------------------------------------------------------------------------


async def test_a_corrupt_record_is_named_and_spoils_nothing_else(url):
    store = SQLStore(url, create=True)
    ledger, sync = store.ledger(ASYNC), store.ledger(SYNC)
    other = make_key("order-2", operation="pay")
    won = await ask(ledger)
    await ledger.complete(won.claim, VALUE)
    engine = open_engine(parse(url))
    with engine.connect() as connection:
        connection.exec_driver_sql("UPDATE idempotency SET outcome = 'odd'")
    engine.dispose()
    answers = await asyncio.gather(ask(ledger), ask(ledger, other), return_exceptions=True)
    assert isinstance(answers[0], CorruptRecordError)
    assert "order-1" in str(answers[0])
    assert isinstance(answers[1], Won)
    for verb in (ask(sync), sync.look(KEY.id), sync.complete(won.claim, Outcome("value", b"2"))):
        with pytest.raises(CorruptRecordError, match="order-1"):
            run(verb)
    await store.aclose()


async def test_a_state_of_no_meaning_is_corrupt(url):
    store = SQLStore(url, create=True)
    await ask(store.ledger(ASYNC))
    engine = open_engine(parse(url))
    with engine.connect() as connection:
        connection.exec_driver_sql("UPDATE idempotency SET state = 'ODD'")
    engine.dispose()
    with pytest.raises(CorruptRecordError, match="order-1"):
        await ask(store.ledger(ASYNC))
    await store.aclose()


# --- how many statements ------------------------------------------------------------------------


@pytest.fixture
def statements(monkeypatch):
    said = []
    execute = psycopg.Connection.execute

    def counted(self, query, *args, **kwargs):
        said.append(query)
        return execute(self, query, *args, **kwargs)

    monkeypatch.setattr(psycopg.Connection, "execute", counted)
    return said


def test_postgres_takes_two_statements_at_first_and_one_for_a_duplicate(postgres_url, statements):
    init(postgres_url)
    store = SQLStore(postgres_url)
    ledger = store.ledger(SYNC)
    run(ask(ledger, make_key("warm")))
    statements.clear()
    won = run(ask(ledger))
    assert run(ledger.complete(won.claim, VALUE)) == Kept()
    assert len(statements) == 2
    statements.clear()
    assert isinstance(run(ask(ledger)), Done)
    assert len(statements) == 1
    store.close()


def test_a_replay_on_postgres_writes_nothing(postgres_url):
    """No transaction id is taken, so nothing was written and no row was locked."""
    init(postgres_url)
    store = SQLStore(postgres_url)
    ledger = store.ledger(SYNC)
    won = run(ask(ledger))
    busy = make_key("busy")
    run(ask(ledger, busy))
    run(ledger.complete(won.claim, VALUE))
    with psycopg.connect(postgres_url, autocommit=True) as watcher:
        mark = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
        before = watcher.execute(mark).fetchone()
        for _ in range(5):
            assert isinstance(run(ask(ledger)), Done)
            assert isinstance(run(ask(ledger, busy)), Busy)
        assert watcher.execute(mark).fetchone() == before
        run(ask(ledger, make_key("another")))
        assert watcher.execute(mark).fetchone() != before
    store.close()


def test_mariadb_takes_three_statements_at_first_and_one_for_a_duplicate(mariadb_url):
    init(mariadb_url)
    store = SQLStore(mariadb_url)
    ledger = store.ledger(SYNC)
    engine = open_engine(parse(mariadb_url))

    def questions():
        with engine.connect() as connection:
            line = connection.exec_driver_sql("SHOW GLOBAL STATUS LIKE 'Questions'").one()
            return int(line[1])

    run(ask(ledger, make_key("warm")))
    questions()
    price = -(questions() - questions())  # what asking costs by itself
    before = questions()
    won = run(ask(ledger))
    run(ledger.complete(won.claim, VALUE))
    assert questions() - before - price == 3
    before = questions()
    run(ask(ledger))
    assert questions() - before - price == 1
    engine.dispose()
    store.close()


def test_a_batch_is_cut_where_it_grows_too_heavy():
    claim = Claim(KEY, "a", b"", TERMS, 1)
    half = Completing(claim, Outcome("value", b"x" * (BATCH_BYTES // 2)))
    whole = Completing(claim, Outcome("value", b"x" * BATCH_BYTES * 2))
    assert [len(piece) for piece in chunks([half] * 5)] == [2, 2, 1]
    assert [len(piece) for piece in chunks([whole, half, whole])] == [1, 1, 1]


async def test_many_large_results_at_once_are_stored(url):
    store = SQLStore(url, create=True)
    ledger = store.ledger(ASYNC)
    keys = [make_key(f"k{i}") for i in range(24)]
    won = await asyncio.gather(*(ask(ledger, key) for key in keys))
    data = bytes(range(256)) * 4096
    verdicts = await asyncio.gather(
        *(ledger.complete(w.claim, Outcome("value", data)) for w in won)
    )
    assert verdicts == [Kept()] * len(keys)
    assert (await ask(ledger, keys[7])).outcome.data == data
    await store.aclose()


# --- guarantees, sweep --------------------------------------------------------------------------


async def test_guarantees_are_read_from_the_server(url):
    store = SQLStore(url, create=True)
    await ask(store.ledger(ASYNC))
    found = await store.ledger(ASYNC).guarantees()
    assert "process_crash" in found.survives
    assert "failover" not in found.survives
    assert ("power_loss" in found.survives) == url.startswith("sqlite")  # tests run without fsync
    assert found.shared
    assert len(found.why) >= 2
    await store.aclose()


def test_weaker_settings_promise_less(postgres_url, mariadb_url, tmp_path):
    init(postgres_url)
    engine = sa.create_engine(
        with_driver(parse(postgres_url), "sync"),
        connect_args={"options": "-c synchronous_commit=off"},
    )
    found = run(SQLStore(engine).ledger(SYNC).guarantees())
    assert found.survives == frozenset()
    assert any("synchronous_commit=off" in why for why in found.why)
    engine.dispose()
    loose = sa.create_engine(f"sqlite:///{tmp_path}/loose.db")
    sa.event.listen(loose, "connect", lambda c, _: c.execute("PRAGMA synchronous = OFF"))
    found = run(SQLStore(loose, create=True).ledger(SYNC).guarantees())
    assert found.survives == {"process_crash"}
    loose.dispose()


async def test_a_sweep_writes_down_who_vanished(url):
    store = SQLStore(url, create=True)
    ledger = store.ledger(ASYNC)
    held = Terms(lease_s=0.001, ttl_s=600, takeover=False, hold=True)
    won = await ask(ledger, terms=held)
    await ledger.renew(won.claim, lease_s=0.001)
    await asyncio.sleep(0.01)
    assert await ledger.sweep() == 0
    engine = open_engine(parse(url))
    with engine.connect() as connection:
        state = connection.exec_driver_sql("SELECT state FROM idempotency").scalar_one()
    engine.dispose()
    assert state == State.UNKNOWN
    assert await ledger.complete(won.claim, VALUE) == Kept()
    await store.aclose()


async def test_a_sweep_goes_in_chunks_up_to_its_limit(url):
    store = SQLStore(url, create=True)
    ledger = store.ledger(ASYNC)
    brief = Terms(lease_s=0.0, ttl_s=0.0)
    await asyncio.gather(*(ask(ledger, make_key(str(i)), terms=brief) for i in range(1300)))
    await ask(ledger)
    assert await ledger.sweep(limit=700) == 700
    assert await ledger.sweep() == 600
    assert len(await ledger.records(limit=2000)) == 1
    await store.aclose()


@pytest.mark.parametrize("statement", [postgres.CLAIM_ONE, postgres.CLAIM_MANY])
def test_a_claim_is_short_enough_for_psycopg_to_remember(statement):
    """Past this length psycopg takes the statement apart anew each time, which costs 0.1 ms."""
    assert len(Postgres("psycopg").say(statement)) <= _queries.MAX_CACHED_STATEMENT_LENGTH
