"""The bells of the log in an SQL database.

On PostgreSQL whoever appends says which streams by NOTIFY, behind the COMMIT, and `NotifyBell`
hears it over a connection of its own. Elsewhere `PollBell` rings for what this process appends, and
polls the ends of streams with listeners. Behind a transaction pooler `NotifyBell` does the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from importlib.util import find_spec
from typing import Any, TypeAlias

from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncEngine

from semel.colour import ASYNC
from semel.entries import Position
from semel.stores.bells import LocalBell, Tower, Wake
from semel.stores.sql.log_words import CHANNEL, SHORT
from semel.stores.sql.log_writing import short
from semel.stores.sql.notify import hear

log = logging.getLogger("semel")

Heads: TypeAlias = Callable[[Sequence[str]], Awaitable[Sequence[Position]]]

# How long until a poll looks again: where something has moved, and at most, when nothing does.
SOON_S = 0.25
LATER_S = 1.0
SLOWING = 1.5


def can_hear() -> bool:
    """Is everything here that LISTEN needs?"""
    return find_spec("psycopg") is not None and find_spec("greenlet") is not None


class _Ear:
    """A task that runs while somebody listens."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


class PollBell(LocalBell):
    """Rings for what this process appends at once, and for the others' within a second.

    `heads` asks the log where streams end.
    """

    def __init__(self, tower: Tower, heads: Heads) -> None:
        super().__init__(tower)
        self._heads = heads
        self._known: dict[str, Position] = {}
        self._ear = _Ear(self._poll)

    async def listen(self, stream: str, wake: Wake) -> None:
        await super().listen(stream, wake)
        self._ear.open()

    async def leave(self, stream: str, wake: Wake) -> None:
        await super().leave(stream, wake)
        if stream not in self.listeners:
            self._known.pop(stream, None)
        if not len(self.listeners):
            await self._fall_silent()

    async def _fall_silent(self) -> None:
        await self._ear.close()

    async def aclose(self) -> None:
        await self._ear.close()
        await super().aclose()

    async def _poll(self) -> None:
        pause_s = SOON_S
        while True:
            await ASYNC.sleep(pause_s)
            has_moved = await self._look()
            pause_s = SOON_S if has_moved else min(LATER_S, pause_s * SLOWING)

    async def _look(self) -> bool:
        """Did any stream move? Of one that was not looked at before, nobody knows."""
        streams = self.listeners.streams
        try:
            heads = await self._heads(streams)
        except Exception as error:  # noqa: BLE001 - whatever it is: this is only a hint
            log.info("semel: where streams end is not known now: %s", error)
            return False
        before = self._known
        moved = [s for s, head in zip(streams, heads, strict=True) if before.get(s) != head]
        self._known.update(
            (s, head) for s, head in zip(streams, heads, strict=True) if s in self.listeners
        )
        for stream in moved:
            self.listeners.ring(stream)
        return bool(moved)


class NotifyBell(PollBell):
    """Rings for appends that NOTIFY announces; polls where LISTEN is impossible."""

    def __init__(self, place: URL | AsyncEngine, tower: Tower, heads: Heads) -> None:
        super().__init__(tower, heads)
        self._place = place
        self._names: dict[str, str] = {}
        self._is_polling = False
        self._ear = _Ear(self._follow)

    async def listen(self, stream: str, wake: Wake) -> None:
        self._names[short(stream)] = stream
        await super().listen(stream, wake)

    async def leave(self, stream: str, wake: Wake) -> None:
        await super().leave(stream, wake)
        if stream not in self.listeners:
            self._names.pop(short(stream), None)

    def ring(self, stream: str) -> None:
        """Wake listeners to an append of this process, if NOTIFY does not."""
        if self._is_polling:
            super().ring(stream)

    async def _follow(self) -> None:
        if not self._is_polling:
            ring_all = self.listeners.ring_all
            await hear(self._place, CHANNEL, begun=ring_all, heard=self._heard)
            self._is_polling = True
            ring_all()
        await self._poll()

    async def _fall_silent(self) -> None:
        """Stop polling; but keep a connection that listens, because opening one takes long."""
        if self._is_polling:
            await super()._fall_silent()

    def _heard(self, word: str) -> None:
        for start in range(0, len(word), SHORT):
            stream = self._names.get(word[start : start + SHORT])
            if stream is not None:
                self.listeners.ring(stream)
