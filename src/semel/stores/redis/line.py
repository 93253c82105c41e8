"""How a call reaches Redis and its reply comes back: one server or a cluster, in both colours.

Connections are redis-py's own: TLS, passwords, Sentinel, SELECT and the map of a cluster stay its
business. What is said on them is ours: in the sync colour a caller writes its call and reads the
reply (`reserve`), in the async colour all callers share one connection to each server (`wire`).

A connection that breaks is replaced once and the call sent again: every call is a verb that may be
repeated. Silence is not retried, for it may be followed by more of it. Whoever gets an error after
that does not know whether the call took effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from redis.client import NEVER_DECODE
from redis.exceptions import (
    AskError,
    MovedError,
    ResponseError,
    SlotNotCoveredError,
    TryAgainError,
)

from semel.colour import keep
from semel.stores.redis.faults import (
    BROKEN,
    STUCK,
    has_moved,
    refused,
    unreachable,
    was_demoted,
)
from semel.stores.redis.lenders import FromNode, FromPool
from semel.stores.redis.reserve import Held, Reserve
from semel.stores.redis.scripts import Call
from semel.stores.redis.wire import Asked, Exchange

RAW: dict[str, Any] = {NEVER_DECODE: True}

# While the keys of a slot that migrates are on two servers. To move one takes less than that.
TORN_PAUSE_S = 0.02


class Line(Protocol):
    """A way to one Redis, whatever it is made of."""

    is_cluster: bool

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


# --- sync ---------------------------------------------------------------------------------------


class SyncLine:
    """Over a `redis.Redis`: any thread, any process after a fork."""

    is_cluster = False

    def __init__(self, client: Callable[[], Any]) -> None:
        self._client = client
        self._reserves: dict[Any, Reserve] = {}

    async def call(self, call: Call) -> Any:
        try:
            reply = self._exchange(call)
        except BROKEN as error:
            raise unreachable(error) from error
        if isinstance(reply, Exception):
            raise refused(call, reply)
        return reply

    async def calls(self, calls: Sequence[Call]) -> list[Any]:
        return [await self.call(call) for call in calls]

    async def servers(self) -> list[Any]:
        return [self._client()]

    async def ask(self, server: Any, *command: Any) -> Any:
        return server.execute_command(*command, **RAW)

    def close(self) -> None:
        """Give every connection back to its pool."""
        while self._reserves:
            self._reserves.popitem()[1].close()

    def _reserve(self, pool: Any) -> Reserve:
        reserve = self._reserves.get(pool)
        if reserve is None:
            reserve = self._reserves.setdefault(pool, Reserve(pool))
        return reserve

    def _exchange(self, call: Call) -> Any:
        client = self._client()
        pool = client.connection_pool
        if getattr(pool, "cache", None) is not None:
            # The pool reads along to know what has changed; only redis-py may read here.
            return _through_redis_py(client, call)
        return self._over(pool, call, _twice)

    def _over(self, pool: Any, call: Call, asking: Callable[[Held, Call], Any]) -> Any:
        reserve = self._reserve(pool)
        held = reserve.take()
        try:
            reply = asking(held, call)
        except BaseException:
            # Broken, or interrupted between asking and reading: nobody must read our reply.
            reserve.give_up(held, broken=True)
            raise
        reserve.put_back(held)
        return reply


def _twice(held: Held, call: Call) -> Any:
    try:
        reply = held.ask(call)
        if not was_demoted(reply):
            return reply
    except STUCK:
        raise
    except BROKEN:
        pass
    held.renew()
    return held.ask(call)


def _through_redis_py(client: Any, call: Call) -> Any:
    try:
        return client.execute_command(*call.words(), **RAW)
    except ResponseError as error:
        return error


class SyncClusterLine(SyncLine):
    """Over a `redis.RedisCluster`: straight to the slot's server, and through redis-py's own
    cluster client when the slot has moved or the server is gone.
    """

    is_cluster = True

    async def servers(self) -> list[Any]:
        client = self._client()
        return [client.get_redis_connection(node) for node in client.get_primaries()]

    def _exchange(self, call: Call) -> Any:
        client = self._client()
        try:
            node = client.get_node_from_key(call.key)
            reply = self._over(client.get_redis_connection(node).connection_pool, call, Held.ask)
            if not has_moved(reply):
                return reply
        except STUCK:
            raise
        except BROKEN:
            pass
        return _through_redis_py(client, call)


# --- async --------------------------------------------------------------------------------------


class AsyncLine:
    """Over a `redis.asyncio.Redis`, on one event loop."""

    is_cluster = False

    def __init__(self, client: Any, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._exchange = Exchange(FromPool(client.connection_pool), timeout_s)

    def call(self, call: Call) -> Awaitable[Any]:
        return self._exchange.submit(call)

    async def calls(self, calls: Sequence[Call]) -> list[Any]:
        return await asyncio.gather(*map(self.call, calls))

    async def servers(self) -> list[Any]:
        return [self._client]

    def server_of(self, key: bytes) -> Any:
        """The server that has this key."""
        return self._client

    async def find(self, key: bytes) -> None:
        """There is but one."""

    async def ask(self, server: Any, *command: Any) -> Any:
        return await _in_time(self._timeout_s, server, *command)

    async def aclose(self) -> None:
        """Give the connection back; the client itself stays open."""
        await self._exchange.aclose()


async def _in_time(timeout_s: float, server: Any, *command: Any) -> Any:
    async with asyncio.timeout(timeout_s):
        return await server.execute_command(*command, **RAW)


class AsyncClusterLine:
    """Over a `redis.asyncio.RedisCluster`: a wire to each server, and calls one by one through
    redis-py's own cluster client when their slot has moved or the server is gone.
    """

    is_cluster = True

    def __init__(self, client: Any, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._exchanges: dict[str, Exchange] = {}
        self._detours: dict[bytes, asyncio.Future[None]] = {}
        """By key: the last call that is on its way to another server."""

    def call(self, call: Call) -> Awaitable[Any]:
        detour = self._detours.get(call.key)
        if detour is not None:
            return self._call_behind(detour, call)
        try:
            name: str = self._client.get_node_from_key(call.key).name
        except SlotNotCoveredError:
            return self._call_somewhere(call)
        return self._exchange(name).submit(call)

    async def _call_behind(self, detour: asyncio.Future[None], call: Call) -> Any:
        """A withdrawal must not overtake the claim it withdraws."""
        await asyncio.wait([detour])
        return await self.call(call)

    async def _call_somewhere(self, call: Call) -> Any:
        try:
            await self._know_the_cluster()
            name: str = self._client.get_node_from_key(call.key).name
        except (*BROKEN, RuntimeError) as error:  # uvloop's, of a line that is closed
            raise unreachable(error) from error
        return await self._exchange(name).submit(call)

    def _exchange(self, name: str) -> Exchange:
        exchange = self._exchanges.get(name)
        if exchange is None:
            lender = FromNode(self._client, name)
            exchange = Exchange(lender, self._timeout_s, self._elsewhere)
            self._exchanges[name] = exchange
        return exchange

    async def _know_the_cluster(self) -> None:
        async with asyncio.timeout(self._timeout_s):
            await self._client.initialize()

    async def calls(self, calls: Sequence[Call]) -> list[Any]:
        return await asyncio.gather(*map(self.call, calls))

    async def servers(self) -> list[Any]:
        await self._know_the_cluster()
        servers: list[Any] = self._client.get_primaries()
        return servers

    def server_of(self, key: bytes) -> Any:
        """The server that has this key, as far as is known."""
        return self._client.get_node_from_key(key)

    async def find(self, key: bytes) -> None:
        """Ask for the key: redis-py goes after it, and from then on knows who has it."""
        await self.ask(self._client, "EXISTS", key)

    async def ask(self, server: Any, *command: Any) -> Any:
        return await _in_time(self._timeout_s, server, *command)

    async def aclose(self) -> None:
        for exchange in self._exchanges.values():
            await exchange.aclose()

    # --- servers that cannot answer ---------------------------------------------------------

    def _elsewhere(self, unanswered: Sequence[Asked], error: Exception) -> None:
        for asked in unanswered:
            key = asked.call.key
            before = self._detours.get(key)
            detour = asyncio.ensure_future(self._redirected(asked, str(error), before))
            self._detours[key] = detour
            detour.add_done_callback(partial(self._arrived, key))
            keep(detour)

    def _arrived(self, key: bytes, detour: asyncio.Future[None]) -> None:
        if self._detours.get(key) is detour:
            del self._detours[key]

    async def _redirected(
        self, asked: Asked, redirection: str, before: asyncio.Future[None] | None
    ) -> None:
        """Ask whoever knows now, in what is left of the caller's time."""
        try:
            async with asyncio.timeout_at(asked.since + self._timeout_s):
                if before is not None:
                    await asyncio.wait([before])
                if asked.future.done():
                    return
                reply = await self._reply_to(asked.call, redirection)
        except asyncio.CancelledError:
            asked.future.cancel()
            raise
        except TimeoutError:
            asked.fail(unreachable(TimeoutError(f"no reply within {self._timeout_s:g} s")))
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits to be told
            asked.fail(unreachable(error))
        else:
            asked.settle(reply)

    async def _reply_to(self, call: Call, redirection: str) -> Any:
        """While the slot migrates we ask ourselves, until all its keys are on one server.

        redis-py's async client may send ASKING and the command on two connections, and is then
        redirected for ever.
        """
        while True:
            try:
                if redirection.startswith("TRYAGAIN"):
                    return await _told(self._client.get_node_from_key(call.key), call)
                if redirection.startswith("ASK "):
                    node = self._client.get_node(node_name=redirection.split()[2])
                    if node is not None:
                        return await _told(node, call, b"*1\r\n$6\r\nASKING\r\n")
                return await self._client.execute_command(*call.words(), **RAW)
            except MovedError:
                redirection = ""  # it has arrived
            except AskError as error:
                redirection = f"ASK {error.slot_id} {error.host}:{error.port}"
            except TryAgainError:
                await asyncio.sleep(TORN_PAUSE_S)
            except ResponseError as error:
                return error


async def _told(node: Any, call: Call, *before: bytes) -> Any:
    connection = node.acquire_connection()
    try:
        await connection.connect()
        await connection.send_packed_command([*before, call.in_full()])
        for _ in before:
            await connection.read_response()
        return await connection.read_response(disable_decoding=True)
    except ResponseError:
        raise
    except BaseException:
        # Broken, or given up between asking and reading: nobody must read our reply.
        await connection.disconnect(nowait=True)
        raise
    finally:
        node.release(connection)
