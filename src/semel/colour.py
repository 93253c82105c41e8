"""One body, two runners.

Every flow is written once, as `async def` over ports. Async code awaits it. Sync code drives it
with `run`: over a ledger of the sync colour nothing ever suspends, so the coroutine finishes in
one `send(None)`, on the caller's own thread, with no event loop. What the two colours do
differently, sleeping, waiting, keeping a lease alive, guarding against cancellation, is behind
`Colour` and nowhere else.

The easy mistake is to await something that suspends (an `asyncio` future, an async driver) in a
flow of the sync colour. `run` refuses it; stores are asked for their colour before any flow
starts, so that nothing is half done by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")

log = logging.getLogger("semel")


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine that never suspends to its end, on this thread."""
    try:
        coro.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coro.close()
    raise RuntimeError(
        "a flow of the sync colour tried to suspend; its store handed out a ledger of the async "
        "colour for a sync call, which is a defect of that store"
    )


def after_fork(work: Callable[[], None]) -> None:
    """Do this first in every forked child; where there is no fork there is nothing to do."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=work)


def before_fork(work: Callable[[], None]) -> None:
    """Call `work` before each fork, in the process that forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=work)


class Timer(Protocol):
    """Something that will happen unless it is cancelled."""

    def cancel(self) -> None: ...


class Waiter(Protocol):
    """One party that waits for a ring."""

    async def wait(self, timeout_s: float) -> bool:
        """True when rung, False when the time is up."""
        ...

    def ring(self) -> None:
        """Wake it, from any thread."""
        ...


class Colour(Protocol):
    """What sync and async code do differently."""

    name: Literal["sync", "async"]

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def home(self) -> asyncio.AbstractEventLoop | None:
        """The loop that the caller runs in, if it runs in one."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def waiter(self) -> Waiter: ...

    async def shield(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Finish the work even when the caller is cancelled meanwhile; then let that through.

        A coroutine that is being closed cannot await any more, so nothing is done for it.
        """
        ...

    def later(self, delay_s: float, work: Callable[[], Coroutine[Any, Any, None]]) -> Timer:
        """Run `work` in the background after a delay, unless the timer is cancelled first."""
        ...


# --- sync ---------------------------------------------------------------------------------------


class _ThreadWaiter:
    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    async def wait(self, timeout_s: float) -> bool:
        rung = self._event.wait(timeout_s)
        self._event.clear()
        return rung

    def ring(self) -> None:
        self._event.set()


