"""Rooms without a door: what an action costs, what it is answered, and what goes wrong.

In simulated time: whoever is woken next is drawn by lot.
"""

from __future__ import annotations

import asyncio
import copy
import logging

import pytest

from semel.colour import ASYNC
from semel.errors import (
    ConcurrentActionError,
    IdempotencyConflictError,
    SettingsError,
    StoreUnavailableError,
)
from semel.rooms import Accepted, Deadline, Refused, Room, Rooms
from semel.rooms.room import ALL
from support.rooms import (
    ROOM,
    STREAM,
    Cards,
    acted,
    chips_of,
    dealt,
    rooms_on,
    simulated,
    state_of,
)

# --- what it costs ------------------------------------------------------------------------------


@simulated()
async def test_an_action_is_one_append_and_nothing_else(store):
    rooms = rooms_on(store)
    await acted(rooms, "ann", "sit")
    assert store.count() == {"load": 1, "append": 1}  # it came into memory
    for number in range(5):
        await acted(rooms, "ann", "say", text=number)
        assert store.count() == {"append": 1}
    await acted(rooms, "ann", "dance")
    assert store.count() == {"append": 1}  # a refusal, too
    await rooms.aclose()


@simulated()
async def test_a_duplicate_is_one_append_and_is_in_the_log_once(store):
    rooms = rooms_on(store)
    first = await acted(rooms, "ann", "sit", "a-1")
    store.count()
    again = await acted(rooms, "ann", "sit", "a-1")
    assert store.count() == {"append": 1}
    assert (first.cached, again.cached, again.version) == (False, True, first.version)
    assert len((await rooms.log.read(STREAM)).entries) == 1
    await rooms.aclose()


@simulated()
async def test_a_turn_that_is_noted_already_costs_one_append(store):
    rooms = rooms_on(store, Cards(turn_s=30))
    rooms.start()
    await dealt(rooms, "ann", "bob")
    store.count()
    await acted(rooms, "ann", "play")
    assert store.count() == {"append": 1}
    await rooms.aclose()


@simulated()
async def test_a_room_that_another_process_has_moved_is_loaded_once(store):
    here, there = rooms_on(store), rooms_on(store)
    await acted(here, "ann", "sit")
    await acted(there, "bob", "sit")
    store.count()
    assert (await acted(here, "ann", "say")).version == 3
    assert store.count() == {"append": 2, "load": 1}
    assert here.status().conflicts == 1
    await asyncio.gather(here.aclose(), there.aclose())


@simulated()
async def test_who_follows_a_room_finds_out_before_it_is_refused(store):
    here, there = rooms_on(store), rooms_on(store)
    await acted(here, "ann", "sit")
    following = here.follow(ROOM, None)
    await following.ready()
    await acted(there, "bob", "sit")
    while here.head(STREAM).offset < 2:
        await asyncio.sleep(0.01)
    store.count()
    assert (await acted(here, "ann", "say")).version == 3
    assert store.count() == {"append": 1, "load": 1}
    assert here.status().conflicts == 0
    following.close()
    await asyncio.gather(here.aclose(), there.aclose())


# --- once ---------------------------------------------------------------------------------------


ODD = {"text": 'é\u2713 "\\ \x00', "nested": [{"a": None}, True, 1.5, -0.0, 10**30], "": {}}


@simulated()
async def test_replies_come_back_to_the_byte_and_refusals_too(store):
    rooms = rooms_on(store)
    taken = await acted(rooms, "ann", "say", "a-1", text=ODD)
    refused = await acted(rooms, "ann", "dance", "a-2")
    await acted(rooms, "bob", "sit")
    for again in (rooms, other := rooms_on(store)):
        one = await acted(again, "ann", "say", "a-1", text=ODD)
        assert (one.cached, one.version, one.success) == (True, 1, True)
        assert repr(one.reply) == repr(taken.reply) == repr(ODD)
        two = await acted(again, "ann", "dance", "a-2")
        assert (two.cached, two.version, two.code) == (True, 1, "INVALID")
        assert two.message == refused.message
    assert (await rooms.standing(ROOM)).version == 2
    await asyncio.gather(rooms.aclose(), other.aclose())


@simulated()
async def test_an_id_that_was_used_for_something_else_is_refused(store):
    rooms = rooms_on(store)
    await acted(rooms, "ann", "say", "a-1", text="one")
    for other in (rooms, cold := rooms_on(store)):
        for words in ({"text": "two"}, {"text": "one", "more": 1}, {"text": "one ", "at": 0}):
            with pytest.raises(IdempotencyConflictError):
                await acted(other, "ann", "say", "a-1", **words)
        with pytest.raises(IdempotencyConflictError):
            await acted(other, "ann", "say", "a-1", text="one", expected_version=0)
    assert (await acted(rooms, "ann", "say", "a-1", text="one")).cached
    await asyncio.gather(rooms.aclose(), cold.aclose())


@simulated()
async def test_an_id_in_use_for_something_else_is_refused_at_once(store):
    rooms = rooms_on(store)
    await acted(rooms, "ann", "sit")
    store.hold()
    running = asyncio.ensure_future(acted(rooms, "ann", "say", "a-1", text="one"))
    await asyncio.sleep(1)
    with pytest.raises(IdempotencyConflictError):
        await acted(rooms, "ann", "say", "a-1", text="two")
    store.let_go()
    assert (await running).success
    await rooms.aclose()


