"""The bell of a SQLite file: rings at once for this process, and soon for the others.

Nobody is told when another process commits. But SQLite knows cheaply whether anybody has, and the
file counts its appends: one look now and then, as long as somebody listens, finds the streams that
got something, however many are listened to.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from semel.errors import StoreUnavailableError
from semel.stores.bells import LocalBell, Tower, Wake
from semel.stores.sqlite.connections import Connections
from semel.stores.sqlite.streams import Streams

# How late another process's append is heard, at most. A look at nothing new costs some 20 us.
LOOK_S: Final = 0.03


class Watch:
    """Tells what other processes, or other stores of this one, have appended since the last look.

    A connection's `data_version` changes when another connection commits, so it is compared with
    what that same connection said before.
    """

    def __init__(self, connections: Connections, streams: Streams) -> None:
        self._connections = connections
        self._streams = streams
        self._versions: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._serial: int | None = None
        with contextlib.suppress(StoreUnavailableError):
            self._serial = streams.serial()

    def glance(self) -> bool:
        """Has anybody committed anything? Looks at the shared memory of the file, and no further.

        True as well for a file that cannot be looked at: `look` says so.
        """
        try:
            who, version = self._connections.data_version()
        except StoreUnavailableError:
            return True
        if self._serial is not None and self._versions.get(who) == version:
            return False
        self._versions[who] = version
        return True

    def look(self) -> Sequence[str] | None:
        """The streams; None when it may be any."""
        since, self._serial = self._serial, None
        if since is None:
            self._serial = self._streams.serial()
            return None
        self._serial, changed = self._streams.changed(since)
        return changed


class SQLiteBell(LocalBell):
    """Rings for what any process appends to the file."""

    def __init__(self, tower: Tower, watch: Watch, call: Callable[..., Awaitable[Any]]) -> None:
        super().__init__(tower)
        self._watch = watch
        self._call = call
        self._looking: asyncio.Task[None] | None = None

    async def listen(self, stream: str, wake: Wake) -> None:
        await super().listen(stream, wake)
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look_now_and_then())

    async def _look_now_and_then(self) -> None:
        while len(self.listeners):
            await asyncio.sleep(LOOK_S)
            # Deaf: it goes on trying, and wakes everybody when it hears again.
            with contextlib.suppress(StoreUnavailableError):
                if self._watch.glance():
                    self._tell(await self._call(self._watch.look))
        self._looking = None

    def _tell(self, changed: Sequence[str] | None) -> None:
        if changed is None:
            self.listeners.ring_all()
            return
        for stream in changed:
            self.listeners.ring(stream)

    async def aclose(self) -> None:
        await super().aclose()
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
            await asyncio.wait([looking])
