"""The verbs over links: retried where that is safe, batched where many ask at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from semel.colour import ASYNC, SYNC, Colour
from semel.errors import StoreUnavailableError, said_by
from semel.stores import rules
from semel.stores.batch import Batcher
from semel.stores.rules import Claiming, Completing, Operation
from semel.stores.sql import fenced, generic, inspection, limits, postgres, schema
from semel.stores.sql.faults import Fault, fault_of, pause_s, unavailable
from semel.stores.sql.generic import AGAIN
from semel.stores.sql.lines import AsyncLines, Lines, SyncLines, Work
from semel.stores.sql.links import Link
from semel.stores.sql.promises import promises
from semel.stores.verbs import Verbs
from semel.values import Busy, Guarantees, Outcome, Record, State

T = TypeVar("T")

# How often an operation that was overtaken, or met a locked row, asks again: about a second.
ASKS = 10

# Rows that make a statement worth its while. A hundred callers at once take a fifth less time when
# they go out as 50, 32 and 18 rows than as 100.
ENOUGH = 32

# What a claim is told when the row it could have is locked by somebody's open transaction, most
# likely the one that completes it.
LOCKED_S = 0.1


async def perform(link: Link, ops: Sequence[Operation]) -> list[Any]:
    """The answers of this link's database, in order."""
    try:
        return await _perform(link, ops)
    except Exception as error:
        fault = fault_of(error)
        if fault in {Fault.REFUSED, Fault.GONE}:
            link.dialect.packet = None  # may be lower by now: read it again
        if fault is not Fault.REFUSED:
            raise
        if len(ops) > 1:
            return [await _perform_alone(link, op) for op in ops]
        return await _perform(link, [_without_result(ops[0], error)])


async def _perform_alone(link: Link, op: Operation) -> Any:
    """Return the answer to one operation of a batch that was refused; a refusal is returned, too.

    The whole batch is repeated this way, which is safe: every operation can be repeated.
    """
    try:
        return (await perform(link, [op]))[0]
    except Exception as error:
        if fault_of(error) is not Fault.REFUSED:
            raise
        return unavailable("the database", error)


def _without_result(op: Operation, error: Exception) -> Operation:
    """Return the completion without its result, or raise `error` if the operation has none.

    The call has happened and must not run again, although the database refuses its result.
    """
    if not isinstance(op, Completing) or op.outcome.kind == "lost":
        raise error
    return limits.lost(op, f"the database refuses its result: {said_by(error)}")


async def _perform(link: Link, ops: Sequence[Operation]) -> list[Any]:
    most = await limits.packet(link)
    if most is not None:
        ops = [limits.fitting(op, most) if isinstance(op, Completing) else op for op in ops]
    return await _perform_pieces(link, ops, most)


async def _perform_pieces(link: Link, ops: Sequence[Operation], most: int | None) -> list[Any]:
    work = postgres.perform if link.dialect.name == "postgresql" else _perform_generic
    if len(ops) == 1:
        return await work(link, ops)
    answers: list[Any] = []
    for piece in limits.chunks(ops, most):
        answers += await work(link, piece)
    return answers


async def _perform_generic(link: Link, ops: Sequence[Operation]) -> list[Any]:
    answers: dict[int, Any] = {}
    for group in _groups(ops):
        chosen: list[Any] = [ops[i] for i in group]
        work: Callable[[Link, Any], Awaitable[list[Any]]] = generic.perform
        if fenced.is_fenced(chosen[0]):
            work = fenced.change
        answers.update(zip(group, await work(link, chosen), strict=True))
    return [answers[i] for i in range(len(ops))]


def _groups(ops: Sequence[Operation]) -> list[list[int]]:
    """Completing, renewing, and all that has to be read first."""
    groups: dict[Any, list[int]] = {}
    for i, op in enumerate(ops):
        groups.setdefault(type(op) if fenced.is_fenced(op) else None, []).append(i)
    return list(groups.values())


class SQLLedger(Verbs):
    """What both colours have in common. `create`: make the tables when they are missing."""

    colour: Colour

    def __init__(self, *, create: bool) -> None:
        self._create = create

    async def lines(self) -> Lines:
        """Where people's verbs get their link."""
        raise NotImplementedError

    async def submit(self, op: Operation) -> Any:
        """The answer to the operation, or `AGAIN`."""
        raise NotImplementedError

    async def run(self, work: Work[T]) -> T:
        return await self.on(await self.lines(), work)

    async def on(self, lines: Lines, work: Work[T]) -> T:
        return await schema.with_tables(lines, work, self.colour, creates=self._create)

    async def perform(self, op: Operation) -> Any:
        answer = await self.submit(op)
        return await self._ask_again(op) if answer is AGAIN else answer

    async def _ask_again(self, op: Operation) -> Any:
        for turn in range(ASKS):
            await self.colour.sleep(0 if turn == 0 else pause_s(turn))
            answer = await self.submit(op)
            if answer is not AGAIN:
                return answer
        if isinstance(op, Claiming):
            return Busy(LOCKED_S)
        raise StoreUnavailableError(
            f"the record of key {rules.key_of(op).text!r} is locked by another transaction; "
            "commit or roll back what holds it"
        )

    # --- for people ---------------------------------------------------------------------------

    async def sweep(self, limit: int = 1000) -> int:
        """A chunk at a time, with a rest as long as each took.

        Claims share the server's processors and its disk with the sweep; half of both is theirs.
        """
        swept = 0
        while swept < limit:
            size = min(inspection.SWEEP_CHUNK, limit - swept)
            began = self.colour.now()
            found, deleted = await self.run(partial(inspection.sweep, size=size))
            swept += deleted
            if found < size or not deleted:
                break
            await self.colour.sleep(self.colour.now() - began)
        return swept

    async def look(self, id: bytes) -> Record | None:
        return await self.run(lambda link: inspection.look(link, id))

    async def records(
        self,
        *,
        tenant: str | None = None,
        operation: str | None = None,
        state: State | None = None,
        limit: int = 100,
        after: bytes | None = None,
    ) -> Sequence[Record]:
        wanted = inspection.Wanted(tenant, operation, state)
        return await self.run(lambda link: inspection.records(link, wanted, limit, after))

    async def resolve(
        self, id: bytes, *, fence: int, outcome: Outcome | None, ttl_s: float | None
    ) -> bool:
        return await self.run(lambda link: inspection.resolve(link, id, fence, outcome, ttl_s))

    async def forget(self, id: bytes, *, force: bool = False) -> bool:
        return await self.run(lambda link: inspection.forget(link, id, force))

    async def guarantees(self) -> Guarantees:
        return await self.run(promises)


