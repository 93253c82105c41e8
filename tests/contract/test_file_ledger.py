from __future__ import annotations

import pytest

from semel.stores.file import FileStore
from semel.testing.clock import FakeClock
from semel.testing.contracts import LedgerContract


class TestFileLedger(LedgerContract):
    examples = 15  # every step of a history waits for the disk

    @pytest.fixture
    def clock(self):
        return FakeClock()

    @pytest.fixture
    async def store(self, tmp_path, clock):
        store = FileStore(tmp_path / "ledger", clock=clock)
        yield store
        await store.aclose()

    @pytest.fixture(autouse=True)
    def _own_time(self, clock):
        self.clock = clock

    async def age(self, store, seconds):
        self.clock.advance(seconds)

    async def another(self, store):
        return FileStore(store._path, clock=self.clock)
