from __future__ import annotations

import pytest

from semel.stores.sqlite import SQLiteStore
from semel.testing.clock import FakeClock
from semel.testing.contracts import LedgerContract


class TestSQLiteLedger(LedgerContract):
    examples = 15  # every step of a history waits for the disk

    @pytest.fixture
    def clock(self):
        return FakeClock()

    @pytest.fixture
    async def store(self, tmp_path, clock):
        store = SQLiteStore(tmp_path / "ledger.db", clock=clock)
        yield store
        await store.aclose()

    @pytest.fixture(autouse=True)
    def _own_time(self, clock):
        self.clock = clock

    async def age(self, store, seconds):
        self.clock.advance(seconds)

    async def another(self, store):
        return SQLiteStore(store._path, clock=self.clock)


class TestSQLiteMemoryLedger(TestSQLiteLedger):
    examples = 40

    @pytest.fixture
    async def store(self, clock):
        store = SQLiteStore(":memory:", clock=clock)
        yield store
        await store.aclose()

    async def another(self, store):
        """Return the same one, because two in memory share no records."""
        return store
