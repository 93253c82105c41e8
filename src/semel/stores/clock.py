"""The clock of stores that have no server to ask."""

from __future__ import annotations

import time


class SystemClock:
    """This machine's clock."""

    def now_us(self) -> int:
        """Microseconds since 1970."""
        return time.time_ns() // 1000
