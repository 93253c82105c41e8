"""Says "look now" to whoever reads an outbox in this process, when a commit has brought events.

    with listen() as bell:
        ...
        await bell.wait(0.25)       # True: something was committed, or is just about to be

It is rung from any thread, twice for a commit: just before COMMIT is sent, which is the only
moment that SQLAlchemy tells of, and again when the connection goes back to its pool, by which time
the rows can be seen. A connection that is kept rings only once, so whoever is rung looks again
shortly after.

The easy mistake is to wait for it and for nothing else: other processes ring no bell here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from semel.colour import ASYNC, Waiter, after_fork

_listening: set[Waiter] = set()
_changing = threading.Lock()


@contextlib.contextmanager
def listen() -> Iterator[Waiter]:
    """A waiter that is rung by every commit with events in this process."""
    waiter = ASYNC.waiter()
    with _changing:
        _listening.add(waiter)
    try:
        yield waiter
    finally:
        with _changing:
            _listening.discard(waiter)


def ring() -> None:
    """Wake everybody who listens. Costs nothing where nobody does."""
    if _listening:
        with _changing:
            waiters = list(_listening)
        for waiter in waiters:
            waiter.ring()


def _after_fork() -> None:
    """Those who listen are in the parent."""
    global _listening, _changing
    _listening, _changing = set(), threading.Lock()


after_fork(_after_fork)