class SyncLedger(SQLLedger):
    """One statement at a time, on the caller's thread."""

    colour = SYNC

    def __init__(self, lines: SyncLines, *, create: bool) -> None:
        super().__init__(create=create)
        self._lines = lines

    async def lines(self) -> SyncLines:
        return self._lines

    async def submit(self, op: Operation) -> Any:
        answer = (await self.run(lambda link: perform(link, [op])))[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class AsyncLedger(SQLLedger):
    """Many operations at a time: one home per event loop, opened by `open_lines`."""

    colour = ASYNC

    def __init__(self, open_lines: Callable[[], AsyncLines], *, create: bool) -> None:
        super().__init__(create=create)
        self._open_lines = open_lines
        self._homes: dict[asyncio.AbstractEventLoop, Home] = {}
        self._moving = threading.Lock()

    def home(self) -> Home:
        loop = asyncio.get_running_loop()
        home = self._homes.get(loop)
        if home is None:
            self._leave_closed()
            home = Home(self._open_lines, self.on)
            with self._moving:
                self._homes[loop] = home
        return home

    async def lines(self) -> AsyncLines:
        return self.home().lines

    async def submit(self, op: Operation) -> Any:
        return await self.home().submit(op)

    async def perform(self, op: Operation) -> Any:
        answer = await self.home().submit(op)  # without the way through `submit`: a tenth of it all
        return await self._ask_again(op) if answer is AGAIN else answer

    def _leave_closed(self) -> None:
        with self._moving:  # another thread's loop may be moving in or out
            closed = [loop for loop in self._homes if loop.is_closed()]
            left = [self._homes.pop(loop) for loop in closed]
        for home in left:
            home.abandon()

    async def close(self) -> None:
        self._leave_closed()
        with self._moving:
            home = self._homes.pop(asyncio.get_running_loop(), None)
        if home is not None:
            await home.close()

    def forked(self) -> list[Home]:
        """Start over without the parent's connections, which the caller must not let die."""
        self._moving = threading.Lock()
        homes, self._homes = list(self._homes.values()), {}
        return homes


class Home:
    """What the async colour has on one event loop: batchers, each with a link of its own.

    Claims and changes go out side by side, so that the database works on one while the answers
    to the other are handed out.
    """

    def __init__(self, open_lines: Callable[[], AsyncLines], on: Any) -> None:
        self._open_lines = open_lines
        self.lines = open_lines()
        self._all = [self.lines]
        self._claims = self._batcher(open_lines, on)
        # SQLite has one writer: two links of one process would only wait for each other.
        alone = self.lines.dialect.name == "sqlite"
        self._changes = self._claims if alone else self._batcher(open_lines, on)
        self._resident = self._move_in()

    def _batcher(self, open_lines: Callable[[], AsyncLines], on: Any) -> Batcher[Operation]:
        lines = open_lines()
        self._all.append(lines)

        def run(ops: Sequence[Operation]) -> Awaitable[list[Any]]:
            answers: Awaitable[list[Any]] = on(lines, lambda link: perform(link, ops))
            return answers

        return Batcher(run) if lines.dialect.name == "sqlite" else Batcher(run, enough=ENOUGH)

    def _move_in(self) -> AsyncGenerator[None, None]:
        """Be told of the event loop's end, from its first step on, which suspends nobody."""
        resident = self._stay()
        with contextlib.suppress(StopIteration):
            anext(resident).__await__().send(None)
        return resident

    async def _stay(self) -> AsyncGenerator[None, None]:
        """Closes the links when the event loop ends: `asyncio.run` closes every generator then."""
        try:
            yield
        finally:
            # In its own task: `ASYNC.shield` does nothing where a GeneratorExit is being handled.
            await asyncio.create_task(self._close_links())

    def open(self) -> AsyncLines:
        """One more link for other work on this loop, closed with the others."""
        lines = self._open_lines()
        self._all.append(lines)
        return lines

    def submit(self, op: Operation) -> asyncio.Future[Any]:
        # A withdrawal (it knows no fence) goes the way of its claim, so as not to overtake it.
        as_claim = isinstance(op, Claiming) or op.claim.fence == 0
        return (self._claims if as_claim else self._changes).submit(op)

    async def close(self) -> None:
        await self._resident.aclose()

    async def _close_links(self) -> None:
        for lines in self._all:
            await lines.close()

    def abandon(self) -> None:
        for lines in self._all:
            lines.abandon()
