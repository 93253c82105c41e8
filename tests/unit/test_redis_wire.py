"""The standing connection, to a server that says what the test wants; writes are counted."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.selector_events import _SelectorSocketTransport

import hiredis
import pytest
import redis.asyncio

from semel.errors import StoreUnavailableError
from semel.stores.redis.line import AsyncLine
from semel.stores.redis.scripts import CLAIM, COMPLETE, RELEASE, call_of
from semel.stores.redis.wire import ENOUGH, Wire, room

CUT = object()
SILENCE = b""


class Teller:
    """Answers logins with OK, and calls with what it was told to say, over all connections."""

    def __init__(self, *said):
        self.said = list(said)
        self.heard = []
        self.connections = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.server.close()
        await self.server.wait_closed()

    async def serve(self, reader, writer):
        self.connections += 1
        parser = hiredis.Reader(notEnoughData=CUT)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                parser.feed(data)
                answers = []
                while CUT not in answers and (words := parser.gets()) is not CUT:
                    answers.append(self.answer(words))
                if CUT in answers:
                    return
                writer.write(b"".join(answers))

    def answer(self, words):
        if words[0] not in (b"EVALSHA", b"EVAL"):
            return b"+OK\r\n"
        self.heard.append(words)
        return self.said.pop(0)


@contextlib.asynccontextmanager
async def line_to(teller, timeout_s=5.0):
    client = redis.asyncio.Redis(port=teller.port, protocol=2, max_connections=100)
    line = AsyncLine(client, timeout_s)
    try:
        yield line
    finally:
        await line.aclose()
        await client.aclose()


@pytest.fixture
def writes(monkeypatch):
    """How many bytes each write on a wire had."""
    sizes = []
    write = _SelectorSocketTransport.write

    def counted(self, data):
        if isinstance(self.get_protocol(), Wire):
            sizes.append(len(data))
        return write(self, data)

    monkeypatch.setattr(_SelectorSocketTransport, "write", counted)
    return sizes


def call(number=0, script=CLAIM):
    return call_of(script, b"key:%d" % number)


async def told(line, *calls):
    return await asyncio.gather(*map(line.call, calls), return_exceptions=True)


# --- what goes out -----------------------------------------------------------------------------


async def test_a_lone_call_is_one_write_and_no_task(writes):
    async with Teller(*[b":1\r\n"] * 4) as teller, line_to(teller) as line:
        await line.call(call())
        writes.clear()
        tasks = []
        loop = asyncio.get_running_loop()
        loop.set_task_factory(
            lambda loop, coro: tasks.append(coro) or asyncio.Task(coro, loop=loop)
        )
        for number in range(3):
            assert await line.call(call(number)) == 1
        loop.set_task_factory(None)
        assert writes == [len(call(number).packed) for number in range(3)]
        assert tasks == []


async def test_calls_that_come_together_leave_together(writes):
    async with Teller(*[b":1\r\n"] * ENOUGH) as teller, line_to(teller) as line:
        await line.call(call())
        writes.clear()
        await told(line, *map(call, range(ENOUGH - 1)))
        assert len(writes) == 2, "the first found nothing under way, and the others found it"
        assert len(teller.heard) == ENOUGH


async def test_a_crowd_is_written_in_parts(writes):
    crowd = 3 * ENOUGH
    async with Teller(*[b":1\r\n"] * (2 * crowd + 1)) as teller, line_to(teller) as line:
        await line.call(call())
        await told(line, *map(call, range(crowd)))
        writes.clear()
        await told(line, *map(call, range(crowd)))
        assert len(writes) in (3, 4), "as many parts, and one for whoever found nothing under way"
        assert len(teller.heard) == 2 * crowd + 1


async def test_a_call_cancelled_before_it_was_written_is_never_sent():
    async with Teller(*[b":1\r\n"] * 3) as teller, line_to(teller) as line:
        await line.call(call())
        first, second, third = map(line.call, map(call, (1, 2, 3)))
        second.cancel()
        assert await asyncio.gather(first, third) == [1, 1]
        assert [words[3] for words in teller.heard] == [b"key:0", b"key:1", b"key:3"]


async def test_the_answer_to_a_call_that_nobody_waits_for_is_dropped():
    async with Teller(b":1\r\n", b":2\r\n", b":3\r\n") as teller, line_to(teller) as line:
        await line.call(call())
        gone = line.call(call(1))
        gone.cancel()
        assert await line.call(call(2)) == 3
        assert len(teller.heard) == 3


async def test_a_transport_that_is_full_is_given_time():
    async with Teller(*[b":1\r\n"] * 40) as teller, line_to(teller) as line:
        big = call_of(COMPLETE, b"key", b"x" * 300_000)
        assert await told(line, *[big] * 40) == [1] * 40
        assert all(len(words[4]) == 300_000 for words in teller.heard)


# --- what comes back ---------------------------------------------------------------------------


async def test_replies_come_in_order_however_they_are_cut():
    said = [b":1\r\n$2\r\na", b"b\r", b"\n*2\r\n:3\r\n$-1\r\n"]
    async with Teller(*said) as teller, line_to(teller) as line:
        assert await told(line, call(1), call(2), call(3)) == [1, b"ab", [3, None]]
        assert teller.connections == 1


async def test_a_push_message_is_not_a_reply():
    said = [b">2\r\n$6\r\nMOVING\r\n:1\r\n:7\r\n>1\r\n$3\r\nend\r\n", b":8\r\n"]
    async with Teller(*said) as teller, line_to(teller) as line:
        assert await line.call(call()) == 7
        assert await line.call(call()) == 8
        assert teller.connections == 1


async def test_an_error_is_the_reply_of_its_own_call():
    async with Teller(b"-OOM full\r\n", b":1\r\n") as teller, line_to(teller) as line:
        refusal, reply = await told(line, call(1), call(2))
        assert isinstance(refusal, StoreUnavailableError)
        assert "OOM full" in str(refusal)
        assert reply == 1


async def test_a_script_is_taught_once_and_asked_for_again_by_those_that_missed_it(writes):
    said = [*[b"-NOSCRIPT none\r\n"] * 4, *[b":1\r\n"] * 4]
    async with Teller(*said) as teller, line_to(teller) as line:
        calls = call(1), call(2), call(3, COMPLETE), call(4)
        assert await told(line, *calls) == [1] * 4
        again = [words[0] for words in teller.heard[4:]]
        assert sorted(again) == [b"EVAL", b"EVAL", b"EVALSHA", b"EVALSHA"]
        assert len(writes) == 2


async def test_a_call_that_missed_its_script_and_its_caller_is_not_asked_again():
    """Its caller has withdrawn it meanwhile: it would be carried out after its own withdrawal."""
    said = [b":1\r\n", b"-NOSCRIPT none\r\n", b":2\r\n", b":3\r\n"]
    async with Teller(*said) as teller, line_to(teller) as line:
        await line.call(call())
        claim = line.call(call(1))
        claim.cancel()
        assert await line.call(call(1, RELEASE)) == 2
        assert await line.call(call(2)) == 3
        assert [words[0] for words in teller.heard] == [b"EVALSHA"] * 4


async def test_a_script_forgotten_again_is_taught_again():
    forgotten = b"-NOSCRIPT none\r\n"
    said = [forgotten, b":1\r\n", forgotten, b":2\r\n"]
    async with Teller(*said) as teller, line_to(teller) as line:
        assert await line.call(call()) == 1
        assert await line.call(call()) == 2
        assert [words[0] for words in teller.heard] == [b"EVALSHA", b"EVAL"] * 2


@pytest.mark.parametrize("rest", [b":2\r\n", b"?\r\n"])
async def test_what_nobody_asked_for_ends_the_connection(rest):
    async with Teller(b":1\r\n" + rest, b":3\r\n") as teller, line_to(teller) as line:
        assert await line.call(call()) == 1
        assert await line.call(call()) == 3
        assert teller.connections == 2


# --- connections that break --------------------------------------------------------------------


async def test_a_broken_connection_is_replaced_once_and_its_calls_sent_again():
    said = [b":1\r\n", CUT, b":2\r\n", b":3\r\n"]
    async with Teller(*said) as teller, line_to(teller) as line:
        await line.call(call())
        assert await told(line, call(1), call(2)) == [2, 3]
        assert teller.connections == 2


async def test_a_connection_that_breaks_twice_is_told():
    async with Teller(b":1\r\n", CUT, CUT, b":2\r\n") as teller, line_to(teller) as line:
        await line.call(call())
        (error,) = await told(line, call(1))
        assert isinstance(error, StoreUnavailableError)
        assert "unknown" in str(error)
        assert await line.call(call(2)) == 2
        assert teller.connections == 3


async def test_half_a_reply_is_none():
    said = [b":1\r\n", b"$5\r\nab", CUT, b":2\r\n", b":3\r\n"]
    async with Teller(*said) as teller, line_to(teller) as line:
        await line.call(call())
        assert await told(line, call(1), call(2)) == [2, 3]


async def test_a_demoted_master_is_left_once():
    demoted = b"-READONLY You can't write against a read only replica.\r\n"
    said = [b":1\r\n", demoted, b":2\r\n", demoted, demoted]
    async with Teller(*said) as teller, line_to(teller) as line:
        await line.call(call())
        assert await line.call(call(1)) == 2
        assert teller.connections == 2
        (error,) = await told(line, call(2))
        assert "connect to the master" in str(error)
        assert teller.connections == 3


async def test_everybody_who_waits_is_told_of_silence_within_one_timeout():
    async with Teller(b":1\r\n", *[SILENCE] * 300) as teller, line_to(teller, 0.3) as line:
        await line.call(call())
        loop = asyncio.get_running_loop()
        began = loop.time()
        answers = await told(line, *map(call, range(300)))
        assert {type(answer) for answer in answers} == {StoreUnavailableError}
        assert loop.time() - began < 2 * 0.3, "all of them after one timeout"


async def test_whoever_asks_after_a_silence_gets_a_new_connection():
    async with Teller(b":1\r\n", SILENCE, b":2\r\n") as teller, line_to(teller, 0.2) as line:
        await line.call(call())
        (error,) = await told(line, call(1))
        assert "no reply within 0.2 s" in str(error)
        assert await line.call(call(2)) == 2
        assert teller.connections == 2


async def test_a_line_that_is_closed_tells_whoever_waits():
    async with Teller(b":1\r\n", SILENCE) as teller, line_to(teller) as line:
        await line.call(call())
        waiting = asyncio.ensure_future(told(line, call(1)))
        await asyncio.sleep(0)
        await line.aclose()
        assert "the store was closed" in str((await waiting)[0])


# --- the pool it belongs to --------------------------------------------------------------------


def test_a_tenth_of_a_pool_may_be_kept():
    pools = redis.asyncio.ConnectionPool, redis.ConnectionPool
    assert [room(pool(max_connections=100)) for pool in pools] == [10, 10]
    assert [room(pool(max_connections=9)) for pool in pools] == [0, 0]
    blocking = redis.asyncio.BlockingConnectionPool, redis.BlockingConnectionPool
    assert [room(pool(max_connections=100)) for pool in blocking] == [0, 0]


def test_the_streams_of_redis_py_are_where_we_expect_them():
    connection = redis.asyncio.Connection()
    assert connection._reader is None
    assert connection._writer is None
