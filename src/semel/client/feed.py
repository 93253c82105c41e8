"""Follow a feed over HTTP: each entry once, in order, through every cut and restart.

    with feed("https://shop.example/feeds/job-7") as events:
        for event in events:
            match event:
                case Update(data=data): show(data)
                case Reset(state=state): start_again_from(state)

    async with feed(url) as events:
        async for event in events: ...

The iteration ends when the feed does. It connects again by itself, from where it was, for as long
as that may help; `FeedError` says when it does not. `events.cursor` can be kept and given to the
next process as `after=`; it stands behind the event that was handed over last.

What happens is decided by `feed_rules`, and done by `feed_lines`. The flow between them is here,
once for both colours. Leaving a loop early leaves the connection open: use `with`, or `close()`.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, assert_never

from semel.client.feed_lines import AsyncLine, Client, Ending, Line, SyncLine, is_async, opening_of
from semel.client.feed_rules import (
    OK,
    Connect,
    Deliver,
    FeedError,
    FeedEvent,
    Follower,
    Over,
    Read,
    Reset,
    Terms,
    Update,
    parsed,
)
from semel.client.flow import World, place_of
from semel.colour import run
from semel.entries import Position
from semel.errors import SettingsError

__all__ = ["Feed", "FeedError", "FeedEvent", "Reset", "Update", "feed"]

log = logging.getLogger("semel")

_DEFAULT = Terms()


def feed(
    url: str,
    *,
    after: str | Position | None = None,
    last_seq: int | None = None,
    client: Client | None = None,
    headers: Mapping[str, str] | None = None,
    silence_s: float = _DEFAULT.silence_s,
    grace_s: float = _DEFAULT.grace_s,
    limit: int = _DEFAULT.limit,
    world: World | None = None,
) -> Feed:
    """The feed at this address, from its beginning, or from behind `after` or `last_seq`.

    `after` is a cursor, `last_seq` the number of the last event that was seen. A `client` is used
    and left open; without one, each feed has its own. A connection that says nothing for
    `silence_s` is made anew, and so is one that does not bring, in `grace_s`, what the server says
    is there. `limit` is the size of the largest event, in bytes. `world` is time and chance, for
    tests.
    """
    if after is not None and last_seq is not None:
        raise SettingsError("give either after= or last_seq=: each says where to begin")
    position = None if after is None else parsed(str(after))
    if after is not None and position is None:
        raise SettingsError(f"after={after!r} is no cursor; it is what feed(...).cursor was")
    for name, seconds in (("silence_s", silence_s), ("grace_s", grace_s)):
        if not seconds > 0:
            raise SettingsError(f"{name}={seconds!r} must be seconds, more than 0")
    terms = Terms(silence_s=silence_s, grace_s=grace_s, limit=limit)
    chance = (world or World()).chance
    follower = Follower(terms, chance, after=position, last_seq=last_seq)
    return Feed(follower, url, client, dict(headers or {}), world)


class Feed:
    """An iterator, sync or async, over what happens; `feed` makes one.

    It is for one loop at a time. `close` may be called from any thread, and `aclose` from any
    task: the loop ends at once.
    """

    def __init__(
        self,
        follower: Follower,
        url: str,
        client: Client | None,
        headers: Mapping[str, str],
        world: World | None,
    ) -> None:
        self._follower = follower
        self._url = url
        self._client = client
        self._headers = headers
        self._world = world
        self._line: Line | None = None
        self._turn = threading.Lock()
        self._misses = 0  # connections in a row that came to nothing
        self._reason = ""

    @property
    def cursor(self) -> str | None:
        """Behind the event that was handed over last; None before anything is known."""
        return self._follower.cursor

    def state(self) -> Any:
        """Ask for the current state, beside the feed. In async code: `await events.state()`."""
        if self._is_async():
            return self._state(self._new(AsyncLine))
        return run(self._state(self._new(SyncLine)))

    async def _state(self, line: Line) -> Any:
        # On a line of its own: the loop's may have ended, or end meanwhile.
        try:
            response = await line.state()
        finally:
            await line.close()
        if response.is_success:
            return json.loads(response.content)
        answer = opening_of(response, response.content, line.world.wall_s())
        message = f"the server answered {answer.status}: {answer.detail or 'nothing more'}"
        raise FeedError(message, status=answer.status, detail=answer.detail)

    # --- sync ---------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeedEvent:
        line = self._sync_line()
        event = run(self._in_turn(line))
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """End the iteration, from any thread. Whoever is in the loop hangs up on the way out."""
        if self._is_async() and self._line is not None:
            raise SettingsError("this feed is followed by async code: await aclose()")
        self._follower.stop()
        if self._line is not None:
            self._line.cut()
            run(self._clean_up(self._line))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- async --------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FeedEvent:
        event = await self._in_turn(self._async_line())
        if event is None:
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        """End the iteration. Whoever is in the loop hangs up on the way out."""
        self._follower.stop()
        if self._line is not None:
            self._line.cut()
            await self._clean_up(self._line)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # --- the flow, for both -------------------------------------------------------------------

    async def _in_turn(self, line: Line) -> FeedEvent | None:
        if not self._turn.acquire(blocking=False):
            raise RuntimeError("this feed is in a loop already; make another with feed(...)")
        try:
            return await self._next(line)
        finally:
            self._turn.release()
            if self._follower.is_over:
                # Whoever stopped us meanwhile found us here, and left this to us.
                await self._clean_up(line)

    async def _clean_up(self, line: Line) -> None:
        if self._turn.acquire(blocking=False):
            try:
                await line.close()
            finally:
                self._turn.release()

    async def _next(self, line: Line) -> FeedEvent | None:
        follower, world = self._follower, line.world
        while True:
            step = follower.next(world.now_s())
            match step:
                case Deliver(event=event):
                    return event
                case Read(within_s=within_s):
                    await self._read(line, within_s)
                case Connect():
                    await self._connect(line, step)
                case Over(error=error):
                    follower.stop()  # an error is raised once
                    if error is not None:
                        raise error
                    return None
                case _:
                    assert_never(step)

    async def _read(self, line: Line, within_s: float) -> None:
        try:
            got = await line.read(within_s)
        except BaseException:
            # Cancelled, say: what was read is not known, so the next loop begins a new call.
            self._follower.closed(line.world.now_s())
            await line.hang_up()
            raise
        if isinstance(got, bytes):
            self._follower.received(got)
        else:
            self._ended(line, got)

    async def _connect(self, line: Line, step: Connect) -> None:
        await line.hang_up()
        self._log(step)
        if step.after_s > 0:
            await line.pause(step.after_s)
        if self._follower.is_over:
            return
        try:
            got = await line.connect(step)
        except BaseException as error:
            if isinstance(error, FeedError):
                self._follower.stop()
            await line.hang_up()
            raise
        if isinstance(got, Ending):
            self._ended(line, got)
            self._misses += 1
            self._reason = got.reason or "no answer"
        else:
            self._follower.opened(line.world.now_s(), got)
            self._misses = 0 if got.status == OK else self._misses + 1
            self._reason = "" if got.status == OK else f"the server answered {got.status}"

    def _log(self, step: Connect) -> None:
        """Say why, and what is news: that a server is not to be had is, but once."""
        if step.why == "begin":
            return
        said = "semel: %s: connecting again in %.2f s, behind %s (%s)"
        why = self._reason or step.why
        level = logging.WARNING if self._misses == 1 else logging.INFO
        log.log(level, said, place_of(self._url), step.after_s, step.cursor, why)

    def _ended(self, line: Line, ending: Ending) -> None:
        self._reason = ending.reason
        now_s = line.world.now_s()
        if ending.is_time_up:
            self._follower.timed_out(now_s)
        else:
            self._follower.closed(now_s)

    # --- colours ------------------------------------------------------------------------------

    def _is_async(self) -> bool:
        """Is it followed by async code, or would it be from here?"""
        return is_async(self._client) if self._line is None else isinstance(self._line, AsyncLine)

    def _sync_line(self) -> Line:
        return self._of_kind(SyncLine, "async")

    def _async_line(self) -> Line:
        return self._of_kind(AsyncLine, "sync")

    def _of_kind(self, kind: type[SyncLine | AsyncLine], other: str) -> Line:
        if self._line is None:
            self._line = self._new(kind)
        if not isinstance(self._line, kind):
            raise SettingsError(f"this feed is followed by {other} code; make another: feed(...)")
        return self._line

    def _new(self, kind: type[SyncLine | AsyncLine]) -> Line:
        return kind(self._client, self._url, self._headers, self._world)
