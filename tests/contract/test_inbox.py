"""The inbox contract in memory, and on PostgreSQL, MariaDB and SQLite by URL and by engine."""

from __future__ import annotations

import asyncio

import pytest

from semel.inbox import MemoryInbox
from semel.testing.clock import FakeClock
from semel.testing.inboxes import InboxContract
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


class TestMemoryInboxWithSyncHandlers(TestMemoryInbox):
    colour = "sync"


# --- SQL ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def postgres_bench(postgres_server):
    with database(postgres_server) as bench:
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


class TestMariaDB(OnMariaDB):
    """By URL, with async handlers."""


class TestSQLite(OnSQLite):
    """By URL, with async handlers."""
