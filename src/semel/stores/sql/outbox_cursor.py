"""How far the relays of one name are: a row per shard.

It has the position up to which everything is published, per topic the last message published, the
positions of topics that lag behind, and the fence of the owner who may say so. Owners write it all
the time, in one statement each, conditional on fence and number of shards: whoever was deposed, or
has not heard that the shards were divided anew, changes nothing.

The first shard's row stands for the name: it is made first, and says how many shards there are.

On PostgreSQL a row that is written all the time leaves its old versions behind while any
transaction is open that could see them, and looking it up by its key goes through all of them
(15,000 versions: 6 ms). So its owner remembers where the last version lies, and looks there first.
"""

# The statements are put together from names in this file, nothing else.
# ruff: noqa: S608

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from semel.errors import SettingsError
from semel.keys import identity
from semel.messages import Tail
from semel.stores.sql.links import Link, Rows
from semel.stores.sql.rows import original_name, stored_name
from semel.values import value


@value
class Cursor:
    """Where a shard is, and by whose fence.

    Everything up to `position` is published, except of the topics that lag behind: `lanes` has
    their own positions. `tails` has the last message published to each topic.
    """

    shard: int
    fence: int
    position: int
    tails: Mapping[str, Tail]
    lanes: Mapping[str, int]


@value
class Party:
    """The relays of one name, and how many shards they share."""

    name: str
    shards: int

    def id(self, shard: int) -> bytes:
        return identity("semel.outbox", self.name.encode(), b"%d" % shard)

    def column(self, link: Link) -> str:
        """Return the name as the table stores it, with escapes if its encoding needs them."""
        return stored_name(self.name, link.dialect.codec)


# --- transactions -------------------------------------------------------------------------------


@asynccontextmanager
async def transaction(link: Link) -> AsyncIterator[None]:
    """All or nothing; each statement sees what was committed before it."""
    begin = link.dialect.begin
    if link.dialect.name == "postgresql":
        begin += " ISOLATION LEVEL READ COMMITTED"
    await link.change(begin)
    try:
        yield
        await link.change("COMMIT")
    except Exception:
        await link.change("ROLLBACK")
        raise


UPDATE = {"postgresql": " FOR UPDATE", "mysql": " FOR UPDATE", "sqlite": ""}
SHARE = {"postgresql": " FOR SHARE", "mysql": " LOCK IN SHARE MODE", "sqlite": ""}
"""Behind a SELECT that locks. On SQLite whoever writes is alone."""

IGNORE = {
    "postgresql": "ON CONFLICT (id) DO NOTHING",
    "mysql": "ON DUPLICATE KEY UPDATE id = id",
    "sqlite": "ON CONFLICT (id) DO NOTHING",
}
"""Behind an INSERT of a row that may be there already."""


# --- marks --------------------------------------------------------------------------------------

SWEPT = "swept"


async def mark(link: Link, name: str, lock: str = "") -> int | None:
    rows = await link.fetch(f"SELECT position FROM event_outbox_mark WHERE id = ?{lock}", [name])
    return int(rows[0][0]) if rows else None


async def make_mark(link: Link, name: str, position: int) -> None:
    """Unless there is one."""
    insert = "INSERT INTO event_outbox_mark (id, position, updated_at) VALUES (?, ?, {now})"
    values = [name, position, *link.dialect.now_param()]
    await link.change(f"{insert} {IGNORE[link.dialect.name]}", values)


async def move_mark(link: Link, name: str, position: int) -> None:
    update = "UPDATE event_outbox_mark SET position = ?, updated_at = {now} WHERE id = ?"
    await link.change(update, [position, *link.dialect.now_param(), name])


async def swept(link: Link, lock: str | None = None) -> int:
    """Up to where rows may have been deleted. With a lock, the row is there afterwards."""
    position = await mark(link, SWEPT, lock or "")
    if position is None and lock is not None:
        await make_mark(link, SWEPT, 0)
        position = await mark(link, SWEPT, lock)
    return position or 0


