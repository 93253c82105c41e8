"""Turns that are not played in time, each timed out once, whoever is there to do it.

Until when a turn may be played is in the room's state. That somebody looks at the room then is the
business of a stream that all servers follow: a note says "look at this room at that time", and is
written before the turn begins. A note is a hint. One too many costs a look; one that comes too
early is followed by another. So a room whose turns are played has one note at a time, and not one
for each turn: it is looked at when the first of these turns would have ended, and noted again.

Whoever looks and finds a turn that is over sends the action `timeout:<turn>`, as everybody else
does who looks at the same time: the room's log takes one of them, and none if the turn was played.
Nobody needs to be alive at the time: who comes later reads what is noted, from the oldest on.

Notes that were looked at are trimmed.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import logging
import os
import random
from collections.abc import Awaitable, Callable

from semel.circuit import Circuit
from semel.colour import ASYNC
from semel.entries import Appended, Entry, Keep, Position
from semel.errors import StoreUnavailableError
from semel.feed import Feed
from semel.ports import Log
from semel.rooms.clock import StoreClock
from semel.rooms.everything import everything

__all__ = ["Timers"]

log = logging.getLogger("semel")

# A note that was looked at goes when all before it have gone. With more than this behind the
# oldest, that one is noted again at the end.
MOST_NOTES = 1000

# Trimming is a call for itself, and a note that is read twice only costs a look.
TRIM_EACH = 32

# Who has nobody of the room here looks a little later: most likely somebody else was first.
STRANGER_S = (0.1, 0.4)

# The longest pause between two looks at what is due: clocks are set, and processes are frozen.
NAP_S = 1.0

# A room that could not be looked at is looked at again after this.
AGAIN_S = 1.0

_KEEP = Keep(ids_s=0.0)


class Timers:
    """The notes of all rooms of one kind. `look` is called with a room's id when one is due.

    It gives back when the room is to be looked at next, None for never. `is_here` says whether
    somebody of the room is on this server.
    """

    def __init__(
        self,
        stream: str,
        log: Log,
        feed: Feed,
        clock: StoreClock,
        look: Callable[[str], Awaitable[float | None]],
        is_here: Callable[[str], bool],
    ) -> None:
        self._stream = stream
        self._log = log
        self._feed = feed
        self._clock = clock
        self._look = look
        self._is_here = is_here
        self._noted: dict[str, list[float]] = {}
        """By room: when somebody will look at it, as a heap."""
        self._due: list[tuple[float, int, str]] = []
        """All of it as a heap: when, which note, which room."""
        self._open: dict[int, Position] = {}
        """Notes that were not looked at, by offset."""
        self._done: dict[int, Position] = {}
        """Those that were, and are not trimmed."""
        self._read: Position | None = None
        """Up to here, all notes are known."""
        self._looking: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()
        self._circuit = Circuit("the log of deadlines")
        self._chance = random.Random()  # noqa: S311 - spreads looks, hides nothing

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow())
                group.create_task(self._watch())
        finally:
            for task in self._looking:
                task.cancel()

    # --- noting ---------------------------------------------------------------------------------

    def must_note(self, room_id: str, at_s: float) -> bool:
        """Is there no note yet by which the room is looked at at that time, or before?"""
        noted = self._noted.get(room_id, [])
        now_s = self._clock.now_s()
        while noted and noted[0] <= now_s:  # somebody looks now, and not when this turn is over
            heapq.heappop(noted)
        return not noted or noted[0] > at_s

    async def note(self, room_id: str, at_s: float) -> None:
        """When this returns, somebody will look at the room at that time, whoever dies."""
        data = json.dumps({"room": room_id, "at": at_s}).encode()
        answer = await self._log.append(self._stream, data, id=os.urandom(8).hex(), keep=_KEEP)
        assert isinstance(answer, Appended), "an id that nobody else has"
        self._add(room_id, at_s, answer.position)

    def _add(self, room_id: str, at_s: float, position: Position) -> None:
        if position.offset in self._open or position.offset in self._done:
            return  # our own, which we knew of before it came
        self._open[position.offset] = position
        heapq.heappush(self._noted.setdefault(room_id, []), at_s)
        heapq.heappush(self._due, (at_s, position.offset, room_id))
        self._woken.set()

    # --- following ------------------------------------------------------------------------------

    async def _follow(self) -> None:
        async for entries in everything(self._feed, self._stream, self._circuit):
            if entries is None:
                self._forget()
                continue
            for entry in entries:
                self._hear(entry)
                self._read = entry.position

    def _forget(self) -> None:
        self._noted.clear()
        self._due.clear()
        self._open.clear()
        self._done.clear()
        self._read = None

    def _hear(self, entry: Entry) -> None:
        try:
            note = json.loads(entry.data)
            self._add(str(note["room"]), float(note["at"]), entry.position)
        except (ValueError, KeyError, TypeError):
            log.error("semel: %s of %r is no note of ours", entry.position, self._stream)  # noqa: TRY400
            self._done[entry.position.offset] = entry.position

    # --- looking --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            self._woken.clear()
            with contextlib.suppress(StoreUnavailableError):
                await self._clock.learn()
            if self._clock.is_known:  # else a turn might be timed out that is not over
                self._begin_looks()
            with contextlib.suppress(StoreUnavailableError):
                await self._renew_oldest()
                await self._trim()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._woken.wait()

    def _pause_s(self) -> float:
        if not self._due or not self._clock.is_known:
            return NAP_S
        return min(NAP_S, max(0.0, self._due[0][0] - self._clock.now_s()))

    def _begin_looks(self) -> None:
        now_s = self._clock.now_s()
        while self._due and self._due[0][0] <= now_s:
            at_s, offset, room_id = heapq.heappop(self._due)
            # Not before it is looked at: a turn that begins meanwhile is noted anew, for what is
            # found here may be older than that.
            self._drop(room_id, at_s)
            task = asyncio.ensure_future(self._looked(room_id, offset))
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)

    def _drop(self, room_id: str, at_s: float) -> None:
        noted = self._noted.get(room_id, [])
        if at_s in noted:
            noted.remove(at_s)
            heapq.heapify(noted)
        if not noted:
            self._noted.pop(room_id, None)

    async def _looked(self, room_id: str, offset: int) -> None:
        """Look until it could be done: what is noted is not forgotten before."""
        position = self._open.get(offset)
        if not self._is_here(room_id):
            await ASYNC.sleep(self._chance.uniform(*STRANGER_S))
        while not await self._settled(room_id):
            await ASYNC.sleep(AGAIN_S * (0.5 + self._chance.random()))
        if position is not None and self._open.get(offset) is position:
            del self._open[offset]
            self._done[offset] = position

    async def _settled(self, room_id: str) -> bool:
        try:
            at_s = await self._look(room_id)
            if at_s is not None and self.must_note(room_id, at_s):
                await self.note(room_id, at_s)
        except StoreUnavailableError:
            return False
        except Exception:
            log.exception("semel: nobody can tell whether a turn of room %r is over", room_id)
            return False
        return True

    async def _renew_oldest(self) -> None:
        """A note that is due in a day keeps all that came after it."""
        if self._read is None or not self._open:
            return
        oldest = min(self._open)
        if self._read.offset - oldest < MOST_NOTES:
            return
        found = next((each for each in self._due if each[1] == oldest), None)
        if found is not None:
            at_s, offset, room_id = found
            await self.note(room_id, at_s)
            self._due.remove(found)
            heapq.heapify(self._due)
            self._drop(room_id, at_s)
            self._done[offset] = self._open.pop(offset)

    async def _trim(self) -> None:
        """What was looked at, up to the first that was not, or is not known."""
        if self._read is None:
            return
        upto = min(self._open, default=self._read.offset + 1)
        gone = [offset for offset in self._done if offset < upto and offset <= self._read.offset]
        if len(gone) >= TRIM_EACH or (gone and not self._open):
            await self._log.trim(self._stream, self._done[max(gone)])
            for offset in gone:
                del self._done[offset]
