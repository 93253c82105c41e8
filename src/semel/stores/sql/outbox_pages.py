"""A page of an outbox: its statement in each database, and the messages it makes.

Rows are gone through by position behind the one where the reader is, whoever's they are, and those
of other shards left out: the newest rows are in memory, an index of the shards would have to be
written by everybody and sorted by every reader.
"""

# The statements are put together from names in this file, nothing else.
# ruff: noqa: S608

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from semel.messages import Message
from semel.stores.rules import EPOCH
from semel.stores.sql.asking import dense

# What a row's place in the order of reading is called.
POSITION = {"postgresql": "id", "mysql": "position", "sqlite": "id"}

NUMBER = {"postgresql": "?::int8", "mysql": "?", "sqlite": "?"}

# In words that no index can be used for.
SLOT = {"postgresql": "shard::int8", "mysql": "shard", "sqlite": "+shard"}
BY_POSITION = {"mysql": " FORCE INDEX (ux_event_outbox_position)"}

SIZE = {"postgresql": "octet_length", "mysql": "LENGTH", "sqlite": "length"}

CREATED = {
    "postgresql": "(extract(epoch FROM created_at) * 1000000)::int8",
    "mysql": "created_at",
    "sqlite": "created_at",
}

NAMES = ("event_id", "event_type", "topic", "tenant_id", "aggregate_type", "aggregate_id")


@lru_cache
def page_statement(database: str, *, whole: bool, one_topic: bool) -> str:
    """For (after, end, [first slot, last slot], [topic], id, fence, shards, limit, bytes)."""
    place, number = POSITION[database], NUMBER[database]
    where = [f"{place} > {number}", f"{place} <= {number}"]
    where += [] if whole else [f"{SLOT[database]} BETWEEN {number} AND {number}"]
    where += ["topic = ?"] if one_topic else []
    where.append(
        "EXISTS (SELECT 1 FROM event_outbox_cursor AS c "
        f"WHERE c.id = ? AND c.fence = {number} AND c.shards = {number})"
    )
    columns = f"{', '.join(NAMES)}, seq, payload, created, headers"
    return dense(f"""
        SELECT place, {columns}, total FROM (
            SELECT p.*, SUM(size) OVER (ORDER BY place ROWS UNBOUNDED PRECEDING) AS total FROM (
                SELECT {place} AS place, {", ".join(NAMES)}, seq, payload,
                    {CREATED[database]} AS created, headers, {SIZE[database]}(payload) AS size
                FROM event_outbox{BY_POSITION.get(database, "")}
                WHERE {" AND ".join(where)} ORDER BY {place} LIMIT {number}
            ) AS p
        ) AS q WHERE total - size < {number} ORDER BY place""")


def _of_micros(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


def _of_naive(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC)


def _of_text(moment: str) -> datetime:
    return datetime.fromisoformat(moment).replace(tzinfo=UTC)


MOMENTS: Mapping[str, Callable[[Any], datetime]] = {
    "postgresql": _of_micros,
    "mysql": _of_naive,
    "sqlite": _of_text,
}


def messages(rows: Sequence[Any], moment: Callable[[Any], datetime], source: str) -> list[Message]:
    """This is where a reader's time goes, so it is written out."""
    return [
        Message(at, id, kind, to, of, a, b, seq, text, moment(us), _read(headers), source)
        for at, id, kind, to, of, a, b, seq, text, us, headers, _ in rows
    ]


def _read(headers: str | None) -> dict[str, str]:
    return json.loads(headers) if headers else {}
