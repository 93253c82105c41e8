"""What goes over the line from a room to its clients: JSON, one message a frame. Pure.

    {"type": "TABLE_STATE_UPDATE", "payload": {"tableId": "...", "stateVersion": 43, ...}}

The names are those of the protocol; in Python a table is a room, and its id a room id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from semel.entries import Entry, Position
from semel.rooms.asking import Act
from semel.rooms.cursors import bound
from semel.rooms.news import Told, told
from semel.rooms.requests import Reply, request_of
from semel.rooms.standing import Standing, said

__all__ = [
    "error",
    "for_all",
    "for_viewer",
    "heartbeat",
    "joined",
    "left",
    "presence",
    "result",
    "results",
    "snapshot",
    "unsettled",
    "whole",
]


# --- what happens -------------------------------------------------------------------------------


@lru_cache(maxsize=256)  # everybody who is shown nothing of their own is sent the same
def _public(entry: Entry, view_version: str) -> Sequence[str]:
    return _shown(told(entry), None, view_version)


def for_viewer(entry: Entry, user: str | None, view_version: str = "") -> Sequence[str]:
    """What a user is shown of it: how the room has changed, and what came of a hand.

    Whoever has asked for it hears by which request: what they show beforehand is there now.
    """
    news, request_id = told(entry), None if user is None else request_of(entry.id, user)
    if request_id is None and user not in news.users:
        return _public(entry, view_version)
    return _shown(news, user, view_version, request_id)


def for_all(entries: Iterable[Entry], user: str | None, view_version: str = "") -> list[str]:
    """All of it, in order."""
    return [text for entry in entries for text in for_viewer(entry, user, view_version)]


def _shown(
    news: Told, user: str | None, view_version: str, request_id: str | None = None
) -> Sequence[str]:
    position = news.position
    payload = {
        "tableId": news.room_id,
        "stateVersion": position.offset,
        "previousVersion": news.after.offset,
        "position": str(bound(position, view_version)),
        "previous": str(bound(news.after, view_version)),
        "patch": news.patch(user),
        "events": news.events(user),
    }
    update = _said("TABLE_STATE_UPDATE", payload, request_id)
    result = news.result(user)
    return [update] if result is None else [update, _result(news.room_id, position, result)]


def results(room_id: str, standing: Standing, user: str | None) -> Sequence[str]:
    """Of a hand that is finished and still shown, what came of it."""
    result = standing.shown_result(user)
    if result is None:
        return []
    return [_result(room_id, standing.finished or standing.position, result)]


def _result(room_id: str, position: Position, result: Any) -> str:
    payload = {
        "tableId": room_id,
        "stateVersion": position.offset,
        "position": str(position),
        "result": result,
    }
    return said({"type": "HAND_RESULT", "payload": payload})


def snapshot(
    room_id: str, standing: Standing, user: str | None, reason: str, request_id: str | None
) -> str:
    payload = {
        "tableId": room_id,
        "stateVersion": standing.version,
        "position": str(bound(standing.position, standing.room.view_version)),
        "viewer": user,
        "reason": reason,
        "state": standing.shown_view(user),
    }
    return _said("TABLE_SNAPSHOT", payload, request_id)


def whole(
    room_id: str,
    standing: Standing,
    user: str | None,
    reason: str,
    request_id: str | None = None,
) -> list[str]:
    """How things stand: what came of a finished hand, and then the state."""
    told = snapshot(room_id, standing, user, reason, request_id)
    return [*results(room_id, standing, user), told]


# --- answers ------------------------------------------------------------------------------------


def joined(
    request_id: str | None,
    room_id: str,
    user: str | None,
    head: Position,
    *,
    resumed: bool,
    now_s: float,
    heartbeat_s: float,
    message_bytes: int,
) -> str:
    """`message_bytes`: so large a message may be. Who knows that need not wait to be told."""
    payload = {
        "tableId": room_id,
        "viewer": user,
        "head": str(head),
        "stateVersion": head.offset,
        "resumed": resumed,
        "serverTime": _millis(now_s),
        "heartbeatMs": _millis(heartbeat_s),
        "messageBytes": message_bytes,
    }
    return _said("JOINED", payload, request_id)


def result(request: Act, reply: Reply) -> str:
    payload: dict[str, Any] = {
        "tableId": request.room_id,
        "success": reply.success,
        "cached": reply.cached,
        "stateVersion": reply.version,
        "action": _echo(request.action),
    }
    if reply.success:
        payload["reply"] = reply.reply
    else:
        payload["error"] = {"code": reply.code, "message": reply.message}
    return _said("ACTION_RESULT", payload, request.request_id)


def unsettled(request: Act, code: str, message: str, *, retry_s: float | None = None) -> str:
    """An action that was not decided on: with `retry_s`, the same may be sent again."""
    payload = {
        "tableId": request.room_id,
        "success": False,
        "cached": False,
        "action": _echo(request.action),
        "error": _error(code, message, retry_s),
    }
    return _said("ACTION_RESULT", payload, request.request_id)


def _echo(action: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: content for name, content in action.items() if name != "actionType"}
    return {**rest, "type": action["actionType"]}


def error(
    code: str,
    message: str,
    *,
    request_id: str | None = None,
    room_id: str | None = None,
    retry_s: float | None = None,
) -> str:
    payload = _error(code, message, retry_s)
    if room_id is not None:
        payload["tableId"] = room_id
    return _said("ERROR", payload, request_id)


def _error(code: str, message: str, retry_s: float | None) -> dict[str, Any]:
    told: dict[str, Any] = {"code": code, "message": message}
    if retry_s is not None:
        told |= {"retry": True, "retryAfterMs": _millis(retry_s)}
    return told


def left(request_id: str | None, room_id: str, reason: str) -> str:
    return _said("LEFT", {"tableId": room_id, "reason": reason}, request_id)


def heartbeat(now_s: float, heads: Mapping[str, Position]) -> str:
    told = {room_id: str(head) for room_id, head in heads.items()}
    return _said("HEARTBEAT", {"serverTime": _millis(now_s), "heads": told})


def presence(room_id: str, users: Sequence[str], spectators: int) -> str:
    payload = {"tableId": room_id, "users": list(users), "spectators": spectators}
    return _said("PRESENCE", payload)


def _said(kind: str, payload: Mapping[str, Any], request_id: str | None = None) -> str:
    message: dict[str, Any] = {"type": kind}
    if request_id is not None:
        message["requestId"] = request_id
    return said({**message, "payload": payload})


def _millis(seconds: float) -> int:
    return round(seconds * 1000)
