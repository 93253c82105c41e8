"""Answers, keys and files that are not what they seem: no client takes them for the end."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading

import httpx
import pytest

from semel.client import Intents
from semel.client.flow import HELD
from semel.client.httpx import AsyncIdempotentTransport, AsyncWorld
from semel.errors import OutcomeUnknownError, SettingsError
from semel.testing.clock import FakeClock
from support.client_kinds import KINDS, Metronome, client
from support.process import HOST

pytestmark = pytest.mark.timeout(60)

HEAD = b"HTTP/1.1 201 Created\r\n"
JSON = HEAD + b"Content-Type: application/json\r\n"
WHOLE = JSON + b'Content-Length: 8\r\n\r\n{"id":7}'
CHUNKED = JSON + b'Transfer-Encoding: chunked\r\n\r\n4\r\n{"id\r\n4\r\n":7}\r\n0\r\n\r\n'


class Server:
    """Answers each connection with the next bytes, the last ones for ever, and hangs up."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.keys = []
        self._listener = socket.create_server((HOST, 0))
        self.url = f"http://{HOST}:{self._listener.getsockname()[1]}/orders"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _serve(self):
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            with line:
                self._answer(line)

    def _answer(self, line):
        head = b""
        while b"\r\n\r\n" not in head:
            head += line.recv(65536)
        fields = dict(f.lower().split(b": ", 1) for f in head.split(b"\r\n")[1:] if b": " in f)
        self.keys.append(fields.get(b"idempotency-key", b"").decode())
        line.sendall(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def world():
    return Metronome()


# --- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [WHOLE, CHUNKED], ids=["length", "chunked"])
def test_an_answer_that_is_cut_anywhere_is_asked_for_again(kind, world, answer):
    """Python's own HTTP client takes a head that breaks off for a whole one."""
    with client(kind, world=world) as asking:
        for cut in range(len(answer)):
            with Server(answer[:cut], answer) as server:
                got = asking.ask("POST", server.url)
            assert (cut, got.status, got.body) == (cut, 201, b'{"id":7}')
            assert len(set(server.keys)) == 1  # two tries, or one if only the last CRLF is missing


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.0 201 Created\r\n\r\n",
        b"HTTP/1.1 201 Created\r\nConnection: close\r\n\r\nmade",
    ],
)
def test_an_answer_that_needs_no_length_is_taken_at_once(kind, world, answer):
    with Server(answer) as server, client(kind, world=world) as asking:
        asking.ask("POST", server.url)
    assert len(server.keys) == 1


def test_an_answer_that_is_always_empty_is_returned_in_the_end(kind, world):
    answer = HEAD + b"Connection: close\r\n\r\n"
    with Server(answer) as server, client(kind, world=world) as asking:
        assert asking.ask("POST", server.url).status == 201


def test_an_intent_is_not_answered_by_the_half_of_a_head(world, tmp_path):
    intents = Intents(tmp_path / "intents.db")
    with Server(HEAD) as server, client("requests", world=world, intents=intents) as asking:
        asking.ask("POST", server.url, headers=intents.headers("order"))
    assert [intent.name for intent in intents.unanswered()] == ["order"]


def test_only_a_problem_is_unpacked_before_its_owner_does(world, monkeypatch):
    unpacked = []
    decoder = httpx._decoders.GZipDecoder
    decode = decoder.decode
    monkeypatch.setattr(decoder, "decode", lambda *a: unpacked.append(1) or decode(*a))
    body = gzip.compress(b"[" + b" " * 10 * HELD + b"]")
    packed = b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with Server(HEAD + packed) as server, client("httpx", world=world) as asking:
        assert len(asking.ask("POST", server.url).body) > 10 * HELD
    assert len(unpacked) == 1


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("blank", ['""', '" "'])
def test_a_key_that_says_nothing_is_none(kind, world, blank):
    busy = b"HTTP/1.1 503 Unavailable\r\nContent-Length: 0\r\n\r\n"
    headers = {"Idempotency-Key": blank}
    with Server(busy, WHOLE) as server, client(kind, world=world) as asking:
        asking.ask("POST", server.url, headers=headers)
    assert len(set(server.keys)) == 1
    assert len(server.keys[0]) == 34
    with Server(busy) as server, client(kind, world=world, methods=()) as asking:
        asking.ask("POST", server.url, headers=headers)
    assert len(server.keys) == 1


# --- intents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("answered", [False, True])
def test_a_header_that_was_kept_beyond_its_time_is_not_sent(world, tmp_path, answered):
    clock = FakeClock()
    intents = Intents(tmp_path / "intents.db", ttl=60, clock=clock)
    headers = intents.headers("order")
    with Server(WHOLE) as server, client("httpx", world=world, intents=intents) as asking:
        if answered:
            asking.ask("POST", server.url, headers=headers)
        clock.advance(61)
        with pytest.raises(SettingsError if answered else OutcomeUnknownError):
            asking.ask("POST", server.url, headers=headers)
    assert len(server.keys) == answered


async def test_a_request_that_is_cancelled_with_its_answer_gives_the_connection_back(tmp_path):
    class Slow(AsyncWorld):
        async def aside(self, work):
            if asking.is_set():
                await asyncio.sleep(30)
            return await super().aside(work)

    asking = asyncio.Event()
    intents = Intents(tmp_path / "intents.db")
    headers = intents.headers("order")
    inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=1), trust_env=False)
    transport = AsyncIdempotentTransport(inner, intents=intents, world=Slow())
    stream = HEAD + b"Connection: close\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n"
    with Server(stream) as server:
        async with httpx.AsyncClient(transport=transport, trust_env=False) as session:
            hooked = {"trace": lambda name, _: _noted(asking, name)}
            asked = session.post(server.url, headers=headers, extensions=hooked)
            task = asyncio.create_task(asked)
            await asking.wait()
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            asking.clear()
            assert (await session.get(server.url, timeout=5)).status_code == 201


async def _noted(asking, name):
    if name.endswith("receive_response_headers.complete"):
        asking.set()
