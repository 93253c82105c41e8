"""Notes of deadlines, in places that a failover gives out again."""

from __future__ import annotations

import asyncio
import copy

from semel.entries import Position
from semel.http.ws import RoomDoor
from semel.rooms import Rooms
from semel.rooms.timers import MOST_NOTES
from semel.stores.memory import MemoryStore
from support.rooms import ROOM, Cards, acted, dealt, rooms_on, simulated, state_of


async def test_a_note_that_is_looked_at_while_it_is_renewed_ends_nothing(monkeypatch):
    rooms = Rooms(MemoryStore(), Cards(10.0))
    timers = rooms.timers
    timers._is_running = True
    timers._add("r", 100.0, Position(4, "a" * 12))
    timers._add("r", 200.0, Position(4, "b" * 12))  # a failover gave the place out again
    timers._due.remove((100.0, 4, "r"))  # which is looked at just now
    timers._read = Position(4 + MOST_NOTES, "c" * 12)

    async def looked_at_meanwhile(room_id: str, at_s: float) -> None:
        timers._done[4] = timers._open.pop(4)

    monkeypatch.setattr(timers, "note", looked_at_meanwhile)
    timers._noted["r"] = [200.0]
    await timers._renew_oldest()
    assert timers._due == [(200.0, 4, "r")]  # to be looked at when it is due
    await rooms.aclose()


async def test_what_is_read_anew_while_it_is_trimmed_ends_nothing(monkeypatch):
    rooms = Rooms(MemoryStore(), Cards(10.0))
    timers = rooms.timers
    timers._done[4] = Position(4, "a" * 12)
    timers._read = Position(4, "a" * 12)
    again = Position(4, "b" * 12)

    async def begun_anew_meanwhile(stream: str, upto: Position) -> int:
        timers._forget()
        timers._done[4] = again
        return 0

    monkeypatch.setattr(timers._log, "trim", begun_anew_meanwhile)
    await timers._trim()
    assert timers._done == {4: again}

    async def forgotten_meanwhile(stream: str, upto: Position) -> int:
        timers._forget()
        return 0

    timers._read = again
    monkeypatch.setattr(timers._log, "trim", forgotten_meanwhile)
    await timers._trim()
    assert timers._done == {}
    await rooms.aclose()


async def test_a_room_that_a_failover_has_set_back_is_looked_at_once(monkeypatch):
    """Its turn may be over again, and its note was looked at by everybody."""
    rooms = Rooms(MemoryStore(), Cards(10.0))
    looked: list[str] = []
    monkeypatch.setattr(rooms.timers, "look_soon", looked.append)
    house = RoomDoor(rooms)._house
    await acted(rooms, "ann", "sit", room="r")
    standing = await rooms.standing("r")
    for reason in ("trimmed", "overrun", "forked", "forked", "ahead"):
        house.reset("r", standing, reason)
    assert looked == ["r"]
    await rooms.aclose()


@simulated(1, 2)
async def test_a_timeout_that_a_failover_has_taken_back_comes_again_whatever_is_in_memory(store):
    rooms = rooms_on(store, Cards(10.0))
    rooms.start()
    await dealt(rooms, "ann", "bob")
    await asyncio.sleep(15)
    streams = store.inner._log._streams
    before = copy.deepcopy(streams)
    await asyncio.sleep(15)
    assert (await state_of(rooms))["passed"] == ["turn-1", "turn-2"]
    streams.clear()
    streams.update(before)
    assert (await state_of(rooms))["passed"] == ["turn-1"]
    async with asyncio.timeout(5):
        await rooms._look(ROOM)
    assert (await state_of(rooms))["passed"] == ["turn-1", "turn-2"]
    await rooms.aclose()
