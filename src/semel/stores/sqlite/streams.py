"""The log's verbs over its tables, blocking.

An append is one transaction that is the only one writing (BEGIN IMMEDIATE), so offsets are taken
and become visible in one order. Reading takes no lock that a writer waits for; what it sees is the
file at one moment.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias, TypeVar

from semel.entries import (
    Answer,
    Entry,
    Field,
    FieldValue,
    Page,
    Position,
    Replace,
    Snapshot,
    StateChange,
    beginning,
)
from semel.errors import CorruptRecordError
from semel.ports import Clock
from semel.stores import log_rules as rules
from semel.stores.log_rules import Append, Change, Mark, Row, Seen
from semel.stores.sqlite import log_schema as sql
from semel.stores.sqlite.connections import Connections

T = TypeVar("T")
Written: TypeAlias = tuple[Answer, int | None]
"""What an append is answered, and its serial, if readers are to hear of it."""

# The state as a whole, among the fields.
WHOLE: Final = ""

# Rows deleted in one transaction of a sweep: writers must not wait for long.
SWEEP_ROWS: Final = 2000
SWEEP_STREAMS: Final = 100

# Rows that an append which begins a stream deletes of those that are over.
SWEEP_ROWS_PER_STREAM: Final = 50

# Streams asked for in one statement: a build of SQLite may take no more than 999 values.
ASKED: Final = 500

# More changes than these, and everybody is woken instead.
MOST_CHANGED: Final = 10_000

# Our own appends that a bell need not tell of again: what one process appends between two looks.
OWN: Final = 1024


class Streams:
    """The verbs over the tables, blocking."""

    def __init__(self, connections: Connections, clock: Clock) -> None:
        self._connections = connections
        self._clock = clock
        self._is_prepared = False
        self._own: deque[int] = deque(maxlen=OWN)

    def prepare(self) -> None:
        """Make or check the tables, once."""
        if self._is_prepared:
            return
        path = self._connections.path
        if not self._connections.read(lambda c: sql.is_there(c, path)):
            self._connections.write(sql.create)
        self._is_prepared = True

    # --- append

    def perform(self, op: Append) -> Written:
        return self._connections.write(lambda c: self._apply(c, op))

    def perform_all(self, ops: Sequence[Append]) -> Sequence[Written]:
        """One transaction for all of them."""
        return self._connections.write(lambda c: [self._apply(c, op) for op in ops])

    def _apply(self, connection: sqlite3.Connection, op: Append) -> Written:
        now_us = self._clock.now_us()
        number, row = _stream(connection, op.stream)
        seen = Seen() if row is None else _seen(connection, number, row, op)
        answer, change = rules.decide(seen, op, now_us)
        if change is None:
            return answer, None
        if change.anew:
            self._sweep_chunk(connection, now_us, rules.SWEEPS_PER_STREAM, SWEEP_ROWS_PER_STREAM)
            number = _begin(connection, op.stream, None if row is None else number)
        return answer, _write(connection, number, op, change, now_us)

    # --- read

    def read(self, stream: str, after: Position | None, limit: int) -> Page:
        return self._at_one_moment(lambda c: self._read(c, stream, after, limit))

    def _read(
        self, connection: sqlite3.Connection, stream: str, after: Position | None, limit: int
    ) -> Page:
        number, row = _stream(connection, stream)
        tag_at = _tags(connection, number)
        page, behind = rules.opened(stream, row, after, tag_at, self._clock.now_us())
        if behind is None:
            return page
        wanted = min(limit, page.head.offset - behind)
        rows = connection.execute(sql.BEHIND, (number, behind, wanted))
        entries = tuple(
            Entry(Position(position, tag), id, data, at_us)
            for position, tag, id, data, at_us in rows
        )
        offsets = [entry.position.offset for entry in entries]
        if offsets != list(range(behind + 1, behind + 1 + wanted)):
            raise self._damaged(f"entries of stream {stream!r} behind {behind} are missing")
        return replace(page, entries=entries)

    def load(self, stream: str) -> Snapshot:
        return self._at_one_moment(lambda c: self._load(c, stream))

    def _load(self, connection: sqlite3.Connection, stream: str) -> Snapshot:
        number, row = _stream(connection, stream)
        life = rules.life(row, self._clock.now_us())
        if row is None or life == "unknown":
            return Snapshot(beginning(stream), "unknown")
        if life == "gone":
            return Snapshot(row.head, life)
        rows = connection.execute(sql.FIELDS, (number,))
        fields = {name: FieldValue(rank, data) for name, rank, data in rows}
        whole = fields.pop(WHOLE, None)
        return Snapshot(row.head, life, None if whole is None else whole.data, fields)

    def heads(self, streams: Sequence[str]) -> Sequence[Position]:
        known: dict[str, Position] = {}
        for start in range(0, len(streams), ASKED):
            known.update(self._heads(streams[start : start + ASKED]))
        return [known.get(stream) or beginning(stream) for stream in streams]

    def _heads(self, streams: Sequence[str]) -> Iterable[tuple[str, Position]]:
        select = sql.HEADS.format(", ".join("?" * len(streams)))
        rows = self._connections.read(lambda c: c.execute(select, tuple(streams)).fetchall())
        now_us = self._clock.now_us()
        for stream, head, tag, until_us in rows:
            if until_us is None or until_us > now_us:
                yield stream, Position(head, tag)

    def _at_one_moment(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Statements that see nothing of what is committed between them."""

        def looked(connection: sqlite3.Connection) -> T:
            connection.execute("BEGIN")
            try:
                return work(connection)
            finally:
                connection.rollback()

        return self._connections.read(looked)

    def _damaged(self, what: str) -> CorruptRecordError:
        path = self._connections.path
        return CorruptRecordError(f"{path} is damaged: {what}. Restore it from a backup")

    # --- trim and sweep

    def trim(self, stream: str, upto: int | Position) -> int:
        return self._connections.write(lambda c: self._trim(c, stream, upto))

    def _trim(self, connection: sqlite3.Connection, stream: str, upto: int | Position) -> int:
        number, row = _stream(connection, stream)
        if row is None or rules.life(row, self._clock.now_us()) not in {"open", "ended"}:
            return 0
        if isinstance(upto, Position):
            if not rules.is_ours(row, upto, _tags(connection, number)):
                return 0
            upto = upto.offset
        count = min(upto, row.head.offset) - row.floor.offset
        if count <= 0:
            return 0
        floor = _trim(connection, number, row.floor.offset + count)
        connection.execute(sql.PUT_FLOOR, (floor.offset, floor.tag, number))
        return count

    def sweep(self, limit: int) -> int:
        swept = 0
        has_more = True
        while has_more and swept < limit:
            most = min(SWEEP_STREAMS, limit - swept)
            count, has_more = self._connections.write(
                lambda c, most=most: self._sweep_chunk(c, self._clock.now_us(), most, SWEEP_ROWS)  # type: ignore[misc]
            )
            swept += count
        return swept

    def _sweep_chunk(
        self, connection: sqlite3.Connection, now_us: int, streams: int, rows: int
    ) -> tuple[int, bool]:
        """How many streams are through with, and whether there may be more."""
        due = connection.execute(sql.DUE, (now_us, streams)).fetchall()
        for done, (number, until_us) in enumerate(due):
            is_over = until_us is not None and until_us <= now_us
            connection.execute(sql.OVER if is_over else sql.GONE, (number,))
            for delete in sql.EMPTY if is_over else sql.EMPTY_READABLE:
                rows -= connection.execute(delete, (number, rows)).rowcount
                if rows <= 0:
                    return done, True
            connection.execute(sql.DROP if is_over else sql.NOT_DUE, (number,))
        return len(due), len(due) == streams

    # --- for bells

    def told(self, serial: int) -> None:
        """This append has been rung for, in this process."""
        self._own.append(serial)

    def serial(self) -> int:
        """How many appends there were in the file."""
        serial: int = self._connections.read(lambda c: c.execute(sql.SERIAL).fetchone()[0])
        return serial

    def changed(self, since: int) -> tuple[int, Sequence[str] | None]:
        """Where appends have come to, and what streams got one since; None when it may be any.

        Without those that were rung for already.
        """

        def look(connection: sqlite3.Connection) -> tuple[int, list[tuple[str | None, int]]]:
            serial = connection.execute(sql.SERIAL).fetchone()[0]
            if serial <= since:
                return serial, []
            return serial, connection.execute(sql.CHANGED, (since, MOST_CHANGED)).fetchall()

        serial, rows = self._at_one_moment(look)
        if serial < since or len(rows) == MOST_CHANGED:  # a file from a backup, or a crowd
            return serial, None
        own = set(self._own) if rows else set[int]()
        return serial, [name for name, moved in rows if name is not None and moved not in own]


