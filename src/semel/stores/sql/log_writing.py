"""A batch of appends: one transaction, in which the rules decide about one after another.

The streams' rows are locked, in the order of their ids; then the ids' marks, the fences and the
fields' ranks are read, in a statement of their own; then `rules.decide` goes over the appends as
they came, each seeing what the ones before it have done; then all changes are written, and
committed. So a stream's offsets are given out under its lock, and whoever sees one sees all before
it. On PostgreSQL that is two round trips, whatever is in the batch: up to the decision, and behind
it. MariaDB, MySQL and SQLite are asked one statement at a time.

The easy mistake is to write a stream that was not there with an upsert: two who make it at once
would both begin at 1. It is inserted; who comes second is refused, and begins anew.

When COMMIT is not answered, nobody knows. The batch is repeated as it is, and finds its own marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from semel.entries import Answer, Entry, Field, Position, Replace, beginning
from semel.errors import StoreUnavailableError
from semel.keys import identity
from semel.stores import log_rules as rules
from semel.stores.log_rules import Append, Change, Mark, Row, Seen
from semel.stores.sql import log_words as words
from semel.stores.sql.dialects import Dialect
from semel.stores.sql.faults import TRIES, Fault, fault_of
from semel.stores.sql.links import Link, Said, roll_back
from semel.values import value


@lru_cache(maxsize=16_384)
def stream_id(stream: str) -> bytes:
    """What the stream's rows are found by."""
    return identity("", stream.encode())


def part_id(stream: str, name: str) -> bytes:
    """The same for something of a stream that has a name: an id, a field, a fence."""
    return identity("", stream.encode(), name.encode())


def short(stream: str) -> str:
    """Its name among those that a bell listens to."""
    return stream_id(stream).hex()[: words.SHORT]


@value
class Done:
    """The answers to a batch, for which streams the bell is to ring, and how many old ones are to
    be swept.
    """

    answers: Sequence[Answer]
    rung: Sequence[str] = ()
    due: int = 0


async def perform(link: Link, ops: Sequence[Append]) -> Done:
    if link.dialect.name == "postgresql":
        await link.learn(words.OF_AN_APPEND)
    for _ in range(TRIES):
        try:
            return await _perform(link, ops)
        except Exception as error:
            await roll_back(link)
            if fault_of(error) is not Fault.TAKEN:
                raise
    raise StoreUnavailableError(
        f"others make the same streams as {ops[0].stream!r}, and were faster {TRIES} times; "
        "nothing was added: repeat it"
    )


async def _perform(link: Link, ops: Sequence[Append]) -> Done:
    batch = await _locked(link, ops)
    answers = [batch.decide(op) for op in ops]
    changed = batch.changed
    written = [] if not changed else _written(link.dialect, changed)
    rung = [stream.name for stream in changed if stream.rings]
    sweeps = rules.SWEEPS_PER_STREAM * sum(stream.found is None for stream in changed)
    look = [words.due(link.dialect, sweeps)] if sweeps else []
    said = [*written, *look, ("COMMIT", ())]
    found = await link.together(said, _ring(link.dialect, rung))
    return Done(answers, rung, int(found[-2][0][0]) if look else 0)


def _ring(dialect: Dialect, streams: Sequence[str]) -> Said | None:
    """Behind the COMMIT: at it, everybody who notifies would wait for everybody else's disk."""
    if dialect.name != "postgresql" or not streams:
        return None
    return words.RING, ("".join(map(short, streams)),)


# --- what is there, and what becomes of it ------------------------------------------------------


