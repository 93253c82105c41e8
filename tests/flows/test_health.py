"""Probes and metrics of relays and workers, over HTTP."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import pytest

from semel.errors import SettingsError
from semel.health import server
from semel.health.server import Answer, listening


async def ask(url, path="/ok", method="GET", *, raw=None):
    """Status, headers and body, as they are on the wire."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.write(raw or f"{method} {path} HTTP/1.1\r\nHost: probe\r\n\r\n".encode())
    said = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = said.partition(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    return int(first.split()[1]), dict(h.split(": ", 1) for h in headers), body


# --- the server ---------------------------------------------------------------------------------


async def ok():
    return Answer(HTTPStatus.OK, b"fine\n")


async def broken():
    raise RuntimeError("a defect")


@pytest.fixture
async def small():
    async with listening("127.0.0.1:0", {"/ok": ok, "/broken": broken}) as url:
        yield url


async def test_a_request_is_answered_and_the_connection_closed(small):
    status, headers, body = await ask(small)

    assert (status, body) == (200, b"fine\n")
    assert headers["Content-Length"] == "5"
    assert headers["Connection"] == "close"


async def test_head_has_the_length_and_no_body(small):
    status, headers, body = await ask(small, method="HEAD")

    assert (status, headers["Content-Length"], body) == (200, "5", b"")


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /ok?verbose=1 HTTP/1.0", 200),
        ("GET /other HTTP/1.1", 404),
        ("POST /ok HTTP/1.1", 405),
        ("GET /broken HTTP/1.1", 500),
        ("GET /ok HTTP/2.0", 400),
        ("hello", 400),
        ("GET //[ HTTP/1.1", 404),
        ("\xff\x00 \xfe HTTP/1.1", 404),
    ],
)
async def test_every_request_gets_an_answer(small, request_line, status):
    got, headers, _ = await ask(small, raw=request_line.encode("latin-1") + b"\r\n\r\n")

    assert got == status
    assert headers.get("Allow") == ("GET, HEAD" if status == 405 else None)
    assert (await ask(small))[0] == 200


async def test_a_path_that_is_not_there_is_told_what_is(small):
    assert (await ask(small, "/"))[2] == b"there is /ok, /broken\n"


async def test_a_head_that_never_ends_is_refused(small):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(small.rsplit(":", 1)[1]))
    writer.write(b"GET /ok HTTP/1.1\r\nX: " + b"x" * server.HEAD_BYTES + b"\r\nY: y")

    said = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert said.startswith(b"HTTP/1.1 431 ")


async def test_a_head_that_comes_too_slowly_is_refused(small, monkeypatch):
    monkeypatch.setattr(server, "WITHIN_S", 0.05)

    assert (await ask(small, raw=b"GET /ok HTT"))[0] == 408


async def test_one_connection_too_many_is_closed(small, monkeypatch):
    monkeypatch.setattr(server, "CONNECTIONS", 2)
    port = int(small.rsplit(":", 1)[1])
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    assert await asyncio.wait_for(reader.read(), 10) == b""

    for each in (writer, *(writer for _, writer in idle)):
        each.close()
    async with asyncio.timeout(10):
        while (await ask_or_nothing(small)) != 200:
            await asyncio.sleep(0.01)


async def ask_or_nothing(url):
    try:
        return (await ask(url))[0]
    except (IndexError, OSError):
        return None


async def test_a_client_that_leaves_is_not_missed(small):
    for raw in (b"", b"GET /ok"):
        _, writer = await asyncio.open_connection("127.0.0.1", int(small.rsplit(":", 1)[1]))
        writer.write(raw)
        writer.close()

    assert (await ask(small))[0] == 200


async def test_closing_waits_for_nobody():
    async with listening("127.0.0.1:0", {"/ok": ok}) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"GET /ok")
        await asyncio.sleep(0)
    writer.close()


@pytest.mark.parametrize(
    "address",
    ["", "8080", ":8080", "localhost", "localhost:", "localhost:http", "a:1:2", "u@localhost:1",
     "localhost:1/healthz", "localhost:99999"],
)  # fmt: skip
async def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(SettingsError, match="is not HOST:PORT; write"):
        async with listening(address, {}):
            pass


async def test_an_address_that_is_taken_is_refused(small):
    with pytest.raises(SettingsError, match=r"cannot listen at 127\.0\.0\.1:.*choose another"):
        async with listening(small.removeprefix("http://"), {}):
            pass


def test_an_ipv6_address_may_be_given():
    assert server._parsed("[::1]:8080") == ("::1", 8080)
