"""What fails on all that a client sends does not fill a server's log. In simulated time."""

from __future__ import annotations

import asyncio

from support.rooms import Cards, Client, closed, door_to, rooms_on, seated, simulated

MINUTES = 3
EACH_S = 1 / 10


async def said_often(client, kind, **payload):
    """For some minutes. How often?"""
    times = round(MINUTES * 60 / EACH_S)
    for number in range(times):
        client.say(kind, f"{kind}-{number}", **payload)
        await asyncio.sleep(EACH_S)
    await client.until(lambda c: c.answers(f"{kind}-{times - 1}"))
    return times


def told(caplog, text):
    found = [record for record in caplog.records if text in record.getMessage()]
    assert all(record.exc_info for record in found)
    return [record.getMessage() for record in found]


@simulated(1)
async def test_rules_that_fail_for_every_action_are_told_of_once_a_minute(store, caplog):
    room = Cards()
    room.gives = lambda state, ctx: 1 / 0
    door = door_to(rooms_on(store, room))
    (eve,) = await seated(door, "eve")
    times = await said_often(eve, "ACTION_REQUEST", actionType="give")
    said = told(caplog, "the rules of room")
    assert MINUTES <= len(said) <= MINUTES + 1
    assert "times since" not in said[0]
    assert "times since" in said[1]
    assert len(caplog.records) == len(said)
    assert door.status().refused["FAILED"] == times
    await closed(door)


@simulated(1)
async def test_an_authorise_that_fails_for_every_join_is_told_of_once_a_minute(store, caplog):
    door = door_to(rooms_on(store), authorise=lambda visitor, _: {"good": "ann"}[visitor.token])
    client = Client(door)
    await client.join("t2", token="good")  # who has joined nothing is not listened to for long
    await said_often(client, "JOIN", token="bad")
    assert client.answers("JOIN-0")[0]["payload"]["code"] == "UNAVAILABLE"
    assert MINUTES <= len(told(caplog, "authorise failed")) <= MINUTES + 1
    assert (await client.join(token="good"))["type"] == "JOINED"
    await closed(door)


@simulated(1)
async def test_a_room_that_cannot_be_shown_to_who_joins_is_told_of_once_a_minute(store, caplog):
    room = Cards()
    door = door_to(rooms_on(store, room))
    client = Client(door)
    await client.join("t2")
    room.fails = {"view"}
    await said_often(client, "JOIN")
    assert MINUTES <= len(told(caplog, "could not be shown")) <= MINUTES + 1
    await closed(door)


@simulated(1)
async def test_an_action_that_cannot_be_answered_is_told_of_once_a_minute(store, caplog):
    door = door_to(rooms_on(store))
    (eve,) = await seated(door, "eve")

    async def settle(request):
        raise ZeroDivisionError

    door.rooms.settle = settle
    await said_often(eve, "ACTION_REQUEST", actionType="sit")
    assert MINUTES <= len(told(caplog, "could not be answered")) <= MINUTES + 1
    await closed(door)


@simulated(1)
async def test_each_kind_of_failure_is_told_of_at_once(store, caplog):
    room = Cards()
    door = door_to(rooms_on(store, room))
    (eve,) = await seated(door, "eve")
    for error in (KeyError("a"), ValueError("b"), KeyError("c")):

        def gives(state, ctx, error=error):
            raise error

        room.gives = gives
        await eve.act("give")
    assert len(told(caplog, "the rules of room")) == 2
    await closed(door)
