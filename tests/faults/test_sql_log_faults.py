"""Lost replies, killed and frozen writers, locks and servers that restart, under a log in SQL."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
from tempfile import TemporaryDirectory

import psycopg
import pymysql
import pytest
from sqlalchemy.engine import make_url

from semel.colour import ASYNC, SYNC, run
from semel.entries import Appended, Field, FieldValue, Keep, Repeated
from semel.errors import StoreUnavailableError
from semel.stores.sql import SQLStore, init, lines, links, log_words, log_writing, notify, prepared
from semel.stores.sql.lines import open_engine, parse
from semel.stores.sql.log_tables import LOG_TABLES
from semel.testing.bells import Ear
from support.child import Child
from support.process import fast_folder, wait_until
from support.proxy import Proxy

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

STREAM = "job-1"
KEEP = Keep(entries=2)


@pytest.fixture(params=["postgres", "mariadb"])
def url(request):
    return request.getfixturevalue(f"{request.param}_tables_url")


@contextlib.contextmanager
def opened(url):
    with contextlib.closing(SQLStore(url)) as store:
        yield store.log(SYNC)


def append(log, number):
    """The third of these trims, and moves a fence and a field."""
    return log.append(
        STREAM,
        b"paid-%d" % number,
        id=f"e{number}",
        fences={"p": number},
        state=Field("f", number, b"%d" % number),
        reply=b"r%d" % number,
        keep=KEEP,
    )


# --- replies are lost ---------------------------------------------------------------------------


@pytest.fixture
def proxied(url):
    direct = make_url(url)
    with Proxy(direct.port) as proxy:
        yield proxy, direct.set(port=proxy.port).render_as_string(hide_password=False)


@pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize("lost", ["request", "reply"])
async def test_an_append_that_was_lost_is_there_once(proxied, lost, colour):
    """When COMMIT is not answered nobody knows; asked again, it hears what became of it."""
    proxy, url = proxied
    store = SQLStore(url)
    log = store.log(colour)
    await append(log, 1)
    # What goes out together on PostgreSQL ends with the COMMIT.
    said = b"paid-2" if url.startswith("postgres") else b"COMMIT"
    (proxy.cut_before_request if lost == "request" else proxy.cut_after_request)(said)
    answer = await append(log, 2)
    assert proxy.cuts == 1
    assert type(answer) is (Appended if lost == "request" else Repeated)
    assert (answer.position.offset, answer.reply) == (2, b"r2")
    assert [entry.id for entry in (await log.read(STREAM)).entries] == ["e1", "e2"]
    await store.aclose()


async def test_a_batch_whose_commit_was_lost_is_there_once(proxied):
    proxy, url = proxied
    store = SQLStore(url)
    log = store.log(ASYNC)
    await append(log, 1)
    proxy.cut_after_request(b"paid" if url.startswith("postgres") else b"COMMIT")
    works = [log.append(f"s{n % 4}", b"paid", id=f"e{n}") for n in range(20)]
    answers = await asyncio.gather(*works)
    assert proxy.cuts == 1
    assert {type(answer) for answer in answers} == {Repeated}
    for number in range(4):
        positions = [answer.position for answer in answers[number::4]]
        assert [e.position for e in (await log.read(f"s{number}")).entries] == positions
    await store.aclose()


# --- writers are killed -------------------------------------------------------------------------


def die_at(nth):
    """Have this process killed at its nth step from now on: before something is said, or, on
    PostgreSQL, before an answer is read.
    """
    count = itertools.count(1)

    def step():
        if next(count) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    def stepping(work):
        def stepped(*args):
            step()
            return work(*args)

        return stepped

    links._fetch = stepping(links._fetch)
    prepared._exchanged = stepping(prepared._exchanged)
    prepared._Prepared.send_all = stepping(prepared._Prepared.send_all)


class Books:
    """The log's tables."""

    def __init__(self, url):
        self._engine = open_engine(parse(url))

    def ask(self, statement):
        with self._engine.connect() as connection:  # none is open when a test forks
            return [tuple(row) for row in connection.exec_driver_sql(statement)]

    def check(self):
        """What one table says is what the others do."""
        [(head, floor, tag)] = self.ask("SELECT head, floor, head_tag FROM semel_stream")
        entries = self.ask("SELECT position, tag FROM semel_log ORDER BY position")
        assert [position for position, _ in entries] == [*range(floor + 1, head + 1)]
        assert entries[-1] == (head, tag)
        assert self.ask("SELECT count(*) FROM semel_mark") == [(head,)]
        assert self.ask("SELECT number FROM semel_fence") == [(head,)]
        assert self.ask("SELECT ranked FROM semel_field") == [(head,)]

    def empty(self):
        with self._engine.connect() as connection:
            for table in LOG_TABLES:
                connection.exec_driver_sql(f"DELETE FROM {table.name}")

    def close(self):
        self._engine.dispose()


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def killed_url(request):
    if request.param != "sqlite":
        yield request.getfixturevalue(f"{request.param}_tables_url")
        return
    with TemporaryDirectory(dir=fast_folder()) as folder:
        init(url := f"sqlite:///{folder}/log.db")
        yield url


