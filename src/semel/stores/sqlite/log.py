"""The log in the SQLite file, in both colours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from semel.entries import Answer, Page, Position, Snapshot
from semel.stores.batch import BatchPerLoop
from semel.stores.bells import Tower
from semel.stores.log_rules import Append, LogVerbs, limit_of, name_of, offset_of
from semel.stores.sqlite.streams import Streams, Written

Call: TypeAlias = Callable[..., Awaitable[Any]]


class SQLiteLog(LogVerbs):
    """Streams of a SQLite file. `look` and `change` run what reads and what waits for the disk."""

    def __init__(self, streams: Streams, tower: Tower, look: Call, change: Call) -> None:
        self._streams = streams
        self._tower = tower
        self._look = look
        self._change = change

    async def perform(self, op: Append) -> Answer:
        written: Written = await self._change(self._streams.perform, op)
        return self._rung(op, written)

    def _rung(self, op: Append, written: Written) -> Answer:
        answer, serial = written
        if serial is not None:
            self._tower.ring(op.stream)
            # Afterwards: whoever is stopped in between has rung twice, and not never.
            self._streams.told(serial)
        return answer

    async def read(self, stream: str, after: Position | None = None, limit: int = 1000) -> Page:
        name_of(stream, "stream")
        offset_of(after)
        page: Page = await self._look(self._streams.read, stream, after, limit_of(limit))
        return page

    async def load(self, stream: str) -> Snapshot:
        snapshot: Snapshot = await self._look(self._streams.load, name_of(stream, "stream"))
        return snapshot

    async def heads(self, streams: Sequence[str]) -> Sequence[Position]:
        for stream in streams:
            name_of(stream, "stream")
        heads: Sequence[Position] = await self._look(self._streams.heads, streams)
        return heads

    async def trim(self, stream: str, upto: int | Position) -> int:
        name_of(stream, "stream")
        offset_of(upto)
        count: int = await self._change(self._streams.trim, stream, upto)
        return count

    async def sweep(self, limit: int = 1000) -> int:
        count: int = await self._change(self._streams.sweep, limit_of(limit))
        return count


class BatchedLog(SQLiteLog):
    """Appends of concurrent callers share one transaction, gathered per event loop."""

    def __init__(self, streams: Streams, tower: Tower, look: Call, change: Call) -> None:
        super().__init__(streams, tower, look, change)
        self._batches = BatchPerLoop(self._together)

    async def perform(self, op: Append) -> Answer:
        answer: Answer = await self._batches.submit(op)
        return answer

    async def _together(self, ops: Sequence[Append]) -> Sequence[Answer]:
        written: Sequence[Written] = await self._change(self._streams.perform_all, ops)
        return [self._rung(op, each) for op, each in zip(ops, written, strict=True)]
