"""One connection: a viewer of one job, from its first frame to its last.

It has no queue, no timer and no clock. The feed wakes it when there is something, and it writes all
that has come since in whole frames, and waits again; under uvicorn, without being woken, as long as
the client takes what is written (see `direct`). Everything else is seen to by the round that
looks at each of them once a second (`look`): signs of life, its age, whether it may still see this,
and whether it takes what is written. Who does not is cut off: what it has not got is in the log.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol, TypeAlias

from semel.colour import ASYNC
from semel.errors import StoreUnavailableError
from semel.feed import End, Reset, Subscription
from semel.feed.values import Burst
from semel.http.asgi import Receive, Send
from semel.http.protocol import Refusal
from semel.http.sse import frames
from semel.http.sse.direct import line_of
from semel.http.sse.limits import Limits
from semel.http.sse.status import GatewayCounts
from semel.http.sse.view import Everything, Some, View

__all__ = ["Closing", "Pace", "Viewer"]

ASK_JITTER = 0.2

Closing: TypeAlias = Literal["", "gone", "slow", "old", "drained", "refused", "failed"]
"""Why it ends: not yet; the client has left; it is too slow; it is as old as it may get; the
gateway ends; `authorise` refused it or failed; `project` failed."""


class Pace(Protocol):
    """How often what is due. Durations are seconds; None is never."""

    @property
    def heartbeat_s(self) -> float: ...

    @property
    def reauthorise_s(self) -> float | None: ...


class Viewer:
    """Writes what its subscription has, as its view shows it.

    `may_go_on` gives its principal, and raises `Refusal` when it may not. `abort` drops the
    connection with what is in its buffers; where a server offers no such thing, the task is
    cancelled, which is all that we can do. `is_gone` tells whether the connection is over.
    """

    __slots__ = (
        "_abort",
        "_asks_at",
        "_counts",
        "_errand",
        "_is_dropped",
        "_is_gone",
        "_is_writing",
        "_line",
        "_may_go_on",
        "_old_at",
        "_pace",
        "_seen",
        "_send",
        "_still_since",
        "_task",
        "_view",
        "_writes",
        "closing",
        "following",
    )

    def __init__(
        self,
        following: Subscription,
        view: View,
        send: Send,
        *,
        pace: Pace,
        old_at: float,
        may_go_on: Callable[[], Awaitable[Any]],
        abort: Callable[[], object] | None,
        is_gone: Callable[[], bool] | None,
        counts: GatewayCounts,
    ) -> None:
        self.following = following
        self.closing: Closing = ""
        self._view = view
        self._send = send
        self._pace = pace
        self._old_at = old_at
        self._may_go_on = may_go_on
        # Not for a view of one's own: what is made for it is nobody else's, and may fail.
        self._line = line_of(send) if isinstance(view, Everything) else None
        self._abort = abort
        self._is_gone = is_gone
        self._counts = counts
        self._task = asyncio.current_task()
        self._is_dropped = False
        self._is_writing = False
        self._writes = 0
        self._errand: Literal["", "beat", "ask"] = ""
        # What the round knows: how many writes there were, and since when there was none.
        self._seen = 0
        self._still_since = now = ASYNC.now()
        asks_s = pace.reauthorise_s
        self._asks_at = math.inf if asks_s is None else now + self._soon(asks_s)

    @staticmethod
    def _soon(seconds: float) -> float:
        """A little sooner, so that those who came together are not asked about together."""
        return seconds * (1 - ASK_JITTER * random.random())  # noqa: S311

    # --- from outside ---------------------------------------------------------------------------

    def look(self, limits: Limits, now: float) -> None:
        """What is due? Called once a second, for each: what is due is a second late at most."""
        if self._is_gone is not None and self._is_gone():
            # Who has asked for something else on the same connection is told there that it is
            # lost, and not here: uvicorn knows only of the last request.
            self.close("gone")
        if self._writes != self._seen:
            self._seen, self._still_since = self._writes, now
        # Also of those who are always behind: they come to it between two writes.
        if now >= self._old_at:
            self.close("old")
        elif now >= self._asks_at:
            assert self._pace.reauthorise_s is not None
            self._asks_at = now + self._soon(self._pace.reauthorise_s)
            self._send_on("ask")
        still_s = now - self._still_since
        if self._is_writing:  # which nobody can see, unless it has to wait
            if self._is_slow(limits, still_s):
                self.drop("slow")
        elif still_s >= self._pace.heartbeat_s and not self._errand:
            self._send_on("beat")

    def _is_slow(self, limits: Limits, still_s: float) -> bool:
        if still_s > limits.write_within_s:
            return True
        return self.following.is_behind(limits.behind_events, limits.behind_bytes)

    def _send_on(self, errand: Literal["beat", "ask"]) -> None:
        self._errand = errand
        self.following.wake()

    def close(self, why: Closing) -> None:
        """End it between two frames."""
        self.closing = self.closing or why
        self.following.wake()

    def drop(self, why: Closing) -> None:
        """End it at once, whatever is in the way: the client, the store, or who decides."""
        self.close(why)
        self._is_dropped = True
        if self._abort is not None:
            self._abort()
        if self._task is not None:
            self._task.cancel()

    # --- its life -------------------------------------------------------------------------------

    async def run(self, receive: Receive, retry_ms: int) -> None:
        listening = asyncio.ensure_future(self._listen(receive))
        try:
            if self.closing or not await self._greet(retry_ms):
                await self._follow()
        except asyncio.CancelledError:
            if not self._is_dropped:
                raise
            assert self._task is not None
            self._task.uncancel()  # it was us
        finally:
            listening.cancel()

    async def _listen(self, receive: Receive) -> None:
        """Until the client is gone. Nobody else would tell us."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.close("gone")

    async def _greet(self, retry_ms: int) -> bool:
        """The first frame, and what there is to begin with. Was it the last, too?

        The cursor it begins from is told only when it is known that one can go on from there: who
        is cut off in between would never hear of the hole.
        """
        following = self.following
        cursor, is_sound = following.position, True
        news = following.take()
        if news is None and following.needs_log:
            try:
                news = await following.fetch()
            except StoreUnavailableError:
                is_sound = False
        is_sound = is_sound and not isinstance(news, Reset)
        hello = frames.hello(following.head, cursor if is_sound else None, retry_ms)
        return await self._tell(news, hello)

    async def _follow(self) -> None:
        following, view = self.following, self._view
        while not self.closing:
            if self._errand:
                await self._run_errand()
                continue  # it may have been told to leave
            news = following.take()
            if type(news) is Burst:
                self._counts.events += len(news.entries)
                await self._write(view.shown(news))
                if following.is_at_head:
                    await self._wait()
            elif news is not None:
                if await self._tell(news):
                    return
            elif following.needs_log:
                await self._catch_up()
            else:
                await self._wait()
        if self.closing not in {"gone", "slow"}:
            await self._write(b"", more=False)

    async def _catch_up(self) -> None:
        try:
            news = await self.following.fetch()
        except StoreUnavailableError:
            return  # it is woken when that is over
        await self._tell(news)

    async def _wait(self) -> None:
        """Until there is something that cannot be written at once."""
        following = self.following
        following.at_once = None if self._line is None else self._write_at_once
        try:
            await following.wait()
        finally:
            following.at_once = None

    def _write_at_once(self) -> bool:
        """Write what has come. Is there nothing else to be done?"""
        following, line = self.following, self._line
        assert line is not None
        if self.closing or self._errand or not line.is_free:
            return False
        burst = following.take_entries()
        if burst is None:
            return False
        self._counts.events += len(burst.entries)
        self._writes += 1
        try:
            line.write(self._view.shown(burst))
        except Exception:  # noqa: BLE001 - whatever it is: the others are to be told, too
            self.close("gone")
        return following.is_at_head

    async def _tell(self, news: Burst | Reset | End | None, before: bytes = b"") -> bool:
        """Write it, behind what is to come before. Was it the last?"""
        match news:
            case Burst():
                self._counts.events += len(news.entries)
                before += self._view.shown(news)
            case Reset():
                self._counts.resets[news.reason] += 1
                before += self._view.reset(news)
            case End():
                await self._write(before + frames.end(news.position), more=False)
                return True
            case None:
                pass
        if before:
            await self._write(before)
        return False

    async def _run_errand(self) -> None:
        errand, self._errand = self._errand, ""
        if errand == "ask":
            await self._ask_again()
        else:
            await self._write(frames.head(self.following.position))

    async def _ask_again(self) -> None:
        try:
            principal = await self._may_go_on()
        except Refusal:
            self.close("refused")
        else:
            if isinstance(self._view, Some):
                self._view.principal = principal

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        self._is_writing = True
        self._writes += 1
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except OSError:  # some servers say so that the client is gone
            self.close("gone")
        self._is_writing = False
        if self._view.has_failed:
            self.close("failed")
