"""Following streams: everything in order and without a hole, or the word that there is one.

    async with Feed(store) as feed:
        async for news in feed.subscribe("scan:job:7"):
            ...  # Update(entry), Reset(reason, snapshot), and at last End(position)

One reader per stream serves everybody in this process. It is told by the bell when to look; since a
ring may be lost, the ends of all streams that are followed are looked at together, once a second,
so that a lost ring makes everybody late and nobody wrong. Who follows has no queue of its own: the
log is the buffer.

    values         what a follower is told
    window         the last entries of a stream, encoded once
    reader         one stream, read for everybody
    subscription   one follower, which is a position

A store that cannot be reached is waited for. A feed belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from semel.circuit import Circuit
from semel.colour import ASYNC, keep
from semel.entries import Page, Position, Snapshot, beginning
from semel.errors import CorruptRecordError, SettingsError, StoreUnavailableError
from semel.feed.counts import Counts
from semel.feed.reader import PAGE, Reader, Together
from semel.feed.subscription import Subscription
from semel.feed.values import Burst, End, News, Reason, Reset, Update
from semel.feed.window import Encode
from semel.ports import Bell, LogStore
from semel.settings import as_log_store
from semel.stores.log_rules import name_of

__all__ = ["Counts", "End", "Feed", "News", "Reason", "Reset", "Subscription", "Update", "parsed"]

# The ends of all streams are looked at so often; a little sooner, so that those of many processes
# are not looked at all together, and never later, since this is how late a lost ring makes us.
NET_S = 0.95
NET_JITTER = 0.3

# Enough to find a few streams whose ends the log cannot tell among thousands. Where it takes more,
# it is not for these streams that it does not answer.
MOST_QUESTIONS = 100

# No stream ends here: whoever is told so reads for itself, and finds out.
NOWHERE = Position(0, "")

# A stream that nobody follows any more stays for so long: those who were cut off come back.
LINGER_S = 5.0


class Feed:
    """Follows streams of one store, or the one at a URL. `encode` makes the bytes that are shared.

    To be closed when it is not needed any more, by `async with` or `aclose`.
    """

    def __init__(self, store: LogStore | str, *, encode: Encode = lambda entry: entry.data) -> None:
        self._store = as_log_store(store)
        self._is_ours = isinstance(store, str)
        self.log = self._store.log(ASYNC)
        self.encode = encode
        self.circuit = Circuit("the log")
        self.counts = Counts()
        self.is_closed = False
        self._bell: Bell | None = None
        self._readers: dict[str, Reader] = {}
        self.together = Together()
        self._stuck: dict[Subscription, None] = {}
        self._net: asyncio.Task[None] | None = None
        self._random = random.Random()  # noqa: S311 - spreads questions, hides nothing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop following; whoever still does comes to the end of its loop."""
        self.is_closed = True
        if self._net is not None:
            self._net.cancel()
            await asyncio.wait([self._net])
        readers, self._readers = list(self._readers.values()), {}
        await asyncio.gather(*(reader.close() for reader in readers))
        for reader in readers:
            reader.tell()
        if self._bell is not None:
            await self._bell.aclose()
        if self._is_ours:
            await self._store.aclose()

    # --- following ------------------------------------------------------------------------------

    async def subscribe(
        self, stream: str, after: Position | str | None = None, *, lost: Reason | None = None
    ) -> AsyncIterator[News]:
        """What follows a position, or a cursor; without one, everything there is.

        Goes on until the stream has ended. A stream that is not known is waited for. `lost` says
        that there is no position, and why: it begins with a reset.
        """
        position, unreadable = parsed(after)
        following = self.follow(stream, position, lost or unreadable)
        try:
            while (found := await self._next(following)) is not None:
                if isinstance(found, Reset | End):
                    yield found
                else:
                    for entry in found.entries:
                        yield Update(entry)
                if isinstance(found, End):
                    return
        finally:
            following.close()

    async def _next(self, following: Subscription) -> Burst | Reset | End | None:
        while not self.is_closed:
            with suppress(StoreUnavailableError):
                return await following.next()
            await following.wait()
        return None

    def follow(
        self, stream: str, after: Position | None = None, lost: Reason | None = None
    ) -> Subscription:
        """A place among those who follow the stream; `lost` says that there is no position."""
        if self.is_closed:
            raise RuntimeError("this feed is closed; make another one")
        name_of(stream, "stream")
        start = after or beginning(stream)
        return Subscription(self, self._reader(stream, start), start, lost)

    def instead_of(self, reader: Reader, start: Position) -> Reader:
        """Another one for its stream, which has come to an end in a history that is no more."""
        self._evict(reader)
        return self._reader(reader.stream, start)

    def _reader(self, stream: str, start: Position) -> Reader:
        reader = self._readers.get(stream)
        if reader is None:
            reader = self._readers[stream] = Reader(self, stream, start)
            self._watch()
        return reader

    def leave(self, following: Subscription) -> None:
        self._stuck.pop(following, None)
        reader = following.reader
        reader.followers.pop(following, None)
        if reader.followers:
            return
        if not reader.is_over:
            reader.left_at = self.now()
        if reader.life == "unknown":  # of those there are as many as somebody can think of
            self._evict(reader)

    def wake_later(self, following: Subscription) -> None:
        """As soon as the log answers again."""
        self._stuck[following] = None

    @property
    def bell(self) -> Bell:
        if self._bell is None:
            self._bell = self._store.bell()
        return self._bell

    def head(self, stream: str) -> Position | None:
        """Where a stream ends, as far as is known here; None if nobody follows it."""
        reader = self._readers.get(stream)
        return reader.window.head if reader is not None and reader.is_synced else None

    def now(self) -> float:
        return ASYNC.now()

    def __len__(self) -> int:
        """How many streams are followed, or were a moment ago."""
        return len(self._readers)

    # --- asking the log -------------------------------------------------------------------------

    async def page(self, stream: str, after: Position, limit: int = PAGE) -> Page:
        """What follows a position. Asked once for all who ask at the same time."""
        asked = ("page", stream, after, limit)
        return await self.together.ask(asked, lambda: self.read(stream, after, limit))

    async def read(self, stream: str, after: Position, limit: int = PAGE) -> Page:
        self.counts.reads += 1
        return await self.log.read(stream, after, limit)

    async def load(self, stream: str) -> Snapshot:
        """The state. Asked once for all who ask at the same time."""
        return await self.together.ask(stream, lambda: self._load(stream))

    async def _load(self, stream: str) -> Snapshot:
        self.counts.snapshots += 1
        return await self.log.load(stream)

    # --- the net --------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._net is None or self._net.done():
            self._net = asyncio.ensure_future(self._look_again())
            keep(self._net)

    async def _look_again(self) -> None:
        while self._readers:
            await ASYNC.sleep(NET_S * (1 - NET_JITTER * self._random.random()))
            self._sweep()
            await self._look()

    async def _look(self) -> None:
        """Which streams have moved on although nobody has rung?"""
        readers = [reader for reader in self._readers.values() if not reader.is_over]
        if not readers and not self._stuck:
            self.circuit.gave_up(self)  # there is nothing to be asked
            return
        try:
            heads = await self._heads(readers)
        except Exception as error:  # noqa: BLE001 - whatever it is: the circuit tells of it
            self.circuit.failed(error, self)
            return
        self.circuit.passed(self)
        stuck, self._stuck = self._stuck, {}
        for following in stuck:
            following.wake()
        for reader, head in heads:
            reader.look(head)

    async def _heads(self, readers: Sequence[Reader]) -> list[tuple[Reader, Position]]:
        """Where each stream ends. One of which that cannot be told takes it from no other."""
        heads: list[tuple[Reader, Position]] = []
        parts, asked = [readers], 0
        while parts:
            part = parts.pop()
            asked += 1
            try:
                told = await self.log.heads([reader.stream for reader in part])
            except (CorruptRecordError, SettingsError):
                if asked >= MOST_QUESTIONS:
                    raise
                if len(part) > 1:
                    middle = len(part) // 2
                    parts += part[:middle], part[middle:]
                else:
                    heads += ((reader, NOWHERE) for reader in part)
            else:
                heads += zip(part, told, strict=True)
        return heads

    def _sweep(self) -> None:
        before = self.now() - LINGER_S
        for reader in list(self._readers.values()):
            if reader.left_at <= before and (reader.is_over or not reader.followers):
                self._evict(reader)

    def _evict(self, reader: Reader) -> None:
        if self._readers.get(reader.stream) is reader:
            del self._readers[reader.stream]
        if not reader.followers:
            keep(asyncio.ensure_future(reader.close()))


def parsed(after: Position | str | None) -> tuple[Position | None, Reason | None]:
    """A position, or why there is none."""
    if not isinstance(after, str):
        return after, None
    found = Position.parse(after)
    return (None, "unreadable") if found is None else (found, None)