class _Entry:
    __slots__ = ("_alarm", "due", "work")

    def __init__(
        self, alarm: _Alarm, due: float, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self._alarm = alarm
        self.due = due
        self.work = work

    def cancel(self) -> None:
        self._alarm.entries.discard(self)


class _Alarm:
    """One daemon thread per process that runs what falls due; started on first use.

    Setting and cancelling an alarm happen on every guarded call and must cost next to nothing:
    they touch a set, and the thread is woken only when it would sleep too long. Waking it costs
    more than a whole call, so it looks again of its own accord for a while before it sleeps for
    good: calls that follow each other find it up. What falls due is rare, and runs in a thread
    of its own.
    """

    LINGERS_S = 1.0

    def __init__(self) -> None:
        self.entries: set[_Entry] = set()
        self._looks_at = math.inf
        # In C: a signal handler that raises inside an Event would leave its lock taken for ever.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def at(self, due: float, work: Callable[[], Coroutine[Any, Any, None]]) -> _Entry:
        entry = _Entry(self, due, work)
        self.entries.add(entry)
        if due < self._looks_at:
            self._wake.put(None)
        if self._thread is None:
            self._start()
        return entry

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="semel-alarm", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    # While Python shuts down, or out of threads: the call counts more.
                    log.warning("semel: leases are not renewed, no thread can start: %s", error)
                    return
                self._thread = thread

    def _run(self) -> None:
        lingers = True
        while True:
            # "Never" comes before the look: whoever sets an alarm meanwhile wakes us again.
            while not self._wake.empty():
                self._wake.get_nowait()
            self._looks_at = math.inf
            now = time.monotonic()
            self._ring(now)
            first = min((entry.due for entry in list(self.entries)), default=math.inf)
            if first == math.inf and lingers:
                first = now + self.LINGERS_S
            self._looks_at = first
            lingers = self._woken(None if first == math.inf else first - time.monotonic())

    def _woken(self, timeout_s: float | None) -> bool:
        """Sleep, and say whether somebody woke us before the time."""
        try:
            self._wake.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except queue.Empty:
            return False
        return True

    def _ring(self, now: float) -> None:
        for entry in list(self.entries):
            if entry.due <= now:
                entry.cancel()
                self._begin(entry)

    def _begin(self, entry: _Entry) -> None:
        """In a thread of its own: a store that hangs must not keep the others from renewing."""
        try:
            threading.Thread(target=_finish, args=(entry,), name="semel-due", daemon=True).start()
        except RuntimeError:  # out of threads
            _finish(entry)


def _finish(entry: _Entry) -> None:
    try:
        run(entry.work())
    except Exception:
        log.exception("semel: background work failed")


class SyncColour:
    """Threads: blocks where async code would await."""

    name: Literal["sync", "async"] = "sync"

    def __init__(self) -> None:
        self._alarm = _Alarm()
        # A child has none of the parent's threads, and its copy of the lock may be held for ever.
        after_fork(self._after_fork)

    def _after_fork(self) -> None:
        self._alarm = _Alarm()

    def now(self) -> float:
        return time.monotonic()

    def home(self) -> None:
        return None

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - the sync colour blocks: that is its nature

    def waiter(self) -> Waiter:
        return _ThreadWaiter()

    async def shield(self, work: Coroutine[Any, Any, T]) -> T:
        return await work

    def later(self, delay_s: float, work: Callable[[], Coroutine[Any, Any, None]]) -> Timer:
        return self._alarm.at(time.monotonic() + delay_s, work)


# --- async --------------------------------------------------------------------------------------


class _LoopWaiter:
    __slots__ = ("_future", "_loop", "_rung")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self._rung = False

    async def wait(self, timeout_s: float) -> bool:
        if not self._rung:
            self._future = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self._wake)
            try:
                await self._future
            finally:
                timer.cancel()
                self._future = None
        rung, self._rung = self._rung, False
        return rung

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def _ring(self) -> None:
        self._rung = True
        self._wake()

    def ring(self) -> None:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            self._ring()
        else:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits there
                self._loop.call_soon_threadsafe(self._ring)


def _start(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    keep(asyncio.ensure_future(work()))


_kept: set[asyncio.Future[Any]] = set()


def keep(task: asyncio.Future[Any]) -> None:
    """Hold a background task until it is done; the loop itself holds tasks only weakly."""
    _kept.add(task)
    task.add_done_callback(_drop)


def _drop(task: asyncio.Future[Any]) -> None:
    _kept.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("semel: background work failed", exc_info=error)


class AsyncColour:
    """The running event loop: time is the loop's, so a simulated loop simulates time."""

    name: Literal["sync", "async"] = "async"

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def home(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def waiter(self) -> Waiter:
        return _LoopWaiter()

    async def shield(self, work: Coroutine[Any, Any, T]) -> T | None:
        if isinstance(sys.exception(), GeneratorExit):
            work.close()
            return None
        task = asyncio.ensure_future(work)
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                if task.cancelled():
                    raise
                cancelled = error
            except BaseException:  # noqa: BLE001 - the work's own error: raised by result() below
                break
        if cancelled is not None:
            _consume(task)
            raise cancelled
        return task.result()

    def later(self, delay_s: float, work: Callable[[], Coroutine[Any, Any, None]]) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, _start, work)


async def answers_of(asked: Iterable[Awaitable[T]]) -> list[T]:
    """Every answer, or the first error once all are through: none goes on unseen.

    What is still on its way while it is asked again could arrive behind the second question.
    """
    answers: list[T] = []
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


async def in_own_task(work: Awaitable[T]) -> T:
    """Do it where it cannot cancel us; when we are, so is it, and waited for.

    Whoever cancels the task that it runs in cannot be told from somebody who stops all of us, in
    one and the same task. In its own, it has failed.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await ASYNC.shield(_ended(task))
        raise
    if task.cancelled():
        raise RuntimeError("it has cancelled the task that it ran in")
    return task.result()


async def _ended(task: asyncio.Future[Any]) -> None:
    await asyncio.wait([task])
    _consume(task)


def away_from(home: asyncio.AbstractEventLoop | None) -> bool:
    """Is this a worker thread of somebody whose home is that loop?"""
    if home is None:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False


def from_away(home: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Let the loop do the work, and wait for it in this thread."""
    return asyncio.run_coroutine_threadsafe(work, home).result()


def _consume(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("semel: cleaning up after a cancelled call failed: %s", error)


SYNC: Colour = SyncColour()
ASYNC: Colour = AsyncColour()