# --- taking a shard -----------------------------------------------------------------------------

ROW = ("id", "name", "shard", "shards", "position", "lowest", "tails", "lanes")
INSERT = (
    f"INSERT INTO event_outbox_cursor ({', '.join(ROW)}, fence, updated_at) "
    f"VALUES ({', '.join('?' * len(ROW))}, 0, {{now}})"
)

RAISE = "UPDATE event_outbox_cursor SET fence = ?, updated_at = {now} WHERE id = ? AND fence <= ?"
SELECT = "SELECT position, tails, lanes FROM event_outbox_cursor WHERE id = ?"


async def take(link: Link, party: Party, shard: int, fence: int) -> Cursor | None:
    """Make the shard ours, unless somebody with a larger fence has it, and say where it is."""
    async with transaction(link):
        there = await _shards_of(link, party)
        if there != party.shards:
            raise _other_shards(party, there)
        await _make_row(link, party, shard)
        id = party.id(shard)
        if not await link.change(RAISE, [fence, *link.dialect.now_param(), id, fence]):
            return None
        [(position, tails, lanes)] = await link.fetch(SELECT, [id])
    return Cursor(shard, fence, int(position), read_tails(tails), json.loads(lanes))


async def _shards_of(link: Link, party: Party) -> int:
    """How many shards the name has: what whoever came first said. Others wait till we are done."""
    select = f"SELECT shards FROM event_outbox_cursor WHERE id = ?{UPDATE[link.dialect.name]}"
    rows = await link.fetch(select, [party.id(0)])
    if not rows:
        await _make_row(link, party, 0)
        rows = await link.fetch(select, [party.id(0)])
    return int(rows[0][0])


async def _make_row(link: Link, party: Party, shard: int) -> None:
    """Where there is none. It begins with the oldest event that nobody has deleted."""
    if not await link.fetch(SELECT, [party.id(shard)]):
        await insert_row(link, party, shard, await swept(link, SHARE[link.dialect.name]))


async def insert_row(link: Link, party: Party, shard: int, position: int) -> None:
    named = [party.id(shard), party.column(link), shard, party.shards]
    values = [*named, position, position, "{}", "{}", *link.dialect.now_param()]
    await link.change(f"{INSERT} {IGNORE[link.dialect.name]}", values)


def _other_shards(party: Party, there: int) -> SettingsError:
    return SettingsError(
        f"the relays {party.name!r} have {there} shards, and this one was told {party.shards}; "
        f"give it {there}, or stop all of them and run `semel outbox reshard URL --name "
        f"{party.name} --shards {party.shards}`"
    )


def read_tails(text: str) -> Mapping[str, Tail]:
    return {topic: Tail(position, id) for topic, (position, id) in json.loads(text).items()}


def _written(cursor: Cursor) -> tuple[int, int, str, str]:
    """Its position, the lowest of all its positions, its tails and its lanes."""
    tails = {topic: (tail.position, tail.id) for topic, tail in cursor.tails.items()}
    lowest = min(cursor.position, *cursor.lanes.values()) if cursor.lanes else cursor.position
    return cursor.position, lowest, _dumped(tails), _dumped(cursor.lanes)


# In ASCII, which every encoding of a database has.
_dumped = json.JSONEncoder(separators=(",", ":")).encode


async def relays(link: Link) -> dict[str, int]:
    """The names there are, and how many shards each has."""
    rows = await link.fetch("SELECT name, MAX(shards) FROM event_outbox_cursor GROUP BY name")
    codec = link.dialect.codec
    return {original_name(name, codec): int(shards) for name, shards in sorted(rows)}


# --- going on -----------------------------------------------------------------------------------


