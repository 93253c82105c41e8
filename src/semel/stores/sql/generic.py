"""Read, decide, write if unchanged: the ledger on any database.

Each operation reads its row without a lock, together with the store's clock, lets `rules` decide,
and writes the new row only where the old one still stands (attempt, fence, state and lease
unchanged). Whoever finds it changed reads again. So nobody waits for a row lock to learn that
something is running or done, and a replay writes nothing.

A batch is the same with many rows: one read, the rules in order over the rows in memory, one
transaction of writes in the order of the ids, all or nothing. A row that somebody's transaction
has locked (a bound `complete` that is not committed) is left out, and only who asked for it has to
ask again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from semel.errors import CorruptRecordError
from semel.stores import rules
from semel.stores.rules import Noting, Operation, Row, key_of
from semel.stores.sql import limits
from semel.stores.sql.dialects import Dialect
from semel.stores.sql.faults import Fault, fault_of
from semel.stores.sql.links import Link
from semel.stores.sql.rows import COLUMNS, row_of, stored_text, values_of

AGAIN: Any = object()
"""Instead of an answer: the row was changed meanwhile, or is locked; ask again."""

# A batch that lost its race this often is handed back, to be asked again by its callers.
TURNS = 4

# A new row is a claim: it has no outcome, no steps and no past yet.
LATER = ["response", "body", "outcome", "steps", "past", "error", "completed_at"]
NEW = tuple(c for c in COLUMNS if c not in LATER)
NEW_AT = tuple(COLUMNS.index(c) for c in NEW)
UNCHANGED = "id = ? AND attempt = ? AND fence = ? AND state = ? AND lease_until = ?"
STEPS_AT = COLUMNS.index("steps")
DELETE = f"DELETE FROM idempotency WHERE {UNCHANGED}"  # noqa: S608


def _updating(columns: Sequence[str]) -> str:
    sets = ", ".join(f"{c} = {{json}}" if c == "response" else f"{c} = ?" for c in columns)
    return f"UPDATE idempotency SET {sets} WHERE {UNCHANGED}"  # noqa: S608


UPDATE = _updating(COLUMNS[1:])
# Steps can nearly fill a packet: beside them there may be no room for a result or an error.
UPDATE_BUT_STEPS = _updating([c for c in COLUMNS[1:] if c != "steps"])


# --- reading ------------------------------------------------------------------------------------


def reading(link: Link, where: str) -> str:
    """Select the clock, and the rows if there are any: always at least one line."""
    columns = ", ".join(link.dialect.response if c == "response" else c for c in COLUMNS)
    return (
        f"SELECT {{now}}, {columns} FROM (SELECT 1 AS one) AS here "  # noqa: S608
        f"LEFT JOIN idempotency ON {where}"
    )


async def read(link: Link, ids: Sequence[bytes]) -> tuple[int, dict[bytes, Row | Exception]]:
    """The store's time, and the rows with these ids; an error where one cannot be read."""
    where = "id = ?" if len(ids) == 1 else f"id IN ({', '.join('?' * len(ids))})"
    lines = await link.fetch(reading(link, where), (*link.dialect.now_param(), *ids))
    return link.dialect.micros(lines[0][0]), rows_in(link, lines)


def rows_in(link: Link, lines: Sequence[Any]) -> dict[bytes, Row | Exception]:
    found: dict[bytes, Row | Exception] = {}
    for line in lines:
        if line[1] is not None:
            found[bytes(line[1])] = _row_or_error(line[1:], link)
    return found


def _row_or_error(values: Sequence[Any], link: Link) -> Row | Exception:
    try:
        return row_of(values, link.dialect)
    except CorruptRecordError as error:
        return error


async def read_one(link: Link, id: bytes) -> tuple[int, Row | None]:
    now_us, found = await read(link, [id])
    row = found.get(id)
    if isinstance(row, Exception):
        raise row
    return now_us, row


# --- writing ------------------------------------------------------------------------------------


def unchanged(row: Row, link: Link) -> list[Any]:
    """The values of `UNCHANGED`."""
    stamp = link.dialect.stamp(row.lease_us)
    return [row.key.id, stored_text(row.attempt, link.dialect.codec), row.fence, row.state, stamp]


async def insert(link: Link, rows: Sequence[Row]) -> bool:
    """Insert all of them; False, and nothing inserted, when one is there already."""
    groups = ", ".join([f"({', '.join('?' * len(NEW))})"] * len(rows))
    statement = f"INSERT INTO idempotency ({', '.join(NEW)}) VALUES {groups}"  # noqa: S608
    values = [line[i] for row in rows for line in (values_of(row, link.dialect),) for i in NEW_AT]
    try:
        await link.change(statement, values)
    except Exception as error:
        if fault_of(error) is Fault.TAKEN:
            return False
        raise
    return True


