"""A door itself: who may come in, its settings, signs of life, its status, its end.

Spoken to by hand, in simulated time: whoever is woken next is drawn by lot.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from semel.colour import ASYNC
from semel.errors import SettingsError
from semel.http.sse import forbidden, unauthorised
from semel.http.ws import Limits, RoomDoor, Spectator
from semel.http.ws.visitor import Origins, visitor_of
from support.rooms import ROOM, Cards, Client, acted, closed, door_to, rooms_on, seated, simulated
from support.web import ask, scope_of

# --- who may come in ----------------------------------------------------------------------------


async def _slow(visitor, room_id):
    await asyncio.sleep(3)
    return visitor.token


async def _never(visitor, room_id):
    await asyncio.sleep(10**6)


async def _raising(visitor, room_id):
    raise ZeroDivisionError


async def _empty(visitor, room_id):
    return ""


async def _without_await(visitor, room_id):
    return _empty(visitor, room_id)


async def _future(visitor, room_id):
    return asyncio.get_running_loop().create_future()


async def _refusing(visitor, room_id):
    raise unauthorised()


def _refusing_at_once(visitor, room_id):
    raise forbidden()


class NoTruth:
    """As an array of numpy, or a condition of SQLAlchemy."""

    def __bool__(self):
        raise ValueError("the truth value is ambiguous")


AUTHORISE = {
    "sync": (lambda visitor, room_id: visitor.token, "JOINED"),
    "async and slow": (_slow, "JOINED"),
    "spectator": (lambda visitor, room_id: Spectator(), "JOINED"),
    "by header": (lambda visitor, room_id: visitor.headers["X-User"], "JOINED"),
    "by a missing header": (lambda visitor, room_id: visitor.headers["x-none"], "UNAUTHORIZED"),
    "none": (lambda visitor, room_id: None, "UNAUTHORIZED"),
    "false": (lambda visitor, room_id: False, "UNAUTHORIZED"),
    "no name": (lambda visitor, room_id: "", "UNAUTHORIZED"),
    "zero": (lambda visitor, room_id: 0, "UNAUTHORIZED"),
    "an empty dict": (lambda visitor, room_id: {}, "UNAUTHORIZED"),
    "an empty list": (lambda visitor, room_id: [], "UNAUTHORIZED"),
    "async and empty": (_empty, "UNAUTHORIZED"),
    "without await": (_without_await, "UNAUTHORIZED"),
    "a future": (_future, "UNAUTHORIZED"),
    "a returned refusal": (lambda visitor, room_id: forbidden(), "UNAUTHORIZED"),
    "a returned error": (lambda visitor, room_id: PermissionError("no"), "UNAUTHORIZED"),
    "NotImplemented": (lambda visitor, room_id: NotImplemented, "UNAUTHORIZED"),
    "a raised refusal": (_refusing, "UNAUTHORIZED"),
    "a refusal raised at once": (_refusing_at_once, "UNAUTHORIZED"),
    "no truth value": (lambda visitor, room_id: NoTruth(), "UNAVAILABLE"),
    "only another room": (lambda visitor, room_id: room_id == "t2" or None, "UNAUTHORIZED"),
    "raising": (_raising, "UNAVAILABLE"),
    "raising at once": (lambda visitor, room_id: 1 / 0, "UNAVAILABLE"),
    "true": (lambda visitor, room_id: True, "FAILED"),
    "a number": (lambda visitor, room_id: 7, "FAILED"),
    "too long a name": (lambda visitor, room_id: "x" * 129, "FAILED"),
    "a name with a line break": (lambda visitor, room_id: "a\nb", "FAILED"),
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


HOSTS = {
    "empty, and the origin is null": (b"null", b"", False),
    "empty, and the origin is empty": (b"", b"", False),
    "empty, and the origin is a file": (b"file://", b"", False),
    "empty, and the origin has no host": (b"https://", b"", False),
    "empty, and the origin has a host": (b"https://shop.example", b"", False),
    "empty, and the origin has a port only": (b"http://:80", b"", False),
    "missing, and the origin has a port only": (b"https://:443", None, False),
    "a port, and so is the origin": (b"http://:80", b":80", False),
    "of spaces": (b"null", b"  ", False),
    "missing, and the origin is null": (b"null", None, False),
    "missing, and the origin has a host": (b"https://shop.example", None, False),
    "null, and so is the origin": (b"null", b"null", False),
    "with the same port": (b"http://shop.example:8080", b"shop.example:8080", True),
    "with another port": (b"http://shop.example:8080", b"shop.example:8081", False),
    "with a port, and the origin without": (b"http://shop.example", b"shop.example:81", False),
    "in capitals": (b"https://shop.example", b"SHOP.Example", True),
    "IPv6": (b"http://[::1]:8000", b"[::1]:8000", True),
    "IPv6 in capitals": (b"http://[fe80::a]", b"[FE80::A]", True),
    "IPv6 with another port": (b"http://[::1]:8000", b"[::1]:8001", False),
    "the name of another user": (b"https://shop.example@evil.example", b"shop.example", False),
    "with the scheme's default port": (b"http://shop.example", b"shop.example:80", True),
    "with the default port of TLS": (b"https://shop.example", b"shop.example:443", True),
    "with the port of the other scheme": (b"https://shop.example", b"shop.example:80", False),
    "an origin with a path": (b"https://shop.example/x", b"shop.example", False),
}


@pytest.mark.parametrize(("origin", "host", "is_let_in"), HOSTS.values(), ids=HOSTS)
def test_origin_is_let_in_only_with_the_same_host(origin, host, is_let_in):
    headers = [(b"origin", origin)] + ([] if host is None else [(b"host", host)])
    visitor = visitor_of({**scope_of("/rooms"), "headers": headers})
    assert Origins(None).allows(visitor) == is_let_in


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


# --- who says who may join ------------------------------------------------------------------------


@simulated(1)
async def test_a_lookup_that_another_one_has_cancelled_is_asked_for_again(store, caplog):
    """Asked once for all who ask at the same time: who leaves may take it from the others."""
    shared = {}

    async def lookup():
        await asyncio.sleep(1)
        return Spectator()

    async def authorise(visitor, room_id):
        if visitor.token != "shared":
            return visitor.token
        if "task" not in shared or shared["task"].done():
            shared["task"] = asyncio.ensure_future(lookup())
        return await shared["task"]

    door = door_to(rooms_on(store), authorise=authorise)
    (bob,) = await seated(door, "bob")
    for number in range(20):  # more than may be on their way
        first = Client(door)
        first.say("JOIN", "j", "x", token="shared")
        await asyncio.sleep(0.1)
        bob.say("JOIN", f"b-{number}", f"r{number}", token="shared")
        await asyncio.sleep(0.1)
        await first.hang_up()
        told = (await bob.answer(f"b-{number}"))["payload"]
        assert (told["code"], told["retry"]) == ("UNAVAILABLE", True)
    assert (await bob.act("sit"))["success"]
    await closed(door)


@simulated(1)
async def test_who_leaves_has_no_seat_whatever_authorise_makes_of_it(store):
    async def stubborn(visitor, room_id):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(5)
        return Spectator()

    door = door_to(rooms_on(store), authorise=stubborn, presence=True)
    for _ in range(3):
        client = Client(door)
        client.say("JOIN", "j")
        await asyncio.sleep(1)
        await client.hang_up()
    await asyncio.sleep(60)
    assert (door.status().joined, door.status().connections) == (0, 0)
    await closed(door)


@simulated(1)
async def test_refused_joins_at_once_are_no_reason_to_stay(store):
    async def slow(visitor, room_id):
        await asyncio.sleep(1)

    limits = Limits(join_within_s=10, messages_per_s=100)
    door = door_to(rooms_on(store), authorise=slow, limits=limits)
    client = Client(door)
    for number in range(160):
        client.say("JOIN", f"j-{number}", f"r{number}")
    await client.answer("j-159")
    begun = ASYNC.now()
    assert await client.ended() == 1008
    assert ASYNC.now() - begun < 15
    await closed(door)
