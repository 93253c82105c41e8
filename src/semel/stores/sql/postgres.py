"""The ledger's rules in PostgreSQL's words: one statement per verb, for one key or for many.

A claim is one statement with three parts. `seen` reads every asked row from the statement's
snapshot and judges it as `rules.claim` does: whoever gets an answer there waits for nobody, locks
nothing and writes nothing. `fresh` inserts where no row was seen. `taken` takes rows that can be
claimed: it locks them, skipping those that somebody else has locked, and judges them again. A
key whose row appeared, changed or was locked after the snapshot is in none of the parts and has
to be asked for again.

Completing, releasing, renewing and noting are one UPDATE by attempt and fence, over rows that
nobody else has locked: the caller's own transaction may hold the row (a bound `complete`), and a
heartbeat must not make every other caller of its batch wait for that. A claim that is not
current, or whose row is locked, is read and answered by the rules.

`tests/contract/test_sql_ledger.py` holds this module to the rules. The lookups are LATERAL with a
LIMIT so that the planner cannot turn a handful of keys into a scan of the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from semel.errors import CorruptRecordError
from semel.stores import rules
from semel.stores.rules import (
    LAPSED,
    PAST_KEPT,
    Claiming,
    Completing,
    Noting,
    Operation,
    Releasing,
    Renewing,
    micros,
)
from semel.stores.sql import generic
from semel.stores.sql.dialects import LONGEST_US
from semel.stores.sql.generic import AGAIN
from semel.stores.sql.links import Link
from semel.stores.sql.rows import (
    KEY_CHARS,
    TENANT_CHARS,
    corrupt,
    joined,
    original_steps,
    shortened,
    split,
    stored_bytes,
    stored_text,
)
from semel.values import Busy, Claim, Done, Kept, Mismatch, Orphan, Won


def _asked(columns: Sequence[tuple[str, str]], *, many: bool) -> str:
    """What is asked, as a table `a` numbered by `n`: from arrays, or, for one, from values."""
    names = ", ".join(name for name, _ in columns)
    if many:
        arrays = ", ".join(f"?::{kind}[]" for _, kind in columns)
        return f"unnest({arrays}) WITH ORDINALITY AS a ({names}, n)"
    values = ", ".join(f"?::{kind}" for _, kind in columns)
    return f"(SELECT {values}, 1) AS a ({names}, n)"


def _dense(statement: str) -> str:
    """Without its layout: psycopg remembers how to send a statement only below 4,096 characters."""
    return re.sub(r"\s*([(),=+])\s*", r"\1", " ".join(statement.split()))


MICROSECOND = "interval '1 us'"


def _us(time: str) -> str:
    """A time as microseconds since 1970; `extract` is exact from PostgreSQL 14 on."""
    return f"(extract(epoch FROM {time}) * 1e6)::int8"


def _past(ended: str, ending: str) -> str:
    """The row's past with its current attempt added to it, as `rules.with_past` does."""
    return f"""(
        CASE WHEN jsonb_array_length(r.past::jsonb) >= {PAST_KEPT} THEN r.past::jsonb - 0
             ELSE coalesce(r.past, '[]')::jsonb END
        || jsonb_build_array(jsonb_build_array(
            r.number, r.fence, r.attempt, {_us("r.started_at")}, {ended}, {ending}
        ))
    )::text"""


def _gone(part: int) -> str:
    """Part of the attempt that this one took over from, as `rules._taken_over` finds it."""
    last = "(r.past::jsonb -> -1)"
    return f"""CASE WHEN {last} ->> 5 = '{LAPSED}' AND ({last} ->> 0)::int = r.number - 1
        THEN ({last} ->> {part})::int8 END"""


# --- claim --------------------------------------------------------------------------------------

ASKED = (
    ("id", "bytea"),
    ("key", "text"),
    ("tenant", "text"),
    ("operation", "text"),
    ("hash", "text"),
    ("attempt", "text"),
    ("lease", "int8"),
    ("ttl", "int8"),
    ("takeover", "bool"),
    ("hold", "bool"),
)


