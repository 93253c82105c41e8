"""Killed servers, lost replies, deadlocks, forks, and transactions that never commit."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel.colour import ASYNC, SYNC, run
from semel.errors import SettingsError, StoreUnavailableError
from semel.keys import make_key, new_attempt
from semel.stores.sql import SQLStore, init, lines
from semel.stores.sql.lines import open_engine, parse, with_driver
from semel.values import Busy, Done, Kept, Lost, Outcome, State, Terms, Won
from support.proxy import Proxy

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

TERMS = Terms(lease_s=30, ttl_s=600)
VALUE = Outcome("value", b'{"paid":true}')
OTHER = Outcome("value", b'"other"')
KEY = make_key("order-1", operation="pay")


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def url(request, tmp_path):
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/ledger.db"
    else:
        url = request.getfixturevalue(f"{request.param}_url")
    init(url)
    return url


@pytest.fixture(params=["postgres", "mariadb"])
def server(request):
    """The server itself, and a URL on it."""
    url = request.getfixturevalue(f"{request.param}_url")
    init(url)
    return request.getfixturevalue(f"{request.param}_server"), url


@pytest.fixture
def proxied(server):
    """The URL again, through a network that can fail."""
    direct = make_url(server[1])
    with Proxy(direct.port) as proxy:
        yield proxy, direct.set(port=proxy.port).render_as_string(hide_password=False)


@pytest.fixture
def sync_store(url):
    store = SQLStore(url)
    yield store
    store.close()


def ask(ledger, key=KEY, *, attempt=None, terms=TERMS):
    return ledger.claim(key, attempt=attempt or new_attempt(), fingerprint=b"", terms=terms)


def look(url, key=KEY):
    store = SQLStore(url)
    try:
        return run(store.ledger(SYNC).look(key.id))
    finally:
        store.close()


# --- the server dies ----------------------------------------------------------------------------


def test_a_server_killed_between_claim_and_complete(server):
    process, url = server
    store = SQLStore(url)
    ledger = store.ledger(SYNC)
    won = run(ask(ledger))
    process.kill()
    with pytest.raises(StoreUnavailableError):
        run(ledger.complete(won.claim, VALUE))
    with pytest.raises(StoreUnavailableError):
        run(ask(ledger, make_key("another")))
    process.restart()
    assert isinstance(run(ask(ledger)), Busy)
    assert run(ledger.complete(won.claim, VALUE)) == Kept()
    assert run(ask(ledger)) == Done(VALUE, won.claim.fence)
    store.close()


async def test_a_server_killed_under_many_async_callers(server):
    process, url = server
    store = SQLStore(url)
    ledger = store.ledger(ASYNC)
    keys = [make_key(f"k{i}") for i in range(20)]
    won = await asyncio.gather(*(ask(ledger, key) for key in keys))
    await asyncio.to_thread(process.kill)
    failed = await asyncio.gather(
        *(ledger.complete(w.claim, VALUE) for w in won), return_exceptions=True
    )
    assert {type(error) for error in failed} == {StoreUnavailableError}
    await asyncio.to_thread(process.restart)
    verdicts = await asyncio.gather(*(ledger.complete(w.claim, VALUE) for w in won))
    assert verdicts == [Kept()] * len(keys)
    await store.aclose()


def test_a_restarted_server_is_found_again_without_an_error(server):
    """Every pooled connection is dead by then; that is noticed once, not once per connection."""
    process, url = server
    store = SQLStore(url)
    ledger = store.ledger(SYNC)
    barrier = threading.Barrier(4)

    def use():
        barrier.wait()
        run(ask(ledger, make_key(new_attempt())))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process.restart()
    for i in range(4):
        assert isinstance(run(ask(ledger, make_key(f"after{i}"))), Won)
    store.close()


# --- replies are lost ---------------------------------------------------------------------------

# A prepared statement is not sent again, what it is given is: the key, and the outcome.
CLAIMS = b"order-1"
COMPLETES = b"paid"


@pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize("cut", ["cut_before_request", "cut_after_request"])
async def test_a_lost_claim_is_claimed_once(proxied, server, cut, colour):
    """The statement, or the reply to the commit it carries, is lost; the attempt asks again."""
    proxy, url = proxied
    store = SQLStore(url)
    ledger = store.ledger(colour)
    assert await asyncio.wait_for(ledger.look(KEY.id), 10) is None  # connected
    getattr(proxy, cut)(CLAIMS)
    won = await ask(ledger)
    assert isinstance(won, Won)
    assert proxy.cuts == 1
    record = look(server[1])
    assert (record.number, record.fence) == (1, won.claim.fence)
    await store.aclose()


@pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize("cut", ["cut_before_request", "cut_after_request"])
async def test_a_lost_completion_is_kept_once(proxied, server, cut, colour):
    proxy, url = proxied
    store = SQLStore(url)
    ledger = store.ledger(colour)
    won = await ask(ledger)
    getattr(proxy, cut)(COMPLETES)
    assert await ledger.complete(won.claim, VALUE) == Kept()
    assert proxy.cuts == 1
    assert look(server[1]).outcome == VALUE
    await store.aclose()


async def test_a_lost_reply_to_a_commit_is_looked_up(mariadb_url):
    """Several releases are one transaction: after its COMMIT is lost, each is read again."""
    init(mariadb_url)
    direct = make_url(mariadb_url)
    with Proxy(direct.port) as proxy:
        store = SQLStore(direct.set(port=proxy.port).render_as_string(hide_password=False))
        ledger = store.ledger(ASYNC)
        keys = [make_key(f"k{i}") for i in range(5)]
        won = await asyncio.gather(*(ask(ledger, key) for key in keys))
        proxy.cut_after_request(b"COMMIT")
        verdicts = await asyncio.gather(*(ledger.release(w.claim, error="no") for w in won))
        assert proxy.cuts == 1
        assert verdicts == [Kept()] * len(keys)
        for key in keys:
            record = await ledger.look(key.id)
            assert (record.state, len(record.past)) == (State.FAILED, 1)
        await store.aclose()


def test_a_cut_network_is_unavailable_and_heals(proxied):
    proxy, url = proxied
    store = SQLStore(url)
    ledger = store.ledger(SYNC)
    won = run(ask(ledger))
    proxy.refuse()
    with pytest.raises(StoreUnavailableError):
        run(ledger.complete(won.claim, VALUE))
    proxy.pass_through()
    assert run(ledger.complete(won.claim, VALUE)) == Kept()
    store.close()


@pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])
async def test_a_frozen_server_is_unavailable(proxied, colour, monkeypatch):
    monkeypatch.setattr(lines, "ANSWER_WITHIN_S", 0.2)
    monkeypatch.setattr(lines, "CONNECT_WITHIN_S", 2)
    proxy, url = proxied
    store = SQLStore(url)
    ledger = store.ledger(colour)
    won = await ask(ledger)
    proxy.freeze()
    with pytest.raises(StoreUnavailableError):
        await ledger.complete(won.claim, VALUE)
    proxy.pass_through()
    assert await ledger.complete(won.claim, VALUE) == Kept()
    await store.aclose()


# --- many at once -------------------------------------------------------------------------------


async def test_of_64_tasks_in_two_stores_one_wins(url):
    stores = [SQLStore(url), SQLStore(url)]
    answers = await asyncio.gather(*(ask(stores[i % 2].ledger(ASYNC)) for i in range(64)))
    assert sorted(type(answer).__name__ for answer in answers) == ["Busy"] * 63 + ["Won"]
    for store in stores:
        await store.aclose()


async def test_two_stores_that_claim_the_same_keys_share_them_out(url):
    stores = [SQLStore(url), SQLStore(url)]
    keys = [make_key(f"k{i}") for i in range(60)]
    asked = [ask(store.ledger(ASYNC), key) for store in stores for key in keys]
    answers = await asyncio.gather(*asked)
    for mine, yours in zip(answers[:60], answers[60:], strict=True):
        assert sorted([type(mine).__name__, type(yours).__name__]) == ["Busy", "Won"]
    for store in stores:
        await store.aclose()


async def test_an_orphan_is_taken_over_by_one_of_many(url):
    stores = [SQLStore(url), SQLStore(url)]
    brief = Terms(lease_s=0.001, ttl_s=600)
    first = await ask(stores[0].ledger(ASYNC), terms=brief)
    await asyncio.sleep(0.05)
    answers = await asyncio.gather(*(ask(stores[i % 2].ledger(ASYNC)) for i in range(32)))
    winners = [answer for answer in answers if isinstance(answer, Won)]
    assert len(winners) == 1
    assert winners[0].orphan.fence == first.claim.fence
    assert winners[0].claim.number == 2
    for store in stores:
        await store.aclose()


async def test_a_storm_of_locks_changes_no_answer(mariadb_url):
    """Somebody else locks our rows in every order."""
    init(mariadb_url)
    store = SQLStore(mariadb_url)
    ledger = store.ledger(ASYNC)
    keys = [make_key(f"k{i}") for i in range(12)]
    over = threading.Event()
    storm = [threading.Thread(target=_lock_rows, args=(mariadb_url, keys, n, over)) for n in (1, 2)]
    won = await asyncio.gather(*(ask(ledger, key) for key in keys))
    for thread in storm:
        thread.start()
    try:
        for _ in range(15):
            verdicts = await asyncio.gather(*(ledger.release(w.claim, error="no") for w in won))
            assert verdicts == [Kept()] * len(keys)
            won = await asyncio.gather(*(ask(ledger, key) for key in keys))
            assert all(isinstance(w, Won) for w in won), won
        verdicts = await asyncio.gather(*(ledger.complete(w.claim, VALUE) for w in won))
        assert verdicts == [Kept()] * len(keys)
    finally:
        over.set()
        for thread in storm:
            thread.join()
    assert {(await ledger.look(key.id)).number for key in keys} == {16}
    await store.aclose()


def _connect(url, **settings):
    u = make_url(url)
    return pymysql.connect(
        host=u.host, port=u.port, user=u.username, database=u.database, **settings
    )


def _lock_rows(url, keys, seed, over):
    connection = _connect(url)
    ids = sorted((key.id for key in keys), reverse=True)
    turn = seed
    with connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        while not over.is_set():
            turn += 1
            try:
                for id in (ids[turn % 12], ids[(turn * 5 + 3) % 12]):
                    cursor.execute("SELECT id FROM idempotency WHERE id = %s FOR UPDATE", (id,))
                    time.sleep(0.002)
            except pymysql.err.OperationalError:
                pass
            connection.rollback()


INSERT_ROW = (
    "INSERT INTO idempotency (id, idempotency_key, tenant_id, operation, request_hash, state, "
    "attempt, fence, number, hold, created_at, started_at, lease_until) VALUES (%s, '', '', '', '',"
    " 'PENDING', '', 1, 1, 0, UTC_TIMESTAMP(), UTC_TIMESTAMP(), UTC_TIMESTAMP())"
)


async def test_what_deadlocks_is_tried_again(mariadb_url):
    """Our batch has inserted the lower id and waits for the higher; somebody else does the reverse.

    The database ends the transaction that has done less, which is ours.
    """
    init(mariadb_url)
    store = SQLStore(mariadb_url)
    low, high = sorted((make_key("a"), make_key("b")), key=lambda key: key.id)
    with _connect(mariadb_url) as other, other.cursor() as cursor:
        for n in range(100):
            cursor.execute(INSERT_ROW, (n.to_bytes(32, "big"),))
        cursor.execute(INSERT_ROW, (high.id,))
        before = _deadlocks(mariadb_url)
        asked = asyncio.gather(*(ask(store.ledger(ASYNC), key) for key in (low, high)))
        while not await asyncio.to_thread(_waits, mariadb_url):
            await asyncio.sleep(0.005)
        await asyncio.to_thread(cursor.execute, INSERT_ROW, (low.id,))
        assert _deadlocks(mariadb_url) > before
        other.rollback()
        assert all(isinstance(answer, Won) for answer in await asked)
    await store.aclose()


def _waits(url):
    with _connect(url) as connection, connection.cursor() as cursor:
        # innodb_lock_waits tells the same for as long as it is asked more often than every 0.1 s.
        cursor.execute("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
        return int(cursor.fetchone()[1]) > 0


def _deadlocks(url):
    with _connect(url) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'")
        return int(cursor.fetchone()[1])


# --- fork ---------------------------------------------------------------------------------------


def in_child(work):
    """Run it in a forked process and return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_has_connections_of_its_own(sync_store):
    ledger = sync_store.ledger(SYNC)
    won = run(ask(ledger))

    def child():
        assert isinstance(run(ask(ledger)), Busy)
        theirs = run(ask(ledger, make_key("child")))
        assert run(ledger.complete(theirs.claim, VALUE)) == Kept()
        sync_store.close()

    assert in_child(child) == 0
    assert run(ledger.complete(won.claim, VALUE)) == Kept()
    assert isinstance(run(ask(ledger, make_key("child"))), Done)


