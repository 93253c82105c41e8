"""The pytest plugin, in tests of its own making."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CODE = """
from semel import idempotent

charged = []

@idempotent(key="invoice:{number}", ttl=3600)
def charge(number):
    charged.append(number)
    return number
"""


@pytest.fixture
def pytest_of_a_user(pytester, monkeypatch):
    """Pytest with the plugin, and without those that happen to be installed here."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini(
        """
        [pytest]
        asyncio_mode = auto
        asyncio_default_fixture_loop_scope = function
        """
    )
    plugins = ("-p", "semel.testing.plugin", "-p", "pytest_asyncio.plugin")
    return lambda *args: pytester.runpytest_subprocess(*plugins, *args)


@pytest.fixture
def run_tests(pytester, pytest_of_a_user):
    pytester.makepyfile(shop=CODE)

    def run_tests(source, **outcomes):
        pytester.makepyfile(source)
        pytest_of_a_user("-q").assert_outcomes(**outcomes)

    return run_tests


def test_each_test_has_an_empty_store_of_its_own(run_tests):
    run_tests(
        """
        import shop

        def test_first(semel_store):
            shop.charge(7)
            assert shop.charge(7) == 7
            assert shop.charged == [7]

        def test_second(semel_store):
            shop.charge(7)
            assert shop.charged == [7, 7]
        """,
        passed=2,
    )


def test_the_clock_moves_by_hand(run_tests):
    run_tests(
        """
        import shop

        def test_a_result_is_remembered_for_its_ttl(semel_store, semel_clock):
            shop.charge(7)
            semel_clock.advance(3599)
            shop.charge(7)
            assert shop.charged == [7]
            semel_clock.advance(2)
            shop.charge(7)
            assert shop.charged == [7, 7]
        """,
        passed=1,
    )


def test_the_clock_brings_its_store_along(run_tests):
    run_tests(
        """
        import shop

        def test_alone(semel_clock):
            shop.charge(7)
            semel_clock.advance(3601)
            shop.charge(7)
            assert shop.charged == [7, 7]

        def test_another_begins_empty(semel_clock):
            shop.charge(7)
            assert shop.charged == [7, 7, 7]

        def test_with_the_store_asked_for_later(semel_clock, request):
            shop.charge(7)
            assert len(shop.charged) == 4
            request.getfixturevalue("semel_store")
            shop.charge(7)
            assert len(shop.charged) == 4
        """,
        passed=3,
    )


def test_afterwards_guards_use_what_they_used_before(run_tests):
    run_tests(
        """
        import pytest
        import semel
        from semel.settings import default_store
        from semel.stores import MemoryStore

        own = MemoryStore()

        @pytest.fixture(scope="module", autouse=True)
        def configured():
            semel.configure(store=own)

        def test_inside(semel_store):
            assert default_store() is semel_store
            semel.configure(store=None)

        def test_outside():
            assert default_store() is own
        """,
        passed=2,
    )


def test_async_tests_use_it_as_well(run_tests):
    run_tests(
        """
        from semel import idempotent

        async def test_async(semel_store):
            ran = []

            @idempotent(key="{n}")
            async def charge(n):
                ran.append(n)

            await charge(7)
            await charge(7)
            assert ran == [7]
        """,
        passed=1,
    )


CONTRACT = """
import pytest
{imports}
from semel.stores.memory import MemoryStore
from semel.testing.clock import FakeClock
from semel.testing.contracts import LedgerContract


class TestMine(LedgerContract):
    {fixture}
    {kind} store(self):
        self.clock = FakeClock()
        yield MemoryStore(clock=self.clock)

    async def age(self, store, seconds):
        self.clock.advance(seconds)
"""

ASYNCIO = ("-p", "pytest_asyncio.plugin")


@pytest.fixture
def contract_of_a_user(pytester, monkeypatch):
    """The contract, with the settings pytest has when nobody has set any."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def contract_of_a_user(*plugins, imports="", fixture="@pytest.fixture", kind="def"):
        pytester.makepyfile(CONTRACT.format(imports=imports, fixture=fixture, kind=kind))
        return pytester.runpytest_subprocess("-p", "semel.testing.plugin", *plugins, "-q")

    return contract_of_a_user


BROKER = """
from semel.brokers import MemoryBroker
from semel.testing.brokers import BrokerContract


class TestMine(BrokerContract):
    async def make(self, *, shards, maxlen):
        return MemoryBroker(shards=shards, maxlen=maxlen)
"""


def test_the_broker_contract_needs_no_setting_for_async_tests(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(BROKER)
    plugins = ("-p", "semel.testing.plugin", *ASYNCIO)
    told = pytester.runpytest_subprocess(*plugins, "-q", "-k", "tail or says", "--strict-markers")
    outcomes = told.parseoutcomes()

    assert set(outcomes) == {"passed", "deselected"}
    assert outcomes["passed"] > 10


def test_the_contract_needs_no_setting_for_async_tests(contract_of_a_user):
    outcomes = contract_of_a_user(*ASYNCIO).parseoutcomes()

    assert set(outcomes) == {"passed"}
    assert outcomes["passed"] > 100


def test_the_contract_takes_a_fixture_made_for_strict_mode(contract_of_a_user):
    outcomes = contract_of_a_user(
        *ASYNCIO,
        imports="import pytest_asyncio",
        fixture="@pytest_asyncio.fixture",
        kind="async def",
    ).parseoutcomes()

    assert set(outcomes) == {"passed"}


def test_an_async_fixture_that_strict_mode_leaves_alone_is_one_clear_error(contract_of_a_user):
    result = contract_of_a_user(*ASYNCIO, kind="async def")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*TestMine.store is an async fixture*", "*asyncio_mode = *auto*"])


def test_without_pytest_asyncio_the_contract_is_one_clear_error(contract_of_a_user):
    result = contract_of_a_user()

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*TestMine*pip install pytest-asyncio*"])


def test_the_page_about_testing_is_true(pytester, pytest_of_a_user):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "test-your-code.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    first, conftest, *others = blocks
    pytester.makeconftest(conftest)
    pytester.makepyfile(test_first=first)
    for number, block in enumerate(others):
        pytester.makepyfile(**{f"test_{number}": block})

    contract = "test_2.py"
    pytest_of_a_user("-q", "--ignore", contract).assert_outcomes(passed=4)
    assert pytest_of_a_user("-q", "-k", "first_claim", contract).parseoutcomes()["passed"] >= 2


def test_the_fixtures_explain_themselves(pytest_of_a_user):
    result = pytest_of_a_user("--fixtures", "-q")

    result.stdout.re_match_lines([r"semel_clock.*", r" *The clock of `semel_store`, .*"])
    result.stdout.re_match_lines([r"semel_store.*", r" *An empty store in memory.*"])


def test_the_entry_point_names_the_plugin():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())

    assert project["project"]["entry-points"]["pytest11"] == {"semel": "semel.testing.plugin"}


def test_importing_it_is_cheap():
    code = (
        "import pytest, sys; before = set(sys.modules); import semel.testing.plugin;"
        "print(*(set(sys.modules) - before))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = {name.partition(".")[0] for name in shown.stdout.split()}

    assert not loaded & {"hypothesis", "sqlalchemy", "redis", "typer", "rich", "sqlite3"}