@simulated()
async def test_members_in_another_order_are_the_same_request(store):
    rooms = rooms_on(store)
    await rooms.act(ROOM, "ann", "a-1", {"actionType": "say", "text": {"x": 1, "y": 2}})
    again = await rooms.act(ROOM, "ann", "a-1", {"text": {"y": 2, "x": 1}, "actionType": "say"})
    assert again.cached
    await rooms.aclose()


@simulated()
async def test_an_id_belongs_to_its_user_and_room(store):
    rooms = rooms_on(store)
    for user in ("ann", "bob", "b", "1:a"):
        assert not (await acted(rooms, user, "say", "1", text=user)).cached
        assert not (await acted(rooms, user, "say", "1", room="t2", text=user)).cached
    # These would be the same, if one were only written behind the other.
    for user, id in (("a", "b:c"), ("a:b", "c")):
        assert not (await acted(rooms, user, "say", id, text=user)).cached
    assert not (await rooms.system(ROOM, "1", {"actionType": "say", "text": 0})).cached
    await rooms.aclose()


@simulated()
async def test_of_two_at_once_the_same_is_shared_and_another_is_told_to_wait(store):
    rooms = rooms_on(store)
    await acted(rooms, "ann", "sit")
    store.count()
    store.hold()
    first = asyncio.ensure_future(acted(rooms, "ann", "say", "a-1", text="one"))
    await asyncio.sleep(0.01)
    twins = [asyncio.ensure_future(acted(rooms, "ann", "say", "a-1", text="one")) for _ in range(3)]
    await asyncio.sleep(0.01)
    with pytest.raises(ConcurrentActionError):
        await acted(rooms, "ann", "say", "a-2", text="two")
    assert store.count() == {"append": 1}
    bob = asyncio.ensure_future(acted(rooms, "bob", "sit"))  # whoever else is not in the way
    store.let_go()
    replies = await asyncio.gather(first, *twins)
    assert [reply.cached for reply in replies] == [False, True, True, True]
    assert {reply.reply for reply in replies} == {"one"}
    assert {reply.version for reply in (*replies, await bob)} == {2, 3}
    assert (await acted(rooms, "ann", "say", "a-2", text="two")).version == 4
    await rooms.aclose()


@simulated(1, 2, 3)
async def test_when_who_asked_first_is_cut_off_the_others_ask_for_themselves(store):
    rooms = rooms_on(store)
    await acted(rooms, "ann", "sit")
    store.hold()
    first = asyncio.ensure_future(acted(rooms, "ann", "say", "a-1", text="one"))
    await asyncio.sleep(0.01)
    second = asyncio.ensure_future(acted(rooms, "ann", "say", "a-1", text="one"))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.01)
    store.let_go()
    assert (await second).version == 2
    assert first.cancelled()
    assert (await acted(rooms, "ann", "say", "a-2", text="two")).version == 3
    await rooms.aclose()


# --- clients that number their requests ---------------------------------------------------------


@simulated()
async def test_a_number_says_no_when_its_id_is_long_forgotten(store):
    rooms = rooms_on(store, replay=2, requests_s=60)
    ann = {"client_id": "tab", "client_seq": 1}
    assert (await acted(rooms, "ann", "say", "a-1", **ann)).success
    assert (await acted(rooms, "ann", "say", "a-1", **ann)).cached
    for number in range(2, 30):
        await asyncio.sleep(10)
        numbered = {"client_id": "tab", "client_seq": number}
        assert (await acted(rooms, "ann", "say", f"a-{number}", **numbered)).success
    late = await acted(rooms, "ann", "say", "a-1", **ann)
    assert (late.success, late.code, late.cached) == (False, "SUPERSEDED", False)
    assert late.version == (await rooms.standing(ROOM)).version == 29
    # Without a number nothing is left to know it by.
    assert (await acted(rooms, "ann", "say", "b-1")).version == 30
    assert rooms.status().refused == {"SUPERSEDED": 1}
    await rooms.aclose()


@simulated()
async def test_a_number_that_was_taken_by_another_id_is_superseded(store):
    rooms = rooms_on(store)
    assert (await acted(rooms, "ann", "say", "a-5", client_id="tab", client_seq=5)).success
    for number in (5, 4, 1):
        late = await acted(rooms, "ann", "say", f"x-{number}", client_id="tab", client_seq=number)
        assert late.code == "SUPERSEDED"
    # What went before is no hole that anybody waits for.
    assert (await acted(rooms, "ann", "say", "a-9", client_id="tab", client_seq=9)).version == 2
    await rooms.aclose()


@simulated()
async def test_numbers_belong_to_a_client_of_a_user(store):
    rooms = rooms_on(store)
    for user, client in (("ann", "tab"), ("ann", "phone"), ("bob", "tab"), ("a", "nn:tab")):
        reply = await acted(rooms, user, "say", "1", client_id=client, client_seq=7)
        assert reply.success
        assert not reply.cached or (user, client) == ("ann", "phone")
    await rooms.aclose()


