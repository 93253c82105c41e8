"""What the guard promises, checked from outside: at the end of every call, and when all is quiet.

A `Visit` is one call as its surroundings know it: what befell it, what its body did, how it
ended. From that and from what the ledger recorded follows what its caller may be told, and what
it may leave behind. docs/explanation/guarantees.md says the same in words.

Doubles are real in two places, by no fault of ours: after a crash nobody can know whether a
stranger was reached, so `on_crash="retry"` may reach it twice (and `recover` may, if the stranger
neither dedupes nor compares fences). They need a fault to happen all the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from semel import keys
from semel.codec import CODEC
from semel.errors import (
    ClaimLostError,
    DuplicateExecutionError,
    IdempotencyConflictError,
    InProgressError,
    OutcomeUnknownError,
    ResultLostError,
    StoreUnavailableError,
)
from semel.stores.rules import Claiming, Completing, Operation, Releasing, Renewing, Row
from semel.testing.oracle import Oracle, Story
from semel.testing.simulator import Host, NoAnswerError, Server
from semel.values import Busy, Kept, Key, Lost, Outcome, State, Won

LEASE_S = 1.0
MAX_RUN_S = 3.0

# How long a key may be free before a waiter whose network works has noticed: its longest pause
# between two questions, and the way there and back.
NOTICE_US = 500_000

# A live holder survives this many faults in a row: one renewal and its repetition, both lost.
FAULTS_SURVIVED = 2

DOUBLES_HAPPEN = {("retry", "plain"), ("retry", "fenced"), ("recover", "plain")}


class RefusedError(Exception):
    """What a body raises that fails: its argument says which visit's, and why."""


class Opaque:
    """A result that no codec can store."""


# --- what is known about a call -----------------------------------------------------------------


@dataclass(slots=True)
class Subject:
    """One key: what is done under it, for whom, and with which receiver."""

    name: str
    tenant: str
    crash: str
    receiver: str
    stepped: bool
    ttl_s: float
    by_once: bool
    troubled: bool = False
    key: Key = field(init=False)
    steps: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.key = keys.make_key(self.name, tenant=self.tenant, operation="charge")
        self.steps = ("reserve", "charge") if self.stepped else ("charge",)

    @property
    def place(self) -> str:
        """Where its effects happen."""
        return f"{self.tenant}/{self.name}"

    @property
    def patient(self) -> bool:
        """Must the body wait for the receiver, because giving up would look like failing?"""
        return self.crash != "retry" and self.receiver != "deduping"


@dataclass(slots=True, eq=False)
class Visit:
    """One call of a guarded function."""

    host: Host
    subject: Subject
    id: str
    amount: int = 1
    on_duplicate: str = "return"
    on_failure: str = "unlock"
    calm: bool = False
    task: asyncio.Task[Any] | None = None

    # What its surroundings did to it.
    faults: int = 0
    faults_since_lease: int = 0
    paused: bool = False
    cut_off: bool = False  # or whoever asks on its behalf, when it waits behind another
    cancelled: bool = False

    # What its body did.
    began: bool = False
    began_s: float = 0.0
    fence: int = 0
    acts: int = 0
    found: bool = False
    returned: Any = None
    raised: str = ""
    over: bool = False

    # What the ledger heard from it, and answered.
    waited: bool = False
    adopts: bool = False
    gave_up: bool = False
    withdrew: bool = False

    @property
    def clean(self) -> bool:
        """Did nothing come between this call and the store?"""
        return not (self.faults or self.paused or self.cut_off or self.host.dead)

    @property
    def copes(self) -> bool:
        """Is what befell it no more than what a call is built to survive?"""
        return not self.paused and self.faults_since_lease <= FAULTS_SURVIVED


# --- what must hold -----------------------------------------------------------------------------


