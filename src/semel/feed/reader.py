"""One stream, read once for everybody in this process who follows it.

Listen first, then read: a ring between the two would be lost otherwise, and with it, perhaps, the
last entry there ever is. From then on: wait for a ring, read what is there, wake the followers.

When the log cannot go on from where the reader is (a failover has taken entries back, or all were
trimmed that it had not read), everybody is told once, with the state, and stays connected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from semel.colour import keep
from semel.entries import Life, Page, Position, Snapshot
from semel.errors import CorruptRecordError, DamagedStoreError, StoreUnavailableError
from semel.feed.values import Reset, reason_of
from semel.feed.window import KEEP_ENTRIES, Window

if TYPE_CHECKING:
    from semel.feed import Feed
    from semel.feed.subscription import Subscription

__all__ = ["PAGE", "Reader", "Together"]

T = TypeVar("T")

log = logging.getLogger("semel")

# Read at once. As many as a window keeps: whoever was at its head finds all of them there.
PAGE = KEEP_ENTRIES


class Together:
    """Whoever asks the same at the same time gets one answer."""

    def __init__(self) -> None:
        self._asked: dict[Any, asyncio.Task[Any]] = {}

    async def ask(self, what: object, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = self._asked.get(what)
        if task is None or task.done():  # what is answered may be older than who asks now
            task = self._asked[what] = asyncio.ensure_future(_answer(work()))
            task.add_done_callback(lambda done: self._forget(what, done))
            keep(task)
        answer = await asyncio.shield(task)  # one who leaves takes the answer from nobody
        if isinstance(answer, BaseException):
            raise answer
        found: T = answer
        return found

    def _forget(self, what: object, done: asyncio.Future[Any]) -> None:
        if self._asked.get(what) is done:
            del self._asked[what]


async def _answer(work: Awaitable[T]) -> T | Exception:
    """An error is an answer, too: that nobody is left to hear it is no defect."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - raised by whoever has asked
        return error


