"""With SEMEL_NO_SKIPS=1 a skipped test fails the run: nobody looked at what it promises."""

from __future__ import annotations

import os
from typing import Any

import pytest


class NoSkips:
    """Counts what was skipped, one by one or as a whole file."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        quiet = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self.skipped and session.exitstatus in quiet:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.skipped:
            terminalreporter.section("SKIPPED, AND SEMEL_NO_SKIPS IS SET", sep="!", red=True)
            for nodeid in sorted(set(self.skipped)):
                terminalreporter.line(nodeid)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("SEMEL_NO_SKIPS") == "1" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(NoSkips(), "no-skips")
