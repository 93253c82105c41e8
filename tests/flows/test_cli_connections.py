"""Connections without a request, or whose client reads nothing, in uvicorn's own protocols."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from urllib.parse import urlsplit

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from semel.cli import connections
from semel.cli import serving as cli_serving
from semel.cli.connections import Waiting, bounded, frames_bounded
from semel.http.sse import Gateway, abortable
from semel.http.sse.visit import IS_STREAM
from semel.http.ws import Limits, RoomDoor
from semel.http.ws.direct import line_of
from semel.rooms import Rooms
from semel.stores import MemoryStore
from support.process import HOST
from support.rooms import Cards
from support.serving import serving
from support.web import until

BODY = bytes(2 << 20)
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n"


async def app(scope, receive, send):
    length = (b"content-length", b"%d" % len(BODY))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": BODY})


@pytest.fixture(params=[HttpToolsProtocol, H11Protocol])
def kind(request):
    return request.param


@contextlib.asynccontextmanager
async def bounded_server(kind, head_timeout_s, connections=10, per_address=100, app=app):
    waiting = Waiting(connections, per_address, head_timeout_s)
    settings = {"buffer": 16 << 10, "timeout_keep_alive": min(5, head_timeout_s)}
    settings["ws"] = frames_bounded(WebSocketsSansIOProtocol, waiting)
    settings["ws_per_message_deflate"] = False
    async with serving(app, bounded(kind, waiting), **settings) as (url, server):
        yield urlsplit(url).port, server, waiting


@contextlib.asynccontextmanager
async def client(port, sent, source=HOST):
    """A connection with a small buffer, so that the server has to wait for its reader."""
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        line.setblocking(False)
        line.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(line, (HOST, port))
        await asyncio.get_running_loop().sock_sendall(line, sent)
        yield line


async def received(line):
    total = 0
    while piece := await asyncio.get_running_loop().sock_recv(line, 1 << 18):
        total += len(piece)
        await asyncio.sleep(0.02)
    return total


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"])
async def test_a_slow_download_is_not_cut_while_the_client_reads(kind, header):
    async with bounded_server(kind, 0.3) as (port, _, _), client(port, REQUEST % header) as line:
        begun = asyncio.get_running_loop().time()
        assert await received(line) > len(BODY)
        assert asyncio.get_running_loop().time() - begun > 0.6


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"])
async def test_a_client_that_takes_no_byte_of_a_response_is_cut(kind, header):
    async with (
        bounded_server(kind, 0.3) as (port, server, waiting),
        client(port, REQUEST % header),
    ):
        await until(lambda: server.server_state.total_requests == 1)
        await until(lambda: not server.server_state.connections, within_s=5)
        assert len(waiting) == 0


async def test_client_that_sends_a_second_request_and_reads_no_response_is_cut(kind, caplog):
    async with (
        bounded_server(kind, 0.3) as (port, server, waiting),
        client(port, REQUEST % b"") as line,
    ):
        await until(lambda: server.server_state.total_requests == 1)
        await asyncio.get_running_loop().sock_sendall(line, REQUEST % b"")
        await until(lambda: not server.server_state.connections, within_s=5)
        assert len(waiting) == 0
    assert "has read nothing of a response for 0.3 s" in caplog.text


async def test_client_that_pipelines_requests_and_reads_no_response_is_cut(kind):
    async with bounded_server(kind, 0.3) as (port, server, _), client(port, 3 * (REQUEST % b"")):
        await until(lambda: server.server_state.connections)
        await until(lambda: not server.server_state.connections, within_s=5)


async def test_client_that_pipelines_requests_and_reads_slowly_is_not_cut(kind):
    last = REQUEST % b"Connection: close\r\n"
    async with (
        bounded_server(kind, 0.3) as (port, _, waiting),
        client(port, REQUEST % b"" + last) as line,
    ):
        assert await received(line) > 2 * len(BODY)
        assert len(waiting) == 0


async def test_stream_that_is_not_read_outlives_the_head_timeout(kind):
    """The gateway has limits of its own for the viewers of a stream."""

    async def streaming(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        scope[IS_STREAM] = True
        await send({"type": "http.response.body", "body": BODY, "more_body": True})
        await send({"type": "http.response.body", "body": BODY})

    async with (
        bounded_server(kind, 0.2, app=streaming) as (port, server, waiting),
        client(port, REQUEST % b"Connection: close\r\n") as line,
    ):
        await asyncio.sleep(1)
        assert (len(server.server_state.connections), len(waiting)) == (1, 0)
        assert await received(line) > 2 * len(BODY)


async def test_stream_of_a_gateway_is_marked_as_a_stream(kind):
    gateway = Gateway(MemoryStore(), unknown="wait")
    asking = b"GET /7 HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n"
    async with (
        bounded_server(kind, 60, app=abortable(gateway)) as (port, server, _),
        client(port, asking) as line,
    ):
        assert await asyncio.get_running_loop().sock_recv(line, 12) == b"HTTP/1.1 200"
        [protocol] = server.server_state.connections
        assert protocol.cycle.scope[IS_STREAM]
    await gateway.aclose()


async def test_the_address_with_most_waiting_connections_makes_room(kind):
    half = b"GET / HTTP/1.1\r\n"
    loop = asyncio.get_running_loop()
    async with (
        bounded_server(kind, 60, connections=10) as (port, server, waiting),
        client(port, half) as honest,
        contextlib.AsyncExitStack() as stack,
    ):
        await until(lambda: len(waiting) == 1)
        for n in range(60):
            await stack.enter_async_context(client(port, half, source="127.0.0.2"))
            await until(lambda n=n: len(server.server_state.connections) == min(n + 2, 26))
        await loop.sock_sendall(honest, b"Host: x\r\n\r\n")
        assert await loop.sock_recv(honest, 12) == b"HTTP/1.1 200"


async def test_the_connection_that_has_waited_longest_makes_room(kind):
    async with bounded_server(kind, 60, connections=10) as (port, server, waiting):
        async with contextlib.AsyncExitStack() as stack:
            for n in range(100):
                line = await stack.enter_async_context(client(port, b"GET / HTTP/1.1\r\n"))
                await until(lambda n=n: len(server.server_state.connections) == min(n + 1, 26))
            assert len(waiting) == 26
            await asyncio.get_running_loop().sock_sendall(line, b"Host: x\r\n\r\n")
            assert await asyncio.get_running_loop().sock_recv(line, 12) == b"HTTP/1.1 200"
        await until(lambda: not server.server_state.connections)
        assert (len(waiting), waiting._by_address) == (0, {})


async def test_a_reconnect_storm_behind_one_address_is_served(kind):
    loop = asyncio.get_running_loop()
    async with (
        bounded_server(kind, 10, 500, per_address=10) as (port, server, _),
        contextlib.AsyncExitStack() as stack,
    ):
        crowd = [await stack.enter_async_context(client(port, b"")) for _ in range(300)]
        await until(lambda: len(server.server_state.connections) == 300)
        for line in crowd:
            await loop.sock_sendall(line, REQUEST % b"")
        for line in crowd:
            assert await loop.sock_recv(line, 12) == b"HTTP/1.1 200"


# --- rooms --------------------------------------------------------------------------------------

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
PINGS = 500 * (b"\x89\xfd" + bytes(4 + 125))
CLOSE = b"\x88\x80" + bytes(4)


@contextlib.asynccontextmanager
async def flooded(**limits):
    """A room server, and a client that sends pings and reads none of the pongs."""
    door = RoomDoor(Rooms(MemoryStore(), Cards()), limits=Limits(**limits))
    settings = {"ws": "websockets-sansio", "ws_per_message_deflate": False, "buffer": 16 << 10}
    loop = asyncio.get_running_loop()
    async with (
        serving(door, **settings) as (url, server),
        client(urlsplit(url).port, HANDSHAKE) as line,
    ):
        assert (await loop.sock_recv(line, 12)).startswith(b"HTTP/1.1 101")
        [protocol] = server.server_state.connections
        while protocol.transport.get_write_buffer_size() < 200_000:
            await loop.sock_sendall(line, PINGS)
        yield door, server, line
    await door.aclose()


async def test_a_room_client_that_reads_nothing_is_gone_after_it_was_closed():
    async with flooded(join_within_s=0.1, write_within_s=0.3) as (door, server, _):
        await until(lambda: not server.server_state.connections, within_s=10)
        assert (door.status().connections, door.status().closed) == (0, {"gone": 1})


async def test_a_room_client_that_closes_and_reads_nothing_is_gone():
    async with flooded(write_within_s=0.3) as (door, server, line):
        await asyncio.get_running_loop().sock_sendall(line, CLOSE)
        await until(lambda: not server.server_state.connections, within_s=10)
        assert door.status().closed == {"gone": 1}


async def test_a_flood_of_pings_whose_pongs_are_not_read_is_cut():
    async with flooded() as (door, server, line):
        with pytest.raises(OSError):
            for _ in range(2_000):
                await asyncio.get_running_loop().sock_sendall(line, PINGS)
        await until(lambda: not server.server_state.connections, within_s=10)
        assert door.status().closed == {"slow": 1}


async def test_a_room_client_that_does_not_close_is_gone_after_it_was_closed(caplog):
    """The pings come after the server's Close: nothing was unsent at that time."""
    door = RoomDoor(
        Rooms(MemoryStore(), Cards()), limits=Limits(join_within_s=0.1, write_within_s=2)
    )
    settings = {"ws": "websockets-sansio", "ws_per_message_deflate": False, "buffer": 16 << 10}
    loop = asyncio.get_running_loop()
    async with (
        serving(door, **settings) as (url, server),
        client(urlsplit(url).port, HANDSHAKE) as line,
        client(urlsplit(url).port, HANDSHAKE + CLOSE) as other,
    ):
        await until(lambda: any(hasattr(each, "close_sent") for each in _of(server, line)))
        [protocol] = _of(server, line)
        await until(lambda: protocol.close_sent)
        with contextlib.suppress(OSError):
            while protocol.transport.get_write_buffer_size() < 200_000:
                await loop.sock_sendall(line, PINGS)
        await until(lambda: not server.server_state.connections, within_s=5)
        await received(other)
        await asyncio.sleep(1)
    await door.aclose()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def _of(server, line):
    """The server's side of a client's connection."""
    return [
        each for each in server.server_state.connections if each.client == line.getsockname()[:2]
    ]


