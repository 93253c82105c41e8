"""The door behind a real server, over real sockets: alone, mounted, and behind a middleware."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest
import uvicorn
import websockets
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode

from semel.http.ws import Limits
from semel.rooms import Rooms
from semel.rooms.patches import patched
from semel.stores import MemoryStore
from support.process import HOST
from support.rooms import ROOM, Cards, acted, chips_of, door_to, state_of
from support.web import until


@contextlib.asynccontextmanager
async def serving(app, *, buffer=None, ws="websockets-sansio", **settings):
    """The URL of a server on this loop. `buffer`: of the system, for a line."""
    with socket.create_server((HOST, 0)) as sock:
        if buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        settings = {"ws_per_message_deflate": False, **settings}
        config = uvicorn.Config(
            app,
            ws=ws,
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
            **settings,
        )
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[sock]))
        await until(lambda: server.started)
        try:
            yield f"ws://{HOST}:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


class Player:
    """A client with a real socket. Holds what patches make of the room."""

    def __init__(self, wire, user):
        self.wire, self.user = wire, user
        self.position = self.view = None
        self.heard = []

    async def say(self, kind, id, **payload):
        message = {"type": kind, "requestId": id, "payload": {"tableId": ROOM, **payload}}
        await self.wire.send(json.dumps(message))

    async def hear(self, kind, id=None):
        async with asyncio.timeout(20):
            while True:
                message = json.loads(await self.wire.recv())
                self._take(message)
                if message["type"] == kind and id in (None, message.get("requestId")):
                    return message["payload"]

    def _take(self, message):
        self.heard.append(message["type"])
        payload = message["payload"]
        if message["type"] == "TABLE_SNAPSHOT":
            self.position, self.view = payload["position"], payload["state"]
        elif message["type"] == "TABLE_STATE_UPDATE":
            assert payload["previous"] == self.position, "a hole, or something twice"
            self.position = payload["position"]
            self.view = patched(self.view, payload["patch"])

    async def act(self, name, id, **more):
        await self.say("ACTION_REQUEST", id, actionType=name, **more)
        return await self.hear("ACTION_RESULT", id)

    async def up_to(self, version):
        while int(self.position.partition(".")[0]) < version:
            await self.hear("TABLE_STATE_UPDATE")


@contextlib.asynccontextmanager
async def playing(url, user=None, cursor=None, **more):
    async with connect(url, **{"compression": None, **more}) as wire:
        player = Player(wire, user)
        payload = {} if user is None else {"token": user}
        await player.say("JOIN", "join", **payload, **({"cursor": cursor} if cursor else {}))
        joined = await player.hear("JOINED")
        if not joined["resumed"]:
            await player.hear("TABLE_SNAPSHOT")
        yield player


def alone(door):
    return door, "", None


def compressed(door):
    return door, "", "deflate"


def in_starlette(door):
    return Starlette(routes=[Mount("/rooms", door)]), "/rooms/", None


class PassOn:
    """A middleware with a `send` of its own."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        async def passed(message):
            await send(message)

        await self._app(scope, receive, passed)


def behind_a_middleware(door):
    app = Starlette(routes=[Mount("/rooms", door)], middleware=[Middleware(PassOn)])
    return app, "/rooms/", None


@pytest.mark.parametrize("made", [alone, compressed, in_starlette, behind_a_middleware])
async def test_wherever_it_is_mounted_everybody_sees_the_same_game(made):
    store = MemoryStore()
    doors = [door_to(Rooms(store, Cards()), presence=True) for _ in range(2)]
    apps = [made(door) for door in doors]
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for app, path, compression in apps:
            server = serving(app, ws_per_message_deflate=compression is not None)
            urls.append(await stack.enter_async_context(server) + path)

        async def came(number, user=None):
            wire = playing(urls[number], user, compression=compression)
            return await stack.enter_async_context(wire)

        ann, bob, nobody = await came(0, "ann"), await came(1, "bob"), await came(0)
        await ann.act("sit", "a-1")
        await bob.act("sit", "b-1")
        await ann.act("deal", "a-2")

        async def talk(player):
            for number in range(20):
                answer = await player.act("say", f"{player.user}-{number}", text="x" * number * 20)
                assert answer["success"]

        await asyncio.gather(talk(ann), talk(bob))
        standing = await doors[0].rooms.standing(ROOM)
        assert standing.version == 43
        for player in (ann, bob, nobody):
            await player.up_to(43)
            assert player.view == standing.view(player.user)
        async with playing(urls[1], "ann", cursor=ann.position) as back:
            again = await back.act("say", "ann-3", text="x" * 60)
            assert (again["success"], again["cached"]) == (True, True)
        assert chips_of(await state_of(doors[0].rooms)) == 200
        assert doors[0].status().updates > 43
    for door in doors:
        await door.aclose()


