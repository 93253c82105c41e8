"""Servers of rooms that stop at a named point of one action, to be killed or frozen there.

    python -m support.room_trapped     # then a JSON object per line for each that is to start:
    {"url": ..., "port": ..., "room": "turns", "at": "before-append", "do": "stop"}

The action is the first whose request id begins with `trap`. It comes by `POINTS`, in that order; a
server that has come to its own says so, and is dead or frozen by then. Without one it serves.
`Guest` is a client of theirs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal

import uvicorn
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidHandshake, WebSocketException

from semel.http.ws import RoomDoor
from semel.rooms import Accepted, Deadline, Refused, Room, Rooms, host
from semel.settings import as_log_store
from semel.stores import RedisStore
from support.card_table import CardTable
from support.nursery import say, serve
from support.process import HOST, READY_WITHIN_S
from support.room_party import patched

POINTS = (
    "before-load",
    "after-load",
    "before-note",
    "after-note",
    "before-append",
    "after-append",
    "before-answer",
)
DO = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Turns(Room):
    """Counts; a turn lasts for as many seconds as whoever begins it says."""

    def begin(self, room_id):
        return {"count": 0, "turn": 0, "until": None, "late": []}

    def apply(self, state, action, ctx):
        kind, counted = action["actionType"], {**state, "count": state["count"] + 1}
        if kind == "begin":
            until = ctx.now_s + action["s"]
            return Accepted(counted | {"turn": state["turn"] + 1, "until": until}, counted["count"])
        if kind == "play":
            if state["until"] is None:
                return Refused("LATE", "the turn is over")
            return Accepted(counted | {"until": None}, counted["count"])
        return Accepted(counted, counted["count"])

    def view(self, state, viewer):
        return state

    def deadline(self, state):
        turn, until = state["turn"], state["until"]
        return None if until is None else Deadline(f"turn-{turn}", until)

    def timeout(self, state, turn, ctx):
        return Accepted({**state, "until": None, "late": [*state["late"], turn]})


ROOMS = {"turns": Turns(), "cards": CardTable(turn_s=600)}


# --- a server -----------------------------------------------------------------------------------


class Trap:
    """Springs once, at its point of the action that is watched."""

    def __init__(self, at, do):
        self._at = at
        self._do = DO[do]
        self._is_watched = False

    def watch(self, request):
        self._is_watched = self._is_watched or request.request_id.startswith("trap")

    def pass_by(self, point):
        if self._is_watched and point == self._at:
            self._at = None
            say(trapped=point)
            os.kill(os.getpid(), self._do)


class TrappedLog:
    def __init__(self, log, trap):
        self._log = log
        self._trap = trap

    def __getattr__(self, name):
        return getattr(self._log, name)

    async def append(self, stream, data, **more):
        kind = "append" if ":room:" in stream else "note" if stream.endswith(":timers") else ""
        self._trap.pass_by(f"before-{kind}")
        answer = await self._log.append(stream, data, **more)
        self._trap.pass_by(f"after-{kind}")
        return answer

    async def load(self, stream):
        self._trap.pass_by("before-load")
        snapshot = await self._log.load(stream)
        self._trap.pass_by("after-load")
        return snapshot


class TrappedRooms(Rooms):
    def __init__(self, store, room, trap):
        log = store.log
        store.log = lambda colour: TrappedLog(log(colour), trap)
        self._trap = trap
        super().__init__(store, room)

    async def settle(self, request):
        self._trap.watch(request)
        reply = await super().settle(request)
        self._trap.pass_by("before-answer")
        return reply


async def run(asked):
    trap = Trap(asked.get("at"), asked.get("do", "kill"))
    host.PATIENCE_S = asked.get("patience_s", host.PATIENCE_S)
    url, timeout_s = asked["url"], asked.get("timeout_s")
    store = as_log_store(url) if timeout_s is None else RedisStore(url, timeout_s=timeout_s)
    rooms = TrappedRooms(store, ROOMS[asked.get("room", "turns")], trap)
    door = RoomDoor(rooms, authorise=lambda visitor, _: visitor.token, heartbeat_s=1.0)
    config = uvicorn.Config(
        door, host=HOST, port=asked["port"], ws="websockets-sansio", log_level="warning"
    )
    await uvicorn.Server(config).serve()


def play(asked):
    asyncio.run(run(asked))


# --- a client -----------------------------------------------------------------------------------


class Guest:
    """Sits at one table over one connection, and knows how it stands by what it was told."""

    def __init__(self, port, user, room_id, cursor=None):
        self._port = port
        self._user = user
        self._room_id = room_id
        self._cursor = cursor
        self._line = self._reading = None
        self.told = []
        self.state = self.position = None

    async def __aenter__(self):
        async with asyncio.timeout(READY_WITHIN_S):
            while self._line is None:
                try:
                    self._line = await connect(
                        f"ws://{HOST}:{self._port}/", ping_interval=None, close_timeout=0.1
                    )
                except (OSError, WebSocketException, InvalidHandshake, TimeoutError):
                    await asyncio.sleep(0.02)
        self._reading = asyncio.create_task(self._read())
        join = {"token": self._user} | ({"cursor": self._cursor} if self._cursor else {})
        await self.say("JOIN", "join", **join)
        return self

    async def __aexit__(self, *_):
        self._reading.cancel()
        self._line.transport.abort()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self):
        try:
            async for frame in self._line:
                message = json.loads(frame)
                self._follow(message["type"], message["payload"])
                self.told.append(message)
        except WebSocketException:
            pass

    def _follow(self, kind, payload):
        if kind == "TABLE_SNAPSHOT":
            self.position, self.state = payload["position"], payload["state"]
        elif kind == "TABLE_STATE_UPDATE":
            assert payload["previous"] == self.position
            self.position, self.state = payload["position"], patched(self.state, payload["patch"])

    async def say(self, kind, rid, **payload):
        told = {"type": kind, "requestId": rid, "payload": {"tableId": self._room_id, **payload}}
        await self._line.send(json.dumps(told))

    async def heard(self, kind, rid=None, *, behind=0):
        """The first of these, also of those that came before; `behind` leaves so many out."""
        async with asyncio.timeout(READY_WITHIN_S):
            while True:
                found = [
                    message
                    for message in self.told
                    if message["type"] == kind and rid in (None, message.get("requestId"))
                ]
                if len(found) > behind:
                    return found[behind]["payload"]
                await asyncio.sleep(0.005)

    async def act(self, rid, kind="add", **more):
        answers = [m for m in self.told if m["type"] == "ACTION_RESULT"]
        before = sum(m["requestId"] == rid for m in answers)
        await self.say("ACTION_REQUEST", rid, actionType=kind, **more)
        return await self.heard("ACTION_RESULT", rid, behind=before)

    def reasons(self):
        """Of the snapshots that it was told."""
        return [m["payload"]["reason"] for m in self.told if m["type"] == "TABLE_SNAPSHOT"]


if __name__ == "__main__":
    serve(play)
