"""Who is measured beside each other at the door: servers in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.machine import ROOT, version
from bench.realtime_servers import (
    SOCKET_IO,
    SOCKET_IO_PATH,
    Listening,
    node,
    node_versions,
    python,
)
from bench.rooms_dialects import BoardGame, Place, SocketIO, Table
from support.process import free_port

BOARD_GAME = ROOT / "bench" / "boardgameio"
ROOM = "bench.rooms_tally:tally"


@dataclass(frozen=True)
class Entrant:
    """Somebody to be measured. `start` takes the URL of a Redis; `place` makes seats there."""

    name: str
    role: str
    start: Callable[[str], Listening]
    place: Callable[..., Place]
    path: str = "/"
    note: str = ""

    def seats(self, port: int, room: str, users: int, watching: int = 0) -> Sequence[Place]:
        """In one room: those who act, and those who only watch."""
        names = [*(f"{room}-user-{n}" for n in range(users)), *[""] * watching]
        return [self.place(port, self.path, room=room, user=name) for name in names]


def _floor(_redis: str) -> Listening:
    port = free_port()
    return python("-m", "bench.rooms_app", str(port), port=port)


def semel(redis: str, room: str = ROOM) -> Listening:
    """`semel rooms`, as people start it."""
    port = free_port()
    words = ("-m", "semel", "rooms", room, "--store", redis, "--port", str(port), "--trust")
    return python(*words, "--quiet", port=port)


def _socket_io(_redis: str) -> Listening:
    port = free_port()
    return node(SOCKET_IO, "rooms.mjs", str(port), port=port)


def _board_game(_redis: str) -> Listening:
    port = free_port()
    return node(BOARD_GAME, "server.mjs", str(port), port=port)


ENTRANTS = (
    Entrant(
        "uvicorn, a dict and a loop",
        "floor",
        _floor,
        Table,
        note="the same server, in memory; nothing is kept, checked or sent again",
    ),
    Entrant("semel rooms, Redis", "us", semel, Table),
    Entrant(
        "Socket.IO",
        "peer",
        _socket_io,
        SocketIO,
        SOCKET_IO_PATH,
        "acknowledgements; in memory, nothing is kept",
    ),
    Entrant(
        "boardgame.io",
        "peer",
        _board_game,
        BoardGame,
        SOCKET_IO_PATH,
        "in memory; sends the whole state each time, and has no answer but that",
    ),
)


def versions() -> str:
    found = [f"{name} {version(name)}" for name in ("uvicorn", "websockets", "uvloop")]
    return f"- rooms: {', '.join([*found, *node_versions(SOCKET_IO, BOARD_GAME)])}"
