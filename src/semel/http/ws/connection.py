"""One connection, from its first message to its last: what it asks, and what it is told.

One task reads, and one writes. Who writes has no queue of what happens: a seat is a position in its
room's log, and what is written is what follows it. Only answers wait in a queue, and a client that
does not take them is cut off, as one is that does not take what happens.

An action goes on when its client is gone: it is decided in the room, and whoever comes back with
the same request hears how.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from semel.colour import ASYNC, keep
from semel.entries import Position
from semel.errors import (
    CorruptRecordError,
    SettingsError,
    StoreUnavailableError,
)
from semel.feed import Reset
from semel.feed.values import Burst
from semel.http.asgi import Receive, Send
from semel.http.sse.limits import Bucket
from semel.http.ws.acting import RETRY_BUSY_S, RETRY_STORE_S, acted
from semel.http.ws.joining import Joining
from semel.http.ws.seat import Seat
from semel.http.ws.visitor import NotLetIn, Visitor, let_in
from semel.http.ws.voice import MOST_ANSWERS, MOST_WAITING, Voice
from semel.rooms import messages
from semel.rooms.asking import Act, Join, Leave, Malformed, Ping, WantsSnapshot, asked
from semel.rooms.standing import Standing

if TYPE_CHECKING:
    from semel.http.ws.door import House

__all__ = ["Closing", "Connection"]

log = logging.getLogger("semel")

Closing: TypeAlias = Literal[
    "", "gone", "slow", "drained", "rules", "idle", "too_large", "failed", "old"
]
"""Why it ends: not yet; the client has left; it is too slow; the server ends; it broke the rules;
it has joined nothing; a message was too large; something is wrong here; it is as old as it may
get."""

CODES: dict[Closing, int] = {
    "gone": 1000,
    "slow": 1013,
    "drained": 1001,
    "rules": 1008,
    "idle": 1008,
    "too_large": 1009,
    "failed": 1011,
    "old": 1001,
}

# So long somebody stays of whom nobody can say any more whether they may.
UNDECIDED_S = 300.0

# Messages in a row that were too many: whoever does not listen is closed.
MOST_REFUSED = 100


class Connection:
    """`house` is what all connections share."""

    def __init__(self, house: House, visitor: Visitor, send: Send, old_at: float) -> None:
        self.house = house
        self.closing: Closing = ""
        self.seats: dict[str, Seat] = {}
        self._visitor = visitor
        self._voice = Voice(send, lambda: self.close("gone"))
        self._woken = asyncio.Event()
        self._bucket = Bucket(house.limits.messages_per_s)
        self._refused = 0
        self._acting = 0
        self._task = asyncio.current_task()
        self._is_dropped = False
        self._alone_since = ASYNC.now()
        self._old_at = old_at
        self._beats_at = self._alone_since + house.heartbeat_s

    # --- from outside ---------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """What is due? Called once a second."""
        limits = self.house.limits
        if self._voice.is_writing and self._is_slow(now):
            self.drop("slow")
        elif not self.seats and now - self._alone_since > limits.join_within_s:
            self.close("idle")
        elif now >= self._old_at:
            self.close("old")
        elif now >= self._beats_at:
            self._beats_at = now + self.house.heartbeat_s
            self.tell(self._heartbeat())
        for seat in list(self.seats.values()):
            if seat.is_stuck:
                seat.is_stuck = False
                self._poke(seat)
            if now >= seat.asks_at:
                seat.put_off()
                keep(asyncio.ensure_future(self._ask_again(seat)))

    def _is_slow(self, now: float) -> bool:
        limits = self.house.limits
        return (
            now - self._voice.wrote_at > limits.write_within_s
            or len(self._voice.answers) > MOST_ANSWERS
            or any(
                seat.following.is_behind(limits.behind_events, limits.behind_bytes)
                for seat in self.seats.values()
            )
        )

    def tell(self, text: str) -> None:
        voice = self._voice
        if voice.is_free and not self.closing:
            voice.write(text)
            return
        voice.put(text)
        if len(voice.answers) > 2 * MOST_ANSWERS or voice.waiting > MOST_WAITING:
            self.drop("slow")
        self._woken.set()

    def close(self, why: Closing) -> None:
        """End it between two messages."""
        self.closing = self.closing or why
        self._woken.set()

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
        reading = asyncio.ensure_future(self._read(receive))
        try:
            await self._write()
        except asyncio.CancelledError:
            if not self._is_dropped:
                raise
            assert self._task is not None
            self._task.uncancel()  # it was us
        except Exception:
            log.exception("semel: a connection failed, and is closed")
            self.close("failed")
        finally:
            reading.cancel()
            for seat in list(self.seats.values()):
                self._leave(seat)
        if self.closing != "gone" and not self._is_dropped:
            await self._hang_up()

    async def _hang_up(self) -> None:
        try:
            async with asyncio.timeout(self.house.limits.write_within_s):
                await self._voice.hang_up(CODES[self.closing], self.closing)
        except (OSError, TimeoutError, RuntimeError):  # it is gone by now
            self.closing = "gone"

    # --- reading --------------------------------------------------------------------------------

    async def _read(self, receive: Receive) -> None:
        try:
            while not self.closing:
                message = await receive()
                if message["type"] == "websocket.disconnect":
                    self.close("gone")
                elif message["type"] == "websocket.receive":
                    await self._heard(message)
        except Exception:
            log.exception("semel: a connection failed, and is closed")
            self.close("failed")

    async def _heard(self, message: Any) -> None:
        text = message.get("text")
        try:
            if text is None:
                raise Malformed("messages are text")
            if len(text) > self.house.limits.message_bytes or (
                len(text.encode()) > self.house.limits.message_bytes
            ):
                raise Malformed("the message is too large", code="TOO_LARGE")
            request = asked(text)
        except Malformed as wrong:
            self._take_from_bucket()
            self.tell(messages.error(wrong.code, str(wrong), request_id=wrong.request_id))
            return
        if self._take_from_bucket():
            await self._do(request)
        else:
            await self._refuse_too_many(request)

    def _take_from_bucket(self) -> bool:
        if self._bucket.take(ASYNC.now()):
            self._refused = 0
            return True
        self._refused += 1
        if self._refused > MOST_REFUSED:
            self.close("rules")
        return False

    async def _refuse_too_many(self, request: Any) -> None:
        wait_s = 1 / self.house.limits.messages_per_s
        message = "too many messages; send this one again"
        if isinstance(request, Act):
            text = messages.unsettled(request, "RATE_LIMITED", message, retry_s=wait_s)
        else:
            text = messages.error(
                "RATE_LIMITED", message, request_id=request.request_id, retry_s=wait_s
            )
        self.house.counts.refused["RATE_LIMITED"] += 1
        self.tell(text)
        await ASYNC.sleep(wait_s)  # what it sends meanwhile waits where it is

    async def _do(self, request: Act | Join | Leave | WantsSnapshot | Ping) -> None:
        match request:
            case Act():
                self._begin(request)
            case Join():
                await self._join(request)
            case WantsSnapshot():
                await self._show_snapshot(request)
            case Leave():
                self._left(request)
            case Ping():
                self.tell(self._heartbeat())

    # --- joining --------------------------------------------------------------------------------

    async def _join(self, join: Join) -> None:
        try:
            user = await self._admitted(join)
            joining = Joining(self.house, join, user)
            self._take_seat(join, user, await joining.begin())
            for text in joining.texts:
                self.tell(text)
            self._woken.set()  # there may be more than was told
        except NotLetIn as refusal:
            self._refuse(join, refusal.code, str(refusal), refusal.retry_s)
        except CorruptRecordError as error:
            log.error("semel: room %r cannot be joined: %s", join.room_id, error)  # noqa: TRY400
            self._refuse(join, "FAILED", "this room cannot be shown")
        except StoreUnavailableError:
            self._refuse(join, "UNAVAILABLE", "the room cannot be read now", RETRY_STORE_S)
        except SettingsError as error:
            self._refuse(join, "INVALID", str(error))
        except Exception:
            log.exception("semel: room %r could not be joined", join.room_id)
            self._refuse(join, "FAILED", "this room cannot be shown")

    def _refuse(
        self, asked: Join | WantsSnapshot, code: str, message: str, retry_s: float | None = None
    ) -> None:
        self.house.counts.refused[code] += 1
        self.tell(
            messages.error(
                code, message, request_id=asked.request_id, room_id=asked.room_id, retry_s=retry_s
            )
        )

    async def _admitted(self, join: Join) -> str | None:
        if join.room_id not in self.seats and len(self.seats) >= self.house.limits.rooms:
            raise SettingsError(f"{self.house.limits.rooms} rooms by one connection, and no more")
        visitor = replace(self._visitor, token=join.token, spectate=join.spectate)
        return await let_in(self.house.authorise, visitor, join.room_id)

    def _take_seat(self, join: Join, user: str | None, position: Position) -> None:
        house, room_id = self.house, join.room_id
        before = self.seats.get(room_id)
        if (before is None or before.user != user) and not house.places.has_one_for(user):
            message = f"you have {house.limits.per_user} places already; leave some"
            raise NotLetIn(message, "RATE_LIMITED")
        if before is not None:
            self._leave(before)
        house.places.take(user)
        visitor = replace(self._visitor, token=join.token, spectate=join.spectate)
        following = house.rooms.follow(room_id, position)
        seat = Seat(room_id, user, visitor, following, house.reauthorise_s)
        following.at_once = lambda: self._poke(seat)
        self.seats[room_id] = seat
        house.entered(self, seat)

    def _left(self, request: Leave) -> None:
        seat = self.seats.get(request.room_id)
        if seat is not None:
            self._leave(seat)
        self.tell(messages.left(request.request_id, request.room_id, "left"))

    def _leave(self, seat: Seat) -> None:
        if self.seats.get(seat.room_id) is seat:
            del self.seats[seat.room_id]
            self._alone_since = ASYNC.now()
            seat.close()
            self.house.places.leave(seat.user)
            self.house.left(self, seat)

    async def _ask_again(self, seat: Seat) -> None:
        """May it still be here, and as the same?"""
        try:
            is_same = await let_in(self.house.authorise, seat.visitor, seat.room_id) == seat.user
            seat.decided_at = ASYNC.now()
        except NotLetIn as refusal:
            # Of whom nobody can say anything stays for a while: it is not their doing.
            is_undecided = refusal.retry_s is not None
            is_same = is_undecided and ASYNC.now() - seat.decided_at < UNDECIDED_S
        except SettingsError:
            log.exception("semel: authorise gave no user; the seat is taken back")
            is_same = False
        if not is_same and self.seats.get(seat.room_id) is seat:
            self._leave(seat)
            self.tell(messages.left(None, seat.room_id, "refused"))

    # --- acting ---------------------------------------------------------------------------------

    def _begin(self, act: Act) -> None:
        seat = self.seats.get(act.room_id)
        if seat is None or seat.user is None:
            why = "join this room first" if seat is None else "those who only watch cannot act"
            self.house.counts.refused["UNAUTHORIZED"] += 1
            self.tell(messages.unsettled(act, "UNAUTHORIZED", why))
            return
        if self._acting >= self.house.limits.in_flight:
            self.house.counts.refused["RATE_LIMITED"] += 1
            self.tell(
                messages.unsettled(act, "RATE_LIMITED", "too many at once", retry_s=RETRY_BUSY_S)
            )
            return
        self._acting += 1
        keep(asyncio.ensure_future(self._act(act, seat.user)))

    async def _act(self, act: Act, user: str) -> None:
        text = await acted(self.house, act, user)
        self._acting -= 1
        if not self.closing:
            self.tell(text)

    async def _show_snapshot(self, request: WantsSnapshot) -> None:
        seat, counts = self.seats.get(request.room_id), self.house.counts
        if seat is None:
            self._refuse(request, "UNAUTHORIZED", "join this room first")
            return
        counts.snapshots[request.reason] += 1
        counts.gaps += request.reason == "gap"
        try:
            standing = await self.house.rooms.standing(request.room_id)
            texts = messages.whole(
                request.room_id, standing, seat.user, request.reason, request.request_id
            )
        except CorruptRecordError:
            self._refuse(request, "FAILED", "this room cannot be shown")
        except StoreUnavailableError:
            self._refuse(request, "UNAVAILABLE", "the room cannot be read now", RETRY_STORE_S)
        except Exception:
            log.exception("semel: room %r could not be shown", request.room_id)
            self._refuse(request, "FAILED", "this room cannot be shown")
        else:
            if self.seats.get(request.room_id) is seat:
                seat.go_on_from(self.house.rooms, standing.position)
                for text in texts:
                    self.tell(text)
                self._woken.set()

    # --- writing --------------------------------------------------------------------------------

    def _heartbeat(self) -> str:
        heads = {room_id: seat.following.head for room_id, seat in self.seats.items()}
        return messages.heartbeat(self.house.rooms.now_s(), heads)

    def _poke(self, seat: Seat) -> bool:
        """There is something in its room."""
        if not self._is_shown_at_once(seat):
            seat.following.ask_again()
            seat.is_ready = True
            self._woken.set()
        return True

    def _is_shown_at_once(self, seat: Seat) -> bool:
        """Write what has come, without waking anybody. Was that all?"""
        if self.closing or not self._voice.is_free:
            return False
        following = seat.following
        before, burst = following.position, following.take_entries()
        if burst is None:
            return False
        try:
            texts = messages.for_all(burst.entries, seat.user)
        except CorruptRecordError:  # who writes finds out, and sees to it
            following.position = before
            return False
        self.house.counts.updates += len(burst.entries)
        for text in texts:
            self._voice.write(text)
        return following.is_at_head

    async def _write(self) -> None:
        voice = self._voice
        while not self.closing:
            self._woken.clear()
            while voice.answers and not self.closing:
                await voice.say(voice.next())
            for seat in list(self.seats.values()):
                # Whoever was before may have taken long: it may have left since, or be another.
                is_here = self.seats.get(seat.room_id) is seat
                if is_here and seat.is_ready and not voice.answers:
                    seat.is_ready = False
                    if await self._show(seat):
                        seat.is_ready = True
                        self._woken.set()
            await self._woken.wait()

    async def _show(self, seat: Seat) -> bool:
        """Write what has come. May there be more?"""
        try:
            return await self._shown(seat)
        except CorruptRecordError as error:
            log.error("semel: room %r cannot be shown: %s", seat.room_id, error)  # noqa: TRY400
            return await self._skipped(seat)
        except StoreUnavailableError:
            seat.is_stuck = True
        return False

    async def _shown(self, seat: Seat) -> bool:
        following = seat.following
        before, news = following.position, following.take()
        if news is None and following.needs_log:
            news = await following.fetch() or following.take()
            if following is not seat.following or self.seats.get(seat.room_id) is not seat:
                return True  # meanwhile it has left, or was told how things stand
        match news:
            case Burst():
                try:
                    texts = messages.for_all(news.entries, seat.user)
                except CorruptRecordError:
                    following.position = before  # nothing of it was told
                    raise
                self.house.counts.updates += len(news.entries)
                for text in texts:
                    await self._voice.say(text)
                return not following.is_at_head
            case Reset():
                standing = Standing.of(self.house.rooms.room, seat.room_id, news.snapshot)
                self.house.reset(seat.room_id, standing, news.reason)
                await self._say_standing(seat, standing, news.reason)
                return True
        return False

    async def _skipped(self, seat: Seat) -> bool:
        """Past what cannot be read: how things stand is known all the same."""
        try:
            standing = await self.house.rooms.standing(seat.room_id)
        except StoreUnavailableError:
            seat.is_stuck = True
            return False
        if self.seats.get(seat.room_id) is seat:
            seat.go_on_from(self.house.rooms, standing.position)
            await self._say_standing(seat, standing, "unreadable")
        return True

    async def _say_standing(self, seat: Seat, standing: Standing, reason: str) -> None:
        self.house.counts.snapshots[reason] += 1
        for text in messages.whole(seat.room_id, standing, seat.user, reason):
            await self._voice.say(text)
