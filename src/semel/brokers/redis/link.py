"""How a broker speaks with Redis: verbs on the line that it shares with nobody, and a bell.

The line is that of the stores (`semel.stores.redis.line`): a broken connection is replaced and the
call sent once more, a new master is found, a moved slot is followed. So every script here may be
asked twice, and answers the second time as the first.
"""

from __future__ import annotations

from typing import Any, cast

from redis.exceptions import ResponseError

from semel.colour import ASYNC
from semel.errors import BrokerUnavailableError, CorruptRecordError, StoreUnavailableError
from semel.stores.redis import asking
from semel.stores.redis.durability import Standing
from semel.stores.redis.faults import BROKEN, unreachable
from semel.stores.redis.line import AsyncClusterLine, AsyncLine
from semel.stores.redis.scripts import Call
from semel.stores.redis.way import Given, Opened

# How often a stream is looked at where its bell cannot be heard.
POLL_S = 0.1


class Link:
    """From one broker to its Redis."""

    def __init__(self, way: Given | Opened, timeout_s: float) -> None:
        self._way = way
        self._timeout_s = timeout_s
        self.shown = way.shown

    @property
    def _line(self) -> AsyncLine | AsyncClusterLine:
        return cast("AsyncLine | AsyncClusterLine", self._way.lines["async"]())

    async def ask(self, call: Call) -> Any:
        try:
            return await self._line.call(call)
        except CorruptRecordError as error:
            name = call.key.decode()
            raise BrokerUnavailableError(
                f"the Redis key {name!r} is no stream, or 'semel:{{{name}}}:broker' beside it no "
                f"hash: look at them (redis-cli type ...), or give the topic another name"
            ) from error
        except StoreUnavailableError as error:
            raise BrokerUnavailableError(str(error)) from error

    async def hear(self, key: bytes, after: bytes, wait_s: float) -> None:
        """Wait for an entry behind `after`, on a connection of its own. May return early.

        A bell only: whoever hears it looks. Where it cannot be heard, a moment passes instead.
        """
        line = self._line
        try:
            server = line.server_of(key)
            ms = max(1, round(min(wait_s, self._silence_s(server)) * 1000))
            await line.ask(server, "XREAD", "COUNT", 1, "BLOCK", ms, "STREAMS", key, after)
        except BROKEN:
            await ASYNC.sleep(min(wait_s, POLL_S))

    def _silence_s(self, server: Any) -> float:
        """How long a server may say nothing without being taken for dead, halved."""
        settings = getattr(server, "connection_pool", server).connection_kwargs
        return min(self._timeout_s, settings.get("socket_timeout") or self._timeout_s) / 2

    async def number(self, key: bytes, setting: str) -> int | None:
        """A setting of the server that has this key; None when it does not tell."""
        line = self._line
        try:
            reply = await line.ask(line.server_of(key), "CONFIG", "GET", setting)
        except ResponseError:
            return None
        except BROKEN as error:
            raise BrokerUnavailableError(str(unreachable(error))) from error
        words = next(iter(reply.items()), ()) if isinstance(reply, dict) else reply
        return int(words[1]) if words else None

    async def standings(self) -> list[Standing]:
        """The settings of every server that says what it remembers."""
        line = self._line
        try:
            return [await asking.standing(line, each) for each in await asking.servers(line)]
        except StoreUnavailableError as error:
            raise BrokerUnavailableError(str(error)) from error

    async def aclose(self) -> None:
        await self._way.aclose()
