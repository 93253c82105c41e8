"""The ledger in one SQLite file: damage, connections, forks, loops, and what is refused at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import pytest

from semel.colour import ASYNC, SYNC, run
from semel.errors import CorruptRecordError, SemelError, SettingsError, StoreUnavailableError
from semel.keys import make_key, new_attempt
from semel.stores import connect
from semel.stores.rules import Claiming
from semel.stores.sql import init
from semel.stores.sqlite import SQLiteStore, connections, form, records
from semel.stores.sqlite.schema import COLUMNS
from semel.testing.clock import FakeClock
from semel.values import Busy, Done, Kept, Key, Mismatch, Outcome, State, Terms, Won
from support.alarm import alarms

TERMS = Terms(lease_s=30, ttl_s=600)
VALUE = Outcome("value", b'{"paid":true}')
KEY = make_key("order-1", tenant="acme", operation="pay")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


@pytest.fixture
def store(path, clock):
    store = SQLiteStore(path, clock=clock)
    yield store
    store.close()


@pytest.fixture
def ledger(store):
    return store.ledger(SYNC)


@pytest.fixture
def shell(store, path):
    """Somebody else's connection to the same file."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as shell:
        yield shell


def claim(ledger, key=KEY, attempt=None):
    return run(ledger.claim(key, attempt=attempt or new_attempt(), fingerprint=b"f", terms=TERMS))


def finished(ledger, key=KEY, outcome=VALUE):
    won = claim(ledger, key)
    assert run(ledger.complete(won.claim, outcome)) == Kept()
    return won.claim


# --- the table ----------------------------------------------------------------------------------


def test_the_seeds_columns_are_there_to_read(ledger, shell):
    finished(ledger, outcome=Outcome("value", b"{}", 201))
    row = shell.execute(
        "SELECT idempotency_key, tenant_id, operation, state, response, status_code "
        "FROM idempotency"
    ).fetchone()
    assert row == ("order-1", "acme", "pay", "COMPLETED", b"{}", 201)


def test_the_file_is_for_its_owner_alone(store, path):
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "text", ["a\x00b", "\ud800", "\ud83d\ude00", "😀", "x" * 255, "../../etc/passwd", "'; --"]
)
def test_every_text_comes_back_to_the_character(ledger, text):
    key = Key(b"\x07" * 32, text, text, text)
    won = claim(ledger, key)
    run(ledger.note(won.claim, text, b"\xff\x00"))
    run(ledger.release(won.claim, error=text))
    record = run(ledger.look(key.id))
    assert record.key == key
    assert record.error == text
    assert record.steps == {text: b"\xff\x00"}
    finished(ledger, key)
    assert isinstance(claim(ledger, key), Done)
    assert claim(ledger, Key(key.id, text, text, "other")) == Mismatch("operation")


def test_a_listing_goes_over_many_pages(ledger, monkeypatch):
    monkeypatch.setattr(records, "SWEEP_CHUNK", 2)
    for n in range(7):
        claim(ledger, make_key(f"k{n}", tenant=f"t{n % 2}", operation="pay"))
    assert len(run(ledger.records())) == 7
    assert len(run(ledger.records(tenant="t1", state=State.PENDING))) == 3


def test_a_sweep_deletes_at_most_its_limit(ledger, clock, monkeypatch):
    monkeypatch.setattr(records, "SWEEP_CHUNK", 4)
    for n in range(11):
        finished(ledger, make_key(f"k{n}", operation="pay"))
    clock.advance(601)
    assert [run(ledger.sweep(limit=6)) for _ in range(3)] == [6, 5, 0]


def test_fences_grow_over_a_sweep_though_the_clock_went_back(ledger, clock):
    before = finished(ledger)
    clock.advance(601)
    assert run(ledger.sweep()) == 1
    clock.advance(-3600)
    assert claim(ledger).claim.fence > before.fence


# --- reads that take no lock --------------------------------------------------------------------


def test_replay_busy_and_mismatch_do_not_wait_for_a_writer(ledger, shell):
    finished(ledger)
    running = make_key("order-2", operation="pay")
    claim(ledger, running)
    shell.execute("BEGIN IMMEDIATE")
    assert isinstance(claim(ledger), Done)
    assert isinstance(claim(ledger, running), Busy)
    assert claim(ledger, make_key("order-1", tenant="acme")) == Mismatch("operation")
    assert run(ledger.look(KEY.id)) is not None


def test_a_replay_writes_nothing_and_leaves_no_reader_behind(ledger, shell, path):
    finished(ledger)
    claim(ledger)
    assert shell.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    for _ in range(3):
        claim(ledger)
    assert path.with_name("ledger.db-wal").stat().st_size == 0


