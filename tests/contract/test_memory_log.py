from __future__ import annotations

import pytest

from semel.stores.memory import MemoryStore
from semel.testing.bells import BellContract
from semel.testing.clock import FakeClock
from semel.testing.logs import LogContract


class TestMemoryLog(LogContract):
    examples = 40

    @pytest.fixture
    def clock(self):
        return FakeClock()

    @pytest.fixture
    async def store(self, clock):
        store = MemoryStore(clock=clock)
        yield store
        await store.aclose()

    async def age(self, store, seconds):
        store._log._clock.advance(seconds)

    async def another(self, store):
        """Return the same one, because two in memory share no records."""
        return store

    async def streams_left(self, store):
        return len(store._log._streams)

    async def ids_left(self, store):
        return sum(len(stream.marks) for stream in store._log._streams.values())


class TestMemoryBell(BellContract):
    @pytest.fixture
    async def store(self):
        store = MemoryStore()
        yield store
        await store.aclose()

    async def another(self, store):
        """Return the same one, because two in memory share no records."""
        return store