# --- WebSocket connections of `semel rooms` -----------------------------------------------------

UPGRADE = HANDSHAKE.removesuffix(b"\r\n")
UNREADABLE = {
    "content-length": UPGRADE + b"Content-Length: 1\r\n\r\nx",
    "chunked": UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "130 headers": UPGRADE + b"".join(b"X-%d: y\r\n" % n for n in range(130)) + b"\r\n",
    "a long header": UPGRADE + b"X-Long: " + b"a" * 9000 + b"\r\n\r\n",
    "a long path": HANDSHAKE.replace(b"/", b"/" + b"7" * 9000, 1),
}


@contextlib.asynccontextmanager
async def bounded_rooms(kind=HttpToolsProtocol, head_timeout_s=60):
    """A room server with the limits of `semel rooms`."""
    door = RoomDoor(Rooms(MemoryStore(), Cards()))
    async with bounded_server(kind, head_timeout_s, app=door) as (port, server, waiting):
        yield port, server, waiting
    await door.aclose()


@contextlib.asynccontextmanager
async def shaken(port):
    async with client(port, HANDSHAKE) as line:
        head = await asyncio.get_running_loop().sock_recv(line, 4096)
        assert head.startswith(b"HTTP/1.1 101")
        yield line


@pytest.mark.parametrize("sent", UNREADABLE.values(), ids=UNREADABLE)
async def test_upgrade_that_cannot_be_parsed_is_answered_and_closed(kind, sent):
    async with bounded_rooms(kind) as (port, server, waiting), client(port, sent) as line:
        async with asyncio.timeout(5):
            assert (await asyncio.get_running_loop().sock_recv(line, 12)) == b"HTTP/1.1 400"
        await until(lambda: not server.server_state.connections)
        assert (len(waiting), waiting._by_address) == (0, {})


