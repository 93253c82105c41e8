"""One owner's view of one stream, for one group.

The group is Redis' own, so what was handed out and not acknowledged is pending there, and others
may read with the same group. Two things are ours. A read names its owner's fence, and the script
that hands entries out refuses a former one. And a read whose reply was lost hands out the same
entries when it is asked again: by Redis' own command they would stay pending, unheard of, while
later ones pass.

The easy mistake is to recover with XAUTOCLAIM alone: what a dead consumer held comes after what
was read since, and the order is gone. Here a new owner takes over first (`left_over`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from semel.brokers import rules
from semel.brokers.redis import scripts
from semel.brokers.redis.entries import delivery
from semel.brokers.redis.link import Link
from semel.brokers.redis.scripts import Stream
from semel.colour import ASYNC
from semel.messages import Delivery
from semel.stores.redis.scripts import Script
from semel.values import value

log = logging.getLogger("semel")

PREFIX = "semel:"
"""How the names of our consumers begin in a group that others may read too."""

START = b"0-0"


@value
class _Pending:
    """An entry that somebody was handed and has not acknowledged."""

    id: bytes
    consumer: str
    idle_ms: int
    times: int

    @property
    def who(self) -> str:
        """As people know it: ours without what tells our consumers apart."""
        if not self.consumer.startswith(PREFIX):
            return self.consumer
        return self.consumer.removeprefix(PREFIX).rpartition(":")[0]


class RedisConsumer:
    """What `RedisBroker.consumer` returns."""

    def __init__(self, link: Link, stream: Stream, group: str, name: str, fence: int) -> None:
        self._link = link
        self._stream = stream
        self._group = group
        self._fence = fence
        self._me = f"{PREFIX}{name}:{fence}"
        self._token = secrets.token_hex(4)
        self._reads = 0
        self._start = START
        """What was handed out up to here was handed to others."""
        self._taken_over: bytes | None = START
        """How far that was looked at; None when all was."""
        self._looked: bytes = START
        """How far strangers' entries were looked at, in this round."""
        self._claiming: Sequence[_Pending] = ()
        """What is being taken from strangers. Whether it is ours is known when a reply comes."""
        self._end = START
        self._hearing: asyncio.Task[None] | None = None
        self._is_closed = False
        self._is_deposed = False

    async def begin(self) -> None:
        """Be the one who reads: from now on a former owner is handed nothing."""
        what, said = await self._ask(scripts.OWN)
        if what == b"begun":
            self._start = said

    # --- what others have begun -------------------------------------------------------------

    async def left_over(self, limit: int = 1000) -> Sequence[Delivery]:
        while self._taken_over is not None and not self._is_deposed:
            page = await self._pending(self._taken_over, self._start, limit)
            # Our own too: a claim whose reply was lost has made them ours.
            found = await self._claim([row for row in page if row.consumer.startswith(PREFIX)], 0)
            self._taken_over = page[-1].id if page else None
            if found:
                return found
            if not page:
                await self._ask(scripts.TIDY, PREFIX, self._me)
        return []

    async def reclaim(self, idle_s: float, limit: int = 100) -> Sequence[Delivery]:
        idle_ms = round(idle_s * 1000)
        while not self._is_deposed:
            page = self._claiming  # once more, if the last call had no answer
            if not page:
                page = await self._pending(self._looked, b"+", limit)
                self._looked = page[-1].id if page else START
                self._claiming = [
                    row for row in page if row.consumer != self._me and row.idle_ms >= idle_ms
                ]
            theirs = {row.id: row for row in self._claiming}
            found = await self._claim(self._claiming, idle_ms)
            self._claiming = ()
            for each in found:
                self._tell(theirs[each.token])
            if found or not page:
                return found
        return []

    def _tell(self, row: _Pending) -> None:
        log.warning(
            "semel: %s, group %s: %s was handed to %s %.0f s ago and never acknowledged; taken "
            "over, handed out %d times before",
            self._stream,
            self._group,
            row.id.decode(),
            row.who,
            row.idle_ms / 1000,
            row.times,
        )

    async def _pending(self, after: bytes, to: bytes, limit: int) -> Sequence[_Pending]:
        call = self._stream.call(scripts.PENDING, self._group, b"(" + after, to, limit)
        rows = await self._link.ask(call)
        return [
            _Pending(id, who.decode("utf-8", "replace"), idle, times)
            for id, who, idle, times in rows
        ]

    async def _claim(self, rows: Sequence[_Pending], idle_ms: int) -> list[Delivery]:
        if not rows:
            return []
        ids = [row.id for row in rows]
        what, *said = await self._ask(scripts.CLAIM, self._me, idle_ms, *ids)
        if what == b"stale":
            return []
        entries, gone = said
        if gone:
            await self._give_up(gone)
        before = {row.id: row for row in rows}
        return [self._taken(entry, before[entry[0]]) for entry in entries]

    def _taken(self, entry: Sequence[Any], row: _Pending) -> Delivery:
        return delivery(
            entry,
            self._stream.topic,
            count=row.times + (row.consumer != self._me),
            consumer=row.who,
            idle_s=row.idle_ms / 1000,
        )

    async def _give_up(self, ids: Sequence[bytes]) -> None:
        """Told before they are dropped: if we die in between, the next owner tells it again."""
        log.error(
            "semel: %s, group %s: %d entries were handed out and not acknowledged, and somebody "
            "has deleted them from the stream since: %s. Look for their positions in the outbox "
            "and in the inbox; trim with maxlen only, which passes nothing unread",
            self._stream,
            self._group,
            len(ids),
            b", ".join(ids).decode(),
        )
        await self._link.ask(self._stream.call(scripts.ACK, self._group, *ids))

    # --- what is new ------------------------------------------------------------------------

    async def read(self, limit: int, *, wait_s: float = 0.0) -> Sequence[Delivery]:
        until = ASYNC.now() + wait_s
        while not self._is_closed:
            found = await self._next(limit)
            left_s = until - ASYNC.now()
            if found or left_s <= 0:
                return found
            await self._hear(left_s)
        return []

    async def _next(self, limit: int) -> Sequence[Delivery]:
        if self._is_deposed:
            return []
        number = f"{self._token}.{self._reads}"
        what, *said = await self._ask(scripts.READ, self._me, limit, number)
        match what:
            case b"given":
                self._reads += 1
                return [delivery(entry, self._stream.topic) for entry in said[0]]
            case b"none":
                self._end = said[0]
            case b"lost":
                await self._begin_anew()
        return []

    async def _begin_anew(self) -> None:
        """The stream was emptied, or a server without it took over; the relay fills it again."""
        log.warning(
            "semel: %s has lost the group %s: it begins again with the oldest entry",
            self._stream,
            self._group,
        )
        await self.begin()
        self._end = START

    async def _hear(self, wait_s: float) -> None:
        # A former owner has nothing to hear, and lets the time pass.
        key, after = self._stream.key, self._end
        hearing = ASYNC.sleep(wait_s) if self._is_deposed else self._link.hear(key, after, wait_s)
        self._hearing = asyncio.ensure_future(hearing)
        try:
            await asyncio.wait([self._hearing])
        finally:
            # Its connection goes back before anybody closes the client.
            self._hearing.cancel()
            await asyncio.wait([self._hearing])

    # --- and then ---------------------------------------------------------------------------

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            ids = [each.token for each in deliveries]
            await self._link.ask(self._stream.call(scripts.ACK, self._group, *ids))

    async def close(self) -> None:
        """What is pending stays so, and the next owner takes it over; a read stops waiting."""
        self._is_closed = True
        if self._hearing is not None:
            self._hearing.cancel()

    async def _ask(self, script: Script, *args: Any) -> Any:
        call = self._stream.call(script, self._group, self._fence, self._token, *args)
        reply = await self._link.ask(call)
        if isinstance(reply, list) and reply[0] == b"stale" and not self._is_deposed:
            if reply[1].partition(b" ")[0] == str(self._fence).encode():
                raise rules.begun_anew(f"{self._stream} for group {self._group!r}")
            self._is_deposed = True
            log.warning(
                "semel: %s, group %s: a later owner reads (its fence is %s, ours %d); we are "
                "handed nothing any more",
                self._stream,
                self._group,
                reply[1].decode().partition(" ")[0],
                self._fence,
            )
        return reply

    def __repr__(self) -> str:
        return f"RedisConsumer({str(self._stream)!r}, {self._group!r}, {self._me!r})"
