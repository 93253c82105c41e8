"""The ledger on Redis or Valkey: a single server, behind Sentinel, or a cluster.

    RedisStore("redis://localhost:6379/0")            both colours
    RedisStore(redis.Redis(...))                      sync code only
    RedisStore(redis.asyncio.Redis(...))              async code only

A claim is one round trip, and so is a replay. The clock is the server's. How much of what Redis
acknowledges it also remembers depends on how it is set up: ask `guarantees()`. The easy mistake is
a Redis that is used as a cache as well: with an evicting `maxmemory-policy` it forgets what has
been done.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from semel.colour import Colour
from semel.errors import SettingsError
from semel.ports import Bell, Log, StoreLedger

try:
    import hiredis as _hiredis  # noqa: F401 - so that its absence is told here, once
    import redis as _redis  # noqa: F401
except ImportError as error:
    raise SettingsError(
        "Redis needs redis-py and hiredis here, and one of them is not installed: "
        "pip install 'semel[redis]'"
    ) from error

from semel.stores.redis.bell import RedisBell
from semel.stores.redis.ledger import RedisLedger
from semel.stores.redis.log import RedisLog
from semel.stores.redis.scripts import Names
from semel.stores.redis.way import way_to

__all__ = ["RedisStore"]

T = TypeVar("T")

# What a namespace may be made of: nothing that has a meaning in a Redis key pattern or hash tag.
_NAMESPACE = re.compile(r"[A-Za-z0-9_.:/-]+")


class RedisStore:
    """Records in Redis, under keys that begin with `semel:<namespace>:`.

    Given a client of redis-py, the store serves that client's colour and leaves it open. Given a
    URL, it opens its own clients when they are first needed, one for sync code and one for each
    event loop. `timeout_s` is how long Redis may stay silent; a sync client that was given keeps
    its own `socket_timeout`.
    """

    def __init__(
        self, client_or_url: Any, *, namespace: str = "default", timeout_s: float = 5.0
    ) -> None:
        if not _NAMESPACE.fullmatch(namespace):
            raise SettingsError(
                f"the namespace {namespace!r} cannot be part of a Redis key: use letters, digits "
                "and . _ - : /"
            )
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._names = Names(namespace)
        way = way_to(client_or_url, timeout_s, "RedisStore")
        self._way = way
        self._ledgers = {
            name: RedisLedger(line, self._names, way.shown, spare=way.can_fail_over)
            for name, line in way.lines.items()
        }
        self._logs = {name: RedisLog(line, namespace) for name, line in way.lines.items()}

    def ledger(self, colour: Colour) -> StoreLedger:
        return self._served(self._ledgers, colour.name)

    def log(self, colour: Colour) -> Log:
        return self._served(self._logs, colour.name)

    def bell(self) -> Bell:
        """Hears of every append, whoever makes it. Needs a URL, or an async client."""
        line: Any = self._served(self._way.lines, "async")()
        return RedisBell(line, self._namespace, self._timeout_s)

    def _served(self, by_colour: Mapping[str, T], colour: str) -> T:
        if colour not in by_colour:
            raise SettingsError(
                f"this RedisStore was given a client for {next(iter(by_colour))} code and "
                f"{colour} code asks for it: give it a URL, "
                "RedisStore('redis://localhost:6379/0'), which serves both, or a "
                f"{'redis.Redis' if colour == 'sync' else 'redis.asyncio.Redis'} client"
            )
        return by_colour[colour]

    def close(self) -> None:
        self._way.close()

    async def aclose(self) -> None:
        self._way.close()
        await self._way.aclose()

    def __repr__(self) -> str:
        return f"RedisStore({self._way.shown!r})"
