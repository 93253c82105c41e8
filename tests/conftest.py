"""What every test can count on. Fixtures live in plugins, by topic."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["support.fixtures_servers"]

CONTRACT = Path(__file__).parent / "contract"


class NoSkips:
    """Fails the run when a test was skipped: nobody looked at what it promises."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.skipped:
            terminalreporter.section("SKIPPED, AND SEMEL_NO_SKIPS IS SET", sep="!", red=True)
            for nodeid in self.skipped:
                terminalreporter.line(nodeid)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if CONTRACT in item.path.parents:
            item.add_marker(pytest.mark.contract)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("SEMEL_NO_SKIPS") == "1" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(NoSkips(), "no-skips")
