"""Clients that never finish a request head, against `semel gateway` and `semel rooms`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import time

import httpx
import pytest
from websockets.sync.client import connect

from semel.bus import BlockingPublisher
from semel.stores import SQLiteStore
from support.crowds import rss_mib
from support.process import HOST, wait_until
from support.relay_process import Running

HALF = b"GET /7 HTTP/1.1\r\nHost: x\r\nX-Half: "

ROOM = """
from semel.rooms import Accepted, Room

class Table(Room):
    def begin(self, room_id):
        return {}
    def apply(self, state, action, ctx):
        return Accepted(state)
    def view(self, state, viewer):
        return state
"""

# Without httptools and uvloop, uvicorn reads by h11 on the event loop of asyncio.
PLAIN = "import sys\nsys.modules['uvloop'] = sys.modules['httptools'] = None\n"

SERVERS = ("gateway", "rooms", "gateway by h11")


class Server:
    """A running server, and what clients do to it."""

    def __init__(self, running, port, kind):
        self.running = running
        self.kind = kind
        self._port = port

    def line(self, sent=b"", source=HOST):
        line = socket.create_connection((HOST, self._port), 10, source_address=(source, 0))
        line.sendall(sent)
        return line

    def serves(self):
        """A client that sends a whole head is answered."""
        if self.kind == "gateway":
            answer = httpx.get(f"http://{HOST}:{self._port}/7", timeout=5)
            assert answer.status_code == 200
        else:
            with connect(f"ws://{HOST}:{self._port}", open_timeout=5) as client:
                client.send(json.dumps({"type": "JOIN", "id": "1", "payload": {"tableId": "7"}}))
                assert json.loads(client.recv(timeout=5))["type"] == "JOINED"

    def logged(self, words):
        return self.running.said.count(words)


@pytest.fixture(params=SERVERS)
def server(request, tmp_path):
    (tmp_path / "game.py").write_text(ROOM)
    store = SQLiteStore(tmp_path / "log.db")
    BlockingPublisher(store).publish("7", "vision", 10, {})
    store.close()
    kind, _, is_plain = request.param.partition(" by ")
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if is_plain:
        (tmp_path / "sitecustomize.py").write_text(PLAIN)
        env["PYTHONPATH"] = str(tmp_path)

    url = f"sqlite:///{tmp_path}/log.db"
    words = (url,) if kind == "gateway" else ("game:Table", "--store", url, "--trust")
    with contextlib.ExitStack() as stack:

        def started(*options, files=None):
            def limit_files():
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

            running = stack.enter_context(
                Running(
                    *(kind, *words, "--port", "0", *options),
                    cwd=tmp_path,
                    env=env,
                    preexec_fn=limit_files if files else None,
                )
            )
            port = int(re.search(r"(?:jobs|rooms) at \w+://[^:]+:(\d+)", running.said)[1])
            return Server(running, port, kind)

        yield started


def is_closed(line):
    """Whether the server has closed it; what it sends before that is passed over."""
    line.setblocking(False)
    try:
        while line.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def closed_within(lines, within_s):
    begun = time.monotonic()
    wait_until(lambda: all(map(is_closed, lines)), "the server to close them", within_s=within_s)
    return time.monotonic() - begun


@contextlib.contextmanager
def crowd(server, count, sent=HALF, source=HOST):
    with contextlib.ExitStack() as stack:
        lines = []
        for _ in range(count):
            with contextlib.suppress(OSError):
                lines.append(stack.enter_context(server.line(sent, source)))
        yield lines


def test_more_half_heads_than_descriptors_lock_no_client_out(server):
    server = server(files=150)
    with crowd(server, 300) as lines:
        for _ in range(5):
            server.serves()
        assert any(map(is_closed, lines))
        with crowd(server, 300):
            server.serves()
    assert server.logged("may open 150 files") == 1
    assert server.logged("one of the address with most waiting connections was closed") == 1


def test_storm_of_half_heads_takes_no_descriptor_too_many(server):
    """asyncio accepts few connections in a turn, so descriptors last until the excess is closed."""
    server = server(files=300)
    with crowd(server, 250):
        os.kill(server.running.pid, signal.SIGSTOP)  # the storm waits in the queue of the kernel
        with crowd(server, 600):
            os.kill(server.running.pid, signal.SIGCONT)
            server.serves()
    assert server.logged("out of system resource") == 0


def test_half_heads_are_closed_in_time_and_logged_once_a_minute(server):
    server = server("--head-timeout", "1s")
    with crowd(server, 30) as half, crowd(server, 30, b"") as silent:
        server.serves()
        assert 0.5 < closed_within(half + silent, 10) < 5
        server.serves()
    assert server.logged("sent no whole request head for 1 s") == 1


def test_a_byte_now_and_then_keeps_no_connection_open(server):
    server = server("--head-timeout", "1s")
    with server.line(HALF) as line:
        begun = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begun < 20:
                line.sendall(b"x")
                time.sleep(0.1)
        assert 0.5 < time.monotonic() - begun < 5


def test_one_address_holds_no_more_than_its_share(server):
    server = server("--per-address", "10", "--head-timeout", "6s")
    with crowd(server, 30) as lines:
        time.sleep(3.2)  # connections that are younger than half the time are spared
        with crowd(server, 25) as others, crowd(server, 5, source="127.0.0.2") as elsewhere:
            closed_within(lines[:25], 2)
            server.serves()
            assert not any(map(is_closed, others + elsewhere))
    assert server.logged("the oldest was closed") == 1


def test_half_a_head_after_a_whole_request_is_closed_in_time(server):
    server = server("--head-timeout", "1s")
    whole = b"GET /7 HTTP/1.1\r\nHost: x\r\n\r\n"
    slow_body = b"GET /7 HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with server.line(whole) as half, server.line(slow_body) as slow, server.line(whole) as idle:
        for line in (half, slow, idle):
            assert line.recv(4096).startswith(b"HTTP/1.1 ")
        half.sendall(HALF)
        begun = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begun < 20:
                slow.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - begun < 5
        closed_within([half, idle], 5)


def test_open_stream_outlives_the_head_timeout(server):
    server = server("--head-timeout", "1s", "--heartbeat", "1s")
    if server.kind == "gateway":
        line = server.line(b"GET /7 HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
        with line:
            time.sleep(3)
            assert not is_closed(line)
    else:
        with connect(f"ws://{HOST}:{server._port}") as client:
            time.sleep(3)
            for _ in range(2):
                assert json.loads(client.recv(timeout=5))["type"] == "HEARTBEAT"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET /7 HTTP/1.1\r\n" + b"X-Flood: y\r\n" * 20_000, id="headers"),
        pytest.param(b"GET /7?" + b"x" * 200_000, id="path"),
        pytest.param(
            b"POST /7 HTTP/1.1\r\nContent-Length: 999999\r\n\r\n" + bytes(999_999), id="body"
        ),
        pytest.param(
            b"GET /7 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
            + b"X-Flood: y\r\n" * 20_000,
            id="trailers",
        ),
    ],
)
def test_a_request_that_never_ends_is_closed(server, sent):
    server = server()
    with server.line() as line:
        with contextlib.suppress(OSError):
            line.sendall(sent)
        closed_within([line], 5)
    server.serves()


def test_requests_that_are_sent_before_the_answer_do_not_pile_up(server):
    """With h11, the server reads one at a time; with httptools, it accepts a few."""
    server = server()
    with server.line() as line:
        line.settimeout(0.5)
        with contextlib.suppress(OSError):
            line.sendall(b"GET /7 HTTP/1.1\r\nHost: x\r\n\r\n" * 50_000)
        server.serves()
        assert rss_mib(server.running.pid) < 300


def test_requests_that_cannot_be_read_are_logged_once_a_minute(server):
    server = server()
    bad = (
        b"\x16\x03\x01 no request\r\n\r\n",
        b"GET /7 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /7 HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    )
    for sent in bad * 15:
        with server.line(sent) as line:
            assert line.recv(4096)
    server.serves()
    for words in ("Invalid HTTP request", "Unsupported upgrade", "No supported", "Traceback"):
        assert server.logged(words) <= 1, server.running.said
