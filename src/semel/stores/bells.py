"""The bell of logs that nobody but this process writes, and the list of who listens.

`Listeners` is what every bell has inside: who is to be woken for which stream. `LocalBell` rings
for what this process appends. The other bells hear of other processes as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from weakref import WeakSet

from semel.colour import after_fork

log = logging.getLogger("semel")

Wake = Callable[[], None]


class Listeners:
    """Who listens to which stream, on one event loop."""

    def __init__(self) -> None:
        self._wakes: dict[str, list[Wake]] = {}

    def add(self, stream: str, wake: Wake) -> bool:
        """Is this the first one for the stream?"""
        wakes = self._wakes.setdefault(stream, [])
        wakes.append(wake)
        return len(wakes) == 1

    def remove(self, stream: str, wake: Wake) -> bool:
        """Was this the last one for the stream?"""
        wakes = self._wakes.get(stream, [])
        with contextlib.suppress(ValueError):
            wakes.remove(wake)
        if not wakes:
            return self._wakes.pop(stream, None) is not None
        return False

    def ring(self, stream: str) -> None:
        """Cannot fail: those who append or listen, too, have no part in a listener's fault."""
        for wake in tuple(self._wakes.get(stream, ())):
            try:
                wake()
            except Exception:
                log.exception("semel: a listener of %r failed when it was woken", stream)

    def ring_all(self) -> None:
        """For a bell that was deaf: anything may have happened."""
        for stream in tuple(self._wakes):
            self.ring(stream)

    @property
    def streams(self) -> list[str]:
        return list(self._wakes)

    def __contains__(self, stream: str) -> bool:
        return stream in self._wakes

    def __len__(self) -> int:
        return len(self._wakes)


class Tower:
    """Where the appends of this process are told to all its bells for one store."""

    def __init__(self) -> None:
        self._reset()
        _TOWERS.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._bells: dict[LocalBell, None] = {}

    def add(self, bell: LocalBell) -> None:
        with self._lock:
            self._bells[bell] = None

    def remove(self, bell: LocalBell) -> None:
        with self._lock:
            self._bells.pop(bell, None)

    def ring(self, stream: str) -> None:
        """Costs nothing where nobody listens."""
        if self._bells:
            for bell in self._heard():
                bell.ring(stream)

    def _heard(self) -> Iterator[LocalBell]:
        with self._lock:
            bells = list(self._bells)
        yield from bells


class LocalBell:
    """Rings for what this process appends."""

    def __init__(self, tower: Tower) -> None:
        self.listeners = Listeners()
        self._tower = tower
        self._loop = asyncio.get_running_loop()
        tower.add(self)

    async def listen(self, stream: str, wake: Wake) -> None:
        self.listeners.add(stream, wake)

    async def leave(self, stream: str, wake: Wake) -> None:
        self.listeners.remove(stream, wake)

    async def aclose(self) -> None:
        self._tower.remove(self)

    def ring(self, stream: str) -> None:
        """From any thread."""
        if stream not in self.listeners:
            return
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            self.listeners.ring(stream)
        else:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens there
                self._loop.call_soon_threadsafe(self.listeners.ring, stream)


_TOWERS: WeakSet[Tower] = WeakSet()


def _after_fork() -> None:
    """Those who listen are in the parent."""
    for tower in _TOWERS:
        tower._reset()  # noqa: SLF001 - one module


after_fork(_after_fork)
