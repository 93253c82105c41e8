"""The rules of the ledger, pure: a row, an operation and the time go in; an answer and the new
row come out.

Stores with one writer at a time (memory, file, SQLite) run these rules between reading a row
and writing it. PostgreSQL and Redis state the same rules in their own language, next to the
data; the contract suite and its state machine hold all of them to one behaviour.

Times are microseconds since 1970 by the store's clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, TypeAlias

from semel.values import (
    Answer,
    Busy,
    Claim,
    Done,
    Kept,
    Key,
    Lost,
    Mismatch,
    Orphan,
    Outcome,
    Past,
    Record,
    State,
    Terms,
    Verdict,
    Won,
    value,
)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# How many finished attempts a row remembers. A key that failed more often than this has a story
# that is told by its last attempts; the count itself is exact.
PAST_KEPT = 16

# How an attempt ended that was taken over.
LAPSED = "lease ran out"

# Rows hold states as plain text; looking a member up in its enum costs more than a whole rule.
PENDING = State.PENDING.value
COMPLETED = State.COMPLETED.value
FAILED = State.FAILED.value
UNKNOWN = State.UNKNOWN.value

KEPT = Kept()
NO_STEPS: Mapping[str, bytes] = {}


def moment(us: int) -> datetime:
    """Microseconds since 1970 as an aware datetime."""
    return EPOCH + timedelta(microseconds=us)


@lru_cache(maxsize=256)  # leases and ttls are the same few numbers, over and over
def micros(seconds: float) -> int:
    """Seconds as whole microseconds."""
    return round(seconds * 1_000_000)


@dataclass(slots=True)
class Row:
    """A record as a store keeps it. `expires_us` None: never. `past` is a JSON list.

    A row is never changed once it is made: whoever holds one may go on reading it.
    """

    key: Key
    fingerprint: bytes
    attempt: str
    fence: int
    number: int
    state: str
    hold: bool
    created_us: int
    started_us: int
    lease_us: int
    completed_us: int | None = None
    expires_us: int | None = None
    outcome: Outcome | None = None
    error: str | None = None
    steps: Mapping[str, bytes] = field(default_factory=lambda: NO_STEPS)
    past: str = "[]"

    def but(self, **changes: Any) -> Row:
        """A copy with some fields changed; `dataclasses.replace` takes four times as long."""
        copy = Row(
            self.key,
            self.fingerprint,
            self.attempt,
            self.fence,
            self.number,
            self.state,
            self.hold,
            self.created_us,
            self.started_us,
            self.lease_us,
            self.completed_us,
            self.expires_us,
            self.outcome,
            self.error,
            self.steps,
            self.past,
        )
        for name, changed in changes.items():
            setattr(copy, name, changed)
        return copy


# --- operations as values -----------------------------------------------------------------------


@value
class Claiming:
    """The claim verb, as a value."""

    key: Key
    attempt: str
    fingerprint: bytes
    terms: Terms


@value
class Completing:
    """The complete verb, as a value."""

    claim: Claim
    outcome: Outcome


@value
class Releasing:
    """The release verb, as a value."""

    claim: Claim
    error: str | None = None


@value
class Renewing:
    """The renew verb, as a value; a lease of 0 gives the claim up as unknown."""

    claim: Claim
    lease_s: float


@value
class Noting:
    """The note verb, as a value."""

    claim: Claim
    name: str
    data: bytes


Change: TypeAlias = Completing | Releasing | Renewing | Noting
Operation: TypeAlias = Claiming | Change


def key_of(op: Operation) -> Key:
    return op.key if isinstance(op, Claiming) else op.claim.key


def apply(row: Row | None, op: Operation, now_us: int) -> tuple[Answer | Verdict, Row | None]:
    """What the operation is answered, and the row to write (None: leave it as it is)."""
    answered: tuple[Answer | Verdict, Row | None] = _RULES[type(op)](row, op, now_us)
    return answered


# --- claim --------------------------------------------------------------------------------------


def claim(row: Row | None, op: Claiming, now_us: int) -> tuple[Answer, Row | None]:
    if row is None or expired(row, now_us):
        return _win(_fresh(row, op, now_us), op)
    if row.key.operation != op.key.operation:
        return Mismatch("operation"), None
    if row.fingerprint != op.fingerprint:
        return Mismatch("fingerprint"), None
    if row.state == COMPLETED:
        return Done(_outcome(row), row.fence), None
    if row.attempt == op.attempt:
        # A doubled request that arrives after its own attempt is over must not claim for nobody.
        if row.state != PENDING:
            return Busy(0.0), None
        return _win(_leased(row, op.terms, now_us), op, _taken_over(row))
    if row.state == FAILED:
        return _win(_again(row, op, now_us, None), op)
    if row.lease_us > now_us:
        return Busy((row.lease_us - now_us) / 1e6), None
    orphan = Orphan(row.fence, moment(row.lease_us))
    if not op.terms.takeover or (row.hold and not op.terms.hold):
        return orphan, None
    return _win(_again(row, op, now_us, LAPSED), op, orphan)


def _taken_over(row: Row) -> Orphan | None:
    """Whom this row's attempt took over from: a repeated claim must be told of it again."""
    for number, fence, _, _, ended_us, ending in json.loads(row.past)[-1:]:
        if number == row.number - 1 and ending == LAPSED:
            return Orphan(fence, moment(ended_us))
    return None


