"""The log's and the bell's contract on PostgreSQL, MariaDB and SQLite."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from typing import Any

import pytest

from semel.stores.sql import SQLStore, init
from semel.stores.sql.lines import open_engine, parse
from semel.stores.sql.log_tables import LOG_TABLES
from semel.testing.bells import BellContract
from semel.testing.logs import BreakingLogContract

pytestmark = pytest.mark.contract

OLDER = {
    "postgresql": "{c} = {c} - {s} * interval '1 second'",
    "mysql": "{c} = {c} - INTERVAL {s} SECOND",
    "sqlite": "{c} = strftime('%Y-%m-%d %H:%M:%f', {c}, '-{s} seconds') || '000'",
}
AGING = {"semel_stream": ("gone_at", "until_at", "due_at"), "semel_mark": ("until_at",)}

BROKEN = {
    "postgresql": "ALTER TABLE {t} ADD CONSTRAINT broken CHECK (false) NOT VALID",
    "mysql": "CREATE TRIGGER broken BEFORE INSERT ON {t} FOR EACH ROW "
    "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'broken'",
    "sqlite": "CREATE TRIGGER broken BEFORE INSERT ON {t} BEGIN SELECT RAISE(ABORT, 'broken'); END",
}
MENDED = {
    "postgresql": "ALTER TABLE {t} DROP CONSTRAINT broken",
    "mysql": "DROP TRIGGER broken",
    "sqlite": "DROP TRIGGER broken",
}


class Desk:
    """The database, beside the store; its tables are made once."""

    def __init__(self, url):
        self.url = url
        self._engine = open_engine(parse(url))
        self.name = self._engine.dialect.name.replace("mariadb", "mysql")
        self._connection = self._engine.connect()

    def do(self, statement):
        return self._connection.exec_driver_sql(statement.replace("%", self._percent))

    @property
    def _percent(self):
        return "%" if self.name == "sqlite" else "%%"

    def count(self, table):
        return self.do(f"SELECT count(*) FROM {table}").scalar_one()

    def age(self, seconds):
        for table, columns in AGING.items():
            sets = [OLDER[self.name].format(c=column, s=seconds) for column in columns]
            self.do(f"UPDATE {table} SET {', '.join(sets)}")

    def empty(self):
        for table in LOG_TABLES:
            self.do(f"DELETE FROM {table.name}")

    def close(self):
        self._connection.close()
        self._engine.dispose()


@pytest.fixture(scope="module")
def postgres_desk(postgres_server, tables):
    desk = Desk(tables.emptied(postgres_server))
    yield desk
    desk.close()


@pytest.fixture(scope="module")
def mariadb_desk(mariadb_server, tables):
    desk = Desk(tables.emptied(mariadb_server))
    yield desk
    desk.close()


@pytest.fixture(scope="module")
def made_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.db"
    init(f"sqlite:///{path}")
    return path


class OnPostgres:
    @pytest.fixture
    def desk(self, postgres_desk):
        postgres_desk.empty()
        return postgres_desk


class OnMariaDB:
    @pytest.fixture
    def desk(self, mariadb_desk):
        mariadb_desk.empty()
        return mariadb_desk


class OnSQLite:
    @pytest.fixture
    def desk(self, made_file, tmp_path):
        desk = Desk(f"sqlite:///{shutil.copy(made_file, tmp_path)}")
        yield desk
        desk.close()


class OnSQL:
    @pytest.fixture
    async def store(self, desk):
        store: Any = SQLStore(desk.url)
        store.desk = desk
        yield store
        await store.aclose()

    async def another(self, store):
        return SQLStore(store.desk.url)


class LogOnSQL(OnSQL, BreakingLogContract):
    examples = 10
    parts = tuple(table.name for table in LOG_TABLES)

    async def age(self, store, seconds):
        await asyncio.to_thread(store.desk.age, seconds)

    async def streams_left(self, store):
        return store.desk.count("semel_stream")

    @asynccontextmanager
    async def breaking(self, store, part):
        store.desk.do(BROKEN[store.desk.name].format(t=part))
        try:
            yield
        finally:
            store.desk.do(MENDED[store.desk.name].format(t=part))


class TestPostgresLog(OnPostgres, LogOnSQL):
    pass


class TestMariaDBLog(OnMariaDB, LogOnSQL):
    pass


class TestSQLiteLog(OnSQLite, LogOnSQL):
    pass


class TestPostgresBell(OnPostgres, OnSQL, BellContract):
    pass


class TestMariaDBBell(OnMariaDB, OnSQL, BellContract):
    pass


class TestSQLiteBell(OnSQLite, OnSQL, BellContract):
    pass