def _claiming(*, many: bool) -> str:
    return _dense(f"""
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now),
ask AS MATERIALIZED (
    SELECT a.*, clock.now, clock.now + a.lease * {MICROSECOND} AS lease_until,
           clock.now + (a.lease + a.ttl) * {MICROSECOND} AS expires_at
    FROM clock, {_asked(ASKED, many=many)}
),
seen AS MATERIALIZED (
    SELECT a.*, r.fence, r.lease_until AS ends, r.outcome, r.status_code, r.response, r.body,
        CASE
            WHEN r.fence IS NULL THEN 'absent'
            WHEN r.expires_at <= a.now THEN 'free'
            WHEN r.operation <> a.operation THEN 'operation'
            WHEN r.request_hash <> a.hash THEN 'fingerprint'
            WHEN r.state = 'COMPLETED' THEN 'done'
            WHEN r.state = 'FAILED' AND r.attempt = a.attempt THEN 'over'
            WHEN r.state = 'FAILED' THEN 'free'
            WHEN r.state NOT IN ('PENDING', 'UNKNOWN') THEN 'corrupt'
            WHEN r.attempt = a.attempt THEN 'free'
            WHEN r.lease_until > a.now THEN 'busy'
            WHEN NOT a.takeover OR (r.hold AND NOT a.hold) THEN 'orphan'
            ELSE 'free'
        END AS sight
    FROM ask AS a LEFT JOIN LATERAL (
        SELECT * FROM idempotency AS i WHERE i.id = a.id LIMIT 1
    ) AS r ON true
),
fresh AS (
    INSERT INTO idempotency (
        id, idempotency_key, tenant_id, operation, request_hash, state, attempt, fence, number,
        hold, created_at, started_at, lease_until, expires_at
    )
    SELECT DISTINCT ON (id) id, key, tenant, operation, hash, 'PENDING', attempt, {_us("now")}, 1,
        hold, now, now, lease_until, expires_at
    FROM seen WHERE sight = 'absent' ORDER BY id, n
    ON CONFLICT (id) DO NOTHING
    RETURNING id, attempt, fence
),
wish AS MATERIALIZED (
    SELECT DISTINCT ON (id) * FROM seen WHERE sight = 'free' ORDER BY id, n
),
locked AS MATERIALIZED (
    SELECT w.*,
        CASE WHEN r.expires_at <= w.now THEN 'anew'
             WHEN r.state = 'FAILED' THEN 'again'
             WHEN r.attempt = w.attempt THEN 'own'
             ELSE 'over' END AS how
    FROM wish AS w JOIN LATERAL (
        SELECT * FROM idempotency AS i WHERE i.id = w.id AND (
            i.expires_at <= w.now
            OR i.operation = w.operation AND i.request_hash = w.hash AND (
                i.state = 'FAILED' AND i.attempt <> w.attempt
                OR i.state IN ('PENDING', 'UNKNOWN') AND (
                    i.attempt = w.attempt
                    OR i.lease_until <= w.now AND w.takeover AND (w.hold OR NOT i.hold)
                )
            )
        )
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) AS r ON true
),
taken AS (
    UPDATE idempotency AS r SET
        idempotency_key = w.key, tenant_id = w.tenant, operation = w.operation,
        request_hash = w.hash, state = 'PENDING', attempt = w.attempt,
        fence = CASE w.how WHEN 'own' THEN r.fence ELSE greatest(r.fence + 1, {_us("now")}) END,
        number = CASE w.how WHEN 'anew' THEN 1 WHEN 'own' THEN r.number ELSE r.number + 1 END,
        hold = CASE w.how WHEN 'own' THEN r.hold ELSE w.hold END,
        created_at = CASE w.how WHEN 'anew' THEN w.now ELSE r.created_at END,
        started_at = CASE w.how WHEN 'own' THEN r.started_at ELSE w.now END,
        lease_until = w.lease_until, expires_at = w.expires_at, completed_at = NULL,
        outcome = NULL, status_code = NULL, response = NULL, body = NULL, error = NULL,
        steps = CASE w.how WHEN 'anew' THEN NULL ELSE r.steps END,
        past = CASE w.how WHEN 'anew' THEN NULL
                          WHEN 'over' THEN {_past(_us("r.lease_until"), f"'{LAPSED}'")}
                          ELSE r.past END
    FROM locked AS w WHERE r.id = w.id
    RETURNING w.n, r.fence, r.number, r.steps, {_gone(1)} AS gone, {_gone(4)} AS since
)
SELECT s.n, s.sight, coalesce(f.fence, t.fence), t.number, t.steps, t.gone, t.since,
    CASE s.sight WHEN 'busy' THEN {_us("s.ends")} - {_us("s.now")}
                 WHEN 'orphan' THEN {_us("s.ends")} END,
    s.fence, s.outcome, s.status_code, s.response::text, s.body
FROM seen AS s
LEFT JOIN fresh AS f ON s.sight = 'absent' AND f.id = s.id AND f.attempt = s.attempt
LEFT JOIN taken AS t ON t.n = s.n
""")  # noqa: S608 - every part is a constant


