"""One rule for both ways to a room: a message to the door, and a call in Python."""

from __future__ import annotations

import json
from enum import StrEnum

import pytest

from semel.errors import SettingsError
from semel.rooms import Request
from semel.rooms.asking import Act, Malformed, asked
from semel.rooms.names import MOST_CLIENT, MOST_REQUEST, MOST_ROOM, MOST_USER, named, numbered

NAMES = {
    "plain": "t1",
    "with spaces and signs": "a b:c/d.é\u2713",
    "empty": "",
    "a number": 7,
    "nothing": None,
    "a list": ["t1"],
    "a line break": "a\nb",
    "NUL": "a\0b",
    "nothing to see": "a\u200bb",
    "half a letter": "\ud800",
}
LENGTHS = {"roomId": MOST_ROOM, "requestId": MOST_REQUEST, "clientId": MOST_CLIENT}
NUMBERS = [0, 1, 2**53 - 1, 2**53, -1, 1.0, True, "1", []]


def by_line(**given):
    names = {"requestId": "1", "clientId": "tab", "clientSeq": 1, **given}
    payload = {"tableId": names.pop("roomId", "t1"), "actionType": "say"}
    payload["expectedVersion"] = names.pop("expectedVersion", 1)
    try:
        return asked(json.dumps({"type": "ACTION_REQUEST", **names, "payload": payload}))
    except Malformed as wrong:
        return str(wrong)


def by_call(**given):
    names = {"roomId": "t1", "requestId": "1", "clientId": "tab", "clientSeq": 1, **given}
    version = names.pop("expectedVersion", 1)
    room_id, request_id, client_id, client_seq = names.values()
    action = {"actionType": "say"}
    try:
        return Request(room_id, "ann", request_id, action, version, client_id, client_seq)
    except SettingsError as wrong:
        return str(wrong)


def is_taken(**given):
    """By both, or by none."""
    line, call = by_line(**given), by_call(**given)
    assert isinstance(line, Act) == isinstance(call, Request), (line, call)
    return isinstance(call, Request)


@pytest.mark.parametrize("field", LENGTHS)
@pytest.mark.parametrize("what", NAMES)
def test_a_name_is_taken_by_both_or_by_none(field, what):
    assert is_taken(**{field: NAMES[what]}) == (what in {"plain", "with spaces and signs"})


@pytest.mark.parametrize("field", LENGTHS)
def test_a_name_is_as_long_for_both(field):
    most = LENGTHS[field]
    assert is_taken(**{field: "x" * most})
    assert is_taken(**{field: "é" * (most // 2)})
    assert not is_taken(**{field: "x" * (most + 1)})
    assert not is_taken(**{field: "é" * (most // 2 + 1)})


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_a_number_is_taken_by_both_or_by_none(number):
    is_whole = type(number) is int and number <= 2**53 - 1
    assert is_taken(expectedVersion=number) == (is_whole and number >= 0)
    assert is_taken(clientSeq=number) == (is_whole and number >= 1)


@pytest.mark.parametrize(
    ("name", "todo"),
    [
        (7, "this is a int: write it as text"),
        ("", "'' has 0: give it one"),
        ("x" * 129, "has 129: hash a longer one"),
        ("a\nb", r"'a\nb' has '\n': leave it out"),
        ("a\ud800", r"has '\ud800': leave it out"),
    ],
)
def test_what_is_wrong_with_a_name_is_said_and_what_to_do(name, todo):
    with pytest.raises(SettingsError) as error:
        named("user", name, MOST_USER)
    assert str(error.value).startswith("a user ")
    assert str(error.value).endswith(todo)


def test_a_name_is_nothing_but_text():
    class Table(StrEnum):
        MAIN = "main"

    assert type(named("room id", Table.MAIN, MOST_ROOM)) is str
    made = Request(Table.MAIN, Table.MAIN, Table.MAIN, {"actionType": "say"})
    assert {type(name) for name in (made.room_id, made.user, made.request_id)} == {str}


def test_what_is_wrong_with_a_number_is_said():
    with pytest.raises(SettingsError, match="expected version is a whole number, from 0 to"):
        numbered("expected version", -1)
