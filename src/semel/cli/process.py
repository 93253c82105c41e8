"""A process that runs until it is told to end.

The first SIGTERM or SIGINT asks it to finish what is in hand and to hand over its shards. A second
one, or the end of its grace, ends it at once: nothing is lost by that, as by a crash, but others
wait for its leases. That must work also when a handler blocks the loop, or a thread never comes
back, so a thread of its own sees to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from types import FrameType, TracebackType
from typing import Annotated, Any, Protocol, Self, TypeAlias, TypeVar

import typer

from semel.bus import Router
from semel.cli import line, show
from semel.cli.command import REFUSED, seconds
from semel.colour import keep
from semel.health import Watch, serve
from semel.health.watch import Shows
from semel.relay import Relay
from semel.worker import Worker

__all__ = ["GRACE", "Grace", "Http", "Quiet", "run"]


class Serving(Shows, Protocol):
    """A gateway or rooms with their server: known by what it does, since that is not ours."""

    @property
    def at(self) -> str:
        """Where people find what it serves."""
        ...

    async def run(self) -> None: ...

    def stop(self) -> None: ...


Runs: TypeAlias = Relay | Worker | Router | Serving
P = TypeVar("P", Relay, Worker, Router, Serving)

# A worker's own grace is 25 s; what looks after processes kills them after 30 s.
GRACE = "28s"

Grace = Annotated[
    str, typer.Option(metavar="TIME", help="How long it may take to end when it is told to.")
]
Http = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Answer /healthz, /readyz and /metrics there.",
        show_default=False,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.")]


def run(
    opened: Callable[[], AbstractAsyncContextManager[P]],
    *,
    check: Callable[[P], Awaitable[None]] | None = None,
    about: str,
    http: str,
    grace: str,
    quiet: bool,
    urls: tuple[str, ...] = (),
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run what is opened until it ends.

    `check` raises what no waiting would mend. `urls` are those whose passwords are not to be told.
    `loop` makes the event loop, if it is to be another one than usual.
    """

    def redact(text: str) -> str:
        for url in urls:
            text = show.redact(text, url)
        return text

    grace_s = seconds("--grace", grace)
    with line.opened(quiet=quiet, redact=redact) as told, _Ending(grace_s) as ending:
        telling = _Telling(told, redact, quiet=quiet)
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(_run(opened, check, ending, telling, about, http))


class _Telling:
    def __init__(self, told: line.Line, redact: Callable[[str], str], *, quiet: bool) -> None:
        self._line = told
        self._redact = redact
        self._quiet = quiet

    def say(self, text: str) -> None:
        """Whoever has read along may be gone: no reason not to do what is told here."""
        if not self._quiet:
            with contextlib.suppress(OSError, ValueError):
                self._line.say(self._redact(text))

    @contextlib.asynccontextmanager
    async def about(self, watch: Watch) -> AsyncIterator[None]:
        """Tell how it goes while the block runs."""
        telling = asyncio.create_task(line.tell(watch, self._line, self._redact))
        keep(telling)  # which logs what goes wrong with it: no reason to end what it tells of
        try:
            yield
        finally:
            telling.cancel()
            await asyncio.wait([telling])


async def _run(
    opened: Callable[[], AbstractAsyncContextManager[P]],
    check: Callable[[P], Awaitable[None]] | None,
    ending: _Ending,
    telling: _Telling,
    about: str,
    http: str,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        part = await stack.enter_async_context(opened())
        watch = Watch(part)
        stack.push_async_callback(watch.close)
        url = await stack.enter_async_context(serve(watch, at=http)) if http else ""
        telling.say(f"{watch.title}: {about}")
        if not isinstance(part, Relay | Worker | Router):
            telling.say(f"{watch.title}: {part.at}")
        if url:
            telling.say(f"{watch.title}: health at {url}{_without_metrics()}")
        ending.asks(lambda: _stop(part, watch, telling))
        await stack.enter_async_context(telling.about(watch))
        if check is not None:
            await check(part)
        await part.run()
        telling.say(f"{watch.title}: ended")


def _without_metrics() -> str:
    if find_spec("prometheus_client") is not None:
        return ""
    return ", without /metrics: pip install 'semel[metrics]'"


def _stop(part: Runs, watch: Watch, telling: _Telling) -> None:
    telling.say(f"{watch.title}: ending, as soon as what is in hand is finished")
    part.stop()


# --- signals ------------------------------------------------------------------------------------


class _Ending:
    """Asks for an end with the first signal, and makes one with the second, or after the grace."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()  # may be put to by a handler
        self._ask: Callable[[], object] = lambda: None
        self._asked = False
        self._lock = threading.Lock()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        threading.Thread(target=self._wait, name="semel-ending", daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._told)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._signals.put(0)

    def asks(self, stop: Callable[[], object]) -> None:
        """Who is to be asked; at once, if it was told to end before there was anybody."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._ask = lambda: loop.call_soon_threadsafe(stop)
            if self._asked:
                self._ask()

    def _told(self, number: int, _: FrameType | None) -> None:
        self._signals.put(number)

    def _wait(self) -> None:
        if not self._signals.get():
            return
        with self._lock:
            self._asked = True
            self._ask()
        why = "told to end twice"
        try:
            if not self._signals.get(timeout=self._grace_s):
                return
        except queue.Empty:
            why = f"not done {show.span(self._grace_s)} after it was told to end"
        try:
            sys.stderr.write(f"semel: {why}; it ends at once, and others wait for its leases\n")
            sys.stderr.flush()
        finally:
            os._exit(REFUSED)
