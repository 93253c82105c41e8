"""Who is in a room, on whichever server.

Each server says in a stream beside the room's who is there through it, when that changes and every
half minute; and forgets another that has said nothing for longer. That is not the room's state: it
takes no version, and a server that dies takes its people with it a minute later.

Those who only watch are counted, and not named.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence

from semel.circuit import Circuit
from semel.colour import ASYNC
from semel.entries import Entry, Keep
from semel.errors import SemelError
from semel.feed import Feed
from semel.ports import Log
from semel.rooms.clock import StoreClock
from semel.rooms.everything import everything
from semel.values import value

__all__ = ["Here", "Presence"]

log = logging.getLogger("semel")

# Many come at once after a restart: they are told of together, to all who are here, and to other
# servers. A room of a thousand in which each hears of each would have a million messages.
GATHER_S = 0.05
TELL_EACH_S = 0.5

AGAIN_S = 30.0
GONE_S = 75.0

_KEEP = Keep(entries=256, ids_s=0.0, idle_s=600.0)


@value
class Here:
    """Who is in a room: the users by name, in the order of the alphabet, and how many watch."""

    users: tuple[str, ...] = ()
    spectators: int = 0


@value
class _Word:
    """What a server has said, and when, by the store's clock."""

    users: tuple[str, ...]
    spectators: int
    at_s: float


class _Room:
    """One room, seen from this server."""

    def __init__(self) -> None:
        self.users: Counter[str] = Counter()
        self.spectators = 0
        self.others: dict[str, _Word] = {}
        self.told: Here | None = None
        self.told_at = -TELL_EACH_S
        self.said_at = 0.0
        self.is_changed = False
        self.following: asyncio.Task[None] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.users and not self.spectators

    def here(self, now_s: float) -> Here:
        others = [word for word in self.others.values() if word.at_s > now_s - GONE_S]
        users = set(self.users).union(*(word.users for word in others))
        return Here(tuple(sorted(users)), self.spectators + sum(w.spectators for w in others))


class Presence:
    """Of all rooms of one kind, as far as somebody of them is here. `tell` is told of changes."""

    def __init__(
        self,
        stream_of: Callable[[str], str],
        log: Log,
        feed: Feed,
        clock: StoreClock,
        tell: Callable[[str, Here], None],
    ) -> None:
        self._stream_of = stream_of
        self._log = log
        self._feed = feed
        self._clock = clock
        self._tell = tell
        self._name = os.urandom(6).hex()
        self._rooms: dict[str, _Room] = {}
        self._woken = asyncio.Event()
        self._circuit = Circuit("the log of who is where")

    def enter(self, room_id: str, user: str | None) -> None:
        room = self._rooms.setdefault(room_id, _Room())
        if user is None:
            room.spectators += 1
        else:
            room.users[user] += 1
        if room.following is None:
            room.following = asyncio.ensure_future(self._follow(room_id, room))
        self._changed(room_id, room)

    def leave(self, room_id: str, user: str | None) -> None:
        room = self._rooms[room_id]
        if user is None:
            room.spectators -= 1
        else:
            room.users[user] -= 1
            room.users += Counter()  # without those of whom nobody is left
        self._changed(room_id, room)

    def here(self, room_id: str) -> Here:
        room = self._rooms.get(room_id)
        return Here() if room is None else room.here(self._clock.now_s())

    def _changed(self, room_id: str, room: _Room) -> None:
        room.is_changed = True
        self._woken.set()

    def _tell_of(self, room_id: str, room: _Room) -> None:
        now = ASYNC.now()
        here = room.here(self._clock.now_s())
        if here != room.told and now - room.told_at >= TELL_EACH_S:
            room.told, room.told_at = here, now
            self._tell(room_id, here)

    # --- saying it ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                try:
                    async with asyncio.timeout(TELL_EACH_S):
                        await self._woken.wait()
                    await ASYNC.sleep(GATHER_S)
                except TimeoutError:
                    pass
                self._woken.clear()
                await self._say_all()
        finally:
            for room in self._rooms.values():
                if room.following is not None:
                    room.following.cancel()

    async def _say_all(self) -> None:
        now = ASYNC.now()
        for room_id, room in list(self._rooms.items()):
            if room.is_changed or (now - room.said_at >= AGAIN_S and not room.is_empty):
                await self._say(room_id, room)
            self._tell_of(room_id, room)  # somebody may be gone without a word
            if room.is_empty and not room.is_changed:
                self._let_go(room_id, room)

    async def say_last(self) -> None:
        """Who was here until now has left: other servers need not wait until we are forgotten."""
        for room_id, room in list(self._rooms.items()):
            if room.is_changed:
                await self._say(room_id, room)

    async def _say(self, room_id: str, room: _Room) -> None:
        room.is_changed = False
        room.said_at = ASYNC.now()
        word = {
            "server": self._name,
            "users": sorted(room.users),
            "spectators": room.spectators,
            "at": self._clock.now_s(),
        }
        data = json.dumps(word).encode()
        try:
            await self._log.append(
                self._stream_of(room_id), data, id=os.urandom(8).hex(), keep=_KEEP
            )
        except SemelError:
            room.is_changed = True  # said again as soon as it can be
        except asyncio.CancelledError:
            room.is_changed = True  # which is the last thing that is said
            raise

    def _let_go(self, room_id: str, room: _Room) -> None:
        del self._rooms[room_id]
        if room.following is not None:
            room.following.cancel()

    # --- hearing of others ----------------------------------------------------------------------

    async def _follow(self, room_id: str, room: _Room) -> None:
        async for entries in everything(self._feed, self._stream_of(room_id), self._circuit):
            if entries is None:
                room.others.clear()
            else:
                self._heard(room, entries)
                self._woken.set()

    def _heard(self, room: _Room, entries: Sequence[Entry]) -> None:
        for entry in entries:
            try:
                word = json.loads(entry.data)
                server = str(word["server"])
                said = _Word(tuple(word["users"]), int(word["spectators"]), entry.at_us / 1e6)
            except (ValueError, KeyError, TypeError):
                continue  # nobody's business but theirs
            if server == self._name:
                continue
            room.others.pop(server, None)
            if said.users or said.spectators:
                room.others[server] = said
