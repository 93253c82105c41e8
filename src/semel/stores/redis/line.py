"""How a call reaches Redis and its reply comes back, in both colours.

Connections are redis-py's own, taken from its pool for each exchange: TLS, passwords, Sentinel,
SELECT, re-authentication and forks stay its business. The exchange itself is ours. In the sync
colour a call is written and its reply read, on the caller's thread. In the async colour all
calls that wait go out in one write per server (`Batcher`), and their replies are read in bulk:
redis-py's way of awaiting each reply costs several times what the server needs for it.

A connection that breaks is replaced once and everything sent again: every call is a verb that
may be repeated. Silence is not retried, for it may be followed by more of it. Whoever gets an
error after that does not know whether the call took effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import hiredis
import redis
from redis.client import NEVER_DECODE
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    SlotNotCoveredError,
    TryAgainError,
)

from semel.errors import StoreUnavailableError
from semel.stores.batch import Batcher
from semel.stores.redis.scripts import Call, corrupt

READ_SIZE = 1 << 18
# What is paid once per batch is small change for this many calls. One that took in every caller
# would be slower: we would wait while Redis works, and Redis while we hand out its answers.
LARGEST_BATCH = 64

RAW: dict[str, Any] = {NEVER_DECODE: True}


class Line(Protocol):
    """A way to one Redis, whatever it is made of."""

    def call(self, call: Call) -> Awaitable[Any]:
        """The script's reply."""
        ...

    async def calls(self, calls: Sequence[Call]) -> list[Any]:
        """The replies to several calls, in their order."""
        ...

    async def servers(self) -> list[Any]:
        """Every server that holds records."""
        ...

    async def ask(self, server: Any, *command: Any) -> Any:
        """One server's reply to any other command."""
        ...


# --- what went wrong ----------------------------------------------------------------------------

_HINTS = {
    "HELLO must be called": "give the password in the URL: redis://user:password@host",
    "NOAUTH": "give the password in the URL: redis://user:password@host",
    "WRONGPASS": "check the user and password in the URL",
    "NOPERM": "let this user run EVALSHA, EVAL, TIME and the hash commands on semel:*",
    "OOM": "Redis is out of memory: raise maxmemory; an evicting maxmemory-policy would forget "
    "what has been done",
    "LOADING": "Redis is loading its data after a restart: try again shortly",
    "MISCONF": "Redis cannot write to its disk: look at its log",
    "READONLY": "this server is a replica: connect to the master, or through redis+sentinel://",
    "CLUSTERDOWN": "the cluster does not serve all slots: look at CLUSTER INFO",
}


# redis-py turns these codes into classes and drops them from the message.
_CODES: dict[type[Exception], str] = {
    AuthenticationError: "NOAUTH ",
    BusyLoadingError: "LOADING ",
    ClusterDownError: "CLUSTERDOWN ",
    NoPermissionError: "NOPERM ",
    OutOfMemoryError: "OOM ",
    ReadOnlyError: "READONLY ",
}


def refused(call: Call, error: Exception) -> Exception:
    """Redis answered with an error: the record is unreadable, or the server is."""
    message = _CODES.get(type(error), "") + str(error)
    if "WRONGTYPE" in message:
        return corrupt(call.key, "it is not a hash")
    if message.startswith("CORRUPT "):
        return corrupt(call.key, message.removeprefix("CORRUPT "))
    return StoreUnavailableError(f"Redis refused to {call.script.name}: {message}{_hint(message)}")


def _hint(message: str) -> str:
    return next((f". {hint}" for code, hint in _HINTS.items() if code in message), "")


def unreachable(error: Exception) -> StoreUnavailableError:
    """No answer: the call may have taken effect, unless no connection was opened for it."""
    reason = _CODES.get(type(error), "") + (str(error) or type(error).__name__).rstrip(".")
    if hint := _hint(reason):
        return StoreUnavailableError(f"Redis cannot serve us: {reason}{hint}")
    doubt = "Whether it took effect is unknown; asking again is safe. "
    return StoreUnavailableError(
        f"Redis did not answer: {reason}. {'' if ' connecting to ' in reason else doubt}"
        "Check that the server runs and can be reached from here"
    )


# --- sync ---------------------------------------------------------------------------------------


class SyncLine:
    """Over a `redis.Redis`: any thread, any process after a fork."""

    def __init__(self, client: Callable[[], Any]) -> None:
        self._client = client

    async def call(self, call: Call) -> Any:
        try:
            return self._exchange(call)
        except ResponseError as error:
            raise refused(call, error) from error
        except (redis.RedisError, OSError) as error:
            raise unreachable(error) from error

    async def calls(self, calls: Sequence[Call]) -> list[Any]:
        return [await self.call(call) for call in calls]

    async def servers(self) -> list[Any]:
        return [self._client()]

    async def ask(self, server: Any, *command: Any) -> Any:
        return server.execute_command(*command, **RAW)

    def _exchange(self, call: Call) -> Any:
        return _with_connection(self._client().connection_pool, call, _twice)


