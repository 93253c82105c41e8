"""Processes that append to one SQLite file, and are killed while they do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sqlite3

import pytest

from semel.colour import ASYNC, SYNC, run
from semel.entries import Appended, Field, FieldValue, Keep, Repeated
from semel.errors import StoreUnavailableError
from semel.stores.sqlite import SQLiteStore, bell
from semel.testing.bells import Ear
from support.child import Child, kill_before

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

STREAM = "job-1"

# The third of these: it trims, has a fence and a field, and keeps a reply.
KEEP = Keep(entries=2)


@contextlib.contextmanager
def opened(path):
    with contextlib.closing(SQLiteStore(path)) as store:
        yield store


def append(log, number):
    return run(
        log.append(
            STREAM,
            b"%d" % number,
            id=f"e{number}",
            fences={"p": number},
            state=Field("f", number, b"%d" % number),
            reply=b"r%d" % number,
            keep=KEEP,
        )
    )


def dies(path, nth, writer):
    with opened(path) as store:
        log = store.log(SYNC)
        kill_before(store._connections, nth)
        append(log, 3)
        os.write(writer, b"told")


def check_the_books(path):
    """What one table says is what the others do."""
    with contextlib.closing(sqlite3.connect(path)) as shell:
        head, floor, tag = shell.execute(
            "SELECT head, floor, head_tag FROM semel_stream"
        ).fetchone()
        entries = shell.execute("SELECT position, tag FROM semel_log ORDER BY position").fetchall()
        assert [position for position, _ in entries] == [*range(floor + 1, head + 1)]
        assert entries[-1] == (head, tag)
        assert shell.execute("SELECT count(*) FROM semel_mark").fetchone() == (head,)
        for table, column in (("semel_fence", "fence"), ("semel_field", "rank")):
            assert shell.execute(f"SELECT {column} FROM {table}").fetchall() == [(head,)]
        assert shell.execute("SELECT serial FROM semel_log_layout").fetchone() == (head,)


def test_an_append_killed_before_any_statement_is_there_wholly_or_not_at_all(tmp_path):
    seen = set()
    for nth in itertools.count(1):
        path = tmp_path / f"{nth}.db"
        with opened(path) as store:
            for number in (1, 2):
                append(store.log(SYNC), number)
        reader, writer = os.pipe()
        with Child(lambda nth=nth, path=path, writer=writer: dies(path, nth, writer)) as child:
            code = child.end()
        os.close(writer)
        told = os.read(reader, 10)
        os.close(reader)
        assert code in {0, -signal.SIGKILL}
        check_the_books(path)
        with opened(path) as store:
            log = store.log(SYNC)
            there = run(log.load(STREAM)).position.offset
            assert there in {2, 3}
            assert there == 3 or not told
            seen.add(there)
            again = append(log, 3)
            assert (type(again), again.reply) == ({2: Appended, 3: Repeated}[there], b"r3")
            assert run(log.load(STREAM)).fields == {"f": FieldValue(3, b"3")}
        check_the_books(path)
        if code == 0:
            break
    assert nth > 10
    assert seen == {2, 3}


def test_processes_that_append_to_one_file_make_no_gap_and_no_twin(tmp_path):
    """Two of them share their ids, and one of each pair is killed on its way."""
    path, each = tmp_path / "log.db", 40

    def write(name):
        with opened(path) as store:
            log = store.log(SYNC)
            for n in range(each):
                run(log.append(STREAM, b"%d" % n, id=f"{name}-{n}"))

    with opened(path) as store, contextlib.ExitStack() as stack:
        log = store.log(SYNC)
        children = [
            stack.enter_context(Child(lambda name=name: write(name))) for name in ("a", "a", "b")
        ]
        after, seen = None, []
        while len(seen) < 2 * each:
            page = run(log.read(STREAM, after, limit=7))
            assert not page.lost
            seen += page.entries
            after = seen[-1].position if seen else None
            if len(seen) > 10:
                children[0].kill()
        assert [child.end() for child in children[1:]] == [0, 0]
        assert run(log.read(STREAM, after)).entries == ()
    assert [entry.position.offset for entry in seen] == [*range(1, 2 * each + 1)]
    for name in "ab":
        ours = [entry.id for entry in seen if entry.id.startswith(name)]
        assert ours == [f"{name}-{n}" for n in range(each)]


async def test_an_append_of_another_process_rings(tmp_path):
    path = tmp_path / "log.db"
    store = SQLiteStore(path)
    listening = store.bell()
    ears = [Ear() for _ in range(3)]
    for number, ear in enumerate(ears):
        await listening.listen(f"job-{number}", ear.wake)

    def write(number):
        with opened(path) as other:
            run(other.log(SYNC).append(f"job-{number}", b"x", id="a"))

    for number, ear in enumerate(ears):
        with Child(lambda number=number: write(number)) as child:
            assert await asyncio.to_thread(child.end) == 0
        await ear.hears()
    assert [ear.rings for ear in ears] == [1, 1, 1]
    await listening.aclose()
    await store.aclose()


async def test_a_bell_that_was_deaf_wakes_everybody_when_it_hears_again(tmp_path, monkeypatch):
    monkeypatch.setattr(bell, "LOOK_S", 0.001)
    store = SQLiteStore(tmp_path / "log.db")
    ear, looks = Ear(), 0

    def broken(*_):
        nonlocal looks
        looks += 1
        raise StoreUnavailableError("locked")

    listening = store.bell()
    for verb in ("data_version", "read"):
        monkeypatch.setattr(store._connections, verb, broken)
    await listening.listen(STREAM, ear.wake)
    while looks < 3:
        await asyncio.sleep(0)
    with opened(store._path) as other:
        append(other.log(SYNC), 1)
    assert ear.rings == 0
    monkeypatch.undo()
    await ear.hears()
    await listening.aclose()
    await store.aclose()


def test_a_child_of_a_fork_goes_on_with_its_parents_log(tmp_path):
    with opened(tmp_path / "log.db") as store:
        log = store.log(ASYNC)

        async def add(id):
            answer = await log.append(STREAM, b"x", id=id)
            assert isinstance(answer, Appended)
            return answer.position.offset

        assert asyncio.run(add("a")) == 1
        with Child(lambda: asyncio.run(add("b"))) as child:
            assert child.end() == 0
        assert asyncio.run(add("c")) == 3
        asyncio.run(store.aclose())
