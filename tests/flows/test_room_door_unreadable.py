"""Rooms that cannot be read, or only late, on a connection that has others.

On a server without the direct line whoever writes is one task, and whoever reads is another: one
room is to keep neither of them. Spoken to by hand, in simulated time.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from semel.entries import Replace
from semel.errors import SettingsError
from semel.http.ws import Limits
from support.rooms import (
    ROOM,
    STREAM,
    Client,
    acted,
    by_token,
    closed,
    door_to,
    rooms_on,
    seated,
    simulated,
)

AWAY, THERE = "away", "there"
OF_AWAY = f"table:room:{AWAY}"


async def goes_on(ann, others):
    """What happens in the other room is shown, and what is asked of it is answered."""
    before = len(ann.all("TABLE_STATE_UPDATE", THERE))
    assert (await acted(others, "bob", "say", room=THERE)).success
    await ann.until(lambda ann: len(ann.all("TABLE_STATE_UPDATE", THERE)) == before + 1, within_s=3)
    ann.say("ACTION_REQUEST", f"say-{before}", THERE, actionType="say")
    assert (await ann.answer(f"say-{before}"))["payload"]["success"]


@simulated()
async def test_what_cannot_be_read_takes_no_other_room_from_its_connection(store):
    door, others = door_to(rooms_on(store)), rooms_on(store)
    ann = Client(door, user="ann")
    await ann.join(THERE)
    store.hold(OF_AWAY, "read")
    await ann.join(AWAY)  # how it stands can be had, and what comes next not
    await goes_on(ann, others)
    await acted(others, "bob", "say", room=AWAY)
    store.let_go(OF_AWAY)
    await ann.until(lambda ann: ann.all("TABLE_STATE_UPDATE", AWAY))
    await closed(door)


@simulated()
async def test_a_join_or_a_snapshot_that_takes_long_keeps_no_other_room(store):
    door, others = door_to(rooms_on(store)), rooms_on(store)
    ann = Client(door, user="ann")
    await ann.join(THERE)
    store.hold(OF_AWAY, "load")
    ann.say("JOIN", "j-1", AWAY, token="ann")
    await goes_on(ann, others)
    # Behind the join, of which nothing is known yet.
    ann.say("ACTION_REQUEST", "sit", AWAY, actionType="sit")
    ann.say("REQUEST_SNAPSHOT", "s-1", AWAY, reason="manual")
    await goes_on(ann, others)
    assert ann.answers("j-1") == ann.answers("sit") == ann.answers("s-1") == []
    store.let_go(OF_AWAY)
    assert (await ann.answer("sit"))["payload"]["success"]
    await ann.answer("s-1")
    store.hold(OF_AWAY, "load")
    ann.say("REQUEST_SNAPSHOT", "s-2", AWAY, reason="manual")
    ann.say("LEAVE", "l-1", AWAY)
    await goes_on(ann, others)
    store.let_go(OF_AWAY)
    await ann.answer("l-1")
    assert ann.answers("s-2"), "it was asked before"
    await closed(door)


@simulated()
async def test_who_asks_for_many_rooms_at_once_has_as_many_as_it_may(store):
    door = door_to(rooms_on(store), limits=Limits(rooms=3, in_flight=4, messages_per_s=100))
    ann = Client(door, user="ann")
    for n in range(8):
        store.hold(f"table:room:r{n}", "load")
        ann.say("JOIN", f"j-{n}", f"r{n}", token="ann")
    ann.say("JOIN", "j-8", "r8", token="ann")
    await asyncio.sleep(1)
    assert door.status().joined == 0
    for n in range(8):
        store.let_go(f"table:room:r{n}")
    for n in range(9):
        await ann.answer(f"j-{n}")
    assert door.status().joined == 3
    kinds = [ann.answers(f"j-{n}")[0]["type"] for n in range(9)]
    assert sorted(kinds) == ["ERROR"] * 6 + ["JOINED"] * 3
    await closed(door)


@simulated()
async def test_who_hangs_up_while_it_joins_has_no_seat(store):
    door = door_to(rooms_on(store))
    ann = Client(door, user="ann")
    store.hold(STREAM, "load")
    ann.say("JOIN", "j-1", token="ann")
    await asyncio.sleep(1)
    await ann.hang_up()
    store.let_go()
    await asyncio.sleep(1)
    assert door.status().joined == 0
    await closed(door)


@simulated()
async def test_who_waits_to_be_let_in_is_not_idle(store):
    async def slow(visitor, room_id):
        await asyncio.sleep(25)
        return by_token(visitor, room_id) if room_id == "r-2" else None

    door = door_to(rooms_on(store), authorise=slow, limits=Limits(join_within_s=10))
    ann = Client(door, user="ann")
    ann.say("JOIN", "j-1", token="ann")
    assert (await ann.answer("j-1"))["type"] == "ERROR"
    await asyncio.sleep(5)  # it has time to think of another one
    ann.say("JOIN", "j-2", "r-2", token="ann")
    assert (await ann.answer("j-2"))["type"] == "JOINED"
    assert ann.code is None
    await closed(door)


@simulated()
async def test_a_snapshot_is_not_older_than_what_was_shown_while_it_was_loaded(store):
    rooms, others = rooms_on(store), rooms_on(store)
    door = door_to(rooms)
    (ann,) = await seated(door, "ann")
    await acted(others, "bob", "say")  # who knows from now on how the room stands
    await ann.until(lambda ann: len(ann.all("TABLE_STATE_UPDATE")) == 1)
    store.hold(STREAM, "load", answers=True)
    ann.say("REQUEST_SNAPSHOT", "s-1", reason="manual")
    await asyncio.sleep(0.1)
    for _ in range(3):
        assert (await acted(others, "bob", "say")).success
    await ann.until(lambda ann: len(ann.all("TABLE_STATE_UPDATE")) == 4)
    store.let_go()
    await ann.answer("s-1")
    versions = [m["payload"]["stateVersion"] for m in ann.messages if m["type"].startswith("TABLE")]
    assert versions == sorted(versions)
    await closed(door)


@simulated(1)
async def test_who_joins_once_more_is_not_set_back(store):
    rooms, others = rooms_on(store), rooms_on(store)
    door = door_to(rooms)
    await acted(others, "bob", "say")  # who knows from now on how the room stands
    (ann,) = await seated(door, "ann")
    store.hold(STREAM, "load", answers=True)
    ann.say("JOIN", "j-2", token="ann")
    await asyncio.sleep(0.1)
    for _ in range(3):
        assert (await acted(others, "bob", "say")).success
    await ann.until(lambda ann: len(ann.all("TABLE_STATE_UPDATE")) == 3)
    store.let_go()
    await ann.answer("j-2")
    await ann.until(lambda ann: len(ann.all("TABLE_SNAPSHOT")) == 2)
    assert ann.all("TABLE_SNAPSHOT")[1]["stateVersion"] == 4
    await closed(door)


ODD = {
    "nothing for everybody": {},
    "a list of users": {"all": [], "own": ["ann"]},
    "no users": {"all": [], "own": None},
    "a result for nobody": {"all": [], "result": {}},
    "a result that is text": {"all": [], "result": "x"},
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@simulated(1)
async def test_an_entry_of_another_shape_is_passed_over_by_all(store, odd, caplog):
    rooms = rooms_on(store)
    door = door_to(rooms)
    ann, bob = await seated(door, "ann", "bob")
    await acted(rooms, "ann", "say")
    await ann.at(1)
    held = await rooms.log.load(STREAM)
    data = json.dumps({"room": ROOM, "after": str(held.position), **odd}).encode()
    await rooms.log.append(STREAM, data, id="odd", expect=held.position, state=Replace(held.state))
    await acted(rooms, "ann", "say")
    for client in (ann, bob):
        await client.at(3)
        assert [each["reason"] for each in client.all("TABLE_SNAPSHOT")] == ["join", "unreadable"]
        assert client.code is None
    back = Client(door, user="ann")
    assert not (await back.join(cursor=str(held.position)))["payload"]["resumed"]
    await closed(door)


@simulated(1)
async def test_what_is_wrong_with_a_store_is_for_those_who_run_it(store, caplog):
    door = door_to(rooms_on(store))
    (ann,) = await seated(door, "ann")
    store.is_down, store.error = True, SettingsError  # as without its tables
    answers = [await ann.act("sit"), (await ann.join("r-2"))["payload"]]
    for told in (answers[0]["error"], answers[1]):
        assert (told["code"], told["retry"]) == ("UNAVAILABLE", True)
        assert "the line is cut" not in told["message"]
    assert "the line is cut" in caplog.text
    store.is_down = False
    assert (await ann.act("sit"))["success"]
    await closed(door)
