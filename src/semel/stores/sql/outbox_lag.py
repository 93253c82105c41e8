"""How far behind the relays of one name are, and who keeps them from going on."""

# The statements are put together from names in this file, nothing else.
# ruff: noqa: S608

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from semel.errors import SettingsError
from semel.messages import slots_of
from semel.stores.sql.faults import Fault, fault_of
from semel.stores.sql.links import Link
from semel.stores.sql.outbox_cursor import Party, swept
from semel.stores.sql.outbox_pages import BY_POSITION, POSITION, SLOT
from semel.stores.sql.outbox_watermark import HELD, PLACE
from semel.stores.sql.rows import stored_name
from semel.values import value

COUNTED = 10_000
"""Nobody needs to know more exactly how many it are, and counting takes time."""


@value
class Holder:
    """A transaction that is open, by the number that ends it (pg_terminate_backend, KILL)."""

    pid: int
    state: str
    open_s: float
    query: str


@value
class Lag:
    """How far behind relays are, by the database's clock.

    `unpublished` is counted up to 10,001, which means more than 10,000; `age_s` is the age of the
    oldest of them, 0 when there is none. `positions` says how far each shard is, `behind` which
    topics lag behind their shard. `rows` is about what the table holds, published or not, and
    `bytes` its size where the database tells. `holders` are writers that readers cannot pass.
    """

    unpublished: int
    age_s: float
    positions: Mapping[int, int]
    behind: Sequence[str]
    rows: int
    bytes: int | None
    holders: Sequence[Holder]


async def lag(link: Link, party: Party) -> Lag:
    positions, lanes = await _where(link, party)
    left, oldest_us, now_us = COUNTED + 1, None, 0
    for where, params in _unpublished(link, party, positions, lanes):
        count, first_us, now_us = await _count(link, where, params, max(1, left))
        left -= count
        oldest_us = first_us if oldest_us is None else min(oldest_us, first_us or oldest_us)
    return Lag(
        unpublished=min(COUNTED + 1, COUNTED + 1 - left),
        age_s=0.0 if oldest_us is None else max(0.0, (now_us - oldest_us) / 1e6),
        positions=positions,
        behind=sorted({topic for _, topic in lanes}),
        rows=await _rows(link),
        bytes=await _bytes(link),
        holders=await holders(link),
    )


Lanes = Mapping[tuple[int, str], int]

WHERE = "SELECT shard, position, lanes FROM event_outbox_cursor WHERE name = ?"


async def _where(link: Link, party: Party) -> tuple[dict[int, int], Lanes]:
    """The shards' positions and the lanes'.

    A shard that nobody has taken yet is where it would be if somebody took it now.
    """
    rows = await link.fetch(WHERE, [party.column(link)])
    there = {int(shard): int(position) for shard, position, _ in rows}
    lanes = {int(shard): json.loads(lanes) for shard, _, lanes in rows}
    begin = await swept(link)
    positions = {shard: there.get(shard, begin) for shard in range(party.shards)}
    return positions, {
        (shard, t): at for shard in positions for t, at in lanes.get(shard, {}).items()
    }


Condition = tuple[str, list[Any]]


def _unpublished(
    link: Link, party: Party, positions: Mapping[int, int], lanes: Lanes
) -> Iterator[Condition]:
    """What lies behind each shard's position; in front of it, of topics that lag; and, where
    ids are no positions, what has none yet.
    """
    place = POSITION[link.dialect.name]
    for shard, position in positions.items():
        slots, among = _slots(link, party, shard)
        yield f"{place} > ?{slots} ORDER BY {place}", [position, *among]
        if place != "id":
            yield f"{place} IS NULL{slots} ORDER BY id", among
    for (shard, topic), at in lanes.items():
        slots, among = _slots(link, party, shard)
        where = f"{place} > ? AND {place} <= ?{slots} AND topic = ? ORDER BY {place}"
        yield where, [at, positions[shard], *among, stored_name(topic, link.dialect.codec)]


