"""The door to rooms, spoken to by hand: what is on the wire, who is let in, who is cut off.

In simulated time: whoever is woken next is drawn by lot.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.entries import Position
from semel.errors import SettingsError
from semel.feed import Subscription
from semel.http.ws import Limits, RoomDoor, Spectator, voice
from semel.rooms import Accepted, Rooms
from support.rooms import (
    ROOM,
    STREAM,
    Cards,
    Client,
    acted,
    dealt,
    door_to,
    rooms_on,
    seated,
    simulated,
    state_of,
)
from support.web import ask

POSITION = re.compile(r"(\d+)\.[0-9a-f]{12}")


async def closed(*doors):
    await asyncio.gather(*(door.aclose() for door in doors))


# --- joining ------------------------------------------------------------------------------------


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


# --- a hand that is over ------------------------------------------------------------------------


async def _finished(door):
    ann, bob = await seated(door, "ann", "bob")
    await ann.act("sit")
    await bob.act("sit")
    await ann.act("deal")
    await ann.act("play", amount=5)
    await ann.at(4)
    cursor = ann.cursor
    await bob.act("play", amount=7)
    await asyncio.gather(ann.at(5), bob.at(5))
    return ann, bob, cursor


@simulated()
async def test_what_came_of_a_hand_follows_the_update_that_ended_it(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    ann, bob, _ = await _finished(door)
    state = await state_of(rooms)
    for client, user in ((ann, "ann"), (bob, "bob")):
        await client.until(lambda c: c.all("HAND_RESULT"))
        at = client.kinds.index("HAND_RESULT")
        assert client.kinds[at - 1] == "TABLE_STATE_UPDATE"
        (result,) = client.all("HAND_RESULT")
        assert (result["stateVersion"], result["position"]) == (5, client.cursor)
        assert result["result"] == {**state["won"], "mine": state["seats"][user]["card"]}
    await ann.act("say")  # it is still shown, and told once
    await asyncio.sleep(1)
    assert len(ann.all("HAND_RESULT")) == 1
    await closed(door)


@simulated()
async def test_who_comes_to_a_finished_hand_is_told_its_result_and_then_how_things_stand(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    ann, _, cursor = await _finished(door)
    for how in ({}, {"cursor": cursor}, {"cursor": ann.cursor}):
        back = Client(door, user="ann")
        joined = (await back.join(**how))["payload"]
        assert not joined["resumed"]
        assert back.kinds == ["JOINED", "HAND_RESULT", "TABLE_SNAPSHOT"]
        assert back.all("HAND_RESULT")[0] == ann.all("HAND_RESULT")[0]
        assert back.all("TABLE_SNAPSHOT")[0]["reason"] == ("reconnect" if how else "join")
        await back.hang_up()
    spectator = Client(door)
    await spectator.join()
    assert spectator.all("HAND_RESULT")[0]["result"]["mine"] is None
    await ann.act("rest")
    late = Client(door, user="ann")
    assert (await late.join(cursor=cursor))["payload"]["resumed"]
    await late.until(lambda c: len(c.all("TABLE_STATE_UPDATE")) == 2)
    assert late.kinds == ["JOINED", "TABLE_STATE_UPDATE", "HAND_RESULT", "TABLE_STATE_UPDATE"]
    await closed(door)


# --- snapshots ----------------------------------------------------------------------------------


@pytest.mark.parametrize("second", ["LEAVE", "REQUEST_SNAPSHOT"])
@simulated(1, 2)
async def test_who_leaves_or_asks_before_anybody_listens_is_told_what_comes(store, second):
    """Whoever wrote waited for a reader that had been let go, and for ever."""
    store.deaf_s = 0.05
    rooms = rooms_on(store)
    door = door_to(rooms, heartbeat_s=1.0)
    ann = Client(door, user="ann")
    await ann.join()
    ann.say(second, "x")
    await asyncio.sleep(1)
    number = len(ann.texts)
    ann.say("JOIN", "j-2", "t2", token="ann")
    await asyncio.sleep(1)
    await acted(rooms, "bob", "sit", room="t2")
    await asyncio.sleep(3)
    kinds = [message["type"] for message in ann.messages[number:]]
    assert {"JOINED", "TABLE_SNAPSHOT", "TABLE_STATE_UPDATE", "HEARTBEAT"} <= set(kinds)
    await ann.hang_up()
    await asyncio.sleep(1)
    assert door.status().connections == 0
    await closed(door)


@simulated(1)
async def test_a_drain_cuts_off_who_takes_nothing_without_a_word_in_the_log(store, caplog):
    rooms = rooms_on(store)
    door = door_to(rooms)
    ann = Client(door, user="ann")
    await ann.join()
    ann.stick()
    await door.drain(1.0)
    await asyncio.sleep(0.1)
    assert ann.task.done()
    assert not ann.task.cancelled()
    assert ann.task.exception() is None
    await closed(door)


@simulated(1, 2)
async def test_a_result_is_known_by_where_it_came_however_often_it_is_told(store):
    """Known by where the room is by now, it would be another one for whoever comes back."""
    rooms = rooms_on(store)
    door = door_to(rooms)
    ann, bob = await seated(door, "ann", "bob")
    for player in (ann, bob):
        await player.act("sit")
    await ann.act("deal")
    for player in (ann, bob):
        assert (await player.act("play"))["success"]
    await ann.until(lambda client: client.all("HAND_RESULT"))
    for number in range(3):
        assert (await bob.act("say", text="well played"))["success"]
        ann.say("REQUEST_SNAPSHOT", f"s-{number}", reason="manual")
        await ann.answer(f"s-{number}")
        await Client(door, user="ann").join(cursor=None)
    told = [each["position"] for each in ann.all("HAND_RESULT")]
    assert len(told) == 4
    assert len(set(told)) == 1
    other = rooms_on(store)  # which has it from the log
    back = Client(door_to(other), user="ann")
    await back.join()
    assert back.all("HAND_RESULT")[0]["position"] == told[0]
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


@simulated(1, 2)
async def test_a_snapshot_is_not_older_than_what_was_shown_though_others_have_asked_before(store):
    rooms, other = rooms_on(store), Rooms(store.inner, Cards(), wall=store.wall)
    door = door_to(rooms)
    ann = Client(door, user="ann")
    await ann.join()
    store.late_s = 2.0
    loading = asyncio.ensure_future(rooms.feed.load(STREAM))
    await asyncio.sleep(0.1)  # the store has answered, and the answer is on its way
    store.late_s = 0.0
    await acted(other, "bob", "sit")
    await ann.until(lambda client: client.all("TABLE_STATE_UPDATE"))
    ann.say("REQUEST_SNAPSHOT", "s-1", reason="manual")
    assert (await ann.answer("s-1"))["payload"]["stateVersion"] == 1
    assert (await loading).position.offset == 0
    await door.aclose()


@pytest.mark.parametrize("reason", ["gap", "reconnect", "manual", "stale"])
@simulated()
async def test_a_snapshot_can_be_asked_for_with_a_reason_that_is_counted(store, reason):
    rooms = rooms_on(store)
    door = door_to(rooms)
    ann, bob, _ = await _finished(door)
    ann.say("REQUEST_SNAPSHOT", "s-1", currentVersion=3, reason=reason)
    answer = await ann.answer("s-1")
    assert answer["type"] == "TABLE_SNAPSHOT"
    assert answer["payload"]["reason"] == reason
    assert answer["payload"]["stateVersion"] == 5
    assert ann.kinds[-2:] == ["HAND_RESULT", "TABLE_SNAPSHOT"]
    await bob.act("say")
    await ann.at(6)  # and goes on from there
    status = door.status()
    assert status.snapshots == {"join": 2, reason: 1}
    assert status.gaps == (reason == "gap")
    await closed(door)


@simulated()
async def test_a_snapshot_while_things_happen_is_followed_by_all_that_comes_after(store):
    rooms = rooms_on(store)
    door = door_to(rooms, limits=Limits(messages_per_s=1000))
    (ann,) = await seated(door, "ann")
    store.delay_s = 0.01

    async def move():
        for number in range(30):
            await acted(rooms, "bob", "say", text=number)

    moving = asyncio.ensure_future(move())
    for number in range(10):
        await asyncio.sleep(0.05)
        ann.say("REQUEST_SNAPSHOT", f"s-{number}", reason="manual")
    await moving
    await ann.until(lambda c: len(c.all("TABLE_SNAPSHOT")) == 11)
    await ann.at(30)  # its replica finds every hole
    await closed(door)


@simulated()
async def test_a_snapshot_before_joining_or_for_no_reason_is_refused(store):
    door = door_to(rooms_on(store))
    client = Client(door, user="ann")
    client.say("REQUEST_SNAPSHOT", "s-1", reason="gap")
    error = await client.answer("s-1")
    assert (error["type"], error["payload"]["code"]) == ("ERROR", "UNAUTHORIZED")
    await client.join()
    for id, reason in (("s-2", "because"), ("s-3", None), ("s-4", []), ("s-5", 1)):
        client.say("REQUEST_SNAPSHOT", id, reason=reason)
        error = await client.answer(id)
        assert (error["type"], error["payload"]["code"]) == ("ERROR", "INVALID")
    assert door.status().snapshots == {"join": 1}
    assert door.status().gaps == 0
    await closed(door)


# --- signs of life ------------------------------------------------------------------------------


@simulated()
async def test_heartbeats_tell_the_time_and_where_rooms_end(store):
    rooms = rooms_on(store)
    door = door_to(rooms, heartbeat_s=5)
    (ann,) = await seated(door, "ann")
    await ann.join("t2")
    await ann.act("sit")
    await ann.at(1)
    await asyncio.sleep(21)
    beats = [m["payload"] for m in ann.messages if m["type"] == "HEARTBEAT"]
    assert 3 <= len(beats) <= 5
    assert abs(beats[-1]["serverTime"] / 1000 - store.wall()) < 7
    assert set(beats[-1]["heads"]) == {ROOM, "t2"}
    assert beats[-1]["heads"][ROOM] == ann.cursor
    await closed(door)


@simulated()
async def test_a_ping_is_answered_by_a_heartbeat_also_before_joining(store):
    door = door_to(rooms_on(store))
    client = Client(door, user="ann")
    client.raw('{"type":"PING"}')
    await client.until(lambda c: c.kinds == ["HEARTBEAT"])
    assert client.messages[0]["payload"]["heads"] == {}
    await client.join()
    client.raw('{"type":"PING","payload":{}}')
    await client.until(lambda c: c.kinds[-1] == "HEARTBEAT")
    assert client.messages[-1]["payload"]["heads"] == {ROOM: client.cursor}
    await closed(door)


# --- coming and going ---------------------------------------------------------------------------


@simulated()
async def test_who_leaves_hears_no_more_and_may_not_act(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    (ann,) = await seated(door, "ann")
    ann.say("LEAVE", "l-1")
    assert (await ann.answer("l-1"))["payload"] == {"tableId": ROOM, "reason": "left"}
    assert door.status().joined == 0
    await acted(rooms, "bob", "sit")
    await asyncio.sleep(2)
    assert ann.all("TABLE_STATE_UPDATE") == []
    assert (await ann.act("sit"))["error"]["code"] == "UNAUTHORIZED"
    ann.say("LEAVE", "l-2", "never-joined")
    assert (await ann.answer("l-2"))["type"] == "LEFT"
    await ann.join()
    assert (await ann.act("sit"))["success"]
    await closed(door)


@simulated()
async def test_several_rooms_share_a_connection(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    ann = Client(door, user="ann")
    for room in ("r1", "r2", "r3"):
        await ann.join(room)
    for room in ("r1", "r2"):
        ann.say("ACTION_REQUEST", f"sit-{room}", room, actionType="sit")
        assert (await ann.answer(f"sit-{room}"))["payload"]["tableId"] == room
    await acted(rooms, "bob", "sit", room="r3")
    for room in ("r1", "r2", "r3"):
        await ann.until(lambda c, room=room: len(c.all("TABLE_STATE_UPDATE", room)) == 1)
    ann.say("LEAVE", "l", "r2")
    await ann.answer("l")
    await acted(rooms, "bob", "sit", room="r2")
    await acted(rooms, "bob", "say", room="r3")
    await ann.until(lambda c: len(c.all("TABLE_STATE_UPDATE", "r3")) == 2)
    assert len(ann.all("TABLE_STATE_UPDATE", "r2")) == 1
    assert (door.status().connections, door.status().joined) == (1, 2)
    await closed(door)


@simulated()
async def test_who_joins_again_as_somebody_else_is_them_from_then_on(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    await dealt(rooms, "ann", "bob")
    (client,) = await seated(door, "ann")
    assert "card" in client.view["seats"]["ann"]
    client.user = "bob"
    assert (await client.join())["payload"]["viewer"] == "bob"
    assert "card" in client.view["seats"]["bob"]
    assert "card" not in client.view["seats"]["ann"]
    assert (await client.act("play"))["error"]["code"] == "NOT_YOUR_TURN"
    client.user = None
    assert (await client.join())["payload"]["viewer"] is None
    assert (await client.act("play"))["error"]["code"] == "UNAUTHORIZED"
    assert door.status().joined == 1
    await closed(door)


class AtOnce:
    """A line past `send`, as there is under uvicorn, to one of our clients."""

    def __init__(self, send):
        self.client = send.__self__
        self.is_free = True

    def write(self, text):
        self.client.texts.append(text)


async def _busy_with_another(store, rooms, door, monkeypatch):
    """Somebody to whom another room is being shown, which takes long, and when it is to go on."""
    lines, gate, began = [], asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(voice, "line_of", lambda send: lines.append(AtOnce(send)) or lines[-1])
    fetch = Subscription.fetch

    async def slow(following):
        began.set()
        await gate.wait()
        return await fetch(following)

    client = Client(door, user="ann")
    await client.join("other")
    await client.join()
    (line,) = lines
    line.is_free = False
    client.stick()
    for number in range(300):  # so that it is served from the log
        await acted(rooms, "cat", "say", room="other", text=number)
    monkeypatch.setattr(Subscription, "fetch", slow)
    client.stick(stuck=False)
    await asyncio.wait_for(began.wait(), 60)
    await dealt(rooms, "ann", "bob")
    await asyncio.sleep(0.1)
    line.is_free = True
    return client, gate


@pytest.mark.parametrize("then", ["it is left", "somebody else joins"])
@simulated()
async def test_a_seat_that_is_over_while_another_is_shown_is_told_nothing(store, then, monkeypatch):
    rooms = rooms_on(store)
    door = door_to(rooms, limits=Limits(behind_events=1000))
    client, gate = await _busy_with_another(store, rooms, door, monkeypatch)
    card = (await state_of(rooms))["seats"]["ann"]["card"]
    if then == "it is left":
        client.say("LEAVE", "l")
        await client.answer("l")
    else:
        client.user = "bob"
        await client.join()
    begun = len(client.texts)
    gate.set()
    await client.until(lambda c: len(c.all("TABLE_STATE_UPDATE", "other")) == 300)
    await asyncio.sleep(2)
    behind = [json.loads(text) for text in client.texts[begun:]]
    assert {m["payload"]["tableId"] for m in behind if "tableId" in m["payload"]} == {"other"}
    assert card not in "".join(client.texts)
    await closed(door)


class Unhurried(Client):
    """Takes a message in `each_s`, and all of them in the end."""

    each_s = 1.0

    async def _send(self, message):
        await asyncio.sleep(self.each_s)
        await super()._send(message)


@simulated()
async def test_what_is_being_written_ends_when_the_seat_does(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    ann = Unhurried(door, user="ann")
    await ann.join()
    for number in range(10):
        await acted(rooms, "bob", "say", text=number)
    await asyncio.sleep(4)
    ann.say("LEAVE", "l")
    await ann.answer("l")
    await asyncio.sleep(5)
    assert ann.kinds[-1] == "LEFT"
    assert 2 <= len(ann.all("TABLE_STATE_UPDATE")) <= 5
    await closed(door)


@simulated()
async def test_spectators_see_what_everybody_sees_and_cannot_act(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    await dealt(rooms, "ann", "bob")
    nobody = Client(door)
    shy = Client(door, user="ann")
    await nobody.join()
    assert (await shy.join(spectate=True))["payload"]["viewer"] is None
    for client in (nobody, shy):
        assert client.view == (await rooms.standing(ROOM)).view(None)
        error = (await client.act("say"))["error"]
        assert error["code"] == "UNAUTHORIZED"
        assert "retry" not in error
    assert (await rooms.standing(ROOM)).version == 3
    await closed(door)


@simulated()
async def test_without_anybody_to_ask_everybody_may_look_and_nobody_act(store):
    rooms = rooms_on(store)
    door = RoomDoor(rooms, presence=False)
    (ann,) = await seated(door, "ann")
    assert ann.messages[0]["payload"]["viewer"] is None
    assert (await ann.act("sit"))["error"]["code"] == "UNAUTHORIZED"
    await closed(door)


# --- who may come in ----------------------------------------------------------------------------


async def _slow(visitor, room_id):
    await asyncio.sleep(3)
    return visitor.token


async def _never(visitor, room_id):
    await asyncio.sleep(10**6)


async def _raising(visitor, room_id):
    raise ZeroDivisionError


AUTHORISE = {
    "sync": (lambda visitor, room_id: visitor.token, "JOINED"),
    "async and slow": (_slow, "JOINED"),
    "spectator": (lambda visitor, room_id: Spectator(), "JOINED"),
    "by header": (lambda visitor, room_id: visitor.header("x-user"), "JOINED"),
    "none": (lambda visitor, room_id: None, "UNAUTHORIZED"),
    "false": (lambda visitor, room_id: False, "UNAUTHORIZED"),
    "no name": (lambda visitor, room_id: "", "UNAUTHORIZED"),
    "only another room": (lambda visitor, room_id: room_id == "t2" or None, "UNAUTHORIZED"),
    "raising": (_raising, "UNAVAILABLE"),
    "raising at once": (lambda visitor, room_id: 1 / 0, "UNAVAILABLE"),
    "true": (lambda visitor, room_id: True, "INVALID"),
    "a number": (lambda visitor, room_id: 7, "INVALID"),
    "too long a name": (lambda visitor, room_id: "x" * 129, "INVALID"),
    "a name with a line break": (lambda visitor, room_id: "a\nb", "INVALID"),
    "never": (_never, "UNAVAILABLE"),
}


@pytest.mark.parametrize(("authorise", "told"), AUTHORISE.values(), ids=AUTHORISE)
@simulated(1)
async def test_whoever_is_asked_who_may_join_is_believed(store, authorise, told, caplog):
    door = door_to(
        rooms_on(store), authorise=authorise, limits=Limits(join_within_s=60), reauthorise_s=None
    )
    client = Client(door, user="ann", headers=[(b"x-user", b"ann")])
    answer = await client.join()
    if answer["type"] == "JOINED":
        assert answer["payload"]["viewer"] in {"ann", None}
    else:
        error = answer["payload"]
        assert (answer["type"], error["code"], error["tableId"]) == ("ERROR", told, ROOM)
        assert error.get("retry", False) == (told == "UNAVAILABLE")
        assert (await client.act("sit"))["error"]["code"] == "UNAUTHORIZED"
        assert door.status().refused[told] >= 1
        assert door.status().joined == 0
    assert told in {"JOINED", answer["payload"].get("code")}
    await closed(door)


@simulated()
async def test_a_seat_is_taken_back_when_its_user_may_not_be_there_any_more(store, caplog):
    may = {"ann": "ann", "bob": "bob", "cat": "cat", "dan": "dan", "eve": "eve"}

    def authorise(visitor, room_id):
        if may[visitor.token] == "raise":
            raise ZeroDivisionError
        return may[visitor.token]

    rooms = rooms_on(store)
    limits = Limits(join_within_s=1000)
    door = door_to(rooms, authorise=authorise, reauthorise_s=20, limits=limits)
    ann, bob, cat, dan, eve = await seated(door, "ann", "bob", "cat", "dan", "eve")
    await asyncio.sleep(50)
    assert door.status().joined == 5
    may |= {"bob": None, "cat": "somebody else", "dan": "raise", "eve": Spectator()}
    await asyncio.sleep(25)
    assert dan.all("LEFT") == []  # nobody can say anything of him, for now
    await asyncio.sleep(320)
    for client in (bob, cat, dan, eve):
        assert client.all("LEFT") == [{"tableId": ROOM, "reason": "refused"}]
        assert (await client.act("sit"))["error"]["code"] == "UNAUTHORIZED"
    assert ann.all("LEFT") == []
    assert (await ann.act("sit"))["success"]
    await asyncio.sleep(1)
    assert bob.all("TABLE_STATE_UPDATE") == []
    assert (await bob.join())["payload"]["code"] == "UNAUTHORIZED"
    assert door.status().joined == 1
    await closed(door)


async def _acting_when_it_ends(store, rooms, door, client, may):
    """An action on its way, and then: it may not be here, has left, or is somebody else."""
    store.hold()
    client.say("ACTION_REQUEST", "a-1", actionType="say", text="for ann")
    await asyncio.sleep(0.1)
    if may == "refused":
        await client.until(lambda c: c.all("LEFT"))
    elif may == "left":
        client.say("LEAVE", "l")
        await client.answer("l")
    else:
        client.user = {"another": "bob", "only looks": None, "the same": "ann"}[may]
        await client.join()


@pytest.mark.parametrize("may", ["refused", "left", "another", "only looks"])
@simulated()
async def test_what_comes_of_an_action_is_not_told_behind_the_end_of_its_seat(store, may):
    users = {"ann": "ann", "bob": "bob"}
    rooms = rooms_on(store)
    door = door_to(
        rooms,
        authorise=lambda visitor, _: Spectator() if not visitor.token else users[visitor.token],
        reauthorise_s=5,
        limits=Limits(join_within_s=1000),
    )
    (ann,) = await seated(door, "ann")
    users["ann"] = None if may == "refused" else "ann"
    await _acting_when_it_ends(store, rooms, door, ann, may)
    begun = len(ann.texts)
    store.let_go()
    await asyncio.sleep(3)
    assert (await rooms.standing(ROOM)).version == 1
    assert ann.answers("a-1") == []
    if may in {"refused", "left"}:
        assert ann.texts[begun:] == []
    # Who may come back hears how it ended, and it is not done again.
    users["ann"] = ann.user = "ann"
    await ann.join()
    answer = await ann.act("say", "a-1", text="for ann")
    assert (answer["success"], answer["cached"], answer["reply"]) == (True, True, "for ann")
    await closed(door)


@simulated()
async def test_who_has_joined_again_as_the_same_is_answered(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    (ann,) = await seated(door, "ann")
    await _acting_when_it_ends(store, rooms, door, ann, "the same")
    store.let_go()
    assert (await ann.answer("a-1"))["payload"]["success"]
    await closed(door)


@pytest.mark.parametrize("fails", [False, True])
@simulated(1)
async def test_a_snapshot_is_not_told_behind_the_end_of_its_seat(store, fails, monkeypatch, caplog):
    users = {"ann": "ann"}
    rooms = rooms_on(store)
    door = door_to(rooms, authorise=lambda visitor, _: users[visitor.token], reauthorise_s=3)
    (ann,) = await seated(door, "ann")
    standing = rooms.standing

    async def slow(room_id, **how):
        await asyncio.sleep(5)
        return 1 / 0 if fails else await standing(room_id, **how)

    monkeypatch.setattr(rooms, "standing", slow)
    users["ann"] = None
    ann.say("REQUEST_SNAPSHOT", "s-1", reason="gap")
    await asyncio.sleep(8)
    assert ann.kinds == ["JOINED", "TABLE_SNAPSHOT", "LEFT"]
    assert door.status().snapshots == {"join": 1}
    await closed(door)


@simulated()
async def test_who_is_here_is_not_told_behind_the_end_of_a_seat(store):
    door = door_to(rooms_on(store), presence=True)
    ann = Client(door, user="ann")
    for number in range(5):
        ann.say("JOIN", f"j-{number}", token="ann")
        ann.say("LEAVE", f"l-{number}")
    await ann.answer("l-4")
    await asyncio.sleep(1)
    is_in = False
    for kind in ann.kinds:
        is_in = kind == "JOINED" or (is_in and kind != "LEFT")
        assert is_in or kind != "PRESENCE"
    await closed(door)


@simulated(1)
async def test_who_cannot_be_asked_about_for_a_while_stays(store, caplog):
    slow = False

    async def authorise(visitor, room_id):
        await asyncio.sleep(100 if slow else 0)
        return visitor.token

    door = door_to(rooms_on(store), authorise=authorise, reauthorise_s=20)
    (ann,) = await seated(door, "ann")
    slow = True
    await asyncio.sleep(100)
    assert ann.all("LEFT") == []
    assert "authorise has not answered" in caplog.text
    await closed(door)


@pytest.mark.parametrize(
    ("origins", "origin", "is_let_in"),
    [
        (None, None, True),
        (None, b"https://shop.example", True),
        (None, b"https://SHOP.example", True),
        (None, b"https://evil.example", False),
        (None, b"null", False),
        (None, b"https://[", False),
        (None, b"http://[::1", False),
        (None, b"https://shop.example]", False),
        (None, "https://\u2100.example".encode(), False),
        (None, b"\xff\xfe", False),
        (None, b"", False),
        (["https://app.example"], b"https://[", False),
        (["https://app.example"], b"https://app.example", True),
        (["https://app.example/"], b"https://APP.example", True),
        (["https://app.example"], b"http://app.example", False),
        (["https://app.example"], b"https://shop.example", False),
        (["https://app.example"], b"https://app.example.evil", False),
        ("*", b"https://evil.example", True),
    ],
)
@simulated(1)
async def test_pages_of_other_origins_are_turned_away(store, origins, origin, is_let_in):
    door = door_to(rooms_on(store), origins=origins)
    headers = [] if origin is None else [(b"origin", origin)]
    old = Client(door, user="ann", headers=headers)
    new = Client(door, user="ann", headers=headers, extensions=["websocket.http.response"])
    if is_let_in:
        assert (await old.join())["type"] == "JOINED"
    else:
        assert (await old.ended(), old.accepted) == (1008, False)
        assert (await new.ended(), new.accepted) == (1008, False)  # of which servers make a 403
        assert door.status().closed == {"origin": 2}
    await closed(door)


@simulated(1)
async def test_settings_that_cannot_work_are_refused(store):
    rooms = rooms_on(store)
    for wrong in (
        {"origins": "shop.example"},
        {"origins": ["https://a.example/path"]},
        {"origins": ["https://["]},
        {"authorise": "me"},
        {"heartbeat_s": 0},
        {"max_age_s": -1},
        {"reauthorise_s": 0},
        {"limits": Limits(rooms=0)},
        {"limits": Limits(messages_per_s=float("nan"))},
    ):
        with pytest.raises(SettingsError):
            RoomDoor(rooms, **wrong)
    with pytest.raises(SettingsError):
        RoomDoor(store)
    await rooms.aclose()


@simulated(1)
async def test_what_is_no_websocket_is_told_what_to_do(store):
    door = door_to(rooms_on(store))
    reply = await ask(door, "/rooms", method="GET")
    assert (reply.status, reply.header("upgrade")) == (426, "websocket")
    await closed(door)


# --- what everybody sees ------------------------------------------------------------------------


@simulated(1, 2, 3)
async def test_what_is_replayed_is_what_was_shown_to_the_byte_and_no_card_of_others(store):
    rooms = rooms_on(store)
    door = door_to(rooms, limits=Limits(messages_per_s=1000))
    users = ["ann", "bob", "cat", None]
    clients = await seated(door, *users)
    for client in clients[:3]:
        await client.act("sit")
    cards = {user: set() for user in users}
    for _ in range(3):
        await clients[0].act("deal")
        state = await state_of(rooms)
        for client in clients[:3]:
            cards[client.user].add(state["seats"][client.user]["card"])
            await client.act("play", amount=1)
            await client.act("play", amount=1)  # refused
        won = (await state_of(rooms))["won"]
        for user in users:
            cards[user].add(won["card"])
    head = (await rooms.standing(ROOM)).version
    await asyncio.gather(*(client.at(head) for client in clients))
    await clients[0].act("rest")
    head += 1
    for client in clients:
        await client.at(head)
        assert client.view == (await rooms.standing(ROOM)).view(client.user)
        live = [t for t in client.texts if t.startswith(('{"type":"TABLE_STATE', '{"type":"HAND'))]
        hidden = set().union(*cards.values()) - cards[client.user]
        assert hidden
        assert cards[client.user] <= set(re.findall(r"\b[0-9a-f]{16}\b", "".join(live)))
        for fresh_process in (False, True):
            other = door_to(rooms_on(store)) if fresh_process else door
            back = Client(other, user=client.user)
            await back.join(cursor=client.all("TABLE_SNAPSHOT")[0]["position"])
            await back.until(lambda c, live=live: len(c.texts) > len(live))
            assert back.texts[1:] == live
            if fresh_process:
                await closed(other)
            for text in (*client.texts, *back.texts):
                assert not any(card in text for card in hidden)
    await closed(door)


@simulated()
async def test_who_sits_down_and_gets_up_is_shown_more_and_then_less(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    ann, bob = await seated(door, "ann", "bob")
    await ann.act("sit")
    await bob.act("sit")
    await ann.act("deal")
    await bob.at(3)
    assert bob.view["seats"]["bob"]["card"]
    await bob.act("leave")
    for client in (ann, bob):
        await client.at(4)
        assert client.view == (await rooms.standing(ROOM)).view(client.user)
    assert "card" not in bob.view["seats"].get("bob", {})
    await bob.act("sit")
    await bob.at(5)
    assert bob.view == (await rooms.standing(ROOM)).view("bob")
    await closed(door)


@simulated()
async def test_events_reach_those_whom_they_are_for(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    ann, bob, nobody = await seated(door, "ann", "bob", None)
    events = [("all", 1), (["ann"], 2), (["ann", "bob"], 3), ([], 4), (["all"], 5)]
    rooms.room.gives = lambda state, ctx: Accepted(state, events=events)
    await ann.act("give")
    for client, told in ((ann, [1, 2, 3]), (bob, [1, 3]), (nobody, [1])):
        await client.at(1)
        assert client.all("TABLE_STATE_UPDATE")[0]["events"] == told
    await closed(door)


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


# --- limits -------------------------------------------------------------------------------------


def nested(levels, kind):
    """An action has the first level, and this is the rest."""
    begin, end = {"lists": ("[", "]"), "objects": ('{"x":', "}")}[kind]
    return f"{begin * (levels - 1)}1{end * (levels - 1)}"


@pytest.mark.parametrize("kind", ["lists", "objects"])
@simulated(1)
async def test_an_action_that_is_nested_too_deep_is_refused_and_changes_nothing(store, kind):
    rooms = rooms_on(store)
    door = door_to(rooms)
    ann, bob = await seated(door, "ann", "bob")
    for number, levels in enumerate((65, 66, 200, 500, 900, 3000)):
        ann.raw(
            f'{{"type":"ACTION_REQUEST","requestId":"deep-{number}","payload":{{"tableId":"{ROOM}",'
            f'"actionType":"say","text":{nested(levels, kind)}}}}}'
        )
        answer = await ann.answer(f"deep-{number}")
        assert answer["payload"].get("error", answer["payload"])["code"] == "INVALID"
    assert (await rooms.standing(ROOM)).version == 0
    fits = json.loads(nested(64, kind))
    assert (await ann.act("say", "deep-0", text=fits))["success"]  # of which nothing was kept
    await bob.at(1)
    assert bob.all("TABLE_STATE_UPDATE")[0]["events"] == [{"said": fits}]
    await closed(door)


DEEP = {
    "a cursor": '{"type":"JOIN","requestId":"ID","payload":{"tableId":"t1","cursor":DEEP}}',
    "a reason": '{"type":"REQUEST_SNAPSHOT","requestId":"ID","payload":{"tableId":"t1",'
    '"reason":DEEP}}',
    "another room": '{"type":"ACTION_REQUEST","requestId":"ID","payload":{"tableId":"t2",'
    '"actionType":"say","text":DEEP}}',
    "an action": '{"type":"ACTION_REQUEST","requestId":"ID","payload":{"tableId":"t1",'
    '"actionType":"say","text":DEEP}}',
    "what nobody reads": '{"type":"PING","requestId":"ID","x":DEEP}',
    "a type": '{"requestId":"ID","type":DEEP}',
}


@pytest.mark.parametrize("where", DEEP)
@simulated(1)
async def test_however_deep_a_message_is_it_is_answered(store, where):
    """As deep as can just be read, and not be written again by whoever answers it."""
    rooms = rooms_on(store)
    limits = Limits(messages_per_s=10**6, in_flight=1)
    door = door_to(rooms, limits=limits)
    (ann,) = await seated(door, "ann")
    levels = range(66, 1000) if where == "an action" else range(700, 1000)
    for number in levels:
        deep = DEEP[where].replace("ID", f"r-{number}")
        ann.raw(deep.replace("DEEP", "[" * number + "]" * number))
    ann.raw('{"type":"PING"}')
    await ann.until(lambda c: "HEARTBEAT" in c.kinds)
    told = {m.get("requestId"): m["payload"].get("code") for m in ann.messages}
    # What cannot be read at all has no id, unless it begins with it.
    known = [n for n in levels if where != "a type" or f"r-{n}" in told]
    assert {told[f"r-{number}"] for number in known} == {"INVALID"}
    assert ann.kinds.count("ERROR") == len(levels)
    assert (await ann.act("say"))["success"]
    await closed(door)


@simulated()
async def test_a_message_that_is_too_large_is_refused_and_nothing_else(store):
    door = door_to(rooms_on(store), limits=Limits(message_bytes=500))
    (ann,) = await seated(door, "ann")
    for text in ("x" * 600, "é" * 300):
        ann.say("ACTION_REQUEST", "big", actionType="say", text=text)
        ann.raw(json.dumps({"type": "PING", "x": text}, ensure_ascii=False))
    await ann.until(lambda c: c.kinds.count("ERROR") == 4)
    errors = [m["payload"] for m in ann.messages if m["type"] == "ERROR"]
    assert {error["code"] for error in errors} == {"TOO_LARGE"}
    assert door.status().refused == {"TOO_LARGE": 4}
    assert ann.all("JOINED")[0]["messageBytes"] == 500
    assert (await ann.act("say", text="x" * 100))["success"]
    await closed(door)


UNREADABLE = {
    "too large": '"' + "x" * 70_000 + '"',
    "too deep": "[" * 5000 + "]" * 5000,
    "too large a number": "9" * 5000,
    "cut off": '"',
    "no number": "NaN",
    "an endless number": "1e999",
    "half a character": '"\\ud800"',
    "a tab": '"\t"',
}


@pytest.mark.parametrize("what", UNREADABLE)
@simulated(1)
async def test_who_sends_what_cannot_be_read_is_told_which_it_was(store, what):
    rooms = rooms_on(store)
    door = door_to(rooms)
    (ann,) = await seated(door, "ann")
    for space in ("", " "):
        ann.raw(
            f'{{"type":{space}"ACTION_REQUEST",{space}"requestId":{space}"odd{space}",'
            f'"payload":{{"tableId":"{ROOM}","actionType":"say","text":{UNREADABLE[what]}}}}}'
        )
        answer = await ann.answer(f"odd{space}")
        code = "TOO_LARGE" if what == "too large" else "INVALID"
        assert (answer["type"], answer["payload"]["code"]) == ("ERROR", code)
        assert "retry" not in answer["payload"]
    assert (await ann.act("say", "odd"))["success"]  # of which nothing was kept
    assert (await rooms.standing(ROOM)).version == 1
    await closed(door)


@simulated()
async def test_too_many_messages_are_refused_for_a_while_and_then_taken(store):
    door = door_to(rooms_on(store), limits=Limits(messages_per_s=5))
    (ann,) = await seated(door, "ann")
    for number in range(30):
        ann.say("ACTION_REQUEST", f"a-{number}", actionType="say")
    await ann.until(lambda c: sum(k == "ACTION_RESULT" for k in c.kinds) == 30)
    answers = [m["payload"] for m in ann.messages if m["type"] == "ACTION_RESULT"]
    limited = [a for a in answers if not a["success"] and a["error"]["code"] == "RATE_LIMITED"]
    assert 5 < len(limited) < 25
    assert all(a["error"]["retry"] and a["error"]["retryAfterMs"] == 200 for a in limited)
    assert door.status().refused["RATE_LIMITED"] == len(limited)
    await asyncio.sleep(3)
    assert (await ann.act("say", "a-29"))["success"]
    ann.say("REQUEST_SNAPSHOT", "s", reason="gap")
    assert (await ann.answer("s"))["type"] == "TABLE_SNAPSHOT"
    await closed(door)


@simulated()
async def test_who_goes_on_sending_too_much_is_closed(store):
    door = door_to(rooms_on(store), limits=Limits(messages_per_s=0.5))
    (ann,) = await seated(door, "ann")
    for _ in range(200):
        ann.raw("garbage")
    assert await ann.ended() == 1008
    assert door.status().closed == {"rules": 1}
    assert door.status().joined == door.status().connections == 0
    await closed(door)


@simulated()
async def test_more_rooms_than_a_connection_may_have_are_refused(store):
    door = door_to(rooms_on(store), limits=Limits(rooms=2))
    ann = Client(door, user="ann")
    await ann.join("r1")
    await ann.join("r2")
    assert (await ann.join("r3"))["payload"]["code"] == "INVALID"
    assert (await ann.join("r2"))["type"] == "JOINED"  # which it has already
    ann.say("LEAVE", "l", "r1")
    await ann.answer("l")
    assert (await ann.join("r3"))["type"] == "JOINED"
    await closed(door)


@simulated()
async def test_a_user_has_so_many_places_and_spectators_any_number(store):
    door = door_to(rooms_on(store), limits=Limits(per_user=2))
    one, two = await seated(door, "ann", "ann")
    three = Client(door, user="ann")
    refused = (await three.join())["payload"]
    assert refused["code"] == "RATE_LIMITED"
    assert door.status().snapshots == {"join": 2}  # those that were told
    await seated(door, "bob", None, None, None)
    assert (await one.join())["type"] == "JOINED"  # in its own place
    await two.hang_up()
    assert (await three.join())["type"] == "JOINED"
    await closed(door)


@simulated()
async def test_who_cannot_have_another_place_keeps_the_one_it_has(store):
    door = door_to(rooms_on(store), limits=Limits(per_user=1))
    ann, bob = await seated(door, "ann", "bob")
    ann.user = "bob"
    assert (await ann.join())["type"] == "ERROR"
    assert door.status().joined == 2
    assert (await ann.act("sit"))["success"]
    await bob.at(1)
    assert list(bob.view["seats"]) == ["ann"]
    await closed(door)


@simulated()
async def test_more_connections_than_there_are_places_for_are_turned_away(store):
    door = door_to(rooms_on(store), limits=Limits(connections=2))
    ann, _ = await seated(door, "ann", "bob")
    late = Client(door, user="cat")
    assert (await late.ended(), late.accepted) == (1013, False)
    later = Client(door, user="cat", extensions=["websocket.http.response"])
    await later.ended()
    assert later.refused == 503
    assert door.status().closed == {"overloaded": 2}
    await ann.hang_up()
    await seated(door, "cat")
    await closed(door)


@simulated()
async def test_when_everybody_comes_at_once_some_are_told_to_come_later(store):
    door = door_to(rooms_on(store), limits=Limits(accepts_per_s=10))
    clients = [Client(door) for _ in range(50)]
    await asyncio.sleep(0.05)
    assert sum(client.accepted for client in clients) == 20
    await asyncio.sleep(1)
    more = [Client(door) for _ in range(50)]
    await asyncio.sleep(0.05)
    assert 9 <= sum(client.accepted for client in more) <= 12
    await closed(door)


@simulated()
async def test_who_has_joined_nothing_for_a_while_is_closed(store):
    door = door_to(rooms_on(store), limits=Limits(join_within_s=10))
    idle = Client(door)
    (ann,) = await seated(door, "ann")
    began = asyncio.get_running_loop().time()
    assert await idle.ended() == 1008
    assert 9 < asyncio.get_running_loop().time() - began < 13
    await asyncio.sleep(30)
    ann.say("LEAVE", "l")
    await asyncio.sleep(8)
    await ann.join("t2")
    await asyncio.sleep(20)
    ann.say("LEAVE", "l", "t2")
    assert await ann.ended() == 1008
    assert door.status().closed == {"idle": 2}
    await closed(door)


@simulated()
async def test_a_connection_ends_at_its_age_and_not_all_at_the_same_time(store):
    door = door_to(rooms_on(store), max_age_s=100, reauthorise_s=None)
    clients = await seated(door, *(None for _ in range(20)))
    ends = []

    async def ended(client):
        assert await client.ended() == 1001
        ends.append(asyncio.get_running_loop().time())

    await asyncio.gather(*map(ended, clients))
    assert min(ends) >= 79
    assert max(ends) <= 102
    assert max(ends) - min(ends) > 5
    assert door.status().closed == {"old": 20}
    await closed(door)


@simulated()
async def test_who_takes_nothing_is_cut_off_and_comes_back_to_what_it_missed(store):
    rooms = rooms_on(store)
    door = door_to(rooms, limits=Limits(behind_events=20))
    ann, slow = await seated(door, "ann", "bob")
    cursor = slow.cursor
    slow.stick()
    for number in range(30):
        await acted(rooms, "ann", "say", text=number)
    await asyncio.sleep(3)
    assert door.status().closed == {"slow": 1}
    assert door.status().connections == 1
    assert slow.task.done()
    await ann.at(30)  # whoever is not slow has it all
    back = Client(door, user="bob")
    assert (await back.join(cursor=cursor))["payload"]["resumed"]
    await back.until(lambda c: len(c.all("TABLE_STATE_UPDATE")) == 30)
    await closed(door)


@pytest.mark.parametrize("by", ["bytes", "time"])
@simulated(1)
async def test_who_is_behind_by_bytes_or_takes_nothing_for_long_is_cut_off(store, by):
    rooms = rooms_on(store)
    limits = Limits(behind_bytes=5000) if by == "bytes" else Limits(write_within_s=5)
    door = door_to(rooms, limits=limits)
    (slow,) = await seated(door, "bob")
    slow.stick()
    await acted(rooms, "ann", "say", text="x" * 4000)
    await asyncio.sleep(3)
    assert not slow.task.done()
    for _ in range(2):
        await acted(rooms, "ann", "say", text="x" * 4000)
    await asyncio.sleep(6)
    assert slow.task.done()
    assert door.status().closed == {"slow": 1}
    await closed(door)


def held_for(client, door):
    """How many answers, and how many characters of them."""
    (found,) = [c for c in door._house.connections if c._voice._send == client._send]
    assert found._voice.waiting == sum(map(len, found._voice.answers))
    return len(found._voice.answers), found._voice.waiting


@pytest.mark.parametrize("what", ["little", "much"])
@simulated()
async def test_who_asks_and_takes_no_answers_is_not_listened_to_and_cut_off(store, what):
    rooms = rooms_on(store)
    door = door_to(rooms, limits=Limits(messages_per_s=10**6, write_within_s=20))
    rooms.room.gives = lambda state, ctx: Accepted({**state, "x": "x" * 200_000})
    await acted(rooms, "bob", "give")
    (ann,) = await seated(door, "ann")
    ann.stick()
    for number in range(1000):
        if what == "little":
            ann.raw('{"type":"PING"}')
        else:
            ann.say("REQUEST_SNAPSHOT", f"s-{number}", reason="manual")
    await asyncio.sleep(15)
    answers, size = held_for(ann, door)
    assert 0 < answers <= 256 + 1  # a sign of life among them
    assert size < 500_000
    await asyncio.sleep(10)
    assert ann.task.done()
    assert door.status().closed == {"slow": 1}
    await closed(door)


@pytest.mark.parametrize("what", ["many", "large"])
@simulated()
async def test_who_takes_nothing_is_not_told_of_everything_unasked(store, what):
    door = door_to(rooms_on(store))
    (ann,) = await seated(door, "ann")
    (connection,) = door._house.connections
    ann.stick()
    text, most = ("x" * 100_000, 84) if what == "large" else ("x", 2050)
    for _ in range(most - 10):
        connection.tell(text)
    await asyncio.sleep(0.1)
    assert not ann.task.done()
    for _ in range(20):
        connection.tell(text)
    await asyncio.sleep(0.1)
    assert ann.task.done()
    assert door.status().closed == {"slow": 1}
    await closed(door)


@simulated()
async def test_who_is_slow_and_comes_back_to_many_large_rooms_gets_them_all(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    rooms.room.gives = lambda state, ctx: Accepted({**state, "x": "x" * 200_000})
    names = [f"r{number}" for number in range(16)]
    for name in names:
        await acted(rooms, "bob", "give", room=name)
    ann = Unhurried(door, user="ann")
    for name in names:
        ann.say("JOIN", name, name, token="ann")
    await asyncio.sleep(60)
    assert [len(ann.all("TABLE_SNAPSHOT", name)) for name in names] == [1] * 16
    assert door.status().closed == {}
    await closed(door)


@simulated()
async def test_who_is_slow_and_has_missed_much_in_several_rooms_gets_it_all(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    (ann,) = await seated(door, "ann")
    names = [f"r{number}" for number in range(4)]
    for name in names:
        await ann.join(name)
    cursors = {name: ann.all("TABLE_SNAPSHOT", name)[0]["position"] for name in names}
    await ann.hang_up()
    rooms.room.gives = lambda state, ctx: Accepted({**state, "won": {"at": ctx.version}})
    for name in names:
        for _ in range(256):  # each of which has a result
            await acted(rooms, "bob", "give", room=name)
        await acted(rooms, "bob", "rest", room=name)
    back = Unhurried(door, user="ann")
    back.each_s = 0.02
    for name in names:
        back.say("JOIN", name, name, token="ann", cursor=cursors[name])
    await asyncio.sleep(60)
    assert back.kinds.count("TABLE_STATE_UPDATE") == 4 * 257
    assert back.kinds.count("HAND_RESULT") == 4 * 256
    assert "TABLE_SNAPSHOT" not in back.kinds
    assert door.status().closed == {"gone": 1}
    await closed(door)


# --- the end ------------------------------------------------------------------------------------


@simulated()
async def test_a_drain_closes_everybody_one_after_another_and_lets_nobody_in(store):
    rooms = rooms_on(store)
    door = door_to(rooms)
    clients = await seated(door, *(f"u{n}" for n in range(20)))
    clients[0].stick()
    draining = asyncio.ensure_future(door.drain(5))
    await asyncio.sleep(2)
    assert 3 < sum(client.task.done() for client in clients) < 17
    assert door.status().draining
    assert not door.status().ready
    late = Client(door, user="late")
    assert await late.ended() == 1013
    await draining
    assert {client.code for client in clients[1:]} == {1001}
    assert door.status().connections == 0
    assert door.status().closed == {"drained": 20, "overloaded": 1}
    await closed(door)


@simulated(1)
async def test_a_drain_takes_no_longer_than_there_is_somebody_to_close(store):
    door = door_to(rooms_on(store))
    (ann,) = await seated(door, "ann")
    began = asyncio.get_running_loop().time()
    await door.drain(10)
    assert asyncio.get_running_loop().time() - began < 1
    assert ann.code == 1001
    await closed(door)


@simulated(1)
async def test_as_an_app_of_its_own_it_begins_and_ends_with_the_server(store):
    door = door_to(rooms_on(store))
    said = asyncio.Queue()
    told = []

    async def send(message):
        told.append(message["type"])

    running = asyncio.ensure_future(door({"type": "lifespan"}, said.get, send))
    said.put_nowait({"type": "lifespan.startup"})
    (ann,) = await seated(door, "ann")
    said.put_nowait({"type": "lifespan.shutdown"})
    await running
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert ann.task.done()


# --- whatever a client sends --------------------------------------------------------------------

TEXTS = st.text(max_size=20) | st.sampled_from(["\x00", "\ud800", "é" * 300, "t1", "ann", "1.5"])
LEAVES = (
    st.none() | st.booleans() | st.floats() | TEXTS
    | st.integers(-(10**30), 10**30) | st.sampled_from([2**53, 2**53 - 1, -1, 0, 10**400])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3), max_leaves=6
)
FIELDS = ("tableId", "actionType", "expectedVersion", "cursor", "token", "spectate", "reason",
          "currentVersion", "text", "amount", "type")  # fmt: skip
KINDS = ("JOIN", "LEAVE", "ACTION_REQUEST", "REQUEST_SNAPSHOT", "PING", "NONSENSE")
RIGHT = {
    "tableId": ROOM,
    "actionType": "look",
    "expectedVersion": 1,
    "cursor": "1.000000000000",
    "reason": "gap",
}
PAYLOADS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(KINDS) | VALUES,
        "requestId": st.sampled_from(["r", "r2"]) | VALUES,
        "clientId": VALUES,
        "clientSeq": VALUES,
        "payload": VALUES | PAYLOADS | PAYLOADS.map(lambda found: {**RIGHT, **found}),
    },
)
RAW = (
    MESSAGES.map(json.dumps)
    | VALUES.map(json.dumps)
    | st.text(max_size=60).filter(lambda text: text.isprintable())
    | st.sampled_from(
        ["[" * 1000, "[" * 990 + "]" * 990, '{"type":' * 400, "1e999", "-", "nul", "NaN"]
        + [
            '{"type":"ACTION_REQUEST","requestId":"r","payload":'
            '{"tableId":"t1","actionType":"look","x":' + odd + "}}"
            for odd in ("1e999", '"\\ud800"', "[" * 400 + "]" * 400, "9" * 4000, '"\\u0000"')
        ]
        + [
            '{"type":"JOIN","payload":{"tableId":"t1","token":"' + odd + '"}}'
            for odd in ("\\udfff", "\\u0000", "x" * 8000)
        ]
    )
)

QUIET = {"JOINED", "TABLE_SNAPSHOT", "HEARTBEAT", "LEFT", "HAND_RESULT"}


async def _survives(store, texts):
    rooms = rooms_on(store)
    door = door_to(rooms, limits=Limits(messages_per_s=10**6, in_flight=10**6))
    good, odd = await seated(door, "ann", "odd")
    await good.act("sit")
    begun = len(odd.texts)
    for text in texts:
        odd.raw(text)
    odd.say("LEAVE", "the-end", "elsewhere")
    await odd.answer("the-end")
    await asyncio.sleep(1)
    for message in odd.messages[begun:]:
        if message["type"] == "ACTION_RESULT":
            assert message["payload"]["success"] is False
            assert message["payload"]["error"]["code"]
        elif message["type"] == "ERROR":
            assert message["payload"]["code"]
        else:
            assert message["type"] in QUIET | {"TABLE_STATE_UPDATE"}
    assert not odd.task.done()
    assert (await rooms.standing(ROOM)).version == 1
    assert (await good.act("say"))["success"]
    await good.at(2)
    await closed(door)


@settings(
    max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.lists(RAW, min_size=1, max_size=6))
def test_whatever_a_client_sends_is_answered_and_changes_nothing(texts):
    simulated(1)(_survives)(texts=texts)


def odd(payload='"actionType":"play"', id='"odd"', table='"t1"', kind="ACTION_REQUEST"):
    return f'{{"type":"{kind}","requestId":{id},"payload":{{"tableId":{table},{payload}}}}}'


PLAY = '"actionType":"play"'
ODD = {
    "out of turn": (odd(), "NOT_YOUR_TURN"),
    "stale": (odd(f'{PLAY},"expectedVersion":2'), "STATE_STALE_VERSION"),
    "ahead": (odd(f'{PLAY},"expectedVersion":9007199254740991'), "STATE_STALE_VERSION"),
    "a version beyond what numbers tell apart": (
        odd(f'{PLAY},"expectedVersion":9007199254740992'),
        "INVALID",
    ),
    "a huge version": (odd(f'{PLAY},"expectedVersion":{"9" * 400}'), "INVALID"),
    "a negative version": (odd(f'{PLAY},"expectedVersion":-1'), "INVALID"),
    "a version with a point": (odd(f'{PLAY},"expectedVersion":3.0'), "INVALID"),
    "a version that is text": (odd(f'{PLAY},"expectedVersion":"3"'), "INVALID"),
    "a version that is true": (odd(f'{PLAY},"expectedVersion":true'), "INVALID"),
    "no such action": (odd('"actionType":"\\u0000"'), "INVALID"),
    "an action that is a number": (odd('"actionType":7'), "INVALID"),
    "no action": (odd('"x":1'), "INVALID"),
    "no room": (odd(table="null"), "INVALID"),
    "a room that is a list": (odd(table='["t1"]'), "INVALID"),
    "a room with too long a name": (odd(table=f'"{"x" * 201}"'), "INVALID"),
    "a room that was not joined": (odd(table='"t2"'), "UNAUTHORIZED"),
    "the same room, for the eye": (odd(table='"t1\u200b"'), "INVALID"),
    "a snapshot of another room": (odd('"x":1', table='"t2"', kind="REQUEST_SNAPSHOT"),
                                   "UNAUTHORIZED"),
    "a message of the server's": (odd(kind="TABLE_SNAPSHOT"), "INVALID"),
    "the same name twice, the last counts": (
        odd('"actionType":"sit","actionType":"play","tableId":"t1"', table='"t2"'),
        "NOT_YOUR_TURN",
    ),
    "an id with letters of any kind": (odd(id='"od\\u0064"'), "NOT_YOUR_TURN"),
    "an id as long as may be": (odd(id=f'"{"x" * 100}"'), "NOT_YOUR_TURN"),
    "an id that is too long": (odd(id=f'"{"x" * 101}"'), "INVALID"),
    "an id that is too long in bytes": (odd(id=f'"{"é" * 51}"'), "INVALID"),
    "an empty id": (odd(id='""'), "INVALID"),
    "an id that is a number": (odd(id="7"), "INVALID"),
    "an id that is a list": (odd(id='["odd"]'), "INVALID"),
    "no id": (odd(id="null"), "INVALID"),
    "an id with half a character": (odd(id='"\\ud800"'), "INVALID"),
    "an id that cannot be printed": (odd(id='"a\\nb"'), "INVALID"),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
@simulated(1)
async def test_what_is_asked_in_an_odd_way_gets_its_code_and_changes_nothing(store, what):
    rooms = rooms_on(store)
    door = door_to(rooms)
    await dealt(rooms, "ann", "bob")
    (bob,) = await seated(door, "bob")
    before, (text, code) = await state_of(rooms), ODD[what]
    for _ in range(2):  # the second time, too
        begun = len(bob.texts)
        bob.raw(text)
        await bob.until(lambda c, begun=begun: len(c.texts) > begun)
        (answer,) = bob.messages[begun:]
        assert answer["payload"].get("error", answer["payload"])["code"] == code
        asked = json.loads(text)["requestId"]
        named = answer.get("requestId")
        assert named == (None if code == "INVALID" and " id" in what else asked)
    assert await state_of(rooms) == before
    assert (await bob.act("say"))["success"]
    await closed(door)


@simulated(1)
async def test_what_is_not_text_is_refused(store):
    door = door_to(rooms_on(store))
    (ann,) = await seated(door, "ann")
    ann._said.put_nowait({"type": "websocket.receive", "bytes": b'{"type":"PING"}', "text": None})
    ann._said.put_nowait({"type": "websocket.receive", "bytes": b"\xff"})
    await ann.until(lambda c: c.kinds.count("ERROR") == 2)
    assert (await ann.act("sit"))["success"]
    await closed(door)


# --- what people are told -----------------------------------------------------------------------


@simulated()
async def test_playing_moves_every_number_of_the_status(store):
    rooms, other = rooms_on(store, Cards(turn_s=10)), rooms_on(store, Cards(turn_s=10))
    door = door_to(rooms)
    ann, bob = await seated(door, "ann", "bob")
    await ann.act("sit", "a-1")
    await ann.act("sit", "a-1")
    await bob.act("sit")
    await ann.act("deal")
    await bob.act("play")
    await acted(other, "cat", "say")
    store.delay_s = 0.05
    await acted(other, "cat", "say")
    await ann.act("say")
    store.delay_s = 0
    await asyncio.sleep(15)
    ann.say("REQUEST_SNAPSHOT", "s", reason="gap")
    await ann.answer("s")
    await bob.hang_up()
    status = door.status()
    assert (status.name, status.rooms, status.connections, status.joined) == ("table", 1, 1, 1)
    assert (status.requests, status.accepted, status.repeated) == (6, 4, 1)  # and no timeout
    assert status.refused == {"NOT_YOUR_TURN": 1}
    assert status.timeouts == 1
    assert status.updates == 2 * 7
    assert (status.snapshots, status.gaps) == ({"join": 2, "gap": 1}, 1)
    assert status.closed == {"gone": 1}
    assert sum(status.action_s.counts) == 6
    assert (status.outage, status.draining, status.ready) == ("", False, True)
    await other.aclose()
    await closed(door)


def test_a_position_on_the_wire_is_a_cursor():
    assert Position.parse("42.9f3c00d1a2b3") == Position(42, "9f3c00d1a2b3")
