"""One connection on which a server tells what is published.

It is opened by redis-py, which secures it, logs in and finds the master; then its transport speaks
to us, as that of a `wire` does: nothing waits, nothing is read in a loop, and a thousand channels
on which nothing happens cost nothing. It belongs to no pool, and takes no connection from anybody.

Requests are answered in their order, and what is published comes in between. A reply that does not
belong to the oldest request means that we have lost count, and the connection is given up: whoever
listens is told that he may have missed something. The same goes for a server that is silent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Protocol

import hiredis
import redis

from semel.stores.redis.wire import MORE

RINGS = frozenset((b"message", b"smessage"))
REPLIES = frozenset((b"subscribe", b"ssubscribe", b"unsubscribe", b"sunsubscribe"))


class Channel:
    """What rings for one stream, as long as somebody listens to it."""

    __slots__ = ("due", "ear", "heard", "is_astray", "is_heard", "name", "stream", "tries")

    def __init__(self, name: bytes, stream: str) -> None:
        self.name = name
        self.stream = stream
        self.ear: Ear | None = None
        """Where it is asked for."""
        self.is_heard = False
        self.is_astray = False
        """Is it not where we thought? Then it has to be looked for."""
        self.tries = 0
        self.due = 0.0
        """When it may be asked for again."""
        self.heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it is heard, or cannot be just now."""

    def answer(self) -> bool:
        """Was somebody waiting?"""
        if self.heard.done():
            return False
        self.heard.set_result(None)
        return True


class Owner(Protocol):
    """Whom an ear tells."""

    def rung(self, name: bytes) -> None: ...

    def is_heard(self, channel: Channel) -> None: ...

    def refused(self, channel: Channel, error: Exception) -> None:
        """The server does not let us listen there, or not any more."""
        ...

    def lost(self, ear: Ear, error: Exception) -> None: ...


class Ear(asyncio.Protocol):
    """What we hear of one server. `channels`: whatever it was asked for, by name."""

    def __init__(self, owner: Owner, connection: Any, *, is_sharded: bool) -> None:
        self.connection = connection
        self.channels: dict[bytes, Channel] = {}
        self._owner = owner
        self._before = b"S" if is_sharded else b""
        self._asked: deque[tuple[bytes, Channel]] = deque()
        self._unsent: list[bytes] = []
        self._reader = hiredis.Reader(notEnoughData=MORE)
        self._loop = asyncio.get_running_loop()
        self._has_heard = True
        self._has_asked = False
        # redis-py keeps its streams to itself; test_redis_wire.py notices when they are renamed.
        self._transport: asyncio.Transport = connection._writer.transport  # noqa: SLF001
        self._streams: Any = self._transport.get_protocol()
        self._reader.feed(bytes(connection._reader._buffer))  # noqa: SLF001
        self._transport.set_protocol(self)

    # --- out --------------------------------------------------------------------------------

    def ask(self, channel: Channel) -> None:
        """Listen there from now on. Asked again, the server says so again."""
        self.channels[channel.name] = channel
        channel.ear = self
        self._say(self._before + b"SUBSCRIBE", channel)

    def leave(self, channel: Channel) -> None:
        if self.channels.get(channel.name) is channel:
            del self.channels[channel.name]
            self._say(self._before + b"UNSUBSCRIBE", channel)

    def _say(self, verb: bytes, channel: Channel) -> None:
        # A crowd that comes at once is written at once: at the end of this turn of the loop.
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._asked.append((verb.lower(), channel))
        words: Any = (verb, channel.name)
        self._unsent.append(hiredis.pack_command(words))

    def _send(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def tick(self) -> None:
        """Once in a while: a server that says nothing is asked, and given up when it stays silent.

        What is asked for is a channel that we hear already: a server that does not have it any
        more, or cannot serve it, says so.
        """
        if self._has_heard:
            self._has_heard = self._has_asked = False
        elif self._has_asked:
            self.abandon(TimeoutError("Redis is silent"))
        elif self.channels:
            self._has_asked = True
            self.ask(next(iter(self.channels.values())))
        else:
            self.abandon(redis.ConnectionError("nobody listens"))

    # --- in ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._has_heard = True
        try:
            self._reader.feed(data)
            while (said := self._reader.gets()) is not MORE:
                self._hear(said)
        except hiredis.ProtocolError as error:
            self.abandon(error)

    def _hear(self, said: Any) -> None:
        if isinstance(said, Exception):
            if not self._asked:
                raise hiredis.ProtocolError(f"an error that nobody asked for: {said}")
            verb, channel = self._asked.popleft()
            if verb == b"ssubscribe" and "unknown command" in str(said):
                self._do_without_shards(channel)
            else:
                self._refuse(channel, said)
        elif isinstance(said, list) and said[0] in RINGS:
            self._owner.rung(said[1])
        elif isinstance(said, list) and said[0] in REPLIES:
            self._reply(said[0], said[1])

    def _reply(self, verb: bytes, name: bytes) -> None:
        if self._asked and (self._asked[0][0], self._asked[0][1].name) == (verb, name):
            channel = self._asked.popleft()[1]
            if not verb.endswith(b"unsubscribe") and self.channels.get(name) is channel:
                self._owner.is_heard(channel)
        elif verb == b"sunsubscribe":
            # Nobody asked: the slot has gone to another server.
            if name in self.channels:
                self._refuse(self.channels[name], redis.ResponseError("MOVED to somewhere else"))
        else:
            raise hiredis.ProtocolError(f"a reply that nobody asked for: {verb!r} {name!r}")

    def _do_without_shards(self, channel: Channel) -> None:
        # Before 7.0: what is published anywhere in a cluster is heard everywhere. Not after an
        # upgrade: but no connection survives that, and the next one asks for shards again.
        self._before = b""
        if self.channels.get(channel.name) is channel:
            self.ask(channel)

    def _refuse(self, channel: Channel, error: Exception) -> None:
        if self.channels.get(channel.name) is channel:
            del self.channels[channel.name]
            channel.ear = None
            self._owner.refused(channel, error)

    # --- the end ----------------------------------------------------------------------------

    def abandon(self, error: Exception) -> None:
        self._transport.abort()
        self._owner.lost(self, error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.connection_lost(exc)
        self._owner.lost(self, exc or redis.ConnectionError("Redis closed the connection"))

    async def close(self) -> None:
        self._transport.abort()
        await self.connection.disconnect(nowait=True)
        await asyncio.sleep(0)  # the socket is closed in the next turn of the loop
