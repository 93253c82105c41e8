"""What the log says to each database: how often it goes there, what it writes, what it sweeps."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from semel.colour import ASYNC, SYNC, run
from semel.entries import (
    Appended,
    Ended,
    Fenced,
    Field,
    Keep,
    Mismatch,
    Repeated,
    Replace,
    VersionConflict,
)
from semel.errors import SettingsError, StoreUnavailableError
from semel.stores.bells import Tower
from semel.stores.sql import (
    NoTableError,
    SQLStore,
    inbox_words,
    init,
    log_sweeping,
    log_words,
    log_writing,
    notify,
    upgrade,
)
from semel.stores.sql import log as sql_log
from semel.stores.sql.bell import PollBell
from semel.stores.sql.dialects import dialect_named
from semel.stores.sql.lines import open_engine, parse, with_driver
from semel.stores.sql.log_tables import LOG_TABLES
from semel.testing.bells import Ear
from support.counting import Counting


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def url(request, tmp_path):
    if request.param == "sqlite":
        init(url := f"sqlite:///{tmp_path}/log.db")
        return url
    return request.getfixturevalue(f"{request.param}_tables_url")


@pytest.fixture
async def store(url):
    store = SQLStore(url)
    yield store
    await store.aclose()


@pytest.fixture
def ask(url):
    """A statement beside the store; its rows, if it has any."""
    engine = open_engine(parse(url))

    def ask(statement):
        with engine.connect() as connection:
            result = connection.exec_driver_sql(statement)
            return [tuple(row) for row in result] if result.returns_rows else []

    yield ask
    engine.dispose()


def older(url, seconds):
    """How much the times of every stream and id are to be moved back, in SQL."""
    if url.startswith("postgres"):
        return f"- interval '{seconds} seconds'"
    return f"- INTERVAL {seconds} SECOND"


# --- round trips --------------------------------------------------------------------------------


@pytest.fixture(params=["postgres", "mariadb"])
def counted(request):
    """A URL, and the proxy on the way to it."""
    direct = make_url(request.getfixturevalue(f"{request.param}_tables_url"))
    with Counting(direct.port) as proxy:
        yield direct.set(port=proxy.port).render_as_string(hide_password=False), proxy


# PostgreSQL: up to the decision, and behind it, whatever an append brings with it.
# MariaDB: BEGIN, lock, ids, row, entry, id, COMMIT; fences and fields are read and written besides,
# and who makes a stream looks for old ones.
ROUND_TRIPS = {
    "postgresql": {"first": 2, "append": 2, "whole": 2, "repeat": 2, "trim": 2},
    "mysql": {"first": 8, "append": 7, "whole": 11, "repeat": 6, "trim": 6},
}
READS = {"read": 1, "load": 1, "heads": 1}


async def _prices(log, proxy, stream):
    paid = {}
    paid["first"], _ = await proxy.price(log.append(stream, b"1", id="a"))
    paid["append"], _ = await proxy.price(log.append(stream, b"2", id="b"))
    more = {"fences": {"p": 1}, "state": Field("f", 1, b"x")}
    paid["whole"], _ = await proxy.price(log.append(stream, b"3", id="c", **more))
    paid["repeat"], again = await proxy.price(log.append(stream, b"3", id="c", **more))
    assert isinstance(again, Repeated)
    paid["read"], page = await proxy.price(log.read(stream))
    assert len(page.entries) == 3
    paid["load"], _ = await proxy.price(log.load(stream))
    many = [f"{stream}-{n}" for n in range(100)]
    paid["heads"], heads = await proxy.price(log.heads([*many, stream]))
    assert heads[-1] == page.head
    paid["trim"], count = await proxy.price(log.trim(stream, 2))
    assert count == 2
    return paid


@pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])
async def test_how_often_a_verb_goes_to_the_server_and_back(counted, colour):
    url, proxy = counted
    store = SQLStore(url)
    log = store.log(colour)
    await _prices(log, proxy, "warm")  # connects, and has its statements prepared
    wanted = ROUND_TRIPS[make_url(url).get_backend_name()] | READS
    assert await _prices(log, proxy, "s") == wanted
    await store.aclose()


async def test_many_at_once_share_a_transaction(counted):
    url, proxy = counted
    store = SQLStore(url)
    log = store.log(ASYNC)

    async def appends(name):
        works = [log.append(f"s{n % 3}", b"x", id=f"{name}{n}") for n in range(12)]
        asked, answers = await proxy.price(asyncio.gather(*works))
        assert {type(answer) for answer in answers} == {Appended}
        return asked

    await appends("warm")
    await log.read("s0")
    assert await appends("e") == (2 if url.startswith("postgres") else 7)
    reads, pages = await proxy.price(asyncio.gather(*(log.read(f"s{n}") for n in range(3))))
    assert sum(len(page.entries) for page in pages) == 24
    assert reads == (1 if url.startswith("postgres") else 3)
    await store.aclose()


def test_a_repeat_on_postgres_writes_nothing_but_its_lock(postgres_tables_url):
    store = SQLStore(postgres_tables_url)
    log = store.log(SYNC)
    run(log.append("s", b"x", id="a"))
    with psycopg.connect(postgres_tables_url, autocommit=True) as watcher:
        rows = "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_xact_user_tables"
        before = watcher.execute(rows).fetchone()
        for _ in range(3):
            assert isinstance(run(log.append("s", b"x", id="a")), Repeated)
        run(log.read("s"))
        assert watcher.execute(rows).fetchone() == before
    store.close()


# --- a batch ------------------------------------------------------------------------------------


async def test_one_that_is_refused_does_not_undo_the_others(store):
    log = store.log(ASYNC)
    await log.append("fenced", b"x", id="a", fences={"p": 2})
    await log.append("ended", b"x", id="a", ends=True)
    answers = await asyncio.gather(
        log.append("s", b"1", id="a"),
        log.append("fenced", b"x", id="b", fences={"p": 1}),
        log.append("s", b"other", id="a"),
        log.append("ended", b"x", id="b"),
        log.append("s", b"1", id="a"),
        log.append("s", b"x", id="c", expect=7),
        log.append("s", b"2", id="b", expect=1, state=Replace(b"two")),
    )
    kinds = [Appended, Fenced, Mismatch, Ended, Repeated, VersionConflict, Appended]
    assert [type(answer) for answer in answers] == kinds
    assert [entry.data for entry in (await log.read("s")).entries] == [b"1", b"2"]
    assert (await log.load("s")).state == b"two"
    assert len((await log.read("fenced")).entries) == 1


async def test_within_a_batch_each_sees_what_the_ones_before_it_did(store):
    log = store.log(ASYNC)
    answers = await asyncio.gather(
        *(
            log.append("s", b"%d" % n, id=str(n), state=Field("f", n % 3, b"%d" % n), expect=n)
            for n in range(6)
        ),
        log.append("s", b"x", id="p", fences={"p": 5}),
        log.append("s", b"x", id="q", fences={"p": 4}),
        log.append("s", b"x", id="z", ends=True, keep=Keep(entries=2)),
        log.append("s", b"x", id="y"),
    )
    assert [a.position.offset for a in answers[:6]] == [1, 2, 3, 4, 5, 6]
    assert answers[7] == Fenced("p", 5)
    assert isinstance(answers[9], Ended)
    snapshot = await log.load("s")
    assert (snapshot.position.offset, snapshot.fields["f"].data) == (8, b"2")
    page = await log.read("s")
    assert page.floor == answers[5].position
    assert [entry.id for entry in (await log.read("s", page.floor)).entries] == ["p", "z"]


async def test_a_stream_that_is_over_at_once_begins_anew_within_a_batch(store):
    log = store.log(ASYNC)
    brief = Keep(idle_s=0.0)
    for _ in range(2):
        works = [log.append("s", b"x", id="a", state=Replace(b"s"), keep=brief) for _ in range(3)]
        assert [type(answer) for answer in await asyncio.gather(*works)] == [Appended] * 3
    assert (await log.read("s")).life == "unknown"
    assert isinstance(await log.append("s", b"x", id="b"), Appended)
    assert [entry.id for entry in (await log.read("s")).entries] == ["b"]
    assert (await log.load("s")).state is None


async def test_what_fits_into_no_packet_is_refused_alone(mariadb_tables_url):
    store = SQLStore(mariadb_tables_url)
    log = store.log(ASYNC)
    (most,) = (await log.run(_packet))[0]
    large = b"'" * (most // 2 + 1)
    answers = await asyncio.gather(
        log.append("s", b"1", id="a"),
        log.append("s", large, id="b"),
        log.append("s", b"3", id="c", state=Replace(large)),
        log.append("s", b"4", id="d"),
        return_exceptions=True,
    )
    assert [type(answer) for answer in answers] == [
        Appended,
        StoreUnavailableError,
        StoreUnavailableError,
        Appended,
    ]
    assert "max_allowed_packet" in str(answers[1])
    assert [entry.id for entry in (await log.read("s")).entries] == ["a", "d"]
    await store.aclose()


async def _packet(link):
    return await link.fetch("SELECT @@max_allowed_packet")


async def test_a_batch_that_is_too_large_goes_out_in_pieces(store, monkeypatch):
    monkeypatch.setattr(sql_log.limits, "BATCH_BYTES", 4096)
    log = store.log(ASYNC)
    answers = await asyncio.gather(*(log.append("s", b"x" * 900, id=str(n)) for n in range(9)))
    assert [answer.position.offset for answer in answers] == list(range(1, 10))


async def test_heads_are_asked_for_in_pieces_where_there_are_very_many(store, monkeypatch):
    monkeypatch.setattr(sql_log, "MOST_NAMED", 2)
    log = store.log(ASYNC)
    heads = [(await log.append(f"s{n}", b"x", id="a")).position for n in range(5)]
    assert await log.heads([f"s{n}" for n in range(5)]) == heads


# --- engines of the application -----------------------------------------------------------------


async def some_of_everything(log):
    position = (await log.append("s", b"1", id="a", fences={"p": 1})).position
    assert await log.append("s", b"1", id="a") == Repeated(position)
    assert await log.append("s", b"2", id="b", fences={"p": 0}) == Fenced("p", 1)
    answers = [await log.append("s", b"2", id=str(n), keep=Keep(entries=2)) for n in range(3)]
    assert [answer.position.offset for answer in answers] == [2, 3, 4]
    assert [e.position.offset for e in (await log.read("s", answers[0].position)).entries] == [3, 4]
    assert await log.trim("s", 3) == 1
    await log.append("s", b"5", id="z", state=Replace(b"s"), ends=True)
    assert (await log.load("s")).state == b"s"
    assert (await log.heads(["s", "t"]))[0].offset == 5
    assert await log.sweep() == 0


async def test_a_log_on_the_applications_engine(url):
    engine = sa.create_engine(with_driver(parse(url), "sync"))
    store = SQLStore(engine)
    await some_of_everything(store.log(SYNC))
    with pytest.raises(SettingsError, match="create_async_engine"):
        store.log(ASYNC)
    engine.dispose()


async def test_a_log_on_the_applications_async_engine(url):
    engine = create_async_engine(with_driver(parse(url), "async"))
    store = SQLStore(engine)
    log = store.log(ASYNC)
    await some_of_everything(log)
    await asyncio.gather(*(log.append("t", b"x", id=str(n)) for n in range(5)))
    assert len((await log.read("t")).entries) == 5
    await store.aclose()
    await engine.dispose()


async def test_a_bell_of_a_store_that_has_sync_code_only_polls_in_a_thread(tmp_path):
    init(url := f"sqlite:///{tmp_path}/log.db")
    engine = sa.create_engine(url)
    store, other = SQLStore(engine), SQLStore(url)
    bell, ear = store.bell(), Ear()
    await bell.listen("s", ear.wake)
    await ear.hears()
    await other.log(SYNC).append("s", b"x", id="a")
    await ear.hears()
    await bell.aclose()
    await other.aclose()
    engine.dispose()


async def test_a_bell_on_the_applications_async_engine_connects_as_that_does(postgres_tables_url):
    """The URL alone may lead nowhere: who, how and with what may be the engine's own."""
    url = make_url(postgres_tables_url)
    known = {"host": url.host, "port": url.port, "user": url.username, "dbname": url.database}
    # Of its pool nothing is taken away: there is one connection, and the log needs it.
    engine = create_async_engine(
        "postgresql+psycopg://", connect_args=known, pool_size=1, max_overflow=0
    )
    store, other = SQLStore(engine), SQLStore(postgres_tables_url)
    bell, ear = store.bell(), Ear()
    await bell.listen("s", ear.wake)
    await ear.hears()
    await other.log(ASYNC).append("s", b"1", id="1")
    await ear.hears()
    await store.log(ASYNC).append("s", b"2", id="2")
    await ear.hears()
    await bell.aclose()
    assert engine.pool.checkedout() == 0
    await engine.dispose()
    await other.aclose()


