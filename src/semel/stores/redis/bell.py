"""The bell on Redis: Pub/Sub, on a connection of its own; on a cluster, one to each server.

Whoever appends publishes in the same call, on a channel with the name of the stream's log. On a
cluster from 7.0 on that is a sharded channel, which one server has, as it has the log: when the
slot goes to another server, or the server fails, the channel is looked for. One that was not heard
for a while rings when it is heard again, for anything may have happened meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterable, Sequence
from typing import Any

from redis.exceptions import SlotNotCoveredError

from semel.stores.bells import Listeners, Wake
from semel.stores.redis.ear import Channel, Ear
from semel.stores.redis.faults import BROKEN, has_moved
from semel.stores.redis.lenders import make_ready
from semel.stores.redis.line import AsyncClusterLine, AsyncLine
from semel.stores.redis.log_words import place_of

log = logging.getLogger("semel")

# Before the third try, and at most; the second comes at once. Readers look once a second anyway.
FIRST_PAUSE_S, MOST_PAUSE_S = 0.05, 1.0

# Somebody has to change a setting before this helps.
REFUSED_PAUSE_S = 10.0

FAILED = (*BROKEN, TimeoutError)


class RedisBell:
    """Rings for what anybody appends."""

    def __init__(
        self, line: AsyncLine | AsyncClusterLine, namespace: str, timeout_s: float
    ) -> None:
        self.listeners = Listeners()
        self._line = line
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._channels: dict[bytes, Channel] = {}
        self._ears: dict[str, Ear] = {}
        """By server; of a single one, the name is empty."""
        self._worn: list[Ear] = []
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        """Is there something to look for that was not there before?"""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._has_warned = False

    async def listen(self, stream: str, wake: Wake) -> None:
        name = place_of(self._namespace, stream).channel
        self.listeners.add(stream, wake)
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = Channel(name, stream)
            self._tend()
        if not (channel.is_heard or self._is_closed):
            try:
                await asyncio.wait([channel.heard], timeout=self._timeout_s)
            except asyncio.CancelledError:
                await self.leave(stream, wake)
                raise
            channel.answer()  # waited for in vain: it is to ring when it is heard

    async def leave(self, stream: str, wake: Wake) -> None:
        if self.listeners.remove(stream, wake):
            channel = self._channels.pop(place_of(self._namespace, stream).channel)
            channel.answer()
            if channel.ear is not None:
                channel.ear.leave(channel)

    async def aclose(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for channel in self._channels.values():
            channel.answer()
        self._worn += self._ears.values()
        self._ears.clear()
        await self._put_away()

    # --- what ears tell ---------------------------------------------------------------------

    def rung(self, name: bytes) -> None:
        if channel := self._channels.get(name):
            self.listeners.ring(channel.stream)

    def is_heard(self, channel: Channel) -> None:
        was_heard, channel.is_heard = channel.is_heard, True
        channel.tries = 0
        if not (was_heard or channel.answer()):
            self.listeners.ring(channel.stream)  # it was deaf, and somebody relied on it

    def refused(self, channel: Channel, error: Exception) -> None:
        if has_moved(error):
            channel.is_astray = True
            self._miss([channel])
        else:
            self._warn(error)
            self._miss([channel], pause_s=REFUSED_PAUSE_S)

    def lost(self, ear: Ear, error: Exception) -> None:
        name = next((name for name, known in self._ears.items() if known is ear), None)
        if name is None:
            return
        log.info("semel: the bell does not hear Redis any more, and connects again: %s", error)
        self._worn.append(self._ears.pop(name))
        for channel in ear.channels.values():
            channel.ear = None
        # Looking for one of them tells whether the map has changed for all.
        for channel in list(ear.channels.values())[:1]:
            channel.is_astray = True
        self._miss(ear.channels.values())

    def _miss(self, channels: Iterable[Channel], *, pause_s: float | None = None) -> None:
        """They are not heard. Once that is likely to last, nobody is made to wait for it."""
        for channel in channels:
            channel.is_heard = False
            channel.tries += 1
            if pause_s is not None or channel.tries > 1:
                channel.answer()
                wait_s = min(FIRST_PAUSE_S * 2 ** min(channel.tries, 10), MOST_PAUSE_S)
                wait_s *= random.uniform(0.5, 1.0)  # noqa: S311 - nobody gains by guessing it
                channel.due = self._loop.time() + max(wait_s, pause_s or 0.0)
        self._tend()

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "semel: Redis does not let this user subscribe, so readers are late: %s. Let it "
                "subscribe: ACL SETUSER <user> &semel:* +subscribe +unsubscribe (on a cluster "
                "+ssubscribe +sunsubscribe)",
                error,
            )

    # --- looking after channels -------------------------------------------------------------

    def _tend(self) -> None:
        """See to it that every channel is asked for somewhere."""
        self._wanted.set()
        if (self._task is None or self._task.done()) and not self._is_closed:
            self._task = self._loop.create_task(self._tending())
            self._task.add_done_callback(_tended)

    async def _tending(self) -> None:
        while True:
            self._wanted.clear()
            await self._put_away()
            missing = [c for c in self._channels.values() if c.ear is None]
            if not missing:
                return
            now = self._loop.time()
            if ready := [channel for channel in missing if channel.due <= now]:
                await self._seek(ready)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(min(channel.due for channel in missing)):
                        await self._wanted.wait()

    async def _put_away(self) -> None:
        while self._worn:
            with contextlib.suppress(*FAILED):
                await self._worn.pop().close()

    async def _seek(self, channels: Sequence[Channel]) -> None:
        """Ask for each of them where it is."""
        homes: dict[str, list[Channel]] = {}
        missed: list[Channel] = []
        for channel in channels:
            try:
                if missed and channel.is_astray:
                    missed.append(channel)  # nobody knows where anything is, just now
                else:
                    homes.setdefault(await self._home(channel), []).append(channel)
            except FAILED:
                missed.append(channel)
        await asyncio.gather(*(self._ask(name, found) for name, found in homes.items()))
        if missed:
            self._miss(missed, pause_s=FIRST_PAUSE_S)

    async def _home(self, channel: Channel) -> str:
        """The name of the server that has it."""
        if not self._line.is_cluster:
            return ""
        try:
            if not channel.is_astray:
                return str(self._line.server_of(channel.name).name)
        except SlotNotCoveredError:
            pass  # nobody has asked this cluster for anything yet
        await self._line.find(channel.name)
        channel.is_astray = False
        return str(self._line.server_of(channel.name).name)

    async def _ask(self, server: str, channels: Sequence[Channel]) -> None:
        ear = self._ears.get(server)
        try:
            if ear is None:
                ear = self._ears[server] = await self._open(channels[0])
        except FAILED:
            channels[0].is_astray = True
            self._miss(channels, pause_s=FIRST_PAUSE_S)
            return
        for channel in channels:
            if self._channels.get(channel.name) is channel:
                ear.ask(channel)

    async def _open(self, channel: Channel) -> Ear:
        server: Any = self._line.server_of(channel.name)
        if self._line.is_cluster:
            connection = server.connection_class(**server.connection_kwargs)
        else:
            connection = server.connection_pool.make_connection()
        try:
            async with asyncio.timeout(self._timeout_s):
                await make_ready(connection)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._tick)
        return Ear(self, connection, is_sharded=self._line.is_cluster)

    def _tick(self) -> None:
        self._timer = None
        for ear in list(self._ears.values()):
            ear.tick()
        if self._ears:
            self._timer = self._loop.call_later(self._timeout_s, self._tick)


def _tended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("semel: the bell is deaf, and readers are late", exc_info=error)