def expired(row: Row, now_us: int) -> bool:
    return row.expires_us is not None and row.expires_us <= now_us


def ghost(key: Key, floor: int) -> Row:
    """What is left of deleted records: long expired, and its fence is still to be exceeded.

    A store hands this in where it has no row, with the highest fence it ever deleted, so that
    fences grow even when its clock stands still or goes back.
    """
    return Row(key, b"", "", floor, 0, FAILED, False, 0, 0, 0, expires_us=0)


def _win(row: Row, op: Claiming, orphan: Orphan | None = None) -> tuple[Answer, Row]:
    claim = Claim(op.key, row.attempt, row.fingerprint, op.terms, row.fence, row.number)
    return Won(claim, row.steps, orphan), row


def _fresh(row: Row | None, op: Claiming, now_us: int) -> Row:
    fence = now_us if row is None else max(row.fence + 1, now_us)
    terms = op.terms
    lease_us = now_us + micros(terms.lease_s)
    return Row(
        op.key,
        op.fingerprint,
        op.attempt,
        fence,
        1,
        PENDING,
        terms.hold,
        now_us,
        now_us,
        lease_us,
        None,
        _kept_until(terms, lease_us),
        None,
        None,
        NO_STEPS,
    )


def _again(row: Row, op: Claiming, now_us: int, ending: str | None) -> Row:
    past = row.past if ending is None else with_past(row, ending, row.lease_us)
    lease_us = now_us + micros(op.terms.lease_s)
    return row.but(
        key=op.key,
        attempt=op.attempt,
        fence=max(row.fence + 1, now_us),
        number=row.number + 1,
        state=PENDING,
        hold=op.terms.hold,
        started_us=now_us,
        lease_us=lease_us,
        expires_us=_kept_until(op.terms, lease_us),
        error=None,
        past=past,
    )


def _leased(row: Row, terms: Terms, now_us: int, lease_s: float | None = None) -> Row:
    """The row with its lease counted from now."""
    lease_us = now_us + micros(terms.lease_s if lease_s is None else lease_s)
    return row.but(lease_us=lease_us, expires_us=_kept_until(terms, lease_us))


def _kept_until(terms: Terms, lease_us: int) -> int | None:
    """When a record without an outcome may go: never, where it is held until there is one."""
    if terms.hold or terms.ttl_s is None:
        return None
    return lease_us + micros(terms.ttl_s)


def with_past(row: Row, ending: str, ended_us: int) -> str:
    """The row's past with its current attempt added to it."""
    items: list[Any] = json.loads(row.past)
    items.append([row.number, row.fence, row.attempt, row.started_us, ended_us, ending])
    return json.dumps(items[-PAST_KEPT:])


# --- changes under a claim ----------------------------------------------------------------------


def current(row: Row | None, claim: Claim) -> bool:
    """Is this claim the one the row was last given to?"""
    return row is not None and row.attempt == claim.attempt and claim.fence in (0, row.fence)


def lost(row: Row | None, claim: Claim) -> Lost:
    """The refusal, with the recorded outcome if it is one of the very same call."""
    if (
        row is not None
        and row.state == COMPLETED
        and row.fingerprint == claim.fingerprint
        and row.key.operation == claim.key.operation
    ):
        return Lost(_outcome(row))
    return Lost()


def running(row: Row) -> bool:
    return row.state in (PENDING, UNKNOWN)


def complete(row: Row | None, op: Completing, now_us: int) -> tuple[Verdict, Row | None]:
    if row is None or not current(row, op.claim):
        return lost(row, op.claim), None
    if row.state == COMPLETED and row.outcome == op.outcome:
        return KEPT, None
    if not running(row):
        return lost(row, op.claim), None
    return KEPT, _completed(row, op.outcome, op.claim.terms.ttl_s, now_us)


def _completed(row: Row, outcome: Outcome, ttl_s: float | None, now_us: int) -> Row:
    return Row(
        row.key,
        row.fingerprint,
        row.attempt,
        row.fence,
        row.number,
        COMPLETED,
        row.hold,
        row.created_us,
        row.started_us,
        row.lease_us,
        now_us,
        expiry(ttl_s, now_us),
        outcome,
        row.error,
        row.steps,
        row.past,
    )


