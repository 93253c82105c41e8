from __future__ import annotations

import pytest

from semel.colour import SYNC, run
from semel.keys import make_key
from semel.stores.memory import MemoryStore
from semel.testing.clock import FakeClock
from semel.testing.contracts import LedgerContract
from semel.values import Outcome, Terms


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

    async def another(self, store):
        """Return the same one, because two in memory share no records."""
        return store


TERMS = Terms(lease_s=1, ttl_s=60)


class TestExpiry:
    """Rows leave by themselves, and a sweep finds every one that is due."""

    @pytest.fixture
    def clock(self):
        return FakeClock()

    @pytest.fixture
    def ledger(self, clock):
        return MemoryStore(clock=clock).ledger(SYNC)

    def finish(self, ledger, text):
        won = run(ledger.claim(make_key(text), attempt="a", terms=TERMS))
        run(ledger.complete(won.claim, Outcome("value", b"1")))

    def test_a_row_that_is_due_twice_on_one_day_is_dropped_once(self, ledger, clock):
        for text in "abc":
            self.finish(ledger, text)
        clock.advance(120)
        assert run(ledger.sweep()) == 3
        assert run(ledger.sweep()) == 0

    def test_a_sweep_in_small_chunks_leaves_nothing(self, ledger, clock):
        for i in range(10):
            self.finish(ledger, str(i))
            clock.advance(0.7)
        clock.advance(120)
        assert [run(ledger.sweep(limit=4)) for _ in range(4)] == [4, 4, 2, 0]

    def test_what_falls_due_this_second_is_swept_at_once(self, ledger, clock):
        self.finish(ledger, "a")
        clock.advance(60.000001)
        assert run(ledger.sweep()) == 1

    def test_other_operations_drop_what_is_due(self, ledger, clock):
        for i in range(10):
            self.finish(ledger, str(i))
        clock.advance(120)
        for i in range(100, 110):
            self.finish(ledger, str(i))
        assert len(ledger) == 10
