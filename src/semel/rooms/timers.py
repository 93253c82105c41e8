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
from semel.entries import Appended, Entry, Keep, Position, Repeated
from semel.errors import SemelError, StoreUnavailableError
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

# A look that is due so soon may be over before a turn has begun that would count on it: an append
# takes its time, and no two servers have quite the same. Whoever finds a turn that ends so soon
# stays until then: a note for it would be looked at by all, and each would write another one.
SURE_S = 1.0

# The longest pause between two looks at what is due: clocks are set, and processes are frozen.
NAP_S = 1.0

# A room that could not be looked at is looked at again after this.
AGAIN_S = 1.0

# One whose rules fail is noted anew, for after this: the note that it has would keep all behind it.
FAILED_S = 5.0

# So is one that has been away for so long, on a node of its own, while notes can be written.
AWAY_S = 30.0

_KEEP = Keep(ids_s=0.0)


class _Look:
    """A room that is being looked at, and the notes of it that have become due meanwhile."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.notes: list[Position] = []
        self.asked = asyncio.Event()
        self.away_since: float | None = None


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
        """By room: when somebody will look at it."""
        self._before: dict[str, list[float]] = {}
        """The same, as it was known before all of it is read anew."""
        self._due: list[tuple[float, int, str]] = []
        """All of it as a heap: when, which note, which room."""
        self._open: dict[int, Position] = {}
        """Notes that were not looked at, by offset."""
        self._done: dict[int, Position] = {}
        """Those that were, and are not trimmed."""
        self._read: Position | None = None
        """Up to here, all notes are known."""
        self._looks: dict[str, _Look] = {}
        """By room. One at a time: two would find the same, and both note what comes next."""
        self._is_running = self._is_stopped = False
        self._woken = asyncio.Event()
        self._circuit = Circuit("the log of deadlines")
        self._chance = random.Random()  # noqa: S311 - spreads looks, hides nothing

    async def run(self) -> None:
        """Until it is cancelled."""
        self._is_running = True
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow())
                group.create_task(self._watch())
        finally:
            self.stop()

    def stop(self) -> None:
        self._is_stopped = True
        for look in self._looks.values():
            look.task.cancel()

    async def stopped(self) -> None:
        """When this returns, nobody looks any more, whatever is still on its way."""
        self.stop()
        await asyncio.gather(*(look.task for look in self._looks.values()), return_exceptions=True)

    # --- noting ---------------------------------------------------------------------------------

    def must_note(self, room_id: str, at_s: float) -> bool:
        """Is there no note yet by which the room is looked at at that time, or before?"""
        now_s = self._clock.now_s()
        noted = [each for each in self._noted.get(room_id, ()) if each > now_s]
        if noted:
            self._noted[room_id] = noted
        else:
            self._noted.pop(room_id, None)
        return not any(now_s + SURE_S < each <= at_s for each in noted)

    async def note(self, room_id: str, at_s: float) -> None:
        """When this returns, somebody will look at the room at that time, whoever dies."""
        data = json.dumps({"room": room_id, "at": at_s}).encode()
        answer = await self._log.append(self._stream, data, id=os.urandom(8).hex(), keep=_KEEP)
        # Repeated, where the first answer was lost on the way.
        assert isinstance(answer, Appended | Repeated), "an id that nobody else has"
        self._add(room_id, at_s, answer.position)

    def _add(self, room_id: str, at_s: float, position: Position) -> None:
        offset = position.offset
        if position in (self._open.get(offset), self._done.get(offset)):
            return  # our own, which we knew of before it came
        self._noted.setdefault(room_id, []).append(at_s)
        if not self._is_running:  # others look, and who begins to reads all that is noted
            while len(self._noted) > MOST_NOTES:  # one that is not known is noted once more
                del self._noted[next(iter(self._noted))]
        else:
            self._open[offset] = position  # and not what a failover took back from there
            heapq.heappush(self._due, (at_s, offset, room_id))
            self._woken.set()

    # --- following ------------------------------------------------------------------------------

    async def _follow(self) -> None:
        async for entries in everything(self._feed, self._stream, self._circuit):
            if entries is None:
                self._forget()
            elif not entries:
                self._look_after_lost()
            for entry in entries or ():
                self._hear(entry)
                self._read = entry.position

    def _look_after_lost(self) -> None:
        """A failover may have taken back a note, and a turn that counts on it is still there."""
        before, self._before = self._before, {}
        for room_id, noted in before.items():
            if not set(noted).issubset(self._noted.get(room_id, ())):
                self._begin_look(room_id, None)

    def _forget(self) -> None:
        for room_id, noted in self._noted.items():
            self._before.setdefault(room_id, []).extend(noted)
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
            with contextlib.suppress(SemelError):  # who follows tells of it
                await self._clock.learn()
            if self._clock.is_known:  # else a turn might be timed out that is not over
                self._begin_looks()
            with contextlib.suppress(SemelError):
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
            self._begin_look(room_id, self._open.get(offset))

    def look_soon(self, room_id: str) -> asyncio.Future[None]:
        """A turn has begun, and the note that it counts on may be looked at already."""
        return self._begin_look(room_id, None)

    def _begin_look(self, room_id: str, note: Position | None) -> asyncio.Future[None]:
        if self._is_stopped:
            nobody: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            nobody.set_result(None)
            return nobody
        look = self._looks.get(room_id)
        if look is None:
            look = self._looks[room_id] = _Look()
            look.task = asyncio.ensure_future(self._looked(room_id, look))
        if note is not None:
            look.notes.append(note)
        # What is found just now may be older than what this one is about: once more.
        look.asked.set()
        return look.task

    def _drop(self, room_id: str, at_s: float) -> None:
        noted = self._noted.get(room_id, [])
        if at_s in noted:
            noted.remove(at_s)
        if not noted:
            self._noted.pop(room_id, None)

    async def _looked(self, room_id: str, look: _Look) -> None:
        """Look until it could be done: what is noted is not forgotten before."""
        try:
            if not self._is_here(room_id):
                await ASYNC.sleep(self._chance.uniform(*STRANGER_S))
            await self._stay(room_id, look)
        finally:
            del self._looks[room_id]  # at once: whoever asks from now on begins anew

    async def _stay(self, room_id: str, look: _Look) -> None:
        held: list[Position] = []
        again_s: float | None = 0.0
        while again_s is not None or look.asked.is_set():
            look.asked.clear()
            if look.notes:
                # One that is kept is enough. Who stays with one short turn after another would
                # keep all of them.
                self._are_done(held)
                held, look.notes = look.notes, []
            again_s = await self._settled(room_id, look)
            if again_s is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(again_s):
                        await look.asked.wait()
        self._are_done(held)

    def _are_done(self, notes: list[Position]) -> None:
        for note in notes:
            if self._open.get(note.offset) is note:
                self._done[note.offset] = self._open.pop(note.offset)

    async def _settled(self, room_id: str, look: _Look) -> float | None:
        """None when it is; else, in how many seconds it is to be looked at again."""
        try:
            at_s = await self._next_look(room_id, look)
            if at_s is None:
                return None
            left_s = at_s - self._clock.now_s()
            if left_s <= SURE_S:
                return max(left_s, 0.0)
            if self.must_note(room_id, at_s):
                await self.note(room_id, at_s)
        except StoreUnavailableError:
            pass
        except Exception:
            log.exception("semel: room %r cannot be noted, and is looked at again", room_id)
        else:
            return None
        return AGAIN_S * (0.5 + self._chance.random())

    async def _next_look(self, room_id: str, look: _Look) -> float | None:
        try:
            at_s = await self._look(room_id)
        except StoreUnavailableError:
            if look.away_since is None:
                look.away_since = ASYNC.now()
            if ASYNC.now() - look.away_since < AWAY_S:
                raise
        except Exception:
            log.exception("semel: nobody can tell whether a turn of room %r is over", room_id)
        else:
            look.away_since = None
            return at_s
        return self._clock.now_s() + FAILED_S

    async def _renew_oldest(self) -> None:
        """A note that is due in a day keeps all that came after it."""
        if self._read is None or not self._open or len(self._done) < MOST_NOTES:
            return
        oldest = min(self._open)
        # Not those that are open, too: as many turns as there are have a note.
        if sum(offset > oldest for offset in self._done) < MOST_NOTES:
            return
        found = next((each for each in self._due if each[1] == oldest), None)
        if found is None:
            return
        at_s, offset, room_id = found
        # Others renew it as well. Who notes it again each time has more of them each time.
        if sum(noted <= at_s for noted in self._noted.get(room_id, ())) <= 1:
            await self.note(room_id, at_s)
        # Nothing has begun anew meanwhile, and nobody has looked at what was there before a
        # failover.
        if found in self._due and offset in self._open:
            self._due.remove(found)
            heapq.heapify(self._due)
            self._drop(room_id, at_s)
            self._done[offset] = self._open.pop(offset)

    async def _trim(self) -> None:
        """What was looked at, up to the first that was not, or is not known."""
        if self._read is None:
            return
        upto = min(self._open, default=self._read.offset + 1)
        last = min(upto - 1, self._read.offset)
        gone = {offset: position for offset, position in self._done.items() if offset <= last}
        if len(gone) >= TRIM_EACH or (gone and not self._open):
            await self._log.trim(self._stream, gone[max(gone)])
            for offset, position in gone.items():
                if self._done.get(offset) is position:  # nothing has begun anew meanwhile
                    del self._done[offset]
