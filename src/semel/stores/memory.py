"""The ledger in this process's memory: the reference, and the store for tests.

One lock guards everything; no operation does more under it than look at one row. Nothing is
shared with other processes and nothing survives this one.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Sequence
from typing import Any

from semel.colour import Colour
from semel.ports import Clock, StoreLedger
from semel.stores import rules
from semel.stores.clock import SystemClock
from semel.stores.rules import Operation, Row
from semel.stores.verbs import Verbs
from semel.values import Guarantees, Outcome, Record, State

# Expired rows dropped per operation: enough to keep up with one insert per operation, few enough
# not to be felt.
SWEEP_PER_OPERATION = 2


class MemoryStore:
    """Records in a dictionary. Serves both colours; one process only."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._ledger = _MemoryLedger(clock or SystemClock())

    def ledger(self, colour: Colour) -> StoreLedger:
        return self._ledger

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
        self._expiries: list[tuple[int, int, bytes]] = []
        self._count = itertools.count()
        self._floor = 0

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
            if self._expiries and self._expiries[0][0] <= now_us:
                self._drop_expired(now_us, SWEEP_PER_OPERATION)
            return answer

    def _put(self, id: bytes, row: Row) -> None:
        before = self._rows.get(id)
        self._rows[id] = row
        if row.expires_us is not None and (before is None or before.expires_us != row.expires_us):
            heapq.heappush(self._expiries, (row.expires_us, next(self._count), id))

    def _drop_expired(self, now_us: int, limit: int) -> int:
        """Drop rows past their expiry; a heap entry that was superseded just goes away."""
        dropped = 0
        while self._expiries and self._expiries[0][0] <= now_us and dropped < limit:
            due, _, id = heapq.heappop(self._expiries)
            row = self._rows.get(id)
            if row is not None and row.expires_us == due:
                self._delete(id)
                dropped += 1
        return dropped

    def _delete(self, id: bytes) -> None:
        self._floor = max(self._floor, self._rows.pop(id).fence)

    async def sweep(self, limit: int = 1000) -> int:
        with self._lock:
            return self._drop_expired(self._clock.now_us(), limit)

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
