"""What a server says, read with care: anything may be missing, or be something else. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from semel.client.feed_rules import LONGEST_ASKED_S, SHORTEST_S, parsed
from semel.client.room_values import Presence
from semel.entries import Position
from semel.values import value

Payload: TypeAlias = Mapping[str, Any]

# Larger whole numbers are not what they seem in a browser.
LARGEST: Final = 2**53 - 1


@value
class Message:
    """`request_id` is that of the question, if it is an answer, or has come of one."""

    kind: str
    request_id: str | None
    payload: Payload


@value
class Update:
    """From one position to a later one, by this request of ours, if it was one."""

    position: Position
    previous: Position
    patch: Any
    events: list[Any]
    request_id: str | None


def message_of(said: str | bytes) -> Message | None:
    """None for what is no message."""
    try:
        found = json.loads(said, parse_constant=_refused) if isinstance(said, str) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    kind, id, payload = found.get("type"), found.get("requestId"), found.get("payload", {})
    if not isinstance(kind, str) or not isinstance(payload, dict):
        return None
    return Message(kind, id if isinstance(id, str) else None, payload)


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def spoken(message: Payload) -> str:
    """As it goes over the line: a letter is a letter, as a browser sends it."""
    text = json.dumps(message, separators=(",", ":"), ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of one: the server says what it thinks of that
        return json.dumps(message, separators=(",", ":"))
    return text


def update_of(payload: Payload, request_id: str | None) -> Update | None:
    position = positioned(payload, "stateVersion", "position")
    previous = positioned(payload, "previousVersion", "previous")
    patch, events = payload.get("patch"), payload.get("events", [])
    if position is None or previous is None or previous.offset >= position.offset:
        return None
    if not isinstance(patch, list) or not isinstance(events, list):
        return None
    return Update(position, previous, patch, events, request_id)


def presence_of(payload: Payload) -> Presence | None:
    users, spectators = payload.get("users"), whole(payload.get("spectators", 0))
    if not isinstance(users, list) or spectators is None:
        return None
    return Presence(tuple(user for user in users if isinstance(user, str)), spectators)


def positioned(payload: Payload, number: str, name: str) -> Position | None:
    """The position that goes with a version; None unless there are both."""
    version, position = whole(payload.get(number)), parsed(payload.get(name))
    return position if position is not None and position.offset == version else None


def whole(found: object) -> int | None:
    """A version; None for what is none, however much it looks like one."""
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return None
    return int(found) if 0 <= found <= LARGEST and found == int(found) else None


def text(found: object, otherwise: str = "") -> str:
    return found if isinstance(found, str) else otherwise


def seconds(ms: object) -> float | None:
    """How long a server wants something to last, within reason."""
    if isinstance(ms, bool) or not isinstance(ms, (int, float)):
        return None
    return min(max(SHORTEST_S * 1000, ms), LONGEST_ASKED_S * 1000) / 1000


def guard_of(action: Any) -> str:
    """The same for two actions that say the same."""
    return json.dumps(action, sort_keys=True, separators=(",", ":"))