@simulated()
async def test_a_refusal_takes_its_number(store):
    rooms = rooms_on(store)
    ann = {"client_id": "tab"}
    assert (await acted(rooms, "ann", "dance", "a-1", client_seq=1, **ann)).code == "INVALID"
    assert (await acted(rooms, "ann", "dance", "a-1", client_seq=1, **ann)).cached
    assert (await acted(rooms, "ann", "dance", "a-2", client_seq=1, **ann)).code == "SUPERSEDED"
    await rooms.aclose()


# --- versions -----------------------------------------------------------------------------------


@simulated()
async def test_an_expected_version_that_is_not_the_rooms_is_refused_and_kept(store):
    rooms = rooms_on(store)
    await acted(rooms, "ann", "sit")
    for expected in (0, 2, 2**53 - 1):
        stale = await acted(rooms, "ann", "say", f"v-{expected}", expected_version=expected)
        assert (stale.code, stale.version) == ("STATE_STALE_VERSION", 1)
    assert (await acted(rooms, "ann", "say", "right", expected_version=1)).version == 2
    # It is decided: the same gets the same, though the version would be right by now.
    again = await acted(rooms, "ann", "say", "v-2", expected_version=2)
    assert (again.code, again.cached) == ("STATE_STALE_VERSION", True)
    await rooms.aclose()


@simulated()
async def test_an_expected_version_that_another_process_has_passed_is_refused(store):
    here, there = rooms_on(store), rooms_on(store)
    await acted(here, "ann", "sit")
    await acted(there, "bob", "sit")
    reply = await acted(here, "ann", "say", expected_version=1)
    assert (reply.code, reply.version) == ("STATE_STALE_VERSION", 2)
    await asyncio.gather(here.aclose(), there.aclose())


@simulated()
async def test_what_makes_a_room_too_large_is_refused_and_kept(store):
    rooms = rooms_on(store, most_bytes=1000)
    big = "é" * 480
    rooms.room.gives = lambda state, ctx: Accepted({**state, "big": big})
    refused = await acted(rooms, "ann", "give", "a-1")
    assert (refused.code, refused.version) == ("TOO_LARGE", 0)
    # An entry may be larger than the state: each member is told all of it.
    rooms.room.gives = lambda state, ctx: Accepted(state, events=[(ALL, big), (ALL, big)])
    assert (await acted(rooms, "ann", "give", "a-2")).code == "TOO_LARGE"
    rooms.room.gives = lambda state, ctx: Accepted(state, "small")
    assert (await acted(rooms, "ann", "give", "a-3")).version == 1
    assert (await acted(rooms, "ann", "give", "a-1")).cached
    await rooms.aclose()


# --- rules that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["begin", "apply", "view", "members", "deadline", "result"])
@simulated(1)
async def test_rules_that_raise_change_nothing_and_are_no_answer_for_good(store, method, caplog):
    rooms = rooms_on(store)
    if method != "begin":
        await acted(rooms, "ann", "sit", "a-1")
    rooms.room.fails = {method}
    caplog.clear()
    failed = await acted(rooms, "ann", "say", "a-2", text=1)
    version = 0 if method == "begin" else 1
    assert (failed.success, failed.code, failed.version) == (False, "FAILED", version)
    assert "ZeroDivisionError" in caplog.text
    assert (await rooms.log.load(STREAM)).position.offset == version
    if method != "begin":
        answered = await acted(rooms, "ann", "sit", "a-1")
        assert (answered.cached, answered.reply) == (True, {"seat": 1})
        with pytest.raises(IdempotencyConflictError):
            await acted(rooms, "ann", "say", "a-1")
    rooms.room.fails = set()
    assert (await acted(rooms, "ann", "say", "a-2", text=1)).version == version + 1
    assert rooms.status().refused == {"FAILED": 1}
    await rooms.aclose()


@simulated()
async def test_a_numbered_request_that_failed_may_be_sent_again(store, caplog):
    rooms = rooms_on(store)
    numbered = {"client_id": "tab", "client_seq": 1}
    rooms.room.fails = {"apply"}
    assert (await acted(rooms, "ann", "say", "a-1", **numbered)).code == "FAILED"
    rooms.room.fails = set()
    assert (await acted(rooms, "ann", "say", "a-1", **numbered)).success
    rooms.room.fails = {"apply"}
    late = await acted(rooms, "ann", "say", "a-0", **numbered)
    assert (late.code, late.version) == ("SUPERSEDED", 1)
    await rooms.aclose()


WRONG = {
    "nothing": lambda state, ctx: None,
    "the state alone": lambda state, ctx: state,
    "NaN": lambda state, ctx: Accepted({**state, "x": float("nan")}),
    "infinity in a reply": lambda state, ctx: Accepted(state, float("inf")),
    "a set": lambda state, ctx: Accepted({**state, "x": {1}}),
    "bytes in an event": lambda state, ctx: Accepted(state, events=[(ALL, b"x")]),
    "a number that no JSON has": lambda state, ctx: Accepted({**state, "x": 10**5000}),
    "half a letter": lambda state, ctx: Accepted({**state, "x": "\ud800"}),
    "half a letter in a reply": lambda state, ctx: Accepted(state, "\ud800"),
    "half a letter in an event": lambda state, ctx: Accepted(state, events=[(ALL, "\ud800")]),
    "half a letter in a refusal": lambda state, ctx: Refused("NO", "\ud800"),
    "itself": lambda state, ctx: Accepted(_in_itself(state)),
    "too deep": lambda state, ctx: Accepted(_deep(5000)),
    "an audience that is a name": lambda state, ctx: Accepted(state, events=[("ann", 1)]),
    "an audience of nobody": lambda state, ctx: Accepted(state, events=[([None], 1)]),
    "an audience of a number": lambda state, ctx: Accepted(state, events=[([7], 1)]),
    "an audience of lists": lambda state, ctx: Accepted(state, events=[([["ann"]], 1)]),
    "an event without audience": lambda state, ctx: Accepted(state, events=["x"]),
    "a key that is no text": lambda state, ctx: Accepted({**state, (1, 2): 3}),
    "the end of the process": lambda state, ctx: Accepted(state, Room),
}


