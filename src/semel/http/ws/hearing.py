"""What a client asks, one message after another, and what it is answered.

Whatever it sends is answered, by its id where it has one: a client that waits is not to wait for
nothing. Only who has lost its seat in a room hears nothing of it any more, also not what came of an
action that was on its way. Such an action goes on, as does that of a client which is gone: it is
decided in the room, and whoever comes back with the same request hears how.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from semel.colour import ASYNC, keep
from semel.http.sse.limits import Bucket
from semel.http.ws.acting import RETRY_BUSY_S, acted
from semel.http.ws.joining import Joining, why_not
from semel.http.ws.visitor import NotLetIn, Visitor, let_in
from semel.rooms import messages
from semel.rooms.asking import Act, Asked, Join, Leave, Malformed, Ping, WantsSnapshot, asked

if TYPE_CHECKING:
    from semel.http.ws.connection import Connection

__all__ = ["Hearing"]

# Messages in a row that were too many: whoever does not listen is closed.
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

    async def hear(self, message: Mapping[str, Any]) -> None:
        """One message, as the server hands it over. The next one waits until this is done."""
        text = message.get("text")
        try:
            if text is None:
                raise Malformed("messages are text")
            request = asked(text, self._house.limits.message_bytes)
        except Malformed as wrong:
            self._house.counts.refused[wrong.code] += 1
            self._take_from_bucket()
            self._tell(messages.error(wrong.code, str(wrong), request_id=wrong.request_id))
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
            self._connection.close("rules")
        return False

    async def _refuse_too_many(self, request: Asked) -> None:
        wait_s = 1 / self._house.limits.messages_per_s
        message = "too many messages; send this one again"
        if isinstance(request, Act):
            text = messages.unsettled(request, "RATE_LIMITED", message, retry_s=wait_s)
        else:
            text = messages.error(
                "RATE_LIMITED", message, request_id=request.request_id, retry_s=wait_s
            )
        self._house.counts.refused["RATE_LIMITED"] += 1
        self._tell(text)
        await ASYNC.sleep(wait_s)  # what it sends meanwhile waits where it is

    async def _do(self, request: Asked) -> None:
        match request:
            case Act():
                self._begin(request)
            case Join():
                await self._join(request)
            case WantsSnapshot():
                await self._show_snapshot(request)
            case Leave():
                self._leave(request)
            case Ping():
                self._connection.beat()

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
        visitor = replace(self._visitor, token=join.token, spectate=join.spectate)
        try:
            self._seats.check_room(join.room_id)
            user = await let_in(self._house.authorise, visitor, join.room_id)
            joining = Joining(self._house, join, user)
            position = await joining.begin()
            seat = self._seats.take(join.room_id, user, visitor, position)
        except Exception as error:  # noqa: BLE001 - the rules are somebody else's code
            self._refuse(join, why_not(error, join.room_id))
            return
        for text in joining.texts:
            self._tell(text)
        joining.count()
        self._connection.follow(seat)

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
            seen = seat.following.position.offset
            standing = await house.rooms.standing(request.room_id, seen=seen)
            texts = messages.whole(
                request.room_id, standing, seat.user, request.reason, request.request_id
            )
        except Exception as error:  # noqa: BLE001 - the rules are somebody else's code
            if self._seats.has(seat):
                self._refuse(request, why_not(error, request.room_id))
            return
        if not self._seats.has(seat):
            return  # nothing is told behind its end
        seat.go_on_from(house.rooms, standing.position)
        for text in texts:
            self._tell(text)
        house.counts.snapshots[request.reason] += 1
        self._connection.wake()

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