FLOODS = {
    "pings": b"\x89\x80" + bytes(4),
    "pongs": b"\x8a\x80" + bytes(4),
    "texts": b"\x81\x80" + bytes(4),
    "continuations": b"\x00\x80" + bytes(4),
}
BEGINNING = b"\x01\x80" + bytes(4)


@pytest.mark.parametrize("name", FLOODS)
async def test_flood_of_empty_frames_is_cut_and_logged(name, caplog):
    loop = asyncio.get_running_loop()
    async with bounded_rooms() as (port, server, _), shaken(port) as line:
        await loop.sock_sendall(line, BEGINNING if name == "continuations" else b"")
        with contextlib.suppress(OSError):
            await loop.sock_sendall(line, FLOODS[name] * 5_000)
        await until(lambda: not server.server_state.connections)
    assert "WebSocket frames in a second" in caplog.text


async def test_message_of_too_many_frames_is_cut(monkeypatch):
    monkeypatch.setattr(connections, "MAX_FRAMES_PER_S", 10**6)
    loop = asyncio.get_running_loop()
    async with bounded_rooms() as (port, server, _), shaken(port) as line:
        await loop.sock_sendall(line, BEGINNING + FLOODS["continuations"] * 1_500)
        await until(lambda: not server.server_state.connections)


async def test_as_many_fragmented_messages_as_a_room_accepts_at_once_are_not_cut():
    """40 messages of 64 KB in frames of 4 KB, with a ping after each frame."""
    part = b"\x80\xfe\x10\x00" + bytes(4) + b" " * 4096 + FLOODS["pings"]
    message = BEGINNING + (b"\x00" + part[1:]) * 14 + part
    loop = asyncio.get_running_loop()
    async with bounded_rooms() as (port, server, _), shaken(port) as line:
        reading = asyncio.ensure_future(received(line))
        for _ in range(20):
            await loop.sock_sendall(line, message)
        await asyncio.sleep(1)
        for _ in range(20):
            await loop.sock_sendall(line, message)
        await asyncio.sleep(0.5)
        assert len(server.server_state.connections) == 1
        await loop.sock_sendall(line, CLOSE)
        await reading


async def test_bounded_protocol_writes_past_send():
    async with bounded_rooms() as (port, server, _), shaken(port):
        [protocol] = server.server_state.connections
        assert line_of(protocol.send) is not None


@pytest.mark.parametrize(("wanted", "allowed", "warnings"), [(10, 10, 0), (500, 50, 1)])
def test_low_limit_of_open_files_is_reported_only_if_fewer_connections_are_served(
    monkeypatch, caplog, wanted, allowed, warnings
):
    monkeypatch.setattr(cli_serving.resource, "getrlimit", lambda _: (200, 200))
    monkeypatch.setattr(cli_serving.resource, "setrlimit", lambda *_: None)
    assert cli_serving.allow_files(wanted) == allowed
    assert len(caplog.records) == warnings