def test_a_child_forked_from_async_code_starts_over(url):
    store = SQLStore(url)

    async def parent():
        won = await ask(store.ledger(ASYNC))
        code = await asyncio.to_thread(in_child, lambda: asyncio.run(child()))
        return code, await store.ledger(ASYNC).complete(won.claim, VALUE)

    async def child():
        assert isinstance(await ask(store.ledger(ASYNC)), Busy)
        await store.aclose()

    assert asyncio.run(parent()) == (0, Kept())
    asyncio.run(store.aclose())


# --- in the caller's transaction ----------------------------------------------------------------


@pytest.fixture
def engine(url):
    """The application's own engine, with a table of its own."""
    engine = sa.create_engine(with_driver(parse(url), "sync"))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE charge (amount INTEGER)")
    yield engine
    engine.dispose()


def charges(engine):
    with engine.connect() as connection:
        return connection.exec_driver_sql("SELECT count(*) FROM charge").scalar_one()


def charge(session):
    session.execute(sa.text("INSERT INTO charge VALUES (40)"))


def test_bound_commit_keeps_both(sync_store, engine):
    with Session(engine) as session:
        ledger = sync_store.bind(session).ledger(SYNC)
        won = run(ask(ledger))
        charge(session)
        assert run(ledger.complete(won.claim, VALUE)) == Kept()
        assert run(ledger.complete(won.claim, VALUE)) == Kept()  # repeated in the transaction
        session.commit()
        assert run(ledger.complete(won.claim, VALUE)) == Kept()  # and after it
    assert charges(engine) == 1
    assert run(ask(sync_store.ledger(SYNC))) == Done(VALUE, won.claim.fence)