def test_an_append_killed_at_any_step_is_there_wholly_or_not_at_all(killed_url):
    url, seen = killed_url, set()

    def dies(nth):
        with opened(url) as log:
            run(log.load(STREAM))  # connected
            die_at(nth)
            run(append(log, 3))

    with contextlib.closing(Books(url)) as books, opened(url) as log:
        for nth in itertools.count(1):
            for number in (1, 2):
                run(append(log, number))
            with Child(lambda nth=nth: dies(nth)) as child:
                code = child.end()
            assert code in {0, -signal.SIGKILL}
            books.check()
            there = run(log.load(STREAM)).position.offset
            seen.add(there)
            again = run(append(log, 3))
            assert (type(again), again.reply) == ({2: Appended, 3: Repeated}[there], b"r3")
            assert run(log.load(STREAM)).fields == {"f": FieldValue(3, b"3")}
            books.check()
            books.empty()
            if code == 0:
                break
    # PostgreSQL: before each of two things is said, and before each answer; learning comes first.
    assert nth == 6 if url.startswith("postgres") else nth > 10
    assert seen == {2, 3}


# --- writers are frozen -------------------------------------------------------------------------


def freeze_before_writing():
    """Have this process stopped when it holds the lock, once, and say so soon."""
    count = itertools.count(1)

    def stopping(work):
        def stopped(*args):
            if b"paid-2" in repr(args).encode() and next(count) == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            return work(*args)

        return stopped

    links._fetch = stopping(links._fetch)
    prepared._Prepared.send_all = stopping(prepared._Prepared.send_all)
    begin, limit = log_words.BEGINS["postgresql"]
    limit = limit.replace(str(lines.IDLE_S * 1000), "1000")
    log_words.BEGINS["postgresql"] = (begin, limit)
    statements = [said.replace(f"= {lines.IDLE_S} ", "= 1 ") for said in lines.MYSQL_SESSION]
    lines.SESSIONS |= {"mysql": statements, "mariadb": statements}


