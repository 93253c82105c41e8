"""How a room stands at one version, and who sees what of it. Pure.

The state is kept as text, and read anew for whoever may change what it is given: the rules promise
not to, and a room in which they do is not to be wrong for that.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Iterable, Sequence
from typing import Any

from semel.entries import Position, Snapshot, beginning
from semel.rooms.room import Deadline, Room, checked

__all__ = ["Standing", "check_keys", "check_users", "plain", "said"]

_WRITTEN = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def said(what: Any) -> str:
    """As JSON; `TypeError` or `ValueError` for what JSON cannot say."""
    return _WRITTEN(what)


def plain(what: Any, where: str) -> Any:
    """As it is when it was written and read again: tuples are lists. See `check_keys`."""
    if what is None:
        return None
    read = json.loads(_WRITTEN(what))
    if read != what:  # ten times as fast as to look at each key, which is for tuples' sake
        check_keys(what, where)
    return read


def check_keys(what: Any, where: str) -> None:
    """`TypeError` for a key that is no text: JSON would make it text, and rules not find it."""
    if (path := _to_odd_key(what)) is not None:
        *way, key = path
        at = "".join(f"[{step!r}]" for step in way)
        raise TypeError(
            f"{where}{at} has the key {key!r}, and would come back from JSON with the key "
            f"{json.dumps(key)!r}: keys are text; write str(key), and look for that"
        )


def check_users(named: Iterable[Any], where: str) -> None:
    """`TypeError` for what is nobody's name: None is everybody, and a number nobody."""
    for user in named:
        if not isinstance(user, str):
            raise TypeError(
                f"{where}: {user!r:.80} is no user's name, which is text: leave out "
                "whoever is not there, and write str(...) of a number"
            )


def _to_odd_key(what: Any) -> tuple[Any, ...] | None:
    if isinstance(what, dict):
        for key in what:
            if not isinstance(key, str):
                return (key,)
        inside: Iterable[tuple[Any, Any]] = what.items()
    elif isinstance(what, list | tuple):
        inside = enumerate(what)
    else:
        return None
    for step, each in inside:
        if (path := _to_odd_key(each)) is not None:
            return (step, *path)
    return None


class Standing:
    """A room's state at a position, with everything that its rules say of it, asked once."""

    __slots__ = (
        "_deadline",
        "_members",
        "_packed",
        "_results",
        "_views",
        "finished",
        "position",
        "room",
        "text",
    )

    def __init__(
        self, room: Room, position: Position, text: str, finished: Position | None = None
    ) -> None:
        self.room = room
        self.position = position
        self.text = text
        self.finished = finished
        """Where the result that is shown came to be; None where none is."""
        self._packed = b""
        self._members: Sequence[str] | None = None
        self._views: dict[str | None, Any] = {}
        self._results: dict[str | None, Any] = {}
        self._deadline: Any = _UNKNOWN

    @classmethod
    def of(cls, room: Room, room_id: str, snapshot: Snapshot) -> Standing:
        """As the log has it; a room in which nothing has happened is as it begins."""
        if snapshot.state is None:
            return cls(room, snapshot.position, _begun(room, room_id))
        text, _, finished = snapshot.state.decode().partition(_APART)
        return cls(room, snapshot.position, text, Position.parse(finished))

    @classmethod
    def at_the_beginning(cls, room: Room, room_id: str, stream: str) -> Standing:
        return cls(room, beginning(stream), _begun(room, room_id))

    def kept(self) -> bytes:
        """As the log keeps it."""
        if self.finished is None:
            return self.text.encode()
        return f"{self.text}{_APART}{self.finished}".encode()

    @property
    def version(self) -> int:
        return self.position.offset

    def check(self, state: Any) -> None:
        """Is what the rules gave what they will be given? `TypeError` where it is not."""
        read = json.loads(self.text)
        self._packed = marshal.dumps(read, _PACKED)  # somebody is about to ask
        if read != state:
            check_keys(state, "state")

    def state(self) -> Any:
        """For whoever asks, and nobody else."""
        return json.loads(self.text)

    def _seen(self) -> Any:
        """For one of the questions below. Three times as fast as to read the text."""
        if not self._packed:
            self._packed = marshal.dumps(json.loads(self.text), _PACKED)
        return marshal.loads(self._packed)  # noqa: S302 - packed a line above

    @property
    def members(self) -> Sequence[str]:
        if self._members is None:
            members = tuple(self.room.members(self._seen()))
            check_users(members, "members")
            self._members = tuple(dict.fromkeys(members))
        return self._members

    def viewer_of(self, user: str | None) -> str | None:
        """As whom somebody sees this: as themselves, or as everybody else."""
        return user if user in self.members else None

    def view(self, user: str | None) -> Any:
        """For whoever asks, and nobody else."""
        return _copied(self.shown_view(user))

    def result(self, user: str | None) -> Any:
        """For whoever asks, and nobody else."""
        return _copied(self.shown_result(user))

    def shown_view(self, user: str | None) -> Any:
        """The same for all to whom it is shown, and not to be changed."""
        viewer = self.viewer_of(user)
        if viewer not in self._views:
            seen = self._seen()
            shown = self.room.view(seen, viewer)
            is_all = shown is seen and marshal.dumps(seen, _PACKED) == self._packed
            self._views[viewer] = shown if is_all else plain(shown, "view")
        return self._views[viewer]

    def shown_result(self, user: str | None) -> Any:
        """The same for all to whom it is shown, and not to be changed."""
        viewer = self.viewer_of(user)
        if viewer not in self._results:
            self._results[viewer] = plain(self.room.result(self._seen(), viewer), "result")
        return self._results[viewer]

    @property
    def deadline(self) -> Deadline | None:
        if self._deadline is _UNKNOWN:
            self._deadline = checked(self.room.deadline(self._seen()))
        found: Deadline | None = self._deadline
        return found


def _copied(what: Any) -> Any:
    return marshal.loads(marshal.dumps(what, _PACKED))  # noqa: S302 - ours, and plain


def _begun(room: Room, room_id: str) -> str:
    state = room.begin(room_id)
    check_keys(state, "state")
    return said(state)


_UNKNOWN: Any = object()

# Stands in no JSON that is written in one line.
_APART = "\n"

# Of marshal: the last version that writes the same for what is the same.
_PACKED = 2
