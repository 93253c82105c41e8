"""One connection, from its first message to its last.

One task reads, and one writes. Who writes has no queue of what happens: a seat is a position in its
room's log, and what is written is what follows it. Only answers wait in a queue, and a client that
does not take them is not listened to; if it takes nothing, it is cut off.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Literal, TypeAlias

from semel.colour import ASYNC, keep
from semel.http.asgi import Receive, Send
from semel.http.ws.hearing import Hearing
from semel.http.ws.seat import Seat, Seats
from semel.http.ws.showing import Showing
from semel.http.ws.visitor import Visitor
from semel.http.ws.voice import MOST_WAITING, Voice
from semel.rooms import messages
from semel.rooms.cursors import bound

if TYPE_CHECKING:
    from semel.http.ws.door import House

__all__ = ["Closing", "Connection"]

log = logging.getLogger("semel")

Closing: TypeAlias = Literal[
    "", "gone", "slow", "drained", "rules", "large", "idle", "failed", "old"
]
"""Why it ends: not yet; the client has left; it is too slow; the server ends; it broke the rules;
a message was far too large; it has joined nothing; something is wrong here; it is as old as it may
get."""

CODES: dict[Closing, int] = {
    "gone": 1000,
    "slow": 1013,
    "drained": 1001,
    "rules": 1008,
    "large": 1009,
    "idle": 1008,
    "failed": 1011,
    "old": 1001,
}


class Connection:
    """`house` is what all connections share."""

    def __init__(self, house: House, visitor: Visitor, send: Send, old_at: float) -> None:
        self.house = house
        self.closing: Closing = ""
        self.seats = Seats(self)
        self._voice = Voice(send, lambda: self.close("gone"))
        self._woken = asyncio.Event()
        self.wake = self._woken.set
        """There may be something to write."""
        self.taken = self._voice.taken
        self._hearing = Hearing(self, visitor)
        self._showing = Showing(house, self.seats, self._voice, self.wake)
        self._task = asyncio.current_task()
        self._is_dropped = False
        self._old_at = old_at
        self._beats_at = ASYNC.now() + house.heartbeat_s

    # --- from outside ---------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """What is due? Called once a second."""
        if self._voice.unsent > MOST_WAITING or (self._voice.is_writing and self._is_slow(now)):
            self.drop("slow")
        elif self._is_idle(now):
            self.close("idle")
        elif now >= self._old_at:
            self.close("old")
        elif now >= self._beats_at:
            self._beats_at = now + self.house.heartbeat_s
            self.beat()
        for seat in self.seats:
            if seat.is_stuck:
                seat.is_stuck = False
                self._showing.poke(seat)
            if now >= seat.asks_at:
                seat.put_off()
                keep(asyncio.ensure_future(self._ask_again(seat)))

    def _is_idle(self, now: float) -> bool:
        return (
            not self.seats
            and not self._hearing.is_joining
            and now - self.seats.none_since > self.house.limits.join_within_s
        )

    def _is_slow(self, now: float) -> bool:
        limits = self.house.limits
        return now - self._voice.wrote_at > limits.write_within_s or any(
            seat.following.is_behind(limits.behind_events, limits.behind_bytes)
            for seat in self.seats
        )

    async def _ask_again(self, seat: Seat) -> None:
        may_stay = await seat.may_stay(self.house.authorise, self.house.rooms.failures)
        if not may_stay and self.seats.has(seat):
            self.seats.leave(seat)
            self.tell(messages.left(None, seat.room_id, "refused"))

    def tell(self, text: str) -> None:
        """As soon as the client takes it, behind what it was told before."""
        voice = self._voice
        if voice.is_free:
            voice.write(text)
            return
        voice.put(text)
        if voice.is_overfull:
            self.drop("slow")
        self.wake()

    def beat(self) -> None:
        """A sign of life: what time it is, and where the logs of its rooms end."""
        version = self.house.rooms.room.view_version
        heads = {seat.room_id: bound(seat.following.head, version) for seat in self.seats}
        self.tell(messages.heartbeat(self.house.rooms.now_s(), heads))

    def follow(self, seat: Seat) -> None:
        """Show what happens in its room from now on, and what has happened since it was told."""
        seat.following.at_once = lambda: self._showing.poke(seat)
        self.wake()

    def close(self, why: Closing) -> None:
        """End it between two messages."""
        self.closing = self.closing or why
        self._voice.is_over = True
        self.wake()

    def drop(self, why: Closing) -> None:
        """End it at once, whatever is in the way."""
        self.close(why)
        if self._is_dropped:
            return
        self._is_dropped = True
        self._voice.abort()
        if self._task is not None:
            self._task.cancel()

    # --- its life -------------------------------------------------------------------------------

    async def run(self, receive: Receive) -> None:
        try:
            await self._live(receive)
            if self.closing != "gone":
                await self._hang_up()
        except asyncio.CancelledError:
            if not self._is_dropped:
                raise
            assert self._task is not None
            self._task.uncancel()  # it was us
        finally:
            self._voice.abort_later(self.house.limits.write_within_s)

    async def _live(self, receive: Receive) -> None:
        reading = asyncio.ensure_future(self._read(receive))
        try:
            await self._write()
        except Exception:
            log.exception("semel: a connection failed, and is closed")
            self.close("failed")
        finally:
            reading.cancel()
            self._hearing.close()
            for seat in self.seats:
                self.seats.leave(seat)

    async def _read(self, receive: Receive) -> None:
        try:
            while not self.closing:
                message = await receive()
                if message["type"] == "websocket.disconnect":
                    self.close("gone")
                elif message["type"] == "websocket.receive":
                    await self._hearing.hear(message)
                    await self._voice.taken()
        except Exception:
            log.exception("semel: a connection failed, and is closed")
            self.close("failed")

    async def _write(self) -> None:
        voice = self._voice
        while not self.closing:
            self._woken.clear()
            while voice.answers and not self.closing:
                await voice.say(voice.next())
            for seat in self.seats:
                # Whoever was before may have taken long: it may have left since, or be another.
                if self.seats.has(seat) and seat.is_ready and not voice.answers:
                    seat.is_ready = False
                    if await self._showing.show(seat):
                        seat.is_ready = True
                        self.wake()
            await self._woken.wait()

    async def _hang_up(self) -> None:
        try:
            async with asyncio.timeout(self.house.limits.write_within_s):
                await self._voice.hang_up(CODES[self.closing], self.closing)
        except (OSError, TimeoutError, RuntimeError):  # the client is gone, or does not read
            self.closing = "gone"
            self._voice.abort()
