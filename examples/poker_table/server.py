"""One of the servers: the page, and the door to the tables.

POKER_URL       where the tables are: sqlite:///poker.db, redis://... or postgresql://...
POKER_TURN_S    how long somebody may think
POKER_SHOW_S    how long the end of a hand is shown
POKER_SERVER    its name, for people
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from mortal import Mortal
from play import Rules
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from table import PokerTable

from semel.http.ws import RoomDoor, Spectator, Visitor
from semel.rooms import Rooms

PAGE = Path(__file__).parent / "page"
URL = os.environ.get("POKER_URL", "sqlite:///poker.db")
LONGEST_NAME = 20

rules = Rules(
    turn_s=float(os.environ.get("POKER_TURN_S", "30")),
    show_s=float(os.environ.get("POKER_SHOW_S", "8")),
)


def who(visitor: Visitor, _room_id: str) -> str | Spectator | None:
    """Here everybody is who they say they are. A real site looks at its own login."""
    if visitor.spectate:
        return Spectator()
    name = visitor.token or ""
    is_name = 0 < len(name) <= LONGEST_NAME and name.isprintable() and name == name.strip()
    return name if is_name else None


rooms = Rooms(URL, PokerTable(rules), name="poker")
door = RoomDoor(rooms, authorise=who)


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    door.start()  # turns end, also where nobody is connected
    yield
    await door.aclose()


async def page(_: Request) -> FileResponse:
    return FileResponse(PAGE / "index.html")


app = Starlette(
    routes=[
        Route("/", page),
        Mount("/page", StaticFiles(directory=PAGE)),
        WebSocketRoute("/rooms", Mortal(door, name=os.environ.get("POKER_SERVER", "s1"))),
    ],
    lifespan=lifespan,
)


class Server(uvicorn.Server):
    """Lets the players go before it closes; they come back to the other one."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()  # who comes back now is the other one's
        await door.drain(within_s=0.5)
        await super().shutdown(sockets)


if __name__ == "__main__":
    listening = socket.socket(fileno=int(sys.argv[1]))
    Server(uvicorn.Config(app, ws="websockets-sansio", log_level="warning")).run([listening])
