"""The ledger's rules in PostgreSQL's words: one statement per verb, for one key or for many.

A claim is one statement with two parts. `seen` reads every asked row from the statement's snapshot
and judges it as `rules.claim` does: whoever gets an answer there waits for nobody, locks nothing
and writes nothing. `fresh` inserts where no row was seen. A row that can be had (it failed, its
holder vanished, it expired) is had by a second statement, `TAKE`, which locks it, skipping what
somebody else has locked, and judges it again. A key whose row appeared, changed or was locked
meanwhile has to be asked for again.

Completing, releasing, renewing and noting are one UPDATE by attempt and fence, over rows that
nobody else has locked: the caller's own transaction may hold the row (a bound `complete`), and a
heartbeat must not make every other caller of its batch wait for that. A claim that is not
current, or whose row is locked, is read and answered by the rules.

`tests/contract/test_sql_ledger.py` holds this module to the rules. The lookups are LATERAL with a
LIMIT so that the planner cannot turn a handful of keys into a scan of the table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from semel.errors import CorruptRecordError
from semel.stores import rules
from semel.stores.rules import (
    LAPSED,
    NO_STEPS,
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
from semel.stores.sql.asking import BOOL, BYTES, ID, INT, PLAIN, TEXT, Columns, Question, cut_at
from semel.stores.sql.dialects import LONGEST_US
from semel.stores.sql.faults import Fault, fault_of
from semel.stores.sql.generic import AGAIN
from semel.stores.sql.links import Link
from semel.stores.sql.rows import (
    KEY_CHARS,
    TENANT_CHARS,
    corrupt,
    joined,
    original_steps,
    split,
    stored_bytes,
)
from semel.values import Busy, Claim, Done, Mismatch, Orphan, Terms, Won

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

ASKED: Columns = {
    "id": ID,
    "key": cut_at(KEY_CHARS),
    "tenant": cut_at(TENANT_CHARS),
    "operation": TEXT,
    "hash": PLAIN,
    "attempt": TEXT,
}
CLAIM_TERMS: Columns = {"lease": INT, "ttl": INT, "takeover": BOOL, "hold": BOOL}
LEASE_UNTIL = f"now + lease * {MICROSECOND}"
EXPIRES_AT = f"now + (lease + ttl) * {MICROSECOND}"

SEEN = f""",
seen AS MATERIALIZED (
    SELECT a.*, r.fence, r.lease_until AS ends, r.outcome, r.status_code, r.response, r.body,
        CASE
            WHEN r.fence IS NULL THEN 'absent'
            WHEN r.expires_at <= a.now THEN 'free'
            WHEN r.operation <> a.operation THEN 'operation'
            WHEN r.request_hash <> a.hash THEN 'fingerprint'
            WHEN r.state = 'COMPLETED' THEN 'done'
            WHEN r.state NOT IN ('PENDING', 'FAILED', 'UNKNOWN') THEN 'corrupt'
            WHEN r.attempt = a.attempt AND r.state <> 'PENDING' THEN 'over'
            WHEN r.attempt = a.attempt OR r.state = 'FAILED' THEN 'free'
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
        id, idempotency_key, tenant_id, operation, request_hash, status_code, state, attempt,
        fence, number, hold, created_at, started_at, lease_until, expires_at
    )
    SELECT DISTINCT ON (id) id, key, tenant, operation, hash, NULL::int, 'PENDING', attempt,
        stamp, 1, hold, now, now, {LEASE_UNTIL}, {EXPIRES_AT}
    FROM seen, (SELECT {_us("now")} AS stamp FROM clock OFFSET 0) AS at
    WHERE sight = 'absent' ORDER BY id, n
    ON CONFLICT (id) DO NOTHING
    RETURNING id, attempt, fence
)
SELECT s.n, s.sight, f.fence,
    CASE s.sight WHEN 'busy' THEN date_part('epoch', s.ends - s.now) END,
    CASE s.sight WHEN 'orphan' THEN {_us("s.ends")} END,
    s.fence, s.outcome, s.status_code, s.response::text, s.body
FROM seen AS s
LEFT JOIN fresh AS f ON s.sight = 'absent' AND f.id = s.id AND f.attempt = s.attempt
"""  # noqa: S608 - every part is a constant

TAKEN = f""",
wish AS MATERIALIZED (SELECT DISTINCT ON (id) * FROM ask ORDER BY id, n),
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
                i.state = 'PENDING' AND i.attempt = w.attempt
                OR i.attempt <> w.attempt AND (
                    i.state = 'FAILED'
                    OR i.state IN ('PENDING', 'UNKNOWN') AND i.lease_until <= w.now
                        AND w.takeover AND (w.hold OR NOT i.hold)
                )
            )
        )
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) AS r ON true
)
UPDATE idempotency AS r SET
    idempotency_key = w.key, tenant_id = w.tenant, operation = w.operation,
    request_hash = w.hash, state = 'PENDING', attempt = w.attempt,
    fence = CASE w.how WHEN 'own' THEN r.fence ELSE greatest(r.fence + 1, {_us("now")}) END,
    number = CASE w.how WHEN 'anew' THEN 1 WHEN 'own' THEN r.number ELSE r.number + 1 END,
    hold = CASE w.how WHEN 'own' THEN r.hold ELSE w.hold END,
    created_at = CASE w.how WHEN 'anew' THEN w.now ELSE r.created_at END,
    started_at = CASE w.how WHEN 'own' THEN r.started_at ELSE w.now END,
    lease_until = {LEASE_UNTIL}, expires_at = {EXPIRES_AT}, completed_at = NULL,
    outcome = NULL, status_code = NULL, response = NULL, body = NULL, error = NULL,
    steps = CASE w.how WHEN 'anew' THEN NULL ELSE r.steps END,
    past = CASE w.how WHEN 'anew' THEN NULL
                      WHEN 'over' THEN {_past(_us("r.lease_until"), f"'{LAPSED}'")}
                      ELSE r.past END
