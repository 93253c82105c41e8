"""The SQLite file under several instances, other processes, links, deletion and truncation.

The cases are those of https://www.sqlite.org/howtocorrupt.html. Here are those that Semel prevents,
or notices before an effect can happen a second time. docs/explanation/guarantees.md lists them, and
those that it does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from semel import idempotent
from semel.brokers.sqlite import SQLiteBroker
from semel.client.intents import Intents
from semel.colour import SYNC, run
from semel.errors import DamagedStoreError, SettingsError, StoreUnavailableError
from semel.inbox import SQLInbox
from semel.messages import Applied
from semel.stores import SQLiteStore, SQLStore, connect
from semel.stores.sql import init
from semel.stores.sqlite import connections
from semel.testing.traffic import message
from semel.values import Terms
from semel.worker import _beside

TERMS = Terms(lease_s=30, ttl_s=600)

KINDS = ["sqlite", "sqlite+pysqlite"]
"""The stores that keep their records in a SQLite file, by the scheme of their URL."""

# A process that opens the store at a URL, calls once with an argument, and closes the store.
# It prints "ran" if the body ran.
VISITOR = """
import sys
from semel import connect, idempotent
url, argument = sys.argv[1:]
store = connect(url)

@idempotent(store=store, key="charge:{x}", operation="charge")
def charge(x):
    print("ran")

