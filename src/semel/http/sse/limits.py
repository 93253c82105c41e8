"""How much a gateway takes on, and when it says no."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import asdict

from semel.errors import SettingsError
from semel.http.sse.problems import later
from semel.values import value

__all__ = ["Bucket", "Limits", "Seats"]

# Whoever is told to come back later comes back after so long, or up to twice that.
BACK_S = 2.0


@value
class Limits:
    """What one process of a gateway takes on. Durations are seconds.

    `connections`: at once, in all. `per_principal`: of one principal; whoever is nobody is not
    counted. `accepts_per_s`: new streams, with twice as many at once; so many that it is felt only
    when everybody comes back together. `behind_events`, `behind_bytes`: whoever is further behind
    while the network takes nothing from us is cut off, and so is whoever takes nothing for
    `write_within_s`. It loses nothing: it comes back with its cursor.
    """

    connections: int = 10_000
    per_principal: int = 100
    accepts_per_s: float = 1000.0
    behind_events: int = 256
    behind_bytes: int = 256 * 1024
    write_within_s: float = 30.0

    def check(self) -> None:
        for name, number in asdict(self).items():
            if not number > 0:  # also true of NaN
                raise SettingsError(f"{name}={number}: a limit is more than 0")


class Bucket:
    """Fills at a rate, up to what comes in two seconds; what is taken out is gone."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._most = max(1.0, 2 * per_s)
        self._level = self._most
        self._at_s: float | None = None

    def take(self, now_s: float) -> bool:
        """One, if there is one."""
        passed_s = 0.0 if self._at_s is None else now_s - self._at_s
        self._at_s = now_s
        self._level = min(self._most, self._level + passed_s * self._per_s)
        if self._level < 1:
            return False
        self._level -= 1
        return True


class Seats:
    """Who is here, in all and by principal."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bucket = Bucket(limits.accepts_per_s)
        self._taken = 0
        self.is_closed = False
        """Is nobody let in any more?"""
        self._by_principal: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return self._taken

    def check_open(self) -> None:
        """Whenever somebody has waited for something: the gateway may be about to end by now."""
        if self.is_closed:
            raise later("draining", "Another one takes over. Come back in a while.", BACK_S)

    @contextlib.contextmanager
    def taken(self, now_s: float) -> Iterator[None]:
        """One of all, before anybody is asked who this is."""
        if self._taken >= self._limits.connections:
            raise later("overloaded", "All connections of this gateway are taken.", BACK_S)
        if not self._bucket.take(now_s):
            raise later("overloaded", "Too many viewers come at once.", BACK_S)
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1

    @contextlib.contextmanager
    def of(self, principal: object) -> Iterator[None]:
        """One of those that somebody may have."""
        who = _name(principal)  # as it is now: a principal may change while it is here
        if who is None:
            yield
            return
        if self._by_principal[who] >= self._limits.per_principal:
            raise later(
                "too-many-connections",
                f"You have {self._limits.per_principal} connections already; close some.",
                BACK_S,
            )
        self._by_principal[who] += 1
        try:
            yield
        finally:
            self._by_principal[who] -= 1
            if not self._by_principal[who]:
                del self._by_principal[who]


def _name(principal: object) -> Hashable | None:
    """What tells two of them apart; None for nobody in particular. A user's object may be equal to
    nothing but itself: whoever has such ones is better off with their ids.
    """
    if principal is True:  # somebody may, and it does not matter who
        return None
    try:
        hash(principal)
    except TypeError:
        return repr(principal)
    return principal
