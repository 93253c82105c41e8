"""Dividing an outbox among another number of shards, without losing or turning round anything.

A slot that goes to another shard leaves its messages behind in the old shard's streams, so nothing
may be under way: all shards must have published everything up to one position, and go on from
there. First every fence is raised, so that whoever is still at work reads no further page; only
then is looked how far the outbox is, which is as far as any page may reach that was read before.

Killed after the first step, the relays take their shards anew and nothing has changed.
"""

# The statements are put together from names in this file, nothing else.
# ruff: noqa: S608

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence

from semel.errors import SettingsError
from semel.messages import slots_of
from semel.stores.sql.links import Link
from semel.stores.sql.outbox_cursor import UPDATE, Party, insert_row, transaction
from semel.stores.sql.outbox_pages import BY_POSITION, POSITION, SLOT
from semel.stores.sql.rows import stored_name
from semel.values import value

STEP_BACK = "UPDATE event_outbox_cursor SET fence = fence + 1 WHERE name = ?"
SELECT = "SELECT shard, shards, position, lanes, fence FROM event_outbox_cursor WHERE name = ?"


@value
class _Found:
    """Where the relays of a name are: how many shards, and each one's position and fence."""

    shards: int
    positions: Mapping[int, int]
    fences: Mapping[int, int]
    lagging: Sequence[str]


async def reshard(
    link: Link, name: str, shards: int, news: Callable[[Link], Awaitable[int]]
) -> None:
    await link.change(STEP_BACK, [stored_name(name, link.dialect.codec)])
    before = await _found(link, name)
    if before is None or before.shards == shards:
        return
    upto = await news(link)
    async with transaction(link):
        found = await _found(link, name, UPDATE[link.dialect.name])
        if found is None or found.fences != before.fences:
            raise refused(name, "a relay has just taken a shard: stop all relays of the name")
        await _refuse_unpublished(link, Party(name, found.shards), found, upto)
        await _divide(link, Party(name, shards), found, upto)


async def _found(link: Link, name: str, lock: str = "") -> _Found | None:
    rows = await link.fetch(SELECT + lock, [stored_name(name, link.dialect.codec)])
    if not rows:
        return None
    return _Found(
        shards=int(rows[0][1]),
        positions={int(shard): int(position) for shard, _, position, _, _ in rows},
        fences={int(shard): int(fence) for shard, _, _, _, fence in rows},
        lagging=sorted({topic for row in rows for topic in json.loads(row[3])}),
    )


async def _refuse_unpublished(link: Link, party: Party, found: _Found, upto: int) -> None:
    if found.lagging:
        topics = ", ".join(found.lagging)
        raise refused(party.name, f"{topics} lags behind: let the relays catch up, then stop them")
    if max(found.positions.values()) > upto:
        raise refused(party.name, "a transaction is just writing events: stop all relays")
    for shard in range(party.shards):
        if await _waits(link, party, shard, found.positions.get(shard, 0), upto):
            raise refused(
                party.name,
                f"shard {shard} has not published everything: let the relays catch up, then stop "
                "them",
            )


async def _waits(link: Link, party: Party, shard: int, after: int, upto: int) -> bool:
    database = link.dialect.name
    place = POSITION[database]
    rows = await link.fetch(
        f"SELECT 1 FROM event_outbox{BY_POSITION.get(database, '')} "
        f"WHERE {place} > ? AND {place} <= ? AND {SLOT[database]} BETWEEN ? AND ? LIMIT 1",
        [after, upto, *slots_of(shard, party.shards)],
    )
    return bool(rows)


def refused(name: str, why: str) -> SettingsError:
    return SettingsError(
        f"the outbox cannot be divided anew among the relays {name!r} now: {why}, and repeat. "
        "Nothing was changed"
    )


async def _divide(link: Link, party: Party, found: _Found, upto: int) -> None:
    """All go on from one position: behind every message that is in any shard's streams."""
    drop = "DELETE FROM event_outbox_cursor WHERE name = ? AND shard >= ?"
    await link.change(drop, [party.column(link), party.shards])
    change = "UPDATE event_outbox_cursor SET shards = ?, position = ?, lowest = ? WHERE name = ?"
    await link.change(change, [party.shards, upto, upto, party.column(link)])
    for shard in range(party.shards):
        if shard not in found.positions:
            await insert_row(link, party, shard, upto)
