"""Seats of a connection: taken, left, taken back, and nothing told behind their end.

Spoken to by hand, in simulated time: whoever is woken next is drawn by lot.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from semel.feed import Subscription
from semel.feed.values import Burst
from semel.http.ws import Limits, RoomDoor, Spectator, voice
from support.rooms import (
    ROOM,
    Client,
    Unhurried,
    acted,
    closed,
    dealt,
    door_to,
    rooms_on,
    seated,
    simulated,
    state_of,
)

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


# --- seats that are taken back ------------------------------------------------------------------


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


# --- nothing behind the end ---------------------------------------------------------------------


class AtOnce:
    """A line past `send`, as there is under uvicorn, to one of our clients."""

    def __init__(self, send):
        self.client = send.__self__
        self.is_free = True

    def write(self, text):
        self.client.texts.append(text)


async def _being_fetched(rooms, door, monkeypatch):
    """Somebody for whom the log is asked, which takes long, and when it is to answer."""
    lines, gate, began = [], asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(voice, "line_of", lambda send: lines.append(AtOnce(send)) or lines[-1])
    fetch = Subscription.fetch

    async def slow(following):
        began.set()
        await gate.wait()
        return await fetch(following)

    client = Client(door, user="ann")
    await client.join()
    (line,) = lines
    line.is_free = False
    client.stick()
    await acted(rooms, "ann", "sit")
    await asyncio.sleep(0.1)  # which is being written
    await dealt(rooms, "ann", "bob")
    for number in range(300):  # so that it is served from the log
        await acted(rooms, "cat", "say", text=number)
    monkeypatch.setattr(Subscription, "fetch", slow)
    client.stick(stuck=False)
    await asyncio.wait_for(began.wait(), 60)
    line.is_free = True
    return client, gate


@pytest.mark.parametrize("then", ["it is left", "somebody else joins"])
@simulated()
async def test_a_seat_that_is_over_when_the_log_answers_is_told_nothing(store, then, monkeypatch):
    rooms = rooms_on(store)
    door = door_to(rooms, limits=Limits(behind_events=1000))
    client, gate = await _being_fetched(rooms, door, monkeypatch)
    card = (await state_of(rooms))["seats"]["ann"]["card"]
    if then == "it is left":
        client.say("LEAVE", "l")
        await client.answer("l")
    else:
        client.user = "bob"
        await client.join()
    begun = len(client.texts)
    gate.set()
    await asyncio.sleep(2)
    assert [json.loads(text)["type"] for text in client.texts[begun:]] == []
    assert card not in "".join(client.texts)
    await closed(door)


@simulated()
async def test_what_the_log_answers_comes_before_what_happens_meanwhile(store, monkeypatch):
    rooms = rooms_on(store)
    door = door_to(rooms, limits=Limits(behind_events=1000))
    client, gate = await _being_fetched(rooms, door, monkeypatch)
    for _ in range(3):
        await acted(rooms, "cat", "say")
    gate.set()
    for _ in range(3):
        await acted(rooms, "cat", "say")
    await client.at((await rooms.standing(client.room)).version)
    versions = [update["stateVersion"] for update in client.all("TABLE_STATE_UPDATE")]
    assert versions == list(range(1, len(versions) + 1))
    await closed(door)


@simulated(1)
async def test_what_was_asked_before_a_snapshot_is_not_told_behind_it(store):
    """The snapshot comes between the question and the moment when somebody begins to ask it."""
    rooms = rooms_on(store)
    door = door_to(rooms)
    (ann,) = await seated(door, "ann")
    await ann.act("say")
    await ann.at(1)
    (connection,) = door._house.connections
    seat = connection.seats.get(ROOM)
    page = await rooms.log.read(rooms.stream_of(ROOM))

    async def asked():
        return Burst(page.entries, page.entries[-1].position, b"")

    connection._showing._ask(seat, asked())
    seat.go_on_from(rooms, seat.following.position)
    await asyncio.sleep(1)
    assert len(ann.all("TABLE_STATE_UPDATE")) == 1
    await closed(door)


@pytest.mark.parametrize("then", ["it is left", "somebody else joins"])
@simulated()
async def test_a_seat_that_is_over_while_another_is_shown_is_told_nothing(store, then):
    rooms = rooms_on(store)
    door = door_to(rooms)
    client = Client(door, user="ann")
    await client.join("other")
    await client.join()
    client.stick()
    await acted(rooms, "cat", "say", room="other")
    await asyncio.sleep(0.1)  # which is being written
    await dealt(rooms, "ann", "bob")
    card = (await state_of(rooms))["seats"]["ann"]["card"]
    begun = len(client.texts)
    if then == "it is left":
        client.say("LEAVE", "l")
    else:
        client.say("JOIN", "l", token="bob")
    await asyncio.sleep(0.1)
    client.stick(stuck=False)
    await client.answer("l")
    await asyncio.sleep(2)
    behind = [json.loads(text)["type"] for text in client.texts[begun:]]
    told = ["LEFT"] if then == "it is left" else ["JOINED", "TABLE_SNAPSHOT"]
    assert behind == ["TABLE_STATE_UPDATE", *told]
    assert card not in "".join(client.texts)
    await closed(door)


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