def test_bound_rollback_leaves_the_claim_and_no_outcome(sync_store, engine):
    with Session(engine) as session:
        ledger = sync_store.bind(session).ledger(SYNC)
        won = run(ask(ledger))
        charge(session)
        assert run(ledger.complete(won.claim, VALUE)) == Kept()
        session.rollback()
    assert charges(engine) == 0
    assert isinstance(run(ask(sync_store.ledger(SYNC))), Busy)
    assert run(sync_store.ledger(SYNC).complete(won.claim, OTHER)) == Kept()


def test_bound_a_taken_over_holder_cannot_complete(sync_store, engine):
    own = sync_store.ledger(SYNC)
    with Session(engine) as session, session.begin():
        ledger = sync_store.bind(session).ledger(SYNC)
        stale = run(ask(ledger, terms=Terms(lease_s=0.001, ttl_s=600)))
        time.sleep(0.01)
        fresh = run(ask(own))
        assert fresh.claim.number == 2
        if not engine.dialect.name.startswith("sqlite"):
            charge(session)
        assert run(own.complete(fresh.claim, VALUE)) == Kept()
        if engine.dialect.name.startswith("sqlite"):
            charge(session)  # there is one writer at a time
        assert run(ledger.complete(stale.claim, OTHER)) == Lost(VALUE)
    assert charges(engine) == 0, "the loser's rows must not be committed"
    assert run(ask(own)) == Done(VALUE, fresh.claim.fence)


