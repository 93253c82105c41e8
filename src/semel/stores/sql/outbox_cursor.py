"""How far the relays of one name are: a row per shard, and one per topic that a shard published.

The shard's own row (its topic is empty) has the position up to which everything is published, and
the fence of the owner who may say so. A topic's row has the last message that was published to it
and, where the topic lags behind its shard, a position of its own.

Every change is conditional on fence and number of shards in the shard's own row. So whoever was
deposed, or has not heard that the shards were divided anew, changes nothing.

The first shard's row stands for the name: it is made first, and says how many shards there are.
"""

# The statements are put together from names in this file, nothing else.
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from semel.errors import SettingsError
from semel.keys import identity
from semel.messages import Tail
from semel.stores.sql.asking import dense
from semel.stores.sql.links import Link
from semel.stores.sql.rows import NOTHING, SEPARATOR
from semel.values import value

# The shard's own row, and lane: no topic has an empty name.
OWN = ""


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

    def id(self, shard: int, topic: str = OWN) -> bytes:
        return identity("semel.outbox", self.name.encode(), b"%d" % shard, topic.encode())


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

ROW = ("id", "name", "shard", "shards", "topic", "position", "tail_position", "tail_event_id")
INSERT = f"INSERT INTO event_outbox_cursor ({', '.join(ROW)}, fence, updated_at)"

RAISE = "UPDATE event_outbox_cursor SET fence = ?, updated_at = {now} WHERE id = ? AND fence <= ?"


async def take(link: Link, party: Party, shard: int, fence: int) -> Cursor | None:
    """Make the shard ours, unless somebody with a larger fence has it, and say where it is."""
    async with transaction(link):
        there = await _shards_of(link, party)
        if there != party.shards:
            raise _other_shards(party, there)
        await _make_row(link, party, shard)
        values = [fence, *link.dialect.now_param(), party.id(shard), fence]
        if not await link.change(RAISE, values):
            return None
        return await _cursor(link, party, shard, fence)


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
    select = "SELECT 1 FROM event_outbox_cursor WHERE id = ?"
    if not await link.fetch(select, [party.id(shard)]):
        await insert_row(link, party, shard, await swept(link, SHARE[link.dialect.name]))


async def insert_row(link: Link, party: Party, shard: int, position: int) -> None:
    named = [party.id(shard), party.name, shard, party.shards, OWN]
    marks = ", ".join("?" * len(ROW))
    await link.change(
        f"{INSERT} VALUES ({marks}, 0, {{now}}) {IGNORE[link.dialect.name]}",
        [*named, position, 0, "", *link.dialect.now_param()],
    )


def _other_shards(party: Party, there: int) -> SettingsError:
    return SettingsError(
        f"the relays {party.name!r} have {there} shards, and this one was told {party.shards}; "
        f"give it {there}, or stop all of them and run `semel outbox reshard URL --name "
        f"{party.name} --shards {party.shards}`"
    )


async def relays(link: Link) -> dict[str, int]:
    """The names there are, and how many shards each has."""
    rows = await link.fetch("SELECT name, MAX(shards) FROM event_outbox_cursor GROUP BY name")
    return {name: int(shards) for name, shards in sorted(rows)}


# Few rows, and read only when a shard changes hands: no index is worth writing.
SELECT = "SELECT topic, position, tail_position, tail_event_id FROM event_outbox_cursor"


async def _cursor(link: Link, party: Party, shard: int, fence: int) -> Cursor:
    rows = await link.fetch(f"{SELECT} WHERE name = ? AND shard = ?", [party.name, shard])
    at = {topic: position for topic, position, *_ in rows}
    tails = {topic: Tail(int(position), id) for topic, _, position, id in rows}
    return Cursor(
        shard=shard,
        fence=fence,
        position=int(at.pop(OWN)),
        tails={topic: tail for topic, tail in tails.items() if tail.position},
        lanes={topic: int(position) for topic, position in at.items() if position is not None},
    )


# --- going on -----------------------------------------------------------------------------------

Told = tuple[str, int | None, Tail]
"""A topic's row: the topic, the position of its lane if it has one, and its tail."""


async def advance(
    link: Link,
    party: Party,
    cursor: Cursor,
    position: int,
    tails: Mapping[str, Tail],
    lanes: Mapping[str, int | None],
) -> Cursor | None:
    """Write it all, or nothing when the shard is not ours any more."""
    after = _moved(cursor, position, tails, lanes)
    topics = sorted({*tails, *lanes})
    told = [(t, after.lanes.get(t), after.tails.get(t, Tail())) for t in topics]
    told = [one for one in told if one != _as_told(cursor, one[0])]
    back = any(lane is not None for lane in lanes.values())
    work = _advance_postgres if link.dialect.name == "postgresql" else _advance_plain
    return after if await work(link, party, after, told, back) else None


