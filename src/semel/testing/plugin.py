"""Fixtures for tests of code that uses Semel; pytest finds them when Semel is installed.

Importing this costs next to nothing: everything is imported when a test asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from semel.stores.memory import MemoryStore
    from semel.testing.clock import FakeClock

__all__ = ["semel_clock", "semel_store"]


@pytest.fixture
def semel_clock() -> FakeClock:
    """The clock of `semel_store`. It stands still; `advance(seconds)` moves it.

    It decides when leases run out and records expire. It does not decide how long a call with
    on_duplicate="wait" waits: that time is real.
    """
    from semel.testing.clock import FakeClock

    return FakeClock()


@pytest.fixture
def semel_store(semel_clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """An empty store in memory, for this test alone, by the clock of `semel_clock`.

    Guards that name no store use it; after the test they use what they used before. A guard made
    with store= keeps its own.
    """
    from semel import settings
    from semel.stores.memory import MemoryStore

    store = MemoryStore(clock=semel_clock)
    monkeypatch.setattr(settings, "_configured", store)
    return store
