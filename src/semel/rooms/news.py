"""What happened in a room, as one entry of its log: who is told what is decided when it is written.

So a replay shows somebody exactly what they were shown when it happened, whatever they may see by
then. An entry says how each member's view has changed, and how everybody else's has; what happened
besides, by audience; and what came of a hand, when one is finished.

    {"room", "after", "all": patch, "own": {user: patch}, "events": [[audience, payload]],
     "result": {"all": ..., "own": {user: ...}}}

A member who is not named in `own` is shown the same change as everybody else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from semel.entries import Entry, Position
from semel.errors import CorruptRecordError, SettingsError
from semel.rooms.patches import diff
from semel.rooms.room import ALL, Audience, Event
from semel.rooms.standing import Standing, check_keys, check_users, said
from semel.values import value

__all__ = ["Told", "finished", "told", "written"]


def written(room_id: str, before: Standing, after: Standing, events: Sequence[Event]) -> str:
    """The entry that leads from one standing to the next."""
    users = _users(before, after)
    entry: dict[str, Any] = {"room": room_id, "after": str(before.position)}
    entry |= _for_each(users, lambda user: diff(before.shown_view(user), after.shown_view(user)))
    if events:
        entry["events"] = [_event(event) for event in events]
    if after.finished == after.position:
        entry["result"] = _for_each(users, after.shown_result)
    return said(entry)


def _for_each(users: Iterable[str], shown: Callable[[str | None], Any]) -> dict[str, Any]:
    everybody = shown(None)
    own = {user: what for user in users if not _is_same(what := shown(user), everybody)}
    return {"all": everybody, "own": own} if own else {"all": everybody}


def _is_same(one: Any, other: Any) -> bool:
    """To the letter: to Python `1`, `1.0` and `True` are equal."""
    return one is other or said(one) == said(other)


def finished(before: Standing, after: Standing) -> Position | None:
    """Where the result that is shown came to be: here, if nobody was told of it before."""
    viewers = (None, *_users(before, after))
    shown = [user for user in viewers if after.shown_result(user) is not None]
    if any(after.shown_result(user) != before.shown_result(user) for user in shown):
        return after.position
    return before.finished if shown else None


def _users(before: Standing, after: Standing) -> Iterable[str]:
    return dict.fromkeys((*before.members, *after.members))


def _event(event: Any) -> list[Any]:
    match event:
        case (audience, payload):
            check_keys(payload, "event")
            return [_named(audience), payload]
    raise SettingsError(f"an event is a pair: (ALL, what), or ([user], what); not {event!r:.80}")


def _named(audience: Audience) -> str | list[str]:
    if isinstance(audience, str):
        if audience != ALL:
            raise SettingsError(f'an audience is ALL or a list of users; write ["{audience}"]')
        return audience
    named = list(audience)
    check_users(named, "an event's audience")
    return named


@value
class Told:
    """An entry, read: what somebody is told of it. `users` are told something of their own."""

    room_id: str
    after: Position
    position: Position
    changes: Mapping[str, Any]
    happened: Sequence[Sequence[Any]]
    results: Mapping[str, Any] | None
    users: frozenset[str]

    def patch(self, user: str | None) -> Any:
        return _own(self.changes, user)

    def events(self, user: str | None) -> list[Any]:
        return [
            payload
            for audience, payload in self.happened
            if audience == ALL or (type(audience) is list and user in audience)
        ]

    def result(self, user: str | None) -> Any:
        return None if self.results is None else _own(self.results, user)


def _own(shown: Mapping[str, Any], user: str | None) -> Any:
    own = shown.get("own")
    return own[user] if own is not None and user in own else shown["all"]


def _named_in(
    changes: Mapping[str, Any], happened: Sequence[Sequence[Any]], results: Mapping[str, Any] | None
) -> frozenset[str]:
    named = {user for audience, _ in happened if audience != ALL for user in audience}
    return frozenset(named.union(changes.get("own", {}), (results or {}).get("own", {})))


def told(entry: Entry) -> Told:
    return _told(entry.position, entry.data)


@lru_cache(maxsize=256)  # as many as are shown to several at the same time
def _told(position: Position, data: bytes) -> Told:
    try:
        read = json.loads(data)
        after = Position.parse(read["after"])
        if after is None or after.offset != position.offset - 1:
            raise ValueError(f"it follows {read['after']!r}")
        happened, results = read.get("events", ()), read.get("result")
        for shown in (read,) if results is None else (read, results):
            if "all" not in shown or not isinstance(shown.get("own", {}), dict):
                raise ValueError("it does not say what is shown")
        users = _named_in(read, happened, results)
        return Told(read["room"], after, position, read, happened, results, users)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptRecordError(
            f"entry {position} of a room is none that Semel has written: {error}"
        ) from error
