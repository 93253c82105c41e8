"""Which engines the contract had to do without: each is a skipped test, by name."""

from __future__ import annotations

import pytest

from support import binaries


def pytest_generate_tests(metafunc):
    every = metafunc.config.getoption("engines") == "all"
    wanted = binaries.MATRIX if every else [(kind, "") for kind in binaries.SERVERS]
    metafunc.parametrize("engine", wanted, ids=" ".join)


def test_the_contract_runs_on(engine):
    kind, version = engine
    if not binaries.has(kind, version):
        pytest.skip(f"{kind} {version} cannot be had here; found: {found(kind)}")


def found(kind):
    return ", ".join(str(binary) for binary in binaries.engines(kind)) or "none"
