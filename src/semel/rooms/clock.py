"""The store's clock, as well as a process can know it.

Deadlines are by the store's time: servers whose own clocks differ agree on them. A log does not
tell the time; but it writes down when it took an entry, and whoever appended that knows when it was
sent and when it was answered. The store's clock was read in between. From then on it is the loop's
own time that passes, which nobody sets; but it stands still while a machine sleeps. Whoever wakes
finds that its wall clock has gone on without it, and asks again. All servers ask in the same
stream, so that in a cluster it is the same node's.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable

from semel.colour import ASYNC
from semel.entries import Entry, Keep
from semel.ports import Log

__all__ = ["StoreClock"]

# What is known is asked for again after this, since clocks drift, and are set.
ASK_EACH_S = 60.0

# It is off by half of what an answer took at most. One that took longer than this is not believed
# at once: the line was slow, or this process frozen meanwhile. Nor is it asked for ever.
PROMPT_S = 0.25
MOST_TRIES = 4

# Enough for all servers that ask at the same moment.
_KEEP = Keep(entries=32, ids_s=0.0)


class StoreClock:
    """Tells the time of the store that `log` is in. `wall` is this process's own, to begin with."""

    def __init__(self, log: Log, stream: str, wall: Callable[[], float] = time.time) -> None:
        self._log = log
        self._stream = stream
        self._wall = wall
        self._ahead_s = 0.0
        self._apart_s = 0.0
        """How far our own two clocks were apart when it was asked for."""
        self._asked_at = -math.inf
        self._asking: asyncio.Lock | None = None

    def now_s(self) -> float:
        """Seconds since 1970; until it was asked for, by this process's own clock."""
        return ASYNC.now() + self._ahead_s if self._asked_at > -math.inf else self._wall()

    @property
    def is_known(self) -> bool:
        """Was it asked for, and has this machine not slept since?"""
        return self._asked_at > -math.inf and abs(self._between() - self._apart_s) <= PROMPT_S

    def _between(self) -> float:
        return self._wall() - ASYNC.now()

    @property
    def _is_fresh(self) -> bool:
        return self.is_known and ASYNC.now() - self._asked_at < ASK_EACH_S

    async def learn(self) -> None:
        """When this returns, the store's time is known, and not older than a minute."""
        if self._is_fresh:
            return
        self._asking = self._asking or asyncio.Lock()
        async with self._asking:
            if not self._is_fresh:
                await self._ask()

    async def _ask(self) -> None:
        """The answer that took the shortest counts."""
        shortest_s, ahead_s, apart_s, tries = math.inf, 0.0, 0.0, 0
        while shortest_s > PROMPT_S and (tries < MOST_TRIES or shortest_s == math.inf):
            tries += 1
            before_s = self._between()
            took_s, found_s = await self._told()
            if abs(self._between() - before_s) > PROMPT_S:
                continue  # the machine has slept meanwhile
            if took_s < shortest_s:
                shortest_s, ahead_s, apart_s = took_s, found_s, before_s
        self._ahead_s, self._apart_s = ahead_s, apart_s
        self._asked_at = ASYNC.now()

    async def _told(self) -> tuple[float, float]:
        """How long the answer took, and how far ahead of the loop's time the store's is."""
        id, sent_s = os.urandom(8).hex(), ASYNC.now()
        await self._log.append(self._stream, b"", id=id, keep=_KEEP)
        answered_s = ASYNC.now()
        entry = await self._found(id)
        if entry is None:
            return math.inf, 0.0
        return answered_s - sent_s, entry.at_us / 1e6 - (sent_s + answered_s) / 2

    async def _found(self, id: str) -> Entry | None:
        """None when so many have asked since that it is gone."""
        page = await self._log.read(self._stream)
        if page.lost and page.floor is not None:
            page = await self._log.read(self._stream, page.floor)
        return next((entry for entry in page.entries if entry.id == id), None)
