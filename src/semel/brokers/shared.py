"""One connection for all who ask, opened when there is none.

Whoever comes while it is being opened waits for the same opening: of a server that is silent, all
hear at once, and not one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from semel.errors import SettingsError

__all__ = ["Shared", "check_driver"]


class Connection(Protocol):
    """What can be shared. It belongs to one event loop."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def ended(self) -> bool: ...

    async def end(self, *, cut: bool = False) -> None:
        """Close it; with `cut`, without a word."""
        ...


C = TypeVar("C", bound=Connection)


class Shared(Generic[C]):
    """The connection there is, or the next one."""

    def __init__(self, opens: Callable[[], Coroutine[Any, Any, C]]) -> None:
        self._opens = opens
        self._there: C | None = None
        self._opening: asyncio.Task[C] | None = None

    async def get(self) -> C:
        """Raises what the opening raises."""
        here = asyncio.get_running_loop()
        if self._there is not None and not self._there.ended and self._there.loop is here:
            return self._there
        if self._opening is None or self._opening.get_loop() is not here:
            self._opening = here.create_task(self._opens())
        opening = self._opening
        await asyncio.wait([opening])
        if self._opening is opening:
            self._opening = None
        if opening.cancelled():
            raise ConnectionError("the broker was closed while it was connecting")
        self._there = opening.result()
        return self._there

    async def aclose(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None and not opening.done():
            opening.cancel()
            await asyncio.wait([opening])
        there, self._there = self._there, None
        if there is not None and there.loop is asyncio.get_running_loop():
            await there.end()


def check_driver(broker: str, name: str, version: str, oldest: tuple[int, int], extra: str) -> None:
    """Refuse a driver with a defect that no care of ours makes up for."""
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < oldest:
        raise SettingsError(
            f"{broker} needs {name} {oldest[0]}.{oldest[1]} or later and found {version}: "
            f"pip install --upgrade 'semel[{extra}]'"
        )
