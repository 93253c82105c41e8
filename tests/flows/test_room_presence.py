"""Who is in a room, through whichever door. In simulated time."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

from semel.rooms.presence import GONE_S, TELL_EACH_S
from support.rooms import ROOM, Client, acted, door_to, rooms_on, seated, simulated

HERE = f"table:here:{ROOM}"


def door_on(store):
    return door_to(rooms_on(store), presence=True, reauthorise_s=None)


async def doors_on(store, *rooms, count=2):
    """Doors to rooms that exist: an action was accepted in each."""
    doors = [door_on(store) for _ in range(count)]
    for room in rooms or (ROOM,):
        assert (await acted(doors[0].rooms, "host", "say", room=room)).success
    return doors


def last(client):
    """Who is here, as it was told last."""
    told = client.all("PRESENCE")
    return (told[-1]["users"], told[-1]["spectators"]) if told else None


async def closed(*doors):
    await asyncio.gather(*(door.aclose() for door in doors))


@simulated(1, 2, 3)
async def test_everybody_is_told_who_is_here_through_whichever_door(store):
    here, there = await doors_on(store)
    ann, nobody = await seated(here, "ann", None)
    bob, ann_too, nobody_too = await seated(there, "bob", "ann", None)
    for client in (ann, nobody, bob, ann_too, nobody_too):
        await client.until(lambda c: last(c) == (["ann", "bob"], 2))
    await ann.hang_up()
    await nobody.hang_up()
    await bob.until(lambda c: last(c) == (["ann", "bob"], 1))
    await ann_too.hang_up()
    await bob.until(lambda c: last(c) == (["bob"], 1))
    await closed(here, there)


@simulated()
async def test_who_joins_is_told_at_once_and_after_it_has_joined(store):
    door = door_on(store)
    _, bob = await seated(door, "ann", "bob")
    await bob.until(last)
    assert bob.kinds[:3] == ["JOINED", "TABLE_SNAPSHOT", "PRESENCE"]
    assert bob.all("PRESENCE")[0]["users"] == ["ann", "bob"]
    await closed(door)


@simulated()
async def test_rooms_are_told_apart_and_it_takes_no_version(store):
    door = door_on(store)
    (ann,) = await seated(door, "ann")
    bob = Client(door, user="bob", room="t2")
    await bob.join()
    await asyncio.sleep(5)
    assert (last(ann), last(bob)) == ((["ann"], 0), (["bob"], 0))
    assert (await door.rooms.standing(ROOM)).version == 0
    bob.say("LEAVE", "l")
    await bob.join(ROOM)
    await ann.until(lambda c: last(c) == (["ann", "bob"], 0))
    await closed(door)


@simulated()
async def test_a_server_that_dies_takes_its_people_with_it_in_a_while(store):
    here, there = await doors_on(store)
    (ann,) = await seated(here, "ann")
    await seated(there, "bob", None)
    await ann.until(lambda c: last(c) == (["ann", "bob"], 1))
    for task in there._tasks:
        task.cancel()  # nobody says anything for it any more
    await asyncio.sleep(GONE_S - 35)
    assert last(ann) == (["ann", "bob"], 1)
    await asyncio.sleep(40)
    assert last(ann) == (["ann"], 0)
    await closed(here, there)


@simulated()
async def test_who_stays_is_here_for_as_long_as_it_stays(store):
    here, there = await doors_on(store)
    (ann,) = await seated(here, "ann")
    (bob,) = await seated(there, "bob")
    await asyncio.sleep(3 * GONE_S)
    assert last(ann) == last(bob) == (["ann", "bob"], 0)
    assert len(ann.all("PRESENCE")) <= 3
    await closed(here, there)


@simulated()
async def test_a_door_that_is_closed_in_order_takes_its_people_with_it_at_once(store):
    here, there = await doors_on(store)
    (ann,) = await seated(here, "ann")
    await seated(there, "bob")
    await ann.until(lambda c: last(c) == (["ann", "bob"], 0))
    await there.drain(1)
    await there.aclose()
    await asyncio.sleep(2)
    assert last(ann) == (["ann"], 0)
    await closed(here)


@simulated()
async def test_a_crowd_that_comes_at_once_is_told_of_together(store):
    here, there = await doors_on(store)
    (ann,) = await seated(here, "ann")
    clients = [Client(door, user=f"u{n:03}") for n in range(50) for door in (here, there)]
    await asyncio.gather(*(client.join() for client in clients))
    await ann.until(lambda c: len(last(c)[0]) == 51)
    told = len(ann.all("PRESENCE"))
    assert told <= 6
    assert store.asked["append", HERE] <= 8
    began = asyncio.get_running_loop().time()
    for client in clients:
        await client.hang_up()
    await ann.until(lambda c: last(c) == (["ann"], 0))
    passed_s = asyncio.get_running_loop().time() - began
    assert len(ann.all("PRESENCE")) - told <= 3 + passed_s / TELL_EACH_S
    await closed(here, there)


@simulated()
async def test_a_store_that_is_away_makes_it_late_and_not_wrong(store, caplog):
    here, there = await doors_on(store)
    (ann,) = await seated(here, "ann")
    (bob,) = await seated(there, "bob")
    await ann.until(lambda c: last(c) == (["ann", "bob"], 0))
    store.is_down = True
    await bob.hang_up()
    await asyncio.sleep(10)
    assert last(ann) == (["ann", "bob"], 0)
    store.is_down = False
    await ann.until(lambda c: last(c) == (["ann"], 0))
    await closed(here, there)


@simulated(1)
async def test_what_is_no_word_of_ours_is_passed_over(store):
    (door,) = await doors_on(store, count=1)
    (ann,) = await seated(door, "ann")
    odd = (b"", b"{}", b"[1]", b'{"server":1,"users":7,"spectators":0}', b"\xff")
    for number, data in enumerate(odd):
        await door.rooms.log.append(HERE, data, id=f"odd-{number}")
    word = {"server": "other", "users": ["zoe"], "spectators": 2, "at": 0}
    await door.rooms.log.append(HERE, json.dumps(word).encode(), id="other")
    await ann.until(lambda c: last(c) == (["ann", "zoe"], 2))
    await closed(door)


@simulated(1)
async def test_rooms_that_everybody_has_left_are_not_kept_in_mind(store):
    names = [f"r{number}" for number in range(20)]
    (door,) = await doors_on(store, *names[::2], count=1)
    for name in names:
        client = Client(door, user="ann", room=name)
        await client.join()
        await client.hang_up()
    await asyncio.sleep(10)
    assert door._house.presence._rooms == {}
    assert door._house._by_room == {}
    await closed(door)


@simulated(1)
async def test_without_it_nobody_is_told(store):
    door = door_to(rooms_on(store))
    (ann,) = await seated(door, "ann")
    await acted(door.rooms, "bob", "sit")
    await ann.at(1)
    await asyncio.sleep(5)
    assert "PRESENCE" not in ann.kinds
    assert store.asked["append", HERE] == 0
    await closed(door)


# --- rooms whose stream does not answer ---------------------------------------------------------

BAD = "table:here:bad"


@simulated(1, 2, 3)
async def test_a_room_that_nothing_can_be_said_of_keeps_nobody_from_being_told(store):
    here, there = await doors_on(store, ROOM, "bad")
    (ann,) = await seated(here, "ann")
    (bob,) = await seated(there, "bob")
    await ann.until(lambda c: last(c) == (["ann", "bob"], 0))
    store.hold(BAD)
    (eve,) = await seated(here, "eve", room="bad")
    await asyncio.sleep(1)
    (cat,) = await seated(here, "cat")
    for client in (ann, bob, cat):
        await client.until(lambda c: last(c) == (["ann", "bob", "cat"], 0), within_s=2)
    (fay,) = await seated(here, "fay", room="bad")
    for client in (eve, fay):
        await client.until(lambda c: last(c) == (["eve", "fay"], 0), within_s=2)
    await asyncio.sleep(2 * GONE_S)
    for client in (ann, bob, cat):
        assert last(client) == (["ann", "bob", "cat"], 0)
    assert store.asked["append", BAD] == 1
    (dan,) = await seated(there, "dan", room="bad")
    store.let_go(BAD)
    await dan.until(lambda c: last(c) == (["dan", "eve", "fay"], 0), within_s=2)
    await closed(here, there)


@simulated(1, 2)
async def test_a_room_whose_others_cannot_be_read_keeps_nobody_from_being_told(store):
    here, there = await doors_on(store, ROOM, "bad")
    store.hold(BAD, "read")
    (eve,) = await seated(here, "eve", room="bad")
    (dan,) = await seated(there, "dan", room="bad")
    (ann,) = await seated(here, "ann")
    (bob,) = await seated(there, "bob")
    for client in (ann, bob):
        await client.until(lambda c: last(c) == (["ann", "bob"], 0), within_s=2)
    assert (last(eve), last(dan)) == ((["eve"], 0), (["dan"], 0))
    store.let_go(BAD)
    for client in (eve, dan):
        await client.until(lambda c: last(c) == (["dan", "eve"], 0), within_s=2)
    await closed(here, there)


@simulated(1, 2)
async def test_a_door_that_is_closed_says_so_in_all_rooms_that_can_be_reached(store):
    here, there = await doors_on(store, "a", "b")
    store.hold("table:here:a", "append")
    await seated(here, "ann", room="a")
    await seated(here, "bob", room="b")
    (cat,) = await seated(there, "cat", room="b")
    await cat.until(lambda c: last(c) == (["bob", "cat"], 0))
    before = asyncio.all_tasks()
    began = asyncio.get_running_loop().time()
    await here.aclose()
    assert asyncio.get_running_loop().time() - began <= 3
    await cat.until(lambda c: last(c) == (["cat"], 0), within_s=2)
    await closed(there)
    assert asyncio.all_tasks() - before == set()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@simulated(1)
async def test_a_store_that_is_away_is_not_asked_by_all_rooms_all_the_time(store):
    names = [f"r{number}" for number in range(20)]
    (door,) = await doors_on(store, *names, count=1)
    streams = [f"table:here:{name}" for name in names]
    clients = [Client(door, user="ann", room=name) for name in names]
    for client in clients:
        await client.join()
    await asyncio.sleep(5)
    store.is_down = True
    for client in clients:
        await client.hang_up()
    for stream in streams:
        store.count(stream)
    await asyncio.sleep(60)
    assert all(10 <= store.asked["append", stream] <= 65 for stream in streams)
    store.is_down = False
    await asyncio.sleep(10)
    assert door._house.presence._rooms == {}
    await closed(door)


@simulated(1)
async def test_rooms_to_which_people_came_together_do_not_speak_together_for_ever(store):
    names = [f"r{number}" for number in range(40)]
    (door,) = await doors_on(store, *names, count=1)
    streams = [f"table:here:{name}" for name in names]
    clients = [Client(door, user="ann", room=name) for name in names]
    await asyncio.gather(*(client.join() for client in clients))
    await asyncio.sleep(300)
    said = [sum(store.asked["append", stream] for stream in streams)]
    for _ in range(120):
        await asyncio.sleep(0.5)
        said.append(sum(store.asked["append", stream] for stream in streams))
    assert max(after - before for before, after in pairwise(said)) <= 10
    await closed(door)
