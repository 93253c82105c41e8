"""Watching a job: what has happened to it, and what happens next, in the order of its log.

    async with Watcher(store) as watcher:
        async for event in watcher.subscribe("job-7", last_seq=12):
            ...

`last_seq` is the number of the last event somebody has had: it goes on behind that event. Numbers
need not follow the order of the log (a stage is tried again, two stages run at once), so it is the
event's place that counts, and not what is larger: only where the event is not in the log is every
event with a larger number told, and no other.

The easy mistake is to let the number of each event that comes be the new mark: whatever comes late
with a smaller one would be swallowed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from semel.bus.jobs import checked_domain, seq_of, state_of, stream_of
from semel.entries import Entry, Position, beginning
from semel.errors import SettingsError
from semel.feed import Feed, Reason, Reset, Update
from semel.feed.subscription import REPLAY_MOST
from semel.keys import plain
from semel.ports import LogStore
from semel.stores.log_rules import name_of
from semel.values import value

__all__ = ["Start", "Watcher", "checked_stream", "seq_in", "start_behind"]

# Smaller than every number.
NO_SEQ = -1


@value
class Start:
    """Where watching begins: at a position, or with a reset; `only_above`: these numbers only."""

    after: Position | None = None
    lost: Reason | None = None
    only_above: int | None = None


def checked_stream(domain: str, job_id: str) -> str:
    """Where the job's events are; `SettingsError` for what no job can be called."""
    return name_of(stream_of(domain, name_of(plain("job_id", job_id), "job")), "job")


async def start_behind(feed: Feed, stream: str, last_seq: int) -> Start:
    """Behind the last event of this number, if it is there."""
    if last_seq <= 0:
        return Start()
    found: Position | None = None
    after = beginning(stream)
    page = await feed.page(stream, after)
    is_trimmed = page.lost and page.floor is not None
    if is_trimmed and page.floor is not None:
        after = page.floor
        page = await feed.page(stream, after)
    if page.head.offset - after.offset > REPLAY_MOST:
        return Start(lost="overrun")
    while page.entries:
        for entry in page.entries:
            if seq_in(entry) == last_seq:
                found = entry.position
        page = await feed.page(stream, page.entries[-1].position)
    if found is not None:
        return Start(found)
    return Start(lost="trimmed") if is_trimmed else Start(only_above=last_seq)


def seq_in(entry: Entry) -> int:
    """The number of the event; one that is smaller than all others where there is none."""
    try:
        return seq_of(entry)
    except (ValueError, KeyError, TypeError):
        return NO_SEQ


class Watcher:
    """Watches jobs of one domain, in a store or the one at a URL. To be closed, as a feed is."""

    def __init__(self, store: LogStore | str, *, domain: str = "scan") -> None:
        self._domain = checked_domain(domain)
        self._feed = Feed(store)

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
        await self._feed.aclose()

    async def state(self, job_id: str) -> dict[str, Any]:
        """The job as it stands; its `life` is "unknown" where there is none."""
        return state_of(await self._feed.load(checked_stream(self._domain, job_id)))

    async def subscribe(
        self, job_id: str, last_seq: int = 0, *, after: Position | str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Each event behind that number, or behind a cursor, once, in the order of the log.

        Ends with the job. Where events are lost, one comes that has `reset`, the reason, and the
        `state` and `position` it goes on from, and no `seq`.
        """
        stream = checked_stream(self._domain, job_id)
        if last_seq and after is not None:
            raise SettingsError("give last_seq= or after=, not both: they may be two places")
        start = await start_behind(self._feed, stream, last_seq)
        begin = start.after if after is None else after
        async for news in self._feed.subscribe(stream, begin, lost=start.lost):
            if isinstance(news, Update):
                if start.only_above is None or seq_in(news.entry) > start.only_above:
                    yield json.loads(news.entry.data)
            elif isinstance(news, Reset):
                yield {
                    "reset": news.reason,
                    "position": str(news.snapshot.position),
                    "state": state_of(news.snapshot),
                }
