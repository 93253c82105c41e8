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

__all__ = ["Failures", "OnceAMinute"]

log = logging.getLogger("semel")

EACH_S = 60.0

# More than a program has lines that fail. Behind them the one that was told longest ago is new.
MOST_KINDS = 100

_Kind: TypeAlias = tuple[str, type[BaseException] | None, str, int]


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
        self._tell(logging.ERROR, (message, type(error), *_raised_at(error)), words, error)

    def warn(self, message: str, *words: object) -> None:
        """Log a warning, at most once a minute for the same `message`."""
        self._tell(logging.WARNING, (message, None, "", 0), words, None)

    def _tell(
        self, level: int, kind: _Kind, words: tuple[object, ...], error: BaseException | None
    ) -> None:
        since = self.since_told(kind)
        if since is not None:
            message = f"{kind[0]}{since}"
            log.log(level, message, *words, exc_info=error, stacklevel=3)

    def since_told(self, kind: _Kind) -> str | None:
        """Return what to add to a message of this kind, or None if it must not be logged now.

        Counts the call: the caller logs the message now, or leaves it out.
        """
        now, last = self._now(), self._told.get(kind)
        if last is not None and now - last.at < EACH_S:
            last.since += 1
            return None
        self._told.pop(kind, None)
        self._told[kind] = _Told(now)
        if len(self._told) > MOST_KINDS:
            del self._told[next(iter(self._told))]
        if last is None or not last.since:
            return ""
        times = "once" if last.since == 1 else f"{last.since} times"
        return f"; and {times} since this was told last"


class OnceAMinute(logging.Filter):
    """Passes each warning or error of another library at most once a minute.

    The next one that passes says how many were left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._failures = Failures()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        first = str(record.msg).partition("\n")[0]  # asyncio adds lines that differ each time
        error = record.exc_info[1] if record.exc_info else None
        kind: _Kind = (first, None, "", 0)
        if error is not None:
            kind = (first, type(error), *_raised_at(error))
        since = self._failures.since_told(kind)
        if since:
            record.msg = f"{record.msg}{since}"
        return since is not None


def _raised_at(error: BaseException) -> tuple[str, int]:
    last = deque(traceback.walk_tb(error.__traceback__), maxlen=1)
    return (last[0][0].f_code.co_filename, last[0][1]) if last else ("", 0)
