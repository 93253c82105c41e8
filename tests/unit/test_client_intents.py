"""Durable keys: what is kept, for how long, and what is refused."""

from __future__ import annotations

import pickle
import re
import sqlite3
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from semel.client import Intents
from semel.client.intents import SWEPT, fingerprint_of
from semel.errors import IdempotencyConflictError, OutcomeUnknownError, SettingsError
from semel.testing.clock import FakeClock

DAY_S = 86_400
ONE, OTHER = fingerprint_of("POST", "/", b"1"), fingerprint_of("POST", "/", b"2")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.db"


@pytest.fixture
def intents(path, clock):
    with Intents(path, clock=clock) as opened:
        yield opened


def quoted(key):
    return f'"{key}"'


def test_a_name_has_one_key_which_outlives_the_process(path):
    with Intents(path) as intents:
        key = intents.key("invoice-7")
        assert re.fullmatch("[0-9a-f]{32}", key)
        assert intents.headers("invoice-7") == {"Idempotency-Key": quoted(key)}
        assert intents.key("invoice-8") != key
    code = f"from semel.client import Intents; print(Intents({str(path)!r}).key('invoice-7'))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == key


def test_a_key_is_committed_before_it_is_handed_out(intents, path):
    key = intents.key("invoice-7")
    file = sqlite3.connect(path)
    assert file.execute("SELECT idempotency_key FROM semel_intents").fetchall() == [(key,)]
    file.close()


def test_many_at_once_get_the_same_key(path):
    def ask(_):
        with Intents(path) as mine:
            return mine.key("invoice-7")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(32)))) == 1


def test_the_file_is_its_owners_alone(intents, path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# --- one request --------------------------------------------------------------------------------


def test_the_same_request_is_bound_again_and_another_is_refused(intents):
    header = quoted(intents.key("invoice-7"))
    assert intents.bind(header, ONE)
    assert intents.bind(header, ONE)
    with pytest.raises(IdempotencyConflictError, match="nothing was sent") as refused:
        intents.bind(header, OTHER)
    assert refused.value.key == header.strip('"')
    assert intents.bind(header, ONE)


def test_a_key_that_is_no_intents_is_none_of_our_business(intents):
    assert not intents.bind('"mine"', ONE)
    assert not intents.bind("mine", None)


def test_of_many_that_bind_at_once_one_wins(path):
    with Intents(path) as opened:
        header = quoted(opened.key("invoice-7"))

    def bind(fingerprint):
        with Intents(path) as mine:
            try:
                return mine.bind(header, fingerprint)
            except IdempotencyConflictError:
                return False

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(bind, [bytes([n]) for n in range(16)]))
    assert won.count(True) == 1


@pytest.mark.parametrize(
    "other",
    [("PATCH", "/a", b"b"), ("POST", "/", b"ab"), ("POST", "/ab", b""), ("POST", "/a", b"B")],
)
def test_method_url_and_body_make_the_request(other):
    assert fingerprint_of("POST", "/a", b"b") == fingerprint_of("POST", "/a", b"b")
    assert fingerprint_of("POST", "/a", b"b") != fingerprint_of(*other)


# --- time ---------------------------------------------------------------------------------------


def test_an_answered_intent_keeps_its_key_until_the_ttl_ends(intents, clock):
    key = intents.key("invoice-7")
    intents.answered(quoted(key))
    clock.advance(DAY_S - 1)
    assert intents.key("invoice-7") == key
    clock.advance(1)
    assert intents.key("invoice-7") != key


def test_an_unanswered_intent_never_gets_a_new_key_by_itself(intents, clock):
    key = intents.key("invoice-7")
    assert intents.bind(quoted(key), ONE)
    clock.advance(DAY_S)
    for _ in range(2):
        with pytest.raises(OutcomeUnknownError, match=r"forget\('invoice-7'\)") as unknown:
            intents.headers("invoice-7")
        assert unknown.value.key == key
    assert intents.forget("invoice-7")
    assert not intents.forget("invoice-7")
    assert intents.key("invoice-7") != key


def test_a_new_key_is_for_any_request(intents, clock):
    first = intents.key("invoice-7")
    intents.bind(quoted(first), ONE)
    intents.answered(quoted(first))
    clock.advance(DAY_S)
    assert intents.bind(quoted(intents.key("invoice-7")), OTHER)


def test_what_is_unanswered_can_be_listed(intents, clock):
    keys = {}
    for name in ("a", "b", "c"):
        keys[name] = intents.key(name)
        clock.advance(1)
    intents.answered(quoted(keys["b"]))
    first, second = intents.unanswered()
    assert (first.name, first.key, second.name) == ("a", keys["a"], "c")
    assert first.created_at == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)


def test_it_was_answered_when_the_first_answer_came(intents, path, clock):
    header = quoted(intents.key("invoice-7"))
    first_us = clock.now_us()
    for _ in range(2):
        intents.answered(header)
        clock.advance(1)
    file = sqlite3.connect(path)
    assert file.execute("SELECT answered_us FROM semel_intents").fetchone() == (first_us,)
    file.close()


def test_answered_ones_are_swept_and_unanswered_ones_stay(intents, path, clock):
    for n in range(SWEPT + 5):
        key = intents.key(f"old-{n}")
        if n % 5:
            intents.answered(quoted(key))
    clock.advance(DAY_S)
    intents.key("new")
    file = sqlite3.connect(path)
    names = {name for (name,) in file.execute("SELECT name FROM semel_intents")}
    file.close()
    assert len(names) == 6
    assert {"new", "old-0", "old-5", "old-10"} <= names


def test_a_ttl_can_be_said_in_two_ways(path, clock):
    with Intents(path, ttl=timedelta(hours=1), clock=clock) as intents:
        intents.key("invoice-7")
        clock.advance(3599)
        intents.key("invoice-7")
        clock.advance(1)
        with pytest.raises(OutcomeUnknownError):
            intents.key("invoice-7")


# --- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ttl", [0, -1, float("inf"), float("nan")])
def test_a_ttl_that_cannot_work_is_refused(path, ttl):
    with pytest.raises(SettingsError, match="ttl"):
        Intents(path, ttl=ttl)


@pytest.mark.parametrize("name", ["", "\ud800"])
def test_a_name_that_is_none_is_refused(intents, name):
    with pytest.raises(SettingsError, match="cannot name an intent"):
        intents.key(name)


@pytest.mark.parametrize("name", ["x" * 10_000, "Rechnung Nr. 7 ☂", "a\0b", "'; --"])
def test_any_text_is_a_name(intents, name):
    assert intents.key(name) == intents.key(name)
    assert [each.name for each in intents.unanswered()] == [name]


def test_memory_is_no_place_for_what_outlives_the_process():
    with pytest.raises(SettingsError, match="give a file"):
        Intents(":memory:")


def test_a_file_of_anothers_is_left_as_it_is(path):
    file = sqlite3.connect(path)
    file.execute("CREATE TABLE orders (id INTEGER)")
    file.commit()
    with pytest.raises(SettingsError, match="a file of its own"):
        Intents(path)
    assert file.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert file.execute("SELECT name FROM sqlite_schema").fetchall() == [("orders",)]
    file.close()


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SettingsError, match="in a directory that exists"):
        Intents(tmp_path / "no" / "keys.db")


def test_intents_can_be_pickled(path, clock):
    with Intents(path, ttl=60, clock=clock) as intents:
        key = intents.key("invoice-7")
        with pickle.loads(pickle.dumps(intents)) as again:
            assert again.key("invoice-7") == key
            again._clock.advance(60)
            with pytest.raises(OutcomeUnknownError):
                again.key("invoice-7")
