"""What happens in the rooms that a connection has joined, as it is written to it.

A seat is a position in its room's log, and what is written is what follows it. While the client
takes what it is sent, that is done at once, by whoever has read it from the log; else by the
connection's own task, which can wait.

Whoever writes waits for the client, and never for the log: one room of which that does not answer
is not to keep the others, and what was asked, from a client.

The easy mistake is to write to a seat that has ended while something was waited for: what is shown
to one user is not to be seen by the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from semel.colour import keep
from semel.entries import Position
from semel.errors import CorruptRecordError, StoreUnavailableError
from semel.feed import Reset, Subscription
from semel.feed.values import Burst
from semel.http.ws.seat import Found, Seat, Seats
from semel.http.ws.voice import Voice
from semel.rooms import messages
from semel.rooms.standing import Standing

if TYPE_CHECKING:
    from semel.http.ws.door import House

__all__ = ["Showing"]

log = logging.getLogger("semel")


class Showing:
    """`wake` calls whoever shows what cannot be shown at once."""

    def __init__(
        self, house: House, seats: Seats, voice: Voice, wake: Callable[[], object]
    ) -> None:
        self._house = house
        self._seats = seats
        self._voice = voice
        self._wake = wake
        self._view_version = house.rooms.room.view_version

    def poke(self, seat: Seat) -> bool:
        """There is something in its room."""
        if not self._is_shown_at_once(seat):
            seat.following.ask_again()
            seat.is_ready = True
            self._wake()
        return True

    def _is_shown_at_once(self, seat: Seat) -> bool:
        """Write what has come, without waking anybody. Was that all?"""
        if not self._voice.is_free or seat.has_before:
            return False
        following = seat.following
        before, burst = following.position, following.take_entries()
        if burst is None:
            return False
        try:
            texts = messages.for_all(burst.entries, seat.user, self._view_version)
        except Exception:  # noqa: BLE001 - who writes finds out, and sees to it; others are told
            following.position = before
            return False
        for text in texts:
            self._voice.write(text)
        self._house.counts.updates += len(burst.entries)
        return following.is_at_head

    async def show(self, seat: Seat) -> bool:
        """Write what has come. May there be more?"""
        if seat.is_asking:
            return False  # it is woken when there is an answer
        try:
            return await self._shown(seat)
        except CorruptRecordError as error:
            log.error("semel: room %r cannot be shown: %s", seat.room_id, error)  # noqa: TRY400
            self._ask(seat, self._standing(seat))
        except StoreUnavailableError:
            seat.is_stuck = True
        return False

    async def _shown(self, seat: Seat) -> bool:
        following = seat.following
        before, news = seat.found or (following.position, following.take())
        seat.found = None
        match news:
            case Exception():
                raise news
            case Burst():
                try:
                    texts = messages.for_all(news.entries, seat.user, self._view_version)
                except CorruptRecordError:
                    following.position = before  # nothing of it was told
                    raise
                for text in texts:
                    if not self._seats.has(seat):
                        return False  # the client took its time, and may not see this any more
                    await self._voice.say(text)
                self._house.counts.updates += len(news.entries)
                return not following.is_at_head
            case Reset():
                standing = Standing.of(self._house.rooms.room, seat.room_id, news.snapshot)
                self._house.reset(seat.room_id, standing, news.reason)
                await self._say_standing(seat, standing, news.reason)
                return True
            case Standing():
                seat.go_on_from(self._house.rooms, news.position)
                await self._say_standing(seat, news, "unreadable")
                return True
        if following.needs_log:
            self._ask(seat, following.fetch())
        return False

    async def _say_standing(self, seat: Seat, standing: Standing, reason: str) -> None:
        for text in messages.whole(seat.room_id, standing, seat.user, reason):
            if not self._seats.has(seat):
                return
            await self._voice.say(text)
        self._house.counts.snapshots[reason] += 1

    # --- what has to be asked for ---------------------------------------------------------------

    def _ask(self, seat: Seat, work: Coroutine[Any, Any, Found]) -> None:
        seat.is_asking = True
        # As of now: when the work begins, it may be told how things stand, and go on from there.
        following, before = seat.following, seat.following.position
        keep(asyncio.ensure_future(self._answered(seat, work, following, before)))

    async def _answered(
        self,
        seat: Seat,
        work: Coroutine[Any, Any, Found],
        following: Subscription,
        before: Position,
    ) -> None:
        found: Found
        try:
            found = await work
        except Exception as error:  # noqa: BLE001 - raised by whoever shows it
            found = error
        seat.is_asking = False
        if following is seat.following:  # else it was told meanwhile how things stand
            seat.found = None if found is None else (before, found)
        seat.is_ready = True
        self._wake()

    async def _standing(self, seat: Seat) -> Standing:
        """Past what cannot be read: how things stand is known all the same."""
        try:
            seen = seat.following.position.offset
            return await self._house.rooms.standing(seat.room_id, seen=seen)
        except CorruptRecordError as error:
            raise _UnreadableError(str(error)) from error  # no way leads past that


class _UnreadableError(Exception):
    """Whoever comes back is told that this room cannot be shown, and has the others."""
