"""An outage is nobody's fault: wait, and blame no message for it.

A circuit opens with the first failure to reach a destination, and closes when something got
through. While it is open its users wait, longer each time; nothing is counted against what they
wanted to send. It is said once that it opened and once that it closed, however many wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random

from semel.colour import ASYNC

__all__ = ["Circuit"]

log = logging.getLogger("semel")

FIRST_S = 0.05
MOST_S = 5.0


class Circuit:
    """The way to one destination, `what` people call it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.error = ""
        """Why it is open; empty while it is closed."""
        self.opened_at = 0.0
        self._wait_s = FIRST_S
        self._random = random.Random()  # noqa: S311 - spreads retries, hides nothing

    @property
    def is_open(self) -> bool:
        return bool(self.error)

    def failed(self, error: Exception) -> None:
        if not self.error:
            self.opened_at = ASYNC.now()
            self._wait_s = FIRST_S
            log.warning("semel: %s does not answer, waiting for it: %s", self.what, error)
        self.error = str(error) or type(error).__name__

    def passed(self) -> None:
        if self.error:
            log.warning(
                "semel: %s answers again after %.1f s", self.what, ASYNC.now() - self.opened_at
            )
        self.error = ""

    async def wait(self, ending: asyncio.Event) -> None:
        """Until it makes sense to try again, or something ends."""
        wait_s = self._wait_s * (0.5 + self._random.random())
        self._wait_s = min(MOST_S, self._wait_s * 2)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await ending.wait()