async def update(link: Link, before: Row, after: Row) -> bool:
    """Write the row if it is still as it was."""
    statement, values = UPDATE, values_of(after, link.dialect)
    if after.steps == before.steps:
        statement = UPDATE_BUT_STEPS
        del values[STEPS_AT]
    params = [*values[1:], *unchanged(before, link)]
    return await link.change(link.dialect.at_once + statement, params) == 1


async def delete(link: Link, row: Row) -> bool:
    return await link.change(DELETE, unchanged(row, link)) == 1


@asynccontextmanager
async def transaction(link: Link) -> AsyncIterator[None]:
    """All or nothing. After an error on COMMIT nobody knows which; the caller reads again."""
    await link.change(link.dialect.begin)
    try:
        yield
        await link.change("COMMIT")
    except Exception:
        await link.change("ROLLBACK")
        raise


class Race(Exception):  # noqa: N818 - says what happened, and never leaves this module
    """A row was not as it was read."""


async def lock(link: Link, ids: Sequence[bytes]) -> set[bytes]:
    """Lock these rows, inside a transaction; without those that are gone or locked by others."""
    if not link.dialect.locks_rows:
        return set(ids)
    marks = ", ".join("?" * len(ids))
    # By the index even where the table is small: a scan would lock what nobody asked for.
    statement = (
        "SELECT id FROM idempotency FORCE INDEX (PRIMARY) "  # noqa: S608
        f"WHERE id IN ({marks}) FOR UPDATE SKIP LOCKED"
    )
    return {bytes(id) for (id,) in await link.fetch(statement, sorted(ids))}


async def write(link: Link, before: dict[bytes, Row], after: dict[bytes, Row]) -> set[bytes] | None:
    """Write all changed rows but those that are locked, which are returned; None: a lost race."""
    new = [after[id] for id in sorted(after) if id not in before]
    old = [(before[id], after[id]) for id in sorted(after) if id in before]
    if not old:
        return set() if not new or await insert(link, new) else None
    if not new and len(old) == 1:
        return await _write_one(link, *old[0])
    try:
        async with transaction(link):
            return await _write_all(link, new, old)
    except Race:
        return None


async def _write_one(link: Link, before: Row, after: Row) -> set[bytes] | None:
    try:
        return set() if await update(link, before, after) else None
    except Exception as error:
        if fault_of(error) is Fault.LOCKED:
            return {before.key.id}
        raise


async def _write_all(link: Link, new: Sequence[Row], old: Sequence[tuple[Row, Row]]) -> set[bytes]:
    if new and not await insert(link, new):
        raise Race
    free = await lock(link, [before.key.id for before, _ in old])
    for before, after in old:
        if before.key.id in free and not await update(link, before, after):
            raise Race
    return {before.key.id for before, _ in old} - free


# --- operations ---------------------------------------------------------------------------------


async def perform(link: Link, ops: Sequence[Operation]) -> list[Any]:
    """The answers, in order; `AGAIN` for those that met somebody else too often."""
    ids = sorted({key_of(op).id for op in ops})
    most = await limits.packet(link)
    for _ in range(TURNS):
        now_us, found = await read(link, ids)
        answers, after = decide(ops, found, now_us, link.dialect, most)
        before = {id: row for id, row in found.items() if isinstance(row, Row)}
        locked = await write(link, before, after)
        if locked is not None:
            return [
                AGAIN if key_of(op).id in locked else answer
                for op, answer in zip(ops, answers, strict=True)
            ]
    return [AGAIN] * len(ops)


def decide(
    ops: Sequence[Operation],
    found: dict[bytes, Row | Exception],
    now_us: int,
    dialect: Dialect,
    most: int | None,
) -> tuple[list[Any], dict[bytes, Row]]:
    """What each operation is answered, one after another, and the rows to write.

    A step whose row does not fit into `most` bytes is refused, and its row is not written.
    """
    answers: list[Any] = []
    after: dict[bytes, Row] = {}
    for op in ops:
        id = key_of(op).id
        row = after.get(id) or found.get(id)
        if isinstance(row, Exception):
            answers.append(row)
            continue
        answer, changed = rules.apply(row, op, now_us)
        refused = None
        if most is not None and changed is not None and isinstance(op, Noting):
            refused = limits.refusal(op, values_of(changed, dialect), most)
        answers.append(refused or answer)
        if changed is not None and refused is None:
            after[id] = changed
    return answers, after
