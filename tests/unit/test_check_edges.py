"""The table of edge cases is held to its word."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "scripts" / "check_edges.py"


@pytest.fixture(scope="module")
def edges():
    spec = importlib.util.spec_from_file_location("check_edges", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GOOD = "tests/unit/test_check_edges.py::test_a_test_is_found"


@pytest.mark.parametrize(
    ("test", "there"),
    [
        (GOOD, True),
        ("tests/contract/test_memory_ledger.py::TestMemoryLedger::test_first_claim_wins", True),
        (
            "tests/contract/test_sqlite_ledger.py::TestSQLiteMemoryLedger::test_first_claim_wins",
            True,
        ),
        ("tests/unit/test_check_edges.py::test_of_nothing", False),
        ("tests/unit/test_check_edges.py::edges", False),
        ("tests/unit/test_nowhere.py::test_a_test_is_found", False),
        ("tests/contract/test_memory_ledger.py::TestMemoryLedger::test_of_nothing", False),
        ("tests/contract/test_memory_ledger.py::TestNobody::test_first_claim_wins", False),
        ("tests/contract/test_memory_ledger.py::test_first_claim_wins", False),
    ],
)
def test_a_test_is_found(edges, test, there):
    assert edges.exists(test) is there


ROW = {"area": "a", "when": "w", "then": "t"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({}, "no test"),
        ({"tests": []}, "no test"),
        ({"tests": [GOOD, "tests/x.py::test_y"]}, "there is no test tests/x.py::test_y"),
        ({"why": "later"}, "a why needs a page"),
        ({"why": "later", "page": "docs/nowhere.md"}, "docs/nowhere.md"),
        ({"tests": [GOOD], "then": ""}, "must say something"),
        ({"tests": [GOOD], "test": GOOD}, "unknown field 'test'"),
    ],
)
def test_a_bad_row_is_named(edges, row, says):
    (fault,) = edges.faults({"edge": [ROW | row], "complete": []})
    assert says in fault


def test_a_good_row_is_fine_and_its_twin_is_not(edges):
    row = ROW | {"tests": [GOOD]}
    assert list(edges.faults({"edge": [row], "complete": []})) == []
    (fault,) = edges.faults({"edge": [row, row], "complete": []})
    assert "2 such rows" in fault


def test_a_complete_file_has_no_test_without_a_row(edges):
    table = {"edge": [ROW | {"tests": [GOOD]}], "complete": ["tests/unit/test_check_edges.py"]}
    found = list(edges.faults(table))
    assert len(found) == 3
    assert all(fault.endswith("no row names it") for fault in found)