def test_a_writer_that_is_stopped_with_the_lock_in_hand_holds_nobody_up_for_long(url):
    with opened(url) as log:
        run(log.append(STREAM, b"1", id="e1"))

        def freezes():
            freeze_before_writing()
            with opened(url) as log:
                assert isinstance(run(log.append(STREAM, b"paid-2", id="e2")), Appended)

        with Child(freezes) as child:
            _, status = os.waitpid(child.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            assert run(log.append(STREAM, b"3", id="e3")).position.offset == 2
            os.kill(child.pid, signal.SIGCONT)
            assert child.end() == 0
        assert [entry.id for entry in run(log.read(STREAM)).entries] == ["e1", "e3", "e2"]


# --- locks --------------------------------------------------------------------------------------


WAITS = {
    "postgres": "SELECT count(*) FROM pg_stat_activity "
    "WHERE wait_event_type = 'Lock' AND datname = current_database()",
    "mysql": "SELECT variable_value FROM information_schema.global_status "
    "WHERE variable_name = 'Innodb_row_lock_current_waits'",
}
DEADLOCKS = {
    "postgres": "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()",
    "mysql": "SELECT variable_value FROM information_schema.global_status "
    "WHERE variable_name = 'Innodb_deadlocks'",
}


def asked(url, questions):
    """A number that the server tells."""
    place = make_url(url)
    with _connected(place) as connection, connection.cursor() as cursor:
        cursor.execute(questions["postgres" if url.startswith("postgres") else "mysql"])
        return int(cursor.fetchone()[0])


def _connected(place):
    if place.drivername.startswith("postgres"):
        return psycopg.connect(place.render_as_string(hide_password=False), autocommit=True)
    return pymysql.connect(
        host=place.host, port=place.port, user=place.username, database=place.database
    )


def test_whoever_comes_second_is_seen_second(url, monkeypatch):
    """The first has taken its offset and not committed; the second has to wait for it."""
    has_locked, may_go = threading.Event(), threading.Event()
    with opened(url) as log, opened(url) as other, opened(url) as reader:
        first = run(log.append(STREAM, b"0", id="e0"))
        written = log_writing._written

        def slow(dialect, streams):
            if threading.current_thread().name == "first":
                has_locked.set()
                assert may_go.wait(30)
            return written(dialect, streams)

        monkeypatch.setattr(log_writing, "_written", slow)
        answers = {}

        def write(name, log):
            answers[name] = run(log.append(STREAM, name.encode(), id=name))

        threads = [
            threading.Thread(target=write, args=(name, log), name=name)
            for name, log in (("first", log), ("second", other))
        ]
        threads[0].start()
        assert has_locked.wait(30)
        threads[1].start()
        wait_until(lambda: asked(url, WAITS) > 0, "the second to wait")
        assert run(reader.read(STREAM)).head == first.position
        may_go.set()
        for thread in threads:
            thread.join()
        assert [answers[name].position.offset for name in ("first", "second")] == [2, 3]
        entries = run(reader.read(STREAM)).entries
    assert [entry.data for entry in entries] == [b"0", b"first", b"second"]


async def test_batches_over_the_same_streams_in_any_order_never_deadlock(url):
    stores = [SQLStore(url) for _ in range(3)]
    logs = [store.log(ASYNC) for store in stores]
    streams = [f"s{n}" for n in range(8)]
    await asyncio.gather(*(logs[0].append(stream, b"x", id="first") for stream in streams))
    before = asked(url, DEADLOCKS)
    for turn in range(6):
        works = []
        for number, log in enumerate(logs):
            shift = turn + 3 * number
            order = (streams[shift % 8 :] + streams[: shift % 8])[:: -1 if number % 2 else 1]
            works += [log.append(s, b"x", id=f"{turn}-{number}") for s in order]
        answers = await asyncio.gather(*works)
        assert {type(answer) for answer in answers} == {Appended}
    assert asked(url, DEADLOCKS) == before
    for page in await asyncio.gather(*(logs[1].read(stream) for stream in streams)):
        assert [entry.position.offset for entry in page.entries] == list(range(1, 20))
    for store in stores:
        await store.aclose()


async def test_of_many_who_make_the_same_streams_at_once_all_are_heard(url):
    stores = [SQLStore(url) for _ in range(4)]
    for turn in range(4):
        names = [f"new-{turn}-{n}" for n in range(6)]
        works = [
            store.log(ASYNC).append(name, b"x", id=str(number))
            for number, store in enumerate(stores)
            for name in (names if number % 2 else reversed(names))
        ]
        assert {type(answer) for answer in await asyncio.gather(*works)} == {Appended}
        heads = await stores[0].log(ASYNC).heads(names)
        assert {head.offset for head in heads} == {4}
    for store in stores:
        await store.aclose()


# --- servers restart ----------------------------------------------------------------------------


@pytest.mark.servers
@pytest.mark.parametrize("server", ["postgres", "mariadb"])
async def test_a_server_that_was_killed_and_restarted_resets_nobody(request, server, monkeypatch):
    monkeypatch.setattr(notify, "SOON_S", 0.05)
    url = request.getfixturevalue(f"{server}_tables_url")
    process = request.getfixturevalue(f"{server}_server")
    store = SQLStore(url)
    log, bell, ear = store.log(ASYNC), store.bell(), Ear()
    positions = [(await append(log, number)).position for number in (1, 2)]
    await bell.listen(STREAM, ear.wake)
    await ear.hears()
    await asyncio.to_thread(process.kill)
    for work in (log.read(STREAM), append(log, 3), log.heads([STREAM])):
        with pytest.raises(StoreUnavailableError):
            await work
    await asyncio.to_thread(process.restart)
    for position in positions:
        page = await log.read(STREAM, position)
        assert (page.lost, page.head) == (False, positions[-1])
    assert isinstance(await append(log, 2), Repeated)
    other = SQLStore(url)
    third = await append(other.log(ASYNC), 3)
    await ear.hears()
    assert [e.position for e in (await log.read(STREAM, positions[-1])).entries] == [third.position]
    await bell.aclose()
    await other.aclose()
    await store.aclose()


async def test_a_bell_whose_connection_breaks_wakes_everybody_when_it_hears_again(
    postgres_tables_url, monkeypatch
):
    monkeypatch.setattr(notify, "SOON_S", 0.01)
    store = SQLStore(postgres_tables_url)
    bell, ears = store.bell(), [Ear() for _ in range(3)]
    for number, ear in enumerate(ears):
        await bell.listen(f"job-{number}", ear.wake)
    for ear in ears:
        await ear.hears()
    with psycopg.connect(postgres_tables_url, autocommit=True) as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE query = 'LISTEN semel_log' AND datname = current_database()"
        )
    for ear in ears:
        await ear.hears()
    await store.log(ASYNC).append("job-1", b"x", id="a")
    await ears[1].hears()
    assert [ear.rings for ear in ears] == [2, 3, 2]
    await bell.aclose()
    await store.aclose()


# --- fork ---------------------------------------------------------------------------------------


def test_a_child_of_a_fork_goes_on_with_its_parents_log(url):
    store = SQLStore(url)
    log = store.log(ASYNC)

    async def add(id):
        return (await log.append(STREAM, b"x", id=id)).position.offset

    async def parent():
        assert await add("a") == 1
        child = Child(lambda: asyncio.run(add("b")))
        assert await asyncio.to_thread(child.end) == 0
        assert await add("c") == 3
        await store.aclose()

    asyncio.run(parent())
    with opened(url) as reader:
        assert [entry.id for entry in run(reader.read(STREAM)).entries] == ["a", "b", "c"]
