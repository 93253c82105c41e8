"""The door to rooms, as an ASGI app."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable, Mapping
from typing import Any

from semel.colour import ASYNC, keep
from semel.entries import Position
from semel.errors import SettingsError
from semel.http.asgi import ASGIScope, Receive, Send
from semel.http.ws.connection import Closing, Connection
from semel.http.ws.limits import Limits, Places
from semel.http.ws.seat import Seat
from semel.http.ws.visitor import Authorise, Origins, check_authorise, visitor_of
from semel.ports import LogStore
from semel.rooms import Rooms, RoomsStatus, messages
from semel.rooms.presence import Here, Presence
from semel.rooms.standing import Standing
from semel.rooms.status import Counts

__all__ = ["House", "RoomDoor"]

# How often it is looked who is due, and who is too slow.
ROUND_S = 1.0

# A connection ends at its age or a little sooner, so that those that came together part.
AGE_JITTER = 0.2

# The part of a drain in which connections are closed one after another.
SPREAD = 0.8
STEP_S = 0.05

# Those who were cut off need a moment to be gone; whoever does not go by then is not waited for.
LEFT_S = 1.0

RETRY_S = 2

GONE_S = 0.01

FORBIDDEN, OVERLOADED = 403, 503

# Why somebody is told the state, where what they have is not so any more.
TAKEN_BACK = frozenset({"ahead", "forked", "gone"})


class House:
    """What all connections of a door share."""

    def __init__(
        self,
        rooms: Rooms,
        authorise: Authorise | None,
        limits: Limits,
        heartbeat_s: float,
        reauthorise_s: float | None,
        *,
        tells_presence: bool,
    ) -> None:
        self.rooms = rooms
        self.authorise = authorise
        self.limits = limits
        self.heartbeat_s = heartbeat_s
        self.reauthorise_s = reauthorise_s
        self.places = Places(limits)
        self.connections: dict[Connection, None] = {}
        self._by_room: dict[str, dict[Connection, None]] = {}
        self._set_back: dict[str, Position] = {}
        """By room, where a failover has left it."""
        self.presence = (
            Presence(
                rooms.presence_stream_of,
                rooms.exists,
                rooms.log,
                rooms.feed,
                rooms.clock,
                self._tell_here,
            )
            if tells_presence
            else None
        )

    @property
    def counts(self) -> Counts:
        return self.rooms.counts

    def entered(self, connection: Connection, seat: Seat) -> None:
        self.counts.joined += 1
        self._by_room.setdefault(seat.room_id, {})[connection] = None
        if self.presence is not None:
            self.presence.enter(seat.room_id, seat.user)
            # Behind what it is told first.
            asyncio.get_running_loop().call_soon(self._tell_who_is_here, connection, seat)

    def left(self, connection: Connection, seat: Seat) -> None:
        self.counts.joined -= 1
        here = self._by_room[seat.room_id]
        here.pop(connection, None)
        if not here:
            del self._by_room[seat.room_id]
            self._set_back.pop(seat.room_id, None)
        if self.presence is not None:
            self.presence.leave(seat.room_id, seat.user)

    def reset(self, room_id: str, standing: Standing, reason: str) -> None:
        """Somebody is told how a room stands. Where a failover took something back, a turn may be
        there again that was timed out, and whose note was looked at by everybody.
        """
        if not standing.version:
            return  # a client can invent the room and the cursor
        if reason in TAKEN_BACK and self._set_back.get(room_id) != standing.position:
            self._set_back[room_id] = standing.position
            self.rooms.look_soon(room_id)

    def _tell_here(self, room_id: str, here: Here) -> None:
        text = messages.presence(room_id, here.users, here.spectators)
        for connection in self._by_room.get(room_id, ()):
            connection.tell(text)

    def _tell_who_is_here(self, connection: Connection, seat: Seat) -> None:
        room_id = seat.room_id
        if self.presence is not None and connection.seats.get(room_id) is seat:
            here = self.presence.here(room_id)
            connection.tell(messages.presence(room_id, here.users, here.spectators))

    def look(self) -> None:
        now = ASYNC.now()
        for connection in tuple(self.connections):
            connection.look(now)


class RoomDoor:
    """Lets clients into rooms over WebSocket. An ASGI app.

    `authorise(visitor, room_id)` says who somebody is: the user's name, or `Spectator()`, or None
    for those who may not come in. It is asked at every join, also of those who come back, and every
    `reauthorise_s`. Without it everybody may look, and nobody act. `origins`: pages of which may
    connect, by default those of the same host. `presence`: tell who is here. A connection ends
    after `max_age_s`, and is followed by another one.
    """

    def __init__(
        self,
        rooms: Rooms,
        *,
        authorise: Authorise | None = None,
        origins: Iterable[str] | str | None = None,
        presence: bool = True,
        heartbeat_s: float = 15.0,
        reauthorise_s: float | None = 60.0,
        max_age_s: float = 3600.0,
        limits: Limits | None = None,
    ) -> None:
        if not isinstance(rooms, Rooms):
            raise SettingsError(f"a door is to Rooms(store, room), not {type(rooms).__name__}")
        if authorise is not None:
            check_authorise(authorise)
        spans = {"heartbeat_s": heartbeat_s, "max_age_s": max_age_s, "reauthorise_s": reauthorise_s}
        for name, span in spans.items():
            if span is not None and not span > 0:
                raise SettingsError(f"{name}={span}: more than 0 seconds")
        limits = limits or Limits()
        limits.check()
        self.rooms = rooms
        self._origins = Origins(origins)
        self._max_age_s = max_age_s
        self._house = House(
            rooms,
            authorise,
            limits,
            heartbeat_s,
            reauthorise_s if authorise is not None else None,
            tells_presence=presence,
        )
        self._is_closed = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "websocket":
                await self._websocket(scope, receive, send)
            case "lifespan":
                await self._lifespan(receive, send)
            case "http":
                await _upgrade(send)
            case other:
                raise SettingsError(f"a door to rooms is for WebSocket, and this is {other}")

    async def _websocket(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if (await receive())["type"] != "websocket.connect":
            return
        house, counts = self._house, self.rooms.counts
        visitor = visitor_of(scope)
        if not self._origins.allows(visitor):
            counts.closed["origin"] += 1
            await _turn_away(scope, send, FORBIDDEN)
            return
        if self._is_closed or not house.places.may_connect(ASYNC.now()):
            counts.closed["overloaded"] += 1
            await _turn_away(scope, send, OVERLOADED)
            return
        self.start()
        age_s = self._max_age_s * (1 - AGE_JITTER * random.random())  # noqa: S311
        connection = Connection(house, visitor, send, ASYNC.now() + age_s)
        house.places.connections += 1
        counts.connections += 1
        house.connections[connection] = None
        try:
            await send({"type": "websocket.accept"})
            await connection.run(receive)
        finally:
            del house.connections[connection]
            house.places.connections -= 1
            counts.connections -= 1
            counts.closed[connection.closing or "gone"] += 1

    # --- its life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Look after deadlines and connections. Done by itself with the first connection."""
        if self._tasks or self._is_closed:
            return
        self.rooms.start()
        self._tasks.append(asyncio.ensure_future(self._rounds()))
        if self._house.presence is not None:
            self._tasks.append(asyncio.ensure_future(self._house.presence.run()))
        for task in self._tasks:
            keep(task)

    async def _rounds(self) -> None:
        while True:
            await ASYNC.sleep(ROUND_S)
            self._house.look()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            self.start()
            await send({"type": "lifespan.startup.complete"})
        await self.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def drain(self, within_s: float = 10.0) -> None:
        """Let nobody in any more, and close what is open, between two messages, one after another.

        To be awaited before the server is told to end.
        """
        self._is_closed = True
        ends_at = ASYNC.now() + within_s
        open_ = self._house.connections
        crowd = list(open_)
        random.shuffle(crowd)
        steps = max(1, int(within_s * SPREAD / STEP_S))
        for step in range(steps):
            begin, end = (-(-len(crowd) * n // steps) for n in (step, step + 1))  # a few at once
            for connection in crowd[begin:end]:
                connection.close("drained")
            if not open_:
                break
            await ASYNC.sleep(STEP_S)
        while open_ and ASYNC.now() < ends_at:
            for connection in tuple(open_):  # those, too, that had just been let in
                connection.close("drained")
            await ASYNC.sleep(STEP_S)
        await self._drop_all("drained")

    async def _drop_all(self, why: Closing) -> None:
        for connection in tuple(self._house.connections):
            connection.drop(why)
        until = ASYNC.now() + LEFT_S
        while self._house.connections and ASYNC.now() < until:
            await ASYNC.sleep(STEP_S)

    async def aclose(self) -> None:
        """Let go of everything. Whoever is still connected is cut off."""
        self._is_closed = True
        await self._drop_all("drained")
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._house.presence is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEFT_S):
                    await self._house.presence.say_last()
        await self.rooms.aclose()

    # --- for people -----------------------------------------------------------------------------

    @property
    def store(self) -> LogStore:
        return self.rooms.store

    @property
    def shown(self) -> str:
        """What people call it."""
        return self.rooms.shown

    def status(self) -> RoomsStatus:
        return self.rooms.status(draining=self._is_closed)


async def _turn_away(scope: Mapping[str, Any], send: Send, status: int) -> None:
    """Before the connection is one: as HTTP, where the server can, which says when to return."""
    if status == FORBIDDEN or "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1008 if status == FORBIDDEN else 1013})
        return
    headers = [(b"retry-after", b"%d" % RETRY_S)]
    await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": b""})
    # uvicorn takes an app that returns before the line is closed for one that forgot to answer.
    await ASYNC.sleep(GONE_S)


async def _upgrade(send: Send) -> None:
    headers = [(b"upgrade", b"websocket"), (b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": 426, "headers": headers})
    await send({"type": "http.response.body", "body": b"Rooms are joined over WebSocket.\n"})
