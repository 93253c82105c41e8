"""The store's clock, as well as a process can know it.

Deadlines are by the store's time: servers whose own clocks differ agree on them. Nobody asks a
store for the time; but it writes down when it took an entry, and whoever appended that knows when
it sent it and when it was answered. The store's clock was read in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["StoreClock"]

# A sample is off by half of what the answer took at most. One that took long is worth less than an
# older one, for a while: clocks drift by some 50 us a second at worst.
DRIFT = 100e-6


class StoreClock:
    """`wall` is this process's own clock: seconds since 1970."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._ahead_s = 0.0
        self._doubt_s = float("inf")
        self._at_s = 0.0

    def now_s(self) -> float:
        return self._wall() + self._ahead_s

    def wall(self) -> float:
        """This process's own."""
        return self._wall()

    def heard(self, sent_s: float, answered_s: float, store_us: int) -> None:
        """It was `store_us` there, at some moment between these two of `wall`."""
        doubt_s = max(0.0, answered_s - sent_s) / 2
        if doubt_s <= self._doubt_s + DRIFT * abs(answered_s - self._at_s):
            self._ahead_s = store_us / 1e6 - (sent_s + answered_s) / 2
            self._doubt_s = doubt_s
            self._at_s = answered_s
