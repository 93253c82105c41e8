from __future__ import annotations

import json

import pytest

from semel.entries import Entry, Position, Snapshot, beginning
from semel.errors import CorruptRecordError, SettingsError
from semel.rooms import ALL, Request
from semel.rooms.messages import for_viewer, results
from semel.rooms.news import finished, told, written
from semel.rooms.patches import patched
from semel.rooms.standing import Standing, said
from support.rooms import Cards

BEFORE = beginning("s")
AFTER = Position(1, "0123456789ab")


def standing(position, **seats):
    """A room in which these have these cards; `won` by whoever has a capital letter."""
    state = Cards().begin("r")
    for user, card in seats.items():
        state["seats"][user] = {"card": card, "chips": 1}
        if card.isupper():
            state["won"] = {"by": user, "card": card, "pot": 2}
    return Standing(Cards(), position, said(state))


def entry(before, after, events=(), id="id"):
    after.finished = finished(before, after)
    return Entry(AFTER, id, written("r", before, after, events).encode(), 0)


def test_everybody_is_told_what_makes_their_own_view_and_nothing_else():
    before = standing(BEFORE, ann="as", bob="kd")
    after = standing(AFTER, ann="qh", bob="kd", cat="2c")
    news = told(entry(before, after))
    for user in ("ann", "bob", "cat", None):
        view = patched(before.view(user), news.patch(user))
        assert view == after.view(user)
    assert news.patch("stranger") == news.patch(None)
    assert news.users == {"ann", "cat"}  # for bob it is what everybody sees
    shown = "".join(for_viewer(entry(before, after), "bob"))
    assert not any(card in shown for card in ('"as"', '"qh"', '"2c"'))


def test_events_go_to_their_audience():
    before, after = standing(BEFORE, ann="as"), standing(AFTER, ann="as")
    events = [(ALL, 1), (["ann"], 2), (("ann", "bob"), 3), ({"bob": 0}, 4), ([], 5), (["all"], 6)]
    news = told(entry(before, after, events))
    assert news.events("ann") == [1, 2, 3]
    assert news.events("bob") == [1, 3, 4]
    assert news.events(None) == [1]
    assert news.events("all") == [1, 6]
    with pytest.raises(SettingsError):
        written("r", before, after, [("ann", 1)])


def test_a_result_is_told_when_it_comes_and_when_it_is_another_one():
    def hand(ann, bob):
        return [standing(at, ann=ann, bob=bob) for at in (BEFORE, AFTER)]

    (none, none_too), (first, first_too) = hand("as", "kd"), hand("AS", "kd")
    second_too = standing(AFTER, ann="as", bob="KD")
    assert told(entry(none, none_too)).result("ann") is None
    news = told(entry(none, first_too))
    assert news.result("bob") == {"by": "ann", "card": "AS", "pot": 2, "mine": "kd"}
    assert news.result(None)["mine"] is None
    assert told(entry(first, first_too)).result(None) is None
    assert told(entry(first, second_too)).result(None)["by"] == "bob"
    assert told(entry(first, none_too)).result(None) is None


def test_a_result_that_is_still_shown_came_where_it_came():
    first, still = standing(BEFORE, ann="AS"), standing(AFTER, ann="AS")
    first.finished = BEFORE
    assert finished(first, still) == BEFORE
    still.finished = BEFORE
    assert json.loads(results("r", still, "ann")[0])["payload"]["position"] == str(BEFORE)
    assert finished(first, standing(AFTER, ann="as")) is None
    again = Snapshot(still.position, "open", still.kept())
    assert Standing.of(still.room, "r", again).finished == BEFORE
    assert Standing.of(still.room, "r", again).text == still.text


@pytest.mark.parametrize("user", ["ann", "b:3", "ann:b", "", None, "an", "3:ann"])
def test_an_update_names_its_request_to_whoever_has_asked_and_to_nobody_else(user):
    ours = Request("r", "ann", "b:3", {"actionType": "play"})
    news = entry(standing(BEFORE), standing(AFTER, ann="as"), id=ours.id)
    (text,) = for_viewer(news, user)
    assert json.loads(text).get("requestId") == ("b:3" if user == "ann" else None)
    assert ("b:3" in text) == (user == "ann")


def test_an_update_names_what_it_follows():
    (text,) = for_viewer(entry(standing(BEFORE), standing(AFTER, ann="as")), None)
    payload = json.loads(text)["payload"]
    assert (payload["previous"], payload["position"]) == (str(BEFORE), str(AFTER))
    assert (payload["previousVersion"], payload["stateVersion"]) == (0, 1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b"{}",
        b'{"room":"r","after":7,"all":[]}',
        b'{"room":"r","after":"5.0123456789ab","all":[]}',
        b'{"after":"0.0123456789ab","all":[]}',
        b'{"room":"r","after":"0.0123456789ab","all":[],"events":[7]}',
    ],
)
def test_what_is_no_entry_of_ours_is_said(data):
    with pytest.raises(CorruptRecordError):
        told(Entry(AFTER, "id", data, 0))
