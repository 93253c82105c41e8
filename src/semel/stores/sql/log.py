"""The log in an SQL database: its verbs over links, batched where many ask at once.

Appends of one event loop share transactions, and so do those who read a round trip: while one
batch is under way, the next one gathers. Who makes a new stream sweeps a few old ones behind it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from semel.colour import ASYNC, SYNC, Colour
from semel.entries import Answer, Page, Position, Snapshot
from semel.errors import SemelError, StoreUnavailableError
from semel.stores.batch import Batcher
from semel.stores.bells import Tower
from semel.stores.log_rules import Append, LogVerbs, limit_of, name_of, offset_of
from semel.stores.sql import limits, log_reading, log_sweeping, log_writing, schema
from semel.stores.sql.dialects import Dialect
from semel.stores.sql.faults import part_unavailable
from semel.stores.sql.ledger import ENOUGH, AsyncLedger, Home
from semel.stores.sql.lines import Lines, SyncLines, Work
from semel.stores.sql.links import Link, Rows, Said
from semel.stores.sql.log_words import MOST_NAMED
from semel.stores.sql.log_writing import Done

T = TypeVar("T")


def _told(where: str, error: BaseException) -> SemelError:
    return part_unavailable(where, error, "the log", "SQLStore")


# --- what fits into a statement -----------------------------------------------------------------


def _sizes(op: Append) -> Sequence[bytes]:
    return op.data or b"", op.reply, b"" if op.state is None else op.state.data


def _weight(op: Append) -> int:
    return limits.AROUND_BYTES + sum(map(len, _sizes(op)))


def _refusal(op: Append, most: int | None) -> StoreUnavailableError | None:
    largest = max(_sizes(op), key=len)
    if not limits.too_large(largest, most):
        return None
    return StoreUnavailableError(
        f"the entry {op.id!r} of stream {op.stream!r}, its state or its reply has {len(largest):,} "
        f"bytes, which does not fit into max_allowed_packet ({most:,} bytes) of the database; "
        "append less, or raise that setting",
        again=False,
    )


async def perform(link: Link, ops: Sequence[Append]) -> list[Done]:
    """One transaction for as many of them as fit."""
    most = await limits.packet(link)
    return [await _perform(link, piece, most) for piece in limits.chunks(ops, most, _weight)]


async def _perform(link: Link, ops: Sequence[Append], most: int | None) -> Done:
    answers: list[Any] = [_refusal(op, most) for op in ops]
    sent = [i for i, refused in enumerate(answers) if refused is None]
    if not sent:
        return Done(answers)
    done = await log_writing.perform(link, [ops[i] for i in sent])
    for i, answer in zip(sent, done.answers, strict=True):
        answers[i] = answer
    if done.due:
        await log_sweeping.sweep_behind(link, min(done.due, log_sweeping.SWEEP_CHUNK))
    return Done(answers, done.rung)


# --- the verbs ----------------------------------------------------------------------------------


class SQLLog(LogVerbs):
    """What both colours have in common. `create`: make the tables when they are missing."""

    colour: Colour

    def __init__(self, tower: Tower, *, create: bool) -> None:
        self._tower = tower
        self._create = create

    @abstractmethod
    async def lines(self) -> Lines:
        """Where whoever reads gets its link."""

    @abstractmethod
    async def ask(self, said: Said) -> Rows:
        """The rows of a statement that is asked all the time."""

    @abstractmethod
    def dialect(self) -> Dialect: ...

    async def on(self, lines: Lines, work: Work[T]) -> T:
        return await schema.with_tables(lines, work, self.colour, creates=self._create, told=_told)

    async def run(self, work: Work[T]) -> T:
        return await self.on(await self.lines(), work)

    async def read(self, stream: str, after: Position | None = None, limit: int = 1000) -> Page:
        dialect, limit = self.dialect(), limit_of(limit)
        lines = await self.ask(log_reading.reading(dialect, stream, after, limit))
        return log_reading.page_of(dialect, stream, after, limit, lines)

    async def load(self, stream: str) -> Snapshot:
        dialect = self.dialect()
        lines = await self.ask(log_reading.loading(dialect, stream))
        return log_reading.snapshot_of(dialect, stream, lines)

    async def heads(self, streams: Sequence[str]) -> Sequence[Position]:
        dialect, heads = self.dialect(), list[Position]()
        for start in range(0, len(streams), MOST_NAMED):
            some = streams[start : start + MOST_NAMED]
            heads += log_reading.heads_of(some, await self.ask(log_reading.ending(dialect, some)))
        return heads

    async def trim(self, stream: str, upto: int | Position) -> int:
        """A chunk at a time: who appends meanwhile waits for one of them only."""
        name_of(stream, "stream")
        offset_of(upto)
        trimmed, more = 0, True
        while more:
            count, more = await self.run(partial(log_reading.trim, stream=stream, upto=upto))
            trimmed += count
        return trimmed

    async def sweep(self, limit: int = 1000) -> int:
        """A chunk at a time, with a rest as long as each took."""
        swept, more, limit = 0, True, limit_of(limit)
        while more and swept < limit:
            size = min(log_sweeping.SWEEP_CHUNK, limit - swept)
            began = self.colour.now()
            deleted, more = await self.run(partial(log_sweeping.sweep, size=size))
            swept += deleted
            if more:
                await self.colour.sleep(self.colour.now() - began)
        return swept

    def tell(self, done: Sequence[Done]) -> list[Any]:
        """Ring for what was appended; the answers."""
        for each in done:
            for stream in each.rung:
                self._tower.ring(stream)
        return [answer for each in done for answer in each.answers]


class SyncLog(SQLLog):
    """One append at a time, on the caller's thread."""

    colour = SYNC

    def __init__(self, lines: SyncLines, tower: Tower, *, create: bool) -> None:
        super().__init__(tower, create=create)
        self._lines = lines

    async def lines(self) -> SyncLines:
        return self._lines

    def dialect(self) -> Dialect:
        return self._lines.dialect

    async def ask(self, said: Said) -> Rows:
        return await self.run(lambda link: link.ask(*said))

    async def perform(self, op: Append) -> Answer:
        [answer] = self.tell(await self.run(lambda link: perform(link, [op])))
        if isinstance(answer, Exception):
            raise answer
        appended: Answer = answer
        return appended


