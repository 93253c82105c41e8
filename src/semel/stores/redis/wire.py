"""The async way to one server: a standing connection on which calls overtake nobody.

A connection is borrowed from redis-py, which has opened it, secured it, logged in and found the
master; then its transport speaks to us (`Wire`). A call that finds nothing under way is written at
once, by the caller itself: no task, no further turn of the event loop. Calls that come in a crowd
are written together at the end of the turn, and while Redis works on one such write the next one
gathers (`Exchange`). Replies come in the order of the calls, so each belongs to the oldest.

A connection that breaks is replaced once and what it left unanswered is sent again: every verb can
be repeated. Silence is not retried, for it may be followed by more of it: whoever waits when the
oldest call has waited for `timeout_s` is told, and does not know whether the call took effect.

redis-py's housekeeping (logging in again with a fresh token, moving away before maintenance, the
health check) belongs to its pool, so the connection goes back there whenever nothing has been asked
for `timeout_s`, and for a moment every `timeout_s` when something always is. Push messages are not
looked at. The easy mistake is to keep a connection of a pool that has few: see `room`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import hiredis
import redis

from semel.stores.redis.faults import (
    BROKEN,
    STUCK,
    has_moved,
    is_forgotten,
    refused,
    unreachable,
    was_demoted,
)
from semel.stores.redis.scripts import Call

MORE: Any = object()
PUSH: Any = getattr(hiredis, "PushNotification", ())

# A crowd is written in parts, so that Redis works on the first while others are still asking. What
# is paid for a write is small change for this many calls.
ENOUGH = 24


def room(pool: Any) -> int:
    """How many of a pool's connections may be kept between calls: a tenth.

    The pool may be shared with the rest of a program, which must not run out for our sake. Of a
    pool that makes its users queue, or that reads along to keep a cache, none are kept.
    """
    if "Blocking" in type(pool).__name__ or getattr(pool, "cache", None) is not None:
        return 0
    return int(pool.max_connections) // 10


class Lender(Protocol):
    """Whom connections to one server are borrowed from."""

    keeps: bool
    """May a connection be kept while nothing is under way?"""

    async def lend(self) -> Any:
        """A connection of redis-py, ready to be spoken on."""
        ...

    async def take_back(self, connection: Any) -> None: ...


class Asked:
    """A call on its way, and whoever waits for its reply."""

    __slots__ = ("call", "future", "lost", "since")

    def __init__(self, call: Call, future: asyncio.Future[Any], since: float) -> None:
        self.call = call
        self.future = future
        self.since = since
        self.lost = 0
        """How many connections broke before its reply came."""

    def settle(self, reply: Any) -> None:
        if isinstance(reply, Exception):
            self.fail(refused(self.call, reply))
        elif not self.future.done():
            self.future.set_result(reply)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


Elsewhere = Callable[[Sequence[Asked], Exception], None]
"""Takes over calls that this server cannot answer, where there are other servers."""


class Wire(asyncio.Protocol):
    """One connection of redis-py, spoken on directly until it is handed back or breaks."""

    def __init__(self, exchange: Exchange, connection: Any) -> None:
        self.connection = connection
        self.asked: deque[Asked] = deque()
        self.is_clear = True
        """Does the transport take more?"""
        self.is_tired = False
        """Is the connection due to go back? Then nothing more is written on it."""
        self._exchange = exchange
        self._written = 0
        self._taught: dict[bytes, int] = {}
        """By script: after how many calls its source was sent."""
        self._lessons: list[bytes] = []
        self._reader = hiredis.Reader(notEnoughData=MORE)
        # redis-py keeps its streams to itself; test_redis_wire.py notices when they are renamed.
        self._transport: asyncio.Transport = connection._writer.transport  # noqa: SLF001
        self._streams: Any = self._transport.get_protocol()
        # A push message may have come with the last reply of the login; anything else may not.
        self._reader.feed(bytes(connection._reader._buffer))  # noqa: SLF001
        self._hand_out()
        self._transport.set_protocol(self)

    # --- out --------------------------------------------------------------------------------

    def write(self, asked: Asked) -> None:
        self.asked.append(asked)
        self._written += 1
        self._transport.write(asked.call.packed)

    def write_all(self, asked: Sequence[Asked]) -> None:
        self.asked.extend(asked)
        self._written += len(asked)
        self._transport.write(b"".join([one.call.packed for one in asked]))

    def teach(self, asked: Asked) -> None:
        """Ask again: with the script's source, unless that is on its way already.

        What is asked again leaves in one write, when all the replies that are here are handed out.
        """
        refused_at = self._written - len(self.asked) - 1
        script = asked.call.script
        if refused_at < self._taught.get(script.sha, -1):
            self._lessons.append(asked.call.packed)
        else:
            self._taught[script.sha] = self._written
            self._lessons.append(asked.call.in_full())
        self._written += 1
        self.asked.append(asked)

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def take_all(self) -> list[Asked]:
        """Whatever has no reply yet; it is somebody else's from here on."""
        taken = list(self.asked)
        self.asked.clear()
        return taken

    def pause_writing(self) -> None:
        self.is_clear = False

    def resume_writing(self) -> None:
        self.is_clear = True
        self._exchange.send()

    # --- in ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            count = self._hand_out()
        except hiredis.ProtocolError as error:
            self.abandon(error)
            return
        if self._lessons and not self.is_closing:
            self._transport.write(b"".join(self._lessons))
            self._lessons.clear()
        self._exchange.handed_out(self, count)

    def _hand_out(self) -> int:
        """Give every reply that is here to whoever waits for it."""
        next_reply, asked, count = self._reader.gets, self.asked, 0
        while (reply := next_reply()) is not MORE:
            if isinstance(reply, PUSH):
                continue
            if not asked:
                # Nobody asked for this: the next reply would be taken for another call's.
                raise hiredis.ProtocolError("a reply that nobody asked for")
            one = asked.popleft()
            count += 1
            if isinstance(reply, Exception):
                if not self._exchange.was_refused(self, one, reply):
                    break
            elif not one.future.done():
                one.future.set_result(reply)
        return count

    # --- the end ----------------------------------------------------------------------------

    def hand_back(self) -> bool:
        """Let redis-py speak again. False when that is not possible: the connection is broken."""
        if self.asked or self._reader.has_data() or self.is_closing:
            self._transport.abort()
            return False
        self._transport.set_protocol(self._streams)
        return True

    def abandon(self, error: Exception) -> None:
        """Break the connection off: the exchange hears of it now, redis-py when it is closed."""
        self._transport.abort()
        self._exchange.broke(self, error)

    def connection_lost(self, exc: Exception | None) -> None:
        # redis-py's own closing waits for this.
        self._streams.connection_lost(exc)
        self._exchange.broke(self, exc or redis.ConnectionError("Redis closed the connection"))


