"""The inbox contract in memory, and on PostgreSQL, MariaDB and SQLite by URL and by engine."""

from __future__ import annotations

import asyncio

import pytest

from semel.inbox import MemoryInbox
from semel.testing.clock import FakeClock
from semel.testing.inboxes import InboxContract
from support.fixtures_servers import LATIN1, SQL_ASCII
from support.inbox_bench import INSERT, close, database, file_database

pytestmark = pytest.mark.contract


class TestMemoryInbox(InboxContract):
    @pytest.fixture
    def inbox(self):
        self.clock = FakeClock()
        return MemoryInbox(retry=self.retry, clock=self.clock)

    def effect(self, session, message):
        session.append(self.said(message))

    async def effects(self, inbox):
        return inbox.effects

    async def age(self, inbox, seconds):
        self.clock.advance(seconds)

    def another(self, inbox):
        """Return the same one, because two in memory share no records."""
        return inbox


class TestMemoryInboxWithSyncHandlers(TestMemoryInbox):
    colour = "sync"


# --- SQL ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def postgres_bench(postgres_server):
    with database(postgres_server) as bench:
        yield bench


@pytest.fixture(scope="module")
def pgbouncer_bench(pgbouncer_server):
    with database(pgbouncer_server) as bench:
        yield bench


@pytest.fixture(scope="module")
def latin1_bench(postgres_server):
    with database(postgres_server, LATIN1) as bench:
        yield bench


@pytest.fixture(scope="module")
def sql_ascii_bench(postgres_server):
    with database(postgres_server, SQL_ASCII) as bench:
        yield bench


@pytest.fixture(scope="module")
def mariadb_bench(mariadb_server):
    with database(mariadb_server) as bench:
        yield bench


@pytest.fixture(scope="module")
def sqlite_bench(tmp_path_factory):
    with file_database(tmp_path_factory.mktemp("inbox")) as bench:
        yield bench


class SQLContract(InboxContract):
    kind = "url"

    @pytest.fixture
    async def inbox(self, bench):
        self.bench = bench
        self.opened = [bench.open(self.kind, retry=self.retry)]
        yield self.opened[0]
        for inbox in self.opened:
            await close(inbox)

    def another(self, inbox):
        self.opened.append(self.bench.open(self.kind, retry=self.retry))
        return self.opened[-1]

    def effect(self, session, message):
        return session.execute(INSERT, {"said": self.said(message)})

    async def effects(self, inbox):
        return await asyncio.to_thread(self.bench.effects)

    async def age(self, inbox, seconds):
        await asyncio.to_thread(self.bench.age, seconds)


class OnPostgres(SQLContract):
    @pytest.fixture
    def bench(self, postgres_bench):
        return postgres_bench


class TestPostgresLatin1(SQLContract):
    """In a database whose encoding lacks characters, by URL, with async handlers."""

    @pytest.fixture
    def bench(self, latin1_bench):
        return latin1_bench


class TestPostgresLatin1Engine(TestPostgresLatin1):
    kind = colour = "sync"


class TestPostgresSQLASCII(SQLContract):
    @pytest.fixture
    def bench(self, sql_ascii_bench):
        return sql_ascii_bench


class OnMariaDB(SQLContract):
    @pytest.fixture
    def bench(self, mariadb_bench):
        return mariadb_bench


class OnSQLite(SQLContract):
    many_writers = False

    @pytest.fixture
    def bench(self, sqlite_bench):
        return sqlite_bench


class TestPostgres(OnPostgres):
    """By URL, with async handlers."""


class TestPostgresEngine(OnPostgres):
    kind = colour = "sync"


class OnPgBouncer(SQLContract):
    """PostgreSQL behind a pooler in transaction mode."""

    @pytest.fixture
    def bench(self, pgbouncer_bench):
        return pgbouncer_bench


class TestPgBouncer(OnPgBouncer):
    """By URL, with async handlers."""


class TestPgBouncerWithSyncHandlers(OnPgBouncer):
    """By URL, with sync handlers."""

    colour = "sync"


class TestMariaDB(OnMariaDB):
    """By URL, with async handlers."""


class TestSQLite(OnSQLite):
    """By URL, with async handlers."""
