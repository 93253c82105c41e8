"""The wire, without a server: bytes go in on one side of a stream."""

from __future__ import annotations

import asyncio

import pytest
import redis
import redis.asyncio

from semel.errors import CorruptRecordError, StoreUnavailableError
from semel.stores.redis.line import _bulk, refused, unreachable
from semel.stores.redis.scripts import CLAIM, call_of

CALL = call_of(CLAIM, b"semel:default:{id}:ledger")
PING = b"*1\r\n$4\r\nPING\r\n"


class Wire:
    """A connection of redis-py as far as `_bulk` sees it; the server's bytes are given."""

    def __init__(self, *said):
        self._reader = asyncio.StreamReader()
        for chunk in said:
            self._reader.feed_data(chunk)
        self._reader.feed_eof()
        self._writer = self
        self.written = []
        self.is_open = True

    def write(self, data):
        self.written.append(data)

    async def drain(self):
        pass

    async def check_health(self):
        pass

    async def disconnect(self, *, nowait):
        assert nowait
        self.is_open = False


async def test_replies_come_in_order_from_one_write():
    wire = Wire(b":1\r\n$2\r\nab\r", b"\n*2\r\n:3\r\n$-1\r\n")
    assert await _bulk(wire, [PING, PING, PING]) == [1, b"ab", [3, None]]
    assert wire.written == [b"*1\r\n$4\r\nPING\r\n" * 3]
    assert wire.is_open


async def test_a_push_message_is_not_a_reply():
    wire = Wire(b">2\r\n$6\r\nMOVING\r\n:1\r\n:7\r\n>1\r\n$3\r\nend\r\n")
    assert await _bulk(wire, [PING]) == [7]
    assert wire.is_open


async def test_an_error_is_the_reply_of_its_own_command():
    replies = await _bulk(Wire(b"-OOM full\r\n:1\r\n"), [PING, PING])
    assert str(replies[0]) == "OOM full"
    assert replies[1] == 1


@pytest.mark.parametrize("said", [b":1\r\n", b":1\r\n$5\r\nab", b""])
async def test_a_stream_that_ends_early_closes_the_connection(said):
    wire = Wire(said)
    with pytest.raises(redis.ConnectionError):
        await _bulk(wire, [PING, PING])
    assert not wire.is_open


@pytest.mark.parametrize("rest", [b":2\r\n", b">2\r\n$6\r\nMOV"])
async def test_what_nobody_asked_for_is_not_left_for_the_next(rest):
    wire = Wire(b":1\r\n" + rest)
    assert await _bulk(wire, [PING]) == [1]
    assert not wire.is_open


async def test_a_caller_that_is_cancelled_half_way_closes_the_connection():
    wire = Wire()
    wire._reader = asyncio.StreamReader()
    task = asyncio.ensure_future(_bulk(wire, [PING]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not wire.is_open


def test_the_streams_of_redis_py_are_where_we_expect_them():
    connection = redis.asyncio.Connection()
    assert connection._reader is None
    assert connection._writer is None


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        ("WRONGTYPE Operation against a key", CorruptRecordError, "not a hash"),
        ("CORRUPT it is odd", CorruptRecordError, "it is odd"),
        ("OOM command not allowed", StoreUnavailableError, "raise maxmemory"),
        ("NOPERM this user has no permissions", StoreUnavailableError, "let this user"),
        ("ERR something new", StoreUnavailableError, "something new"),
    ],
)
def test_a_refusal_says_what_to_do(error, kind, told):
    refusal = refused(CALL, Exception(error))
    assert type(refusal) is kind
    assert told in str(refusal)


def test_a_server_that_was_never_reached_leaves_no_doubt():
    refused_us = redis.ConnectionError("Error 111 connecting to h:1. Connection refused.")
    assert ".." not in str(unreachable(refused_us))
    assert "unknown" not in str(unreachable(refused_us))
    assert "unknown" in str(unreachable(redis.TimeoutError("Timeout reading from h:1")))
