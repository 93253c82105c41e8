"""A clock that moves when you say so."""

from __future__ import annotations


class FakeClock:
    """Microseconds since 1970, standing still until `advance`."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._now_us = now_us

    def now_us(self) -> int:
        return self._now_us

    def advance(self, seconds: float) -> None:
        self._now_us += round(seconds * 1_000_000)