class Exchange:
    """Where calls to one server meet its wire, on one event loop."""

    def __init__(
        self, lender: Lender, timeout_s: float, elsewhere: Elsewhere | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._lender = lender
        self._timeout_s = timeout_s
        self._elsewhere = elsewhere
        self._wire: Wire | None = None
        self._waiting: list[Asked] = []
        self._is_crowded = False
        """Did more than one reply come at once? Then more than one caller is about to ask."""
        self._is_planned = False
        self._worn: tuple[Any, bool] | None = None
        """A connection to give back, and whether it is sound."""
        self._task: asyncio.Task[Exception | None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    # --- asking -----------------------------------------------------------------------------

    def submit(self, call: Call) -> asyncio.Future[Any]:
        """The future reply to this call."""
        loop, wire = self._loop, self._wire
        future: asyncio.Future[Any] = loop.create_future()
        asked = Asked(call, future, loop.time())
        if wire is None or wire.asked or self._is_crowded or wire.is_tired or not wire.is_clear:
            self._waiting.append(asked)
            if not self._is_planned:
                self._plan()
            elif len(self._waiting) >= ENOUGH:
                self.send()
        else:
            wire.write(asked)
        if self._timer is None:
            self._timer = loop.call_later(self._timeout_s, self._look_at_the_clock)
        return future

    def _plan(self) -> None:
        """See to it that what waits is sent: when this turn is over, or there is a wire."""
        if self._wire is not None:
            self._is_planned = True
            self._loop.call_soon(self._send_as_planned)
        elif self._task is None:
            self._task = self._loop.create_task(self._connect())
            self._task.add_done_callback(self._connected)

    def _send_as_planned(self) -> None:
        self._is_planned = False
        self.send()

    def send(self) -> None:
        """Write everything that waits, if it may be written; if not, we hear when it may."""
        wire = self._wire
        if wire is None or wire.is_tired or not wire.is_clear or wire.is_closing:
            return
        # Cancelled before it was sent: it never happened.
        ready = [asked for asked in self._waiting if not asked.future.done()]
        self._waiting.clear()
        if ready:
            wire.write_all(ready)

    # --- connections ------------------------------------------------------------------------

    async def _connect(self) -> Exception | None:
        """Give a worn connection back, and borrow one if somebody waits for it; or say why not."""
        try:
            await self._give_back()
            if self._waiting:
                connection = await self._lender.lend()
                self._worn = connection, False
                self._wire = Wire(self, connection)
                self._worn = None
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits to be told
            return error
        return None

    async def _give_back(self) -> None:
        if self._worn is None:
            return
        (connection, is_sound), self._worn = self._worn, None
        try:
            if not is_sound:
                await connection.disconnect(nowait=True)
            await self._lender.take_back(connection)
        except asyncio.CancelledError:
            self._worn = connection, False
            raise
        except BROKEN:
            pass  # redis-py has it, and puts right what failed when it is needed

    def _connected(self, task: asyncio.Task[Exception | None]) -> None:
        self._task = None
        error = None if task.cancelled() else task.result()
        if error is not None:
            self._pass_on(self._take_waiting(), error)
        elif self._wire is not None:
            self.send()
        elif self._waiting and not self._loop.is_closed():
            # `asyncio.run` cancels every task at its end, and their cleanups come after that.
            self._plan()

    def _rest(self) -> None:
        """Give the connection back to redis-py, and borrow it again when it is needed."""
        if self._wire is not None:
            wire, self._wire = self._wire, None
            self._worn = wire.connection, wire.hand_back()
        if self._worn is not None:
            self._plan()

    async def aclose(self) -> None:
        """Tell everybody who waits, and give the connection back."""
        task = self._task
        self._fail_all(redis.ConnectionError("the store was closed"))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if task is not None:
            await asyncio.wait([task])
        await self._give_back()

    # --- what comes back --------------------------------------------------------------------

    def handed_out(self, wire: Wire, count: int) -> None:
        self._is_crowded = count > 1
        if wire.asked or wire is not self._wire:
            return
        if wire.is_tired or not (self._lender.keeps or self._waiting):
            self._rest()

    def was_refused(self, wire: Wire, asked: Asked, error: Exception) -> bool:
        """An error is the reply to this call. Can the wire still be used?"""
        if asked.future.done():
            # Nobody waits, and it was not carried out. Asked again, it could come after the
            # withdrawal that its caller has sent behind it.
            return True
        if is_forgotten(error):
            wire.teach(asked)
        elif self._elsewhere is not None and has_moved(error):
            self._elsewhere([asked], error)
        elif was_demoted(error) and not asked.lost:
            wire.asked.appendleft(asked)
            wire.abandon(error)
            return False
        else:
            asked.settle(error)
        return True

    def broke(self, wire: Wire, error: Exception) -> None:
        """The wire is gone: what it left unanswered is sent again, once."""
        if wire is not self._wire:
            return
        self._wire, self._worn = None, (wire.connection, False)
        self._is_crowded = False
        unanswered = wire.take_all()
        if self._elsewhere is not None:
            self._pass_on(unanswered, error)
        else:
            for asked in unanswered:
                asked.lost += 1
                if asked.lost > 1:
                    asked.fail(unreachable(error))
            self._waiting[:0] = [asked for asked in unanswered if not asked.future.done()]
        if self._waiting:
            self._plan()

    def _pass_on(self, unanswered: Sequence[Asked], error: Exception) -> None:
        """No connection: another server may know, or nobody does."""
        if self._elsewhere is not None and not isinstance(error, STUCK):
            self._elsewhere(unanswered, error)
            return
        for asked in unanswered:
            asked.fail(unreachable(error))

    # --- silence ----------------------------------------------------------------------------

    def _look_at_the_clock(self) -> None:
        self._timer = None
        since = self._oldest()
        if since is None:
            self._rest()
        elif self._loop.time() >= since + self._timeout_s:
            self._fail_all(TimeoutError(f"no reply within {self._timeout_s:g} s"))
        else:
            self._timer = self._loop.call_at(since + self._timeout_s, self._look_at_the_clock)
            self._tire()

    def _oldest(self) -> float | None:
        """Since when somebody waits; a call that was sent counts though its caller has gone."""
        times = [asked.since for asked in self._waiting if not asked.future.done()]
        if self._wire is not None:
            times += [asked.since for asked in self._wire.asked]
        return min(times, default=None)

    def _tire(self) -> None:
        if self._wire is not None:
            self._wire.is_tired = True
            if not self._wire.asked:
                self._rest()

    def _fail_all(self, error: Exception) -> None:
        everybody = self._take_waiting()
        if self._wire is not None:
            wire, self._wire = self._wire, None
            everybody += wire.asked
            self._worn = wire.connection, wire.hand_back()
        if self._task is not None:
            self._task.cancel()
        for asked in everybody:
            asked.fail(unreachable(error))

    def _take_waiting(self) -> list[Asked]:
        taken, self._waiting = self._waiting, []
        return taken
