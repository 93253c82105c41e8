"""Fixtures for tests of code that uses Semel; pytest finds them when Semel is installed.

The contracts of stores and of brokers are async. Their tests are marked as such here, so that they
run in either mode of pytest-asyncio; what would keep them from running is said once per class.

Importing this costs next to nothing: everything is imported when a test asks for it.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from semel.stores.memory import MemoryStore
    from semel.testing.clock import FakeClock

__all__ = ["semel_clock", "semel_store"]


@pytest.fixture
def _semel_time() -> FakeClock:
    from semel.testing.clock import FakeClock

    return FakeClock()


@pytest.fixture
def semel_store(_semel_time: FakeClock, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """An empty store in memory, for this test alone, by the clock of `semel_clock`.

    Guards that name no store use it; after the test they use what they used before. A guard made
    with store= keeps its own.
    """
    from semel import settings
    from semel.stores.memory import MemoryStore

    store = MemoryStore(clock=_semel_time)
    monkeypatch.setattr(settings, "_configured", store)
    return store


@pytest.fixture
def semel_clock(_semel_time: FakeClock, semel_store: MemoryStore) -> FakeClock:
    """The clock of `semel_store`, which it brings along. It stands still until `advance(seconds)`.

    It decides when leases run out and records expire. It does not decide how long a call with
    on_duplicate="wait" waits: that time is real.
    """
    return _semel_time


# --- the contracts ------------------------------------------------------------------------------


CONTRACTS = {
    "semel.testing.contracts": "LedgerContract",
    "semel.testing.brokers": "BrokerContract",
    "semel.testing.inboxes": "InboxContract",
    "semel.testing.logs": "LogContract",
    "semel.testing.bells": "BellContract",
}


@pytest.hookimpl(tryfirst=True)  # before pytest-asyncio looks for its mark
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> None:
    """Look at what is collected, and leave the collecting to others."""
    if _is_contract(getattr(collector, "obj", None)) and inspect.iscoroutinefunction(obj):
        _refuse_unless_it_can_run(collector)
        _mark(obj)


def _is_contract(found: object) -> bool:
    """Nothing is imported for those who have no contract."""
    if not inspect.isclass(found):
        return False
    return any(
        issubclass(found, getattr(sys.modules[home], name))
        for home, name in CONTRACTS.items()
        if home in sys.modules
    )


def _mark(test: Any) -> None:
    """Once: a class that is collected again has its tests marked already."""
    if all(mark.name != "asyncio" for mark in getattr(test, "pytestmark", ())):
        pytest.mark.asyncio(test)


def _refuse_unless_it_can_run(collector: pytest.Module | pytest.Class) -> None:
    contract, mode = collector.obj, _asyncio_mode(collector.config)
    if mode is None:
        raise collector.CollectError(
            f"{contract.__name__} is async and needs pytest-asyncio: pip install pytest-asyncio"
        )
    if mode == "auto":
        return
    for name in dir(contract):
        if _is_left_alone(inspect.getattr_static(contract, name)):
            raise collector.CollectError(
                f"{contract.__name__}.{name} is an async fixture, and pytest-asyncio leaves it "
                "alone in strict mode.\n"
                'Write asyncio_mode = "auto" in the settings of pytest, or decorate it with '
                "@pytest_asyncio.fixture."
            )


def _asyncio_mode(config: pytest.Config) -> str | None:
    try:
        mode = config.getoption("asyncio_mode", None) or config.getini("asyncio_mode")
    except ValueError:  # no such setting: no such plugin
        return None
    return str(getattr(mode, "value", mode))


def _is_left_alone(attribute: object) -> bool:
    """Is it an async fixture made by plain @pytest.fixture?"""
    if "fixture" not in type(attribute).__name__.lower():
        return False
    function: Any = inspect.unwrap(attribute)  # type: ignore[arg-type]
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    return is_async and not getattr(function, "_force_asyncio_fixture", False)