def test_bound_a_duplicate_of_an_uncommitted_completion_is_busy_at_once(sync_store, engine):
    own = sync_store.ledger(SYNC)
    with Session(engine) as session:
        won = run(ask(own))
        charge(session)
        run(sync_store.bind(session).ledger(SYNC).complete(won.claim, VALUE))
        began = time.monotonic()
        assert isinstance(run(ask(own)), Busy)
        assert time.monotonic() - began < 0.5
        session.commit()
    assert run(ask(own)) == Done(VALUE, won.claim.fence)


@pytest.fixture
def open_session(server):
    """A transaction of somebody's, left open until the test is over."""
    engine = sa.create_engine(with_driver(parse(server[1]), "sync"))
    with Session(engine) as session:
        yield session
    engine.dispose()


def complete_in(session, store, claim):
    """The row stays locked until the session ends."""
    assert run(store.bind(session).ledger(SYNC).complete(claim, VALUE)) == Kept()


BRIEF = Terms(lease_s=0.001, ttl_s=600)


def test_bound_a_heartbeat_does_not_wait_for_an_uncommitted_completion(server, open_session):
    store = SQLStore(server[1])
    own = store.ledger(SYNC)
    won = run(ask(own))
    complete_in(open_session, store, won.claim)
    with pytest.raises(StoreUnavailableError, match="locked by another transaction"):
        run(own.renew(won.claim))
    open_session.rollback()
    assert run(own.renew(won.claim)) == Kept()
    store.close()


