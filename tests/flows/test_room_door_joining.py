"""Who comes to a room, and who comes back with a cursor: what they are told.

Spoken to by hand, in simulated time: whoever is woken next is drawn by lot.
"""

from __future__ import annotations

import asyncio
import copy
import re

import pytest

from semel.entries import Position
from semel.rooms.cursors import bound
from support.rooms import (
    ROOM,
    STREAM,
    Cards,
    Client,
    acted,
    closed,
    dealt,
    door_to,
    rooms_on,
    seated,
    simulated,
)

POSITION = re.compile(r"(\d+)\.[0-9a-f]{12}")


@simulated()
async def test_who_joins_is_told_how_things_stand_and_then_what_happens(store):
    rooms = rooms_on(store)
    door = door_to(rooms, heartbeat_s=7)
    (ann,) = await seated(door, "ann")
    joined, snapshot = ann.messages
    assert joined["requestId"] == "join-0"
    told = joined["payload"]
    assert POSITION.fullmatch(told.pop("head"))
    assert abs(told.pop("serverTime") / 1000 - store.wall()) < 0.1
    assert told == {
        "tableId": ROOM,
        "viewer": "ann",
        "stateVersion": 0,
        "resumed": False,
        "heartbeatMs": 7000,
        "messageBytes": 65536,
    }
    assert "requestId" not in snapshot
    assert snapshot["payload"]["reason"] == "join"
    assert (ann.view, ann.cursor) == (rooms.room.view(rooms.room.begin(ROOM), None), ann.cursor)
    result = await ann.act("sit", "a-1", expectedVersion=0)
    assert result == {
        "tableId": ROOM,
        "success": True,
        "cached": False,
        "stateVersion": 1,
        "action": {"type": "sit"},
        "reply": {"seat": 1},
    }
    await ann.at(1)
    (update,) = ann.all("TABLE_STATE_UPDATE")
    assert (update["stateVersion"], update["previousVersion"]) == (1, 0)
    assert update["previous"] == snapshot["payload"]["position"]
    assert update["events"] == [{"sat": "ann"}]
    assert ann.view == (await rooms.standing(ROOM)).view("ann")
    await ann.hang_up()
    assert door.status().closed == {"gone": 1}
    await closed(door)