charge(argument)
store.close()
"""


# The same, and killed before it closes the store: the write-ahead log stays.
KILLED = VISITOR.replace("store.close()", "import os; os.kill(os.getpid(), 9)")


def visit(url, argument):
    """Whether a process of its own, which opens and closes the store, ran the body."""
    done = subprocess.run(
        [sys.executable, "-c", VISITOR, url, argument], capture_output=True, text=True, check=True
    )
    return done.stdout == "ran\n"


def charger(store):
    """A guarded function over the store, and the arguments for which its body ran."""
    ran = []

    @idempotent(store=store, key="charge:{x}", operation="charge")
    def charge(x):
        ran.append(x)

    return charge, ran


@pytest.fixture
def path(tmp_path):
    return tmp_path / "semel.db"


@pytest.fixture(params=KINDS)
def url(request, path):
    url = f"{request.param}:///{path}"
    if request.param != "sqlite":
        init(url)
    return url


# --- two descriptors ----------------------------------------------------------------------------


def open_store(url):
    return connect(url)


def open_middleware(url):
    from semel.http import IdempotencyMiddleware

    return IdempotencyMiddleware(None, store=url, scope=lambda _: "one")


def open_broker(url):
    return SQLiteBroker(url.partition(":///")[2])


@pytest.mark.parametrize("second", [open_store, open_middleware, open_broker])
def test_second_instance_keeps_the_locks_of_the_first(url, second):
    """Closing any descriptor of a file drops every lock that the process has on it."""
    store = connect(url)
    charge, ran = charger(store)
    charge("a")
    kept = second(url)
    assert visit(url, "b")
    charge("x")
    assert not visit(url, "x")
    assert ran == ["a", "x"]
    del kept
    store.close()


def test_no_component_opens_a_file_that_exists(path):
    """Store, broker and intents leave that to SQLite, which raises no audit event."""
    opened = []

    def note(event, args):
        if not watching or event != "open" or args[2] & os.O_EXCL:  # which opens only new files
            return
        if str(args[0]).startswith(str(path.parent / "semel")):
            opened.append(args[0])

    watching = False
    sys.addaudithook(note)
    stores = [SQLiteStore(path)]
    intents = Intents(path.parent / "semel-intents.db")
    watching = True
    stores += [SQLiteStore(path), connect(f"sqlite:///{path}")]
    broker = SQLiteBroker(path)
    more = Intents(path.parent / "semel-intents.db")
    for store in stores:
        charger(store)[0]("a")
        store.close()
    watching = False
    assert opened == []
    del broker, intents, more


def test_application_connection_keeps_its_locks(path):
    """A store opened beside the application's own transaction takes no lock away from it."""
    init(f"sqlite+pysqlite:///{path}")
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id TEXT)")
        connection.exec_driver_sql("INSERT INTO orders VALUES ('1')")
        store = SQLStore(f"sqlite:///{path}")
        broker = store.ledger(SYNC), SQLStore(engine).ledger(SYNC)
        connect_and_write = "sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"
        other = subprocess.run(
            [sys.executable, "-c", f"import sqlite3, sys; {connect_and_write}", path],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "locked" in other.stderr
    store.close()
    engine.dispose()
    del broker


def test_application_that_opens_and_closes_the_file_is_noticed(url, path):
    """It drops SQLite's locks, so another process deletes the write-ahead log."""
    store = connect(url)
    charge, ran = charger(store)
    charge("a")
    path.read_bytes()  # a copy made by hand, for instance
    visit(url, "b")
    with pytest.raises(DamagedStoreError, match=r"semel\.db-wal was deleted"):
        charge("x")
    assert ran == ["a"]
    assert visit(url, "x")
    store.close()


def test_second_store_after_the_locks_were_lost_is_refused(url, path):
    """SQLite opens a new write-ahead log for it, while the first store has the deleted one."""
    store = connect(url)
    charge, ran = charger(store)
    charge("a")
    path.read_bytes()
    visit(url, "b")
    with pytest.raises(DamagedStoreError, match=r"semel\.db-wal was deleted"):
        charger(connect(url))[0]("x")
    with pytest.raises(DamagedStoreError, match=r"semel\.db-wal was deleted"):
        charge("x")
    assert ran == ["a"]
    store.close()


def test_store_that_is_closed_and_opened_again_has_another_log(url):
    """SQLite deletes the log with the last connection, which is not an accident."""
    for number in range(3):
        stores = [connect(url), connect(url)]
        for store in stores:
            charger(store)[0](f"x{number}")
        for store in stores:
            store.close()
        visit(url, f"y{number}")


def test_log_deleted_before_the_first_change_is_noticed(url, path):
    """A connection that has only read has the write-ahead log open, too."""
    visit(url, "a")
    store = connect(url)
    charge, ran = charger(store)
    charge("a")  # replayed
    path.read_bytes()
    visit(url, "b")
    with pytest.raises(DamagedStoreError, match=r"semel\.db-wal was deleted"):
        charge("x")
    assert ran == []
    assert visit(url, "x")
    store.close()


def test_log_deleted_before_the_first_call_is_noticed(path):
    visit(f"sqlite:///{path}", "a")
    store = SQLiteStore(path)
    charge, ran = charger(store)
    Path(f"{path}-wal").unlink()
    with pytest.raises(DamagedStoreError, match=r"semel\.db-wal was deleted"):
        charge("x")
    assert ran == []
    store.close()


# --- names and links ----------------------------------------------------------------------------


def spellings(path):
    folder = path.parent
    (folder / "sub").mkdir()
    (folder / "other").symlink_to(folder)
    (folder / "alias.db").symlink_to(path)
    dotted = folder / "sub" / ".." / path.name
    return [path, dotted, folder / "other" / path.name, folder / "alias.db"]


def test_every_spelling_of_a_path_is_one_file(path):
    SQLiteStore(path).close()
    stores = [SQLiteStore(each) for each in spellings(path)]
    assert len({id(store._connections._pool.writing) for store in stores}) == 1
    charges = [charger(store) for store in stores]
    for charge, _ in charges:
        charge("x")
    assert [ran for _, ran in charges] == [["x"], [], [], []]
    assert not visit(f"sqlite:///{path.parent}/alias.db", "x")
    for store in stores:
        store.close()


def test_hard_link_is_refused(url, path):
    """SQLite names the write-ahead log after the path, so two names have two logs."""
    store = connect(url)
    charger(store)[0]("x")
    os.link(path, path.parent / "second.db")
    with pytest.raises(SettingsError, match="2 hard links"):
        charger(connect(url.replace("semel.db", "second.db")))[0]("x")
    store.close()


# --- deleted, renamed, replaced, truncated ------------------------------------------------------


def delete(path):
    path.unlink()


def rename(path):
    path.rename(path.parent / "old.db")


def replace_with_copy(path):
    shutil.copy(path, path.parent / "copy.db")
    (path.parent / "copy.db").replace(path)


def delete_with_its_logs(path):
    for each in path.parent.glob("semel.db*"):
        each.unlink()


def delete_log(path):
    Path(f"{path}-wal").unlink()


def delete_index(path):
    """The index of the log: processes with different ones do not see each other's commits."""
    Path(f"{path}-shm").unlink()


def replace_index(path):
    shutil.copy(f"{path}-shm", f"{path}-copy")
    Path(f"{path}-copy").replace(f"{path}-shm")


def truncate(path):
    os.truncate(path, 0)


ACCIDENTS = [delete, rename, replace_with_copy, delete_with_its_logs, delete_log]
ACCIDENTS += [delete_index, replace_index, truncate]


@pytest.mark.parametrize("happens", ACCIDENTS)
def test_file_that_is_no_longer_the_open_one_fails_loudly(url, path, happens):
    store = connect(url)
    charge, ran = charger(store)
    charge("a")
    happens(path)
    with pytest.raises(DamagedStoreError, match="while this process had it open"):
        charge("x")
    for again in ("y", "x"):  # a claim of "x" may be in the deleted file
        with pytest.raises(DamagedStoreError, match="restore it"):
            charge(again)
    assert ran == ["a"]
    store.close()


def test_deleted_file_is_noticed_by_the_async_side_of_the_store(path):
    """Sync code and each event loop have an engine of their own, for one file."""
    store = SQLStore(f"sqlite+pysqlite:///{path}", create=True)
    charge, ran = charger(store)
    charge("x")
    delete_with_its_logs(path)

    @idempotent(store=store, key="charge:{x}", operation="charge")
    async def charge_async(x):
        ran.append(x)

    with pytest.raises(DamagedStoreError, match="was deleted, renamed or replaced"):
        asyncio.run(charge_async("x"))
    assert ran == ["x"]
    store.close()


def test_symbolic_link_that_points_elsewhere_now_fails_loudly(url, path):
    """A process that starts later follows the link to another file."""
    link = path.parent / "current.db"
    link.symlink_to(path)
    store = connect(url.replace("semel.db", "current.db"))
    charge, ran = charger(store)
    charge("a")
    path.with_name("next.db").touch()
    link.unlink()
    link.symlink_to(path.with_name("next.db"))
    with pytest.raises(DamagedStoreError, match=r"current\.db was deleted, renamed or replaced"):
        charge("x")
    assert ran == ["a"]
    store.close()


def test_record_in_a_replaced_file_is_still_replayed(path):
    """What has happened stays true, whichever file the process reads it from."""
    store = SQLiteStore(path)
    charge, ran = charger(store)
    charge("a")
    path.unlink()
    charge("a")
    assert ran == ["a"]
    store.close()


def test_file_deleted_during_the_claim_is_not_won(path, monkeypatch):
    """The check follows the commit: nothing may happen between the check and the answer."""
    store = SQLiteStore(path)
    charge, ran = charger(store)
    charge("a")
    commits = []

    def commit_then_delete(connection, work):
        result = transact(connection, work)
        if not commits:
            path.unlink()
        commits.append(result)
        return result

    from semel.stores.sqlite import connections

    transact = connections.transact
    monkeypatch.setattr(connections, "transact", commit_then_delete)
    with pytest.raises(DamagedStoreError):
        charge("x")
    assert ran == ["a"]
    store.close()


def test_log_reader_of_a_deleted_file_fails_loudly(path):
    store = SQLiteStore(path)
    log = store.log(SYNC)
    run(log.append("s", b"1", id="1"))
    path.unlink()
    with pytest.raises(DamagedStoreError):
        run(log.read("s"))
    store.close()


@pytest.mark.parametrize("happens", [truncate, delete])
def test_empty_file_beside_a_log_is_not_a_new_store(url, path, happens):
    """SQLite itself would delete the log, and every key would run again."""
    store = connect(url)
    charger(store)[0]("x")
    happens(path)
    path.touch()
    other = subprocess.run(
        [sys.executable, "-c", VISITOR, url, "x"], capture_output=True, text=True, check=False
    )
    assert other.stdout == ""
    assert "is empty, but" in other.stderr
    assert Path(f"{path}-wal").stat().st_size > 0
    store.close()


COMMANDS = [
    ["ledger", "list"],
    ["ledger", "guarantees"],
    ["ledger", "explain", "charge:x"],
    ["ledger", "sweep"],
    ["db", "check"],
    ["db", "init"],
    ["db", "upgrade"],
    ["doctor"],
    ["gateway"],
]


@pytest.mark.parametrize("happens", [truncate, delete])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command_keeps_the_log_of_a_file_that_lost_its_content(path, command, happens):
    """It may be the only copy of the last commits; and without it, the key would run again."""
    url = f"sqlite:///{path}"
    subprocess.run([sys.executable, "-c", KILLED, url, "x"], check=False)
    happens(path)
    wal = Path(f"{path}-wal")
    content = wal.read_bytes()
    assert content
    verb = command[:2] if len(command) > 1 else command
    done = subprocess.run(
        [sys.executable, "-m", "semel", *verb, url, *command[2:]],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    said = (done.stdout + done.stderr).replace("\n", "")
    assert done.returncode != 0
    assert "-wal is not" in said
    assert wal.read_bytes() == content
    assert path.exists() == (happens is truncate)


def test_checkpoint_and_growth_are_not_mistaken_for_replacement(url, path):
    store = connect(url)
    charge, ran = charger(store)
    charge("a")
    with contextlib.closing(sqlite3.connect(path)) as shell:
        shell.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        shell.execute("VACUUM")
    assert not visit(url, "a")
    charge("b")
    store.close()
    assert visit(url, "c")
    charge("d")
    assert ran == ["a", "b", "d"]
    store.close()


# --- backup and journal -------------------------------------------------------------------------


def test_backup_made_by_sqlite_has_every_commit(url, path):
    store = connect(url)
    charger(store)[0]("x")
    copy = path.parent / "copy.db"
    with (
        contextlib.closing(sqlite3.connect(path)) as source,
        contextlib.closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)
    assert not visit(url.replace("semel.db", "copy.db"), "x")
    store.close()


def test_journal_mode_cannot_change_under_an_open_store(url, path):
    store = connect(url)
    charger(store)[0]("x")
    with (
        contextlib.closing(sqlite3.connect(path, timeout=0)) as shell,
        pytest.raises(sqlite3.OperationalError, match="locked"),
    ):
        shell.execute("PRAGMA journal_mode = DELETE")
    store.close()


# --- fork ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_waits_for_a_thread_that_uses_a_connection_of_sql_store(tmp_path):
    path = str(tmp_path / "a.db")
    store = SQLStore(f"sqlite+pysqlite:///{path}", create=True)
    run(store.ledger(SYNC).look(b""))
    started, allowed = threading.Event(), threading.Event()

    async def work(link):
        started.set()
        allowed.wait(10)
        return await link.fetch("SELECT 1")

    lines = store._lines  # the connections of sync code
    thread = threading.Thread(target=lambda: run(lines.use(work)))
    thread.start()
    started.wait(10)
    threading.Timer(0.2, allowed.set).start()
    child = os.fork()
    if child == 0:
        opened = [fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        os._exit(sum(str(name).startswith(path) for name in opened))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join()
    assert [tuple(row) for row in run(lines.use(work))] == [(1,)]
    store.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_commits_survive_the_parents_close(url):
    """A connection open across the fork would leave the child without locks of its own."""
    store = connect(url)
    charge, _ = charger(store)
    charge("a")
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    child = os.fork()
    if child == 0:
        charge("b")
        os.write(from_child, b"1")
        os.read(to_child, 1)
        charge("x")
        os._exit(0)
    os.read(to_parent, 1)
    store.close()
    visit(url, "c")
    os.write(from_parent, b"1")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not visit(url, "x")
    for fd in (to_child, from_parent, to_parent, from_child):
        os.close(fd)


def in_children(work, count):
    """Run `work` in this many forked children; return how each ended, None for one that hangs."""
    ends = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        ends.append(_end_of(child))
    return ends


def _end_of(child, within_s=20.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("closes", [True, False], ids=["closed", "garbage"])
def test_fork_while_other_threads_open_and_close_stores_is_safe(url, path, closes):
    """A child forked in the middle of that hung, or damaged the file."""
    numbers, ended = itertools.count(), threading.Event()

    def come_and_go():
        while not ended.is_set():
            store = connect(url)
            charger(store)[0](f"thread-{next(numbers)}")
            if closes:
                store.close()

    def call_once():
        store = connect(url)
        charger(store)[0](f"child-{os.getpid()}")
        store.close()

    threads = [threading.Thread(target=come_and_go) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert in_children(call_once, 40) == [0] * 40
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    gc.collect()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_with_an_inherited_connection_may_not_open_the_file_again(path, monkeypatch):
    """SQLite would take no locks there: it counts those of the inherited connection."""
    monkeypatch.setattr(connections, "FORK_WAIT_S", 0.01)
    store = SQLiteStore(path)
    cursor = store._connections._take()

    def open_again():
        for url in (f"sqlite:///{path}", f"sqlite+pysqlite:///{path}"):
            with pytest.raises(StoreUnavailableError, match="only after the fork"):
                charger(connect(url))[0]("x")

    assert in_children(open_again, 1) == [0]
    store._connections._give(cursor)
    store.close()


# --- parts beside the store ---------------------------------------------------------------------


def test_relative_path_is_that_of_the_moment_when_the_store_was_made(tmp_path, monkeypatch):
    """Sync code and each event loop open engines of their own, at another time."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = SQLStore("sqlite+pysqlite:///semel.db", create=True)
    charge, ran = charger(store)
    charge("x")
    monkeypatch.chdir(tmp_path / "elsewhere")

    @idempotent(store=store, key="charge:{x}", operation="charge")
    async def charge_async(x):
        ran.append(x)

    async def call():
        await charge_async("x")
        await store.aclose()

    asyncio.run(call())
    assert ran == ["x"]
    assert not any((tmp_path / "elsewhere").iterdir())


def test_workers_through_a_symbolic_link_share_their_file(tmp_path):
    """Otherwise two workers of one group own the same shards."""
    (tmp_path / "größe.db").touch()
    (tmp_path / "link.db").symlink_to(tmp_path / "größe.db")
    beside = {repr(_beside(SQLStore(f"sqlite:///{tmp_path}/{n}"))) for n in ("größe.db", "link.db")}
    assert beside == {repr(SQLiteStore(tmp_path / "größe.db-workers"))}


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_inbox_whose_file_was_replaced_applies_nothing_more(path, is_async):
    """A worker acknowledges what was applied, and the effect would be in a deleted file."""
    init(f"sqlite+pysqlite:///{path}")
    ran = []

    def handle(message, session):
        ran.append(message.id)

    async def handle_async(message, session):
        handle(message, session)

    handle.colour = lambda message: "sync"
    inbox = SQLInbox(f"sqlite+pysqlite:///{path}")
    used = handle_async if is_async else handle
    assert await inbox.apply("billing", [message("orders", 1)], used) == [Applied()]
    delete_with_its_logs(path)
    for number in (2, 3):
        with pytest.raises(DamagedStoreError, match="was deleted"):
            await inbox.apply("billing", [message("orders", number)], used)
    assert ran == ["orders-1"]
    await inbox.aclose()


def test_file_without_its_header_is_damaged_and_not_unavailable(url, path):
    """With `on_unavailable="run"` a call runs without its record, but not beside a damaged one."""
    visit(url, "x")
    with path.open("r+b") as file:
        file.write(b"garbage!" * 12)

    def charge(x):
        raise AssertionError("it ran again")

    with pytest.raises(DamagedStoreError, match="damaged"):
        idempotent(store=connect(url), key="charge:{x}", on_unavailable="run")(charge)("x")


# --- permissions --------------------------------------------------------------------------------


def make_with_store(path):
    return SQLiteStore(path)


def make_with_init(path):
    return init(f"sqlite+pysqlite:///{path}")


def make_with_sql_store(path):
    store = SQLStore(f"sqlite:///{path}", create=True)
    charger(store)[0]("a")
    return store


async def _call_once(store):
    @idempotent(store=store)
    async def charge():
        pass

    await charge()
    await store.aclose()


def make_with_async_sql_store(path):
    asyncio.run(_call_once(SQLStore(f"sqlite:///{path}", create=True)))


def make_with_broker(path):
    return SQLiteBroker(path)


def make_with_intents(path):
    return Intents(path)


def make_with_command(path):
    command = [sys.executable, "-m", "semel", "db", "init", f"sqlite+pysqlite:///{path}"]
    subprocess.run(command, check=True, capture_output=True)


MAKERS = [
    make_with_store,
    make_with_init,
    make_with_sql_store,
    make_with_async_sql_store,
    make_with_broker,
    make_with_intents,
    make_with_command,
]


@pytest.mark.parametrize("make", MAKERS)
def test_new_file_is_accessible_to_its_owner_only(path, make):
    before = os.umask(0o022)
    try:
        kept = make(path)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(each.stat().st_mode) for each in path.parent.glob("semel.db*")}
    assert modes == {0o600}
    del kept


def test_permissions_of_a_file_that_exists_are_left_alone(path):
    """It may be the application's, which other users share."""
    path.touch(0o660)
    path.chmod(0o660)
    SQLiteStore(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


# --- URLs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "SQLITE:///"])
def test_url_without_a_path_is_refused(url):
    """It used to open a store in memory, so two processes both ran the body."""
    with pytest.raises(
        SettingsError, match=r"sqlite:///semel\.db for a file, or sqlite:///:memory:"
    ):
        connect(url)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///{}?timeout=5",
        "sqlite:///{}?mode=ro",
        "sqlite:///{}#1",
        "sqlite+pysqlite:///{}?timeout=5",
        "sqlite+pysqlite:///{}?nolock=1&uri=true",
        "file://{}?fsync=no",
    ],
)
def test_url_with_an_option_is_refused(path, url):
    with pytest.raises(SettingsError, match="option"):
        connect(url.format(path))
    assert not path.exists()
