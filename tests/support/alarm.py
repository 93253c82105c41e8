"""A signal that strikes wherever the program happens to be, as Ctrl-C does."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Callable, Iterator
from typing import Any


class Struck(BaseException):
    """What the signal handler raises."""


def _strike(*_: object) -> None:
    raise Struck


@contextlib.contextmanager
def alarms() -> Iterator[Callable[[float, Callable[[], Any]], bool]]:
    """A function that does some work and strikes it after so many microseconds: did it hit?

    Garbage is put off meanwhile: a finalizer that is struck would be reported as an error of ours.
    """
    gc.collect()
    gc.disable()
    before = signal.signal(signal.SIGALRM, _strike)
    timeout = signal.setitimer(signal.ITIMER_REAL, 0)  # pytest's own
    try:
        yield _struck
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timeout)


def _struck(after_us: float, work: Callable[[], Any]) -> bool:
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, after_us / 1e6)
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Struck:
        return True
    return False
