"""Complete and renew in one statement, by fence.

A holder that is still the current one needs no read first: the statement itself checks attempt
and fence. When it matches nothing, `generic` reads the row and the rules say why. The same
`COMPLETE` is what a bound ledger runs inside the caller's transaction.

Which is also why nobody waits for a lock here: the caller's own transaction may hold the row until
it commits, and the other operations of the batch must not wait for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from semel.stores import rules
from semel.stores.rules import Completing, Operation, Renewing
from semel.stores.sql import generic
from semel.stores.sql.faults import Fault, fault_of
from semel.stores.sql.generic import AGAIN
from semel.stores.sql.links import Link, Params
from semel.stores.sql.rows import split, stored_text
from semel.values import Claim, State

Fenced: TypeAlias = Completing | Renewing

CURRENT = "id = ? AND attempt = ? AND fence = ?"
COMPLETE = (
    "UPDATE idempotency SET outcome = ?, status_code = ?, response = {json}, body = ?, "  # noqa: S608
    f"state = 'COMPLETED', completed_at = {{now}}, expires_at = {{later}} WHERE {CURRENT} "
    "AND state IN ('PENDING', 'UNKNOWN')"
)
# What was given up does not come back to life; it may be given up twice.
RENEW = (
    "UPDATE idempotency SET state = ?, lease_until = {later}, expires_at = {later} "  # noqa: S608
    f"WHERE {CURRENT} AND state IN ('PENDING', ?)"
)


def is_fenced(op: Operation) -> bool:
    """A claim without a fence ("whatever this attempt got") has to be looked up first."""
    return isinstance(op, Completing | Renewing) and op.claim.fence != 0


async def change(link: Link, ops: Sequence[Fenced]) -> list[Any]:
    """The answers to these operations, which are all of one kind."""
    try:
        matched = await _matched(link, ops)
    except Exception as error:
        if fault_of(error) is not Fault.LOCKED:
            raise
        return await _unlocked(link, ops) if len(ops) > 1 else [AGAIN]
    return await _answers(link, ops, matched)


async def _answers(link: Link, ops: Sequence[Fenced], matched: int) -> list[Any]:
    return [rules.KEPT] * len(ops) if matched == len(ops) else await generic.perform(link, ops)


async def _matched(link: Link, ops: Sequence[Fenced]) -> int:
    """How many of them were current, and are changed."""
    return await _many(link, ops) if len(ops) > 1 else await _one(link, ops[0])


async def _unlocked(link: Link, ops: Sequence[Fenced]) -> list[Any]:
    """The same, over the rows that nobody else has locked; the others are read, and told."""
    async with generic.transaction(link):
        free = await generic.lock(link, [op.claim.key.id for op in ops])
        chosen = [i for i, op in enumerate(ops) if op.claim.key.id in free]
        matched = await _matched(link, [ops[i] for i in chosen]) if chosen else 0
    answers: list[Any] = [AGAIN] * len(ops)
    rest = [i for i in range(len(ops)) if ops[i].claim.key.id not in free]
    for group, all_kept in ((chosen, matched), (rest, 0)):
        if group:
            found = await _answers(link, [ops[i] for i in group], all_kept)
            for i, answer in zip(group, found, strict=True):
                answers[i] = answer
    return answers


async def complete(link: Link, op: Completing) -> bool:
    """False when the claim is not the current one, or has an outcome already."""
    return await link.change(COMPLETE, _complete_params(link, op)) == 1


async def _one(link: Link, op: Fenced) -> int:
    statement, params = _statement(link, op)
    return await link.change(link.dialect.at_once + statement, params)


def _statement(link: Link, op: Fenced) -> tuple[str, Params]:
    if isinstance(op, Completing):
        return COMPLETE, _complete_params(link, op)
    return RENEW, _renew_params(link, op)


def _complete_params(link: Link, op: Completing) -> Params:
    dialect = link.dialect
    ends = dialect.later_param(_ttl_us(op.claim))
    response, body = split(op.outcome, dialect.codec)
    said = (op.outcome.kind, op.outcome.status, response, body)
    return [*said, *dialect.now_param(), ends, *_current_params(link, op.claim)]


def _renew_params(link: Link, op: Renewing) -> Params:
    later = link.dialect.later_param
    lease_us, expires_us = _lease(op)
    state = _state(op)
    return [state, later(lease_us), later(expires_us), *_current_params(link, op.claim), state]


def _current_params(link: Link, claim: Claim) -> list[Any]:
    return [claim.key.id, stored_text(claim.attempt, link.dialect.codec), claim.fence]


def _ttl_us(claim: Claim) -> int | None:
    return None if claim.terms.ttl_s is None else rules.micros(claim.terms.ttl_s)


def _state(op: Renewing) -> str:
    return (State.UNKNOWN if op.lease_s == 0 else State.PENDING).value


def _lease(op: Renewing) -> tuple[int, int | None]:
    """When the lease ends and when the row expires, in microseconds from now."""
    lease_us, ttl_us = rules.micros(op.lease_s), _ttl_us(op.claim)
    return lease_us, None if ttl_us is None or op.claim.terms.hold else lease_us + ttl_us


# --- many at once -------------------------------------------------------------------------------


async def _many(link: Link, ops: Sequence[Fenced]) -> int:
    """How many of them were current."""
    ops = sorted(ops, key=lambda op: op.claim.key.id)
    if link.dialect.name == "mysql":
        return await _joined(link, ops)
    statement = _statement(link, ops[0])[0]
    async with generic.transaction(link):
        return await link.change_each(statement, [_statement(link, op)[1] for op in ops])


JOIN = (
    "UPDATE ({values}) AS v STRAIGHT_JOIN idempotency AS r FORCE INDEX (PRIMARY) "
    "ON r.id = v.id AND r.attempt = v.attempt "
    "AND r.fence = v.fence AND r.state IN ('PENDING', "
)
JOIN_COMPLETE = JOIN + (
    "'UNKNOWN') SET r.outcome = v.outcome, r.status_code = v.status, r.response = v.response, "
    "r.body = v.body, "
    "r.state = 'COMPLETED', r.completed_at = {now}, "
    "r.expires_at = {now} + INTERVAL v.ttl MICROSECOND"
)
JOIN_RENEW = JOIN + (
    "v.state) SET r.state = v.state, r.lease_until = {now} + INTERVAL v.lease MICROSECOND, "
    "r.expires_at = {now} + INTERVAL v.expires MICROSECOND"
)
COMPLETE_COLUMNS = ("id", "attempt", "fence", "outcome", "status", "response", "body", "ttl")
RENEW_COLUMNS = ("id", "attempt", "fence", "state", "lease", "expires")


async def _joined(link: Link, ops: Sequence[Fenced]) -> int:
    """MariaDB answers one statement over many rows much sooner than many statements."""
    completing = isinstance(ops[0], Completing)
    columns = COMPLETE_COLUMNS if completing else RENEW_COLUMNS
    first = f"SELECT {', '.join(f'? AS {c}' for c in columns)}"
    rest = f" UNION ALL SELECT {', '.join('?' * len(columns))}"
    values = first + rest * (len(ops) - 1)
    statement = (JOIN_COMPLETE if completing else JOIN_RENEW).replace("{values}", values)
    params = [value for op in ops for value in _line(link, op)]
    return await link.change(link.dialect.at_once + statement, params)


def _line(link: Link, op: Fenced) -> list[Any]:
    """One line of the derived table."""
    later = link.dialect.later_param
    if isinstance(op, Completing):
        response, body = split(op.outcome, link.dialect.codec)
        said = [op.outcome.kind, op.outcome.status, response, body, later(_ttl_us(op.claim))]
    else:
        lease_us, expires_us = _lease(op)
        said = [_state(op), later(lease_us), later(expires_us)]
    return [*_current_params(link, op.claim), *said]
