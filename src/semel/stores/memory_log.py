"""The log in this process's memory: the reference, and the log for tests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from weakref import WeakSet

from semel.colour import after_fork
from semel.entries import (
    Answer,
    Entry,
    Field,
    FieldValue,
    Page,
    Position,
    Replace,
    Snapshot,
    beginning,
)
from semel.ports import Clock
from semel.stores import log_rules as rules
from semel.stores.bells import Tower
from semel.stores.log_rules import (
    Append,
    Change,
    LogVerbs,
    Mark,
    Row,
    Seen,
    limit_of,
    name_of,
    offset_of,
)


class _Stream:
    """One stream, with everything about it."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.entries: deque[Entry] = deque()
        self.marks: dict[str, Mark] = {}
        """By id, the oldest first."""
        self.fences: dict[str, int] = {}
        self.state: bytes | None = None
        self.fields: dict[str, FieldValue] = {}

    def seen(self, op: Append) -> Seen:
        held = self.fields.get(op.state.name) if isinstance(op.state, Field) else None
        rank = None if held is None else held.rank
        return Seen(self.row, self.marks.get(op.id), self.fences, rank)

    def write(self, op: Append, change: Change, now_us: int) -> None:
        self.row = change.row
        self.marks.pop(op.id, None)  # a forgotten one: the new one is the youngest
        self.marks[op.id] = change.mark
        self.fences.update(change.fences)
        if change.entry is not None:
            self.entries.append(change.entry)
        match change.state:
            case Replace(data):
                self.state = data
            case Field(name, rank, data):
                self.fields[name] = FieldValue(rank, data)
            case None:
                pass
        if change.trim_to is not None:
            self.trim(change.trim_to)
        self._forget(now_us)

    def trim(self, upto: int | Position) -> int:
        if isinstance(upto, Position):
            if not rules.is_ours(self.row, upto, self.tag_at):
                return 0
            upto = upto.offset
        count = min(upto, self.row.head.offset) - self.row.floor.offset
        for _ in range(count):
            self.row = replace(self.row, floor=self.entries.popleft().position)
        return max(0, count)

    def _forget(self, now_us: int) -> None:
        for id, mark in list(islice(self.marks.items(), rules.FORGETS_PER_APPEND)):
            if not rules.is_forgotten(mark, self.row, now_us):
                break
            del self.marks[id]

    def tag_at(self, offset: int) -> str:
        return self.entries[offset - self.row.floor.offset - 1].position.tag

    def let_go(self) -> None:
        """Entries and state have had their time, even if the clock goes back."""
        self.row = replace(self.row, gone_us=0)
        self.entries.clear()
        self.state, self.fields = None, {}


class MemoryLog(LogVerbs):
    """Streams in a dictionary. Serves both colours; one process only."""

    def __init__(self, clock: Clock, tower: Tower) -> None:
        self._clock = clock
        self._tower = tower
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        _LOGS.add(self)

    async def perform(self, op: Append) -> Answer:
        with self._lock:
            now_us = self._clock.now_us()
            stream = self._streams.get(op.stream)
            answer, change = rules.decide(Seen() if stream is None else stream.seen(op), op, now_us)
            if change is not None:
                if stream is None or change.anew:
                    self._sweep(now_us, rules.SWEEPS_PER_STREAM)
                    stream = self._streams[op.stream] = _Stream(change.row)
                stream.write(op, change, now_us)
        if change is not None and rules.rings(change):
            self._tower.ring(op.stream)
        return answer

    async def read(self, stream: str, after: Position | None = None, limit: int = 1000) -> Page:
        name_of(stream, "stream")
        most, _ = limit_of(limit), offset_of(after)
        with self._lock:
            found = self._streams.get(stream)
            now_us = self._clock.now_us()
            if found is None:
                return rules.opened(stream, None, after, lambda _: None, now_us)[0]
            page, behind = rules.opened(stream, found.row, after, found.tag_at, now_us)
            if behind is None:
                return page
            start = behind - found.row.floor.offset
            return replace(page, entries=tuple(islice(found.entries, start, start + most)))

    async def load(self, stream: str) -> Snapshot:
        name_of(stream, "stream")
        with self._lock:
            found = self._streams.get(stream)
            alive = rules.life(None if found is None else found.row, self._clock.now_us())
            if found is None or alive == "unknown":
                return Snapshot(beginning(stream), "unknown")
            if alive == "gone":
                found.let_go()
            return Snapshot(found.row.head, alive, found.state, dict(found.fields))

    async def trim(self, stream: str, upto: int | Position) -> int:
        name_of(stream, "stream")
        offset_of(upto)
        with self._lock:
            found = self._streams.get(stream)
            alive = rules.life(None if found is None else found.row, self._clock.now_us())
            return found.trim(upto) if found is not None and alive in {"open", "ended"} else 0

    async def heads(self, streams: Sequence[str]) -> Sequence[Position]:
        with self._lock:
            now_us = self._clock.now_us()
            return [self._head(name_of(name, "stream"), now_us) for name in streams]

    def _head(self, name: str, now_us: int) -> Position:
        found = self._streams.get(name)
        is_there = found is not None and not rules.is_over(found.row, now_us)
        return found.row.head if found is not None and is_there else beginning(name)

    async def sweep(self, limit: int = 1000) -> int:
        with self._lock:
            return self._sweep(self._clock.now_us(), limit_of(limit))

    def _sweep(self, now_us: int, limit: int) -> int:
        over = (n for n, stream in self._streams.items() if rules.is_over(stream.row, now_us))
        names = list(islice(over, limit))
        for name in names:
            del self._streams[name]
        return len(names)


_LOGS: WeakSet[MemoryLog] = WeakSet()


def _free_locks() -> None:
    """A forked child has one thread; a lock that another one held would be held for ever."""
    for log in _LOGS:
        log._lock = threading.Lock()  # noqa: SLF001 - one module


after_fork(_free_locks)
