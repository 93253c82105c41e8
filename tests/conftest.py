"""What every test can count on. Fixtures and rules live in plugins, by topic."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

pytest_plugins = ["support.fixtures_servers", "support.no_skips", "support.one_tls_context"]

CONTRACT = Path(__file__).parent / "contract"


def pytest_collection_finish() -> None:
    """Thousands of tests stay in memory; nobody needs to go through them with each gc.collect()."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if CONTRACT in item.path.parents:
            item.add_marker(pytest.mark.contract)