def test_bound_an_orphan_that_is_being_completed_is_busy(server, open_session):
    store = SQLStore(server[1])
    own = store.ledger(SYNC)
    won = run(ask(own, terms=BRIEF))
    complete_in(open_session, store, won.claim)
    assert isinstance(run(ask(own)), Busy)
    open_session.commit()
    assert run(ask(own)) == Done(VALUE, won.claim.fence)
    store.close()


async def test_bound_a_locked_row_keeps_nobody_else_of_its_batch_waiting(server, open_session):
    """Claims to be taken over, releases, renewals: the locked one is told, the others pass."""
    store = SQLStore(server[1])
    ledger = store.ledger(ASYNC)
    keys = [make_key(f"k{i}") for i in range(6)]
    orphans = [await ask(ledger, key, terms=BRIEF) for key in keys]
    await asyncio.to_thread(complete_in, open_session, store, orphans[2].claim)
    answers = await asyncio.gather(*(ask(ledger, key) for key in keys))
    assert [isinstance(answer, Busy) for answer in answers] == [i == 2 for i in range(6)]
    claims = [orphans[2].claim if isinstance(a, Busy) else a.claim for a in answers]
    for verb in (ledger.renew, ledger.release):
        verdicts = await asyncio.gather(*map(verb, claims), return_exceptions=True)
        assert [verdict == Kept() for verdict in verdicts] == [i != 2 for i in range(6)], verdicts
        assert "locked by another transaction" in str(verdicts[2])
    await asyncio.to_thread(open_session.rollback)
    assert await ledger.renew(claims[2]) == Kept()
    await store.aclose()


