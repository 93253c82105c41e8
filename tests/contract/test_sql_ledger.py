"""The ledger contract on PostgreSQL, MariaDB and SQLite, opened by URL and given an engine."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import create_async_engine

from semel.colour import SYNC, run
from semel.keys import make_key
from semel.stores.memory import MemoryStore
from semel.stores.sql import SQLStore, init
from semel.stores.sql.lines import open_engine, parse, with_driver
from semel.testing.clock import FakeClock
from semel.testing.contracts import LedgerContract
from semel.values import Outcome, Terms, Won

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
        store = SQLStore(url)
        store.test_url = url
        yield store
        await store.aclose()

    async def another(self, store: Any) -> Any:
        return SQLStore(store.test_url)

    async def age(self, store: Any, seconds: float) -> None:
        await asyncio.to_thread(make_older, store.test_url, seconds)


class TestPostgres(SQLContract):
    @pytest.fixture
    def url(self, postgres_tables_url: str) -> str:
        return postgres_tables_url


class TestPgBouncer(SQLContract):
    """PostgreSQL behind a pooler in transaction mode."""

    @pytest.fixture
    def url(self, pgbouncer_tables_url: str) -> str:
        return pgbouncer_tables_url


class TestPostgresLatin1(SQLContract):
    """In a database whose encoding lacks characters."""

    @pytest.fixture
    def url(self, latin1_tables_url: str) -> str:
        return latin1_tables_url


class TestPostgresSQLASCII(SQLContract):
    @pytest.fixture
    def url(self, sql_ascii_tables_url: str) -> str:
        return sql_ascii_tables_url


class TestMariaDB(SQLContract):
    @pytest.fixture
    def url(self, mariadb_tables_url: str) -> str:
        return mariadb_tables_url


class TestSQLite(SQLContract):
    @pytest.fixture
    def url(self, tmp_path: Any) -> str:
        init(url := f"sqlite:///{tmp_path}/ledger.db")
        return url


class GivenEngine(SQLContract):
    """Through a pool that is shared with somebody else."""

    colours = ("sync",)

    @pytest.fixture
    async def store(self, url: str) -> Any:
        self.engines = [self.engine(url)]
        store = SQLStore(self.engines[0])
        store.test_url = url
        yield store
        for engine in self.engines:
            engine.dispose()

    def engine(self, url: str) -> sa.Engine:
        return sa.create_engine(with_driver(parse(url), "sync"), pool_size=40)

    async def another(self, store: Any) -> Any:
        """The first with an engine of its own, the next with the same engine."""
        if len(self.engines) == 1:
            self.engines.append(self.engine(store.test_url))
        return SQLStore(self.engines[-1])


class GivenAsyncEngine(SQLContract):
    colours = ("async",)

    @pytest.fixture
    async def store(self, url: str) -> Any:
        self.engines = [create_async_engine(with_driver(parse(url), "async"))]
        store = SQLStore(self.engines[0])
        store.test_url = url
        yield store
        await store.aclose()
        for engine in self.engines:
            await engine.dispose()

    async def another(self, store: Any) -> Any:
        """The first with an engine of its own, the next with the same engine."""
        if len(self.engines) == 1:
            self.engines.append(create_async_engine(with_driver(parse(store.test_url), "async")))
        return SQLStore(self.engines[-1])


class TestPostgresEngine(GivenEngine, TestPostgres):
    pass


class TestPostgresAsyncEngine(GivenAsyncEngine, TestPostgres):
    pass


class TestPgBouncerEngine(GivenEngine, TestPgBouncer):
    pass


class TestPostgresLatin1Engine(GivenEngine, TestPostgresLatin1):
    """Its connections are in LATIN1 too, which is what the driver does by itself."""


class TestPostgresLatin1AsyncEngine(GivenAsyncEngine, TestPostgresLatin1):
    pass


class TestMariaDBEngine(GivenEngine, TestMariaDB):
    pass


class TestMariaDBAsyncEngine(GivenAsyncEngine, TestMariaDB):
    pass


class TestSQLiteAsyncEngine(GivenAsyncEngine, TestSQLite):
    pass


# --- against the reference store ----------------------------------------------------------------

TERMS = [
    Terms(lease_s=30, ttl_s=600),
    Terms(lease_s=30, ttl_s=600, takeover=False, hold=True),
    Terms(lease_s=30, ttl_s=None, hold=True),
]
ATTEMPTS = [f"host/{i}" for i in range(3)]

steps = st.one_of(
    st.tuples(st.just("claim"), st.sampled_from(ATTEMPTS), st.sampled_from(TERMS)),
    st.tuples(st.just("claim"), st.just("other"), st.sampled_from(TERMS)),
    st.tuples(st.just("complete"), st.integers(0, 3), st.sampled_from([b"1", b"\xff"])),
    st.tuples(st.just("release"), st.integers(0, 3), st.sampled_from([None, "bo\x00m", "x"])),
    st.tuples(st.just("renew"), st.integers(0, 3), st.sampled_from([None, 0, 5])),
    st.tuples(st.just("note"), st.integers(0, 3), st.sampled_from(["a", "b\x00"])),
    st.tuples(st.just("age"), st.sampled_from([10, 31, 640]), st.none()),
    st.tuples(st.just("resolve"), st.integers(0, 3), st.sampled_from([None, b"2"])),
    st.tuples(st.just("forget"), st.booleans(), st.none()),
    st.tuples(st.just("sweep"), st.none(), st.none()),
)


class Twins:
    """The same history in the reference store and in a database."""

    KEY = make_key("order-1", tenant="acme", operation="pay")

    def __init__(self, url: str) -> None:
        self.url, self.clock = url, FakeClock()
        self.store = SQLStore(url)
        self.ledgers = MemoryStore(clock=self.clock).ledger(SYNC), self.store.ledger(SYNC)
        self.won: tuple[list[Any], list[Any]] = ([], [])

    def play(self, verb: str, a: Any, b: Any) -> None:
        if verb == "age":
            self.clock.advance(a)
            make_older(self.url, a)
            if self.told(0) is None:  # an expired row may be gone already, or not
                for ledger in self.ledgers:
                    run(ledger.forget(self.KEY.id, force=True))
            return
        answers = [self.do(i, verb, a, b) for i in range(2)]
        assert answers[0] == answers[1], (verb, a, b)
        assert self.told(0) == self.told(1), (verb, a, b)

    def do(self, i: int, verb: str, a: Any, b: Any) -> Any:
        ledger, won, id = self.ledgers[i], self.won[i], self.KEY.id
        if verb == "claim":
            answer = run(ledger.claim(self.KEY, attempt=a, fingerprint=b"f", terms=b))
            if isinstance(answer, Won):
                won.append(answer.claim)
                return answer.claim.number, dict(answer.steps), answer.orphan is None
            return type(answer), getattr(answer, "outcome", None)
        if verb == "forget":
            return run(ledger.forget(id, force=a))
        if verb == "sweep":
            run(ledger.sweep())
            return None
        if not won:
            return None
        claim = won[-1 - a % len(won)]
        if verb == "resolve":
            outcome = None if b is None else Outcome("value", b)
            return run(ledger.resolve(id, fence=claim.fence, outcome=outcome, ttl_s=600))
        return run(
            {
                "complete": lambda: ledger.complete(claim, Outcome("value", b)),
                "release": lambda: ledger.release(claim, error=b),
                "renew": lambda: ledger.renew(claim, lease_s=b),
                "note": lambda: ledger.note(claim, b, b"data"),
            }[verb]()
        )

    def told(self, i: int) -> Any:
        record = run(self.ledgers[i].look(self.KEY.id))
        if record is None:
            return None
        times = {"created_at", "started_at", "lease_until", "completed_at", "expires_at"}
        times |= {"fence", "seen_at"}
        told = {f.name: getattr(record, f.name) for f in fields(record) if f.name not in times}
        told["past"] = [(p.number, p.attempt, p.ending) for p in record.past]
        ends = record.completed_at is None, record.expires_at is None
        return told, ends


@pytest.mark.parametrize("database", ["postgres", "mariadb", "sqlite"])
def test_any_history_is_told_as_the_reference_store_tells_it(database, request, tmp_path):
    if database == "sqlite":
        url = f"sqlite:///{tmp_path}/ledger.db"
    else:
        url = request.getfixturevalue(f"{database}_url")
    init(url)

    @settings(max_examples=40, deadline=None, database=None)
    @given(st.lists(steps, max_size=20))
    def check(history: list[Any]) -> None:
        twins = Twins(url)
        try:
            for step in history:
                twins.play(*step)
            twins.play("forget", True, None)
        finally:
            twins.store.close()

    check()


def test_a_key_that_fails_often_remembers_its_last_attempts(postgres_url):
    init(postgres_url)
    twins = Twins(postgres_url)
    for i in range(20):
        twins.play("claim", f"host/{i}", TERMS[0])
        twins.play("release", 0, f"no {i}")
    twins.store.close()