def moved(
    cursor: Cursor, position: int, tails: Mapping[str, Tail], lanes: Mapping[str, int | None]
) -> Cursor:
    """The cursor with what has changed; a lane that is None is gone."""
    if position < cursor.position:
        raise ValueError("a shard's position never goes back; give the topic a lane of its own")
    all_lanes = {**cursor.lanes, **lanes}
    all_tails = {**cursor.tails, **tails}
    return replace(
        cursor,
        position=position,
        tails={topic: tail for topic, tail in all_tails.items() if tail.position},
        lanes={topic: at for topic, at in all_lanes.items() if at is not None},
    )


@value
class Owned:
    """The condition that a shard, in the cursor's row `c`, is ours."""

    where: str
    values: Sequence[Any]


def owned(link: Link, party: Party, cursor: Cursor, there: str = "") -> Owned:
    """`there`: where PostgreSQL has the row, if nobody has written it since we did."""
    values = [party.id(cursor.shard), cursor.fence, party.shards]
    if link.dialect.name != "postgresql":
        return Owned("c.id = ? AND c.fence = ? AND c.shards = ?", values)
    where = "c.id = ?::bytea AND c.fence = ?::int8 AND c.shards = ?::int8"
    return (
        Owned(f"c.ctid = ?::text::tid AND {where}", [there, *values])
        if there
        else Owned(where, values)
    )


MOVE = (
    "UPDATE event_outbox_cursor SET position = ?, lowest = ?, tails = ?, lanes = ?, "
    "updated_at = {now} WHERE id = ? AND fence = ? AND shards = ?"
)

# A lane may begin before what was swept a moment ago. The sweep has this row for itself while it
# looks at the lanes and deletes, so either it sees the lane, or the lane's owner sees the mark.
HOLD_SWEEPS = f"SELECT position FROM event_outbox_mark WHERE id = '{SWEPT}'"


async def write(link: Link, party: Party, cursor: Cursor, *, back: bool) -> bool:
    """Write it all; False, and nothing, when the shard is not ours any more.

    `back`: a lane lies before where the shard was.
    """
    ours = owned(link, party, cursor)
    values = [*_written(cursor), *link.dialect.now_param(), *ours.values]
    if not back:
        return bool(await link.change(MOVE, values))
    async with transaction(link):
        await link.fetch(HOLD_SWEEPS + SHARE[link.dialect.name])
        return bool(await link.change(MOVE, values))


# --- going on, PostgreSQL -----------------------------------------------------------------------

# Nothing is lost when a crash forgets it: what is published again is known to be there. So nobody
# waits for the disk.
MOVE_POSTGRES = (
    "UPDATE event_outbox_cursor AS c SET position = ?::int8, lowest = ?::int8, tails = ?::text, "
    "lanes = ?::text, updated_at = clock_timestamp() WHERE {owned} "
    "RETURNING c.ctid::text, set_config('synchronous_commit', 'off', true)"
)
HOLDING_SWEEPS = f"WITH held AS ({HOLD_SWEEPS} FOR SHARE) "
HELD = " AND (SELECT count(*) FROM held) >= 0"


async def write_postgres(
    link: Link, party: Party, cursor: Cursor, there: str, *, back: bool
) -> str | None:
    """The same; where the row lies then, or None."""
    rows = await _move(link, cursor, owned(link, party, cursor, there), back=back)
    if not rows and there:
        rows = await _move(link, cursor, owned(link, party, cursor), back=back)
    return rows[0][0] if rows else None


async def _move(link: Link, cursor: Cursor, ours: Owned, *, back: bool) -> Rows:
    statement = MOVE_POSTGRES.replace("{owned}", ours.where + HELD if back else ours.where)
    statement = HOLDING_SWEEPS + statement if back else statement
    return await link.ask(statement, [*_written(cursor), *ours.values])


async def is_there(link: Link, ours: Owned) -> bool:
    select = f"SELECT 1 FROM event_outbox_cursor AS c WHERE {ours.where}"
    return bool(await link.ask(select, ours.values))
