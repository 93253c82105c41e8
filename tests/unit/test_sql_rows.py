"""Text, outcomes and rows on their way into the table and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import CorruptRecordError
from semel.keys import make_key
from semel.stores.rules import Row
from semel.stores.sql import rows
from semel.stores.sql.dialects import LAST_US, MySQL, Postgres, SQLite
from semel.values import Outcome

DIALECTS = [Postgres("psycopg"), MySQL("format"), SQLite("qmark")]


def a_row(**changes):
    row = {
        "key": make_key("k\\0 \x00 \ud800 ✓", tenant="AbC ", operation="a\\b"),
        "fingerprint": b"\x00\xff",
        "attempt": "host/\x00",
        "fence": 2**62,
        "number": 3,
        "state": "PENDING",
        "hold": True,
        "created_us": 1,
        "started_us": 1_700_000_000_123_456,
        "lease_us": LAST_US,
        "steps": {"\x00": b"\xff", "": b""},
        "past": json.dumps([[1, 2, "a\x00", 3, 4, "failed: \ud800"]]),
        "error": "b\\o\x00m",
    }
    return Row(**{**row, **changes})


@given(st.text(st.characters()))
def test_text_comes_back_to_the_character_and_holds_nothing_a_database_refuses(text):
    stored = rows.stored_text(text)
    assert rows.original_text(stored) == text
    assert "\x00" not in stored
    stored.encode()


@given(st.text(st.characters()), st.text(st.characters()))
def test_different_texts_stay_different(one, two):
    assert (rows.stored_text(one) == rows.stored_text(two)) == (one == two)
    assert (rows.shortened(one, 70) == rows.shortened(two, 70)) == (one == two)


def test_long_text_is_cut_and_stays_different():
    one, two = rows.shortened("x" * 1000, 255), rows.shortened("x" * 1001, 255)
    assert len(one) == len(two) == 255
    assert one != two


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_a_row_comes_back_as_it_was(dialect):
    for changes in ({}, {"state": "COMPLETED", "outcome": Outcome("lost", b"\x00", 201)}):
        row = a_row(**changes)
        assert rows.row_of(rows.values_of(row, dialect), dialect) == row


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": 1}', b" [1]\n", b"0", b'"\xc3\xa9"', b'"\\u0000"', b'"\\ud800"', b"-0", b"1E400",
    ],
)  # fmt: skip
def test_json_is_readable_and_exact(data):
    assert rows.split(Outcome("value", data)) == (data.decode(), None)
    assert rows.joined("value", None, data.decode(), None).data == data


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff", b"NaN", b"[Infinity]", b"{", b"\xef\xbb\xbf1", b"'a'", b'"\x00"', b"\x00",
        b"[" * 2000 + b"]" * 2000, b'"' + b"x" * 70_000 + b'"', b"1".ljust(5000, b"1"),
    ],
    ids=range(12),
)  # fmt: skip
def test_everything_else_is_kept_as_bytes(data):
    response, body = rows.split(Outcome("value", data))
    assert rows.joined("value", None, response, body).data == data
    assert response is None


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("state", "DONE"),
        ("request_hash", "xyz"),
        ("steps", "{"),
        ("steps", '{"a": "not base64!"}'),
        ("past", "[1]"),
        ("fence", None),
        ("outcome", "odd"),
        ("lease_until", None),
    ],
)
def test_a_row_that_cannot_be_read_names_its_key(column, value):
    dialect = SQLite("qmark")
    values = rows.values_of(a_row(key=make_key("order-7")), dialect)
    values[rows.COLUMNS.index(column)] = value
    with pytest.raises(CorruptRecordError, match="order-7"):
        rows.row_of(values, dialect)


def test_a_completed_row_without_an_outcome_cannot_be_read():
    dialect = SQLite("qmark")
    with pytest.raises(CorruptRecordError):
        rows.row_of(rows.values_of(a_row(state="COMPLETED"), dialect), dialect)


def test_statements_speak_the_drivers_language():
    said = {
        style: Postgres(style).say("a = ? AND b = ?")
        for style in ("psycopg", "pyformat", "qmark", "numeric_dollar")
    }
    assert said == {
        "psycopg": "a = %b AND b = %b",
        "pyformat": "a = %s AND b = %s",
        "qmark": "a = ? AND b = ?",
        "numeric_dollar": "a = $1 AND b = $2",
    }