async def test_bound_a_locked_row_keeps_no_other_completion_waiting(server, open_session):
    store = SQLStore(server[1])
    ledger = store.ledger(ASYNC)
    keys = [make_key(f"k{i}") for i in range(6)]
    won = await asyncio.gather(*(ask(ledger, key) for key in keys))
    await asyncio.to_thread(complete_in, open_session, store, won[2].claim)
    verdicts = await asyncio.gather(
        *(ledger.complete(w.claim, VALUE) for w in won), return_exceptions=True
    )
    assert [verdict == Kept() for verdict in verdicts] == [i != 2 for i in range(6)], verdicts
    assert "locked by another transaction" in str(verdicts[2])
    await store.aclose()


def test_bound_a_process_killed_before_commit_leaves_only_a_lease(url, engine):
    reader, writer = os.pipe()

    def holder():
        store = SQLStore(url)
        session = Session(sa.create_engine(engine.url))
        ledger = store.bind(session).ledger(SYNC)
        won = run(ask(ledger))
        charge(session)
        assert run(ledger.complete(won.claim, VALUE)) == Kept()
        os.write(writer, b"!")
        time.sleep(60)

    pid = os.fork()
    if pid == 0:
        try:
            holder()
        finally:
            os._exit(1)
    try:
        assert os.read(reader, 1) == b"!"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
    record = look(url)
    assert (record.state, record.outcome) == (State.PENDING, None)
    assert charges(engine) == 0


async def test_bound_to_an_async_session(url, engine):
    store = SQLStore(url)
    theirs = create_async_engine(with_driver(parse(url), "async"))
    async with AsyncSession(theirs) as session:
        bound = store.bind(session)
        ledger = bound.ledger(ASYNC)
        with pytest.raises(SettingsError, match="AsyncSession"):
            bound.ledger(SYNC)
        won = await ask(ledger)
        await session.execute(sa.text("INSERT INTO charge VALUES (40)"))
        assert await ledger.complete(won.claim, VALUE) == Kept()
        assert isinstance(await ask(store.ledger(ASYNC)), Busy)
        await session.rollback()
        assert charges(engine) == 0
        await session.execute(sa.text("INSERT INTO charge VALUES (40)"))
        assert await ledger.complete(won.claim, VALUE) == Kept()
        await session.commit()
        assert await ledger.complete(won.claim, OTHER) == Lost(VALUE)
    assert charges(engine) == 1
    await theirs.dispose()
    await store.aclose()


def test_bound_to_a_connection(sync_store, engine):
    with engine.connect() as connection:
        ledger = sync_store.bind(connection).ledger(SYNC)
        won = run(ask(ledger))
        assert run(ledger.complete(won.claim, VALUE)) == Kept()
        connection.commit()
    assert isinstance(run(ask(sync_store.ledger(SYNC))), Done)


def test_bound_without_a_transaction_is_refused(sync_store, engine):
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    won = run(ask(sync_store.ledger(SYNC)))
    with Session(autocommit) as session, pytest.raises(SettingsError, match="AUTOCOMMIT"):
        run(sync_store.bind(session).ledger(SYNC).complete(won.claim, VALUE))


def test_bound_to_a_snapshot_older_than_the_claim_is_refused(postgres_url):
    init(postgres_url)
    store = SQLStore(postgres_url)
    engine = sa.create_engine(
        with_driver(parse(postgres_url), "sync"), isolation_level="REPEATABLE READ"
    )
    with Session(engine) as session:
        session.execute(sa.text("SELECT 1"))
        session.execute(sa.text("SELECT count(*) FROM idempotency"))
        won = run(ask(store.ledger(SYNC)))
        with pytest.raises(SettingsError, match="snapshot"):
            run(store.bind(session).ledger(SYNC).complete(won.claim, VALUE))
    engine.dispose()
    store.close()


# --- more than the server takes -----------------------------------------------------------------

PACKET = 65_536


@pytest.fixture
def small_packets(mariadb_server, mariadb_url):
    """A server that hangs up on whoever sends it more than 64 KiB at once."""
    init(mariadb_url)
    engine = open_engine(parse(mariadb_url))
    with engine.connect() as connection:
        before = connection.exec_driver_sql("SELECT @@global.max_allowed_packet").scalar_one()
        connection.exec_driver_sql(f"SET GLOBAL max_allowed_packet = {PACKET}")
    yield mariadb_url
    engine.dispose()
    mariadb_server.execute(f"SET GLOBAL max_allowed_packet = {before}")


@pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize(
    "data", [b"x" * PACKET, b"\0" * (PACKET * 2 // 3)], ids=["long", "escaped"]
)
async def test_a_result_that_fits_into_no_packet_is_recorded_as_lost(small_packets, colour, data):
    store = SQLStore(small_packets)
    ledger = store.ledger(colour)
    won = await ask(ledger)
    assert await ledger.complete(won.claim, Outcome("value", data)) == Kept()
    assert await ledger.complete(won.claim, Outcome("value", data)) == Kept()
    outcome = (await ask(ledger)).outcome
    assert outcome.kind == "lost"
    assert b"max_allowed_packet (65,536 bytes)" in outcome.data
    await store.aclose()


async def test_what_just_fits_is_stored_and_spoils_nothing_else(small_packets):
    store = SQLStore(small_packets)
    ledger = store.ledger(ASYNC)
    keys = [make_key(f"k{i}") for i in range(80)]
    won = await asyncio.gather(*(ask(ledger, key) for key in keys))
    half = PACKET // 2
    data = [b"x" * (half if i == 7 else half - 1024 if i == 8 else 2048) for i in range(80)]
    outcomes = [Outcome("value", each) for each in data]
    verdicts = await asyncio.gather(
        *(ledger.complete(w.claim, outcome) for w, outcome in zip(won, outcomes, strict=True))
    )
    assert verdicts == [Kept()] * 80
    found = [(await ask(ledger, key)).outcome for key in keys]
    assert [outcome.kind for outcome in found] == ["lost" if i == 7 else "value" for i in range(80)]
    assert found[8] == outcomes[8]
    await store.aclose()


def test_a_step_that_fits_into_no_packet_is_refused_for_good(small_packets):
    store = SQLStore(small_packets)
    ledger = store.ledger(SYNC)
    won = run(ask(ledger))
    with pytest.raises(StoreUnavailableError, match=r"step 'big'.*max_allowed_packet") as caught:
        run(ledger.note(won.claim, "big", b"x" * PACKET))
    assert not caught.value.again
    assert run(ledger.note(won.claim, "small", b"x")) == Kept()
    store.close()


def test_bound_a_result_that_fits_into_no_packet_is_recorded_as_lost(small_packets):
    store = SQLStore(small_packets)
    engine = sa.create_engine(with_driver(parse(small_packets), "sync"))
    with Session(engine) as session, session.begin():
        ledger = store.bind(session).ledger(SYNC)
        won = run(ask(ledger))
        assert run(ledger.complete(won.claim, Outcome("value", b"x" * PACKET))) == Kept()
    assert run(ask(store.ledger(SYNC))).outcome.kind == "lost"
    engine.dispose()
    store.close()


# --- the table as people find it ----------------------------------------------------------------


def test_the_row_can_be_read_by_people(url):
    store = SQLStore(url)
    ledger = store.ledger(SYNC)
    key = make_key("Order \u2713", tenant="acme", operation="CreateOrder")
    won = run(ledger.claim(key, attempt="a/1", fingerprint=b"\xab", terms=TERMS))
    run(ledger.complete(won.claim, Outcome("value", b'{"paid": true}', 201)))
    engine = open_engine(parse(url))
    with engine.connect() as connection:
        row = connection.exec_driver_sql(
            "SELECT idempotency_key, tenant_id, operation, request_hash, response, status_code, "
            "state FROM idempotency"
        ).one()
    engine.dispose()
    response = row[4] if isinstance(row[4], str) else '{"paid": true}'
    assert (*row[:4], response, *row[5:]) == (
        "Order \u2713", "acme", "CreateOrder", "ab", '{"paid": true}', 201, "COMPLETED",
    )  # fmt: skip
    store.close()
