"""Opening a store, and how many statements its verbs take."""

from __future__ import annotations

import asyncio
import threading

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from semel import stores
from semel.colour import ASYNC, SYNC, run
from semel.errors import CorruptRecordError, SettingsError, StoreUnavailableError
from semel.keys import make_key, new_attempt
from semel.stores.rules import Completing
from semel.stores.sql import NoTableError, SQLStore, init, inspection, lines
from semel.stores.sql.dialects import dialect_named
from semel.stores.sql.inspection import EXPIRED
from semel.stores.sql.limits import AROUND_BYTES, BATCH_BYTES, chunks
from semel.stores.sql.lines import AsyncLines, open_engine, parse, place, with_driver
from semel.values import Busy, Claim, Done, Kept, Outcome, State, Terms, Won
from support.counting import Counting

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
    ("url", "words"),
    [
        (
            "postgresql://a@b/c?poolers=session",
            "option 'poolers' .*unknown to psycopg; write 'pooler'",
        ),
        ("postgresql://a@b/c?sslmode=require&foo=1", "the option 'foo' "),
        ("mysql://a@b/c?charsets=utf8mb4", "unknown to pymysql, asyncmy; write 'charset'"),
        ("mariadb://a@b/c?sslmode=require", "the option 'sslmode' "),
    ],
)
def test_unknown_option_in_the_url_is_refused_where_the_store_is_made(url, words):
    with pytest.raises(SettingsError, match=words):
        SQLStore(url)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://a@b/c?sslmode=require&host=h1:5432&host=h2&application_name=x",
        "mysql://a@b/c?ssl_ca=ca.pem&ssl_check_hostname=true&connect_timeout=3",
    ],
)
def test_known_options_in_the_url_reach_the_driver(url):
    for colour in ("sync", "async"):
        assert set(with_driver(parse(url), colour).query) == set(parse(url).query)


def test_option_of_the_sync_driver_only_is_refused_for_async_code():
    url = parse("mysql://a@b/c?bind_address=127.0.0.1")
    with_driver(url, "sync")
    with pytest.raises(SettingsError, match=r"'bind_address' .* unknown to asyncmy"):
        with_driver(url, "async")


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


@pytest.fixture(params=["postgres", "mariadb"])
def stranger(request):
    """A URL with tables, and the same for a user who may read them and no more."""
    server = request.getfixturevalue(f"{request.param}_server")
    url = make_url(request.getfixturevalue(f"{request.param}_url"))
    init(url.render_as_string(hide_password=False))
    name = f"reader_{url.database}"
    if request.param == "postgres":
        server.execute(f"CREATE ROLE {name} LOGIN")
        yield url.set(username=name)
        server.execute(f"DROP ROLE {name}")
    else:
        server.execute(f"CREATE USER {name} IDENTIFIED BY 'right'")
        server.execute(f"GRANT SELECT ON {url.database}.* TO {name}")
        yield url.set(username=name, password="right")
        server.execute(f"DROP USER {name}")


@pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])
async def test_who_may_not_write_is_told_what_to_grant(stranger, colour):
    store = SQLStore(stranger.render_as_string(hide_password=False))
    with pytest.raises(StoreUnavailableError, match="GRANT SELECT, INSERT, UPDATE, DELETE"):
        await ask(store.ledger(colour))
    await store.aclose()


@pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])
async def test_who_is_not_let_in_is_told_to_check_the_password(stranger, colour):
    # PostgreSQL trusts everybody here, so there it is the user that is wrong.
    wrong = {"username": "nobody"} if stranger.password is None else {"password": "wrong"}
    store = SQLStore(stranger.set(**wrong).render_as_string(hide_password=False))
    with pytest.raises(StoreUnavailableError, match="check user and password") as caught:
        await ask(store.ledger(colour))
    assert "is up" not in str(caught.value)
    await store.aclose()


@pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])
async def test_a_missing_database_or_table_is_named(url, colour):
    store = SQLStore(url)
    with pytest.raises(NoTableError, match="semel db init"):
        await ask(store.ledger(colour))
    await store.aclose()
    if not url.startswith("sqlite"):
        store = SQLStore(make_url(url).set(database="nowhere").render_as_string(False))
        with pytest.raises(SettingsError, match="CREATE DATABASE"):
            await ask(store.ledger(colour))
        await store.aclose()


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


def test_an_event_loop_may_move_in_while_another_thread_looks_for_closed_ones(sqlite_url):
    store = SQLStore(sqlite_url)
    ledger = store.ledger(ASYNC)
    threads = []

    class Watched:
        """A loop that is just being looked at when another one moves in."""

        def is_closed(self):
            if not threads:
                threads.append(threading.Thread(target=asyncio.run, args=(ask(ledger),)))
                threads[0].start()
                threads[0].join(0.3)  # it has moved in, or waits until this look is over
            return False

    ledger._homes[Watched()] = None  # no other way to be in the middle of it
    assert isinstance(asyncio.run(ask(ledger, make_key("other"))), Won)
    threads[0].join()


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


@pytest.fixture(params=["postgres", "mariadb"])
def counted(request):
    """A URL, and the proxy on the way to it."""
    direct = make_url(request.getfixturevalue(f"{request.param}_url"))
    init(direct.render_as_string(hide_password=False))
    with Counting(direct.port) as proxy:
        yield direct.set(port=proxy.port).render_as_string(hide_password=False), proxy


