"""What somebody is told who joins a room: what they have missed, or how things stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from semel.entries import Position
from semel.errors import CorruptRecordError, SettingsError, StoreUnavailableError
from semel.failures import Failures
from semel.feed import Reset, parsed
from semel.feed.values import Burst
from semel.http.ws.visitor import NotLetIn
from semel.rooms import messages
from semel.rooms.asking import Join
from semel.rooms.cursors import bound
from semel.rooms.standing import Standing

if TYPE_CHECKING:
    from semel.http.ws.door import House

__all__ = ["Joining", "why_not"]

RETRY_S = 1.0


def why_not(error: Exception, room_id: str, failures: Failures) -> NotLetIn:
    """What somebody is told to whom a room cannot be shown."""
    match error:
        case NotLetIn():
            return error
        case StoreUnavailableError():
            return NotLetIn("the room cannot be read now", "UNAVAILABLE", RETRY_S)
        case CorruptRecordError():
            failures.tell(error, "semel: room %r cannot be shown: %s", room_id, error)
        case SettingsError():  # of the store, as without its tables
            failures.tell(error, "semel: room %r cannot be shown: %s", room_id, error)
            return NotLetIn("the room cannot be read now", "UNAVAILABLE", RETRY_S)
        case _:
            failures.tell(error, "semel: room %r could not be shown", room_id)
    return NotLetIn("this room cannot be shown", "FAILED")


class Joining:
    """One who joins, as `user`, None for a spectator. `texts` are told, in this order."""

    def __init__(self, house: House, join: Join, user: str | None) -> None:
        self._house = house
        self._join = join
        self._user = user
        self._view_version = house.rooms.room.view_version
        self.texts: Sequence[str] = ()
        self._updates = 0
        self._reason: str | None = None

    async def begin(self, seen: int = 0) -> Position:
        """Find out what is to be told. What comes next follows the position that it gives.

        Whoever joins once more has `seen` that version.
        """
        standing = await self._house.rooms.standing(self._join.room_id, seen=seen)
        self._house.rooms.look_after(standing, self._join.room_id)
        cursor, unreadable = parsed(self._join.cursor)
        if cursor is not None:
            cursor = bound(cursor, self._view_version)
        # Whoever comes back to a finished hand is told what came of it, and how things stand.
        if cursor is not None and standing.shown_result(self._user) is None:
            return await self._resume(standing, cursor)
        return self._afresh(
            standing, unreadable or ("join" if self._join.cursor is None else "reconnect")
        )

    async def _resume(self, standing: Standing, cursor: Position) -> Position:
        """What follows the cursor, or how things stand where that cannot be had."""
        rooms, room_id = self._house.rooms, self._join.room_id
        following = rooms.follow(room_id, cursor)
        try:
            await following.ready()
            news = following.take()
            if news is None and following.needs_log:
                news = await following.fetch()
        finally:
            following.close()
        if isinstance(news, Reset):
            found = Standing.of(rooms.room, room_id, news.snapshot)
            self._house.reset(room_id, found, news.reason)
            return self._afresh(found, news.reason)
        try:
            entries = news.entries if isinstance(news, Burst) else []
            missed = messages.for_all(entries, self._user, self._view_version)
        except CorruptRecordError as error:
            rooms.failures.tell(error, "semel: room %r cannot be shown: %s", room_id, error)
            return self._afresh(standing, "unreadable")
        self._updates = len(entries)
        self.texts = [self._joined(standing.position, resumed=True), *missed]
        return following.position

    def _afresh(self, standing: Standing, reason: str) -> Position:
        self._reason = reason
        told = messages.whole(self._join.room_id, standing, self._user, reason)
        self.texts = [self._joined(standing.position, resumed=False), *told]
        return standing.position

    def count(self) -> None:
        """It was told."""
        counts = self._house.counts
        counts.updates += self._updates
        if self._reason is not None:
            counts.snapshots[self._reason] += 1

    def _joined(self, head: Position, *, resumed: bool) -> str:
        house, join = self._house, self._join
        return messages.joined(
            join.request_id,
            join.room_id,
            self._user,
            bound(head, self._view_version),
            resumed=resumed,
            now_s=house.rooms.now_s(),
            heartbeat_s=house.heartbeat_s,
            message_bytes=house.limits.message_bytes,
        )
