"""Shared state that many hands change: once per click, in one order.

    class Tally(Room):
        def apply(self, state, action, ctx): ...
        def view(self, state, viewer): ...

    async with Rooms("sqlite:///semel.db", Tally(), name="tally") as rooms:
        reply = await rooms.act("t1", "ann", "ann-1", {"actionType": "add"})

A room is a log. What is accepted is one entry of it and one version; the request's id and reply,
the new state, and who is told what, go into the log with it, in one call. A request that comes
again gets the same reply. What is refused keeps the version.

    room        the rules, which are yours
    standing    how a room stands at one version
    patches     from one view to the next
    news        what an entry says, and to whom
    requests    what is asked, and what is answered
    asking      the one as it comes over the line
    messages    the other, and all that clients are told
    deciding    what a request comes to
    host        one room in this process
    rooms       all of them
    timers      turns that are not played in time
    clock       the store's time
    presence    who is here
    status      what it is doing, for people
"""

from typing import TYPE_CHECKING

from semel.imports import importing
from semel.rooms.requests import Reply, Request
from semel.rooms.room import (
    ALL,
    Accepted,
    Audience,
    Context,
    Deadline,
    Decision,
    Event,
    Refused,
    Room,
)
from semel.rooms.rooms import Rooms
from semel.rooms.status import RoomsStatus

__all__ = [
    "ALL",
    "Accepted",
    "Audience",
    "Context",
    "Deadline",
    "Decision",
    "Event",
    "Refused",
    "Reply",
    "Request",
    "Room",
    "Rooms",
    "RoomsStatus",
]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__)
