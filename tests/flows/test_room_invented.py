"""Rooms that do not exist: clients that join them leave nothing in the store or in memory.

A room exists from its first accepted action on.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from urllib.parse import urlsplit

import pytest

from semel.http.ws import Limits, RoomDoor, Spectator
from semel.rooms import ALL, Accepted, Deadline, Rooms
from semel.rooms.rooms import MOST_STANDINGS
from support.rooms import (
    ROOM,
    Cards,
    Client,
    acted,
    closed,
    door_to,
    rooms_on,
    seated,
    simulated,
)
from support.servers import command

FORGED = "5.0123456789ab"


class Overdue(Cards):
    """A room whose first turn ended long before any action."""

    def deadline(self, state):
        return None if "passed" in state else Deadline("first", 1.0)

    def timeout(self, state, turn, ctx):
        return Accepted({**state, "passed": turn}, None, [(ALL, {"passed": turn})])


def rows_of(url):
    """What the store at a URL contains, without the server's own requests for the time."""
    if url.startswith("redis:"):
        found = command(urlsplit(url).port, "KEYS", "*")
    else:
        with contextlib.closing(sqlite3.connect(urlsplit(url).path)) as file:
            found = [row for (row,) in file.execute("SELECT stream FROM semel_stream")]
    return sorted(str(name) for name in found if ":clock" not in str(name))


@pytest.fixture(params=["redis", "sqlite"])
def url(request, tmp_path):
    if request.param == "redis":
        return request.getfixturevalue("redis_url")
    return f"sqlite:///{tmp_path}/semel.db"


async def tried_everything(door, *, clients, acts=True, rooms=16):
    """Clients that join invented rooms, ask in each for what they can, and leave some of them."""
    visitors = []
    for number in range(clients):
        visitor = Client(door)
        visitors.append(visitor)
        for room in range(rooms):
            name = f"invented-{number}-{room}"
            answer = await visitor.join(name, **({"cursor": FORGED} if room % 2 else {}))
            assert answer["type"] == "JOINED", answer
            visitor.say("REQUEST_SNAPSHOT", f"s-{room}", name, reason="gap")
            assert (await visitor.answer(f"s-{room}"))["type"] == "TABLE_SNAPSHOT"
            if acts:
                visitor.say("ACTION_REQUEST", f"a-{room}", name, actionType="sit")
                refused = (await visitor.answer(f"a-{room}"))["payload"]
                assert refused["error"]["code"] == "UNAUTHORIZED"
            if room % 4 == 3:
                visitor.say("LEAVE", f"l-{room}", name)
                await visitor.answer(f"l-{room}")
    return visitors


FAST = Limits(messages_per_s=10_000)

DOORS = {
    "by default": {},
    "spectators": {"authorise": lambda visitor, room_id: Spectator()},
    "users": {"authorise": lambda visitor, room_id: "ann"},
}


@pytest.mark.parametrize("settings", DOORS.values(), ids=DOORS)
async def test_joining_invented_rooms_leaves_the_store_as_it_was(url, settings):
    rooms = Rooms(url, Overdue())
    door = RoomDoor(rooms, limits=FAST, **settings)
    assert not (await acted(rooms, "bob", "unknown")).success  # which makes the tables
    before = rows_of(url)
    visitors = await tried_everything(door, clients=2, acts=settings is not DOORS["users"])
    await asyncio.sleep(1.2)  # presence is written, and deadlines are looked at, once a second
    assert rows_of(url) == before
    for visitor in visitors:
        await visitor.hang_up()
    await asyncio.sleep(0.7)
    assert rows_of(url) == before
    await door.aclose()


@pytest.mark.parametrize("settings", DOORS.values(), ids=DOORS)
@simulated(1)
async def test_joining_invented_rooms_appends_to_no_stream(store, settings):
    door = RoomDoor(rooms_on(store, Overdue()), limits=FAST, **settings)
    visitors = await tried_everything(door, clients=2, acts=settings is not DOORS["users"])
    await asyncio.sleep(60)
    for visitor in visitors:
        await visitor.hang_up()
    await asyncio.sleep(60)
    asked = {stream for verb, stream in store.asked if verb not in {"read", "load", "heads"}}
    assert asked == {"table:clock"}
    await closed(door)


@simulated(1)
async def test_invented_rooms_leave_nothing_in_memory(store):
    door = RoomDoor(rooms_on(store, Overdue()), limits=FAST)
    rooms, house = door.rooms, door._house
    visitors = await tried_everything(door, clients=20)
    await asyncio.sleep(5)
    assert len(rooms.feed) == 20 * 12 + 1  # a reader for each joined room, and one for notes
    labels = [len(each) for each in (rooms.counts.refused, rooms.counts.snapshots)]
    assert max(labels) <= 5
    for visitor in visitors:
        await visitor.hang_up()
    await asyncio.sleep(10)
    assert len(rooms.feed) == 1
    assert house.presence._rooms == house._by_room == house._set_back == {}
    assert rooms._hosts == rooms.timers._looks == rooms.timers._noted == {}
    assert len(rooms._standings) <= MOST_STANDINGS
    await closed(door)


@simulated(1, 2)
async def test_spectators_of_a_room_that_exists_write_nothing(store):
    door = RoomDoor(rooms_on(store))
    await acted(door.rooms, "bob", "sit")
    visitors = [Client(door) for _ in range(20)]
    for visitor in visitors:
        await visitor.join()
    await visitors[0].until(lambda c: c.all("PRESENCE")[-1]["spectators"] == 20)
    for visitor in visitors[1:]:
        await visitor.hang_up()
    await visitors[0].until(lambda c: c.all("PRESENCE")[-1]["spectators"] == 1)
    await asyncio.sleep(60)
    assert store.asked["append", f"table:here:{ROOM}"] == 0
    await closed(door)


@simulated(1, 2)
async def test_first_accepted_action_announces_waiting_users_to_other_servers(store):
    doors = [door_to(rooms_on(store), presence=True) for _ in range(2)]
    (ann, cat), (bob,) = await seated(doors[0], "ann", "cat"), await seated(doors[1], "bob")
    await asyncio.sleep(10)
    assert ann.all("PRESENCE")[-1]["users"] == ["ann", "cat"]
    assert bob.all("PRESENCE")[-1]["users"] == ["bob"]
    assert (await ann.act("sit"))["success"]
    for client in (ann, bob, cat):
        await client.until(lambda c: c.all("PRESENCE")[-1]["users"] == ["ann", "bob", "cat"], 3)
    await closed(*doors)


@simulated(1)
async def test_deadline_of_the_first_state_is_timed_out_once_the_room_exists(store):
    door = door_to(rooms_on(store, Overdue()))
    (ann,) = await seated(door, "ann")
    await asyncio.sleep(5)
    assert (await door.rooms.standing(ROOM)).version == 0
    assert (await ann.act("say"))["success"]
    await ann.until(
        lambda c: any("passed" in e for u in c.all("TABLE_STATE_UPDATE") for e in u["events"])
    )
    await closed(door)
