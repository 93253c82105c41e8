"""How much a client may ask for, and how slow it may be.

Spoken to by hand, in simulated time: whoever is woken next is drawn by lot.
"""

from __future__ import annotations

import asyncio

import pytest

from semel.http.ws import Limits
from semel.rooms import Accepted
from support.rooms import Client, Unhurried, acted, closed, door_to, rooms_on, seated, simulated

# --- so much and so many ------------------------------------------------------------------------


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
    door = door_to(rooms_on(store), limits=Limits(messages_per_s=20))
    (ann,) = await seated(door, "ann")
    for _ in range(400):
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


# --- who is slow --------------------------------------------------------------------------------


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
