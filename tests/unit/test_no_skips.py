"""A run in which something was skipped fails in CI, however it was skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = Path(__file__).parents[1]

SKIPS = {
    "marked": "@pytest.mark.skip\ndef test_it(): ...",
    "on a condition": "@pytest.mark.skipif(True, reason='')\ndef test_it(): ...",
    "in the test": "def test_it(): pytest.skip('no server')",
    "in a fixture": "@pytest.fixture\ndef it(): pytest.skip('')\ndef test_it(it): ...",
    "for lack of a module": "pytest.importorskip('nothing_of_that_name')",
    "as a whole file": "pytest.skip('', allow_module_level=True)\ndef test_it(): ...",
    "for lack of parameters": "@pytest.mark.parametrize('a', [])\ndef test_it(a): ...",
}


@pytest.fixture
def run_tests(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("SEMEL_NO_SKIPS", "1")
    monkeypatch.setenv("PYTHONPATH", str(TESTS))

    def run_tests(source, *words):
        pytester.makepyfile(f"import pytest\n\ndef test_other(): ...\n\n{source}\n")
        return pytester.runpytest_subprocess("-p", "support.no_skips", *words)

    return run_tests


@pytest.mark.parametrize("how", SKIPS)
def test_a_skip_fails_the_run(run_tests, how):
    was_refused(run_tests(SKIPS[how]))


@pytest.mark.parametrize("how", ["in the test", "as a whole file"])
def test_a_skip_in_a_worker_fails_the_run(run_tests, how):
    was_refused(run_tests(SKIPS[how], "-p", "xdist", "-n", "1"))


def was_refused(result):
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*SKIPPED, AND SEMEL_NO_SKIPS IS SET*", "test_a_skip*"])


def test_without_a_skip_it_does_not(run_tests):
    source = "@pytest.mark.xfail\ndef test_it(): raise AssertionError"
    assert run_tests(source).ret == pytest.ExitCode.OK


def test_a_skip_is_allowed_where_nobody_asked(run_tests, monkeypatch):
    monkeypatch.delenv("SEMEL_NO_SKIPS")
    assert run_tests(SKIPS["marked"]).ret == pytest.ExitCode.OK


def test_ci_asks():
    assert "export SEMEL_NO_SKIPS=1\n" in (TESTS.parent / ".ci" / "run").read_text()