FROM locked AS w WHERE r.id = w.id
RETURNING w.n, r.fence, r.number, r.steps, {_gone(1)} AS gone, {_gone(4)} AS since
"""  # noqa: S608 - every part is a constant


def _asked(ops: Sequence[Claiming], _: str) -> list[list[Any]]:
    keys = [op.key for op in ops]
    return [
        [key.id for key in keys],
        [key.text for key in keys],
        [key.tenant for key in keys],
        [key.operation for key in keys],
        [op.fingerprint.hex() for op in ops],
        [op.attempt for op in ops],
    ]


def _claim_spans(terms: Terms) -> tuple[Any, ...]:
    return _span(terms.lease_s), _kept_for(terms), terms.takeover, terms.hold


def _span(seconds: float | None) -> int | None:
    return None if seconds is None else min(micros(seconds), LONGEST_US)


def _kept_for(terms: Terms) -> int | None:
    """How long a running record outlives its lease."""
    return None if terms.hold else _span(terms.ttl_s)


def _claiming(body: str) -> Question:
    return Question(
        ASKED, CLAIM_TERMS, body, values=_asked, terms_of=lambda op: op.terms, spans=_claim_spans
    )


CLAIM, TAKE = _claiming(SEEN), _claiming(TAKEN)


async def claim(link: Link, ops: Sequence[Claiming]) -> list[Any]:
    """The answers to these claims; `AGAIN` for those that were overtaken."""
    answers: list[Any] = [AGAIN] * len(ops)
    free: list[int] = []
    for line in await CLAIM.ask(link, ops):
        n = line[0] - 1
        if line[1] == "free":
            free.append(n)
        else:
            answers[n] = _answer(ops[n], line)
    if free:
        await _take(link, ops, free, answers)
    return answers


async def _take(link: Link, ops: Sequence[Claiming], free: list[int], answers: list[Any]) -> None:
    try:
        lines = await TAKE.ask(link, [ops[i] for i in free])
    except Exception as error:
        # A serialization failure, where SERIALIZABLE is the default. Only these claims are tried
        # again: others of the batch are inserted already, and their callers must be answered.
        if fault_of(error) is not Fault.AGAIN:
            raise
        return
    for n, *won in lines:
        i = free[n - 1]
        answers[i] = _won(ops[i], *won)


def _answer(op: Claiming, line: Sequence[Any]) -> Any:
    _, sight, won, left_s, since_us, fence, *outcome = line
    if sight == "absent":
        return AGAIN if won is None else _first(op, won)
    if sight == "done":
        return _done(op, fence, outcome)
    match sight:
        case "busy":
            return Busy(left_s)
        case "orphan":
            return Orphan(fence, rules.moment(since_us))
        case "over":
            return Busy(0.0)
        case "operation" | "fingerprint":
            return Mismatch(sight)
    return corrupt(op.key.id, op.key.text, "its state is none of ours")


def _first(op: Claiming, fence: int) -> Won:
    return Won(Claim(op.key, op.attempt, op.fingerprint, op.terms, fence), NO_STEPS)


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
    try:
        return Won(claim, original_steps(steps), left)
    except ValueError as error:
        return corrupt(op.key.id, op.key.text, error)


# --- complete, release, renew, note -------------------------------------------------------------

RUNNING = "i.state IN ('PENDING', 'UNKNOWN')"
TTL: Columns = {"ttl": INT}
TERMS: Columns = {"lease": INT, "ttl": INT}


def _changing(
    columns: Columns,
    terms: Columns,
    sets: str,
    *,
    values: Callable[[Sequence[Any], str], list[list[Any]]],
    spans: Callable[[Terms], tuple[Any, ...]],
    where: str = RUNNING,
) -> Question:
    """An UPDATE of the rows whose claims are current and that nobody else has locked."""
    body = f""",
