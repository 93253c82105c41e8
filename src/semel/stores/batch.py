"""Adaptive batching: while one batch is under way, the next one gathers.

An idle caller's operation goes out at once, alone; a hundred concurrent ones go out together.
There is no timer. A batch belongs to no caller: it runs in a task of its own, so a caller that is
cancelled leaves the others' work alone, and an operation that was sent is carried out whether or
not its caller still listens.

When the connection breaks, nobody knows which operations took effect: every caller of the batch
gets the error. Repeating is safe, every ledger verb can be repeated.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from semel.colour import keep
from semel.errors import SemelError

Op = TypeVar("Op")

LARGEST = 256


class Batcher(Generic[Op]):
    """Gathers operations on one event loop and runs them in batches.

    `run` takes a batch and returns one answer per operation, in order; an answer that is an
    exception is raised in that operation's caller alone.

    A crowd of more than `enough` goes out by halves: a server then works on the one while the
    answers to the other are handed out. Where a batch costs a wait for the disk, nothing is enough.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Op]], Awaitable[Sequence[Any]]],
        *,
        enough: int = LARGEST,
    ) -> None:
        self._run = run
        self._enough = enough
        self._waiting: list[tuple[Op, asyncio.Future[Any]]] = []
        self._busy = False

    def submit(self, op: Op) -> asyncio.Future[Any]:
        """The future answer to this operation."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((op, future))
        if not self._busy:
            self._start(loop)
        return future

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._busy = True
        task = loop.create_task(self._drain())
        keep(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        # A drain that was cancelled, even before its first step, leaves others' work behind:
        # `asyncio.run` cancels every task at its end, and their cleanups come after that.
        self._busy = False
        loop = task.get_loop()
        if self._waiting and not loop.is_closed():
            self._start(loop)

    async def _drain(self) -> None:
        while batch := self._next():
            await self._answer(batch)

    def _next(self) -> list[tuple[Op, asyncio.Future[Any]]]:
        # Cancelled before it was sent: it never happened.
        ready = [item for item in self._waiting if not item[1].done()]
        size = min(LARGEST, max(self._enough, (len(ready) + 1) // 2))
        self._waiting = ready[size:]
        return ready[:size]

    async def _answer(self, batch: list[tuple[Op, asyncio.Future[Any]]]) -> None:
        try:
            answers = await self._run([op for op, _ in batch])
        except BaseException as error:
            ours = isinstance(error, SemelError) or not isinstance(error, Exception)
            if len(batch) > 1 and not ours:
                # Not the store's doing: one of them cannot even be said. Others must not pay.
                await self._answer_one_by_one(batch)
                return
            self._fail(batch, error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    async def _answer_one_by_one(self, batch: list[tuple[Op, asyncio.Future[Any]]]) -> None:
        for number, item in enumerate(batch):
            try:
                await self._answer([item])
            except BaseException as error:
                self._fail(batch[number:], error)
                raise

    def _fail(self, batch: list[tuple[Op, asyncio.Future[Any]]], error: BaseException) -> None:
        for _, future in batch:
            if not future.done():
                if isinstance(error, asyncio.CancelledError):
                    future.cancel()
                else:
                    future.set_exception(error)


class BatchPerLoop(Generic[Op]):
    """A batcher for each event loop that asks, gone with it."""

    def __init__(self, run: Callable[[Sequence[Op]], Awaitable[Sequence[Any]]]) -> None:
        self._run = run
        self._local = threading.local()

    def submit(self, op: Op) -> asyncio.Future[Any]:
        """The future answer to this operation."""
        loop = asyncio.get_running_loop()
        known: tuple[Any, Batcher[Op]] | None = getattr(self._local, "known", None)
        if known is None or known[0]() is not loop:
            known = weakref.ref(loop), Batcher(self._run)
            self._local.known = known
        return known[1].submit(op)
