"""How one speaks to the servers that are measured: WebSocket, and their messages in it. Pure.

A frame of a client has a mask of zeros, so that what is sent can be read. An action carries the
moment at which it was sent, `@` on both sides; whoever acts gets it back in the answer, and
everybody in the update.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from bench.realtime_crowd import HEAD_END, HOST, Seat

STAMP = re.compile(rb"@(\d+)@")

Kind: TypeAlias = Literal["result", "update", "refusal", "other"]

Step: TypeAlias = tuple[bytes, str]
"""What is waited for, and what is said then. Behind the last one, a client is in."""

PING, PONG, TEXT = 0x89, b"\x8a", b"\x81"
SHORT, MIDDLE = 126, 127


@dataclass(frozen=True)
class Place(Seat):
    """A seat in a room. `user` is empty for those who only watch."""

    room: str = ""
    user: str = ""

    def request(self, cursor: bytes) -> bytes:
        del cursor
        return (
            f"GET {self.path} HTTP/1.1\r\nHost: {HOST}:{self.port}\r\n"
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        ).encode()

    def steps(self) -> Sequence[Step]:
        raise NotImplementedError

    def action(self, stamp: int, number: int) -> str:
        raise NotImplementedError

    def kind(self, text: bytes) -> Kind:
        raise NotImplementedError

    def answer(self, text: bytes) -> str | None:
        """What has to be said so that the server does not hang up."""
        return None


@dataclass(frozen=True)
class Table(Place):
    """Ours."""

    def steps(self) -> Sequence[Step]:
        payload = {"tableId": self.room} | ({"token": self.user} if self.user else {})
        join = {"type": "JOIN", "requestId": "join", "payload": payload}
        return (HEAD_END, json.dumps(join)), (b'"TABLE_SNAPSHOT"', "")

    def action(self, stamp: int, number: int) -> str:
        return (
            f'{{"type":"ACTION_REQUEST","requestId":"client-{number:013d}","payload":'
            f'{{"tableId":"{self.room}","actionType":"add","note":"@{stamp}@"}}}}'
        )

    def kind(self, text: bytes) -> Kind:
        if text.startswith(b'{"type":"TABLE_STATE_UPDATE"'):
            return "update"
        if text.startswith(b'{"type":"ACTION_RESULT"'):
            return "result" if b'"success":true' in text else "refusal"
        return "other"


@dataclass(frozen=True)
class SocketIO(Place):
    """Acknowledged by number."""

    def steps(self) -> Sequence[Step]:
        join = json.dumps(["join", self.room])
        return (HEAD_END, ""), (b"0{", "40"), (b"40{", f"420{join}"), (b"430[", "")

    def action(self, stamp: int, number: int) -> str:
        what = {"room": self.room, "user": self.user, "note": f"@{stamp}@"}
        return f"42{number}{json.dumps(['add', what])}"

    def kind(self, text: bytes) -> Kind:
        return "update" if text.startswith(b"42") else "result" if text[:2] == b"43" else "other"

    def answer(self, text: bytes) -> str | None:
        return "3" if text == b"2" else None


@dataclass(frozen=True)
class BoardGame(SocketIO):
    """No answer of its own: who acts hears of it as everybody else does."""

    players: int = 5

    @property
    def _player(self) -> str | None:
        return self.user.rpartition("-")[2] or None

    def steps(self) -> Sequence[Step]:
        sync = json.dumps(["sync", self.room, self._player, None, self.players])
        return (
            (HEAD_END, ""),
            (b"0{", "40/tally,"),
            (b"40/tally,{", f"42/tally,{sync}"),
            (b'["sync"', ""),
        )

    def action(self, stamp: int, number: int) -> str:
        del number
        player = self._player
        move = {"type": "add", "args": [f"@{stamp}@"], "playerID": player, "credentials": None}
        said = ["update", {"type": "MAKE_MOVE", "payload": move}, 0, self.room, player]
        return f"42/tally,{json.dumps(said)}"

    def kind(self, text: bytes) -> Kind:
        return "update" if text.startswith(b'42/tally,["update"') else "other"


# --- frames -------------------------------------------------------------------------------------


def masked(opcode: bytes, content: bytes) -> bytes:
    size = len(content)
    if size < SHORT:
        return opcode + bytes((0x80 | size,)) + bytes(4) + content
    return opcode + b"\xfe" + size.to_bytes(2, "big") + bytes(4) + content


def said(text: str) -> bytes:
    return masked(TEXT, text.encode())


def frames(heard: bytes, start: int) -> Iterator[tuple[int, bytes, int]]:
    """Of a server: first byte, content, and where each ends. A last one in pieces is left out."""
    end = len(heard)
    while start + 2 <= end:
        size, begin = heard[start + 1], start + 2
        if size >= SHORT:
            wide = 2 if size == SHORT else 8
            size, begin = int.from_bytes(heard[begin : begin + wide], "big"), begin + wide
        if begin + size > end:
            return
        yield heard[start], heard[begin : begin + size], begin + size
        start = begin + size