class _Stream:
    """A stream as a batch finds it, and as the appends that were decided so far leave it.

    `marks`, `numbers` and `ranks` are what is known; what of it is to be written stands beside it.
    """

    def __init__(
        self, name: str, found: Row | None = None, due_us: int | None = None, *, anew: bool = False
    ) -> None:
        self.name = name
        self.id = stream_id(name)
        self.found = found
        self.is_anew = anew
        self.row = found
        self.due_us = due_us
        self.is_changed = False
        self.rings = False
        self.marks: dict[str, Mark] = {}
        self.numbers: dict[str, int] = {}
        self.ranks: dict[str, int] = {}
        self.entries: list[Entry] = []
        self.marked: dict[str, Mark] = {}
        self.fences: dict[str, int] = {}
        self.fields: dict[str, Field] = {}
        self.state: Replace | None = None
        self.trim_to: int | None = None

    def seen(self, op: Append) -> Seen:
        rank = self.ranks.get(op.state.name) if isinstance(op.state, Field) else None
        return Seen(self.row, self.marks.get(op.id), self.numbers, rank)

    def take(self, op: Append, change: Change, now_us: int) -> None:
        self.is_changed = True
        self.rings = self.rings or rules.rings(change)
        self.row = change.row
        self.due_us = _due(self.due_us, change.row, now_us)
        self.marks[op.id] = self.marked[op.id] = change.mark
        moved = {n: v for n, v in change.fences.items() if self.numbers.get(n) != v}
        self.numbers.update(moved)
        self.fences.update(moved)
        if change.entry is not None:
            self.entries.append(change.entry)
        match change.state:
            case Replace():
                self.state = change.state
            case Field(name, rank):
                self.ranks[name] = rank
                self.fields[name] = change.state
            case None:
                pass
        if change.trim_to is not None:
            self.trim_to = change.trim_to
            # Its tag is in the database, and no rule asks for it.
            self.row = replace(change.row, floor=Position(change.trim_to, ""))

    def columns(self) -> tuple[Any, ...]:
        """The row as `words.STREAM` has it. What is trimmed is trimmed behind that."""
        row = self.row
        assert row is not None, "a stream that was changed has a row"
        floor = beginning(self.name) if self.found is None or self.is_anew else self.found.floor
        return (
            self.id,
            self.name,
            row.head.offset,
            row.head.tag,
            row.ended,
            _stored(row.gone_us),
            _stored(row.until_us),
            _stored(self.due_us),
            floor.offset,
            floor.tag,
            None if self.state is None else self.state.data,
        )


def _stored(us: int | None) -> int | None:
    return None if us is None else min(us, words.LATEST_US)


def _due(due_us: int | None, row: Row, now_us: int) -> int | None:
    """When the sweep is to look: as before, if that is early enough. It will find out."""
    ends_us = row.until_us if row.gone_us is None else row.gone_us
    if due_us is None or ends_us is None:
        return ends_us
    return due_us if now_us < due_us <= ends_us else ends_us


class _Batch:
    """The streams of some appends, locked, and what is known of them."""

    def __init__(self, streams: Iterable[_Stream], now_us: int) -> None:
        self._streams = {stream.name: stream for stream in streams}
        self._now_us = now_us

    def decide(self, op: Append) -> Answer:
        stream = self._streams[op.stream]
        answer, change = rules.decide(stream.seen(op), op, self._now_us)
        if change is not None:
            if change.anew:
                stream = _Stream(op.stream, stream.found, anew=stream.found is not None)
                self._streams[op.stream] = stream
            stream.take(op, change, self._now_us)
        return answer

    @property
    def changed(self) -> list[_Stream]:
        """In the order in which they are locked."""
        changed = [stream for stream in self._streams.values() if stream.is_changed]
        return sorted(changed, key=lambda stream: stream.id)


# --- reading ------------------------------------------------------------------------------------


