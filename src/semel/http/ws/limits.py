"""How much one process takes on, and how much of one client."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from semel.errors import SettingsError
from semel.http.sse.limits import Bucket
from semel.rooms.asking import MOST_BYTES
from semel.values import value

__all__ = ["Limits", "Places"]


@value
class Limits:
    """What a door takes on. Durations are seconds.

    `connections`: at once, in all. `accepts_per_s`: new ones, with twice as many at once.
    `per_user`: places of one user, in all rooms and by all connections. `rooms`: of one
    connection. `message_bytes`: of one message. `messages_per_s`: of one connection, with twice as
    many at once; what is too much is refused, and who goes on is closed. `in_flight`: actions of
    one connection that are not answered; more are refused. With as many joins and snapshots on
    their way it is not listened to. `join_within_s`: who has joined nothing by then is closed.
    `behind_events`, `behind_bytes`: whoever is further behind while the network takes nothing is
    cut off, and so is whoever takes nothing for `write_within_s`. It loses nothing: it comes back
    with its cursor.
    """

    connections: int = 10_000
    accepts_per_s: float = 1000.0
    per_user: int = 100
    rooms: int = 16
    message_bytes: int = MOST_BYTES
    messages_per_s: float = 20.0
    in_flight: int = 16
    join_within_s: float = 10.0
    behind_events: int = 256
    behind_bytes: int = 256 * 1024
    write_within_s: float = 30.0

    @property
    def frame_bytes(self) -> int:
        """Size above which a message closes the connection, in bytes."""
        return 4 * self.message_bytes

    def check(self) -> None:
        for name, number in asdict(self).items():
            if not number > 0:
                raise SettingsError(f"{name}={number}: a limit is more than 0")


class Places:
    """Who is here, in all and by user."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bucket = Bucket(limits.accepts_per_s)
        self.connections = 0
        self._by_user: Counter[str] = Counter()

    def may_connect(self, now_s: float) -> bool:
        return self.connections < self._limits.connections and self._bucket.take(now_s)

    def has_one_for(self, user: str | None) -> bool:
        """A place in a room."""
        return user is None or self._by_user[user] < self._limits.per_user

    def take(self, user: str | None) -> None:
        if user is not None:
            self._by_user[user] += 1

    def leave(self, user: str | None) -> None:
        if user is not None:
            self._by_user[user] -= 1
            if not self._by_user[user]:
                del self._by_user[user]