def expiry(ttl_s: float | None, now_us: int) -> int | None:
    """When a record with an ending may go."""
    return None if ttl_s is None else now_us + micros(ttl_s)


def release(row: Row | None, op: Releasing, now_us: int) -> tuple[Verdict, Row | None]:
    if row is None or not current(row, op.claim):
        return lost(row, op.claim), None
    if row.state == FAILED:
        return KEPT, None
    if not running(row):
        return lost(row, op.claim), None
    ending = "released" if op.error is None else f"failed: {op.error}"
    return KEPT, row.but(
        state=FAILED,
        error=op.error,
        lease_us=now_us,
        expires_us=expiry(op.claim.terms.ttl_s, now_us),
        past=with_past(row, ending, now_us),
    )


def renew(row: Row | None, op: Renewing, now_us: int) -> tuple[Verdict, Row | None]:
    if row is None or not current(row, op.claim) or not running(row):
        return lost(row, op.claim), None
    if op.lease_s == 0:
        return KEPT, _leased(row, op.claim.terms, now_us, 0).but(state=UNKNOWN)
    if row.state == UNKNOWN:
        # Given up while this renewal was under way: it must not come back to life for nobody.
        return Lost(), None
    return KEPT, _leased(row, op.claim.terms, now_us, op.lease_s)


def note(row: Row | None, op: Noting, now_us: int) -> tuple[Verdict, Row | None]:
    if row is None or not current(row, op.claim) or row.state != PENDING:
        return lost(row, op.claim), None
    steps = {**row.steps, op.name: op.data}
    return KEPT, _leased(row, op.claim.terms, now_us).but(steps=steps)


_RULES: dict[type, Any] = {
    Claiming: claim,
    Completing: complete,
    Releasing: release,
    Renewing: renew,
    Noting: note,
}


# --- for people ---------------------------------------------------------------------------------


def seen_state(state: str, hold: bool, lease_us: int, now_us: int) -> State:
    """A held row whose lease ran out is unknown, whether or not anybody wrote that down yet."""
    if state == PENDING and hold and lease_us <= now_us:
        return State.UNKNOWN
    return State(state)


def past_of(text: str) -> tuple[Past, ...]:
    return tuple(
        Past(number, fence, attempt, moment(started), moment(ended), ending)
        for number, fence, attempt, started, ended, ending in json.loads(text)
    )


def record(row: Row, now_us: int) -> Record:
    """The row as people see it."""
    return Record(
        key=row.key,
        state=seen_state(row.state, row.hold, row.lease_us, now_us),
        fingerprint=row.fingerprint,
        attempt=row.attempt,
        number=row.number,
        fence=row.fence,
        held=row.hold,
        created_at=moment(row.created_us),
        started_at=moment(row.started_us),
        lease_until=moment(row.lease_us),
        seen_at=moment(now_us),
        completed_at=None if row.completed_us is None else moment(row.completed_us),
        expires_at=None if row.expires_us is None else moment(row.expires_us),
        outcome=row.outcome,
        error=row.error,
        steps=dict(row.steps),
        past=past_of(row.past),
    )


def resolve(
    row: Row | None, fence: int, outcome: Outcome | None, ttl_s: float | None, now_us: int
) -> Row | None:
    """The settled row, or None when there is nothing to settle."""
    if row is None or expired(row, now_us) or row.fence != fence:
        return None
    if not running(row) or row.lease_us > now_us:
        return None
    ending = settlement(outcome)
    row = row.but(expires_us=expiry(ttl_s, now_us), past=with_past(row, ending, now_us))
    if outcome is None:
        return row.but(state=FAILED, error=ending)
    return row.but(state=COMPLETED, outcome=outcome, completed_us=now_us)


def settlement(outcome: Outcome | None) -> str:
    """How an attempt ended that somebody settled: its story says that it was not its own doing."""
    if outcome is None:
        return "resolved by hand: let it run again"
    return f"resolved by hand: it {'failed' if outcome.kind == 'error' else 'happened'}"


def forgettable(row: Row | None, force: bool, now_us: int) -> bool:
    if row is None:
        return False
    return force or not (row.state == PENDING and row.lease_us > now_us)


def _outcome(row: Row) -> Outcome:
    assert row.outcome is not None, "a completed row has an outcome"
    return row.outcome


def wanted(record: Record, tenant: str | None, operation: str | None, state: State | None) -> bool:
    """Does a listing with these filters include the record?"""
    return (
        (tenant is None or record.key.tenant == tenant)
        and (operation is None or record.key.operation == operation)
        and (state is None or record.state == state)
    )
