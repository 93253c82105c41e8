"""What every test can count on. Fixtures and rules live in plugins, by topic."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["support.fixtures_servers", "support.no_skips"]

CONTRACT = Path(__file__).parent / "contract"


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if CONTRACT in item.path.parents:
            item.add_marker(pytest.mark.contract)