CLAIM_ONE, CLAIM_MANY = _claiming(many=False), _claiming(many=True)


async def claim(link: Link, ops: Sequence[Claiming]) -> list[Any]:
    """The answers to these claims; `AGAIN` for those that were overtaken."""
    answers: list[Any] = [AGAIN] * len(ops)
    for line in await _ask(link, (CLAIM_ONE, CLAIM_MANY), [_claim_line(op) for op in ops]):
        n = line[0] - 1
        answers[n] = _answer(ops[n], line)
    return answers


async def _ask(
    link: Link, statements: tuple[str, str], asked: Sequence[tuple[Any, ...]]
) -> list[Any]:
    if len(asked) == 1:
        return await link.fetch(statements[0], asked[0])
    return await link.fetch(statements[1], [list(column) for column in zip(*asked, strict=True)])


def _claim_line(op: Claiming) -> tuple[Any, ...]:
    key, terms = op.key, op.terms
    return (
        key.id,
        shortened(key.text, KEY_CHARS),
        shortened(key.tenant, TENANT_CHARS),
        stored_text(key.operation),
        op.fingerprint.hex(),
        stored_text(op.attempt),
        _span(terms.lease_s),
        None if terms.hold else _span(terms.ttl_s),
        terms.takeover,
        terms.hold,
    )


def _span(seconds: float | None) -> int | None:
    return None if seconds is None else min(micros(seconds), LONGEST_US)


def _answer(op: Claiming, line: Sequence[Any]) -> Any:
    _, sight, won, number, steps, orphan, since, time_us, fence, *outcome = line
    match sight:
        case "done":
            return _done(op, fence, outcome)
        case "busy":
            return Busy(time_us / 1e6)
        case "absent" | "free":
            return AGAIN if won is None else _won(op, won, number or 1, steps, orphan, since)
        case "orphan":
            return Orphan(fence, rules.moment(time_us))
        case "over":
            return Busy(0.0)
        case "operation" | "fingerprint":
            return Mismatch(sight)
    return corrupt(op.key.id, op.key.text, "its state is none of ours")


def _done(op: Claiming, fence: int, outcome: Sequence[Any]) -> Done | CorruptRecordError:
    try:
        return Done(joined(*outcome), fence)
    except ValueError as error:
        return corrupt(op.key.id, op.key.text, error)


def _won(
    op: Claiming, fence: int, number: int, steps: str | None, orphan: int | None, since: int | None
) -> Won | CorruptRecordError:
    claim = Claim(op.key, op.attempt, op.fingerprint, op.terms, fence, number)
    left = None if orphan is None or since is None else Orphan(orphan, rules.moment(since))
    if steps is None:
        return Won(claim, {}, left)
    try:
        return Won(claim, original_steps(steps), left)
    except ValueError as error:
        return corrupt(op.key.id, op.key.text, error)


# --- complete, release, renew, note -------------------------------------------------------------


def _changing(columns: Sequence[tuple[str, str]], sets: str) -> tuple[str, str]:
    """An UPDATE of the rows whose claims are current and that nobody else has locked.

    For one claim and for many.
    """
    asked = [("id", "bytea"), ("attempt", "text"), ("fence", "int8"), *columns]
    one, many = (
        _dense(f"""
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now),
held AS MATERIALIZED (
    SELECT a.*, clock.now
    FROM clock, {_asked(asked, many=many)}
    JOIN LATERAL (
        SELECT 1 FROM idempotency AS i
        WHERE i.id = a.id AND i.attempt = a.attempt AND (a.fence = 0 OR i.fence = a.fence)
            AND i.state IN ('PENDING', 'UNKNOWN')
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) AS r ON true
)
UPDATE idempotency AS r SET {sets}
FROM held AS a WHERE r.id = a.id
RETURNING a.n
""")  # noqa: S608 - every part is a constant
        for many in (False, True)
    )
    return one, many