class Reader:
    """Reads one stream, beginning behind `start`, for as long as anybody follows it."""

    def __init__(self, feed: Feed, stream: str, start: Position) -> None:
        self.stream = stream
        self.window = Window(start, feed.encode)
        self.life: Life = "unknown"
        self.followers: dict[Subscription, None] = {}
        self.generation = 0
        """Grows whenever everybody is told of a hole."""
        self.reset: Reset | None = None
        """What everybody is told of the last one."""
        self.left_at = 0.0
        """When the last one has left it, or when it was over: then it is kept for a while."""
        self.is_over = False
        """There is nothing more to come, and all of it was read."""
        self.is_synced = False
        """It knows what there is of the stream, as of some moment."""
        self._feed = feed
        self._tried = asyncio.Event()
        self._error: Exception | None = None
        """Of the last try; it tries again when somebody wakes it."""
        self._snapshot: Snapshot | None = None
        self._is_lost = False  # as of the last turn
        self._is_rung = False
        self._is_missed = False  # by somebody whose position it does not have
        self._is_looked_after = False  # woken by the net, and by nobody since
        self._waiter: asyncio.Future[None] | None = None
        self._task = asyncio.ensure_future(self._run())
        keep(self._task)
        # However it ends: whoever waits for its first answer would wait for ever.
        self._task.add_done_callback(lambda _: self._tried.set())

    # --- its life -------------------------------------------------------------------------------

    async def _run(self) -> None:
        await self._listen()
        try:
            while not self.is_over:
                if await self._try():
                    await asyncio.sleep(0)  # let them take it before the window moves on
                elif not self.is_over:
                    await self._wait()
        finally:
            self._feed.circuit.gave_up(self.stream)
            await self._feed.bell.leave(self.stream, self.ring)

    async def _listen(self) -> None:
        """Who cannot hear is late, by a second at most: no reason to show nothing."""
        try:
            await self._feed.bell.listen(self.stream, self.ring)
        except Exception:
            log.exception("semel: nobody hears of %r at once: its bell has failed", self.stream)

    async def _try(self) -> bool:
        """Read once. Is there more?"""
        try:
            has_more = await self._turn()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told of
            self._failed(error)
            return False
        self._feed.circuit.passed(self.stream)
        self._error = None
        return has_more

    def _failed(self, error: Exception) -> None:
        circuit = self._feed.circuit
        if isinstance(error, CorruptRecordError) and not isinstance(error, DamagedStoreError):
            # This stream's trouble alone: the log answers, and so do all the others.
            circuit.passed(self.stream)
            if not isinstance(self._error, CorruptRecordError):
                log.error("semel: %s", error)
        else:
            circuit.failed(error, self.stream)
        self._error = error
        self._tried.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def ready(self) -> None:
        """When this returns, it is known what there is of the stream."""
        if not self.is_synced:
            await self._tried.wait()
            if not self.is_synced:
                why = self._error or "it was closed"
                raise StoreUnavailableError(f"the log cannot be read: {why}") from self._error

    # --- being woken ----------------------------------------------------------------------------

    def ring(self) -> None:
        self._feed.counts.rings += 1
        self._is_looked_after = False
        self.wake()

    def look(self, head: Position) -> None:
        """The stream ends there, says somebody who has looked: is that news?"""
        self.window.trim()
        if self._error is not None:
            self.wake()
        elif head != self.window.head and not self._is_rung:
            self._is_looked_after = True
            self.wake()

    def wake(self) -> None:
        """Look now."""
        self._is_rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def catch_up(self) -> None:
        """Look now, for somebody who is further, or in another history: it is told when we have."""
        self._is_missed = True
        self.wake()

    async def _wait(self) -> None:
        if not self._is_rung:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._is_rung = False

    # --- reading --------------------------------------------------------------------------------

    async def _turn(self) -> bool:
        window, is_missed = self.window, self._is_missed
        page = await self._feed.read(self.stream, window.head)
        if page.lost:
            return await self._lost(page)
        self._is_lost = False
        if page.entries and self._is_looked_after:
            self._feed.counts.found += 1
        self._is_looked_after = False
        is_news = bool(page.entries) or page.life != self.life or not self.is_synced
        reaches = window.head.offset + len(page.entries)
        if not self.is_synced and reaches < page.head.offset:
            # The first to come is far behind. It has to read for itself; those at the end do not.
            self.window = Window(page.head, self._feed.encode)
        else:
            window.add(page.entries)
        self._synced(page.life, at_end=self.window.head == page.head)
        if is_missed:
            self._is_missed = False
        if is_news or is_missed:
            self.tell()
        return self.window.head != page.head

    async def _lost(self, page: Page) -> bool:
        reason = reason_of(page, self.window.head)
        snapshot = await self._load()
        if snapshot.life == "unknown":
            reason = "gone"
        if self._is_lost:
            # With another state than before, it may be another failover: the next try begins anew.
            self._is_lost = snapshot.position == self.window.head
            raise StoreUnavailableError(
                f"the state and the entries of {self.stream!r} are of two histories"
            )
        self._is_lost = True
        self.window = Window(snapshot.position, self._feed.encode)
        if self.is_synced:
            self.generation += 1
            self.reset = Reset(reason, snapshot)
        self._synced(snapshot.life, at_end=True)
        self.tell()
        return not self.is_over

    def _synced(self, life: Life, *, at_end: bool) -> None:
        self.life = life
        self.is_over = at_end and life in {"ended", "gone"}
        if self.is_over:
            self.left_at = self._feed.now()
        self.is_synced = True
        self._tried.set()

    def tell(self) -> None:
        for follower in self.followers:
            follower.tell()

    async def page(self, after: Position, limit: int) -> Page:
        """What follows a position that the window does not have.

        Asked once for all who ask at the same time, and kept for those who come next, if it can be.
        """
        asked = (self.stream, after, limit)
        return await self._feed.together.ask(asked, lambda: self._before(after, limit))

    async def _before(self, after: Position, limit: int) -> Page:
        page = await self._feed.read(self.stream, after, limit)
        self.window.precede(after, page.entries)
        return page

    # --- the state ------------------------------------------------------------------------------

    async def snapshot(self, besides: Position) -> Snapshot:
        """The state as of a moment from which one can go on: asked for once for everybody.

        Not the one of `besides`, from where whoever asks could not go on: since it was loaded, a
        failover may have taken back what it tells. Nor one from before that: whoever asks would see
        the state go back, and some entries twice.
        """
        held = self._snapshot
        if (
            held is None
            or held.position.offset <= besides.offset
            or not self._leads_on(held.position)
        ):
            held = await self._load()
        return held

    def _leads_on(self, position: Position) -> bool:
        """Is everything behind it at hand, or yet to be read?"""
        return position.offset > self.window.head.offset or self.window.has(position)

    async def _load(self) -> Snapshot:
        snapshot = await self._feed.load(self.stream)
        self._snapshot = snapshot
        return snapshot
