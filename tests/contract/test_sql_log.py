"""The log's and the bell's contract on PostgreSQL, MariaDB and SQLite."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, closing
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from semel.stores.sql import SQLStore, init
from semel.stores.sql.lines import open_engine, parse
from semel.stores.sql.log_tables import LOG_TABLES
from semel.testing.bells import BellContract
from semel.testing.logs import BreakingLogContract
from support.fixtures_servers import LATIN1, SQL_ASCII
from support.process import fast_folder

pytestmark = pytest.mark.contract

OLDER = {
    "postgresql": "{c} = {c} - {s} * interval '1 second'",
    "mysql": "{c} = {c} - INTERVAL {s} SECOND",
    "sqlite": "{c} = strftime('%Y-%m-%d %H:%M:%f', {c}, (- {s}) || ' seconds') || '000'",
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
    """The database, beside the store. Tables, and a store for the sync colour, are made once."""

    def __init__(self, url):
        self.url = url
        self._engine = open_engine(parse(url))
        self.name = self._engine.dialect.name.replace("mariadb", "mysql")
        self._connection = self._engine.connect()
        self.sync_store = self.open()

    def open(self):
        store: Any = SQLStore(self.url)
        store.desk = self
        return store

    def do(self, statement):
        percent = "%" if self.name == "sqlite" else "%%"
        return self._connection.exec_driver_sql(statement.replace("%", percent))

    def count(self, table):
        return self.do(f"SELECT count(*) FROM {table}").scalar_one()

    def age(self, seconds):
        for table, columns in AGING.items():
            sets = [OLDER[self.name].format(c=column, s=seconds) for column in columns]
            self.do(f"UPDATE {table} SET {', '.join(sets)}")

    def empty(self):
        self.do("BEGIN")
        for table in LOG_TABLES:
            self.do(f"DELETE FROM {table.name}")
        self.do("COMMIT")

    def close(self):
        self.sync_store.close()
        self._connection.close()
        self._engine.dispose()


@pytest.fixture(scope="module")
def postgres(postgres_server, tables):
    with closing(Desk(tables.emptied(postgres_server))) as desk:
        yield desk


@pytest.fixture(scope="module")
def pgbouncer(pgbouncer_server, tables):
    with closing(Desk(tables.emptied(pgbouncer_server))) as desk:
        yield desk


@pytest.fixture(scope="module")
def latin1(postgres_server, tables):
    with closing(Desk(tables.emptied(postgres_server, LATIN1))) as desk:
        yield desk


@pytest.fixture(scope="module")
def sql_ascii(postgres_server, tables):
    with closing(Desk(tables.emptied(postgres_server, SQL_ASCII))) as desk:
        yield desk


@pytest.fixture(scope="module")
def mariadb(mariadb_server, tables):
    with closing(Desk(tables.emptied(mariadb_server))) as desk:
        yield desk


@pytest.fixture(scope="module")
def sqlite():
    with TemporaryDirectory(dir=fast_folder()) as folder:
        init(url := f"sqlite:///{folder}/log.db")
        with closing(Desk(url)) as desk:
            yield desk


class OnSQL:
    database = ""

    @pytest.fixture
    async def store(self, request, colour):
        desk = request.getfixturevalue(self.database)
        desk.empty()
        if colour.name == "sync":
            yield desk.sync_store
            return
        store = desk.open()
        yield store
        await store.aclose()

    async def another(self, store):
        return store.desk.open()


class LogOnSQL(OnSQL, BreakingLogContract):
    examples = 8
    parts = tuple(table.name for table in LOG_TABLES)

    async def age(self, store, seconds):
        await asyncio.to_thread(store.desk.age, seconds)

    async def streams_left(self, store):
        return store.desk.count("semel_stream")

    async def ids_left(self, store):
        return store.desk.count("semel_mark")

    @asynccontextmanager
    async def breaking(self, store, part):
        store.desk.do(BROKEN[store.desk.name].format(t=part))
        try:
            yield
        finally:
            store.desk.do(MENDED[store.desk.name].format(t=part))


class TestPostgresLog(LogOnSQL):
    database = "postgres"


class TestPgBouncerLog(LogOnSQL):
    """PostgreSQL behind a pooler in transaction mode."""

    database = "pgbouncer"


class TestLatin1Log(LogOnSQL):
    database = "latin1"


class TestSQLASCIILog(LogOnSQL):
    database = "sql_ascii"


class TestMariaDBLog(LogOnSQL):
    database = "mariadb"


class TestSQLiteLog(LogOnSQL):
    database = "sqlite"


class TestPostgresBell(OnSQL, BellContract):
    database = "postgres"


class TestSQLASCIIBell(OnSQL, BellContract):
    database = "sql_ascii"


class TestPgBouncerBell(OnSQL, BellContract):
    """It polls, because LISTEN does not work there."""

    database = "pgbouncer"


# The two have the same bell, so each has one colour of who rings it.
class TestMariaDBBell(OnSQL, BellContract):
    database = "mariadb"
    colours = ("async",)


class TestSQLiteBell(OnSQL, BellContract):
    database = "sqlite"
    colours = ("sync",)
