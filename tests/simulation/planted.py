"""Defects to plant: each is one that a seed document, a well-known snippet or a tired afternoon
would write. The campaign must find every one of them.

The first half breaks the ledger, the second the guard's own flow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest import mock

from semel import keys
from semel.call import Call, Raised
from semel.codec import CODEC
from semel.colour import AsyncColour
from semel.errors import StoreUnavailableError
from semel.keys import digest
from semel.stores import rules
from semel.stores.rules import Claiming, Completing, Releasing, Renewing
from semel.testing.scenario import Plant
from semel.testing.simulator import HOST, FaultyLedger, Server, SimClock
from semel.values import Busy, Done, Kept, Mismatch, Outcome, State, Won
from semel.waiting import WaitingRoom

PLANTS: dict[str, Plant] = {}


def ledger_defect(cls: type) -> type:
    """Plant a server or a host's ledger."""
    kind = "server" if issubclass(cls, Server) else "ledger"
    name = "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).strip("_")
    PLANTS[name] = Plant(**{kind: cls})
    return cls


def guard_defect(target: Any, attribute: str) -> Callable[[Any], Any]:
    """Plant a function in the place of another."""

    def plant(fn: Any) -> Any:
        PLANTS[fn.__name__] = Plant(patch=lambda: mock.patch.object(target, attribute, fn))
        return fn

    return plant


# --- the ledger ---------------------------------------------------------------------------------


@ledger_defect
class CompleteWithoutFence(Server):
    def answer(self, op: Any) -> Any:
        row = self.row(rules.key_of(op).id)
        if isinstance(op, Completing) and row is not None:
            expires_us = rules.expiry(op.claim.terms.ttl_s, self.now_us())
            done = row.but(state="COMPLETED", outcome=op.outcome, expires_us=expires_us)
            self._put(row.key.id, done)
            return Kept()
        return super().answer(op)


@ledger_defect
class ReleaseWithoutToken(Server):
    def answer(self, op: Any) -> Any:
        row = self.row(rules.key_of(op).id)
        if isinstance(op, Releasing) and row is not None:
            op = Releasing(replace_claim(op.claim, row), op.error)
        return super().answer(op)


@ledger_defect
class RenewWithoutToken(Server):
    def answer(self, op: Any) -> Any:
        row = self.row(rules.key_of(op).id)
        if isinstance(op, Renewing) and row is not None:
            op = Renewing(replace_claim(op.claim, row), op.lease_s)
        return super().answer(op)


def replace_claim(claim: Any, row: Any) -> Any:
    return replace(claim, attempt=row.attempt, fence=row.fence)


class TwoSteps(FaultyLedger):
    """Looks first, and writes what it decided with a second request."""

    async def perform(self, op: Any) -> Any:
        if not isinstance(op, Claiming):
            return await super().perform(op)
        answer, row = await self.ask(lambda: self._decide(op))
        if row is not None:
            await self.ask(lambda: self._write(op, answer, row))
        return answer

    def _decide(self, op: Any) -> Any:
        before = self.server.row(op.key.id)
        answer, row = rules.claim(before, op, self.server.now_us())
        if row is None:
            self.server.watch(op, before, answer, before)
        return answer, row

    def _write(self, op: Any, answer: Any, row: Any) -> None:
        before = self.server.row(op.key.id)
        self.server._put(op.key.id, row)
        self.server.watch(op, before, answer, row)


@ledger_defect
class ClaimInTwoSteps(TwoSteps):
    pass


@ledger_defect
class TakeoverInTwoSteps(TwoSteps):
    """Both see the stale heartbeat, both take over."""

    async def perform(self, op: Any) -> Any:
        row = self.server.row(rules.key_of(op).id)
        lapsed = row is not None and rules.running(row) and row.lease_us <= self.server.now_us()
        return await (super().perform(op) if lapsed else FaultyLedger.perform(self, op))


class _SkewedClock(SimClock):
    skew_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.skew_us


class _SkewedServer(Server):
    def __init__(self, loop: Any) -> None:
        super().__init__(loop)
        self._clock = _SkewedClock(loop)
        self.skew_us = 0

    def answer(self, op: Any) -> Any:
        self._clock.skew_us, self.skew_us = self.skew_us, 0
        try:
            return super().answer(op)
        finally:
            self._clock.skew_us = 0


class _SkewedLedger(FaultyLedger):
    async def perform(self, op: Any) -> Any:
        skew_us = round(HOST.get().skew_s * 1_000_000)

        def serve() -> Any:
            self.server.skew_us = skew_us
            return self.server.serve(op)

        return await self.ask(serve)


PLANTS["client_clock_decides"] = Plant(server=_SkewedServer, ledger=_SkewedLedger)


