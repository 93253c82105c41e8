"""What every test can count on. Fixtures live in plugins, by topic."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest_plugins = ["support.fixtures_servers"]


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


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("SEMEL_NO_SKIPS") == "1" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(NoSkips(), "no-skips")