class AsyncLog(SQLLog):
    """Many at a time: a desk per event loop, beside the ledger's home there."""

    colour = ASYNC

    def __init__(self, ledger: AsyncLedger, tower: Tower, *, create: bool) -> None:
        super().__init__(tower, create=create)
        self._ledger = ledger
        self._desks: WeakKeyDictionary[Home, _Desk] = WeakKeyDictionary()

    def desk(self) -> _Desk:
        home = self._ledger.home()
        desk = self._desks.get(home)
        if desk is None:
            desk = self._desks[home] = _Desk(self, home)
        return desk

    async def lines(self) -> Lines:
        return self.desk().reading

    def dialect(self) -> Dialect:
        return self.desk().reading.dialect

    async def ask(self, said: Said) -> Rows:
        rows: Rows = await self.desk().asks.submit(said)
        return rows

    async def perform(self, op: Append) -> Answer:
        answer: Answer = await self.desk().appends.submit(op)
        return answer

    async def append_all(self, lines: Lines, ops: Sequence[Append]) -> list[Any]:
        return self.tell(await self.on(lines, lambda link: perform(link, ops)))


class _Desk:
    """What the log has on one event loop: a link that is written over, and one that is read over.

    SQLite has one writer, and readers do not wait for it.
    """

    def __init__(self, owner: AsyncLog, home: Home) -> None:
        self._owner = owner
        self._writing, self.reading = home.open(), home.open()
        # A transaction costs a wait for the disk, so nothing is enough.
        self.appends: Batcher[Append] = Batcher(self._append)
        self.asks: Batcher[Said] = Batcher(self._ask, enough=ENOUGH)

    def _append(self, ops: Sequence[Append]) -> Awaitable[list[Any]]:
        return self._owner.append_all(self._writing, ops)

    def _ask(self, asked: Sequence[Said]) -> Awaitable[list[Rows]]:
        return self._owner.on(self.reading, lambda link: link.together(asked))
