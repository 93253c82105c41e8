"""Connections without a request, or whose client reads nothing, in uvicorn's own protocols."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from urllib.parse import urlsplit

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from semel.cli import serving as cli_serving
from semel.cli.connections import Waiting, bounded
from semel.http.ws import Limits, RoomDoor
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
async def bounded_server(kind, head_timeout_s, connections=10, per_address=100):
    waiting = Waiting(connections, per_address, head_timeout_s)
    settings = {"buffer": 16 << 10, "timeout_keep_alive": min(5, head_timeout_s)}
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


@pytest.mark.parametrize(("wanted", "allowed", "warnings"), [(10, 10, 0), (500, 50, 1)])
def test_low_limit_of_open_files_is_reported_only_if_fewer_connections_are_served(
    monkeypatch, caplog, wanted, allowed, warnings
):
    monkeypatch.setattr(cli_serving.resource, "getrlimit", lambda _: (200, 200))
    monkeypatch.setattr(cli_serving.resource, "setrlimit", lambda *_: None)
    assert cli_serving.allow_files(wanted) == allowed
    assert len(caplog.records) == warnings
