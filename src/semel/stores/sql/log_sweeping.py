"""Deleting what nobody can read any more: of streams that are over everything, of streams that are
gone entries and state.

An append writes down when its stream is due, and moves that forwards only: `due_at` may be earlier
than the end. So who sweeps looks again, and writes down the later time.

What a sweep has taken something of stays as it is now, gone or over, even if the clock goes back:
hence its time becomes one that has passed by any clock.
"""

# The statements are put together from names in this file and `log_words`, nothing else.
# ruff: noqa: S608

from __future__ import annotations

import logging
from typing import TypeAlias

from semel.stores.sql import log_words as words
from semel.stores.sql.links import Link, Rows, Said, roll_back

log = logging.getLogger("semel")

# Streams that one transaction of a sweep looks at. One with a longer past than `SWEEP_ENTRIES` is
# deleted in pieces of that: a statement that takes minutes is given up by whoever waits for it, and
# would begin again for ever.
SWEEP_CHUNK = 100
SWEEP_ENTRIES = 5000

# The clock in a subquery, so that the index is asked for it: see `inspection.POSTGRES_SWEEP`.
DUE = (
    "SELECT id, head, gone_at, until_at, {now} FROM semel_stream "
    "WHERE due_at <= (SELECT {now}) ORDER BY due_at LIMIT ?"
)
NEXT = "SELECT position FROM {} WHERE stream = ? ORDER BY position LIMIT 1 OFFSET ?"
LATER = "UPDATE semel_stream SET due_at = COALESCE(gone_at, until_at) WHERE id {}"
_PAST = "'1970-01-01 00:00:00.000000'"
OVER = f"UPDATE semel_stream SET until_at = {_PAST} WHERE id {{}}"
GONE = f"UPDATE semel_stream SET gone_at = {_PAST} WHERE id {{}}"
EMPTIED = (
    f"UPDATE semel_stream SET gone_at = {_PAST}, state = NULL, due_at = until_at WHERE id {{}}"
)


async def sweep(link: Link, size: int) -> tuple[int, bool]:
    """How many streams were deleted, of at most `size` that were due, and may there be more?"""
    dialect = link.dialect
    skip = "" if dialect.name == "sqlite" else " FOR UPDATE SKIP LOCKED"
    now = dialect.now_param()
    try:
        for statement, params in words.begun(dialect):
            await link.fetch(statement, params)
        due = await link.fetch(DUE + skip, (*now, *now, size))
        deleted, finished = await _swept(link, due)
        await link.fetch("COMMIT")
    except Exception:
        await roll_back(link)
        raise
    return deleted, len(due) == size or not finished


async def sweep_behind(link: Link, size: int) -> None:
    """Behind an append, which stands whatever becomes of this."""
    try:
        await sweep(link, size)
    except Exception as error:  # noqa: BLE001 - the next one sweeps
        log.info("semel: old streams were not swept: %s", error)


async def _swept(link: Link, due: Rows) -> tuple[int, bool]:
    """An append moves a stream's end and says so later, so some that are due are not, by now."""
    dialect, (over, gone, later) = link.dialect, _sorted_out(due)
    deleted = [id for id, head in over if head <= SWEEP_ENTRIES or await _emptied(link, id, 2)]
    emptied = [id for id, head in gone if head <= SWEEP_ENTRIES or await _emptied(link, id, 1)]
    said: list[Said] = []
    if deleted:
        said += words.wiped(dialect, deleted)
        said.append(words.deleted(dialect, "semel_stream", "id", deleted))
    if emptied:
        said += [words.deleted(dialect, t, "stream", emptied) for t in ("semel_log", "semel_field")]
    for statement, ids in (
        (OVER, [id for id, _ in over if id not in deleted]),
        (GONE, [id for id, _ in gone if id not in emptied]),
        (EMPTIED, emptied),
        (LATER, later),
    ):
        if ids:
            are, given = words.among(dialect, ids)
            said.append((statement.format(are), given))
    if said:
        await link.together(said)
    return len(deleted), len(deleted) + len(emptied) == len(over) + len(gone)


Sized: TypeAlias = list[tuple[bytes, int]]


def _sorted_out(due: Rows) -> tuple[Sized, Sized, list[bytes]]:
    """Those of which nothing is left, those without entries and state, and the others."""
    over: Sized = []
    gone: Sized = []
    later: list[bytes] = []
    for id, head, gone_at, until_at, now in due:
        if until_at is not None and until_at <= now:
            over.append((bytes(id), int(head)))
        elif gone_at is not None and gone_at <= now:
            gone.append((bytes(id), int(head)))
        else:
            later.append(bytes(id))
    return over, gone, later


async def _emptied(link: Link, stream: bytes, tables: int) -> bool:
    """Delete as much of these tables as one transaction may; is that all?"""
    whole = True
    for table in words.BELONGINGS[:tables]:
        found = await link.fetch(NEXT.format(table), (stream, SWEEP_ENTRIES - 1))
        if found:
            whole = False
            delete = f"DELETE FROM {table} WHERE stream = ? AND position <= ?"
            await link.change(delete, (stream, found[0][0]))
    return whole
