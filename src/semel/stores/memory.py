"""The ledger in this process's memory: the reference, and the store for tests.

One lock guards everything; no operation does more under it than look at one row. Nothing is
shared with other processes and nothing survives this one.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet

from semel.colour import Colour, after_fork
from semel.ports import Bell, Clock, Log, StoreLedger
from semel.stores import rules
from semel.stores.bells import LocalBell, Tower
from semel.stores.clock import SystemClock
from semel.stores.memory_log import MemoryLog
from semel.stores.rules import Operation, Row
from semel.stores.verbs import Verbs
from semel.values import Guarantees, Outcome, Record, State

# Expired rows dropped per operation: enough to keep up with one insert per operation, few enough
# not to be felt.
SWEEP_PER_OPERATION = 2


class MemoryStore:
    """Records in a dictionary. Serves both colours; one process only."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        self._ledger = _MemoryLedger(clock)
        self._tower = Tower()
        self._log = MemoryLog(clock, self._tower)

    def ledger(self, colour: Colour) -> StoreLedger:
        return self._ledger

    def log(self, colour: Colour) -> Log:
        return self._log

    def bell(self) -> Bell:
        return LocalBell(self._tower)

    def close(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"MemoryStore({len(self._ledger)} records)"


class _MemoryLedger(Verbs):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[bytes, Row] = {}
        self._calendar = _Calendar()
        self._floor = 0
        _LEDGERS.add(self)

    def __len__(self) -> int:
        return len(self._rows)

    async def perform(self, op: Operation) -> Any:
        key = rules.key_of(op)
        id = key.id
        with self._lock:
            now_us = self._clock.now_us()
            row = self._rows.get(id)
            if row is None and self._floor >= now_us:
                row = rules.ghost(key, self._floor)
            answer, row = rules.apply(row, op, now_us)
            if row is not None:
                self._put(id, row)
            if self._calendar.first <= now_us:
                due = self._calendar.due(now_us, SWEEP_PER_OPERATION)
                self._drop(due, now_us, SWEEP_PER_OPERATION)
            return answer

    def _put(self, id: bytes, row: Row) -> None:
        self._rows[id] = row
        if row.expires_us is not None:
            self._calendar.add(row.expires_us, id)

    def _drop(self, ids: Iterable[bytes], now_us: int, limit: int) -> int:
        """Drop those that have expired; one whose expiry has moved is in the calendar again."""
        dropped = 0
        for id in ids:
            if dropped == limit:
                break
            row = self._rows.get(id)
            if row is not None and rules.expired(row, now_us):
                self._delete(id)
                dropped += 1
        return dropped

    def _delete(self, id: bytes) -> None:
        self._floor = max(self._floor, self._rows.pop(id).fence)

    async def sweep(self, limit: int = 1000) -> int:
        with self._lock:
            now_us = self._clock.now_us()
            dropped = 0
            while dropped < limit and (ids := self._calendar.due(now_us, limit - dropped)):
                dropped += self._drop(ids, now_us, limit)
            return dropped + self._drop(self._calendar.today(now_us), now_us, limit - dropped)

    async def look(self, id: bytes) -> Record | None:
        with self._lock:
            now_us = self._clock.now_us()
            row = self._rows.get(id)
            if row is None or rules.expired(row, now_us):
                return None
            return rules.record(row, now_us)

    async def records(
        self,
        *,
        tenant: str | None = None,
        operation: str | None = None,
        state: State | None = None,
        limit: int = 100,
        after: bytes | None = None,
    ) -> Sequence[Record]:
        with self._lock:
            now_us = self._clock.now_us()
            rows = sorted(self._rows.items())
        found = (
            rules.record(row, now_us)
            for id, row in rows
            if (after is None or id > after) and not rules.expired(row, now_us)
        )
        wanted = (r for r in found if rules.wanted(r, tenant, operation, state))
        return list(itertools.islice(wanted, limit))

    async def resolve(
        self, id: bytes, *, fence: int, outcome: Outcome | None, ttl_s: float | None
    ) -> bool:
        with self._lock:
            row = rules.resolve(self._rows.get(id), fence, outcome, ttl_s, self._clock.now_us())
            if row is not None:
                self._put(id, row)
            return row is not None

    async def forget(self, id: bytes, *, force: bool = False) -> bool:
        with self._lock:
            if not rules.forgettable(self._rows.get(id), force, self._clock.now_us()):
                return False
            self._delete(id)
            return True

    async def guarantees(self) -> Guarantees:
        return Guarantees(
            store="memory",
            survives=frozenset(),
            shared=False,
            why=("records live in this process's memory and end with it",),
        )


class _Calendar:
    """What falls due when, by the second: every operation writes here, so it must be cheap.

    A day is what a `>> 20` leaves of microseconds, a second and a little.
    """

    def __init__(self) -> None:
        self.first: float = math.inf  # nothing is due before this, in microseconds
        self._days: list[int] = []
        self._ids: dict[int, list[bytes]] = {}

    def add(self, due_us: int, id: bytes) -> None:
        day = due_us >> 20
        ids = self._ids.get(day)
        if ids is None:
            ids = self._ids[day] = []
            heapq.heappush(self._days, day)
            self._look_ahead()
        ids.append(id)

    def due(self, now_us: int, limit: int) -> list[bytes]:
        """Take out what was due on the days that are over, at most so many."""
        taken: list[bytes] = []
        while len(taken) < limit and self.first <= now_us:
            ids = self._ids[self._days[0]]
            wanted = limit - len(taken)
            taken += ids[-wanted:]
            del ids[-wanted:]
            if not ids:
                del self._ids[heapq.heappop(self._days)]
                self._look_ahead()
        return taken

    def today(self, now_us: int) -> list[bytes]:
        """What is due on this day, perhaps not yet; it stays."""
        return self._ids.get(now_us >> 20, [])

    def _look_ahead(self) -> None:
        self.first = (self._days[0] + 1) << 20 if self._days else math.inf


_LEDGERS: WeakSet[_MemoryLedger] = WeakSet()


def _free_locks() -> None:
    """A forked child has one thread; a lock that another one held would be held for ever."""
    for ledger in _LEDGERS:
        ledger._lock = threading.Lock()  # noqa: SLF001


after_fork(_free_locks)
