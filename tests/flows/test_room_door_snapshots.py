"""What came of a hand, snapshots that are asked for, and what a door shows to whom.

Spoken to by hand, in simulated time: whoever is woken next is drawn by lot.
"""

from __future__ import annotations

import asyncio
import re

import pytest

from semel.http.ws import Limits
from semel.rooms import Accepted, Rooms
from support.rooms import (
    ROOM,
    STREAM,
    Cards,
    Client,
    acted,
    closed,
    door_to,
    rooms_on,
    seated,
    simulated,
    state_of,
)

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


# --- snapshots ----------------------------------------------------------------------------------


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