class Promises:
    """Watches the ledger and every call; `violations` says what did not hold."""

    def __init__(self, server: Server, effects: Mapping[tuple[str, str], list[int]]) -> None:
        self.hits: Counter[str] = Counter()
        self.violations: list[str] = []
        self.visits: dict[str, Visit] = {}
        self._server = server
        self._effects = effects
        self._oracle = Oracle(self.wrong, self.hit)
        self._oracle.robbed = self._check_robbery
        self.resolved = self._oracle.resolved
        server.watch = self._watch  # type: ignore[method-assign]

    def hit(self, what: str) -> None:
        """Something rare happened; a campaign wants to have seen all of it."""
        self.hits[what] += 1

    def wrong(self, what: str) -> None:
        self._server.loop.note("WRONG", what)
        self.violations.append(what)

    def _story(self, visit: Visit) -> Story:
        return self._oracle.story(visit.subject.key.id)

    # While calls run.

    def body_begins(self, visit: Visit, fence: int) -> None:
        visit.began = True
        visit.began_s = self._server.loop.clock_s
        visit.fence = fence

    def about_to_act(self, visit: Visit, name: str) -> None:
        """The effect is about to be caused; a recorded step must not get here again."""
        visit.acts += 1
        story = self._story(visit)
        noted = story.notes.get(name, visit.fence)
        if noted < visit.fence and story.lifetimes.get(visit.fence) == story.lifetime:
            self.wrong("a recorded step was run again")

    def _watch(self, op: Operation, before: Row | None, answer: Any, after: Row | None) -> None:
        attempt = op.attempt if isinstance(op, Claiming) else op.claim.attempt
        self._server.loop.note(type(op).__name__, attempt, type(answer).__name__)
        visit = self.visits.get(attempt)
        if visit is not None and isinstance(op, Claiming):
            self._check_patience(visit)
        self._oracle.watch(op, before, answer, after, self._server.now_us())
        if visit is not None:
            self._learn(visit, op, answer)
            self._check_unknown(visit, after)

    def _check_patience(self, visit: Visit) -> None:
        """Whoever waits is there soon after the key is free."""
        story, now_us = self._story(visit), self._server.now_us()
        waits = visit.waited and visit.clean and not visit.over and not visit.began
        if waits and story.alive(now_us) and story.free_for_us(now_us) > NOTICE_US:
            self.wrong("a waiter came late to a key that was free")

    def _learn(self, visit: Visit, op: Operation, answer: Any) -> None:
        if isinstance(op, Claiming):
            self._learn_claim(visit, answer)
        elif isinstance(answer, Kept):
            self._learn_kept(visit, op)
        elif isinstance(answer, Lost) and isinstance(op, (Completing, Releasing)):
            visit.adopts = answer.outcome is not None
        if not isinstance(op, Claiming) and not op.claim.fence:
            visit.withdrew = True

    def _learn_claim(self, visit: Visit, answer: Any) -> None:
        visit.waited = visit.waited or isinstance(answer, Busy)
        if isinstance(answer, Won):
            visit.faults_since_lease = 0
            if visit.waited and answer.orphan is not None:
                self.hit("waiter_takeover")

    def _learn_kept(self, visit: Visit, op: Any) -> None:
        if isinstance(op, Renewing):
            if not op.lease_s:
                visit.gave_up = True
            else:
                self._check_renewal(visit)
        visit.faults_since_lease = 0

    def _check_renewal(self, visit: Visit) -> None:
        self.hit("revived" if visit.gave_up else "renewed")
        if visit.faults_since_lease >= FAULTS_SURVIVED:
            self.hit("renewed_after_failure")
        if self._ran_s(visit) > MAX_RUN_S + LEASE_S and visit.clean:
            self.wrong("a lease was renewed past max_run")

    def _ran_s(self, visit: Visit) -> float:
        return self._server.loop.clock_s - visit.began_s if visit.began else 0.0

    def _check_unknown(self, visit: Visit, row: Row | None) -> None:
        """Unknown is said of an attempt that began, or of which that cannot be known."""
        if row is None or row.state != State.UNKNOWN or visit.subject.crash == "recover":
            return
        if row.attempt == visit.id and not visit.began and visit.clean:
            self.wrong("an attempt that never began was called unknown")

    def _check_robbery(self, attempt: str) -> None:
        visit = self.visits.get(attempt)
        if visit is None or visit.over or not visit.began or visit.cancelled or visit.host.dead:
            return
        if visit.copes and not self._hangs(visit):
            self.wrong("a healthy holder's lease ran out")

    def _hangs(self, visit: Visit) -> bool:
        return self._ran_s(visit) > MAX_RUN_S * 0.9

    # When a call ends.

    def ended(self, visit: Visit, value: Any, error: BaseException | None) -> None:
        """The call is over: may its caller be told this, and may it leave this behind?"""
        if error is None:
            self._ended_with_value(visit, value)
        else:
            self._ended_with_error(visit, error)
        self._check_left_behind(visit, error)

    def _ended_with_value(self, visit: Visit, value: Any) -> None:
        own = value is visit.returned
        self.hit("value" if own else "replay")
        if not own and visit.returned is not None:
            self.hit("adopted")
        if not own and visit.raised:
            self.hit("adopted_after_failure")
        if not own and visit.waited and not visit.began:
            self.hit("waiter_served")
        self._check_acknowledged(visit, value)

    def _check_acknowledged(self, visit: Visit, value: Any) -> None:
        """Whoever is told that it happened: it did, and everybody is told the same."""
        recorded = self._story(visit).recorded
        if isinstance(value, Opaque):
            known = any(outcome.kind == "lost" for outcome in recorded)
        else:
            known = Outcome("value", CODEC.encode(value)) in recorded
        if not known:
            self.wrong(f"a caller was given a value that is not recorded: {value!r}")
        place = visit.subject.place
        if not all((place, name) in self._effects for name in visit.subject.steps):
            self.wrong("a caller was told that it happened, and it did not")

    def _ended_with_error(self, visit: Visit, error: BaseException) -> None:
        endings = {
            InProgressError: self._ended_busy,
            DuplicateExecutionError: self._ended_duplicate,
            IdempotencyConflictError: self._ended_conflict,
            ClaimLostError: self._ended_lost,
            OutcomeUnknownError: self._ended_unknown,
            ResultLostError: self._ended_result_lost,
            StoreUnavailableError: self._ended_unavailable,
            RefusedError: self._ended_refused,
            asyncio.CancelledError: self._ended_cancelled,
            NoAnswerError: self._ended_not_recovered,
        }
        ending = endings.get(type(error))
        if ending is None:
            self.wrong(f"a call ended with {error!r}")
        else:
            ending(visit, error)

    def _ended_busy(self, visit: Visit, _: Any) -> None:
        self.hit("told_busy")
        story, now_us = self._story(visit), self._server.now_us()
        if visit.on_duplicate != "wait" or not visit.clean or not story.alive(now_us):
            return
        if story.free_for_us(now_us) > NOTICE_US:
            self.wrong("a waiter gave up on a key that was free")

    def _ended_duplicate(self, visit: Visit, error: Any) -> None:
        self.hit("told_duplicate")
        if error.result is not None:
            self._check_acknowledged(visit, error.result)

    def _ended_conflict(self, visit: Visit, _: Any) -> None:
        self.hit("told_conflict")

    def _ended_lost(self, visit: Visit, _: Any) -> None:
        self.hit("claim_lost" if visit.returned is not None else "lost_noticed")
        story = self._story(visit)
        ours = story.attempt == visit.id and story.fence == visit.fence
        if ours and story.alive(self._server.now_us()):
            self.wrong("a call was told that it lost its claim, and it had not")

    def _ended_unknown(self, visit: Visit, _: Any) -> None:
        self.hit("told_unknown")
        if visit.subject.crash == "retry":
            self.wrong("on_crash='retry' left an outcome unknown")

    def _ended_result_lost(self, visit: Visit, _: Any) -> None:
        self.hit("result_lost")
        if not any(outcome.kind == "lost" for outcome in self._story(visit).recorded):
            self.wrong("a result was called lost that nobody recorded as lost")

    def _ended_unavailable(self, visit: Visit, error: Any) -> None:
        self.hit("unrecorded" if error.happened else "told_unavailable")
        if not visit.faults:
            self.wrong("a call was told that the store is down, and it was not")
        if error.happened != (visit.found or visit.returned is not None):
            self.wrong("a call was told wrongly whether it happened")
        few = visit.faults <= FAULTS_SURVIVED and not visit.paused and not self._hangs(visit)
        if error.happened and few:
            self.wrong("a call gave up recording too early")

    def _ended_refused(self, visit: Visit, error: Any) -> None:
        told = str(error)
        if told.startswith(f"{visit.id} "):
            self.hit("failed")
            if visit.adopts and not visit.subject.by_once and visit.faults < FAULTS_SURVIVED:
                self.wrong("a late failure was raised although an outcome was recorded")
            return
        self.hit("failure_replayed")
        recorded = self._story(visit).recorded
        if not any(o.kind == "error" and told.encode() in o.data for o in recorded):
            self.wrong(f"a failure was replayed that is not recorded: {told}")

    def _ended_cancelled(self, visit: Visit, _: Any) -> None:
        self.hit("cancelled")
        if not visit.cancelled:
            self.wrong("a call was cancelled by nobody")

    def _ended_not_recovered(self, visit: Visit, _: Any) -> None:
        self.hit("recover_failed")

    def _check_left_behind(self, visit: Visit, error: BaseException | None) -> None:
        """A call that could reach its store leaves nothing half done behind."""
        story = self._story(visit)
        alive = story.alive(self._server.now_us())
        if not visit.clean or story.attempt != visit.id or not alive:
            return
        if story.state == "held":
            self._check_overtaken(visit)
        if visit.returned is not None and story.state != "done":
            self.wrong(f"a body came to its end and left the key {story.state}")
        if isinstance(error, RefusedError) and visit.on_failure == "lock" and story.state != "done":
            self.wrong("a failure that locks was not recorded")

    def _check_overtaken(self, visit: Visit) -> None:
        """The request that gives a claim up may arrive before an earlier one that asks for it."""
        if visit.gave_up or visit.withdrew:
            self.hit("overtaken")
        else:
            self.wrong("a call is over and still holds its key")

    # When all is quiet.

    def check_free(self, subject: Subject) -> None:
        """After the last fault, a key is held for one lease at most."""
        row = self._server.row(subject.key.id)
        if row is not None and row.state == State.PENDING and row.lease_us > self._server.now_us():
            self.wrong("all is quiet, and a key is still held")

    def check_completed(self, subject: Subject, last: BaseException | None) -> None:
        """Whoever asks at the very end gets an answer, and the key is done."""
        if not isinstance(last, (type(None), RefusedError, ResultLostError)):
            self.wrong(f"after all faults, a last caller still got {last!r}")
        row = self._server.row(subject.key.id)
        if row is None or row.state != State.COMPLETED:
            self.wrong("after all faults, a key is still not completed")

    def check_effects(self, subject: Subject) -> None:
        """Once per key, as long as its record lives; for ever, where the receiver dedupes."""
        lifetimes = self._oracle.story(subject.key.id).lifetimes
        for name in subject.steps:
            fences = self._effects.get((subject.place, name), [])
            lives = Counter(lifetimes.get(fence, 0) for fence in fences)
            most = len(fences) if subject.receiver == "deduping" else max(lives.values(), default=0)
            if most > 1:
                self._double(subject, name)

    def _double(self, subject: Subject, name: str) -> None:
        kind = f"{subject.crash}/{subject.receiver}"
        self.hit(f"double {kind}")
        if (subject.crash, subject.receiver) not in DOUBLES_HAPPEN:
            self.wrong(f"{name} happened twice under {kind}")
        elif not subject.troubled:
            self.wrong(f"{name} happened twice under {kind}, without a fault")
