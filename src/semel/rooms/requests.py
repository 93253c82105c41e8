"""A request to change a room, what it is answered, and how both are kept. Pure.

A request is known by its user and its id, never by the id alone: ids are the clients' own, and one
must not be handed another one's reply. What is asked has a fingerprint, so that an id that is used
for something else is found out. A client that numbers its requests is known by its number, too:
that is remembered when the ids are long forgotten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from semel.errors import CorruptRecordError, SettingsError
from semel.rooms.names import MOST_CLIENT, MOST_REQUEST, MOST_ROOM, MOST_USER, named, numbered
from semel.rooms.standing import check_keys, said
from semel.values import value

__all__ = [
    "MOST_DEPTH",
    "Reply",
    "Request",
    "is_deeper",
    "kept",
    "reply_of",
    "request_of",
]

# Of an action, in levels. Rules that keep it have a state that is deeper still.
MOST_DEPTH = 64

_NESTED = (dict, list, tuple)

_SORTED = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True
).encode


@value
class Request:
    """`user` is None for the system itself. `timeout` names the turn that is to be timed out.

    `expected_version`: the version that was seen by whoever asks; on another one it is refused.
    `client_id` and `client_seq`: which of a client's requests this is, from 1. `fingerprint` is of
    what is asked: the same when its members come in another order.
    """

    room_id: str
    user: str | None
    request_id: str
    action: Mapping[str, Any]
    expected_version: int | None = None
    client_id: str = ""
    client_seq: int | None = None
    timeout: str | None = None
    fingerprint: bytes = field(init=False)

    def __post_init__(self) -> None:
        """What can be kept by no log is refused before anything else."""
        found = _fingerprint(self.action, self.expected_version)
        object.__setattr__(self, "fingerprint", found)
        self._name("room_id", "room id", MOST_ROOM)
        self._name("request_id", "request id", MOST_REQUEST)
        if self.user is not None:
            self._name("user", "user", MOST_USER)
        if self.client_seq is not None:
            self._name("client_id", "client id", MOST_CLIENT)
            numbered("client seq", self.client_seq, least=1)
        if self.expected_version is not None:
            numbered("expected version", self.expected_version)

    def _name(self, field: str, what: str, most: int) -> None:
        object.__setattr__(self, field, named(what, getattr(self, field), most))

    @property
    def id(self) -> str:
        """What tells it from every other in its room. No user is nameless, but the system."""
        return f"{_named(self.user)}{self.request_id}"

    @property
    def rising(self) -> dict[str, int] | None:
        """The client's number: no other request of its may have this one, or a smaller one."""
        if self.client_seq is None:
            return None
        return {f"{_named(self.user)}{self.client_id}": self.client_seq}


def _named(user: str | None) -> str:
    """With its length: no two users begin alike."""
    return f"{len(user or '')}:{user or ''}:"


def request_of(id: str, user: str) -> str | None:
    """What that user called the request that is known by `id`; None if it is somebody else's."""
    named = _named(user)
    return id.removeprefix(named) if id.startswith(named) else None


def _fingerprint(action: Any, version: int | None) -> bytes:
    if not isinstance(action, Mapping):
        raise SettingsError(f"an action is a mapping, and this is a {type(action).__name__}")
    if not isinstance(action.get("actionType"), str):
        raise SettingsError(f"an action has an actionType, which is text: {dict(action)!r:.80}")
    content = dict(action)
    if is_deeper(content, MOST_DEPTH):
        raise SettingsError(f"the action is nested more than {MOST_DEPTH} levels deep")
    try:
        text = _written(content)
        return hashlib.sha256(f"[{text},{_SORTED(version)}]".encode()).digest()
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingsError(f"the action cannot be written as JSON: {error}"[:200]) from error


def _written(content: dict[str, Any]) -> str:
    try:
        text = _SORTED(content)
    except TypeError:
        check_keys(content, "action")
        raise
    if json.loads(text) != content:  # many times as fast as to look at each key: clients send them
        check_keys(content, "action")
    return text


def is_deeper(what: Any, levels: int) -> bool:
    """Is it nested deeper than so many levels? Nobody could compare, or write it again.

    Level by level: a client may send ten thousand empty lists, and is not to keep the others.
    """
    inside = [what] if isinstance(what, _NESTED) else []
    while inside and levels:
        levels -= 1
        inside = [
            each
            for one in inside
            for each in (one.values() if isinstance(one, dict) else one)
            if isinstance(each, _NESTED)
        ]
    return bool(inside)


@value
class Reply:
    """What became of a request, at which version.

    `cached`: it was answered before, and this is the same answer. Where it was refused, `code` and
    `message` say why.
    """

    version: int
    reply: Any = None
    code: str = ""
    message: str = ""
    cached: bool = False

    @property
    def success(self) -> bool:
        return not self.code


def kept(reply: Reply) -> bytes:
    """As a log keeps it, beside its position."""
    if reply.success:
        return said({"reply": reply.reply}).encode()
    return said({"code": reply.code, "message": reply.message}).encode()


def reply_of(data: bytes, version: int, *, cached: bool = True) -> Reply:
    try:
        read = json.loads(data)
        if "code" in read:
            return Reply(version, None, read["code"], read["message"], cached)
        return Reply(version, read["reply"], cached=cached)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRecordError(f"a reply that is kept cannot be read: {error}") from error