# --- what cannot work is said at once -----------------------------------------------------------


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="Give it a file"):
        SQLiteStore(tmp_path)


def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="exists"):
        SQLiteStore(tmp_path / "nowhere" / "ledger.db")


def test_a_file_that_may_not_be_written_is_unavailable(path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreUnavailableError, match="Permission denied"):
        SQLiteStore(path)


def test_a_file_of_a_later_version_is_refused(path):
    with contextlib.closing(sqlite3.connect(path)) as shell:
        shell.execute("PRAGMA user_version = 2")
    with pytest.raises(SettingsError, match="upgrade Semel"):
        SQLiteStore(path)


def test_a_table_that_another_store_made_is_refused_and_left_alone(path):
    with contextlib.closing(sqlite3.connect(path)) as shell:
        shell.execute("CREATE TABLE idempotency (id BLOB PRIMARY KEY, expires_at TEXT)")
        with pytest.raises(SettingsError, match="did not make"):
            SQLiteStore(path)
        assert shell.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert shell.execute("PRAGMA user_version").fetchone() == (0,)


@pytest.mark.parametrize("version", [0, 1, 7])
def test_an_applications_database_is_refused_and_left_alone(path, version):
    with contextlib.closing(sqlite3.connect(path)) as shell:
        shell.execute("CREATE TABLE orders (id TEXT)")
        shell.execute(f"PRAGMA user_version = {version}")  # as its migrations do
        with pytest.raises(SettingsError, match=f"use sqlite\\+pysqlite:///{path}"):
            SQLiteStore(path)
        assert shell.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert shell.execute("PRAGMA user_version").fetchone() == (version,)


def test_tables_that_came_later_do_not_make_a_file_anothers(store, path, shell):
    shell.execute("CREATE TABLE notes (id TEXT)")
    store.close()
    SQLiteStore(path).close()


@pytest.mark.parametrize("version", [0, 1, 7])
def test_a_file_of_the_sql_store_says_what_to_write(path, version):
    init(f"sqlite+pysqlite:///{path}")
    with contextlib.closing(sqlite3.connect(path)) as shell:
        shell.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(SettingsError, match=f"made by SQLStore; write sqlite\\+pysqlite:///{path}"):
        connect(f"sqlite:///{path}")


def test_a_file_that_is_no_database_is_corrupt(path):
    path.write_bytes(b"not a database, but long enough to be taken for one" * 40)
    with pytest.raises(CorruptRecordError, match="damaged"):
        SQLiteStore(path)


def test_a_file_that_lost_its_table_is_not_given_an_empty_one(store, path, shell):
    shell.execute("DROP TABLE idempotency")
    store.close()
    with pytest.raises(StoreUnavailableError, match="no such table"):
        SQLiteStore(path)


def test_a_file_that_was_deleted_is_not_an_empty_ledger(store, ledger, path):
    finished(ledger)
    store.close()
    path.unlink()
    with pytest.raises(StoreUnavailableError):
        claim(ledger)
    assert not path.exists()


def test_opening_twice_at_once_makes_one_schema(path):
    stores, errors = [], []

    def one():
        try:
            stores.append(SQLiteStore(path))
        except SemelError as error:
            errors.append(error)

    in_threads(one, 8)
    assert not errors
    finished(stores[0].ledger(SYNC))
    assert all(isinstance(claim(store.ledger(SYNC)), Done) for store in stores)
    for store in stores:
        store.close()


# --- trouble ------------------------------------------------------------------------------------


def test_a_file_locked_for_too_long_is_unavailable(path, monkeypatch):
    monkeypatch.setattr(connections, "BUSY_S", 0.05)
    with contextlib.closing(SQLiteStore(path)) as store:
        ledger = store.ledger(SYNC)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as shell:
            shell.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailableError, match="locked"):
                claim(ledger)
        assert isinstance(claim(ledger), Won)


def test_threads_that_write_for_too_long_are_reported(store, ledger, monkeypatch):
    monkeypatch.setattr(connections, "BUSY_S", 0.05)
    with store._connections._pool.writing, pytest.raises(StoreUnavailableError, match="threads"):
        claim(ledger)
    assert isinstance(claim(ledger), Won)