async def test_a_bell_that_cannot_listen_says_so_once(monkeypatch, caplog):
    pauses, for_ever = [], asyncio.Event()

    async def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) > 6:
            await for_ever.wait()

    monkeypatch.setattr(notify.ASYNC, "sleep", sleep)
    engine = create_async_engine("postgresql+psycopg://nobody@127.0.0.1:1/none")
    bell = SQLStore(engine).bell()
    await bell.listen("s", lambda: None)
    async with asyncio.timeout(20):
        while len(pauses) <= 6:
            await asyncio.sleep(0.01)
    await bell.aclose()
    assert pauses[0] < pauses[1] < pauses[-2] == pauses[-1]
    warned = [r for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == 1
    assert "NOTIFY" in warned[0].getMessage()


# --- tables -------------------------------------------------------------------------------------


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def before_the_log(request, tmp_path):
    """A database as the release before the log made it."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/older.db"
    else:
        url = request.getfixturevalue(f"{request.param}_url")
    init(url)
    engine = open_engine(parse(url))
    with engine.connect() as connection:
        for table in LOG_TABLES:
            connection.exec_driver_sql(f"DROP TABLE {table.name}")
        connection.exec_driver_sql("DELETE FROM semel_schema WHERE part = 'log'")
    engine.dispose()
    return url


async def test_an_older_database_is_told_to_upgrade_and_then_has_a_log(before_the_log):
    store = SQLStore(before_the_log)
    for colour in (SYNC, ASYNC):
        log = store.log(colour)
        for work in (lambda log=log: log.append("s", b"x", id="a"), lambda log=log: log.read("s")):
            with pytest.raises(NoTableError, match=r"no tables of the log .* `semel db upgrade`"):
                await work()
    assert upgrade(before_the_log).problems == ()
    await some_of_everything(store.log(ASYNC))
    await store.aclose()


async def test_tables_are_made_on_first_use_when_told(before_the_log):
    store = SQLStore(before_the_log, create=True)
    await some_of_everything(store.log(ASYNC))
    await store.aclose()


# --- sweeping -----------------------------------------------------------------------------------

COUNTS = "SELECT " + ", ".join(f"(SELECT count(*) FROM {table.name})" for table in LOG_TABLES)


@pytest.mark.parametrize("url", ["postgres", "mariadb"], indirect=True)
async def test_of_a_stream_that_is_gone_the_sweep_leaves_the_ids(store, ask, url):
    log = store.log(ASYNC)
    keep = Keep(ended_s=100, ids_s=1000)
    await log.append("s", b"1", id="a", state=Field("f", 1, b"x"), fences={"p": 1}, keep=keep)
    await log.append("s", b"2", id="z", state=Replace(b"s"), ends=True, keep=keep)
    ago = older(url, 500)
    ask(f"UPDATE semel_stream SET due_at = due_at {ago}, gone_at = gone_at {ago}")
    assert await log.sweep() == 0
    assert ask(COUNTS) == [(1, 0, 2, 0, 1)]
    assert ask("SELECT count(*) FROM semel_stream WHERE state IS NULL") == [(1,)]
    assert (await log.read("s")).life == "gone"
    assert isinstance(await log.append("s", b"1", id="a"), Repeated)
    ago = older(url, 5000)
    ask(f"UPDATE semel_stream SET due_at = due_at {ago}, until_at = until_at {ago}")
    assert await log.sweep() == 1
    assert ask(COUNTS) == [(0, 0, 0, 0, 0)]


@pytest.mark.parametrize("url", ["postgres", "mariadb"], indirect=True)
async def test_an_append_leaves_the_time_of_the_sweep_alone_and_the_sweep_moves_it(store, ask, url):
    log = store.log(ASYNC)
    keep = Keep(idle_s=1000)
    due = "SELECT due_at, until_at > due_at, until_at = due_at FROM semel_stream"
    await log.append("s", b"x", id="a", keep=keep)
    [(first, *_)] = ask(due)
    await log.append("s", b"x", id="b", keep=keep)
    assert ask(due) == [(first, True, False)]
    ask(f"UPDATE semel_stream SET due_at = due_at {older(url, 2000)}")
    assert await log.sweep() == 0
    assert [row[1:] for row in ask(due)] == [(False, True)]
    assert len((await log.read("s")).entries) == 2


MANY_LIVE = """
INSERT INTO semel_stream (id, name, head, head_tag, floor, floor_tag, ended, due_at)
SELECT sha256(n::text::bytea), n, 1, '', 0, '', false, now() + interval '1 day'
FROM generate_series(1, 2000) AS n
"""


@pytest.mark.parametrize(
    "due", [log_words.DUE, log_sweeping.DUE, inbox_words.DUE], ids=["append", "sweep", "parked"]
)
def test_what_is_due_is_looked_up_however_much_is_not(postgres_tables_url, due):
    """A new stream would pay for every one that lives, and a look for all that is parked."""
    engine = open_engine(parse(postgres_tables_url))
    said = dialect_named("postgresql").say(due).replace("= ?", "= 'c'").replace("?", "5")
    with engine.connect() as connection:
        connection.exec_driver_sql(MANY_LIVE)
        connection.exec_driver_sql("ANALYZE semel_stream")
        plan = [str(tuple(line)) for line in connection.exec_driver_sql(f"EXPLAIN {said}")]
    engine.dispose()
    assert any("Index Cond" in line and "due_at <=" in line for line in plan), plan


async def test_a_long_stream_is_swept_in_pieces(store, ask, monkeypatch):
    monkeypatch.setattr(log_sweeping, "SWEEP_ENTRIES", 4)
    log = store.log(ASYNC)
    await asyncio.gather(*(log.append("s", b"x", id=str(n)) for n in range(10)))
    await log.append("s", b"x", id="z", keep=Keep(idle_s=0.0))
    swept = [await log.run(lambda link: log_sweeping.sweep(link, 5)) for _ in range(4)]
    assert swept == [(0, True), (0, True), (1, False), (0, False)]
    assert ask(COUNTS) == [(0, 0, 0, 0, 0)]


async def test_a_stream_that_is_swept_in_part_is_no_hole_when_the_clock_goes_back(
    store, ask, url, monkeypatch
):
    monkeypatch.setattr(log_sweeping, "SWEEP_ENTRIES", 2)
    log, ends = store.log(ASYNC), Keep(ended_s=0.0, ids_s=1000.0)
    for stream, last in (
        ("over", {"keep": Keep(idle_s=0.0)}),
        ("gone", {"keep": ends, "ends": True}),
    ):
        for n in range(20):
            await log.append(stream, b"x", id=str(n))
        head = (await log.append(stream, b"x", id="z", **last)).position
    assert await log.run(lambda link: log_sweeping.sweep(link, 2)) == (0, True)
    await log.append("later", b"x", id="a", keep=Keep(idle_s=3600.0))
    later = "(SELECT until_at FROM (SELECT * FROM semel_stream WHERE name = 'later') AS l)"
    for column in ("gone_at", "until_at"):
        ask(f"UPDATE semel_stream SET {column} = {later} WHERE {column} > '2000-01-01 00:00:00'")
    assert (await log.read("over")).life == "unknown"
    page = await log.read("gone", head)
    assert (page.life, page.lost, (await log.read("gone")).lost) == ("gone", False, True)


async def test_entries_that_are_missing_are_never_a_silent_hole(store, ask):
    log = store.log(ASYNC)
    positions = [(await log.append("s", b"x", id=str(n))).position for n in range(5)]
    ask("DELETE FROM semel_log WHERE position = 3")
    for after, limit, left in ((None, 2, 2), (positions[2], 9, None), (positions[3], 9, 1)):
        page = await log.read("s", after, limit)
        assert (page.lost, len(page.entries)) == (left is None, left or 0)
    assert (await log.read("s")).lost
    ask("DELETE FROM semel_log WHERE position > 2")
    page = await log.read("s", positions[1])
    assert (page.lost, list(page.entries), page.head) == (True, [], positions[4])


# --- hints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True], ids=["url", "engine"])
@pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])
async def test_a_ring_that_cannot_be_said_changes_no_answer(
    postgres_tables_url, monkeypatch, colour, given
):
    broken = "SELECT 1 / (length(?::text) - 1)"
    monkeypatch.setattr(log_writing, "_ring", lambda *_: (broken, ("x",)))
    engine = _engine(postgres_tables_url, colour) if given else None
    store = SQLStore(engine or postgres_tables_url)
    log = store.log(colour)
    for n in range(3):
        assert isinstance(await log.append("s", b"x", id=str(n)), Appended)
    assert len((await log.read("s")).entries) == 3
    await store.aclose()
    if engine is not None:
        await (engine.dispose() or asyncio.sleep(0))


def _engine(url, colour):
    make = sa.create_engine if colour is SYNC else create_async_engine
    return make(with_driver(parse(url), colour.name))


async def test_a_server_that_knows_our_statements_already_is_no_trouble(postgres_tables_url):
    """As behind a pooler that hands out another's connection."""
    store = SQLStore(postgres_tables_url)
    log = store.log(ASYNC)
    await log.append("s", b"x", id="a")
    await log.read("s")
    for lines in (log.desk()._writing, log.desk().reading):
        lines._kept[1]._prepared._names.clear()
    assert isinstance(await log.append("s", b"x", id="b"), Appended)
    assert len((await log.read("s")).entries) == 2
    await store.aclose()


async def test_a_poll_that_fails_goes_on(monkeypatch):
    monkeypatch.setattr("semel.stores.sql.bell.SOON_S", 0.01)
    answers = iter([OSError("down"), [1], [1], [2], [2]])
    ear, asked = Ear(), []

    async def heads(streams):
        asked.append(streams)
        answer = next(answers, [2])
        if isinstance(answer, Exception):
            raise answer
        return answer

    bell = PollBell(Tower(), heads)
    await bell.listen("s", ear.wake)
    await ear.hears()
    await ear.hears()
    while len(asked) < 6:
        await asyncio.sleep(0.01)
    assert ear.rings == 2
    await bell.leave("s", ear.wake)
    looked = len(asked)
    await asyncio.sleep(0.05)
    assert len(asked) == looked, "nobody listens"
    await bell.aclose()
