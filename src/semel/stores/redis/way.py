"""The clients behind a store or a broker, and the lines over them.

Given a client of redis-py, its colour is served and it stays open. Given a URL, clients are opened
when they are first needed: one for threads, one for each event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any
from weakref import WeakKeyDictionary

import redis
import redis.asyncio

from semel.errors import SettingsError
from semel.stores.redis.address import Address, address_of, all_of
from semel.stores.redis.line import AsyncClusterLine, AsyncLine, Line, SyncClusterLine, SyncLine

log = logging.getLogger("semel")

# Older ones hide a cluster's connections from us.
OLDEST_DRIVER = (6, 2)


def way_to(client_or_url: Any, timeout_s: float, user: str) -> Given | Opened:
    """Through what is given, or to what the URL names. `user` is told of in errors."""
    if redis.VERSION[:2] < OLDEST_DRIVER:
        raise SettingsError(
            f"{user} needs redis-py 6.2 or later and found {redis.__version__}: "
            "pip install --upgrade 'semel[redis]'"
        )
    if timeout_s <= 0:
        raise SettingsError(f"timeout_s={timeout_s} leaves Redis no time to answer: write 5.0")
    if isinstance(client_or_url, str):
        return Opened(address_of(client_or_url, timeout_s), timeout_s)
    return Given(client_or_url, timeout_s, user)


class Given:
    """A client that belongs to somebody else: of one colour, and never closed by us.

    What we borrowed from its pool goes back there when the store is closed.
    """

    def __init__(self, client: Any, timeout_s: float, user: str) -> None:
        self._client = client
        self._user = user
        self._timeout_s = timeout_s
        self._sync_line: SyncLine | None = None
        self._async_lines: WeakKeyDictionary[
            asyncio.AbstractEventLoop, AsyncLine | AsyncClusterLine
        ] = WeakKeyDictionary()
        self.shown = f"{type(client).__module__.split('.')[0]} {type(client).__name__}"
        self.lines = self._lines()

    @property
    def can_fail_over(self) -> bool:
        kind = type(getattr(self._client, "connection_pool", self._client)).__name__
        return "Sentinel" in kind or "Cluster" in kind

    def _lines(self) -> dict[str, Callable[[], Line]]:
        if isinstance(self._client, redis.asyncio.Redis | redis.asyncio.RedisCluster):
            return {"async": self._async_line}
        if isinstance(self._client, redis.RedisCluster):
            line: SyncLine = SyncClusterLine(lambda: self._client)
        elif isinstance(self._client, redis.Redis):
            line = SyncLine(lambda: self._client)
            _warn_of_silence(self._client, self._user)
        else:
            raise SettingsError(
                f"{self._user} takes a URL or a client of redis-py, not {type(self._client)!r}: "
                f"{self._user}('redis://localhost:6379/0')"
            )
        self._sync_line = line
        return {"sync": lambda: line}

    def _async_line(self) -> Line:
        loop = asyncio.get_running_loop()
        line = self._async_lines.get(loop)
        if line is None:
            if any(not known.is_closed() for known in list(self._async_lines)):
                raise SettingsError(
                    f"the client given to this {self._user} belongs to another event loop: give "
                    f"it a URL, {self._user}('redis://localhost:6379/0'), and every loop gets its "
                    "own"
                )
            cluster = isinstance(self._client, redis.asyncio.RedisCluster)
            kind = AsyncClusterLine if cluster else AsyncLine
            line = self._async_lines[loop] = kind(self._client, self._timeout_s)
        return line

    def close(self) -> None:
        if self._sync_line is not None:
            self._sync_line.close()

    async def aclose(self) -> None:
        line = self._async_lines.get(asyncio.get_running_loop())
        if line is not None:
            await line.aclose()


def _warn_of_silence(client: redis.Redis, user: str) -> None:
    if client.connection_pool.connection_kwargs.get("socket_timeout", 0) is None:
        log.warning(
            "semel: the Redis client given to %s has no socket_timeout, so a server that "
            "stops answering blocks its callers for ever; write redis.Redis(..., socket_timeout=5)",
            user,
        )


class Opened:
    """Clients of our own, from a URL: one for threads, one for each event loop."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._sync_clients: dict[str, Any] = {}
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, OnLoop] = WeakKeyDictionary()
        self._last: OnLoop | None = None
        self.shown = address.shown
        self.can_fail_over = address.is_cluster or "+sentinel" in address.shown
        kind = SyncClusterLine if address.is_cluster else SyncLine
        self._sync_line = kind(self._client)
        self.lines: dict[str, Callable[[], Line]] = {
            "sync": lambda: self._sync_line,
            "async": self._async_line,
        }

    def _client(self) -> Any:
        # Of two threads that both open one, the second takes the first's. A lock would do too, but
        # could be left held in a forked child.
        client = self._sync_clients.get("")
        if client is None:
            client = self._sync_clients.setdefault("", self._address.open_sync())
        return client

    def _async_line(self) -> Line:
        loop = asyncio.get_running_loop()
        last = self._last  # read once: other threads, with loops of their own, change it
        if last is not None and last.loop is loop:
            return last.line
        here = self._loops.get(loop)
        if here is None:
            self._forget_ended_loops()
            here = OnLoop(loop, self._address, self._timeout_s, self._drop)
            self._loops[loop] = here
        self._last = here
        return here.line

    def _forget_ended_loops(self) -> None:
        for known in self._loops.keyrefs():  # a copy: other threads add theirs meanwhile
            loop = known()
            if loop is not None and loop.is_closed():
                self._drop(loop)

    def _drop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loops.pop(loop, None)
        self._last = None

    def close(self) -> None:
        self._sync_line.close()
        while self._sync_clients:
            for each in all_of(self._sync_clients.popitem()[1]):
                each.close()

    async def aclose(self) -> None:
        here = self._loops.get(asyncio.get_running_loop())
        if here is not None:
            await here.aclose()


class OnLoop:
    """The client of one event loop, closed when the loop shuts down.

    A loop announces its end to async generators only, so one of them waits for it: what
    `asyncio.run` opened is closed when it returns, and the next `asyncio.run` starts afresh.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: Address,
        timeout_s: float,
        drop: Callable[[asyncio.AbstractEventLoop], None],
    ) -> None:
        self.loop = loop
        self._client = address.open_async()
        self._drop = drop
        kind = AsyncClusterLine if address.is_cluster else AsyncLine
        self.line = kind(self._client, timeout_s)
        self._end = self._until_the_end()
        # Its first step does not suspend: it is begun here, without a task.
        with contextlib.suppress(StopIteration):
            self._end.asend(None).send(None)

    async def _until_the_end(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._drop(self.loop)
            await self.line.aclose()
            for each in all_of(self._client):
                await each.aclose()

    async def aclose(self) -> None:
        await self._end.aclose()
