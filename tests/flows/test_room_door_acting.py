"""Actions through the door: their answers, by code, and when rules or the store fail.

Spoken to by hand, in simulated time: whoever is woken next is drawn by lot.
"""

from __future__ import annotations

import asyncio

import pytest

from semel.http.ws import Limits
from semel.rooms import Accepted
from support.rooms import STREAM, Client, acted, closed, dealt, door_to, rooms_on, seated, simulated

# --- answers ------------------------------------------------------------------------------------


@simulated()
async def test_the_same_request_gets_the_same_answer_on_any_connection(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    (ann,) = await seated(door, "ann")
    first = await ann.act("say", "a-1", text={"b": 1, "a": [1.0, "é"]})
    await ann.hang_up()
    again = door_to(rooms_on(store))
    (back,) = await seated(again, "ann")
    same = await back.act("say", "a-1", text={"b": 1, "a": [1.0, "é"]})
    assert same == {**first, "cached": True}
    assert door.status().repeated + again.status().repeated == 1
    await closed(door, again)


@simulated()
async def test_an_action_whose_client_is_gone_is_done_and_answered_when_it_is_back(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    (ann,) = await seated(door, "ann")
    store.hold()
    ann.say("ACTION_REQUEST", "a-1", actionType="sit")
    await asyncio.sleep(0.5)
    await ann.hang_up()
    (back,) = await seated(door, "ann")
    back.say("ACTION_REQUEST", "a-1", actionType="sit")
    await asyncio.sleep(0.5)
    store.let_go()
    answer = (await back.answer("a-1"))["payload"]
    assert (answer["success"], answer["cached"], answer["stateVersion"]) == (True, True, 1)
    await closed(door)


async def refused(client, name, id, **more):
    """With which code, and whether it may be sent again."""
    payload = await client.act(name, id, **more)
    assert not payload["success"]
    error = payload["error"]
    assert error["message"]
    assert ("retryAfterMs" in error) == error.get("retry", False)
    return error["code"], error.get("retry", False)


@simulated()
async def test_what_is_decided_is_told_by_its_code_and_not_to_be_sent_again(store, caplog):
    rooms = rooms_on(store, most_bytes=2000)
    door = door_to(rooms)
    await dealt(rooms, "ann", "bob")
    ann, bob = await seated(door, "ann", "bob")
    stale = await refused(ann, "say", "1", expectedVersion=9)
    assert stale == ("STATE_STALE_VERSION", False)
    assert (await ann.act("say", "2", text="x"))["success"]
    assert await refused(ann, "say", "2", text="y") == ("REQUEST_CONFLICT", False)
    assert await refused(bob, "play", "1") == ("NOT_YOUR_TURN", False)
    assert await refused(ann, "dance", "3") == ("INVALID", False)
    assert await refused(ann, "play", "4", amount=1000) == ("POOR", False)
    rooms.room.gives = lambda state, ctx: Accepted({**state, "x": "x" * 3000})
    assert await refused(ann, "give", "5") == ("TOO_LARGE", False)
    numbered = {"clientId": "tab", "clientSeq": 3}
    assert (await ann.act("say", "6", **numbered))["success"]
    assert await refused(ann, "say", "7", **numbered) == ("SUPERSEDED", False)
    rooms.room.fails = {"apply"}
    assert await refused(ann, "say", "8") == ("FAILED", False)
    ann.say("LEAVE", "l")
    await ann.answer("l")
    assert await refused(ann, "say", "9") == ("UNAUTHORIZED", False)
    assert door.status().refused == dict.fromkeys(
        (
            *("STATE_STALE_VERSION", "REQUEST_CONFLICT", "NOT_YOUR_TURN", "INVALID", "POOR"),
            *("TOO_LARGE", "SUPERSEDED", "FAILED", "UNAUTHORIZED"),
        ),
        1,
    )
    await closed(door)


@simulated()
async def test_what_is_not_decided_is_told_by_its_code_and_may_be_sent_again(store, caplog):
    rooms = rooms_on(store)
    door = door_to(rooms, limits=Limits(in_flight=2))
    (ann,) = await seated(door, "ann")
    await ann.join("t2")
    store.hold()
    ann.say("ACTION_REQUEST", "1", actionType="say")
    await asyncio.sleep(0.1)
    assert await refused(ann, "say", "2") == ("CONCURRENT_ACTION", True)
    store.hold("table:room:t2")
    ann.say("ACTION_REQUEST", "3", "t2", actionType="say")
    await asyncio.sleep(0.1)
    assert await refused(ann, "say", "4") == ("RATE_LIMITED", True)
    store.let_go()
    store.let_go("table:room:t2")
    assert (await ann.answer("1"))["payload"]["success"]
    assert (await ann.answer("3"))["payload"]["success"]
    store.is_down = True
    assert await refused(ann, "say", "5") == ("UNAVAILABLE", True)
    store.is_down = False
    for id in ("2", "4", "5"):
        assert (await ann.act("say", id))["success"]
    counted = dict.fromkeys(("CONCURRENT_ACTION", "RATE_LIMITED", "UNAVAILABLE"), 1)
    assert door.status().refused == counted
    await closed(door)


@simulated(1, 2)
async def test_who_has_asked_hears_which_request_an_update_is_of_also_when_it_comes_back(store):
    door = door_to(rooms_on(store))
    ann, bob = await seated(door, "ann", "bob")
    cursor = bob.all("TABLE_SNAPSHOT")[0]["position"]
    assert (await ann.act("say", id="word-1", text="hello"))["success"]
    await ann.until(lambda client: client.updates_by("word-1"))
    back = Client(door, user="ann")
    await back.join(cursor=cursor, wait="TABLE_STATE_UPDATE")
    await back.until(lambda client: client.updates_by("word-1"))
    assert not [text for text in bob.texts if "word-1" in text]
    await closed(door)


# --- what fails ---------------------------------------------------------------------------------


@simulated()
async def test_a_store_that_is_away_is_told_and_seats_go_on_when_it_is_back(store, caplog):
    rooms = rooms_on(store)
    door = door_to(rooms)
    (ann,) = await seated(door, "ann")
    store.is_down = True
    late = Client(door, user="bob")
    refused = (await late.join())["payload"]
    assert (refused["code"], refused["retry"]) == ("UNAVAILABLE", True)
    ann.say("REQUEST_SNAPSHOT", "s-1", reason="gap")
    refused = (await ann.answer("s-1"))["payload"]
    assert (refused["code"], refused["retry"]) == ("UNAVAILABLE", True)
    assert door.status().snapshots == {"join": 1}
    await asyncio.sleep(5)
    assert not door.status().ready
    assert door.status().outage
    store.is_down = False
    await late.join()
    await late.act("sit")
    await ann.at(1)
    await asyncio.sleep(2)
    assert door.status().ready
    await closed(door)


@pytest.mark.parametrize("method", ["view", "members", "result", "begin"])
@simulated(1)
async def test_a_room_that_cannot_be_shown_is_refused_and_others_are_not(store, method, caplog):
    rooms = rooms_on(store)
    door = door_to(rooms)
    ann = Client(door, user="ann")
    rooms.room.fails = {method}
    refused = await ann.join()
    assert (refused["type"], refused["payload"]["code"]) == ("ERROR", "FAILED")
    rooms.room.fails = set()
    await ann.join()
    if method != "begin":
        await acted(rooms, "bob", "sit")
        await ann.at(1)
        rooms._standings.clear()
        rooms.room.fails = {method}
        ann.say("REQUEST_SNAPSHOT", "s-1", reason="gap")
        assert (await ann.answer("s-1"))["payload"]["code"] == "FAILED"
        rooms.room.fails = set()
    assert (await ann.act("say"))["success"]
    await closed(door)


@simulated(1)
async def test_an_entry_that_nobody_can_read_is_passed_over_with_a_snapshot(store, caplog):
    rooms = rooms_on(store)
    door = door_to(rooms)
    (ann,) = await seated(door, "ann")
    await ann.act("sit")
    await rooms.log.append(STREAM, b"what is this", id="odd")
    await ann.until(lambda c: len(c.all("TABLE_SNAPSHOT")) == 2)
    assert ann.all("TABLE_SNAPSHOT")[1]["reason"] == "unreadable"
    await ann.act("say")
    await ann.at(3)
    back = Client(door, user="ann")
    await back.join(cursor=ann.all("TABLE_SNAPSHOT")[0]["position"])
    assert back.all("TABLE_SNAPSHOT")[0]["reason"] == "unreadable"
    await closed(door)


@simulated(1)
async def test_one_that_cannot_be_read_while_the_store_is_away_cuts_nobody_off(store, caplog):
    rooms = rooms_on(store)
    door = door_to(rooms)
    (ann,) = await seated(door, "ann")
    store.lose_request["load", STREAM] = 3
    await rooms.log.append(STREAM, b"what is this", id="odd")
    await ann.until(lambda c: len(c.all("TABLE_SNAPSHOT")) == 2)
    assert ann.code is None
    await closed(door)
