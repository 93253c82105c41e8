"""What is particular to the log in a SQLite file: its tables, its room, its bell."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3

import pytest

from semel.brokers import SQLiteBroker
from semel.colour import ASYNC, SYNC, run
from semel.entries import Appended, Keep, Replace
from semel.errors import CorruptRecordError, SettingsError
from semel.keys import make_key
from semel.stores.sqlite import SQLiteStore, bell, log_schema, streams
from semel.testing.bells import Ear, bell_of
from semel.testing.clock import FakeClock
from semel.testing.traffic import Sender
from semel.values import Done, Outcome, Terms

STREAM = "job-1"
TERMS = Terms(lease_s=30, ttl_s=600)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "semel.db"


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(path, clock):
    with contextlib.closing(SQLiteStore(path, clock=clock)) as store:
        yield store


@pytest.fixture
def log(store):
    return store.log(SYNC)


def put(log, id, stream=STREAM, **more):
    answer = run(log.append(stream, b"x", id=id, **more))
    assert isinstance(answer, Appended)
    return answer.position


def asked(path, select):
    with contextlib.closing(sqlite3.connect(path)) as shell:
        return shell.execute(select).fetchall()


def said(path, statement):
    with contextlib.closing(sqlite3.connect(path)) as shell, shell:
        shell.execute(statement)


def tables(path):
    return {name for (name,) in asked(path, "SELECT name FROM sqlite_schema WHERE type = 'table'")}


# --- the file -----------------------------------------------------------------------------------


def test_a_file_without_a_log_gets_one_and_keeps_its_records(path):
    key = make_key("order-1")
    with contextlib.closing(SQLiteStore(path)) as old:
        ledger = old.ledger(SYNC)
        claim = run(ledger.claim(key, attempt="a", terms=TERMS)).claim
        run(ledger.complete(claim, Outcome("value", b"1")))
    assert not any(name.startswith("semel") for name in tables(path)), "nobody asked for a log"
    with contextlib.closing(SQLiteStore(path)) as store:
        put(store.log(SYNC), "a")
        assert isinstance(run(store.ledger(SYNC).claim(key, attempt="b", terms=TERMS)), Done)
    with contextlib.closing(SQLiteStore(path)) as store:
        assert put(store.log(SYNC), "b").offset == 2
    assert asked(path, "PRAGMA user_version") == [(1,)], "for an earlier Semel that has the ledger"


def test_whoever_comes_second_makes_no_tables(path, store, log, monkeypatch):
    put(log, "a")
    monkeypatch.setattr(log_schema, "is_there", lambda connection, path: False)
    with contextlib.closing(SQLiteStore(path)) as other:
        assert put(other.log(SYNC), "b").offset == 2


def test_the_log_of_a_later_semel_is_refused(path, store, log):
    said(path, "UPDATE semel_log_layout SET version = 2")
    with contextlib.closing(SQLiteStore(path)) as other:
        other.ledger(SYNC)
        for ask in (lambda: other.log(SYNC), other.bell):
            with pytest.raises(SettingsError, match=r"has version 2.*upgrade Semel"):
                ask()


async def test_ledger_log_and_broker_share_a_file(path):
    broker = SQLiteBroker(path)
    store = SQLiteStore(path)
    await Sender(broker, "orders").send(1, 2)
    answer = await store.log(ASYNC).append(STREAM, b"x", id="a")
    assert isinstance(answer, Appended)
    await Sender(broker, "orders").send(1, 2)
    for each in (store, broker):
        await each.aclose()
    for opened in (SQLiteStore(path), SQLiteBroker(path)):
        await opened.aclose()


def test_readers_do_not_wait_for_a_writer(path, store, log):
    head = put(log, "a", state=Replace(b"s"))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as shell:
        shell.execute("BEGIN IMMEDIATE")
        shell.execute("DELETE FROM semel_log")
        assert len(run(log.read(STREAM)).entries) == 1
        assert run(log.load(STREAM)).state == b"s"
        assert run(log.heads([STREAM])) == [head]


def test_entries_that_are_missing_are_never_a_silent_hole(path, log):
    for id in "abcd":
        put(log, id)
    said(path, "DELETE FROM semel_log WHERE position = 3")
    assert len(run(log.read(STREAM, limit=2)).entries) == 2
    with pytest.raises(CorruptRecordError, match="behind 0 are missing"):
        run(log.read(STREAM))
    said(path, "DELETE FROM semel_log WHERE position > 2")
    with pytest.raises(CorruptRecordError, match="missing"):
        run(log.read(STREAM))


# --- room ---------------------------------------------------------------------------------------


def counts(path):
    names = ("semel_stream", "semel_log", "semel_mark", "semel_fence", "semel_field")
    return [asked(path, f"SELECT count(*) FROM {name}")[0][0] for name in names]


def fill(log, stream, count, **more):
    for n in range(count):
        put(log, f"e{n}", stream, state=Replace(b"s"), fences={"p": n}, **more)


def test_a_sweep_empties_what_is_gone_and_drops_what_is_over(path, log, clock):
    keep = Keep(ended_s=10, ids_s=100)
    fill(log, "ends", 3, keep=keep)
    put(log, "z", "ends", ends=True, keep=keep)
    fill(log, "stays", 2)
    assert counts(path) == [2, 6, 6, 2, 2]
    assert run(log.sweep()) == 0
    clock.advance(11)
    assert [run(log.sweep()), run(log.sweep())] == [1, 0]
    assert counts(path) == [2, 2, 6, 2, 1]
    clock.advance(100)
    assert [run(log.sweep()), run(log.sweep())] == [1, 0]
    assert counts(path) == [1, 2, 2, 1, 1]


def test_a_large_stream_is_swept_in_several_transactions(path, log, clock, monkeypatch):
    monkeypatch.setattr(streams, "SWEEP_ROWS", 4)
    fill(log, "old", 9, keep=Keep(idle_s=10))
    clock.advance(11)
    assert run(log.sweep()) == 1
    assert counts(path) == [0, 0, 0, 0, 0]


def test_a_stream_that_is_swept_in_part_is_no_hole_when_the_clock_goes_back(path, log, clock):
    keep = Keep(ended_s=10, ids_s=100)
    fill(log, "over", 60, keep=Keep(idle_s=10))
    clock.advance(11)
    put(log, "a", "new")
    assert counts(path)[1] == 11
    fill(log, "ends", 60, keep=keep)
    first = put(log, "z", "ends", ends=True, keep=keep)
    assert run(log.sweep()) == 1
    clock.advance(11)
    put(log, "b", "newer")
    clock.advance(-21)
    assert counts(path)[1] == 13
    assert run(log.read("over")).life == "unknown"
    assert (run(log.read("ends")).lost, run(log.read("ends", first)).lost) == (True, False)
    assert put(log, "a", "over").offset == 1


def test_many_streams_are_swept_in_several_transactions(path, log, clock, monkeypatch):
    monkeypatch.setattr(streams, "SWEEP_STREAMS", 2)
    for n in range(5):
        fill(log, f"old{n}", 1, keep=Keep(idle_s=10))
    clock.advance(11)
    assert [run(log.sweep(limit=3)), run(log.sweep()), run(log.sweep())] == [3, 2, 0]
    assert counts(path) == [0, 0, 0, 0, 0]


def test_a_stream_that_begins_anew_leaves_the_old_one_to_the_sweep(path, log, clock, monkeypatch):
    """Or the first append of the new one would wait for all of the old."""
    monkeypatch.setattr(streams, "SWEEP_ROWS_PER_STREAM", 5)
    fill(log, STREAM, 30, keep=Keep(idle_s=10))
    clock.advance(11)
    assert put(log, "e0").offset == 1
    assert counts(path)[1:3] == [26, 31]
    assert [entry.id for entry in run(log.read(STREAM)).entries] == ["e0"]
    assert run(log.sweep()) == 1
    assert counts(path) == [1, 1, 1, 0, 0]


# --- the bell -----------------------------------------------------------------------------------


def test_what_this_store_has_rung_for_is_not_told_again(path, store, log):
    watch = bell.Watch(store._connections, store._streams)
    assert not watch.look()
    assert watch.glance(), "this connection was not asked before"
    assert not watch.glance()
    put(log, "a")
    assert not watch.look()
    with contextlib.closing(SQLiteStore(path)) as other:
        put(other.log(SYNC), "b")
        assert watch.glance()
        assert watch.look() == [STREAM]
        assert not watch.look()
        put(other.log(SYNC), "a", "job-2")
        put(log, "c")
        assert watch.look() == ["job-2"]
        put(log, "d")
        put(other.log(SYNC), "e")
        assert watch.look() == [STREAM]


async def test_a_bell_looks_only_while_somebody_listens(path, monkeypatch):
    monkeypatch.setattr(bell, "LOOK_S", 0.001)
    store = SQLiteStore(path)
    ear = Ear()
    async with bell_of(store) as listening:
        await listening.listen(STREAM, ear.wake)
        looking = listening._looking
        await listening.leave(STREAM, ear.wake)
        await asyncio.wait_for(looking, 5)
        with contextlib.closing(SQLiteStore(path)) as other:
            put(other.log(SYNC), "a")
        await listening.listen(STREAM, ear.wake)
        with contextlib.closing(SQLiteStore(path)) as other:
            put(other.log(SYNC), "b")
        await ear.hears()
    await store.aclose()


async def test_a_file_from_a_backup_wakes_everybody(path, monkeypatch):
    monkeypatch.setattr(bell, "LOOK_S", 0.001)
    store = SQLiteStore(path)
    for n in range(3):
        await store.log(ASYNC).append(STREAM, b"x", id=f"e{n}")
    ear = Ear()
    async with bell_of(store) as listening:
        await listening.listen(STREAM, ear.wake)
        said(path, "UPDATE semel_log_layout SET serial = 1")
        await ear.hears()
    await store.aclose()


async def test_a_crowd_of_changes_wakes_everybody(path, monkeypatch):
    monkeypatch.setattr(bell, "LOOK_S", 0.001)
    monkeypatch.setattr(streams, "MOST_CHANGED", 2)
    store = SQLiteStore(path)
    ear = Ear()
    with contextlib.closing(SQLiteStore(path)) as other:
        async with bell_of(store) as listening:
            for n in range(3):
                put(other.log(SYNC), "a", f"s{n}")
            await listening.listen("s2", ear.wake)
            await ear.hears()
    await store.aclose()