@ledger_defect
class TakeoverWithoutFreshLease(Server):
    def answer(self, op: Any) -> Any:
        id = rules.key_of(op).id
        before, answer = self.row(id), super().answer(op)
        if isinstance(answer, Won) and answer.orphan is not None and before is not None:
            self._put(id, self.row(id).but(lease_us=before.lease_us))
        return answer


@ledger_defect
class FingerprintNeverCompared(Server):
    def answer(self, op: Any) -> Any:
        row = self.row(rules.key_of(op).id)
        if isinstance(op, Claiming) and row is not None:
            op = replace(op, fingerprint=row.fingerprint)
        return super().answer(op)


@ledger_defect
class PendingForEver(Server):
    """No lease: a record of a dead holder stays."""

    def answer(self, op: Any) -> Any:
        row = self.row(rules.key_of(op).id)
        if isinstance(op, Claiming) and row is not None and row.attempt != op.attempt:
            row = row if row.state == State.PENDING else None
            if row is not None and row.fingerprint == op.fingerprint:
                return Busy(1.0)
        return super().answer(op)


@ledger_defect
class FailedForEver(Server):
    """The row is in the way of the next INSERT."""

    def answer(self, op: Any) -> Any:
        row = self.row(rules.key_of(op).id)
        failed = row is not None and row.state == State.FAILED
        if isinstance(op, Claiming) and failed and not rules.expired(row, self.now_us()):
            return Mismatch("fingerprint") if row.fingerprint != op.fingerprint else Busy(1.0)
        return super().answer(op)


@ledger_defect
class FailedAfterUnknownCommit(Server):
    """An error on COMMIT is taken for a rollback, and the record marked FAILED."""

    def answer(self, op: Any) -> Any:
        row = self.row(rules.key_of(op).id)
        if isinstance(op, Releasing) and row is not None and row.attempt == op.claim.attempt:
            now_us = self.now_us()
            expires_us = rules.expiry(op.claim.terms.ttl_s, now_us)
            failed = row.but(state=State.FAILED.value, lease_us=now_us, expires_us=expires_us)
            self._put(row.key.id, failed)
            return Kept()
        return super().answer(op)


async def _mark_failed(self: Call, value: Any) -> Any:
    result = await _succeed(self, value)
    if type(result) is Raised and isinstance(result.error, StoreUnavailableError):
        with suppress(StoreUnavailableError):
            await self._ledger.release(self._claimed(), error="commit failed")
    return result


PLANTS["failed_after_unknown_commit"] = replace(
    PLANTS["failed_after_unknown_commit"],
    patch=lambda: mock.patch.object(Call, "succeed", _mark_failed),
)


@ledger_defect
class SweepDeletesLiveRows(Server):
    async def sweep(self, limit: int = 1000) -> int:
        live = [id for id, row in self._rows.items() if row.state == State.PENDING]
        for id in live:
            del self._rows[id]
        return len(live)


@ledger_defect
class SweepDeletesHeldRows(Server):
    async def sweep(self, limit: int = 1000) -> int:
        held = [id for id, row in self._rows.items() if row.state == State.UNKNOWN]
        for id in held:
            del self._rows[id]
        return len(held)


@ledger_defect
class AnswerGoneMeanwhile(FaultyLedger):
    """EXISTS says yes, then it expires, then GET says nothing: None is the answer."""

    async def perform(self, op: Any) -> Any:
        if isinstance(op, Claiming) and await self.look(op.key.id) is not None:
            found = await self.look(op.key.id)
            if found is None:
                return Done(Outcome("value", CODEC.encode(None)))
        return await super().perform(op)


@ledger_defect
class FenceStartsAgain(Server):
    """The counter lived in the record, and went with it."""

    def answer(self, op: Any) -> Any:
        answer = super().answer(op)
        if isinstance(answer, Won):
            row = self.row(op.key.id).but(fence=answer.claim.number)
            self._put(op.key.id, row)
            answer = Won(replace(answer.claim, fence=row.fence), answer.steps, answer.orphan)
        return answer


@ledger_defect
class HeldRowTakenOver(Server):
    def answer(self, op: Any) -> Any:
        row = self.row(rules.key_of(op).id)
        if isinstance(op, Claiming) and row is not None:
            op = replace(op, terms=replace(op.terms, takeover=True))
        return super().answer(op)


@ledger_defect
class StepsForgotten(Server):
    def answer(self, op: Any) -> Any:
        answer = super().answer(op)
        return Won(answer.claim, {}, answer.orphan) if isinstance(answer, Won) else answer


@ledger_defect
class OrphanForgottenOnRepeat(Server):
    """The repeat of a takeover whose reply was lost looks like an ordinary win."""

    def answer(self, op: Any) -> Any:
        row = self.row(rules.key_of(op).id)
        answer = super().answer(op)
        if isinstance(answer, Won) and row is not None and row.attempt == op.attempt:
            return Won(answer.claim, answer.steps, None)
        return answer


