from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import CorruptRecordError, SettingsError
from semel.rooms import Reply, Request
from semel.rooms.requests import is_deeper, kept, reply_of

ACTION = {"actionType": "say", "x": 1}


def request(user="ann", id="1", action=ACTION, **more):
    return Request("r", user, id, action, **more)


def test_ids_of_different_users_never_meet():
    pairs = [("a", "b:c"), ("a:b", "c"), ("", "x"), (None, "a:b:c"), ("1:a", "1"), ("a", "1:1")]
    ids = {request(user or None, id).id for user, id in pairs}
    assert len(ids) == len(pairs)
    names = [("a", "b:c"), ("a:b", "c"), ("1:a", "x"), ("a", "x")]
    rising = {
        next(iter(request(user, client_id=client, client_seq=1).rising)) for user, client in names
    }
    assert len(rising) == len(names)


def test_what_is_asked_has_a_fingerprint():
    same = request(action={"x": 1, "actionType": "say"})
    assert same.fingerprint == request().fingerprint == request("bob", "2").fingerprint
    others = [
        request(action={**ACTION, "x": 1.0}),
        request(action={**ACTION, "x": True}),
        request(action={**ACTION, "x": "1"}),
        request(action={**ACTION, "y": None}),
        request(expected_version=0),
    ]
    assert len({each.fingerprint for each in (same, *others)}) == 6


@pytest.mark.parametrize(
    "action",
    [
        {**ACTION, "x": float("nan")},
        {**ACTION, "x": {1}},
        {**ACTION, "x": b"y"},
        {**ACTION, "x": "\ud800"},
        {**ACTION, (1, 2): 3},
        {**ACTION, "x": [{1: 2}]},
        {"x": 1},
        {"actionType": 1},
        "say",
        None,
        [],
    ],
)
def test_an_action_that_json_cannot_say_is_refused(action):
    with pytest.raises(SettingsError):
        request(action=action)


def nested(levels):
    """Lists, objects and tuples by turns; the action itself is the first level."""
    found = "x"
    for number in range(levels - 1):
        found = ({"y": found}, [found], (1, found))[number % 3]
    return {**ACTION, "x": found}


@pytest.mark.parametrize("levels", [65, 66, 100, 1000, 100_000])
def test_an_action_that_is_nested_too_deep_is_refused(levels):
    assert request(action=nested(64)).fingerprint
    with pytest.raises(SettingsError, match="64 levels"):
        request(action=nested(levels))


def test_names_as_long_as_they_may_be_fit_into_a_log():
    longest = request("u" * 128, "r" * 100, client_id="c" * 64, client_seq=2**53 - 1)
    assert len(longest.id.encode()) <= 255
    assert all(len(name.encode()) <= 255 for name in longest.rising)


@pytest.mark.parametrize("reply", [None, 0, "", [], {}, {"code": "x"}, "é\u2713", 10**30, [None]])
def test_a_reply_comes_back_as_it_was(reply):
    again = reply_of(kept(Reply(7, reply)), 7)
    assert (again.reply, again.version, again.success, again.cached) == (reply, 7, True, True)


def test_a_refusal_comes_back_as_it_was():
    again = reply_of(kept(Reply(7, None, "NO", "not now")), 7)
    assert again == Reply(7, None, "NO", "not now", cached=True)
    assert not again.success


@pytest.mark.parametrize("data", [b"", b"[]", b"7", b"{}", b'{"code":"x"}', b"\xff"])
def test_what_is_no_reply_of_ours_is_said(data):
    with pytest.raises(CorruptRecordError):
        reply_of(data, 1)


def _deep_one_by_one(what, levels):
    if not isinstance(what, dict | list | tuple):
        return False
    inside = what.values() if isinstance(what, dict) else what
    return not levels or any(_deep_one_by_one(each, levels - 1) for each in inside)


@given(
    st.recursive(
        st.none() | st.text(max_size=2),
        lambda inside: (
            st.lists(inside, max_size=3)
            | st.dictionaries(st.text(max_size=2), inside, max_size=3)
            | st.tuples(inside)
        ),
    ),
    st.integers(0, 6),
)
def test_how_deep_something_is_is_found_level_by_level(what, levels):
    assert is_deeper(what, levels) == _deep_one_by_one(what, levels)
