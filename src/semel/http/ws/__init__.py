"""The door to rooms over WebSocket, for any ASGI app.

    rooms = Rooms("redis://localhost", PokerTable(), name="poker")
    app = RoomDoor(rooms, authorise=user_of)

A client joins a room, with the cursor it has if it was there before: it gets what it has missed, or
a snapshot, and from then on everything that happens, as its user may see it. It acts by requests
that have an id, and the same request gets the same answer.

    door         the app, and what all connections share
    connection   one of them
    hearing      what it asks
    joining      what somebody is told who joins
    acting       what somebody is told who acts
    showing      what happens in its rooms
    seat         the rooms that it has joined
    voice        its way out
    visitor      who may come in
    limits       how much it takes on

What goes over the line is in `semel.rooms.asking` and `semel.rooms.messages`.
"""

from typing import TYPE_CHECKING

from semel.http.ws.door import RoomDoor
from semel.http.ws.limits import Limits
from semel.http.ws.visitor import Spectator, Visitor
from semel.imports import importing

__all__ = ["Limits", "RoomDoor", "Spectator", "Visitor"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__)
