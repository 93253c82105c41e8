"""Bodies that come slowly, or never end, at a real server with either of its parsers."""

from __future__ import annotations

import asyncio
import hashlib
import select
import uuid

import httpx
import pytest

from support.web import fetch, read_response, request_head, start_web

MIB = 1024 * 1024
LARGE = 100 * MIB
ROOM = 16 * MIB  # what a server may need for a body of any size


@pytest.fixture(scope="module", params=["httptools", "h11"])
def web(request, tmp_path_factory):
    store = f"sqlite:///{tmp_path_factory.mktemp('ledger')}/ledger.db"
    web = start_web(store, http=request.param)
    yield web
    web.stop()


@pytest.fixture
def key():
    return uuid.uuid4().hex


def peak(web):
    return httpx.get(f"{web.url}/peak").json()["peak"]


class Upload:
    """A large body on its way, until it has arrived or somebody answers."""

    def __init__(self, web, path, key, *, chunked=False, size=LARGE):
        self.digest = hashlib.sha256()
        self.sent = 0
        self._size = size
        self._chunked = chunked
        self._connection = web.connect()
        how = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
        self._connection.sendall(request_head(path, key, how))

    def answer(self):
        with self._connection:
            while self.sent < self._size and not self._answered():
                self._send(self.sent.to_bytes(8, "big") * (MIB // 8))
            if self.sent == self._size and self._chunked:
                self._connection.sendall(b"0\r\n\r\n")
            return read_response(self._connection)

    def _answered(self):
        return bool(select.select([self._connection], [], [], 0)[0])

    def _send(self, piece):
        framed = b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece
        self._connection.sendall(framed)
        self.digest.update(piece)
        self.sent += len(piece)


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_a_hundred_megabytes_are_refused_before_they_are_here(web, key, chunked):
    before = peak(web)
    upload = Upload(web, "/charge", key, chunked=chunked)
    refused = upload.answer()
    assert refused.status == 413
    assert refused.problem == "body-too-large"
    assert upload.sent < LARGE / 2
    assert web.runs(key) == []
    assert peak(web) - before < ROOM


def test_a_hundred_megabytes_arrive_where_they_are_welcome(web, key):
    """Through a file: they are compared, handed on and remembered, and never all in memory."""
    before = peak(web)
    first = Upload(web, "/large/charge", key)
    reply = first.answer()
    assert reply.status == 201
    assert reply.json()["size"] == LARGE
    assert reply.json()["digest"] == first.digest.hexdigest()
    again = Upload(web, "/large/charge", key, chunked=True).answer()
    assert again.replayed
    assert again.body == reply.body
    other = Upload(web, "/large/charge", key, size=2 * MIB).answer()
    assert other.status == 422
    assert len(web.runs(key)) == 1
    assert peak(web) - before < ROOM


async def test_a_body_that_comes_a_byte_at_a_time_holds_no_key(web, key):
    body = b'{"amount": 5}'
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(request_head("/charge", key, f"Content-Length: {len(body)}", "Connection: close"))
    for at in range(len(body)):
        await asyncio.sleep(0.005)
        if at == 7:
            first = await fetch(web, "/charge", key, body)
        writer.write(body[at : at + 1])
    slow = await reader.read()
    writer.close()
    assert first.status == 201
    assert not first.replayed
    assert slow.startswith(b"HTTP/1.1 201")
    assert b"idempotent-replayed: true" in slow
    assert slow.endswith(first.body)
    assert len(web.runs(key)) == 1


async def test_a_hundred_bodies_that_never_end_hold_no_key(web, key):
    writers = []
    for _ in range(100):
        _, writer = await asyncio.open_connection("127.0.0.1", web.port)
        writer.write(request_head("/charge", key, "Content-Length: 13") + b'{"amount"')
        writers.append(writer)
    assert (await fetch(web, "/charge", key)).status == 201
    assert (await fetch(web, "/charge", key)).replayed
    for writer in writers:
        writer.close()
    assert (await fetch(web, "/charge", key)).replayed
    assert len(web.runs(key)) == 1


def test_a_body_that_breaks_off_leaves_nothing(web, key):
    with web.connect() as connection:
        connection.sendall(request_head("/charge", key, "Content-Length: 13") + b'{"amount"')
    reply = httpx.post(
        f"{web.url}/charge", headers={"Idempotency-Key": key}, json={"other": "body"}
    )
    assert reply.status_code == 201
    assert len(web.runs(key)) == 1


@pytest.mark.parametrize("size", [MIB, MIB + 1])
def test_the_limit_is_the_limit(web, key, size):
    reply = httpx.post(f"{web.url}/charge", headers={"Idempotency-Key": key}, content=b"x" * size)
    assert reply.status_code == (201 if size == MIB else 413)


async def test_escaped_slash_on_a_real_server_is_another_path(web, key):
    first = await fetch(web, "/charge/a%2Fb", key)
    assert (first.status, (await fetch(web, "/charge/a/b", key)).problem) == (201, "key-reused")
    assert (await fetch(web, "/charge/a%2fb", key)).body == first.body
    assert len(web.runs(key)) == 1
