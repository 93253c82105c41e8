"""An outage is nobody's fault: wait, and blame no message for it.

A circuit opens with the first failure to reach a destination, and closes when something got
through. While it is open its users wait, longer each time; nothing is counted against what they
wanted to send. It is said once that it opened and once that it closed, however many wait.

Users who give their name, `who`, are told apart: the circuit closes when the last of those who
failed got through. So a destination of which one half answers is not told of again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random

from semel.colour import ASYNC
from semel.errors import in_one_line

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
        self._waits: dict[object, float] = {}
        """By who failed and has not got through since: the next wait, in seconds."""
        self._random = random.Random()  # noqa: S311 - spreads retries, hides nothing

    @property
    def is_open(self) -> bool:
        return bool(self.error)

    def failed(self, error: Exception, who: object = None) -> None:
        self.error = in_one_line(error)
        if not self._waits:
            self.opened_at = ASYNC.now()
            log.warning("semel: %s does not answer, waiting for it: %s", self.what, self.error)
        self._waits.setdefault(who, FIRST_S)

    def passed(self, who: object = None) -> None:
        if who not in self._waits:
            return
        self.gave_up(who)
        if not self._waits:
            log.warning(
                "semel: %s answers again after %.1f s", self.what, ASYNC.now() - self.opened_at
            )

    def gave_up(self, who: object = None) -> None:
        """Whoever failed does not try any more. Whether it would have got through is not known."""
        self._waits.pop(who, None)
        if not self._waits:
            self.error = ""

    async def wait(self, ending: asyncio.Event, who: object = None) -> None:
        """Until it makes sense to try again, or something ends."""
        next_s = self._waits.get(who, FIRST_S)
        if who in self._waits:
            self._waits[who] = min(MOST_S, 2 * next_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(next_s * (0.5 + self._random.random())):
                await ending.wait()