def _with_connection(pool: Any, call: Call, exchange: Callable[[Any, Call], Any]) -> Any:
    connection = pool.get_connection()
    try:
        return exchange(connection, call)
    finally:
        pool.release(connection)


def _twice(connection: Any, call: Call) -> Any:
    try:
        return _once(connection, call)
    except (redis.ConnectionError, ResponseError) as error:
        if isinstance(error, AuthenticationError) or not _may_pass(error):
            raise
    connection.disconnect()
    connection.connect()
    return _once(connection, call)


def _may_pass(error: Exception) -> bool:
    """Would a new connection help? It does when this one broke, and when it leads to a master that
    was demoted: connecting again asks the sentinels who is master now.
    """
    if isinstance(error, redis.ConnectionError):
        return True
    # Before 7.0, what a script was refused is told inside the script's own error.
    return isinstance(error, ReadOnlyError) or "-READONLY" in str(error)


def _once(connection: Any, call: Call) -> Any:
    try:
        return _swap(connection, call.packed)
    except NoScriptError:
        return _swap(connection, call.in_full())


def _swap(connection: Any, command: bytes) -> Any:
    try:
        connection.send_packed_command([command])
        return connection.read_response(disable_decoding=True)
    except redis.RedisError:
        raise
    except BaseException:
        # Interrupted between request and reply: the next user must not read our reply.
        connection.disconnect()
        raise


_MOVING = (
    MovedError,
    AskError,
    TryAgainError,
    ClusterDownError,
    MasterDownError,
    ReadOnlyError,
)


class SyncClusterLine(SyncLine):
    """Over a `redis.RedisCluster`: straight to the slot's server, and through redis-py's own
    cluster client when the slot has moved or the server is gone.
    """

    async def servers(self) -> list[Any]:
        client = self._client()
        return [client.get_redis_connection(node) for node in client.get_primaries()]

    def _exchange(self, call: Call) -> Any:
        client = self._client()
        try:
            node = client.get_node_from_key(call.key)
            pool = client.get_redis_connection(node).connection_pool
            return _with_connection(pool, call, _once)
        except (AuthenticationError, redis.TimeoutError):
            raise
        except (*_MOVING, redis.ConnectionError, SlotNotCoveredError):
            return client.execute_command(*call.words(), **RAW)


# --- async --------------------------------------------------------------------------------------