async def test_who_takes_nothing_is_dropped_with_its_buffers_and_nobody_waits_for_it():
    rooms = Rooms(MemoryStore(), Cards())
    door = door_to(rooms, limits=Limits(behind_events=30, behind_bytes=10**9))
    async with (
        serving(door, buffer=4096) as url,
        playing(url, "ann") as ann,
        connect(url, compression=None, sock=_narrow(url), max_queue=1) as slow,
    ):
        await slow.send(json.dumps({"type": "JOIN", "payload": {"tableId": ROOM}}))
        await until(lambda: door.status().joined == 2)
        slow.transport.pause_reading()
        for number in range(100):
            await acted(rooms, "x", "say", text="x" * 10_000, number=number)
            await ann.hear("TABLE_STATE_UPDATE")
        await until(lambda: door.status().closed == {"slow": 1})
        assert door.status().connections == 1
        assert (await ann.act("say", "a-1"))["success"]
        slow.transport.abort()
    await door.aclose()


def _narrow(url):
    """A line that holds little, so that who does not read is felt."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((HOST, int(url.rpartition(":")[2])))
    sock.setblocking(False)
    return sock


async def test_a_drain_closes_with_the_code_that_says_come_back():
    door = door_to(Rooms(MemoryStore(), Cards()))
    async with serving(door) as url, playing(url, "ann") as ann, playing(url) as nobody:
        await door.drain(0.5)
        for player in (ann, nobody):
            with pytest.raises(websockets.ConnectionClosed):
                await player.hear("nothing")
            assert (player.wire.close_code, player.wire.close_reason) == (1001, "drained")
        with pytest.raises(websockets.InvalidStatus) as refused:
            await connect(url)
        assert refused.value.response.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) > 0
        assert door.status().closed == {"drained": 2, "overloaded": 1}
    await door.aclose()


async def test_pages_of_other_origins_and_too_many_are_turned_away_before_they_are_in():
    door = door_to(Rooms(MemoryStore(), Cards()), limits=Limits(connections=1))
    async with serving(door) as url:
        for origin, status in (("https://evil.example", 403), (url.replace("ws:", "http:"), None)):
            if status is None:
                async with playing(url, "ann", origin=origin) as ann:
                    assert (await ann.act("sit", "1"))["success"]
                    with pytest.raises(websockets.InvalidStatus) as refused:
                        await connect(url)
                    assert refused.value.response.status_code == 503
            else:
                with pytest.raises(websockets.InvalidStatus) as refused:
                    await connect(url, origin=origin)
                assert refused.value.response.status_code == status
        assert door.status().closed["origin"] == door.status().closed["overloaded"] == 1
    await door.aclose()


UPGRADE = (
    "GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.mark.filterwarnings("ignore")  # uvicorn deprecates ws="websockets"
@pytest.mark.parametrize("ws", ["websockets", "websockets-sansio", "wsproto"])
async def test_page_without_an_origin_of_its_own_is_refused_where_host_is_empty(ws):
    door = door_to(Rooms(MemoryStore(), Cards()))
    async with serving(door, ws=ws) as url:
        for origin in ("null", "file://", "https://shop.example"):
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(f"{UPGRADE}Host: \r\nOrigin: {origin}\r\n\r\n".encode())
            async with asyncio.timeout(20):
                status = (await reader.readline()).split()
            assert status[1] in {b"400", b"403"}
            writer.close()
    await door.aclose()


async def test_large_messages_are_refused_and_enormous_ones_end_the_connection():
    door = door_to(Rooms(MemoryStore(), Cards()), limits=Limits(message_bytes=1000))
    async with serving(door, ws_max_size=4000) as url, playing(url, "ann") as ann:
        await ann.say("ACTION_REQUEST", "big", actionType="say", text="x" * 2000)
        assert (await ann.hear("ERROR"))["code"] == "TOO_LARGE"
        assert (await ann.act("say", "1"))["success"]
        await ann.say("ACTION_REQUEST", "huge", actionType="say", text="x" * 5000)
        with pytest.raises(websockets.ConnectionClosed):
            await ann.hear("nothing")
        assert ann.wire.close_code == 1009
        await until(lambda: door.status().connections == 0)
        assert (await door.rooms.standing(ROOM)).version == 1
    await door.aclose()


def in_fastapi(door):
    app = FastAPI()
    app.mount("/rooms", door)
    return app, "/rooms/", None


FRAMES = {
    "text": "x" * 4001,
    "bytes": b"x" * 4001,
    "text of many bytes": "\N{GRINNING FACE}" * 1001,
    "two parts": ["x" * 3000, "x" * 3000],
    "a message of ours": json.dumps({"type": "PING", "x": "x" * 4000}),
}


@pytest.mark.filterwarnings("ignore")  # uvicorn deprecates ws="websockets"
@pytest.mark.parametrize("ws", ["websockets", "websockets-sansio", "wsproto"])
@pytest.mark.parametrize("made", [alone, in_starlette, in_fastapi, behind_a_middleware])
async def test_enormous_frame_closes_with_1009_where_the_server_has_no_such_limit(made, ws):
    door = door_to(Rooms(MemoryStore(), Cards()), limits=Limits(message_bytes=1000))
    app, path, _ = made(door)
    async with serving(app, ws=ws) as url, playing(url + path, "ann") as ann:
        for name, frame in FRAMES.items():
            async with playing(url + path, "odd") as odd:
                await odd.wire.send("\N{GRINNING FACE}" * 1000)
                assert (await odd.hear("ERROR"))["code"] == "TOO_LARGE"
                await odd.wire.send(frame)
                with pytest.raises(websockets.ConnectionClosed):
                    await odd.hear("nothing")
                assert odd.wire.close_code == 1009, name
        assert (await ann.act("say", "1"))["success"]
        await until(lambda: door.status().connections == 1)
        assert door.status().closed == {"large": len(FRAMES)}
    await door.aclose()


def framed(opcode, data, *, is_last=True):
    return Frame(opcode, data, fin=is_last).serialize(mask=True)


BROKEN = {
    "bytes that are no text": (framed(Opcode.TEXT, b"\xff\xfe{}"), 1007),
    "half a character": (framed(Opcode.TEXT, b'"\xed\xa0\x80"'), 1007),
    "no mask": (Frame(Opcode.TEXT, b"{}").serialize(mask=False), 1002),
    "the middle of nothing": (framed(Opcode.CONT, b"{}"), 1002),
    "an unknown kind": (b"\x83" + framed(Opcode.TEXT, b"{}")[1:], 1002),
    "a compressed one that was not agreed upon": (b"\xc1" + framed(Opcode.TEXT, b"{}")[1:], 1002),
    "a length without end": (b"\x81\xff" + b"\x7f" + b"\xff" * 7 + b"mask", 1009),
    "large by its parts": (
        framed(Opcode.TEXT, b"x" * 3000, is_last=False) + framed(Opcode.CONT, b"x" * 3000),
        1009,
    ),
    "an end for no reason": (framed(Opcode.CLOSE, b"\x03"), 1002),
}
ODD = {
    "bytes": framed(Opcode.BINARY, b"{}"),
    "nothing": framed(Opcode.TEXT, b""),
    "no JSON": framed(Opcode.TEXT, b"\x00"),
    "in many parts": framed(Opcode.TEXT, b"[", is_last=False)
    + framed(Opcode.CONT, b"", is_last=False) * 50
    + framed(Opcode.PING, b"x")
    + framed(Opcode.CONT, b"]"),
}


@pytest.mark.parametrize("frames", [*BROKEN, *ODD])
async def test_whatever_is_on_the_line_is_answered_or_ends_it_and_nobody_else_notices(frames):
    door = door_to(Rooms(MemoryStore(), Cards()), limits=Limits(message_bytes=1000))
    async with serving(door, ws_max_size=4000) as url, playing(url, "ann") as ann:
        async with playing(url, "odd") as odd:
            data, code = BROKEN.get(frames) or (ODD[frames], None)
            odd.wire.transport.write(data)
            if code is None:
                assert (await odd.hear("ERROR"))["code"] == "INVALID"
                assert (await odd.act("sit", "o-1"))["success"]
            else:
                with pytest.raises(websockets.ConnectionClosed):
                    await odd.hear("nothing")
                assert odd.wire.close_code == code
        await until(lambda: door.status().connections == 1)
        assert (await ann.act("say", "a-1"))["stateVersion"] == (2 if code is None else 1)
    await door.aclose()


async def test_who_vanishes_without_a_word_leaves_its_place():
    door = door_to(Rooms(MemoryStore(), Cards()))
    async with serving(door) as url, playing(url, "bob") as bob:
        async with playing(url, "ann") as ann:
            await ann.say("ACTION_REQUEST", "a-1", actionType="sit")
            ann.wire.transport.abort()
        await until(lambda: door.status().joined == 1)
        assert door.status().closed == {"gone": 1}
        async with playing(url, "ann") as back:
            assert (await back.act("sit", "a-1"))["stateVersion"] == 1
        await bob.up_to(1)
    await door.aclose()


async def test_a_connection_that_is_as_old_as_it_may_get_is_followed_by_another():
    door = door_to(Rooms(MemoryStore(), Cards()), max_age_s=0.1)
    async with serving(door) as url, playing(url, "ann") as ann:
        with pytest.raises(websockets.ConnectionClosed):
            await ann.hear("nothing")
        assert ann.wire.close_code == 1001
        async with playing(url, "ann", cursor=ann.position) as back:
            assert back.heard == ["JOINED"]
    await door.aclose()