def _stream(connection: sqlite3.Connection, stream: str) -> tuple[int, Row | None]:
    found = connection.execute(sql.STREAM, (stream,)).fetchone()
    if found is None:
        return 0, None
    number, head, head_tag, floor, floor_tag, ended, gone_us, until_us = found
    places = Position(head, head_tag), Position(floor, floor_tag)
    return number, Row(*places, bool(ended), gone_us, until_us)


def _seen(connection: sqlite3.Connection, number: int, row: Row, op: Append) -> Seen:
    mark = connection.execute(sql.MARK, (number, op.id)).fetchone()
    if mark is not None:
        text, offset, tag, reply, until_us = mark
        mark = Mark(text, Position(offset, tag), reply, until_us)
    rank = None
    if isinstance(op.state, Field):
        rank = _number(connection, sql.RANK, number, op.state.name)
    return Seen(row, mark, _fences(connection, number, op.fences), rank)


def _fences(
    connection: sqlite3.Connection, number: int, names: Mapping[str, int]
) -> Mapping[str, int]:
    found = {name: _number(connection, sql.FENCE, number, name) for name in names}
    return {name: fence for name, fence in found.items() if fence is not None}


def _number(connection: sqlite3.Connection, select: str, number: int, name: str) -> int | None:
    found = connection.execute(select, (number, name)).fetchone()
    return None if found is None else found[0]