@ledger_defect
class WinnerLockedOut(Server):
    """The driver sent the claim again after a lost reply: busy, with itself."""

    def answer(self, op: Any) -> Any:
        row = self.row(rules.key_of(op).id)
        ours = isinstance(op, Claiming) and row is not None and row.attempt == op.attempt
        if ours and row.state == State.PENDING and row.lease_us > self.now_us():
            return Busy(1.0)
        return super().answer(op)


@ledger_defect
class LateClaimForNobody(Server):
    """A doubled claim that arrives after its attempt failed claims once more."""

    def answer(self, op: Any) -> Any:
        row = self.row(rules.key_of(op).id)
        ours = isinstance(op, Claiming) and row is not None and row.attempt == op.attempt
        if ours and row.state == State.FAILED:
            self._put(op.key.id, row.but(attempt="nobody"))
        return super().answer(op)


# --- keys ---------------------------------------------------------------------------------------


def _without_tenant(tenant: str, operation: str | None, version: str) -> tuple[bytes, bytes]:
    return _frame("", operation, version)


_frame = digest.frame
PLANTS["key_without_tenant"] = Plant(
    patch=lambda: mock.patch.object(digest, "frame", _without_tenant)
)


@guard_defect(keys, "new_attempt")
def every_attempt_has_one_name() -> str:
    return "worker"


# --- the guard's flow ---------------------------------------------------------------------------

_succeed, _fail, _begin, _shield = Call.succeed, Call.fail, Call.begin, AsyncColour.shield


@guard_defect(AsyncColour, "shield")
async def no_shield_on_cancel(self: Any, work: Any) -> Any:
    return await work


@guard_defect(Call, "_settle")
async def ending_not_repeated_after_a_cut(self: Call, work: Any) -> Any:
    try:
        try:
            return await work()
        except StoreUnavailableError as error:
            return await self._insist(work, error)
    finally:
        self._end()


@guard_defect(Call, "_withdraw")
async def claim_not_withdrawn_after_a_cut(self: Call) -> None:
    pass


@guard_defect(Call, "interrupt")
async def cut_body_not_noticed(self: Call, error: BaseException) -> None:
    """As `except Exception` does."""
    self._end()


@guard_defect(Call, "interrupt")
async def cut_body_released_although_held(self: Call, error: BaseException) -> None:
    self._end()
    with suppress(StoreUnavailableError):
        await self.colour.shield(self._ledger.release(self._claimed()))


@guard_defect(Call, "succeed")
async def own_value_instead_of_the_recorded(self: Call, value: Any) -> Any:
    result = await _succeed(self, value)
    return result if type(result) is Raised else value


@guard_defect(Call, "succeed")
async def claim_lost_kept_quiet(self: Call, value: Any) -> Any:
    await _succeed(self, value)
    return value


@guard_defect(Call, "fail")
async def own_failure_instead_of_the_recorded(self: Call, error: Exception) -> Any:
    await _fail(self, error)
    return Raised(error)


@guard_defect(Call, "fail")
async def unrecorded_step_taken_for_a_failure(self: Call, error: Exception) -> Any:
    self.attempt._unrecorded = False
    return await _fail(self, error)


@guard_defect(Call, "_failure")
def failure_that_locks_released(self: Call, error: Exception) -> Any:
    return lambda: self._ledger.release(self._claimed(), error="failed")


@guard_defect(Call, "_keep_lease")
def lease_never_renewed(self: Call, delay_s: float) -> None:
    pass


@guard_defect(Call, "_renew_soon")
def renewal_stops_at_the_first_error(self: Call, now: float, error: Exception) -> None:
    pass


@guard_defect(Call, "_hung")
def hung_body_renewed_for_ever(self: Call, now: float) -> bool:
    return False


@guard_defect(Call, "_insist")
async def recording_tried_once(self: Call, work: Any, error: StoreUnavailableError) -> Any:
    raise error


@guard_defect(Call, "_wait")
async def waiter_asks_only_once(self: Call, answer: Any) -> Any:
    await asyncio.sleep(self.policy.wait_s)
    return answer


@guard_defect(WaitingRoom, "_leave")
def duty_not_handed_on(self: WaitingRoom, id: bytes, ledger: object, seat: Any) -> None:
    for lines in self._lines.values():
        for line in lines.values():
            if seat in line:
                line.remove(seat)


@guard_defect(Call, "recovered")
async def world_not_asked(self: Call, orphan: Any) -> None:
    return None


@guard_defect(Call, "begin")
def steps_not_replayed(self: Call, won: Won) -> Any:
    return _begin(self, Won(won.claim, {}, won.orphan))


@guard_defect(Call, "step")
async def step_recorded_before_it_ran(
    self: Call, name: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if name in self.attempt._steps:
        return self._replay_step(name, self.attempt._steps[name])
    await self._note(self.attempt, name, "soon")
    return await fn(*args, **kwargs)