def _in_itself(state):
    state["state"] = state
    return state


def _deep(levels):
    deep = []
    for _ in range(levels):
        deep = [deep]
    return deep


@pytest.mark.parametrize("gives", WRONG.values(), ids=WRONG)
@simulated(1)
async def test_what_json_cannot_say_fails_and_changes_nothing(store, gives, caplog):
    rooms = rooms_on(store)
    await acted(rooms, "ann", "sit")
    rooms.room.gives = gives
    assert (await acted(rooms, "ann", "give", "a-1")).code == "FAILED"
    assert (await acted(rooms, "ann", "say")).version == 2
    await rooms.aclose()


@pytest.mark.parametrize("members", [[None], [7], ["ann", ["bob"]]], ids=repr)
@simulated(1)
async def test_members_that_are_no_names_fail(store, members, caplog):
    """None would be everybody, and a number another one when it comes back."""
    rooms = rooms_on(store)
    rooms.room.members = lambda state: members
    assert (await acted(rooms, "ann", "say")).code == "FAILED"
    assert "no user's name" in caplog.text
    await rooms.aclose()


@simulated(1)
async def test_after_a_failover_too_nobody_fails_on_what_never_was(store):
    def gives(state, ctx):
        match ctx.user:
            case "eve":
                return Accepted({**state, "closed": True})
            case "ann" if state.get("closed"):
                return Refused("INVALID", "it is closed")
            case "ann":
                return Accepted({**state, "mark": 1})
        if "mark" in state:
            raise ZeroDivisionError("a state that nobody has seen")
        return Accepted(state)

    rooms, other = rooms_on(store), rooms_on(type(store)(store.inner, store.clock))
    rooms.room.gives = other.room.gives = gives
    await acted(rooms, "ann", "sit")
    streams = store.inner._log._streams
    before = copy.deepcopy(streams)
    for _ in range(5):
        await acted(rooms, "ann", "say")
    streams.clear()
    streams.update(before)
    await acted(rooms, "ann", "say")  # finds out, and goes on from there
    store.hold()
    ann = asyncio.ensure_future(acted(rooms, "ann", "give"))
    await asyncio.sleep(0.01)
    bob = asyncio.ensure_future(acted(rooms, "bob", "give"))
    await asyncio.sleep(0.01)
    assert (await acted(other, "eve", "give")).success
    await asyncio.sleep(0.5)
    store.let_go()
    assert [(await ann).code, (await bob).code] == ["INVALID", ""]
    await asyncio.gather(rooms.aclose(), other.aclose())


DEADLINES = {
    "NaN": Deadline("t", float("nan")),
    "never": Deadline("t", float("inf")),
    "no name": Deadline("", 1.0),
    "no text": Deadline(7, 1.0),
    "too long": Deadline("x" * 93, 1.0),
    "a line break": Deadline("a\nb", 1.0),
    "half a letter": Deadline("\ud800", 1.0),
    "a time of day": Deadline("t", "12:00"),
    "milliseconds": Deadline("t", 1_700_000_000_000),
    "a number": 30.0,
}


@pytest.mark.parametrize("deadline", DEADLINES.values(), ids=DEADLINES)
@simulated(1)
async def test_a_deadline_that_nobody_could_look_after_fails(store, deadline, caplog):
    """What is found out when the turn is over is found out too late."""
    rooms = rooms_on(store)
    rooms.room.deadline = lambda state: deadline
    assert (await acted(rooms, "ann", "say")).code == "FAILED"
    await rooms.aclose()


class Tuples(Room):
    """Tuples are lists when they come back; for everybody, and from the first time on."""

    def apply(self, state, action, ctx):
        return Accepted({"x": (1, 2), "big": 10**400}, ("a", {"b": ()}))

    def view(self, state, viewer):
        return {"all": (state,)}


@simulated()
async def test_tuples_are_lists_for_everybody(store):
    rooms = rooms_on(store, Tuples())
    reply = await acted(rooms, "ann", "go", "a-1")
    again = await acted(rooms, "ann", "go", "a-1")
    assert reply.reply == again.reply == ["a", {"b": []}]
    standing = await rooms.standing(ROOM)
    assert standing.state() == {"x": [1, 2], "big": 10**400}
    assert standing.view(None) == {"all": [standing.state()]}
    await rooms.aclose()


ODD_KEYS = {
    "state['seats']": lambda state, ctx: Accepted({**state, "seats": {1: "ann"}}),
    "state['x'][1]": lambda state, ctx: Accepted({**state, "x": ("tuples are fine", {2: 3})}),
    "reply": lambda state, ctx: Accepted(state, {1: "ann"}),
    "event": lambda state, ctx: Accepted(state, events=[(ALL, {1: "ann"})]),
}


