"""The ledger contract on PostgreSQL, MariaDB and SQLite, opened by URL and given an engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from semel.stores.sql import SQLStore, init
from semel.stores.sql.lines import open_engine, parse, with_driver
from semel.testing.contracts import LedgerContract

pytestmark = pytest.mark.contract

OLDER = {
    "postgresql": "{c} = {c} - {s} * interval '1 second'",
    "mysql": "{c} = {c} - INTERVAL {s} SECOND",
    "sqlite": "{c} = strftime('%Y-%m-%d %H:%M:%f', {c}, '-{s} seconds') || '000'",
}


def make_older(url: str, seconds: float) -> None:
    engine = open_engine(parse(url))
    try:
        with engine.connect() as connection:
            older = OLDER[engine.dialect.name.replace("mariadb", "mysql")]
            sets = ", ".join(older.format(c=c, s=seconds) for c in ("lease_until", "expires_at"))
            connection.execute(sa.text(f"UPDATE idempotency SET {sets}".replace(":", "\\:")))
    finally:
        engine.dispose()


class SQLContract(LedgerContract):
    """By URL: one store, both colours."""

    examples = 15

    @pytest.fixture
    async def store(self, url: str) -> Any:
        init(url)
        store = SQLStore(url)
        store.test_url = url
        yield store
        await store.aclose()

    async def age(self, store: Any, seconds: float) -> None:
        await asyncio.to_thread(make_older, store.test_url, seconds)


class TestPostgres(SQLContract):
    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url


class TestMariaDB(SQLContract):
    @pytest.fixture
    def url(self, mariadb_url: str) -> str:
        return mariadb_url


class TestSQLite(SQLContract):
    @pytest.fixture
    def url(self, tmp_path: Any) -> str:
        return f"sqlite:///{tmp_path}/ledger.db"


class GivenEngine(SQLContract):
    """Through a pool that is shared with somebody else."""

    colours = ("sync",)

    @pytest.fixture
    async def store(self, url: str) -> Any:
        init(url)
        engine = sa.create_engine(with_driver(parse(url), "sync"), pool_size=40)
        store = SQLStore(engine)
        store.test_url = url
        yield store
        engine.dispose()


class GivenAsyncEngine(SQLContract):
    colours = ("async",)

    @pytest.fixture
    async def store(self, url: str) -> Any:
        init(url)
        engine = create_async_engine(with_driver(parse(url), "async"))
        store = SQLStore(engine)
        store.test_url = url
        yield store
        await store.aclose()
        await engine.dispose()


class TestPostgresEngine(GivenEngine, TestPostgres):
    pass


class TestPostgresAsyncEngine(GivenAsyncEngine, TestPostgres):
    pass


class TestMariaDBEngine(GivenEngine, TestMariaDB):
    pass


class TestMariaDBAsyncEngine(GivenAsyncEngine, TestMariaDB):
    pass


class TestSQLiteAsyncEngine(GivenAsyncEngine, TestSQLite):
    pass