def test_a_full_disk_leaves_the_old_record(store, ledger):
    """The size limit is the connection's, so the one idle connection is the one that writes."""
    won = claim(ledger)
    (cursor,) = store._connections._idle
    pages = cursor.execute("PRAGMA page_count").fetchone()[0]
    cursor.execute(f"PRAGMA max_page_count = {pages}").fetchone()
    with pytest.raises(StoreUnavailableError, match="full"):
        run(ledger.complete(won.claim, Outcome("value", b"x" * 100_000)))
    assert isinstance(claim(ledger), Busy)
    cursor.execute("PRAGMA max_page_count = 100000").fetchone()
    assert run(ledger.complete(won.claim, VALUE)) == Kept()


def test_a_read_only_connection_changes_nothing(store, ledger):
    won = claim(ledger)
    (cursor,) = store._connections._idle
    cursor.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreUnavailableError, match="readonly"):
        run(ledger.complete(won.claim, VALUE))
    cursor.execute("PRAGMA query_only = OFF")
    assert run(ledger.complete(won.claim, VALUE)) == Kept()


@pytest.mark.parametrize(
    "damage",
    [
        "response = CAST('{\"paid\":no}' AS BLOB)",
        "outcome = 'error'",
        "fence = fence + 1",
        "expires_us = NULL",
        "request_hash = x'00'",
        "operation = 'refund'",
        "status_code = 200",
    ],
)
def test_a_changed_value_is_found_by_a_replay(ledger, shell, damage):
    finished(ledger)
    shell.execute(f"UPDATE idempotency SET {damage}")
    with pytest.raises(CorruptRecordError, match=KEY.id.hex()):
        claim(ledger)


@pytest.mark.parametrize("column", COLUMNS[1:])
def test_a_changed_value_is_found_by_every_other_verb(ledger, shell, column):
    won = claim(ledger)
    shell.execute(f"UPDATE idempotency SET {column} = '7'")
    for verb in (
        ledger.look(KEY.id),
        ledger.records(),
        ledger.complete(won.claim, VALUE),
        ledger.forget(KEY.id),
        ledger.resolve(KEY.id, fence=won.claim.fence, outcome=VALUE, ttl_s=None),
    ):
        with pytest.raises(CorruptRecordError):
            run(verb)
    assert run(ledger.forget(KEY.id, force=True))
    assert isinstance(claim(ledger), Won)


def test_a_record_that_the_index_has_lost_is_not_made_again(ledger, monkeypatch):
    finished(ledger)
    for name in ("SELECT", "REPLAY"):
        monkeypatch.setattr(records, name, getattr(records, name) + " AND 0")
    with pytest.raises(CorruptRecordError, match=KEY.id.hex()):
        claim(ledger)
    monkeypatch.undo()
    assert isinstance(claim(ledger), Done)


async def test_a_corrupt_record_is_its_own_callers_error_alone(store, shell):
    ledger = store.ledger(ASYNC)
    keys = [make_key(f"k{n}", operation="pay") for n in range(5)]
    wins = [
        await ledger.claim(k, attempt=new_attempt(), fingerprint=b"f", terms=TERMS) for k in keys
    ]
    shell.execute("UPDATE idempotency SET past = '' WHERE id = ?", (keys[2].id,))
    verdicts = await asyncio.gather(
        *(ledger.complete(won.claim, VALUE) for won in wins), return_exceptions=True
    )
    assert isinstance(verdicts.pop(2), CorruptRecordError)
    assert verdicts == [Kept()] * 4
    await store.aclose()


