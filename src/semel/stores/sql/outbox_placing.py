"""Positions on MariaDB and MySQL, where ids become visible in any order and no lock tells of it.

Rows are written without a position. A reader gives one to those that it can see, which are
committed, in the order of their ids, behind all that were given before. So positions become
visible in their order and without gaps, and a reader may go as far as the last one.

Within one aggregate the order of ids is the order of commits: the counter's row is locked from
before the id is taken to the end of the transaction. So its events get positions in the order of
their numbers.

Whoever looks does it, for all shards and all relays, one at a time: the mark's row is locked
meanwhile, and whoever finds it locked goes by what is there. It needs no fence, because it does
not matter who does it.

The easy mistake is to look for rows without a position in a statement that locks: it waits for
transactions that have not ended, and one slow writer would hold up everybody. So they are looked
for without a lock, and then changed one by one, by their ids.

While somebody's snapshot stays open (a dump, a long report), InnoDB cannot forget that the rows
had no position once, and looking for more goes through all of them: 35 ms behind 200,000 rows.
"""

from __future__ import annotations

import json

from semel.errors import StoreUnavailableError
from semel.stores.sql.links import Link
from semel.stores.sql.outbox_cursor import make_mark, mark, move_mark, transaction

PLACED = "placed"

# Rows that get their position in one transaction.
ROWS = 2000

LOOK = (
    "SELECT (SELECT m.position FROM event_outbox_mark AS m WHERE m.id = ?), "
    "EXISTS (SELECT 1 FROM event_outbox WHERE position IS NULL)"
)

# The highest that was ever given, should somebody have deleted the mark.
HIGHEST = (
    "SELECT GREATEST(COALESCE((SELECT MAX(position) FROM event_outbox), 0), "
    "COALESCE((SELECT MAX(position) FROM event_outbox_cursor), 0), "
    "COALESCE((SELECT MAX(position) FROM event_outbox_mark), 0))"
)

WITHOUT = "SELECT id FROM event_outbox WHERE position IS NULL ORDER BY id LIMIT ?"

PLACE = (
    "UPDATE JSON_TABLE(?, '$[*]' COLUMNS (n FOR ORDINALITY, id BIGINT PATH '$')) AS u "
    "STRAIGHT_JOIN event_outbox AS o FORCE INDEX (PRIMARY) ON o.id = u.id "
    "SET o.position = ? + u.n WHERE o.position IS NULL"
)


async def place(link: Link) -> int:
    """Give a position to what is committed and has none; the last position that was given."""
    [(last, waiting)] = await link.fetch(LOOK, [PLACED])
    if last is None:
        [(highest,)] = await link.fetch(HIGHEST)
        await make_mark(link, PLACED, int(highest))
        last = highest
    return await _place(link, int(last)) if waiting else int(last)


async def _place(link: Link, seen: int) -> int:
    async with transaction(link):
        last = await mark(link, PLACED, " FOR UPDATE SKIP LOCKED")
        if last is None:
            return seen
        ids = [int(id) for (id,) in await link.fetch(WITHOUT, [ROWS])]
        if not ids:
            return last
        placed = await link.change(PLACE, [json.dumps(ids), last])
        if placed != len(ids):
            raise StoreUnavailableError(
                f"{len(ids) - placed} events of the outbox were deleted, or given a position, by "
                "somebody else meanwhile; repeat"
            )
        await move_mark(link, PLACED, last + len(ids))
        return last + len(ids)
