"""One room that a connection has joined: as whom, and how far it was told."""

from __future__ import annotations

import math
import random

from semel.colour import ASYNC
from semel.entries import Position
from semel.feed import Subscription
from semel.http.ws.visitor import Visitor
from semel.rooms import Rooms

__all__ = ["Seat"]

ASK_JITTER = 0.2


class Seat:
    """`user` is None for those who only look."""

    __slots__ = (
        "_ask_each_s",
        "asks_at",
        "decided_at",
        "following",
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
        self.is_stuck = False
        """The log did not answer; it is asked again by and by."""
        self._ask_each_s = ask_each_s
        self.decided_at = ASYNC.now()
        """When somebody has last said that it may be here."""
        self.asks_at = math.inf
        self.put_off()

    def put_off(self) -> None:
        """Ask later whether it may still be here; those who came together not all together."""
        if self._ask_each_s is not None:
            soon_s = self._ask_each_s * (1 - ASK_JITTER * random.random())  # noqa: S311
            self.asks_at = ASYNC.now() + soon_s

    def go_on_from(self, rooms: Rooms, position: Position) -> None:
        """What comes next is what follows this."""
        at_once = self.following.at_once
        self.following.close()
        self.following = rooms.follow(self.room_id, position)
        self.following.at_once = at_once
        self.is_ready = True

    def close(self) -> None:
        self.following.at_once = None
        self.following.close()