def _tags(connection: sqlite3.Connection, number: int) -> Callable[[int], str | None]:
    def tag_at(offset: int) -> str | None:
        found = connection.execute(sql.TAG, (number, offset)).fetchone()
        return None if found is None else found[0]

    return tag_at


def _begin(connection: sqlite3.Connection, stream: str, before: int | None) -> int:
    """A new number for the stream; what it had under another one is left to the sweep."""
    if before is not None:
        connection.execute(sql.RETIRE, (before,))
    number = connection.execute(sql.NEW_STREAM, (stream,)).lastrowid
    assert number is not None, "an INSERT has one"
    return number


def _write(
    connection: sqlite3.Connection, number: int, op: Append, change: Change, now_us: int
) -> int | None:
    """The append's serial, if there is something for readers."""
    row, mark = change.row, change.mark
    if change.entry is not None:
        place, data = change.entry.position, change.entry.data
        connection.execute(sql.PUT_ENTRY, (number, place.offset, place.tag, op.id, data, now_us))
    if change.trim_to is not None:
        row = replace(row, floor=_trim(connection, number, change.trim_to))
    _put_row(connection, number, row)
    place = mark.position
    values = (number, op.id, mark.mark, place.offset, place.tag, mark.reply, mark.until_us)
    connection.execute(sql.PUT_MARK, values)
    for name, fence in change.fences.items():
        connection.execute(sql.PUT_FENCE, (number, name, fence))
    _put_state(connection, number, change.state)
    few = rules.FORGETS_PER_APPEND
    connection.execute(sql.FORGET, (number, row.floor.offset, few, now_us))
    return _next_serial(connection, number) if rules.rings(change) else None


def _put_row(connection: sqlite3.Connection, number: int, row: Row) -> None:
    due_us = row.until_us if row.gone_us is None else row.gone_us
    places = row.head.offset, row.head.tag, row.floor.offset, row.floor.tag
    ending = row.ended, row.gone_us, row.until_us, due_us
    connection.execute(sql.PUT_STREAM, (*places, *ending, number))


def _put_state(connection: sqlite3.Connection, number: int, state: StateChange | None) -> None:
    match state:
        case Replace(data):
            connection.execute(sql.PUT_FIELD, (number, WHOLE, 0, data))
        case Field(name, rank, data):
            connection.execute(sql.PUT_FIELD, (number, name, rank, data))
        case None:
            pass


def _next_serial(connection: sqlite3.Connection, number: int) -> int:
    serial: int = connection.execute(sql.NEXT_SERIAL).fetchone()[0]
    connection.execute(sql.MOVED, (serial, number))
    return serial


def _trim(connection: sqlite3.Connection, number: int, upto: int) -> Position:
    """Delete entries; the last position of theirs."""
    (tag,) = connection.execute(sql.TAG, (number, upto)).fetchone()
    connection.execute(sql.TRIM, (number, upto))
    return Position(upto, tag)