async def _locked(link: Link, ops: Sequence[Append]) -> _Batch:
    dialect = link.dialect
    names = {stream_id(op.stream): op.stream for op in ops}
    marks = {part_id(op.stream, op.id): (op.stream, op.id) for op in ops}
    fences = {part_id(op.stream, n): (op.stream, n) for op in ops for n in op.fences}
    states = [(op.stream, op.state.name) for op in ops if isinstance(op.state, Field)]
    fields = {part_id(stream, name): (stream, name) for stream, name in states}
    asked = [*words.begun(dialect), words.locked(dialect, sorted(names))]
    asked.append(words.marks(dialect, sorted(marks)))
    asked += [words.numbers(dialect, sorted(fences))] if fences else []
    asked += [words.ranks(dialect, sorted(fields))] if fields else []
    found = (await link.together(asked))[len(words.BEGINS[dialect.name]) :]
    streams = {name: _Stream(name) for name in names.values()}
    for id, *values, due_at in found[0]:
        name = names[bytes(id)]
        row = words.row_of(values, dialect)
        streams[name] = _Stream(name, row, words.micros_or_none(due_at, dialect))
    for _, id, *values in found[1]:
        if id is not None:
            stream, event_id = marks[bytes(id)]
            streams[stream].marks[event_id] = _mark(values, dialect)
    if fences:
        for id, number in found[2]:
            stream, name = fences[bytes(id)]
            streams[stream].numbers[name] = int(number)
    if fields:
        for id, rank in found[-1]:
            stream, name = fields[bytes(id)]
            streams[stream].ranks[name] = int(rank)
    return _Batch(streams.values(), dialect.micros(found[1][0][0]))


def _mark(values: Sequence[Any], dialect: Dialect) -> Mark:
    mark, position, tag, reply, until_at = values
    return Mark(mark, Position(int(position), tag), bytes(reply), dialect.micros(until_at))


# --- writing ------------------------------------------------------------------------------------


def _written(dialect: Dialect, streams: Sequence[_Stream]) -> list[Said]:
    said = _rows_written(dialect, streams)
    rows: dict[words.Put, list[Sequence[Any]]] = {
        words.ENTRIES: [_entry(s, entry) for s in streams for entry in s.entries],
        words.MARKED: [_marked(s, id, mark) for s in streams for id, mark in s.marked.items()],
        words.FENCES: [_named(s, *fence) for s in streams for fence in s.fences.items()],
        words.FIELDS: [_field(s, field) for s in streams for field in s.fields.values()],
    }
    said += [put.said(dialect, given) for put, given in rows.items() if given]
    for stream in streams:
        said += _dropped(dialect, stream)
    return said


def _rows_written(dialect: Dialect, streams: Sequence[_Stream]) -> list[Said]:
    wiped = [s.id for s in streams if s.is_anew]
    said = words.wiped(dialect, wiped) if wiped else []
    puts: dict[words.Put, list[Sequence[Any]]] = {}
    for stream in streams:
        put = words.NEW if stream.found is None else words.MOVED
        if stream.found is not None and (stream.is_anew or stream.state is not None):
            put = words.CHANGED
        puts.setdefault(put, []).append(stream.columns())
    return said + [put.said(dialect, rows) for put, rows in puts.items()]


def _entry(stream: _Stream, entry: Entry) -> tuple[Any, ...]:
    at = entry.position
    return stream.id, at.offset, at.tag, entry.id, entry.data, entry.at_us


def _marked(stream: _Stream, id: str, mark: Mark) -> tuple[Any, ...]:
    at, until_us = mark.position, _stored(mark.until_us)
    named = part_id(stream.name, id), stream.id, id
    return *named, mark.mark, at.offset, at.tag, mark.reply, until_us


def _field(stream: _Stream, field: Field) -> tuple[Any, ...]:
    return _named(stream, field.name, field.rank, field.data)


def _named(stream: _Stream, name: str, *values: Any) -> tuple[Any, ...]:
    return part_id(stream.name, name), stream.id, name, *values


def _dropped(dialect: Dialect, stream: _Stream) -> list[Said]:
    """What was trimmed, and ids that may be forgotten: only of what was trimmed can they be."""
    assert stream.row is not None, "a stream that was changed has a row"
    said = [] if stream.trim_to is None else words.cut(stream.id, stream.trim_to)
    floor = stream.row.floor.offset
    if floor or not stream.row.head.offset:
        count = rules.FORGETS_PER_APPEND * len(stream.marked)
        said.append(words.forgotten(dialect, stream.id, floor, count))
    return said