def _moved(
    cursor: Cursor, position: int, tails: Mapping[str, Tail], lanes: Mapping[str, int | None]
) -> Cursor:
    if position < cursor.position:
        raise ValueError("a shard's position never goes back; give the topic a lane of its own")
    all_lanes = {**cursor.lanes, **lanes}
    return replace(
        cursor,
        position=position,
        tails={**cursor.tails, **tails},
        lanes={topic: at for topic, at in all_lanes.items() if at is not None},
    )


def _as_told(cursor: Cursor, topic: str) -> Told:
    return topic, cursor.lanes.get(topic), cursor.tails.get(topic, Tail())


# A lane may begin before what was swept a moment ago. The sweep has this row for itself while it
# looks at the lanes and deletes, so either it sees the lane, or the lane's owner sees the mark.
BEFORE_THE_SWEEP = f"SELECT position FROM event_outbox_mark WHERE id = '{SWEPT}'"

_COLUMNS = ("id", "topic", "position", "tail_position", "tail_event_id")
_GIVEN = ", ".join("string_to_array(?::text, chr(31), chr(30))" for _ in _COLUMNS)

# Nothing is lost when a crash forgets it: what is published again is known to be there. So nobody
# waits for the disk. An empty text is an array without an element.
ADVANCE = dense(f"""
    WITH own AS (
        UPDATE event_outbox_cursor SET position = ?::int8, updated_at = clock_timestamp()
        WHERE id = ?::bytea AND fence = ?::int8 AND shards = ?::int8
        RETURNING name, shard, shards
    ), told AS (
        INSERT INTO event_outbox_cursor AS c ({", ".join(ROW)}, fence, updated_at)
        SELECT decode(u.id, 'hex'), own.name, own.shard, own.shards, u.topic, u.position::int8,
            u.tail_position::int8, COALESCE(u.tail_event_id, ''), 0, clock_timestamp()
        FROM own, unnest({_GIVEN}) AS u ({", ".join(_COLUMNS)})
        ON CONFLICT (id) DO UPDATE SET position = excluded.position,
            tail_position = excluded.tail_position, tail_event_id = excluded.tail_event_id,
            updated_at = excluded.updated_at
    )
    SELECT count(*), set_config('synchronous_commit', 'off', true) FROM own""")

ADVANCE_BACK = (
    ADVANCE.replace("WITH own", f"WITH swept AS ({BEFORE_THE_SWEEP} FOR SHARE), own", 1)
    + ", (SELECT count(*) AS n FROM swept) AS s"
)


async def _advance_postgres(
    link: Link, party: Party, after: Cursor, told: Sequence[Told], back: bool
) -> bool:
    rows = [
        (party.id(after.shard, topic).hex(), topic, lane, tail.position, tail.id)
        for topic, lane, tail in told
    ]
    own = [after.position, party.id(after.shard), after.fence, party.shards]
    statement = ADVANCE_BACK if back else ADVANCE
    [(done, *_)] = await link.ask(statement, [*own, *_as_columns(rows)])
    return bool(done)


def _as_columns(rows: Sequence[Sequence[Any]]) -> list[str]:
    columns = zip(*rows, strict=True) if rows else [()] * len(_COLUMNS)
    return [SEPARATOR.join([NOTHING if v is None else str(v) for v in c]) for c in columns]


MOVE = (
    "UPDATE event_outbox_cursor SET position = ?, updated_at = {now} "
    "WHERE id = ? AND fence = ? AND shards = ?"
)

_KEPT = ("position", "tail_position", "tail_event_id", "updated_at")
UPSERT = {
    "mysql": "ON DUPLICATE KEY UPDATE " + ", ".join(f"{c} = VALUES({c})" for c in _KEPT),
    "sqlite": "ON CONFLICT (id) DO UPDATE SET " + ", ".join(f"{c} = excluded.{c}" for c in _KEPT),
}


async def _advance_plain(
    link: Link, party: Party, after: Cursor, told: Sequence[Told], back: bool
) -> bool:
    now = link.dialect.now_param()
    name = link.dialect.name
    async with transaction(link):
        own = [after.position, *now, party.id(after.shard), after.fence, party.shards]
        if not await link.change(MOVE, own):
            return False
        if back:
            await link.fetch(BEFORE_THE_SWEEP + SHARE[name])
        if told:
            marks = ", ".join([f"({', '.join('?' * len(ROW))}, 0, {{now}})"] * len(told))
            rows = [v for one in told for v in (*_row(party, after.shard, one), *now)]
            await link.change(f"{INSERT} VALUES {marks} {UPSERT[name]}", rows)
    return True


def _row(party: Party, shard: int, told: Told) -> Sequence[Any]:
    topic, lane, tail = told
    named = (party.id(shard, topic), party.name, shard, party.shards, topic)
    return (*named, lane, tail.position, tail.id)
