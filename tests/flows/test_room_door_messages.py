"""Whatever a client sends: too deep, too large, too odd, or no message at all.

Spoken to by hand, in simulated time: whoever is woken next is drawn by lot.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.http.ws import Limits
from support.rooms import ROOM, closed, dealt, door_to, rooms_on, seated, simulated, state_of

# --- what cannot be read ------------------------------------------------------------------------


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


# --- whatever it is -----------------------------------------------------------------------------

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
