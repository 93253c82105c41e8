"""What a client asks of a room, as it comes over the line: JSON, one message a frame. Pure.

    {"type": "ACTION_REQUEST", "requestId": "...", "payload": {"tableId": "...", ...}}

Whatever a client sends is one of the values below, or `Malformed`, which says what is wrong with
it. Whoever waits for an answer to it is told by its id, wherever that can be found. The names are
those of the protocol; in Python a table is a room, and its id a room id.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from semel.errors import SettingsError
from semel.rooms.names import MOST_CLIENT, MOST_REQUEST, MOST_ROOM, named, numbered
from semel.rooms.requests import MOST_DEPTH, is_deeper
from semel.rooms.standing import said
from semel.values import value

__all__ = [
    "Act",
    "Asked",
    "Join",
    "Leave",
    "Malformed",
    "Ping",
    "WantsSnapshot",
    "asked",
    "is_larger",
]

REASONS = ("gap", "reconnect", "manual", "stale")
"""Why a client asks for a snapshot."""

MOST_TOKEN = 8192
MOST_BYTES = 64 * 1024

# Every integer of up to 308 digits is finite as a double. JavaScript reads a much longer one as
# Infinity, and int() takes quadratic time.
MOST_DIGITS = 308

# How our clients begin every message. At the very beginning it can be nobody else's id.
_BEGINNING = re.compile(r'{"type": ?"[A-Z_]{1,40}", ?"requestId": ?"([^"\\]{1,100})"')

# Of an action, what is not the room's business.
_OURS = ("tableId", "expectedVersion")


class Malformed(Exception):  # noqa: N818 - a situation: the client is told, and nothing is wrong here
    """It is no message of ours. `request_id` is the one it came with, if any."""

    def __init__(self, message: str, request_id: str | None = None, code: str = "INVALID") -> None:
        super().__init__(message)
        self.request_id = request_id
        self.code = code


@value
class Join:
    """`cursor` is where the client was, if it was here before."""

    request_id: str | None
    room_id: str
    cursor: str | None = None
    token: str | None = None
    spectate: bool = False


@value
class Leave:
    """The client wants to hear no more of the room."""

    request_id: str | None
    room_id: str


@value
class Act:
    """`action` is the payload without what is meant for us."""

    request_id: str
    room_id: str
    action: Mapping[str, Any]
    expected_version: int | None = None
    client_id: str = ""
    client_seq: int | None = None


@value
class WantsSnapshot:
    """`version` is the one that the client has, if any."""

    request_id: str | None
    room_id: str
    version: int | None
    reason: str


@value
class Ping:
    """Is anybody there?"""

    request_id: str | None


Asked: TypeAlias = Join | Leave | Act | WantsSnapshot | Ping


def asked(text: str, most_bytes: int = MOST_BYTES) -> Asked:
    """What a message asks for; `Malformed` if it is none."""
    if is_larger(text, most_bytes):
        size = f"the message has more than {most_bytes:,} bytes"
        raise Malformed(size, _begins_with(text), "TOO_LARGE")
    try:
        message = json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"this is no JSON: {error}"[:200], _begins_with(text)) from None
    if not isinstance(message, dict):
        raise Malformed("a message is an object")
    request_id = _request_id(message)
    try:
        _check_can_be_said(message)
        return _read(message, request_id)
    except Malformed as wrong:
        wrong.request_id = request_id
        raise


def is_larger(content: str | bytes, most_bytes: int) -> bool:
    """Return whether the content has more than `most_bytes` bytes, text in UTF-8."""
    if isinstance(content, str) and 4 * len(content) > most_bytes >= len(content):
        content = content.encode()
    return len(content) > most_bytes


def _integer(digits: str) -> float:
    """Return the integer, or infinity, which is refused later, for one with too many digits."""
    return int(digits) if len(digits.lstrip("-")) <= MOST_DIGITS else math.inf


def _begins_with(text: str) -> str | None:
    """The id of a message that nobody can read, where it begins with it."""
    found = _BEGINNING.match(text)
    try:
        return None if found is None else _request_id({"requestId": found[1]})
    except Malformed:
        return None


def _check_can_be_said(message: dict[str, Any]) -> None:
    """There is what is read and nobody can write again: half a character, an endless number, a
    thousand brackets.
    """
    if is_deeper(message, 1 + MOST_DEPTH):  # of which the payload is an action
        raise Malformed(f"an action is nested up to {MOST_DEPTH} levels deep")
    try:
        said(message).encode()
    except UnicodeEncodeError as error:
        raise Malformed(f"this is no JSON: {error}"[:200]) from None
    except ValueError:
        raise Malformed(
            f"a number is finite, and an integer has up to {MOST_DIGITS} digits: send a longer one "
            "as text"
        ) from None


def _request_id(message: dict[str, Any]) -> str | None:
    found = message.get("requestId")
    return None if found is None else _text(found, "requestId", MOST_REQUEST)


def _read(message: dict[str, Any], request_id: str | None) -> Asked:
    kind = message.get("type")
    payload = message.get("payload", {})
    if not isinstance(payload, dict):
        raise Malformed("a payload is an object")
    match kind:
        case "ACTION_REQUEST":
            return _act(message, payload, request_id)
        case "JOIN":
            return _join(payload, request_id)
        case "REQUEST_SNAPSHOT":
            return _wants_snapshot(payload, request_id)
        case "LEAVE":
            return Leave(request_id, _room_id(payload))
        case "PING":
            return Ping(request_id)
        case _:
            raise Malformed(f"there is no message of type {str(kind)[:40]!r}")


def _act(message: dict[str, Any], payload: dict[str, Any], request_id: str | None) -> Act:
    if request_id is None:
        raise Malformed("an ACTION_REQUEST has a requestId")
    room_id = _room_id(payload)
    if not isinstance(payload.get("actionType"), str):
        raise Malformed("an ACTION_REQUEST has an actionType, which is text")
    client_id, client_seq = "", _whole(message.get("clientSeq"), "clientSeq", least=1)
    if client_seq is not None:
        client_id = _text(message.get("clientId"), "clientId", MOST_CLIENT)
    return Act(
        request_id,
        room_id,
        {name: content for name, content in payload.items() if name not in _OURS},
        _whole(payload.get("expectedVersion"), "expectedVersion"),
        client_id,
        client_seq,
    )


def _join(payload: dict[str, Any], request_id: str | None) -> Join:
    cursor, token, spectate = (payload.get(name) for name in ("cursor", "token", "spectate"))
    if token is not None and (not isinstance(token, str) or len(token) > MOST_TOKEN):
        raise Malformed(f"a token is text of up to {MOST_TOKEN} characters")
    if not isinstance(spectate, bool | None):
        raise Malformed("spectate is true or false")
    return Join(
        request_id,
        _room_id(payload),
        # One that is none is told so, as every other that leads nowhere.
        None if cursor is None else str(cursor)[:64],
        token,
        bool(spectate),
    )


def _wants_snapshot(payload: dict[str, Any], request_id: str | None) -> WantsSnapshot:
    reason = payload.get("reason", "manual")
    if reason not in REASONS:
        raise Malformed(f"a reason is one of {', '.join(REASONS)}")
    version = _whole(payload.get("currentVersion"), "currentVersion")
    return WantsSnapshot(request_id, _room_id(payload), version, reason)


def _room_id(payload: dict[str, Any]) -> str:
    return _text(payload.get("tableId"), "tableId", MOST_ROOM)


def _text(found: Any, name: str, most: int) -> str:
    try:
        return named(name, found, most)
    except SettingsError as wrong:
        raise Malformed(str(wrong)) from None


def _whole(found: Any, name: str, least: int = 0) -> int | None:
    try:
        return None if found is None else numbered(name, found, least)
    except SettingsError as wrong:
        raise Malformed(str(wrong)) from None
