"""One who follows a stream: a position, and nothing else. There is no queue.

What it has not taken yet is in the reader's window, which is everybody's. Who is not found in there
(it has just come back, or is too slow) is served from the log, up to where the window begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from semel.entries import Entry, Life, Position
from semel.errors import StoreUnavailableError
from semel.feed.reader import PAGE, Reader
from semel.feed.values import Burst, End, Reason, Reset, reason_of
from semel.feed.window import CHUNK_BYTES

if TYPE_CHECKING:
    from semel.feed import Feed

__all__ = ["REPLAY_MOST", "Subscription"]

# Whoever has missed more than this is told the state instead.
REPLAY_MOST = 1000


class Subscription:
    """Follows a stream from behind a position; `lost` says that it has none to go on from.

    `take` what there is, `fetch` when the window does not have it, `wait` when there is nothing.
    """

    __slots__ = (
        "_asked",
        "_feed",
        "_future",
        "_generation",
        "_is_in_window",
        "_is_woken",
        "_limit",
        "_lost",
        "at_once",
        "position",
        "reader",
    )

    def __init__(self, feed: Feed, reader: Reader, after: Position, lost: Reason | None) -> None:
        self.reader = reader
        self.position = after
        self._feed = feed
        self._lost: Reason | None = lost
        self._generation = reader.generation
        self._is_in_window = False
        self._asked = False  # the log was asked, and had nothing
        self._limit = PAGE
        self._is_woken = False
        self._future: asyncio.Future[None] | None = None
        self.at_once: Callable[[], bool] | None = None
        """Called when there is something. True when it was seen to, so that nobody is woken."""
        reader.followers[self] = None

    # --- being woken ----------------------------------------------------------------------------

    def tell(self) -> None:
        """There is something."""
        if self.at_once is None or not self.at_once():
            self.wake()

    def wake(self) -> None:
        self._is_woken = True
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)

    async def wait(self) -> None:
        """Until there may be something, or somebody calls `wake`."""
        if not self._is_woken:
            self._future = asyncio.get_running_loop().create_future()
            try:
                await self._future
            finally:
                self._future = None
        self._is_woken = self._asked = False

    def ask_again(self) -> None:
        """There may be something: for whoever is told by `at_once`, and does not `wait`."""
        self._asked = False

    async def ready(self) -> None:
        """When this returns, it is known what there is of the stream."""
        await self.reader.ready()

    # --- what there is --------------------------------------------------------------------------

    @property
    def life(self) -> Life:
        """Of the stream."""
        return self.reader.life

    @property
    def head(self) -> Position:
        """Where the stream ends, as far as is known here."""
        head = self.reader.window.head
        return head if head.offset >= self.position.offset else self.position

    @property
    def is_at_end(self) -> bool:
        """Has it had everything, and is there nothing more to come?"""
        reader = self.reader
        return reader.is_over and self._lost is None and self.position == reader.window.head

    @property
    def is_at_head(self) -> bool:
        """Has it had everything that there is, and may there be more?"""
        reader = self.reader
        return self.position is reader.window.head and not reader.is_over

    def is_behind(self, entries: int, size: int) -> bool:
        """Is it by more than so many entries, or so many bytes? Not while it catches up."""
        if not self._is_in_window:
            return False
        window, offset = self.reader.window, self.position.offset
        return window.head.offset - offset > entries or window.bytes_after(offset) > size

    def take(self) -> Burst | Reset | End | None:
        """What the window has behind the position; None when it has nothing, for now or at all."""
        reader = self.reader
        if not self._is_in_window:
            self._enter()
        burst = self.take_entries()
        if burst is not None:
            return burst
        if self._is_in_window:
            if self._generation != reader.generation:
                return self._told(reader)
            if self.position.offset < reader.window.floor.offset:
                self._is_in_window = False
                return None
        return End(self.position) if self.is_at_end else None

    def take_entries(self) -> Burst | None:
        """What comes next, if that is entries which the window has; anything else stays."""
        reader, offset = self.reader, self.position.offset
        window = reader.window
        if (
            self._is_in_window
            and self._generation == reader.generation
            and window.floor.offset <= offset < window.head.offset
        ):
            burst = window.burst(offset)
            self.position = burst.position
            return burst
        return None

    def _enter(self) -> None:
        reader = self.reader
        if reader.is_synced and self._lost is None and reader.window.has(self.position):
            self._is_in_window = True
            self._generation = reader.generation

    def _told(self, reader: Reader) -> Reset:
        """Of a hole that everybody is told of."""
        reset = reader.reset
        assert reset is not None, "there is one for every generation but the first"
        self._generation = reader.generation
        self.position = reset.snapshot.position
        return reset

    @property
    def needs_log(self) -> bool:
        """Would `fetch` find more than `take` did?"""
        return not self._is_in_window and not self._asked

    async def fetch(self) -> Burst | Reset | None:
        """What the log has behind the position, at most a page.

        None when it has nothing, or when the window has it by now. Whoever is told that the log
        does not answer is woken when it does.
        """
        try:
            await self.reader.ready()
            return await self._fetch()
        except StoreUnavailableError:
            self._asked = True
            self._feed.wake_later(self)
            raise

    async def _fetch(self) -> Burst | Reset | None:
        if self._lost is not None:
            return await self._reset(self._lost)
        reader = self.reader
        if reader.window.has(self.position):
            return None
        page = await reader.page(self.position, self._limit)
        if page.lost:
            return await self._reset(reason_of(page, self.position))
        if page.head.offset - self.position.offset > REPLAY_MOST:
            return await self._reset("overrun")
        if reader.window.has(self.position):
            return None
        if not page.entries:
            self._look_out()
            return None
        burst = self._burst(page.entries)
        self.position = burst.position
        return burst

    def _burst(self, entries: Sequence[Entry]) -> Burst:
        frames: list[bytes] = []
        size = 0
        for entry in entries:
            frames.append(self._feed.encode(entry))
            size += len(frames[-1])
            if size >= CHUNK_BYTES:
                break
        taken = entries[: len(frames)]
        # Nobody has more at hand for it than is written at once, however slow it is.
        self._limit = min(PAGE, max(1, len(frames) * CHUNK_BYTES // max(size, 1)))
        return Burst(taken, taken[-1].position, b"".join(frames))

    async def _reset(self, reason: Reason) -> Reset:
        snapshot = await self.reader.snapshot(besides=self.position)
        if snapshot.life == "unknown":
            reason = "gone"
        self._lost = None
        self.position = snapshot.position
        self._look_out()
        return Reset(reason, snapshot)

    def _look_out(self) -> None:
        """It is further than the reader, or in another history: let that one have a look."""
        if self in self.reader.followers and not self.reader.window.has(self.position):
            if self.reader.is_over:  # in that history, and it looks no more
                self.reader.followers.pop(self, None)
                self.reader = self._feed.instead_of(self.reader, self.position)
                self.reader.followers[self] = None
            self._asked = True
            self.reader.catch_up()

    async def next(self) -> Burst | Reset | End | None:
        """What follows, as soon as there is something; None when the feed is closed."""
        while not self._feed.is_closed:
            found = self.take()
            if found is None and self.needs_log:
                found = await self.fetch()
                if found is None:
                    continue
            if found is not None:
                return found
            await self.wait()
        return None

    def close(self) -> None:
        self._feed.leave(self)
