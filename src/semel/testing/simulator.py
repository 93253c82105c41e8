"""A world of hosts whose time, chances and failures follow from one integer.

`SimLoop` is an asyncio event loop on which time passes only when nothing else can happen, and on
which the next callback is drawn by lot. Whatever runs on it runs the same way again for the same
seed, so every failure is a number that can be written down:

    python -m semel.testing.simulator --seed 123 --trace

A `Host` is a process that can die (nothing of it runs again, not even a `finally`), be paused
like by SIGSTOP, and have a clock of its own. `Network` loses, delays and doubles what hosts ask
of a server; `FaultyLedger` is a store behind such a network. What goes on in this world, and
what must hold in it, is in `scenario`.

The easy mistake is an abandoned coroutine: Python would run its `finally` blocks as soon as
nobody refers to it. The loop refers to all of them until the run is over, and drops them in
silence.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import gc
import heapq
import itertools
import random
import sys
import time
import warnings
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import iscoroutine
from typing import Any, TypeVar

from semel import colour
from semel.errors import StoreUnavailableError
from semel.stores.memory import _MemoryLedger
from semel.stores.rules import Operation, Row, key_of
from semel.stores.verbs import Verbs

T = TypeVar("T")

# --- time and chance ----------------------------------------------------------------------------


class Host:
    """A process that can be stopped for a while, or for good, with a clock of its own.

    Until `cut_off_until` nothing it sends arrives. Its monotonic clock began at `offset` and runs
    at `rate`; its wall clock is wrong by `skew_s`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.paused_until = 0.0
        self.cut_off_until = 0.0
        self.offset = 0.0
        self.rate = 1.0
        self.skew_s = 0.0

    def __repr__(self) -> str:
        return self.name


HOST: contextvars.ContextVar[Host | None] = contextvars.ContextVar("semel_host", default=None)


class LivelockError(Exception):
    """The step budget is used up: something goes round in circles."""


class DeadlockError(Exception):
    """Nobody can ever run again, and the run is not over."""


