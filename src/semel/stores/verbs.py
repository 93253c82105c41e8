"""From verbs to operations: what every ledger adapter has in common.

A ledger's five hot verbs become one operation value each, so an adapter says only how it carries
an operation out: one at a time, or a batch of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from semel.ports import Answering
from semel.stores.rules import Claiming, Completing, Noting, Operation, Releasing, Renewing
from semel.values import (
    Answer,
    Claim,
    Guarantees,
    Key,
    Outcome,
    Record,
    State,
    Terms,
    Verdict,
)


class Verbs(ABC):
    """Turns each verb into an operation, and `perform` into the verb's coroutine."""

    @abstractmethod
    def perform(self, op: Operation) -> Answering[Any]:
        """Carry the operation out, atomically, and answer it."""

    def claim(
        self, key: Key, *, attempt: str, fingerprint: bytes = b"", terms: Terms
    ) -> Answering[Answer]:
        return self.perform(Claiming(key, attempt, fingerprint, terms))

    def complete(self, claim: Claim, outcome: Outcome) -> Answering[Verdict]:
        return self.perform(Completing(claim, outcome))

    def release(self, claim: Claim, *, error: str | None = None) -> Answering[Verdict]:
        return self.perform(Releasing(claim, error))

    def renew(self, claim: Claim, *, lease_s: float | None = None) -> Answering[Verdict]:
        return self.perform(Renewing(claim, claim.terms.lease_s if lease_s is None else lease_s))

    def note(self, claim: Claim, name: str, data: bytes) -> Answering[Verdict]:
        return self.perform(Noting(claim, name, data))


class OnDisk(Verbs):
    """What the stores on this machine's disk have in common: one body for both colours.

    `kept` does the work and blocks; `call` runs what may wait for the disk.
    """

    def __init__(self, kept: Any, call: Callable[..., Awaitable[Any]]) -> None:
        self._kept = kept
        self._call = call

    async def sweep(self, limit: int = 1000) -> int:
        count: int = await self._call(self._kept.sweep, limit)
        return count

    async def look(self, id: bytes) -> Record | None:
        record: Record | None = await self._call(self._kept.look, id)
        return record

    async def records(
        self,
        *,
        tenant: str | None = None,
        operation: str | None = None,
        state: State | None = None,
        limit: int = 100,
        after: bytes | None = None,
    ) -> Sequence[Record]:
        found: Sequence[Record] = await self._call(
            self._kept.records, tenant, operation, state, limit, after
        )
        return found

    async def resolve(
        self, id: bytes, *, fence: int, outcome: Outcome | None, ttl_s: float | None
    ) -> bool:
        settled: bool = await self._call(self._kept.resolve, id, fence, outcome, ttl_s)
        return settled

    async def forget(self, id: bytes, *, force: bool = False) -> bool:
        forgotten: bool = await self._call(self._kept.forget, id, force)
        return forgotten

    async def guarantees(self) -> Guarantees:
        found: Guarantees = await self._call(self._kept.guarantees)
        return found
