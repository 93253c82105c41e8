"""The rooms that a connection has joined: as whom, and how far it was told.

A room has one seat by a connection. Who joins again takes another one, perhaps as somebody else:
whoever has waited for something asks whether the seat is still there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from semel.colour import ASYNC
from semel.entries import Position
from semel.failures import Failures
from semel.feed import Reset, Subscription
from semel.feed.values import Burst
from semel.http.ws.visitor import Authorise, NotLetIn, Visitor, let_in
from semel.rooms import Rooms
from semel.rooms.standing import Standing

if TYPE_CHECKING:
    from semel.http.ws.connection import Connection

__all__ = ["Found", "Seat", "Seats"]

Found: TypeAlias = Burst | Reset | Standing | Exception | None
"""What the log has answered, asked what follows, or how things stand."""

ASK_JITTER = 0.2

# So long somebody stays of whom nobody can say any more whether they may.
UNDECIDED_S = 300.0


class Seat:
    """`user` is None for those who only look."""

    __slots__ = (
        "_ask_each_s",
        "asks_at",
        "decided_at",
        "following",
        "found",
        "is_asking",
        "is_ready",
        "is_stuck",
        "room_id",
        "user",
        "visitor",
    )

    def __init__(
        self,
        room_id: str,
        user: str | None,
        visitor: Visitor,
        following: Subscription,
        ask_each_s: float | None,
    ) -> None:
        self.room_id = room_id
        self.user = user
        self.visitor = visitor
        self.following = following
        self.is_ready = True
        """May there be something to be told?"""
        self.is_asking = False
        """Is the log asked what follows? One question at a time."""
        self.found: tuple[Position, Found] | None = None
        """What it has answered, and is not told yet; and how far it was told before."""
        self.is_stuck = False
        """The log did not answer; it is asked again by and by."""
        self._ask_each_s = ask_each_s
        self.decided_at = ASYNC.now()
        """When somebody has last said that it may be here."""
        self.asks_at = math.inf
        self.put_off()

    @property
    def has_before(self) -> bool:
        """Is there, or may there be, something to be told before what is new?"""
        return self.is_asking or self.found is not None

    def put_off(self) -> None:
        """Ask later whether it may still be here; those who came together not all together."""
        if self._ask_each_s is not None:
            soon_s = self._ask_each_s * (1 - ASK_JITTER * random.random())  # noqa: S311
            self.asks_at = ASYNC.now() + soon_s

    async def may_stay(self, authorise: Authorise | None, failures: Failures) -> bool:
        """May it still be here, and as the same?"""
        try:
            is_same = await let_in(authorise, self.visitor, self.room_id, failures) == self.user
            self.decided_at = ASYNC.now()
        except NotLetIn as refusal:
            # Of whom nobody can say anything stays for a while: it is not their doing.
            is_undecided = refusal.retry_s is not None
            return is_undecided and ASYNC.now() - self.decided_at < UNDECIDED_S
        return is_same

    def go_on_from(self, rooms: Rooms, position: Position) -> None:
        """What comes next is what follows this."""
        before = self.following
        self.following = rooms.follow(self.room_id, position)
        self.following.at_once, before.at_once = before.at_once, None
        before.close()  # not sooner: a reader whom nobody follows is let go
        self.found = None
        self.is_ready = True

    def close(self) -> None:
        self.following.at_once = None
        self.following.close()


class Seats:
    """Those of one connection, by room."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._house = connection.house
        self._by_room: dict[str, Seat] = {}
        self.none_since = ASYNC.now()
        """When it was last left with none, where it has none."""

    def __len__(self) -> int:
        return len(self._by_room)

    def __iter__(self) -> Iterator[Seat]:
        """Those that are there now, whatever becomes of them meanwhile."""
        return iter(tuple(self._by_room.values()))

    def get(self, room_id: str) -> Seat | None:
        return self._by_room.get(room_id)

    def has(self, seat: Seat) -> bool:
        """Has it not been left, and is it nobody else's?"""
        return self._by_room.get(seat.room_id) is seat

    def was_busy(self, since: float) -> None:
        """It has waited since then for what came to nothing: that is not its idleness."""
        now = ASYNC.now()
        self.none_since = min(now, self.none_since + now - since)

    def check_room(self, room_id: str) -> None:
        most = self._house.limits.rooms
        if room_id not in self._by_room and len(self) >= most:
            raise NotLetIn(f"{most} rooms by one connection, and no more", "INVALID")

    def take(self, room_id: str, user: str | None, visitor: Visitor, position: Position) -> Seat:
        """In place of the one that is there. What it is told follows the position."""
        self.check_room(room_id)  # again: others were asked for meanwhile
        if self._connection.closing:
            raise NotLetIn("the connection is over")
        house, before = self._house, self.get(room_id)
        if (before is None or before.user != user) and not house.places.has_one_for(user):
            message = f"you have {house.limits.per_user} places already; leave some"
            raise NotLetIn(message, "RATE_LIMITED")
        if before is not None:
            self.leave(before)
        house.places.take(user)
        following = house.rooms.follow(room_id, position)
        seat = Seat(room_id, user, visitor, following, house.reauthorise_s)
        self._by_room[room_id] = seat
        house.entered(self._connection, seat)
        return seat

    def leave(self, seat: Seat) -> None:
        if self.has(seat):
            del self._by_room[seat.room_id]
            self.none_since = ASYNC.now()
            seat.close()
            self._house.places.leave(seat.user)
            self._house.left(self._connection, seat)
