"""Deleting what every relay has published, a chunk at a time.

Rows go in the order of their positions, so that one mark says what is gone. Nothing goes that any
relay of any name has still to read, nor what lies in front of a topic that lags behind. A name
that has not taken all of its shards yet has read nothing of the others.

What a broker has refused is kept until people let go of it: nobody else has its payload.
"""

# The statements are put together from names in this file, nothing else.
# ruff: noqa: S608

from __future__ import annotations

from itertools import takewhile

from semel.errors import SettingsError
from semel.stores.sql.links import Link
from semel.stores.sql.outbox_cursor import SWEPT, UPDATE, make_mark, move_mark, swept, transaction
from semel.stores.sql.outbox_pages import BY_POSITION, POSITION

# Rows per transaction: few enough that nobody feels its locks.
CHUNK = 1000

# A hundred years: longer than that nobody means.
LONGEST_S = 100 * 366 * 86_400.0

# How many shards have a row, how many there are, and where the slowest of them, or lane, is.
LOWEST = "SELECT COUNT(*), MAX(shards), MIN(lowest) FROM event_outbox_cursor GROUP BY name"

# The marks of what is kept, one per position.
KEPT = "kept:"


def checked_keep(keep_s: float) -> int:
    """In microseconds."""
    if not 0 <= keep_s <= LONGEST_S:
        raise SettingsError(f"keep_s is a number of seconds from 0 on, not {keep_s}")
    return int(keep_s * 1_000_000)


async def floor(link: Link) -> int:
    """Up to here everybody has published everything; 0 where nobody has read anything yet."""
    rows = await link.fetch(LOWEST)
    return min((int(at) if int(there) == int(of) else 0 for there, of, at in rows), default=0)


async def keep(link: Link, position: int) -> None:
    """Have the event at this position never swept."""
    await make_mark(link, f"{KEPT}{position}", position)


async def sweep(link: Link, keep_us: int, size: int) -> tuple[int, bool]:
    """Delete so many: how many it were, and whether there may be more."""
    async with transaction(link):
        # Who gives a topic a lane that lies behind waits for us, or has done it before we look.
        gone = await swept(link, UPDATE[link.dialect.name])
        old = await _old_enough(link, gone, await floor(link), keep_us, size)
        if not old:
            return 0, False
        place = POSITION[link.dialect.name]
        kept = f"SELECT position FROM event_outbox_mark WHERE substr(id, 1, 5) = '{KEPT}'"
        delete = f"DELETE FROM event_outbox WHERE {place} > ? AND {place} <= ?"
        delete += f" AND {place} NOT IN ({kept})"
        deleted = await link.change(delete, [gone, old[-1]])
        await move_mark(link, SWEPT, old[-1])
        return deleted, len(old) == size


async def _old_enough(link: Link, after: int, upto: int, keep_us: int, size: int) -> list[int]:
    """Positions from the first row on, as far as all of them are old."""
    database = link.dialect.name
    place = POSITION[database]
    rows = await link.fetch(
        f"SELECT {place}, created_at <= {{later}} FROM event_outbox{BY_POSITION.get(database, '')} "
        f"WHERE {place} > ? AND {place} <= ? ORDER BY {place} LIMIT ?",
        [link.dialect.later_param(-keep_us), after, upto, size],
    )
    return [int(position) for position, old in takewhile(lambda row: row[1], rows)]