COMPLETE = _changing(
    [
        ("ttl", "int8"),
        ("outcome", "text"),
        ("status", "integer"),
        ("response", "text"),
        ("body", "bytea"),
    ],
    "state = 'COMPLETED', outcome = a.outcome, status_code = a.status, "
    "response = a.response::json, body = a.body, completed_at = a.now, "
    f"expires_at = a.now + a.ttl * {MICROSECOND}",
)
RELEASE = _changing(
    [("ttl", "int8"), ("error", "text"), ("ending", "text")],
    "state = 'FAILED', error = a.error, lease_until = a.now, "
    f"expires_at = a.now + a.ttl * {MICROSECOND}, past = {_past(_us('a.now'), 'a.ending')}",
)
LEASED = (
    f"lease_until = a.now + a.lease * {MICROSECOND}, "
    f"expires_at = a.now + (a.lease + a.ttl) * {MICROSECOND}"
)
RENEW = _changing(
    [("ttl", "int8"), ("lease", "int8"), ("state", "text")], f"state = a.state, {LEASED}"
)
NOTE = _changing(
    [("ttl", "int8"), ("lease", "int8"), ("name", "text"), ("data", "text")],
    "state = 'PENDING', steps = (coalesce(r.steps, '{}')::jsonb "
    f"|| jsonb_build_object(a.name, a.data))::text, {LEASED}",
)


async def complete(link: Link, ops: Sequence[Completing]) -> list[Any]:
    return await _change(link, COMPLETE, ops, _completing)


def _completing(op: Completing) -> tuple[Any, ...]:
    kind, status = op.outcome.kind, op.outcome.status
    return (_span(op.claim.terms.ttl_s), kind, status, *split(op.outcome))


async def release(link: Link, ops: Sequence[Releasing]) -> list[Any]:
    return await _change(link, RELEASE, ops, _releasing)


def _releasing(op: Releasing) -> tuple[Any, ...]:
    ttl_us = _span(op.claim.terms.ttl_s)
    if op.error is None:
        return ttl_us, None, "released"
    return ttl_us, stored_text(op.error), stored_text(f"failed: {op.error}")


async def renew(link: Link, ops: Sequence[Renewing]) -> list[Any]:
    return await _change(link, RENEW, ops, _renewing)


def _renewing(op: Renewing) -> tuple[Any, ...]:
    return _kept_for(op.claim), _span(op.lease_s), "UNKNOWN" if op.lease_s == 0 else "PENDING"


async def note(link: Link, ops: Sequence[Noting]) -> list[Any]:
    return await _change(link, NOTE, ops, _noting)


def _noting(op: Noting) -> tuple[Any, ...]:
    lease_us = _span(op.claim.terms.lease_s)
    return _kept_for(op.claim), lease_us, stored_text(op.name), stored_bytes(op.data)


def _kept_for(claim: Claim) -> int | None:
    """How long a running record outlives its lease."""
    return None if claim.terms.hold else _span(claim.terms.ttl_s)


async def _change(
    link: Link,
    statements: tuple[str, str],
    ops: Sequence[Any],
    params: Callable[[Any], tuple[Any, ...]],
) -> list[Any]:
    asked = [
        (op.claim.key.id, stored_text(op.claim.attempt), op.claim.fence, *params(op)) for op in ops
    ]
    kept = {n - 1 for (n,) in await _ask(link, statements, asked)}
    if len(kept) == len(ops):
        return [Kept()] * len(ops)
    rest = [i for i in range(len(ops)) if i not in kept]
    answers: list[Any] = [Kept()] * len(ops)
    for i, answer in zip(rest, await _explain(link, [ops[i] for i in rest]), strict=True):
        answers[i] = answer
    return answers


async def _explain(link: Link, ops: Sequence[Operation]) -> list[Any]:
    """Why these changed nothing: repeated, lost, or, to be asked again, locked."""
    now_us, found = await generic.read(link, sorted({rules.key_of(op).id for op in ops}))
    explained: list[Any] = []
    for op in ops:
        row = found.get(rules.key_of(op).id)
        if isinstance(row, Exception):
            explained.append(row)
            continue
        answer, changed = rules.apply(row, op, now_us)
        explained.append(answer if changed is None else AGAIN)
    return explained


# --- a batch ------------------------------------------------------------------------------------

VERBS: dict[type, Callable[[Link, Sequence[Any]], Any]] = {
    Claiming: claim,
    Completing: complete,
    Releasing: release,
    Renewing: renew,
    Noting: note,
}


async def perform(link: Link, ops: Sequence[Operation]) -> list[Any]:
    """The answers, in order: one statement for each kind of operation."""
    answers: list[Any] = [AGAIN] * len(ops)
    for kind, verb in VERBS.items():
        chosen = [i for i, op in enumerate(ops) if type(op) is kind]
        if not chosen:
            continue
        chosen.sort(key=lambda i: rules.key_of(ops[i]).id)
        for i, answer in zip(chosen, await verb(link, [ops[i] for i in chosen]), strict=True):
            answers[i] = answer
    return answers