@pytest.mark.parametrize("where", ODD_KEYS)
@simulated(1)
async def test_a_key_that_would_come_back_as_text_fails_and_the_log_says_where(
    store, where, caplog
):
    """Taken, it would not be found any more by the rules that have written it."""
    rooms = rooms_on(store)
    rooms.room.gives = ODD_KEYS[where]
    assert (await acted(rooms, "ann", "give")).code == "FAILED"
    assert f"{where} has the key " in caplog.text
    assert (await acted(rooms, "ann", "say")).version == 1
    await rooms.aclose()


@pytest.mark.parametrize("method", ["begin", "view", "result"])
@simulated(1)
async def test_also_where_a_room_begins_and_where_it_is_shown(store, method, caplog):
    rooms = rooms_on(store)
    setattr(rooms.room, method, lambda *_: {"x": {1: 2}})
    assert (await acted(rooms, "ann", "say")).code == "FAILED"
    assert f"{'state' if method == 'begin' else method}['x'] has the key 1" in caplog.text
    await rooms.aclose()


class Spoiling(Cards):
    """Changes whatever it is given, as rules promise not to."""

    def apply(self, state, action, ctx):
        if action["actionType"] == "spoil":
            state["seats"].clear()
            action["spoilt"] = True
            return Refused("NO")
        return super().apply(state, action, ctx)

    def view(self, state, viewer):
        for name, seat in state["seats"].items():
            if name != viewer:
                seat.pop("card")
        state["ends_s"] = None
        return state

    def members(self, state):
        names = list(state["seats"])
        state["seats"] = {}
        return names

    def result(self, state, viewer):
        state["seats"] = "spoilt"

    def deadline(self, state):
        state["turn"] = "spoilt"


@simulated()
async def test_rules_that_change_what_they_are_given_spoil_nothing(store):
    rooms, proper = rooms_on(store, Spoiling()), rooms_on(store)
    await dealt(rooms, "ann", "bob")
    action = {"actionType": "spoil"}
    await rooms.act(ROOM, "ann", "a-1", action)
    assert (await rooms.act(ROOM, "ann", "a-1", {"actionType": "spoil"})).cached
    await acted(rooms, "bob", "say")
    state = await state_of(rooms)
    assert set(state["seats"]) == {"ann", "bob"}
    standing, right = await rooms.standing(ROOM), await proper.standing(ROOM)
    for _ in range(2):
        for viewer in ("bob", None, "ann"):
            assert standing.view(viewer) == right.view(viewer)
        assert standing.members == right.members
    await asyncio.gather(rooms.aclose(), proper.aclose())


@simulated()
async def test_a_refusal_without_a_code_is_a_refusal(store):
    rooms = rooms_on(store)
    rooms.room.gives = lambda state, ctx: Refused("", "no")
    for _ in range(2):
        reply = await acted(rooms, "ann", "give", "a-1")
        assert (reply.success, reply.code, reply.message) == (False, "INVALID", "no")
    await rooms.aclose()


# --- several processes --------------------------------------------------------------------------


@simulated(1, 2, 3)
async def test_two_processes_in_one_room_both_get_on_and_lose_nothing(store):
    store.delay_s = 0.001
    homes = [rooms_on(store), rooms_on(store)]
    users = [f"u{n}" for n in range(6)]
    for user in users:
        await acted(homes[0], user, "sit")

    async def say(number, user):
        return [
            await acted(homes[number % 2], user, "say", f"{user}-{n}", text=f"{user}-{n}")
            for n in range(10)
        ]

    replies = await asyncio.gather(*(say(number, user) for number, user in enumerate(users)))
    for mine in replies:
        versions = [reply.version for reply in mine]
        assert versions == sorted(versions)
    taken = [reply.version for mine in replies for reply in mine]
    assert sorted(taken) == list(range(7, 67))
    entries = (await homes[0].log.read(STREAM, limit=1000)).entries
    assert [entry.position.offset for entry in entries] == list(range(1, 67))
    assert len({entry.id for entry in entries}) == 66
    assert sum(home.status().conflicts for home in homes) > 0
    assert sum(home.status().accepted for home in homes) == 66
    await asyncio.gather(*(home.aclose() for home in homes))


@simulated(1, 2, 3)
async def test_of_the_same_request_to_two_processes_one_is_done(store):
    store.delay_s = 0.001
    here, there = rooms_on(store), rooms_on(store)
    for number in range(10):
        asked = [acted(home, "ann", "say", f"a-{number}", text=1) for home in (here, there)]
        replies = await asyncio.gather(*asked)
        assert sorted(reply.cached for reply in replies) == [False, True]
        assert {reply.version for reply in replies} == {number + 1}
    await asyncio.gather(here.aclose(), there.aclose())


