"""Clients that hang up on a real server: while the handler runs, and while they are answered.

That is what a key is for: whoever was cut off comes again, and must find what happened.
"""

from __future__ import annotations

import socket
import struct
import uuid

import httpx
import pytest

from support.process import wait_until
from support.web import request_head, start_web

BODY = b'{"amount": 5}'
KEPT = 900_000  # of a response that is kept, but does not fit into the buffers of a connection
TOO_MUCH = 8_000_000


@pytest.fixture(scope="module", params=["httptools", "h11"])
def web(request, tmp_path_factory):
    store = f"sqlite:///{tmp_path_factory.mktemp('ledger')}/ledger.db"
    web = start_web(store, http=request.param)
    yield web
    web.stop()


@pytest.fixture
def key():
    return uuid.uuid4().hex


def pay(web, path, key):
    return httpx.post(f"{web.url}{path}", headers={"Idempotency-Key": key}, content=BODY)


def begin(web, path, key):
    connection = web.connect()
    connection.sendall(request_head(path, key, f"Content-Length: {len(BODY)}") + BODY)
    return connection


def hang_up(connection, how):
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def settled(web, path, key):
    """What the client finds when it comes again, as long as it is told to."""
    found = []

    def answered():
        found.append(pay(web, path, key))
        return found[-1].status_code != 409

    wait_until(answered, "the first request to end", within_s=20)
    return found[-1]


hangs_up = pytest.mark.parametrize("how", ["close", "reset"])


@hangs_up
def test_who_hangs_up_while_the_handler_runs_finds_its_answer(web, key, how):
    path = f"/charge?until={key}"
    connection = begin(web, path, key)
    wait_until(lambda: len(web.runs(key)) == 1, "the handler")
    hang_up(connection, how)
    assert pay(web, path, key).status_code == 409
    web.open_gate(key)
    reply = settled(web, path, key)
    assert reply.status_code == 201
    assert reply.headers["idempotent-replayed"] == "true"
    assert len(web.runs(key)) == 1


@hangs_up
def test_who_hangs_up_while_it_is_answered_finds_all_of_the_answer(web, key, how):
    path = f"/charge?pad={KEPT}"
    connection = begin(web, path, key)
    assert connection.recv(100).startswith(b"HTTP/1.1 201")
    hang_up(connection, how)
    reply = settled(web, path, key)
    assert reply.headers["idempotent-replayed"] == "true"
    assert len(reply.json()["pad"]) == KEPT
    assert len(web.runs(key)) == 1


@hangs_up
def test_who_hangs_up_on_more_than_is_kept_learns_that_it_happened(web, key, how):
    path = f"/charge?pad={TOO_MUCH}"
    connection = begin(web, path, key)
    assert connection.recv(100).startswith(b"HTTP/1.1 201")
    hang_up(connection, how)
    reply = settled(web, path, key)
    assert reply.status_code == 410
    assert reply.json()["type"] == "urn:semel:problem:response-not-kept"
    assert len(web.runs(key)) == 1


def half_a_stream(web, path, key):
    """A connection on which half of a stream has arrived."""
    connection = begin(web, path, key)
    seen = b""
    while b"half" not in seen:
        piece = connection.recv(1000)
        assert piece, seen
        seen += piece
    return connection


@hangs_up
def test_client_that_leaves_a_stream_on_a_real_server_gets_410_later(web, key, how):
    path = f"/charge?stream=whole&until={key}"
    hang_up(half_a_stream(web, path, key), how)
    assert pay(web, path, key).json()["type"] == "urn:semel:problem:in-progress"
    web.open_gate(key)
    assert settled(web, path, key).status_code == 410
    assert len(web.runs(key)) == 1


@pytest.mark.parametrize(
    ("on_error", "status", "runs"), [("release", 200, 2), ("store", 500, 1), ("hold", 409, 1)]
)
def test_stream_that_breaks_off_on_a_real_server_is_settled_as_on_error_says(
    web, key, on_error, status, runs
):
    path = f"/fail-{on_error}/charge?stream=fails&until={key}"
    connection = half_a_stream(web, path, key)
    web.open_gate(key)
    rest = b"".join(iter(lambda: connection.recv(1000), b""))
    connection.close()
    assert not rest.endswith(b"0\r\n\r\n")  # the client sees that it is not whole
    reply = pay(web, path, key)
    assert (reply.status_code, len(web.runs(key))) == (status, runs)
    if status == 409:
        assert reply.json()["type"] == "urn:semel:problem:outcome-unknown"
    if status == 200:
        assert reply.text == "half whole"


def test_more_than_is_kept_arrives_whole_the_first_time(web, key):
    path = f"/charge?pad={TOO_MUCH}"
    assert len(pay(web, path, key).json()["pad"]) == TOO_MUCH
    assert pay(web, path, key).status_code == 410
    assert len(web.runs(key)) == 1


@hangs_up
def test_a_hundred_who_hang_up_at_once_leave_one_execution(web, key, how):
    path = f"/charge?until={key}"
    connections = [begin(web, path, key) for _ in range(100)]
    wait_until(lambda: len(web.runs(key)) == 1, "the handler")
    for connection in connections:
        hang_up(connection, how)
    web.open_gate(key)
    assert settled(web, path, key).status_code == 201
    assert len(web.runs(key)) == 1
