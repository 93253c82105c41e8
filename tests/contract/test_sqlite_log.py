from __future__ import annotations

import contextlib
import sqlite3

import pytest

from semel.stores.sqlite import SQLiteStore
from semel.testing.bells import BellContract
from semel.testing.clock import FakeClock
from semel.testing.logs import BreakingLogContract

TABLES = {
    "stream": "UPDATE ON semel_stream",
    "entry": "INSERT ON semel_log",
    "mark": "INSERT ON semel_mark",
    "fence": "INSERT ON semel_fence",
    "state": "INSERT ON semel_field",
    "serial": "UPDATE ON semel_log_layout",
}


def changed(store, statement):
    store._connections.write(lambda connection: connection.execute(statement))


class TestSQLiteLog(BreakingLogContract):
    examples = 10  # every step of a history waits for the disk
    parts = tuple(TABLES)

    @pytest.fixture
    async def store(self, tmp_path):
        store = SQLiteStore(tmp_path / "log.db", clock=FakeClock())
        yield store
        await store.aclose()

    async def another(self, store):
        return SQLiteStore(store._path, clock=store._streams._clock)

    async def age(self, store, seconds):
        store._streams._clock.advance(seconds)

    async def streams_left(self, store):
        with contextlib.closing(sqlite3.connect(store._path)) as shell:
            tables = ("semel_stream", "semel_log", "semel_mark", "semel_fence", "semel_field")
            union = " UNION ".join(f"SELECT number FROM {table}" for table in tables)
            return shell.execute(f"SELECT count(*) FROM ({union})").fetchone()[0]

    @contextlib.asynccontextmanager
    async def breaking(self, store, part):
        broken = "BEGIN SELECT RAISE(ABORT, 'broken'); END"
        changed(store, f"CREATE TRIGGER broken BEFORE {TABLES[part]} {broken}")
        try:
            yield
        finally:
            changed(store, "DROP TRIGGER broken")


class TestSQLiteMemoryLog(TestSQLiteLog):
    examples = 20

    @pytest.fixture
    async def store(self):
        store = SQLiteStore(":memory:", clock=FakeClock())
        yield store
        await store.aclose()

    async def another(self, store):
        return store

    async def streams_left(self, store):
        return None


class TestSQLiteBell(BellContract):
    @pytest.fixture
    async def store(self, tmp_path):
        store = SQLiteStore(tmp_path / "log.db")
        yield store
        await store.aclose()

    async def another(self, store):
        return SQLiteStore(store._path)


class TestSQLiteMemoryBell(BellContract):
    @pytest.fixture
    async def store(self):
        store = SQLiteStore(":memory:")
        yield store
        await store.aclose()