# PostgreSQL: one statement per verb, and a second one for a claim that takes a row over.
# MariaDB: a claim reads, and inserts what is not there; steps and failures are read first.
ROUND_TRIPS = {
    "postgresql": {"claim": 1, "complete": 1, "replay": 1, "busy": 1, "renew": 1, "note": 1},
    "mysql": {"claim": 2, "complete": 1, "replay": 1, "busy": 1, "renew": 1, "note": 2},
}
ROUND_TRIPS["postgresql"] |= {"release": 1, "again": 2}
ROUND_TRIPS["mysql"] |= {"release": 2, "again": 2}


async def _prices(ledger, proxy, key):
    paid = {}
    paid["claim"], won = await proxy.price(ask(ledger, key))
    paid["busy"], _ = await proxy.price(ask(ledger, key))
    paid["renew"], _ = await proxy.price(ledger.renew(won.claim))
    paid["note"], _ = await proxy.price(ledger.note(won.claim, "a", b"1"))
    paid["release"], _ = await proxy.price(ledger.release(won.claim))
    paid["again"], won = await proxy.price(ask(ledger, key))
    paid["complete"], _ = await proxy.price(ledger.complete(won.claim, VALUE))
    paid["replay"], done = await proxy.price(ask(ledger, key))
    assert isinstance(done, Done)
    return paid


@pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])
async def test_how_often_a_verb_goes_to_the_server_and_back(counted, colour):
    url, proxy = counted
    store = SQLStore(url)
    ledger = store.ledger(colour)
    await _prices(ledger, proxy, make_key("warm"))  # connects, and has its statements prepared
    assert await _prices(ledger, proxy, KEY) == ROUND_TRIPS[make_url(url).get_backend_name()]
    await store.aclose()


async def test_many_at_once_go_together(counted):
    url, proxy = counted
    store = SQLStore(url)
    ledger = store.ledger(ASYNC)

    async def first_calls(name):
        keys = [make_key(f"{name}{i}") for i in range(20)]
        claims = asyncio.gather(*(ask(ledger, key) for key in keys))
        asked, won = await proxy.price(claims)
        outcomes = asyncio.gather(*(ledger.complete(w.claim, VALUE) for w in won))
        completed, verdicts = await proxy.price(outcomes)
        assert verdicts == [Kept()] * 20
        return asked, completed

    await first_calls("warm")
    asked, completed = await first_calls("k")
    assert (asked, completed) == ((1, 1) if url.startswith("postgres") else (2, 1))
    await store.aclose()


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


def test_a_batch_is_cut_where_it_grows_too_heavy():
    claim = Claim(KEY, "a", b"", TERMS, 1)
    half = Completing(claim, Outcome("value", b"x" * (BATCH_BYTES // 2 - AROUND_BYTES)))
    whole = Completing(claim, Outcome("value", b"x" * BATCH_BYTES * 2))
    small = Completing(claim, VALUE)
    assert [len(piece) for piece in chunks([half] * 5, None)] == [2, 2, 1]
    assert [len(piece) for piece in chunks([whole, half, whole], None)] == [1, 1, 1]
    assert [len(piece) for piece in chunks([small] * 20, 16_384)] == [7, 7, 6]


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


async def test_a_sweep_leaves_a_held_record_to_its_holder(url):
    """Late is not given up: a holder that comes back may renew, whoever swept meanwhile."""
    store = SQLStore(url, create=True)
    ledger = store.ledger(ASYNC)
    won = await ask(ledger, terms=Terms(lease_s=0.0, ttl_s=0.0, takeover=False, hold=True))
    assert await ledger.sweep() == 0
    assert (await ledger.look(KEY.id)).state is State.UNKNOWN
    assert await ledger.renew(won.claim, lease_s=30) == Kept()
    assert await ledger.note(won.claim, "a", b"1") == Kept()
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


def test_a_sweep_looks_up_what_has_expired_and_reads_nothing_else(postgres_url, mariadb_url):
    for url, statement in ((postgres_url, inspection.POSTGRES_SWEEP), (mariadb_url, EXPIRED)):
        init(url)
        engine = open_engine(parse(url))
        said = dialect_named(engine.dialect.name).say(statement).replace("?", "500")
        with engine.connect() as connection:
            plan = [str(tuple(line)) for line in connection.exec_driver_sql(f"EXPLAIN {said}")]
        engine.dispose()
        wanted = "Index Cond: (expires_at <=" if url == postgres_url else "'range'"
        assert any(wanted in line for line in plan), plan


async def test_connection_that_cannot_be_made_ready_is_closed(tmp_path, monkeypatch):
    """It would be left to the garbage collector, which cannot close it on a loop that has ended."""

    async def fail(_, connection):
        opened.append(connection)
        raise asyncio.CancelledError

    opened = []
    monkeypatch.setattr(AsyncLines, "_link", fail)
    store = SQLStore(f"sqlite:///{tmp_path}/a.db", create=True)
    with pytest.raises(asyncio.CancelledError):
        await store.ledger(ASYNC).look(b"")
    assert [connection.closed for connection in opened] == [True]
    await store.aclose()
