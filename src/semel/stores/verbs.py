"""From verbs to operations: what every ledger adapter has in common.

A ledger's five hot verbs become one operation value each, so an adapter says only how it carries
an operation out: one at a time, or a batch of them.
"""

from __future__ import annotations

from typing import Any

from semel.stores.rules import Claiming, Completing, Noting, Operation, Releasing, Renewing
from semel.values import Answer, Claim, Key, Outcome, Terms, Verdict


class Verbs:
    """Turns each verb into an operation and hands it to `perform`."""

    async def perform(self, op: Operation) -> Any:
        """Carry the operation out, atomically, and answer it."""
        raise NotImplementedError

    async def claim(
        self, key: Key, *, attempt: str, fingerprint: bytes = b"", terms: Terms
    ) -> Answer:
        answer: Answer = await self.perform(Claiming(key, attempt, fingerprint, terms))
        return answer

    async def complete(self, claim: Claim, outcome: Outcome) -> Verdict:
        verdict: Verdict = await self.perform(Completing(claim, outcome))
        return verdict

    async def release(self, claim: Claim, *, error: str | None = None) -> Verdict:
        verdict: Verdict = await self.perform(Releasing(claim, error))
        return verdict

    async def renew(self, claim: Claim, *, lease_s: float | None = None) -> Verdict:
        lease = claim.terms.lease_s if lease_s is None else lease_s
        verdict: Verdict = await self.perform(Renewing(claim, lease))
        return verdict

    async def note(self, claim: Claim, name: str, data: bytes) -> Verdict:
        verdict: Verdict = await self.perform(Noting(claim, name, data))
        return verdict