def _slots(link: Link, party: Party, shard: int) -> Condition:
    if party.shards == 1:
        return "", []
    return f" AND {SLOT[link.dialect.name]} BETWEEN ? AND ?", [*slots_of(shard, party.shards)]


async def _count(
    link: Link, where: str, params: Sequence[Any], limit: int
) -> tuple[int, int | None, int]:
    table = f"event_outbox{BY_POSITION.get(link.dialect.name, '')}"
    select = f"SELECT created_at FROM {table} WHERE {where} LIMIT ?"
    [(now, count, first)] = await link.fetch(
        f"SELECT {{now}}, COUNT(*), MIN(created_at) FROM ({select}) AS found",
        [*link.dialect.now_param(), *params, limit],
    )
    micros = link.dialect.micros
    return int(count), None if first is None else micros(first), micros(now)


ROWS = (
    "SELECT COALESCE((SELECT MAX(id) FROM event_outbox) "
    "- (SELECT MIN(id) FROM event_outbox) + 1, 0)"
)

BYTES = {
    "postgresql": "SELECT pg_total_relation_size(to_regclass('event_outbox'))",
    "mysql": (
        "SELECT data_length + index_length FROM information_schema.tables "
        "WHERE table_schema = DATABASE() AND table_name = 'event_outbox'"
    ),
}


async def _rows(link: Link) -> int:
    [(rows,)] = await link.fetch(ROWS)
    return int(rows)


async def _bytes(link: Link) -> int | None:
    if link.dialect.name not in BYTES:
        return None
    [(size,)] = await link.fetch(BYTES[link.dialect.name])
    return None if size is None else int(size)


# --- who holds it up ----------------------------------------------------------------------------

_SECONDS = "COALESCE(extract(epoch FROM clock_timestamp() - a.xact_start), 0)::float8"
_ACTIVITY = (
    f"SELECT a.pid, COALESCE(a.state, ''), {_SECONDS}, COALESCE(left(a.query, 200), '') "
    "FROM pg_stat_activity AS a WHERE"
)
_FIRST = "ORDER BY a.xact_start NULLS LAST"

WRITERS = f"{_ACTIVITY} a.pid IN (SELECT l.pid {HELD} {PLACE}) {_FIRST}"

LONG = {
    "postgresql": (
        f"{_ACTIVITY} a.datname = current_database() AND a.pid <> pg_backend_pid() "
        "AND a.backend_type = 'client backend' "
        f"AND a.xact_start < clock_timestamp() - CAST(? AS bigint) * INTERVAL '1 microsecond' "
        f"{_FIRST}"
    ),
    "mysql": (
        "SELECT trx_mysql_thread_id, trx_state, "
        "TIMESTAMPDIFF(MICROSECOND, trx_started, NOW(6)) / 1000000, "
        "COALESCE(LEFT(trx_query, 200), '') FROM information_schema.innodb_trx "
        "WHERE trx_started < NOW(6) - INTERVAL ? MICROSECOND "
        "AND trx_mysql_thread_id <> CONNECTION_ID() ORDER BY trx_started"
    ),
}


async def holders(link: Link) -> Sequence[Holder]:
    """Writers whose transaction is open, and which readers therefore do not pass."""
    return _as_holders(await link.fetch(WRITERS)) if link.dialect.name == "postgresql" else ()


async def long_transactions(link: Link, older_than_s: float) -> Sequence[Holder]:
    """Whatever has been open for longer than this in this database, or on this MariaDB server.

    It keeps deleted rows from going away for good, and slows everybody down.
    """
    if link.dialect.name not in LONG:
        return ()
    try:
        rows = await link.fetch(LONG[link.dialect.name], [int(older_than_s * 1_000_000)])
    except Exception as error:
        if fault_of(error) is not Fault.NO_RIGHT:
            raise
        raise SettingsError(
            "this user may not see the transactions of others; GRANT PROCESS ON *.* to it"
        ) from error
    return _as_holders(rows)


def _as_holders(rows: Sequence[Any]) -> Sequence[Holder]:
    return [Holder(int(pid), state, float(open_s), query) for pid, state, open_s, query in rows]