@simulated(1, 2)
async def test_chips_are_neither_made_nor_lost_by_a_race(store):
    store.delay_s = 0.001
    homes = [rooms_on(store) for _ in range(3)]
    users = ["ann", "bob", "cat", "dan"]
    await dealt(homes[0], *users)

    async def play(home, user):
        for number in range(8):
            await acted(home, user, "play", f"{user}-{number}", amount=3)
            state = await state_of(home)
            if state["turn"] is None:
                await acted(home, user, "deal")

    await asyncio.gather(*(play(home, user) for home in homes[:2] for user in users[::2]))
    await asyncio.gather(*(play(homes[2], user) for user in users))
    assert chips_of(await state_of(homes[0])) == 400
    await asyncio.gather(*(home.aclose() for home in homes))


# --- several on their way -----------------------------------------------------------------------


@simulated(1, 2, 3)
async def test_many_are_on_their_way_in_one_room_and_each_follows_the_last(store):
    rooms = rooms_on(store)
    users = [f"u{n}" for n in range(8)]
    await acted(rooms, "x", "sit")
    store.count()
    store.hold()
    asked = [asyncio.ensure_future(acted(rooms, user, "sit", "1")) for user in users]
    await asyncio.sleep(0.1)
    assert store.count() == {"append": 8}  # nobody waits for the one before
    store.let_go()
    replies = await asyncio.gather(*asked)
    # They arrive in any order here; who comes too soon is refused by the log, and comes again.
    assert sorted(reply.version for reply in replies) == list(range(2, 10))
    assert {reply.reply["seat"] for reply in replies} == set(range(2, 10))
    assert set((await state_of(rooms))["seats"]) == {"x", *users}
    await rooms.aclose()


@simulated(1, 2, 3)
async def test_a_conflict_in_the_middle_takes_those_behind_it_along_and_all_arrive(store):
    here, there = rooms_on(store), rooms_on(store)
    await acted(here, "x", "sit")
    store.hold()
    asked = [asyncio.ensure_future(acted(here, f"u{n}", "sit", "1")) for n in range(4)]
    await asyncio.sleep(0.1)
    # Another process is faster than all of them.
    inner = store.inner.log(ASYNC)
    before = (await inner.load(STREAM)).position
    held, store.held = store.held, {}
    assert (await acted(there, "y", "sit")).version == before.offset + 1
    store.held = held
    more = [asyncio.ensure_future(acted(here, f"v{n}", "sit", "1")) for n in range(4)]
    await asyncio.sleep(0.1)
    store.let_go()
    replies = await asyncio.gather(*asked, *more)
    assert sorted(reply.version for reply in replies) == list(range(3, 11))
    assert len((await state_of(here))["seats"]) == 10
    assert here.status().conflicts >= 4
    await asyncio.gather(here.aclose(), there.aclose())


@simulated(1, 2, 3)
async def test_a_duplicate_among_those_on_their_way_harms_nobody(store):
    here, there = rooms_on(store), rooms_on(store)
    await acted(here, "x", "sit")
    await acted(there, "ann", "sit", "a-1")
    store.hold()
    asked = [
        asyncio.ensure_future(acted(here, user, "sit", id))
        for user, id in (("bob", "1"), ("ann", "a-1"), ("cat", "1"))
    ]
    await asyncio.sleep(0.1)
    store.let_go()
    bob, ann, cat = await asyncio.gather(*asked)
    assert (ann.cached, ann.version) == (True, 2)
    assert {bob.version, cat.version} == {3, 4}
    assert list((await state_of(here))["seats"])[:2] == ["x", "ann"]
    await asyncio.gather(here.aclose(), there.aclose())


# --- a store that does not answer ---------------------------------------------------------------


@pytest.mark.parametrize("lost", ["lose_request", "lose_reply"])
@simulated()
async def test_an_answer_that_is_lost_is_asked_for_again_and_done_once(store, lost):
    rooms = rooms_on(store)
    await acted(rooms, "ann", "sit")
    getattr(store, lost)["append", STREAM] = 2
    reply = await acted(rooms, "ann", "say", "a-1", text="x")
    assert (reply.version, reply.reply) == (2, "x")
    assert reply.cached == (lost == "lose_reply")
    assert (await rooms.standing(ROOM)).version == 2
    await rooms.aclose()


@pytest.mark.parametrize("lost", ["lose_request", "lose_reply"])
@simulated()
async def test_when_nobody_knows_the_same_id_settles_it(store, lost):
    rooms = rooms_on(store)
    await acted(rooms, "ann", "sit")
    getattr(store, lost)["append", STREAM] = 10**6
    with pytest.raises(StoreUnavailableError):
        await acted(rooms, "ann", "say", "a-1", text="x")
    getattr(store, lost).clear()
    reply = await acted(rooms, "ann", "say", "a-1", text="x")
    assert (reply.version, reply.cached) == (2, lost == "lose_reply")
    assert (await acted(rooms, "bob", "sit")).version == 3
    await rooms.aclose()


@simulated()
async def test_an_outage_while_many_are_on_their_way_leaves_no_hole(store):
    rooms = rooms_on(store)
    await acted(rooms, "x", "sit")
    store.lose_reply["append", STREAM] = 3
    store.lose_request["append", STREAM] = 3
    replies = await asyncio.gather(*(acted(rooms, f"u{n}", "sit", "1") for n in range(6)))
    assert sorted(reply.version for reply in replies) == list(range(2, 8))
    assert len((await state_of(rooms))["seats"]) == 7
    await rooms.aclose()