@pytest.fixture
def path_in_memory():
    """Opened two thousand times: where there is a file system in memory, there."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder) / "ledger.db"


@pytest.mark.slow
def test_a_flipped_byte_in_the_file_is_noticed_or_changes_no_answer(path_in_memory):
    """Never another result, and never `Won` for what was done."""
    path = path_in_memory
    with contextlib.closing(SQLiteStore(path)) as store:
        fence = finished(store.ledger(SYNC)).fence
        for n in range(3):
            finished(store.ledger(SYNC), make_key(f"other-{n}", operation="pay"))
    whole = path.read_bytes()
    noticed = 0
    for position in (n for n, byte in enumerate(whole) if byte or n % 64 == 0):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        for extra in ("-wal", "-shm"):
            path.with_name(path.name + extra).unlink(missing_ok=True)
        path.write_bytes(damaged)
        try:
            with contextlib.closing(SQLiteStore(path)) as store:
                answer = claim(store.ledger(SYNC))
        except (StoreUnavailableError, SettingsError):
            noticed += 1
        else:
            assert answer == Done(VALUE, fence), position
    assert noticed > 200


# --- connections --------------------------------------------------------------------------------


def in_threads(work, count):
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def open_files(path):
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(entry.readlink()))
    return [link for link in links if link.startswith(str(path))]


def test_threads_that_come_and_go_share_a_few_connections(store, ledger):
    for _ in range(5):
        in_threads(lambda: claim(ledger), 8)
    assert len(store._connections._pool.open) <= 8
    for _ in range(50):
        in_threads(lambda: claim(ledger), 1)
    assert len(store._connections._pool.open) <= 8


def test_a_closed_store_holds_nothing_and_opens_again(store, ledger, path):
    finished(ledger)
    store.close()
    store.close()
    assert not open_files(path)
    assert isinstance(claim(ledger), Done)


def test_a_connection_in_use_is_closed_when_it_comes_back(store, path):
    cursor = store._connections._take()
    store.close()
    store._connections._give(cursor)
    assert not open_files(path)


def test_a_forgotten_store_closes_its_file(path):
    store = SQLiteStore(path)
    finished(store.ledger(SYNC))
    del store
    gc.collect()
    assert not open_files(path)


def test_a_closed_memory_store_is_gone(clock):
    store = SQLiteStore(":memory:", clock=clock)
    finished(store.ledger(SYNC))
    store.close()
    store.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        claim(store.ledger(SYNC))


def test_a_forgotten_memory_store_warns_of_nothing():
    with warnings.catch_warnings(action="ignore"):
        gc.collect()  # what other tests left behind is theirs
    store = SQLiteStore(":memory:")
    finished(store.ledger(SYNC))
    del store
    gc.collect()


# --- forks --------------------------------------------------------------------------------------


def in_child(work):
    """Whether `work` is true in a forked child."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if work() else 2
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestForks:
    def test_no_connection_is_open_across_a_fork(self, store, ledger, path):
        finished(ledger)
        assert in_child(lambda: not open_files(path) and isinstance(claim(ledger), Done))
        assert isinstance(claim(ledger), Done)

    def test_a_childs_commits_outlive_the_parents_close(self, store, ledger, path, clock):
        """With a connection open across the fork SQLite loses them: the child has no lock of its
        own then, and the parent's last close removes the WAL under it."""
        finished(ledger)
        reader, writer = os.pipe()
        to_child, from_parent = os.pipe()
        child = os.fork()
        if child == 0:
            claim(ledger, make_key("before", operation="pay"))
            os.write(writer, b"x")
            os.read(to_child, 1)
            claim(ledger, make_key("after", operation="pay"))
            os._exit(0)
        os.read(reader, 1)
        claim(ledger)
        store.close()
        os.write(from_parent, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for fd in (reader, writer, to_child, from_parent):
            os.close(fd)
        fresh = SQLiteStore(path, clock=clock)
        assert len(run(fresh.ledger(SYNC).records())) == 3
        fresh.close()

    def test_a_fork_waits_for_the_calls_of_other_threads(self, store, ledger):
        cursor = store._connections._take()
        timer = threading.Timer(0.1, store._connections._give, [cursor])
        timer.start()
        assert in_child(lambda: isinstance(claim(ledger), Won))
        timer.join()

    def test_a_fork_while_others_write_leaves_no_lock_taken(self, store, ledger):
        stop = threading.Event()

        def write():
            n = 0
            while not stop.is_set():
                claim(ledger, make_key(f"{threading.get_ident()}-{n}", operation="pay"))
                n += 1

        threads = [threading.Thread(target=write) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for n in range(5):
                key = make_key(f"child-{n}", operation="pay")
                assert in_child(lambda key=key: isinstance(claim(ledger, key), Won))
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def test_a_child_that_could_not_be_made_safe_is_refused(self, store, ledger, monkeypatch):
        monkeypatch.setattr(connections, "FORK_WAIT_S", 0.01)
        cursor = store._connections._take()

        def refused():
            with pytest.raises(StoreUnavailableError, match="after the fork"):
                claim(ledger)
            return True

        assert in_child(refused)
        store._connections._give(cursor)
        assert isinstance(claim(ledger), Won)

    def test_a_memory_store_is_copied(self):
        store = SQLiteStore(":memory:")
        ledger = store.ledger(SYNC)
        finished(ledger)
        other = make_key("order-2", operation="pay")
        assert in_child(
            lambda: isinstance(claim(ledger), Done) and isinstance(claim(ledger, other), Won)
        )
        assert isinstance(claim(ledger, other), Won)
        store.close()


def test_no_resource_warning_from_threads_forks_and_the_end(path):
    """A process of its own, since such warnings come when everything else is gone."""
    script = """
import os, sys, threading
from semel.colour import SYNC, run
from semel.keys import make_key
from semel.stores.sqlite import SQLiteStore
from semel.values import Terms

store = SQLiteStore(sys.argv[1])

def claim(name):
    run(store.ledger(SYNC).claim(make_key(name), attempt="a/1", terms=Terms()))

threads = [threading.Thread(target=claim, args=[f"t{n}"]) for n in range(4)]
for t in threads: t.start()
for t in threads: t.join()
if os.fork() == 0:
    claim("child")
    sys.exit()
os.wait()
claim("parent")
memory = SQLiteStore(":memory:")
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script, path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- signals ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")  # from Python 3.13 on
@pytest.mark.parametrize("place", ["ledger.db", ":memory:"])
def test_a_signal_that_raises_leaves_no_lock_and_no_connection(tmp_path, place):
    store = SQLiteStore(place if place == ":memory:" else tmp_path / place)
    rows = store._sync._rows
    ops = [Claiming(make_key(f"k{n}"), new_attempt(), b"", TERMS) for n in range(7)]
    with alarms() as struck:
        hit = sum(
            struck(10 + n % 150, lambda op=ops[n % 7]: (rows.glance(op.key), rows.perform(op)))
            for n in range(3000)
        )
    gc.collect()
    assert hit > 100
    assert not store._connections._pool.writing.locked()
    assert len(store._connections._pool.open) <= 1
    for op in ops:
        assert isinstance(rows.perform(op), Won)
    store.close()


# --- the event loop -----------------------------------------------------------------------------


async def one(ledger, name):
    key = make_key(name, operation="pay")
    won = await ledger.claim(key, attempt=new_attempt(), fingerprint=b"f", terms=TERMS)
    return await ledger.complete(won.claim, VALUE)


async def test_concurrent_changes_share_transactions(store):
    batches = []
    rows = store._async._rows
    perform_all = rows.perform_all
    rows.perform_all = lambda ops: (batches.append(len(ops)), perform_all(ops))[1]
    verdicts = await asyncio.gather(*(one(store.ledger(ASYNC), f"k{n}") for n in range(100)))
    assert verdicts == [Kept()] * 100
    assert sum(batches) == 200
    assert len(batches) < 20
    await store.aclose()


async def test_the_event_loop_writes_nothing_itself(store):
    writers = set()
    rows = store._async._rows
    perform_all = rows.perform_all
    rows.perform_all = lambda ops: (writers.add(threading.get_ident()), perform_all(ops))[1]
    await one(store.ledger(ASYNC), "k")
    assert writers
    assert threading.get_ident() not in writers
    await store.aclose()


async def test_a_failed_batch_fails_every_caller_and_writes_nothing(store, shell, monkeypatch):
    ledger = store.ledger(ASYNC)
    monkeypatch.setattr(form, "INSERT", form.INSERT.replace("idempotency", "nowhere"))
    answers = await asyncio.gather(
        *(one(ledger, f"k{n}") for n in range(5)), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [StoreUnavailableError] * 5
    assert shell.execute("SELECT count(*) FROM idempotency").fetchone() == (0,)
    monkeypatch.undo()
    assert await one(ledger, "k0") == Kept()
    await store.aclose()


async def test_a_cancelled_caller_leaves_the_others_alone(store):
    ledger = store.ledger(ASYNC)
    tasks = [asyncio.ensure_future(one(ledger, f"k{n}")) for n in range(10)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(done.pop(3), asyncio.CancelledError)
    assert done == [Kept()] * 9
    await store.aclose()


def test_one_loop_after_another_and_several_at_once(store):
    assert asyncio.run(one(store.ledger(ASYNC), "one")) == Kept()
    asyncio.run(store.aclose())
    assert asyncio.run(one(store.ledger(ASYNC), "two")) == Kept()
    verdicts = []
    names = iter(range(8))
    in_threads(lambda: verdicts.append(asyncio.run(one(store.ledger(ASYNC), f"t{next(names)}"))), 8)
    assert verdicts == [Kept()] * 8
    asyncio.run(store.aclose())


# --- guarantees ---------------------------------------------------------------------------------


def test_guarantees_are_read_from_the_connection(store, ledger):
    found = run(ledger.guarantees())
    assert found.survives == {"process_crash", "power_loss"}
    assert found.shared
    assert "synchronous is 2, journal_mode is wal" in found.why[0]
    (cursor,) = store._connections._idle
    cursor.execute("PRAGMA synchronous = NORMAL")
    assert run(ledger.guarantees()).survives == {"process_crash"}


def test_memory_survives_nothing():
    store = SQLiteStore(":memory:")
    found = run(store.ledger(SYNC).guarantees())
    assert not found.survives
    assert not found.shared
    assert ":memory:" in repr(store)
    store.close()
