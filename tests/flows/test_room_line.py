"""What is written past `send`, under a real uvicorn: the same as by it, in the same order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest
import uvicorn
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode

from semel.http.ws import RoomDoor, Spectator, direct
from semel.rooms import Rooms
from semel.stores import MemoryStore
from support.process import HOST
from support.rooms import ROOM, Cards

AT_ONCE_S = 10.0


@contextlib.asynccontextmanager
async def serving(app):
    with socket.create_server((HOST, 0)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        config = uvicorn.Config(
            app,
            ws="websockets-sansio",
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield f"ws://{HOST}:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


@pytest.fixture
async def door():
    rooms = Rooms(MemoryStore(), Cards())
    door = RoomDoor(rooms, authorise=lambda v, _: v.token or Spectator(), presence=False)
    try:
        yield door
    finally:
        await door.aclose()


@contextlib.asynccontextmanager
async def joined(url, **options):
    async with connect(url, max_size=None, **options) as client:
        await client.send(json.dumps({"type": "JOIN", "payload": {"tableId": ROOM}}))
        for _ in range(2):
            await heard(client)
        yield client


async def heard(client):
    async with asyncio.timeout(AT_ONCE_S):
        return await client.recv()


def lines(door):
    return [connection._voice._line for connection in door._house.connections]


async def say(door, number, text):
    action = {"actionType": "say", "text": text}
    await door.rooms.act(ROOM, "ann", f"r-{number}", action)
    await asyncio.sleep(0.001)  # for whoever tells of it


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535, 65_536, 100_000])
def test_a_frame_is_the_one_that_websockets_makes(size):
    text = "ä" * (size // 2) + "x" * (size % 2)
    assert direct._frame(text) == Frame(Opcode.TEXT, text.encode()).serialize(mask=False)


async def test_everybody_is_shown_the_same_past_send_and_by_it(door):
    async with (
        serving(door) as url,
        joined(url, compression=None) as one,
        joined(url, compression=None) as other,
        joined(url, compression="deflate") as packed,
    ):
        assert sum(line is not None for line in lines(door)) == 2
        for number in range(20):
            await say(door, number, f"ä{number}")
        for number in range(20):
            texts = {await heard(client) for client in (one, other, packed)}
            assert len(texts) == 1
            told = json.loads(texts.pop())["payload"]
            assert (told["stateVersion"], told["events"]) == (number + 1, [{"said": f"ä{number}"}])


async def test_whoever_reads_late_gets_everything_in_order(door):
    """What the network does not take waits in the log, and answers wait in their queue."""
    async with serving(door) as url, joined(url, compression=None, max_queue=1) as client:
        [line] = lines(door)
        number = 0
        while line.is_free:
            await say(door, number, "x" * 50_000)
            number += 1
        await client.send(json.dumps({"type": "PING", "requestId": "p"}))
        kinds = []
        while len(kinds) <= number:
            told = json.loads(await heard(client))
            kinds.append(told["type"])
            if told["type"] == "TABLE_STATE_UPDATE":
                assert told["payload"]["stateVersion"] == kinds.count("TABLE_STATE_UPDATE")
        assert kinds.count("HEARTBEAT") == 1
        assert line.is_free


async def test_an_entry_that_cannot_be_read_is_skipped_by_a_snapshot(door, caplog):
    stream = door.rooms.stream_of(ROOM)
    async with serving(door) as url, joined(url, compression=None) as client:
        await say(door, 1, "before")
        assert json.loads(await heard(client))["payload"]["stateVersion"] == 1
        await door.rooms.log.append(stream, b"nonsense", id="nobody's")
        told = json.loads(await heard(client))
        assert (told["type"], told["payload"]["reason"]) == ("TABLE_SNAPSHOT", "unreadable")
        assert told["payload"]["stateVersion"] == 2
    assert "cannot be shown" in caplog.text


async def test_where_somebody_is_between_it_goes_by_send(door):
    seen = []

    async def app(scope, receive, send):
        async def between(message):
            seen.append(message["type"])
            await send(message)

        await door(scope, receive, between)

    async with serving(app) as url, joined(url, compression=None) as client:
        assert lines(door) == [None]
        await say(door, 1, "x")
        assert json.loads(await heard(client))["payload"]["stateVersion"] == 1
    assert seen[:4] == ["websocket.accept", *["websocket.send"] * 3]
