"""What fails again and again, told so that a log can bear it.

Somebody else's code fails on what a client sends, and a client can send the same for hours. The
first failure of a kind is told at once, with all that is needed to find it; then the kind is told
once a minute at most, and how often it came meanwhile. A kind is what is said of it, the type of
the error, and the line that raised it; not its message, in which clients may have a say.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from semel.colour import ASYNC

__all__ = ["Failures"]

log = logging.getLogger("semel")

EACH_S = 60.0

# More than a program has lines that fail. Behind them the one that was told longest ago is new.
MOST_KINDS = 100

_Kind: TypeAlias = tuple[str, type[BaseException], str, int]


class _Told:
    def __init__(self, at: float) -> None:
        self.at = at
        self.since = 0


class Failures:
    """Those of one part of a process. `now`: seconds that only grow."""

    def __init__(self, now: Callable[[], float] = ASYNC.now) -> None:
        self._now = now
        self._told: dict[_Kind, _Told] = {}
        """The one that was told longest ago comes first."""

    def __len__(self) -> int:
        return len(self._told)

    def tell(self, error: BaseException, message: str, *words: object) -> None:
        """As `log.error(message, *words, exc_info=error)`, unless it was told a moment ago."""
        kind = (message, type(error), *_raised_at(error))
        now, last = self._now(), self._told.get(kind)
        if last is not None and now - last.at < EACH_S:
            last.since += 1
            return
        self._told.pop(kind, None)
        self._told[kind] = _Told(now)
        if len(self._told) > MOST_KINDS:
            del self._told[next(iter(self._told))]
        if last is not None and last.since:
            times = "once" if last.since == 1 else f"{last.since} times"
            message += f"; and {times} since this was told last"
        log.error(message, *words, exc_info=error, stacklevel=2)


def _raised_at(error: BaseException) -> tuple[str, int]:
    last = deque(traceback.walk_tb(error.__traceback__), maxlen=1)
    return (last[0][0].f_code.co_filename, last[0][1]) if last else ("", 0)
