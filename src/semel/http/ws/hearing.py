"""What a client asks, one message after another, and what it is answered.

Whatever it sends is answered, by its id where it has one: a client that waits is not to wait for
nothing. What it asks of one room is done in turn, and a room that cannot be read keeps it from no
other. Only who has lost its seat in a room hears nothing of it any more, also not what came of an
action that was on its way. Such an action goes on, as does that of a client which is gone: it is
decided in the room, and whoever comes back with the same request hears how.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, assert_never

from semel.colour import ASYNC, keep
from semel.entries import Position
from semel.http.sse.limits import Bucket
from semel.http.ws.acting import RETRY_BUSY_S, acted
from semel.http.ws.joining import Joining, why_not
from semel.http.ws.seat import Seat
from semel.http.ws.visitor import NotLetIn, Visitor, let_in
from semel.rooms import messages
from semel.rooms.asking import (
    Act,
    Asked,
    Join,
    Leave,
    Malformed,
    Ping,
    WantsSnapshot,
    asked,
    is_larger,
)
from semel.rooms.standing import Standing

if TYPE_CHECKING:
    from semel.http.ws.connection import Connection

__all__ = ["Hearing"]

log = logging.getLogger("semel")

# Of a room: what takes its time, and what comes behind that.
InTurn: TypeAlias = Join | WantsSnapshot | Leave | Act

# How often it is looked again how things stand, where more was shown meanwhile.
MOST_LOOKS = 3

# Messages that were too many, with none between them that was heard: whoever does not listen is
# closed.
MOST_REFUSED = 100


class Hearing:
    """`visitor` is who has opened the connection."""

    def __init__(self, connection: Connection, visitor: Visitor) -> None:
        self._connection = connection
        self._house = connection.house
        self._seats = connection.seats
        self._tell = connection.tell
        self._visitor = visitor
        self._bucket = Bucket(self._house.limits.messages_per_s)
        self._refused = 0
        self._acting = 0
        self._in_turn: dict[str, deque[InTurn]] = {}
        """By room: what is being done, and what waits for it."""
        self._waiting = 0
        self._moved = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_joining(self) -> bool:
        """Is anybody asked whether it may join, or how things stand?"""
        return bool(self._in_turn)

    def close(self) -> None:
        """Nothing that it has asked is done any more, but for actions."""
        for task in self._tasks:
            task.cancel()

    async def hear(self, message: Mapping[str, Any]) -> None:
        """One message, as the server hands it over."""
        text = message.get("text")
        frame = message.get("bytes") or b"" if text is None else text
        if is_larger(frame, self._house.limits.frame_bytes):
            self._connection.close("large")
            return
        try:
            if text is None:
                raise Malformed("messages are text")
            request = asked(text, self._house.limits.message_bytes)
        except Malformed as wrong:
            self._house.counts.refused[wrong.code] += 1
            self._tell(messages.error(wrong.code, str(wrong), request_id=wrong.request_id))
            if not self._bucket.take(ASYNC.now()):
                await self._make_wait()
            return
        if self._bucket.take(ASYNC.now()):
            self._refused = 0
            await self._do(request)
        else:
            await self._refuse_too_many(request)

    async def _refuse_too_many(self, request: Asked) -> None:
        wait_s = self._wait_s
        message = "too many messages; send this one again"
        if isinstance(request, Act):
            text = messages.unsettled(request, "RATE_LIMITED", message, retry_s=wait_s)
        else:
            text = messages.error(
                "RATE_LIMITED", message, request_id=request.request_id, retry_s=wait_s
            )
        self._house.counts.refused["RATE_LIMITED"] += 1
        self._tell(text)
        await self._make_wait()

    @property
    def _wait_s(self) -> float:
        return 1 / self._house.limits.messages_per_s

    async def _make_wait(self) -> None:
        """What it sends meanwhile waits where it is. Who sends nothing else is closed."""
        self._refused += 1
        if self._refused > MOST_REFUSED:
            self._connection.close("rules")
        await ASYNC.sleep(self._wait_s)

    async def _do(self, request: Asked) -> None:
        match request:
            case Ping():
                self._connection.beat()
            case Act() if request.room_id not in self._in_turn:
                self._begin(request)
            case Leave() if request.room_id not in self._in_turn:
                self._leave(request)
            case _:
                await self._put_in_turn(request)

    async def _put_in_turn(self, request: InTurn) -> None:
        """Behind what was asked of the same room. Who asks much at once is not listened to."""
        room_id = request.room_id
        waiting = self._in_turn.get(room_id)
        self._waiting += 1
        if waiting is not None:
            waiting.append(request)
        else:
            waiting = self._in_turn[room_id] = deque([request])
            task = asyncio.ensure_future(self._do_in_turn(room_id, waiting))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        while self._waiting >= self._house.limits.in_flight:
            self._moved.clear()
            await self._moved.wait()

    async def _do_in_turn(self, room_id: str, waiting: deque[InTurn]) -> None:
        try:
            while waiting:
                try:
                    await self._do_one(waiting.popleft())
                finally:
                    self._waiting -= 1
                    self._moved.set()
        except Exception:
            log.exception("semel: a connection failed, and is closed")
            self._connection.close("failed")
        finally:
            self._waiting -= len(waiting)
            del self._in_turn[room_id]

    async def _do_one(self, request: InTurn) -> None:
        match request:
            case Join():
                await self._join(request)
            case WantsSnapshot():
                await self._show_snapshot(request)
            case Leave():
                self._leave(request)
            case Act():
                self._begin(request)
            case _:
                assert_never(request)

    def _refuse(self, asked: Join | WantsSnapshot, why: NotLetIn) -> None:
        self._house.counts.refused[why.code] += 1
        self._tell(
            messages.error(
                why.code,
                str(why),
                request_id=asked.request_id,
                room_id=asked.room_id,
                retry_s=why.retry_s,
            )
        )

    # --- rooms ----------------------------------------------------------------------------------

    async def _join(self, join: Join) -> None:
        visitor = self._visitor.joining(join.token, spectate=join.spectate)
        begun, failures = ASYNC.now(), self._house.rooms.failures
        try:
            self._seats.check_room(join.room_id)
            user = await let_in(self._house.authorise, visitor, join.room_id, failures)
            joining = Joining(self._house, join, user)
            position = await self._begun(joining, join.room_id)
            seat = self._seats.take(join.room_id, user, visitor, position)
        except Exception as error:  # noqa: BLE001 - the rules are somebody else's code
            self._seats.was_busy(begun)
            self._refuse(join, why_not(error, join.room_id, failures))
            return
        for text in joining.texts:
            self._tell(text)
        joining.count()
        self._connection.follow(seat)

    async def _begun(self, joining: Joining, room_id: str) -> Position:
        """As things are when they are told: who is here already was shown something meanwhile."""
        looks = 0
        while True:
            position = await joining.begin(self._seen(room_id))
            await self._connection.taken()  # several rooms may have much to tell
            looks += 1
            if position.offset >= self._seen(room_id) or looks == MOST_LOOKS:
                return position

    def _seen(self, room_id: str) -> int:
        seat = self._seats.get(room_id)
        return 0 if seat is None else seat.following.position.offset

    def _leave(self, request: Leave) -> None:
        seat = self._seats.get(request.room_id)
        if seat is not None:
            self._seats.leave(seat)
        self._tell(messages.left(request.request_id, request.room_id, "left"))

    async def _show_snapshot(self, request: WantsSnapshot) -> None:
        house, seat = self._house, self._seats.get(request.room_id)
        if seat is None:
            self._refuse(request, NotLetIn("join this room first"))
            return
        house.counts.gaps += request.reason == "gap"
        try:
            standing = await self._standing(seat)
            texts = messages.whole(
                request.room_id, standing, seat.user, request.reason, request.request_id
            )
        except Exception as error:  # noqa: BLE001 - the rules are somebody else's code
            if self._seats.has(seat):
                self._refuse(request, why_not(error, request.room_id, self._house.rooms.failures))
            return
        if not self._seats.has(seat):
            return  # nothing is told behind its end
        seat.go_on_from(house.rooms, standing.position)
        for text in texts:
            self._tell(text)
        house.counts.snapshots[request.reason] += 1
        self._connection.wake()

    async def _standing(self, seat: Seat) -> Standing:
        """As it is when it is told: what is shown meanwhile is not taken back by it."""
        looks = 0
        while True:
            seen = self._seen(seat.room_id)
            standing = await self._house.rooms.standing(seat.room_id, seen=seen)
            await self._connection.taken()
            looks += 1
            # One that stays older is of a log that has lost something.
            if standing.version >= self._seen(seat.room_id) or looks == MOST_LOOKS:
                return standing

    # --- actions --------------------------------------------------------------------------------

    def _begin(self, act: Act) -> None:
        seat = self._seats.get(act.room_id)
        if seat is None or seat.user is None:
            why = "join this room first" if seat is None else "those who only watch cannot act"
            self._house.counts.refused["UNAUTHORIZED"] += 1
            self._tell(messages.unsettled(act, "UNAUTHORIZED", why))
            return
        if self._acting >= self._house.limits.in_flight:
            self._house.counts.refused["RATE_LIMITED"] += 1
            self._tell(
                messages.unsettled(act, "RATE_LIMITED", "too many at once", retry_s=RETRY_BUSY_S)
            )
            return
        self._acting += 1
        keep(asyncio.ensure_future(self._act(act, seat.user)))

    async def _act(self, act: Act, user: str) -> None:
        try:
            text = await acted(self._house, act, user)
        finally:
            self._acting -= 1
        # Who has lost its seat meanwhile is told nothing of the room, and hears it when it is back.
        seat = self._seats.get(act.room_id)
        if seat is not None and seat.user == user:
            self._tell(text)
