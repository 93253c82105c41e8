"""Who is in a room, on whichever server.

Each server says in a stream beside the room's who is there through it, when that changes and every
half minute; and forgets another that has said nothing for longer. That is not the room's state: it
takes no version, and a server that dies takes its people with it a minute later.

Spectators are counted, not named. They never cause a write: an anonymous client must not be able to
fill the store. A server adds its number of spectators to what it writes about its users.

A room exists from its first accepted action on. About any other room, nothing is written or read.

The easy mistake is to await the store for one room where others wait behind it: one whose stream
does not answer would keep all of them from being told.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence

from semel.circuit import Circuit
from semel.colour import ASYNC, keep
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

# What is said again is so a little sooner: rooms to which people came together part.
AGAIN_JITTER = 0.3

# What could not be said is said again after so long, more or less: all rooms have to.
FAILED_S = 2.0

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
        self.exists = False
        """Whether this server has seen an accepted action in the room."""
        self.is_changed = False
        """Whether a user has come or gone since the users were last written."""
        self.again_at = 0.0
        """When it is said although nothing has changed."""
        self.rests_until = 0.0
        """It could not be said."""
        self.saying: asyncio.Task[None] | None = None
        self.following: asyncio.Task[None] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.users and not self.spectators

    @property
    def is_being_said(self) -> bool:
        return self.saying is not None and not self.saying.done()

    @property
    def is_unsaid(self) -> bool:
        return self.exists and self.is_changed

    def is_due(self, now: float) -> bool:
        if self.is_being_said or now < self.rests_until:
            return False
        return self.is_unsaid or (self.exists and bool(self.users) and now >= self.again_at)

    def here(self, now_s: float) -> Here:
        others = [word for word in self.others.values() if word.at_s > now_s - GONE_S]
        users = set(self.users).union(*(word.users for word in others))
        return Here(tuple(sorted(users)), self.spectators + sum(w.spectators for w in others))


class Presence:
    """The presence in those rooms of one kind that have members on this server.

    `tell` is called with changes. `exists` returns whether a room has an accepted action.
    """

    def __init__(
        self,
        stream_of: Callable[[str], str],
        exists: Callable[[str], bool],
        log: Log,
        feed: Feed,
        clock: StoreClock,
        tell: Callable[[str, Here], None],
    ) -> None:
        self._stream_of = stream_of
        self._exists = exists
        self._log = log
        self._feed = feed
        self._clock = clock
        self._tell = tell
        self._name = os.urandom(6).hex()
        self._rooms: dict[str, _Room] = {}
        self._woken = asyncio.Event()
        self._circuit = Circuit("the log of who is where")
        self._random = random.Random()  # noqa: S311 - spreads what is said, hides nothing

    def enter(self, room_id: str, user: str | None) -> None:
        room = self._rooms.setdefault(room_id, _Room())
        if user is None:
            room.spectators += 1
        else:
            room.users[user] += 1
            room.is_changed |= room.users[user] == 1
        self._woken.set()

    def leave(self, room_id: str, user: str | None) -> None:
        room = self._rooms[room_id]
        if user is None:
            room.spectators -= 1
        else:
            room.users[user] -= 1
            room.is_changed |= not room.users[user]
            room.users += Counter()  # without those of whom nobody is left
        self._woken.set()

    def here(self, room_id: str) -> Here:
        room = self._rooms.get(room_id)
        return Here() if room is None else room.here(self._clock.now_s())

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
                self._look()
        finally:
            await self._stop()

    def _look(self) -> None:
        now = ASYNC.now()
        for room_id, room in list(self._rooms.items()):
            room.exists = room.exists or self._exists(room_id)
            if room.exists and room.following is None:
                room.following = asyncio.ensure_future(self._follow(room_id, room))
            self._tell_of(room_id, room)  # somebody may be gone without a word
            if room.is_due(now):
                self._begin_to_say(room_id, room)
            elif room.is_empty and not room.is_unsaid and not room.is_being_said:
                self._let_go(room_id, room)

    async def _stop(self) -> None:
        rooms = self._rooms.values()
        tasks = [task for room in rooms for task in (room.saying, room.following) if task]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def say_last(self) -> None:
        """Who was here until now has left: other servers need not wait until we are forgotten.

        A room that does not answer is waited for until this is cancelled.
        """
        changed = [each for each in self._rooms.items() if each[1].is_unsaid]
        last = [self._begin_to_say(room_id, room) for room_id, room in changed]
        await asyncio.gather(*last, return_exceptions=True)

    def _begin_to_say(self, room_id: str, room: _Room) -> asyncio.Task[None]:
        room.saying = asyncio.ensure_future(self._say(room_id, room))
        keep(room.saying)
        return room.saying

    async def _say(self, room_id: str, room: _Room) -> None:
        room.is_changed = False
        room.again_at = ASYNC.now() + AGAIN_S * (1 - AGAIN_JITTER * self._random.random())
        word = {
            "server": self._name,
            "users": sorted(room.users),
            # Without users, this server writes nothing more, and the number would become outdated.
            "spectators": room.spectators if room.users else 0,
            "at": self._clock.now_s(),
        }
        data = json.dumps(word).encode()
        try:
            await self._log.append(
                self._stream_of(room_id), data, id=os.urandom(8).hex(), keep=_KEEP
            )
        except SemelError:
            room.is_changed = True  # said again as soon as it can be
            room.rests_until = ASYNC.now() + FAILED_S * (0.5 + self._random.random())
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