class AsyncLine:
    """Over a `redis.asyncio.Redis`, on one event loop."""

    def __init__(self, client: Any, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._batcher: Batcher[Call] = Batcher(self._run, largest=LARGEST_BATCH)

    def call(self, call: Call) -> Awaitable[Any]:
        return self._batcher.submit(call)

    async def calls(self, calls: Sequence[Call]) -> list[Any]:
        return await asyncio.gather(*map(self.call, calls))

    async def servers(self) -> list[Any]:
        return [self._client]

    async def ask(self, server: Any, *command: Any) -> Any:
        async with asyncio.timeout(self._timeout_s):
            return await server.execute_command(*command, **RAW)

    async def _run(self, calls: Sequence[Call]) -> list[Any]:
        return await _in_time(self._timeout_s, self._answers(calls))

    async def _answers(self, calls: Sequence[Call]) -> list[Any]:
        pool = self._client.connection_pool
        connection = await pool.get_connection()
        try:
            replies = await _twice_together(connection, calls)
        finally:
            await pool.release(connection)
        return _told(calls, replies)


async def _in_time(timeout_s: float, work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """The work's answers, or why there are none."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        raise unreachable(TimeoutError(f"no reply within {timeout_s:g} s")) from error
    except (redis.RedisError, hiredis.HiredisError, OSError) as error:
        raise unreachable(error) from error


def _told(calls: Sequence[Call], replies: list[Any]) -> list[Any]:
    for index in _errors(replies):
        replies[index] = refused(calls[index], replies[index])
    return replies


def _errors(replies: Iterable[Any]) -> list[int]:
    return [index for index, reply in enumerate(replies) if isinstance(reply, Exception)]


async def _twice_together(connection: Any, calls: Sequence[Call]) -> list[Any]:
    try:
        replies = await _together(connection, calls)
        if not _said(replies, "READONLY"):
            return replies
    except AuthenticationError:
        raise
    except (redis.ConnectionError, hiredis.ProtocolError, OSError):
        pass
    # A demoted master says READONLY: connecting again asks the sentinels who is master now.
    await connection.disconnect(nowait=True)
    await connection.connect()
    return await _together(connection, calls)


def _said(replies: Sequence[Any], code: str) -> list[int]:
    return [index for index in _errors(replies) if code in str(replies[index])]


async def _together(connection: Any, calls: Sequence[Call]) -> list[Any]:
    replies = await _bulk(connection, [call.packed for call in calls])
    if missing := _said(replies, "NOSCRIPT"):
        again = await _bulk(connection, _taught(calls[index] for index in missing))
        for index, reply in zip(missing, again, strict=True):
            replies[index] = reply
    return replies


def _taught(calls: Iterable[Call]) -> list[bytes]:
    """The commands again, the first of each script with its source."""
    known: set[bytes] = set()
    commands = []
    for call in calls:
        commands.append(call.packed if call.script.sha in known else call.in_full())
        known.add(call.script.sha)
    return commands


_MORE = object()
_PUSH = getattr(hiredis, "PushNotification", ())


async def _bulk(connection: Any, commands: Sequence[bytes]) -> list[Any]:
    """One write, and as many reads as it takes. The connection is left clean, or closed."""
    try:
        await connection.check_health()
        # redis-py keeps its streams to itself; test_redis_line.py notices when they are renamed.
        writer, reader = connection._writer, connection._reader  # noqa: SLF001
        writer.write(b"".join(commands))
        await writer.drain()
        parser = hiredis.Reader(notEnoughData=_MORE)
        replies: list[Any] = []
        while len(replies) < len(commands):
            _parse(parser, await reader.read(READ_SIZE), replies)
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    if parser.has_data() or len(replies) > len(commands):
        # A piece of something nobody asked for: its end would be read as the next one's reply.
        await connection.disconnect(nowait=True)
    return replies[: len(commands)]


def _parse(parser: hiredis.Reader, data: bytes, replies: list[Any]) -> None:
    if not data:
        raise redis.ConnectionError("Redis closed the connection")
    parser.feed(data)
    while (reply := parser.gets()) is not _MORE:
        if not isinstance(reply, _PUSH):
            replies.append(reply)


_MOVED = ("MOVED ", "ASK ", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "LOADING")


class AsyncClusterLine(AsyncLine):
    """Over a `redis.asyncio.RedisCluster`: a batch per server, and calls one by one through
    redis-py's own cluster client when their slot has moved or the server is gone.
    """

    def __init__(self, client: Any, timeout_s: float) -> None:
        super().__init__(client, timeout_s)
        self._batchers: dict[str, Batcher[Call]] = {}

    async def call(self, call: Call) -> Any:
        try:
            name: str = self._client.get_node_from_key(call.key).name
        except SlotNotCoveredError:
            name = await self._server_of(call)
        batcher = self._batchers.get(name)
        if batcher is None:
            run = partial(self._run_on, name)
            batcher = self._batchers[name] = Batcher(run, largest=LARGEST_BATCH)
        return await batcher.submit(call)

    async def _server_of(self, call: Call) -> str:
        try:
            await self._know_the_cluster()
            name: str = self._client.get_node_from_key(call.key).name
        except (redis.RedisError, OSError) as error:
            raise unreachable(error) from error
        return name

    async def _know_the_cluster(self) -> None:
        async with asyncio.timeout(self._timeout_s):
            await self._client.initialize()

    async def servers(self) -> list[Any]:
        await self._know_the_cluster()
        servers: list[Any] = self._client.get_primaries()
        return servers

    async def _run_on(self, name: str, calls: Sequence[Call]) -> list[Any]:
        return await _in_time(self._timeout_s, self._answers_from(name, calls))

    async def _answers_from(self, name: str, calls: Sequence[Call]) -> list[Any]:
        node = self._client.get_node(node_name=name)
        if node is None:
            return await self._one_by_one(calls)
        try:
            replies = await _through(node, partial(_together, calls=calls))
        except AuthenticationError:
            raise
        except (redis.ConnectionError, hiredis.ProtocolError, OSError):
            return await self._one_by_one(calls)
        await self._follow(calls, replies)
        return _told(calls, replies)

    async def _one_by_one(self, calls: Sequence[Call]) -> list[Any]:
        return _told(calls, await asyncio.gather(*(self._rerouted(call) for call in calls)))

    async def _follow(self, calls: Sequence[Call], replies: list[Any]) -> None:
        """Ask again, where they are now, for the slots that have moved."""
        moved = [i for i in _errors(replies) if str(replies[i]).startswith(_MOVED)]
        again = (self._elsewhere(calls[i], str(replies[i])) for i in moved)
        for index, reply in zip(moved, await asyncio.gather(*again), strict=True):
            replies[index] = reply

    async def _elsewhere(self, call: Call, redirection: str) -> Any:
        # redis-py's async client may send ASKING and the command on two connections, and is then
        # redirected for ever: while a slot migrates we ask ourselves.
        if redirection.startswith("ASK "):
            node = self._client.get_node(node_name=redirection.split()[2])
            if node is not None:
                asking = [b"*1\r\n$6\r\nASKING\r\n", call.in_full()]
                return (await _through(node, partial(_bulk, commands=asking)))[1]
        return await self._rerouted(call)

    async def _rerouted(self, call: Call) -> Any:
        try:
            return await self._client.execute_command(*call.words(), **RAW)
        except ResponseError as error:
            return error


async def _through(
    node: Any, exchange: Callable[[Any], Coroutine[Any, Any, list[Any]]]
) -> list[Any]:
    """An exchange over a connection to one server of the cluster."""
    connection = node.acquire_connection()
    try:
        await connection.connect()
        return await exchange(connection)
    finally:
        node.release(connection)
