"""What fails again and again is told whole, and not each time."""

from __future__ import annotations

import logging

import pytest

from semel.failures import EACH_S, MOST_KINDS, Failures


def raised(kind=ValueError, what="no"):
    try:
        raise kind(what)
    except kind as error:
        return error


def raised_elsewhere():
    try:
        return int("x")
    except ValueError as error:
        return error


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def failures(now):
    return Failures(lambda: now[0])


def test_the_first_is_told_whole(failures, caplog):
    failures.tell(raised(), "semel: %r has failed", "it")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == "semel: 'it' has failed"
    assert record.filename == "test_failures.py"
    assert "ValueError: no" in caplog.text
    assert "raise kind(what)" in caplog.text


def test_the_same_is_told_once_a_minute_and_how_often(failures, now, caplog):
    for second in range(600):
        now[0] = second * 1.0
        failures.tell(raised(what=f"no {second}"), "semel: %r has failed", second)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "semel: 0 has failed"
    assert said[1] == "semel: 60 has failed; and 59 times since this was told last"
    assert len(said) == 600 / EACH_S
    assert all(record.exc_info for record in caplog.records)
    caplog.clear()
    now[0] = 10_000
    failures.tell(raised(), "semel: %r has failed", "it")
    failures.tell(raised(), "semel: %r has failed", "it")
    now[0] = 20_000
    failures.tell(raised(), "semel: %r has failed", "it")
    said = [record.getMessage().partition("; ")[2] for record in caplog.records]
    assert said == [
        "and 59 times since this was told last",
        "and once since this was told last",
    ]


def test_one_that_has_not_come_again_is_told_without_a_number(failures, now, caplog):
    for at in (0, 100):
        now[0] = at
        failures.tell(raised(), "semel: it has failed")
    assert [record.getMessage() for record in caplog.records] == 2 * ["semel: it has failed"]


def test_others_are_told_meanwhile(failures, caplog):
    for _ in range(3):
        failures.tell(raised(), "semel: a")
        failures.tell(raised(KeyError), "semel: a")
        failures.tell(raised_elsewhere(), "semel: a")
        failures.tell(raised(), "semel: b")
        failures.tell(ValueError("never raised"), "semel: a")
    assert len(caplog.records) == 5


def test_it_remembers_so_many_and_no_more(failures, caplog):
    kinds = [type(f"E{number}", (Exception,), {}) for number in range(MOST_KINDS + 1)]
    for kind in kinds:
        failures.tell(raised(kind), "semel: it has failed")
    assert len(failures) == MOST_KINDS
    caplog.clear()
    failures.tell(raised(kinds[-1]), "semel: it has failed")
    assert not caplog.records
    failures.tell(raised(kinds[0]), "semel: it has failed")
    assert len(caplog.records) == 1
