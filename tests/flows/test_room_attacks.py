"""Messages of a hostile client: each is answered, and they do not fill the log, store or memory.

The tests write the messages by hand. Time is simulated, except on real stores.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from semel.errors import SettingsError
from semel.http.ws import Limits
from semel.rooms import Rooms
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
)

FAST = Limits(messages_per_s=10_000, in_flight=1000)

# --- the server's log ---------------------------------------------------------------------------


def lines(caplog):
    return [record for record in caplog.records if record.name == "semel"]


@pytest.mark.parametrize("name", ["x" * 129, "a\nb", 7])
@simulated(1)
async def test_wrong_user_name_is_logged_once_a_minute(store, name, caplog):
    door = door_to(rooms_on(store), authorise=lambda visitor, room_id: name, limits=FAST)
    client = Client(door, user="ann")
    for _ in range(200):
        assert (await client.join())["payload"]["code"] == "FAILED"
    assert len(lines(caplog)) == 1
    await closed(door)


@simulated(1)
async def test_damaged_room_is_logged_once_a_minute_however_often_it_is_asked_for(store, caplog):
    rooms = rooms_on(store)
    door = door_to(rooms, limits=FAST)
    (ann,) = await seated(door, "ann")
    cursor = ann.cursor
    await rooms.log.append(STREAM, b"nonsense", id="other")
    await asyncio.sleep(5)
    caplog.clear()
    for _ in range(200):
        assert (await ann.join(cursor=cursor))["type"] == "JOINED"
    assert len(lines(caplog)) == 1
    await closed(door)


@simulated(1)
async def test_store_without_tables_is_logged_once_a_minute(store, caplog):
    door = door_to(rooms_on(store), limits=FAST)
    (ann,) = await seated(door, "ann")
    store.is_down, store.error = True, SettingsError
    await asyncio.sleep(5)
    caplog.clear()
    for _ in range(200):
        assert (await ann.join("t2"))["payload"]["code"] == "UNAVAILABLE"
        assert (await ann.act("sit"))["error"]["code"] == "UNAVAILABLE"
    assert len(lines(caplog)) <= 5
    store.is_down = False
    await closed(door)


@simulated(1)
async def test_long_action_type_is_cut_off_in_the_log(store, caplog):
    rooms = rooms_on(store)
    door = door_to(rooms, limits=FAST)
    (ann,) = await seated(door, "ann")
    rooms.room.fails = {"apply"}
    assert (await ann.act("x" * 60_000, "a-1"))["error"]["code"] == "FAILED"
    assert [len(record.getMessage()) < 200 for record in lines(caplog)] == [True]
    await closed(door)


# --- messages -----------------------------------------------------------------------------------

ODD = [
    None, True, 0, -1, 1.5, -0.0, 2**53, 10**307, "", " ", "x" * 1000, "\0", "\u202e", "null", [],
    {}, [[]], {"__proto__": 1}, [None] * 100,
]  # fmt: skip
PAYLOADS = {
    "JOIN": {"tableId": ROOM, "cursor": "1.0123456789ab", "token": "ann", "spectate": False},
    "LEAVE": {"tableId": ROOM},
    "ACTION_REQUEST": {"tableId": ROOM, "actionType": "say", "expectedVersion": 1},
    "REQUEST_SNAPSHOT": {"tableId": ROOM, "currentVersion": 1, "reason": "gap"},
}


def odd_messages(kind):
    payload = PAYLOADS[kind]
    for field in (*payload, "extra"):
        for odd in ODD:
            yield {"type": kind, "payload": {**payload, field: odd}}
    for field in ("clientId", "clientSeq", "payload", "type", "extra"):
        for odd in ODD:
            yield {"type": kind, "payload": payload, "clientId": "c", field: odd}


@pytest.mark.parametrize("kind", PAYLOADS)
@simulated(1)
async def test_odd_value_in_any_field_is_answered_once_and_closes_nothing(store, kind, caplog):
    limits = Limits(messages_per_s=10_000, rooms=1000)
    door = door_to(rooms_on(store), limits=limits, authorise=lambda *_: "ann")
    (ann,) = await seated(door, "ann")
    await acted(door.rooms, "bob", "sit")
    for number, message in enumerate(odd_messages(kind)):
        ann.texts.clear()
        ann.raw(json.dumps({**message, "requestId": f"r-{number}"}))
        await ann.answer(f"r-{number}")
        assert (await ann.join())["type"] == "JOINED"  # again: it may have left
        assert len(ann.answers(f"r-{number}")) == 1, message
    assert not lines(caplog)
    assert door.status().closed == {}
    await closed(door)


@simulated(1)
async def test_duplicate_json_key_uses_its_last_value(store):
    door = door_to(rooms_on(store))
    (ann,) = await seated(door, "ann")
    ann.raw(
        '{"type":"PING","requestId":"first","payload":{"tableId":"other"},"type":"ACTION_REQUEST",'
        f'"payload":{{"tableId":"{ROOM}","actionType":"play","actionType":"say"}},"requestId":"a"}}'
    )
    assert (await ann.answer("a"))["payload"]["action"] == {"type": "say"}
    assert not ann.answers("first")
    await closed(door)


@simulated(1)
async def test_joining_and_leaving_in_a_loop_leaves_no_tasks(store):
    door = door_to(rooms_on(store), limits=FAST, presence=True)
    (ann,) = await seated(door, "ann")
    await acted(door.rooms, "bob", "sit")
    await asyncio.sleep(5)
    before = len(asyncio.all_tasks())
    for _ in range(300):
        ann.say("LEAVE")
        ann.say("JOIN", token="ann")
    ann.say("JOIN", "last", token="ann")
    await ann.answer("last")
    await asyncio.sleep(5)
    assert len(asyncio.all_tasks()) == before
    assert door.status().joined == 1
    assert ann.all("PRESENCE")[-1]["users"] == ["ann"]
    assert store.asked["append", f"table:here:{ROOM}"] < 10
    await closed(door)


# --- names and cursors, on real stores ----------------------------------------------------------

ENGINES = {
    "sqlite": "sqlite_url",
    "redis": "redis_url",
    "postgres": "postgres_tables_url",
    "mariadb": "mariadb_tables_url",
}

# To a collation that folds case, accents, widths or spaces at the end, some of these are the same.
NAMES = [
    "ann", "Ann", "ann ", " ann", "\xe1nn", "a\u0301nn", "\uff41nn", "ss", "\xdf", "i", "\u0131",
    "\u0130", "\u3164", "\U0001f600", "\U0001f601", "%", "%25", "a_b", "a%b", "{", "{x}", "a:b",
    "../x", "'; --", "__proto__", "\\", "*", "[a]", "None",
]  # fmt: skip

# Positions that the rooms do not have, and values that are no positions.
CURSORS = [
    "1.0123456789ab", "0.0123456789ab", f"{2**53 - 1}.0123456789ab", f"{'9' * 16}.0123456789ab",
    "9" * 64, f"{2**63}.0123456789ab", "-1.0123456789ab", "\u0663.0123456789ab", "1.", ".", "\0",
    "\U0001f600" * 64, 7, 1.5, True, [], {"a": [1]},
]  # fmt: skip


@pytest.fixture
def sqlite_url(tmp_path):
    return f"sqlite:///{tmp_path}/semel.db"


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def url(request):
    return request.getfixturevalue(request.param)


async def test_names_that_look_alike_are_different_rooms_users_requests_and_clients(url):
    async with Rooms(url, Cards()) as rooms:
        for number, name in enumerate(NAMES):
            action = {"actionType": "say", "text": number}
            request = f"r-{number}"
            replies = [
                await rooms.act(name, "u", "r", action),
                await rooms.act("one", name, "r", action),
                await rooms.act("two", "u", name, action),
                await rooms.act("three", "u", request, action, client_id=name, client_seq=1),
            ]
            assert [(reply.reply, reply.cached) for reply in replies] == [(number, False)] * 4, name


async def test_invented_cursor_is_answered_by_a_snapshot(url, caplog):
    rooms = Rooms(url, Cards())
    door = door_to(rooms, limits=FAST)
    await acted(rooms, "bob", "sit")
    for room, version in ((ROOM, 1), ("nowhere", 0)):
        client = Client(door, user="ann", room=room)
        for cursor in CURSORS:
            told = (await client.join(cursor=cursor))["payload"]
            assert (told["resumed"], told["stateVersion"]) == (False, version), cursor
        assert client.view is not None
    assert not lines(caplog)
    await closed(door)
