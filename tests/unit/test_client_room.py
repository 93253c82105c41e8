"""The rules of a room's client, without a client: the vectors that every client is held to."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.client.room_patches import PatchError, patched
from semel.rooms import patches
from support.room_vectors import FOLDER, Walk, cases, message, snapshot, update

FILES = ("versions", "snapshots", "requests", "optimistic", "clicks", "connection", "garbage")
WALKS = [case for file in FILES for case in cases(file)]
PATCHES = cases("patches")


def named(cases):
    return {"ids": [case["name"] for case in cases]}


# --- the vectors --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", WALKS, **named(WALKS))
@pytest.mark.parametrize("chance", [0.0, 1.0], ids=["least", "most"])
def test_a_guest_does_what_is_written(case, chance):
    walk = Walk(case.get("options", {}), chance)
    for step in case["steps"]:
        walk.take(step)
    assert walk.seen == []  # nothing happened that nobody expected


def test_every_file_is_run():
    assert {path.stem for path in FOLDER.glob("*.json")} == {*FILES, "patches"}


@pytest.mark.parametrize("rule", [f"f{n}" for n in range(1, 10)])
def test_every_rule_of_versions_has_its_case(rule):
    assert [case for case in WALKS if case["name"].startswith(f"{rule}:")]


@pytest.mark.parametrize("case", PATCHES, **named(PATCHES))
def test_a_patch_does_what_is_written(case):
    before = copy.deepcopy(case["before"])
    if case.get("refused"):
        with pytest.raises(PatchError):
            patched(before, case["patch"])
    else:
        assert printed(patched(before, case["patch"])) == printed(case["after"])
        assert printed(patches.patched(before, case["patch"])) == printed(case["after"])
    assert before == case["before"]  # what it was made from stays as it is


MADE = [case for case in PATCHES if case.get("diff")]


@pytest.mark.parametrize("case", MADE, **named(MADE))
def test_a_server_makes_the_patch_that_is_written(case):
    assert printed(patches.diff(case["before"], case["after"])) == printed(case["patch"])


def printed(found):
    """Told apart as JSON does it: Python takes 1 for True."""
    return json.dumps(found)


# --- what nobody wrote down ---------------------------------------------------------------------

LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "0", "é"])
KEYS = st.sampled_from(["", "a", "b", "0", "__proto__"])
STATES = st.recursive(
    LEAVES, lambda s: st.lists(s, max_size=4) | st.dictionaries(KEYS, s, max_size=4), max_leaves=12
)


@given(STATES, STATES)
@settings(max_examples=300, deadline=None)
def test_both_make_the_same_of_a_patch(before, after):
    was, patch = copy.deepcopy(before), patches.diff(before, after)
    assert sorted_(patched(before, patch)) == sorted_(after)
    assert sorted_(patches.patched(before, patch)) == sorted_(after)
    assert before == was


def sorted_(found):
    return json.dumps(found, sort_keys=True)


OPERATIONS = st.lists(st.lists(KEYS | st.integers(-1, 3), max_size=3) | STATES, max_size=3)


@given(STATES, st.lists(OPERATIONS, max_size=3) | STATES)
@settings(max_examples=300, deadline=None)
def test_a_patch_fits_or_changes_nothing(before, patch):
    was = copy.deepcopy(before)
    try:
        made = patched(before, patch)
    except PatchError:
        made = None
    if made is not None:
        assert sorted_(made) == sorted_(patches.patched(before, patch))
    assert before == was


MESSAGES = st.one_of(
    st.builds(
        lambda since, by, tag: update(
            **{"from": since}, to=f"{since + by}.{tag * 12}", patch=[[["n"], since + by]]
        ),
        st.integers(0, 9),
        st.integers(1, 3),
        st.sampled_from("0b"),
    ),
    st.integers(1, 12).map(lambda n: update(**{"from": n - 1}, to=n, patch=[[["n"], n]])),
    st.integers(0, 12).map(lambda n: snapshot(version=n, state={"n": n})),
    st.dictionaries(st.sampled_from(["stateVersion", "position", "patch"]), STATES).map(
        lambda payload: message("TABLE_STATE_UPDATE", payload)
    ),
    STATES.map(lambda state: {"type": "HEARTBEAT", "payload": {"heads": state}}),
)


@given(st.lists(MESSAGES, max_size=30), st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=200, deadline=None)
def test_whatever_comes_the_state_is_that_of_its_version(said, chance):
    """Every update and snapshot above says its number: so does the state, at any time."""
    walk = Walk({"at": 3, "state": {"n": 3}}, chance)
    for each in said:
        walk.take({"message": each})
        walk.take({"pass_ms": 300})
        assert walk.guest.confirmed == {"n": walk.guest.version}
    shown = [each["version"] for each in walk.seen if "state" in each]
    assert all(each["state"] == {"n": each["version"]} for each in walk.seen if "state" in each)
    assert walk.guest.version == (shown[-1] if shown else 3)
    asked = [each for each in walk.seen if each.get("send") == "REQUEST_SNAPSHOT"]
    assert len(asked) <= len(said) + 1  # and one that was not answered


@given(st.permutations(range(4, 12)), st.sampled_from([0.0, 1.0]))
@settings(max_examples=100, deadline=None)
def test_updates_in_any_order_are_made_in_theirs_and_events_come_once(order, chance):
    walk = Walk({"at": 3, "state": {"n": 3}}, chance)
    for n in order:
        walk.take({"update": {"from": n - 1, "to": n, "patch": [[["n"], n]], "events": [n]}})
    assert walk.guest.version == 11
    assert [each["event"] for each in walk.seen if "event" in each] == list(range(4, 12))
    assert len([each for each in walk.seen if each.get("send")]) <= 1  # one question, if any


@given(
    st.lists(st.sampled_from(["act", "answer", "retry", "refuse", "cut", "pass"]), max_size=40),
    st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_each_request_is_settled_once_and_sent_with_one_number(doings, chance):
    walk = Walk({"at": 3, "state": {"count": 0}, "optimistic": "add"}, chance)
    asked = []
    for doing in doings:
        do(walk, doing, asked)
    walk.take({"pass_ms": 60_000})
    settled = [each["id"] for each in walk.seen if ANSWERS & set(each)]
    assert sorted(settled) == asked
    sent = {(each["id"], each["seq"]) for each in walk.seen if each.get("send") == ACTION}
    assert len(sent) == len({id for id, _ in sent}) == len({seq for _, seq in sent})
    assert walk.guest.state == walk.guest.confirmed
    assert walk.guest.pending == 0


ACTION = "ACTION_REQUEST"
ANSWERS = {"done", "refused", "unanswered"}


def do(walk, doing, asked):
    sent = [each["id"] for each in walk.seen if each.get("send") == ACTION]
    match doing:
        case "act":
            asked.append(walk.made + 1)
            walk.take({"act": {"actionType": "add", "by": walk.made}, "request": walk.made + 1})
        case "answer" | "retry" | "refuse" if sent:
            error = {"code": "NO", "retry": doing == "retry"}
            told = {"version": 3} if doing == "answer" else {"version": 3, "error": error}
            walk.take({"result": told, "id": sent[-1]})
        case "cut":
            walk.take({"close": 1006})
            walk.take({"connect": None})
            walk.take({"joined": {"head": 3, "resumed": True}})
        case "pass":
            walk.take({"pass_ms": 700})