@simulated()
async def test_who_comes_back_with_a_cursor_gets_what_it_has_missed(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    ann, bob = await seated(door, "ann", "bob")
    await ann.act("sit")
    await bob.act("sit")
    await ann.at(2)
    cursor, view = ann.cursor, ann.view
    await ann.hang_up()
    for number in range(5):
        await bob.act("say", text=number)
    back = Client(door, user="ann")
    joined = (await back.join(cursor=cursor))["payload"]
    assert (joined["resumed"], joined["stateVersion"]) == (True, 7)
    await back.until(lambda c: len(c.all("TABLE_STATE_UPDATE")) == 5)
    assert back.all("TABLE_SNAPSHOT") == []
    updates = back.all("TABLE_STATE_UPDATE")
    assert updates[0]["previous"] == cursor
    assert [update["events"] for update in updates] == [[{"said": n}] for n in range(5)]
    assert view["seats"] == (await rooms.standing(ROOM)).view("ann")["seats"]
    await bob.act("say", text="live")
    await back.until(lambda c: len(c.all("TABLE_STATE_UPDATE")) == 6)
    await closed(door)


@simulated()
async def test_who_comes_back_having_missed_nothing_is_told_nothing(store):
    door = door_to(rooms_on(store))
    (ann,) = await seated(door, "ann")
    for done in (False, True):
        if done:
            await ann.act("sit")
            await ann.at(1)
        back = Client(door, user="ann")
        assert (await back.join(cursor=ann.cursor))["payload"]["resumed"]
        await asyncio.sleep(2)
        assert back.kinds == ["JOINED"]
    await closed(door)


async def _moved(store, door, rooms):
    (ann,) = await seated(door, "ann")
    for number in range(30):
        await ann.act("say", text=number)
        await asyncio.sleep(0.1)
    await ann.at(30)
    return ann


CURSORS = {
    "trimmed": lambda head: "1.000000000000",
    "ahead": lambda head: f"{head.offset + 5}.{head.tag}",
    "forked": lambda head: f"{head.offset - 1}.{head.tag}",
    "unreadable": lambda head: "what is this",
}


@pytest.mark.parametrize("reason", CURSORS)
@simulated()
async def test_a_cursor_that_leads_nowhere_is_answered_with_a_snapshot_and_why(store, reason):
    rooms = rooms_on(store, replay=10)
    door = door_to(rooms)
    await _moved(store, door, rooms)
    head = (await rooms.log.load(STREAM)).position
    back = Client(door, user="bob")
    assert not (await back.join(cursor=CURSORS[reason](head)))["payload"]["resumed"]
    (snapshot,) = back.all("TABLE_SNAPSHOT")
    assert snapshot["reason"] == reason
    assert snapshot["position"] == str(head)
    assert door.status().snapshots == {"join": 1, reason: 1}
    await closed(door)


@pytest.mark.parametrize(
    "cursor",
    ["", "0", "42", "42.", ".a", "-1.000000000000", "1.00000000000g", "\u0661.000000000000", 7, [],
     {}, True, "1" * 5000, "\x00"],
)  # fmt: skip
@simulated(1)
async def test_whatever_is_no_cursor_is_unreadable(store, cursor):
    door = door_to(rooms_on(store))
    client = Client(door, user="ann")
    await client.join(cursor=cursor)
    assert client.all("TABLE_SNAPSHOT")[0]["reason"] == "unreadable"
    await closed(door)


@simulated()
async def test_a_cursor_of_another_room_or_of_a_room_that_is_gone_leads_nowhere(store):
    rooms = rooms_on(store, forget_s=100)
    door = door_to(rooms)
    (ann,) = await seated(door, "ann")
    await ann.act("sit")
    await ann.at(1)
    await acted(rooms, "bob", "sit", room="t2")
    other = Client(door, user="bob", room="t2")
    await other.join(cursor=ann.cursor)
    assert other.all("TABLE_SNAPSHOT")[0]["reason"] == "forked"
    empty = Client(door, user="bob", room="t3")
    await empty.join(cursor=ann.cursor)
    assert empty.all("TABLE_SNAPSHOT")[0]["reason"] == "gone"
    cursor = ann.cursor
    await ann.hang_up()
    await asyncio.sleep(200)
    back = Client(door, user="ann")
    await back.join(cursor=cursor)
    (snapshot,) = back.all("TABLE_SNAPSHOT")
    assert (snapshot["reason"], snapshot["stateVersion"]) == ("gone", 0)
    await closed(door)


@simulated()
async def test_who_has_missed_more_than_is_kept_or_told_gets_a_snapshot(store):
    rooms = rooms_on(store, replay=5000)
    door = door_to(rooms)
    (ann,) = await seated(door, "ann")
    cursor = ann.cursor
    await ann.hang_up()
    for number in range(1001):
        await acted(rooms, "bob", "say", text=number)
    back = Client(door, user="ann")
    await back.join(cursor=cursor)
    assert back.all("TABLE_SNAPSHOT")[0]["reason"] == "overrun"
    await closed(door)


@simulated()
async def test_a_failover_that_takes_back_what_clients_have_seen_is_told_to_them(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    (ann,) = await seated(door, "ann")
    await ann.act("sit")
    await ann.at(1)
    streams = store.inner._log._streams
    before = copy.deepcopy(streams)
    await ann.act("say", text="lost")
    await ann.at(2)
    streams.clear()
    streams.update(before)
    other = rooms_on(store)
    await acted(other, "bob", "sit")
    await acted(other, "bob", "say")
    await ann.until(lambda c: len(c.all("TABLE_SNAPSHOT")) == 2)
    assert ann.all("TABLE_SNAPSHOT")[1]["reason"] in {"forked", "ahead"}
    await ann.act("say")
    await ann.at(4)
    assert ann.view == (await rooms.standing(ROOM)).view("ann")
    await other.aclose()
    await closed(door)


# --- rules of another version -------------------------------------------------------------------


class Renewed(Cards):
    """Shows something that was not shown before."""

    view_version = "2"

    def view(self, state, viewer):
        return {**super().view(state, viewer), "new": state["number"]}


@pytest.mark.parametrize("played", [0, 3])
@simulated()
async def test_who_comes_back_to_rules_of_another_version_gets_a_snapshot(store, played):
    """Of what it has missed, patches would not fit the view that it has."""
    old = door_to(rooms_on(store))
    (ann,) = await seated(old, "ann")
    for number in range(played):
        await ann.act("say", text=number)
    await ann.at(played)
    cursor = ann.cursor
    await closed(old)
    rooms = rooms_on(store, Renewed())
    door = door_to(rooms)
    await acted(rooms, "bob", "say")
    back = Client(door, user="ann")
    assert not (await back.join(cursor=cursor))["payload"]["resumed"]
    assert back.all("TABLE_SNAPSHOT")[0]["reason"] == "forked"
    await acted(rooms, "bob", "sit")
    await back.at(played + 2)
    assert back.view == (await rooms.standing(ROOM)).view("ann")
    await closed(door)


@simulated()
async def test_with_a_version_too_cursors_and_heads_fit_and_what_was_missed_is_told(store):
    rooms = rooms_on(store, Renewed())
    door = door_to(rooms, heartbeat_s=1)
    (ann,) = await seated(door, "ann")
    assert ann.all("JOINED")[0]["head"] == ann.cursor
    cursor = ann.cursor
    await ann.act("sit")
    await ann.at(1)
    await asyncio.sleep(3)
    beats = [m["payload"]["heads"][ROOM] for m in ann.messages if m["type"] == "HEARTBEAT"]
    assert beats[-1] == ann.cursor
    for since, missed in ((cursor, 1), (ann.cursor, 0)):
        back = Client(door, user="ann")
        assert (await back.join(cursor=since))["payload"]["resumed"]
        await asyncio.sleep(1)
        updates = back.all("TABLE_STATE_UPDATE")
        assert [update["previous"] for update in updates] == [cursor] * missed
    await closed(door)


@simulated(1)
async def test_a_result_is_the_same_one_for_rules_of_another_version(store):
    told = []
    for room in (Cards(), Renewed()):
        rooms = rooms_on(store, room)
        if not told:
            await dealt(rooms, "ann")
            assert (await acted(rooms, "ann", "play")).success
        door = door_to(rooms)
        (ann,) = await seated(door, "ann")
        told += ann.all("HAND_RESULT")
        await closed(door)
    assert len(told) == 2
    assert told[0] == told[1]


def test_a_position_is_bound_to_a_version_and_found_again():
    position = Position(7, "00000000000f")
    assert bound(position, "") == position
    cursors = {bound(position, version) for version in ("", "1", "2", "é")}
    assert len(cursors) == 4
    assert {Position.parse(str(cursor)) for cursor in cursors} == cursors
    assert bound(bound(position, "2"), "2") == position


def test_a_position_on_the_wire_is_a_cursor():
    assert Position.parse("42.9f3c00d1a2b3") == Position(42, "9f3c00d1a2b3")
