"""Every contract class of a store or an inbox in this folder must define `another`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a class that inherits the contracts' `another`, which returns the first instance."""
    ours = [item for item in items if item.path.parent == Path(__file__).parent]
    for cls in {item.cls for item in ours if isinstance(item, pytest.Function) and item.cls}:
        another = getattr(cls, "another", None)
        if another is not None and another.__module__.startswith("semel."):
            raise pytest.UsageError(f"{cls.__module__}.{cls.__qualname__} has no another()")
