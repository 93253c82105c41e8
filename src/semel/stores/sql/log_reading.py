"""Reading and trimming a log. A page, a snapshot and all heads are one statement each: one snapshot
of the database, whatever is appended meanwhile.
"""

# The statements are put together from names in this file and `log_words`, nothing else.
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from semel.entries import Entry, FieldValue, Page, Position, Snapshot, beginning
from semel.stores import log_rules as rules
from semel.stores.log_rules import Row
from semel.stores.sql import log_words as words
from semel.stores.sql.dialects import Dialect
from semel.stores.sql.links import Link, Rows, Said, roll_back
from semel.stores.sql.log_writing import stream_id
from semel.stores.sql.rows import original_name

# Entries that are deleted in one transaction: their stream's writers wait for it.
TRIM_CHUNK = 1000

_ROW = ", ".join(f"s.{column}" for column in words.ROW.split(", "))
_STREAM = "(SELECT 1 AS one) AS here LEFT JOIN semel_stream AS s ON s.id = ?"


@lru_cache(maxsize=16_384)
def _id_of(stream: str) -> bytes:
    return stream_id(rules.name_of(stream, "stream"))


# --- a page -------------------------------------------------------------------------------------

# The reader's own last entry comes first, if it is there: its tag tells whether that is what was
# read. Its data is not sent again.
READ = (
    f"SELECT {{now}}, {_ROW}, l.position, l.tag, l.event_id, "
    "CASE WHEN l.position > ? THEN l.data END AS data, l.created_at "
    f"FROM {_STREAM} LEFT JOIN ("
    "SELECT position, tag, event_id, data, created_at FROM semel_log "
    "WHERE stream = ? AND position >= ? ORDER BY position LIMIT ?"
    ") AS l ON s.id IS NOT NULL ORDER BY l.position"
)


def reading(dialect: Dialect, stream: str, after: Position | None, limit: int) -> Said:
    id, behind = _id_of(stream), rules.offset_of(after)
    return READ, (*dialect.now_param(), behind, id, id, behind, limit + 1)


def page_of(dialect: Dialect, stream: str, after: Position | None, limit: int, lines: Rows) -> Page:
    now_us, row = _opened(dialect, lines)
    found = [line[8:] for line in lines if line[8] is not None]
    tags = {int(position): tag for position, tag, *_ in found[:1]}
    page, behind = rules.opened(stream, row, after, tags.get, now_us)
    if behind is None:
        return page
    entries = [_entry(dialect, values) for values in found if values[0] > behind][:limit]
    wanted = min(limit, page.head.offset - behind)
    if [entry.position.offset - behind for entry in entries] != list(range(1, wanted + 1)):
        # Somebody else deleted them: there must be no hole that nobody sees.
        return replace(page, lost=True)
    return replace(page, entries=tuple(entries))


def _opened(dialect: Dialect, lines: Rows) -> tuple[int, Row | None]:
    """The time, and the stream if it is there: what every answer begins with."""
    at, *row = lines[0][:8]
    return dialect.micros(at), None if row[0] is None else words.row_of(row, dialect)


def _entry(dialect: Dialect, values: Sequence[Any]) -> Entry:
    position, tag, id, data, at = values
    id = original_name(id, dialect.codec)
    return Entry(Position(int(position), tag), id, bytes(data), dialect.micros(at))


# --- a snapshot ---------------------------------------------------------------------------------

# The state is sent once, however many fields stand beside it.
LOAD = (
    f"SELECT {{now}}, {_ROW}, CASE WHEN row_number() OVER (ORDER BY f.id) = 1 THEN s.state END, "
    f"f.name, f.ranked, f.data FROM {_STREAM} LEFT JOIN semel_field AS f ON f.stream = s.id "
    "ORDER BY f.id"
)


def loading(dialect: Dialect, stream: str) -> Said:
    return LOAD, (*dialect.now_param(), _id_of(stream))


def snapshot_of(dialect: Dialect, stream: str, lines: Rows) -> Snapshot:
    now_us, row = _opened(dialect, lines)
    life = rules.life(row, now_us)
    if row is None or life == "unknown":
        return Snapshot(beginning(stream), "unknown")
    if life == "gone":
        return Snapshot(row.head, life)
    state = lines[0][8]
    found = [line[9:] for line in lines if line[9] is not None]
    fields = {
        original_name(name, dialect.codec): FieldValue(int(rank), bytes(data))
        for name, rank, data in found
    }
    return Snapshot(row.head, life, None if state is None else bytes(state), fields)


# --- heads --------------------------------------------------------------------------------------

HEADS = (
    "SELECT id, head, head_tag FROM semel_stream "
    "WHERE id {} AND (until_at IS NULL OR until_at > {{now}})"
)


def ending(dialect: Dialect, streams: Sequence[str]) -> Said:
    are, given = words.among(dialect, [_id_of(stream) for stream in streams])
    return HEADS.format(are), (*given, *dialect.now_param())


def heads_of(streams: Sequence[str], lines: Rows) -> list[Position]:
    found = {bytes(id): Position(int(head), tag) for id, head, tag in lines}
    return [found.get(_id_of(stream)) or beginning(stream) for stream in streams]


# --- trimming -----------------------------------------------------------------------------------

# MySQL's drivers put values into the text, and what has no name has its text for one: bytes there
# cannot be read.
AT = "SELECT {now}, (SELECT tag FROM semel_log WHERE stream = ? AND position = ?) AS tag"


async def trim(link: Link, stream: str, upto: int | Position) -> tuple[int, bool]:
    """How many of them were trimmed now, and are there more?"""
    try:
        said, count, more = await _trimming(link, stream, upto)
        await link.together([*said, ("COMMIT", ())])
    except Exception:
        await roll_back(link)
        raise
    return count, more


async def _trimming(link: Link, stream: str, upto: int | Position) -> tuple[list[Said], int, bool]:
    dialect, id = link.dialect, _id_of(stream)
    offset = rules.offset_of(upto)
    at = AT, (*dialect.now_param(), id, offset)
    *_, rows, [(now, tag)] = await link.together(
        [*words.begun(dialect), words.locked(dialect, [id]), at]
    )
    row = words.row_of(rows[0][1:-1], dialect) if rows else None
    if row is None or rules.life(row, dialect.micros(now)) not in {"open", "ended"}:
        return [], 0, False
    if isinstance(upto, Position) and not rules.is_ours(row, upto, lambda _: tag):
        return [], 0, False
    wanted = min(offset, row.head.offset) - row.floor.offset
    count = min(wanted, TRIM_CHUNK)
    if count <= 0:
        return [], 0, False
    return words.cut(id, row.floor.offset + count), count, wanted > count