@simulated()
async def test_rules_that_fail_while_the_store_is_away_leave_it_open(store, caplog):
    rooms = rooms_on(store)
    await acted(rooms, "ann", "sit", "a-1")
    rooms.room.fails = {"apply"}
    store.lose_request["append", STREAM] = 10**6
    with pytest.raises(StoreUnavailableError):
        await acted(rooms, "ann", "sit", "a-1")
    store.lose_request.clear()
    assert (await acted(rooms, "ann", "sit", "a-1")).cached
    await rooms.aclose()


@simulated()
async def test_a_failover_that_takes_back_what_was_decided_on_is_noticed(store):
    """The position stands for the history, not only for its length."""
    rooms = rooms_on(store)
    await acted(rooms, "ann", "sit")
    streams = store.inner._log._streams
    before = copy.deepcopy(streams)
    await acted(rooms, "bob", "sit", "b-1")
    streams.clear()
    streams.update(before)
    await rooms_on(store).act(ROOM, "cat", "c-1", {"actionType": "sit"})
    reply = await acted(rooms, "dan", "sit")
    assert reply.version == 3
    assert list((await state_of(rooms))["seats"]) == ["ann", "cat", "dan"]
    await rooms.aclose()


# --- memory -------------------------------------------------------------------------------------


@simulated()
async def test_rooms_that_nobody_uses_leave_memory_and_busy_ones_stay(store):
    rooms = rooms_on(store, idle_s=20)
    rooms.start()
    for number in range(10):
        await acted(rooms, "ann", "sit", room=f"r{number}")
    assert rooms.status().rooms == 10
    store.hold("table:room:r0")
    slow = asyncio.ensure_future(acted(rooms, "ann", "say", room="r0"))
    for _ in range(10):
        await asyncio.sleep(5)
        await acted(rooms, "ann", "say", room="r1")
    assert rooms.status().rooms == 2
    store.let_go("table:room:r0")
    assert (await slow).version == 2
    await asyncio.sleep(60)
    assert rooms.status().rooms == 0
    assert (await acted(rooms, "bob", "sit", room="r0")).version == 3
    await rooms.aclose()


@simulated()
async def test_rooms_leave_memory_where_they_are_only_acted_on(store):
    """Nobody has called `start`: other servers look after deadlines."""
    rooms = rooms_on(store, idle_s=20)
    for number in range(100):
        await acted(rooms, "ann", "sit", room=f"r{number}")
        await asyncio.sleep(1)
    assert rooms.status().rooms <= 22
    await rooms.aclose()


@simulated()
async def test_a_room_in_which_nothing_happens_is_gone_if_told_so(store):
    rooms = rooms_on(store, forget_s=100, idle_s=20)
    rooms.start()
    await acted(rooms, "ann", "sit")
    await asyncio.sleep(150)
    assert (await rooms.standing(ROOM)).version == 0
    assert (await acted(rooms, "bob", "sit")).version == 1
    assert list((await state_of(rooms))["seats"]) == ["bob"]
    await rooms.aclose()


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "id", "more"),
    [
        ("", "1", {}),
        ("x" * 129, "1", {}),
        ("a\nb", "1", {}),
        ("ann", "", {}),
        ("ann", "x" * 101, {}),
        ("ann", "a\0", {}),
        (7, "1", {}),
        (None, "1", {}),
        ("ann", 7, {}),
        ("ann", "1", {"expected_version": -1}),
        ("ann", "1", {"expected_version": True}),
        ("ann", "1", {"expected_version": 1.0}),
        ("ann", "1", {"client_id": "", "client_seq": 1}),
        ("ann", "1", {"client_id": "x" * 65, "client_seq": 1}),
        ("ann", "1", {"client_id": "tab", "client_seq": 0}),
        ("ann", "1", {"client_id": "tab", "client_seq": True}),
        ("ann", "1", {"client_id": "tab", "client_seq": 2**53}),
    ],
)
@simulated(1)
async def test_what_no_log_could_keep_is_refused_before_it_is_asked(store, user, id, more):
    rooms = rooms_on(store)
    with pytest.raises(SettingsError):
        await rooms.act(ROOM, user, id, {"actionType": "say"}, **more)
    assert store.count() == {}
    await rooms.aclose()


@simulated(1)
async def test_a_room_has_a_name_that_a_log_can_keep(store):
    rooms = rooms_on(store)
    for wrong in ("", "x" * 201, "a\0b", "a\nb", "\ud800", 7, None):
        with pytest.raises(SettingsError):
            await acted(rooms, "ann", "say", room=wrong)
        with pytest.raises(SettingsError):
            await rooms.system(wrong, "s-1", {"actionType": "say"})
        with pytest.raises(SettingsError):
            await rooms.standing(wrong)
    longest = rooms_on(store, name="n" * 48)
    assert (await acted(longest, "ann", "say", room="x" * 200)).success
    await longest.aclose()
    assert rooms.status().rooms == 0
    await rooms.aclose()


@pytest.mark.parametrize(
    "wrong",
    [
        {"room": Cards},
        {"name": ""},
        {"name": "a:b"},
        {"name": "x" * 49},
        {"room": type("Second", (Cards,), {"view_version": 2})()},
        {"name": "a\nb"},
        {"replay": 0},
        {"most_bytes": 0},
        {"idle_s": 0},
        {"requests_s": -1},
    ],
)
async def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(SettingsError):
        Rooms("memory://", **{"room": Cards(), **wrong})