held AS MATERIALIZED (
    SELECT a.* FROM ask AS a
    JOIN LATERAL (
        SELECT 1 FROM idempotency AS i
        WHERE i.id = a.id AND i.attempt = a.attempt AND (a.fence = 0 OR i.fence = a.fence)
            AND {where}
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) AS r ON true
)
UPDATE idempotency AS r SET {sets}
FROM held AS a WHERE r.id = a.id
RETURNING a.n
"""  # noqa: S608 - every part is a constant
    return Question(
        {"id": ID, "attempt": TEXT, "fence": INT, **columns},
        terms,
        body,
        values=lambda ops, codec: [*_current(ops), *values(ops, codec)],
        terms_of=lambda op: op.claim.terms,
        spans=spans,
    )


def _current(ops: Sequence[Any]) -> list[list[Any]]:
    claims = [op.claim for op in ops]
    return [
        [claim.key.id for claim in claims],
        [claim.attempt for claim in claims],
        [claim.fence for claim in claims],
    ]


def _finished_spans(terms: Terms) -> tuple[Any, ...]:
    return (_span(terms.ttl_s),)


FINISHED = f"expires_at = a.now + a.ttl * {MICROSECOND}"
LEASED = (
    f"lease_until = a.now + a.lease * {MICROSECOND}, "
    f"expires_at = a.now + (a.lease + a.ttl) * {MICROSECOND}"
)


def _completing(ops: Sequence[Completing], codec: str) -> list[list[Any]]:
    outcomes = [op.outcome for op in ops]
    parts = [split(outcome, codec) for outcome in outcomes]
    return [
        [outcome.kind for outcome in outcomes],
        [outcome.status for outcome in outcomes],
        [response for response, _ in parts],
        [body for _, body in parts],
    ]


def _releasing(ops: Sequence[Releasing], _: str) -> list[list[Any]]:
    endings = ["released" if op.error is None else f"failed: {op.error}" for op in ops]
    return [[op.error for op in ops], endings]


def _renewing(ops: Sequence[Renewing], _: str) -> list[list[Any]]:
    states = ["UNKNOWN" if op.lease_s == 0 else "PENDING" for op in ops]
    return [[_span(op.lease_s) for op in ops], states]


def _noting(ops: Sequence[Noting], _: str) -> list[list[Any]]:
    return [[op.name for op in ops], [stored_bytes(op.data) for op in ops]]


COMPLETE = _changing(
    {"outcome": PLAIN, "status": INT, "response": PLAIN, "body": BYTES},
    TTL,
    "state = 'COMPLETED', outcome = a.outcome, status_code = a.status, "
    f"response = a.response::json, body = a.body, completed_at = a.now, {FINISHED}",
    values=_completing,
    spans=_finished_spans,
)
RELEASE = _changing(
    {"error": TEXT, "ending": TEXT},
    TTL,
    f"state = 'FAILED', error = a.error, lease_until = a.now, {FINISHED}, "
    f"past = {_past(_us('a.now'), 'a.ending')}",
    values=_releasing,
    spans=_finished_spans,
)
# What was given up comes back to life neither by a renewal nor by a step.
RENEW = _changing(
    {"lease": INT, "state": PLAIN},
    TTL,
    f"state = a.state, {LEASED}",
    values=_renewing,
    spans=lambda terms: (_kept_for(terms),),
    where="i.state IN ('PENDING', a.state)",
)
NOTE = _changing(
    {"name": TEXT, "data": PLAIN},
    TERMS,
    "steps = (coalesce(r.steps, '{}')::jsonb || jsonb_build_object(a.name, a.data))::text, "
    + LEASED,
    values=_noting,
    spans=lambda terms: (_span(terms.lease_s), _kept_for(terms)),
    where="i.state = 'PENDING'",
)


async def _change(link: Link, question: Question, ops: Sequence[Any]) -> list[Any]:
    kept = {line[0] - 1 for line in await question.ask(link, ops)}
    answers: list[Any] = [rules.KEPT] * len(ops)
    if len(kept) < len(ops):
        rest = [i for i in range(len(ops)) if i not in kept]
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

# Claims come first: a withdrawal in the same batch must not overtake what it withdraws.
ORDER = (Claiming, Completing, Releasing, Renewing, Noting)
CHANGES: dict[type, Question] = {
    Completing: COMPLETE,
    Releasing: RELEASE,
    Renewing: RENEW,
    Noting: NOTE,
}


def _verb(link: Link, kind: type, ops: Sequence[Any]) -> Awaitable[list[Any]]:
    return claim(link, ops) if kind is Claiming else _change(link, CHANGES[kind], ops)


async def perform(link: Link, ops: Sequence[Operation]) -> list[Any]:
    """The answers, in order: one statement for each kind of operation."""
    if len(ops) == 1:
        return await _verb(link, type(ops[0]), ops)
    answers: list[Any] = [AGAIN] * len(ops)
    asked = {type(op) for op in ops}
    for kind in [kind for kind in ORDER if kind in asked]:
        chosen = [i for i, op in enumerate(ops) if type(op) is kind]
        # In one order everywhere, so that no two batches wait for each other.
        chosen.sort(key=lambda i: rules.key_of(ops[i]).id)
        found = await _verb(link, kind, [ops[i] for i in chosen])
        for i, answer in zip(chosen, found, strict=True):
            answers[i] = answer
    return answers