class _Handle:
    __slots__ = ("args", "callback", "context", "due", "is_cancelled")

    def __init__(
        self,
        due: float,
        callback: Any,
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        self.due = due
        self.callback = callback
        self.args = args
        # An empty context is false, and not the same as none.
        self.context = contextvars.copy_context() if context is None else context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.due


class SimLoop(asyncio.AbstractEventLoop):
    """An event loop with virtual time and a seeded choice among what is ready."""

    def __init__(self, seed: int, *, budget: int = 20_000) -> None:
        self.chance = random.Random(seed)  # noqa: S311  (chances, not secrets)
        self.clock_s = 0.0
        self.steps = 0
        self.trace: list[tuple[Any, ...]] = []
        self._budget = budget
        self._ready: list[_Handle] = []
        self._timers: list[tuple[float, int, _Handle]] = []
        self._count = itertools.count()
        self._graveyard: list[_Handle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._over = False

    def note(self, what: str, *details: Any) -> None:
        """Write an event into the trace."""
        self.trace.append((self.clock_s, HOST.get(), what, *details))

    # What asyncio asks of a loop. Times are the asking host's.

    def time(self) -> float:
        host = HOST.get()
        return self.clock_s if host is None else host.offset + host.rate * self.clock_s

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> _Handle:
        handle = _Handle(self.clock_s, callback, args, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Any,
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        host = HOST.get()
        rate = 1.0 if host is None else host.rate
        return self.after(delay / rate, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> _Handle:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def after(
        self,
        delay_s: float,
        callback: Any,
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        """Call back after a delay in the world's own time."""
        due = self.clock_s + delay_s if delay_s > 0 else self.clock_s
        handle = _Handle(due, callback, args, context)
        heapq.heappush(self._timers, (due, next(self._count), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        if self._over:
            raise GeneratorExit
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        if self._over:
            _close(coro)
            raise GeneratorExit
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._over

    def is_closed(self) -> bool:
        return self._over

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Nothing: what a host leaves behind when it dies is nobody's to report."""

    # Running.

    def spawn(self, host: Host, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task on a host; what it starts itself runs there too."""
        context = contextvars.copy_context()
        context.run(HOST.set, host)
        return self.create_task(coro, context=context)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run to the end of `main`, then drop whatever is left."""
        collecting = gc.isenabled()
        gc.disable()  # or it closes abandoned coroutines, and with that runs them, at its own time
        asyncio._set_running_loop(self)  # noqa: SLF001
        try:
            task = self.create_task(main)
            while not task.done():
                if self._ready:
                    self._step(self._ready)
                else:
                    self._advance()
            return task.result()
        finally:
            self._bury()
            asyncio._set_running_loop(None)  # noqa: SLF001
            if collecting:
                gc.enable()

    def _step(self, ready: list[_Handle]) -> None:
        drawn = int(self.chance.random() * len(ready)) if len(ready) > 1 else 0
        ready[drawn], ready[-1] = ready[-1], ready[drawn]
        handle = ready.pop()
        if handle.is_cancelled:
            return
        self.steps += 1
        host = handle.context.get(HOST)
        if host is not None:
            if host.dead:
                self._graveyard.append(handle)
                return
            if host.paused_until > self.clock_s:
                heapq.heappush(self._timers, (host.paused_until, next(self._count), handle))
                return
        handle.context.run(handle.callback, *handle.args)

    def _advance(self) -> None:
        timers = self._timers
        if not timers:
            raise DeadlockError(f"nobody can run any more at {self.clock_s:.3f}s")
        if self.steps > self._budget:
            raise LivelockError(f"still not done after {self._budget} steps")
        due, _, handle = heapq.heappop(timers)
        self.clock_s = max(self.clock_s, due)
        self._ready.append(handle)
        while timers and timers[0][0] <= self.clock_s:
            self._ready.append(heapq.heappop(timers)[2])

    def _bury(self) -> None:
        """Close what never ended. Its cleanup code meets a loop on which nothing can begin."""
        self._over = True
        left = [task for task in self._tasks if not task.done()]
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for task in left:
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
                colour._kept.discard(task)  # noqa: SLF001
                _close(task.get_coro())
            for leftovers in (self._tasks, self._graveyard, self._ready, self._timers):
                leftovers.clear()
            if left:
                del left, task
                gc.collect(0)
        sys.unraisablehook = hook


def _close(coro: Any) -> None:
    """Close a coroutine, and those it was given to await and never did."""
    frame = coro.cr_frame
    given = [] if frame is None else [v for v in frame.f_locals.values() if iscoroutine(v)]
    with suppress(BaseException):
        coro.close()
    for other in given:
        _close(other)


class SimClock:
    """The clock of a server in this world."""

    BEGAN_US = 1_700_000_000_000_000

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def now_us(self) -> int:
        return self.BEGAN_US + round(self._loop.clock_s * 1_000_000)


# --- the network and the store behind it --------------------------------------------------------


class NoAnswerError(Exception):
    """Nothing came back in time: lost on the way there, or on the way back."""


@dataclass(slots=True)
class Weather:
    """How likely each fault of the network is, per request."""

    request_lost: float = 0.0
    reply_lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    latency_s: float = 0.02
    timeout_s: float = 0.08
    latest_s: float = 3.0


class Network:
    """Carries questions to a server and answers back, in any weather."""

    def __init__(self, loop: SimLoop, weather: Weather, *, can_be_cut: bool = True) -> None:
        self.weather = weather
        self.can_be_cut = can_be_cut
        self._loop = loop
        self._server = contextvars.Context()

    def faulted(self, kind: str) -> None:
        """Called on the asking host's side for every fault, before it has consequences."""

    def arrived(self, host: Host | None) -> None:
        """Called on the server's side for every request, right after it was served."""

    async def ask(self, serve: Callable[[], T], *, patient: bool = False) -> T:
        """The answer, or `NoAnswerError`; nothing is lost on somebody who is `patient`."""
        weather, chance = self.weather, self._loop.chance.random
        answer: asyncio.Future[T] = self._loop.create_future()
        there_s, back_s = chance() * weather.latency_s, chance() * weather.latency_s
        back = self._loses("reply_lost", weather.reply_lost, patient)
        if self._is("late", weather.late):
            there_s += chance() * weather.latest_s
        if not patient and (back or there_s + back_s > weather.timeout_s):
            self._loop.call_later(weather.timeout_s, _fail, answer)
        if self._cut_off() or self._loses("request_lost", weather.request_lost, patient):
            self._loop.call_later(weather.timeout_s, _fail, answer)
            return await answer
        reply = None if back else (answer, back_s, contextvars.copy_context())
        self._send(there_s, serve, reply)
        if self._is("doubled", weather.doubled):
            self._send(there_s + chance() * weather.latest_s, serve, None)
        return await answer

    def _cut_off(self) -> bool:
        host = HOST.get()
        if host is None or host.cut_off_until <= self._loop.clock_s or not self.can_be_cut:
            return False
        self.faulted("cut_off")
        return True

    def _is(self, kind: str, likely: float) -> bool:
        if likely and self._loop.chance.random() < likely:
            self.faulted(kind)
            return True
        return False

    def _loses(self, kind: str, likely: float, patient: bool) -> bool:
        return not patient and self._is(kind, likely)

    def _send(self, delay_s: float, serve: Callable[[], Any], reply: Any) -> None:
        self._loop.after(delay_s, self._arrive, serve, reply, HOST.get(), context=self._server)

    def _arrive(self, serve: Callable[[], Any], reply: Any, host: Host | None) -> None:
        result = serve()
        if reply is not None:
            answer, back_s, context = reply
            self._loop.after(back_s, _settle, answer, result, context=context)
        self.arrived(host)


def _settle(answer: asyncio.Future[Any], result: Any) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_exception(NoAnswerError("no answer in time"))


class Server(_MemoryLedger):
    """The ledger of a `MemoryStore`, on the simulated server's clock, with its rows in sight."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__(SimClock(loop))
        self.loop = loop

    def now_us(self) -> int:
        return self._clock.now_us()

    def row(self, id: bytes) -> Row | None:
        return self._rows.get(id)

    def serve(self, op: Operation) -> Any:
        """Carry an operation out, now, before the eyes of `watch`."""
        id = key_of(op).id
        before = self._rows.get(id)
        answer = self.answer(op)
        self.watch(op, before, answer, self._rows.get(id))
        return answer

    def answer(self, op: Operation) -> Any:
        return colour.run(self.perform(op))

    def watch(self, op: Operation, before: Row | None, answer: Any, after: Row | None) -> None:
        """Called after every operation; the rows it is given never change."""


class FaultyLedger(Verbs):
    """A host's way to the server: an adapter as a real store's, over a faulty network.

    An operation waits a moment before it is sent, as it would in a batch or for a connection;
    a caller that is cut off there has asked for nothing. One that gets no answer is sent again,
    once, as drivers do.
    """

    def __init__(self, server: Server, network: Network) -> None:
        self.server = server
        self.network = network

    async def perform(self, op: Operation) -> Any:
        await self._gather()
        return await self.ask(lambda: self.server.serve(op))

    async def _gather(self) -> None:
        if self.server.loop.chance.random() < 0.5:
            await asyncio.sleep(self.server.loop.chance.random() * self.network.weather.latency_s)

    async def ask(self, serve: Callable[[], T]) -> T:
        """Ask anything of the server, once more if nothing comes back."""
        try:
            return await self.network.ask(serve)
        except NoAnswerError:
            pass
        try:
            return await self.network.ask(serve)
        except NoAnswerError as error:
            raise StoreUnavailableError("the simulated store did not answer") from error

    async def look(self, id: bytes) -> Any:
        return await self.ask(lambda: colour.run(self.server.look(id)))

    async def records(self, **filters: Any) -> Sequence[Any]:
        return await self.ask(lambda: colour.run(self.server.records(**filters)))

    async def resolve(self, id: bytes, **how: Any) -> bool:
        return await self.ask(lambda: colour.run(self.server.resolve(id, **how)))

    async def forget(self, id: bytes, *, force: bool = False) -> bool:
        return await self.ask(lambda: colour.run(self.server.forget(id, force=force)))

    async def sweep(self, limit: int = 1000) -> int:
        return await self.ask(lambda: colour.run(self.server.sweep(limit)))

    async def guarantees(self) -> Any:
        return await self.ask(lambda: colour.run(self.server.guarantees()))


# --- command line -------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one seed, or as many as fit into the time given."""
    from semel.testing import scenario

    parser = argparse.ArgumentParser(prog="python -m semel.testing.simulator")
    parser.add_argument("--seed", type=int, help="run this one, and say how it went")
    parser.add_argument(
        "--trace", action="store_true", help="with --seed: everything that happened"
    )
    parser.add_argument("--seeds", type=int, default=20_000, help="how many to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this long")
    parser.add_argument("--jobs", type=int, default=2, help="processes to use")
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        report = scenario.run_scenario(asked.seed)
        print(report.told(trace=asked.trace))  # noqa: T201
        return bool(report.violations)
    began = time.perf_counter()
    tally = scenario.campaign(
        asked.first, asked.seeds, jobs=asked.jobs, until=began + 60 * asked.minutes
    )
    print(tally.told(time.perf_counter() - began))  # noqa: T201
    return bool(tally.violations or tally.never_seen())


if __name__ == "__main__":
    sys.exit(main())
