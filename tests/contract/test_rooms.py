"""Rooms on every store that has a log."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import pytest

from semel.stores import MemoryStore, SQLiteStore
from semel.stores.redis import RedisStore
from semel.stores.sql import SQLStore, init
from semel.testing.rooms import RoomsContract
from support.process import fast_folder


class TestMemoryRooms(RoomsContract):
    @pytest.fixture
    async def store(self):
        store = MemoryStore()
        yield store
        await store.aclose()

    async def another(self, store):
        """Return the same one, because two in memory share no records."""
        return store


class TestSQLiteRooms(RoomsContract):
    @pytest.fixture
    async def store(self):
        with TemporaryDirectory(dir=fast_folder()) as folder:
            store = SQLiteStore(f"{folder}/log.db")
            yield store
            await store.aclose()

    async def another(self, store):
        return SQLiteStore(store._path)


class OnServer(RoomsContract):
    """`fixture` names the one that gives the URL of an empty store."""

    fixture = ""
    made = RedisStore

    @pytest.fixture
    async def store(self, request):
        self.url = request.getfixturevalue(self.fixture)
        store = self.made(self.url)
        yield store
        await store.aclose()

    async def another(self, store):
        return self.made(self.url)


class TestRedisRooms(OnServer):
    fixture = "redis_url"


class TestValkeyRooms(OnServer):
    fixture = "valkey_url"


class TestClusterRooms(OnServer):
    fixture = "redis_cluster_url"


class OnSQL(OnServer):
    made = SQLStore


class TestPostgresRooms(OnSQL):
    fixture = "postgres_tables_url"


class TestPgBouncerRooms(OnSQL):
    """PostgreSQL behind a pooler in transaction mode: LISTEN is replaced by polling."""

    fixture = "pgbouncer_tables_url"


class TestMariaDBRooms(OnSQL):
    fixture = "mariadb_tables_url"


class TestSQLRoomsOnSQLite(OnSQL):
    """By SQLAlchemy, which has a file's log, too."""

    @pytest.fixture
    async def store(self):
        with TemporaryDirectory(dir=fast_folder()) as folder:
            init(url := f"sqlite:///{folder}/log.db")
            self.url = url
            store = SQLStore(url)
            yield store
            await store.aclose()
