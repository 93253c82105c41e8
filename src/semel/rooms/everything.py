"""All that is kept of a stream, from the oldest entry on, and then what comes.

A feed begins with the state where the oldest entries are gone; here there is none, and each entry
that is kept counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from semel.circuit import Circuit
from semel.entries import Entry, Position
from semel.errors import SemelError
from semel.feed import End, Feed, Reset

__all__ = ["everything"]


async def everything(
    feed: Feed, stream: str, circuit: Circuit
) -> AsyncIterator[Sequence[Entry] | None]:
    """Entries as they come; None when it begins anew, and what was told before is not so any more.
    None at all, an empty sequence, says that this was all there is, so far.

    Goes on until the feed is closed. A store that does not answer is waited for.
    """
    never = asyncio.Event()
    try:
        while not feed.is_closed:
            try:
                async with aclosing(_once(feed, stream, circuit)) as found:
                    async for entries in found:
                        yield entries
            except SemelError as error:  # also a database without its tables: somebody makes them
                circuit.failed(error, stream)
                await circuit.wait(never, stream)
    finally:
        circuit.gave_up(stream)


async def _once(
    feed: Feed, stream: str, circuit: Circuit
) -> AsyncGenerator[Sequence[Entry] | None, None]:
    """From the beginning, until it has to begin anew."""
    yield None
    last: Position | None = None
    async for entries, position in _kept(feed, stream):
        last = position
        if entries:
            yield entries
    yield ()
    following = feed.follow(stream, last)
    circuit.passed(stream)
    try:
        while (news := await following.next()) is not None:
            if isinstance(news, Reset | End):
                break
            yield news.entries
    finally:
        following.close()


async def _kept(feed: Feed, stream: str) -> AsyncIterator[tuple[Sequence[Entry], Position]]:
    page = await feed.log.read(stream)
    if page.lost and page.floor is not None:
        yield (), page.floor
        page = await feed.log.read(stream, page.floor)
    while page.entries:
        last = page.entries[-1].position
        yield page.entries, last
        page = await feed.log.read(stream, last)