@simulated(1)
async def test_what_the_system_does_has_no_user_and_no_name_of_a_timeout(store):
    rooms = rooms_on(store)
    seen = []
    rooms.room.gives = lambda state, ctx: seen.append(ctx) or Accepted(state, "done")
    reply = await rooms.system(ROOM, "s-1", {"actionType": "give"})
    assert (reply.reply, seen[0].user, seen[0].version) == ("done", None, 1)
    assert (await rooms.system(ROOM, "s-1", {"actionType": "give"})).cached
    with pytest.raises(SettingsError):
        await rooms.system(ROOM, "timeout:turn-1", {"actionType": "give"})
    with pytest.raises(SettingsError, match="a request id is text"):
        await rooms.system(ROOM, 7, {"actionType": "give"})
    await rooms.aclose()


@simulated(1)
async def test_the_systems_own_do_not_wait_for_one_another(store):
    rooms = rooms_on(store)
    await acted(rooms, "ann", "sit")
    store.hold()
    asked = [
        asyncio.ensure_future(rooms.system(ROOM, f"s-{n}", {"actionType": "say"})) for n in range(3)
    ]
    await asyncio.sleep(0.1)
    store.let_go()
    assert sorted(reply.version for reply in await asyncio.gather(*asked)) == [2, 3, 4]
    await rooms.aclose()


@simulated(1)
async def test_a_user_with_the_name_of_a_request_is_in_nobodys_way(store):
    """Names are chosen by those who have them."""
    rooms = rooms_on(store)
    await acted(rooms, "ann", "sit")
    store.hold()
    sly = asyncio.ensure_future(acted(rooms, "0::s-1", "say"))
    await asyncio.sleep(0.1)
    system = asyncio.ensure_future(rooms.system(ROOM, "s-1", {"actionType": "say"}))
    await asyncio.sleep(0.1)
    store.let_go()
    assert {(await sly).version, (await system).version} == {2, 3}
    await rooms.aclose()


@simulated(1)
async def test_chance_is_new_for_every_try_and_goes_on_within_one(store):
    secrets = iter(bytes([n]) * 32 for n in range(100))
    rooms = rooms_on(store, entropy=lambda: next(secrets))
    rooms.room.gives = lambda state, ctx: Accepted(state, [ctx.random.random() for _ in range(3)])
    drawn = [(await acted(rooms, "ann", "give")).reply for _ in range(3)]
    assert len({number for numbers in drawn for number in numbers}) == 9
    await rooms.aclose()


# --- what people are told -----------------------------------------------------------------------


@simulated()
async def test_playing_moves_what_is_counted(store, caplog):
    caplog.set_level(logging.CRITICAL)
    rooms, other = rooms_on(store), rooms_on(store)
    assert rooms.status().ready
    await acted(rooms, "ann", "sit", "a-1")
    await acted(rooms, "ann", "sit", "a-1")
    await acted(rooms, "ann", "dance")
    await acted(rooms, "ann", "play")
    rooms.room.fails = {"apply"}
    await acted(rooms, "ann", "say")
    rooms.room.fails = set()
    await acted(other, "bob", "sit")
    await acted(rooms, "ann", "say")
    status = rooms.status()
    assert (status.name, status.rooms) == ("table", 1)
    assert (status.requests, status.accepted, status.repeated) == (6, 2, 1)
    assert status.refused == {"INVALID": 1, "NOT_YOUR_TURN": 1, "FAILED": 1}
    assert status.conflicts == 1
    assert sum(status.action_s.counts) == 6
    store.delay_s = 0.3
    await acted(rooms, "ann", "say")
    after = rooms.status().action_s
    assert after.sum_s >= 0.3
    assert after.counts[after.bounds.index(0.5)] == 1
    await asyncio.gather(rooms.aclose(), other.aclose())


@simulated(1, 2, 3)
async def test_rules_that_fail_on_what_never_was_have_not_failed(store):
    """Decided behind an action that is still on its way, and that another server has overtaken."""
    home, other = rooms_on(store), Rooms(store.inner, Cards(), wall=store.wall)
    await acted(home, "ann", "sit")
    store.hold()
    leaving = asyncio.ensure_future(acted(home, "ann", "leave", expected_version=1))
    await asyncio.sleep(0.1)
    dealing = asyncio.ensure_future(acted(home, "bob", "deal"))  # to nobody: the rules raise
    await asyncio.sleep(0.1)
    await acted(other, "cat", "say", text="first")
    store.let_go()
    assert (await leaving).code == "STATE_STALE_VERSION"
    assert (await dealing).success
    await home.aclose()


@simulated(1, 2)
async def test_rules_that_fail_behind_what_is_on_its_way_have_failed_when_it_has_come(store):
    home = rooms_on(store)
    await acted(home, "ann", "sit")
    store.hold()
    leaving = asyncio.ensure_future(acted(home, "ann", "leave"))
    await asyncio.sleep(0.1)
    dealing = asyncio.ensure_future(acted(home, "bob", "deal"))
    await asyncio.sleep(1)
    assert not dealing.done()
    store.let_go()
    assert (await leaving).success
    failed = await dealing
    assert (failed.code, failed.version) == ("FAILED", 2)
    await home.aclose()
