"""Where callers of one process wait for the same key.

Each waiting caller has a seat. The one in front has the duty to ask the store now and then; the
others sleep until somebody rings: the holder when it finishes in this process, or the one in
front when it learns something. So a thousand waiters cost the store one question at a time.
Sharing the wait never shares the answer: whoever wakes asks the store itself.

A ring is a hint. If one is lost, the duty still comes round.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from semel.colour import Waiter, after_fork
from semel.errors import InProgressError


class Seat:
    """A place in the line for one key of one ledger."""

    __slots__ = ("_line", "waiter")

    def __init__(self, line: list[Seat], waiter: Waiter) -> None:
        self._line = line
        self.waiter = waiter

    @property
    def in_front(self) -> bool:
        return bool(self._line) and self._line[0] is self


class WaitingRoom:
    """All lines of this process, by key and ledger."""

    def __init__(self) -> None:
        self._reset()
        # A forked child has none of the waiting threads, and its copy of the lock may be held.
        after_fork(self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[bytes, dict[int, list[Seat]]] = {}

    @contextmanager
    def seat(self, id: bytes, ledger: object, waiter: Waiter, most: int) -> Iterator[Seat]:
        """Wait in line; `most` is how many may wait for one key."""
        seat = self._sit(id, ledger, waiter, most)
        try:
            yield seat
        finally:
            self._leave(id, ledger, seat)

    def _sit(self, id: bytes, ledger_object: object, waiter: Waiter, most: int) -> Seat:
        ledger = _number(ledger_object)
        with self._lock:
            line = self._lines.setdefault(id, {}).setdefault(ledger, [])
            if len(line) >= most:
                raise InProgressError(
                    f"{most} callers already wait for this key in this process; "
                    "retry later, or raise max_waiters=",
                    retry_after=1.0,
                )
            seat = Seat(line, waiter)
            line.append(seat)
            return seat

    def _leave(self, id: bytes, ledger_object: object, seat: Seat) -> None:
        ledger = _number(ledger_object)
        with self._lock:
            lines = self._lines.get(id, {})
            line = lines.get(ledger, [])
            was_first = seat.in_front
            if seat in line:
                line.remove(seat)
            if not line:
                lines.pop(ledger, None)
                if not lines:
                    self._lines.pop(id, None)
            heir = line[0] if line and was_first else None
        if heir is not None:
            heir.waiter.ring()

    def ring(self, id: bytes) -> None:
        """Wake everybody who waits for this key, in every line."""
        if id not in self._lines:
            return
        with self._lock:
            seats = [seat for line in self._lines.get(id, {}).values() for seat in line]
        for seat in seats:
            seat.waiter.ring()


def _number(ledger: object) -> int:
    return id(ledger)


ROOM = WaitingRoom()
