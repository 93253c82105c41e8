from __future__ import annotations

import contextlib

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


def counted(store, select):
    count = f"SELECT count(*) FROM ({select})"
    return store._connections.read(lambda connection: connection.execute(count).fetchone()[0])


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
        tables = ("semel_stream", "semel_log", "semel_mark", "semel_fence", "semel_field")
        return counted(store, " UNION ".join(f"SELECT number FROM {table}" for table in tables))

    async def ids_left(self, store):
        return counted(store, "SELECT * FROM semel_mark")

    @contextlib.asynccontextmanager
    async def breaking(self, store, part):
        broken = "BEGIN SELECT RAISE(ABORT, 'broken'); END"
        changed(store, f"CREATE TRIGGER broken BEFORE {TABLES[part]} {broken}")
        try:
            yield
        finally:
            changed(store, "DROP TRIGGER broken")


class TestSQLiteMemoryLog(TestSQLiteLog):
    """One connection for all threads: what is new here is new to the colour that has them."""

    colours = ("async",)

    @pytest.fixture
    async def store(self):
        store = SQLiteStore(":memory:", clock=FakeClock())
        yield store
        await store.aclose()

    async def another(self, store):
        return store


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

    async def another(self, store):
        """Return the same one, because two in memory share no records."""
        return store
