from __future__ import annotations

import pytest

from semel.stores.memory import MemoryStore
from semel.testing.clock import FakeClock
from semel.testing.contracts import LedgerContract


class TestMemoryLedger(LedgerContract):
    @pytest.fixture
    def clock(self):
        return FakeClock()

    @pytest.fixture
    async def store(self, clock):
        store = MemoryStore(clock=clock)
        yield store
        await store.aclose()

    @pytest.fixture(autouse=True)
    def _own_time(self, clock):
        self.clock = clock

    async def age(self, store, seconds):
        self.clock.advance(seconds)
