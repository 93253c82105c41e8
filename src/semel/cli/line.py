"""What a long-running command tells of itself: one line, always the latest, on stderr.

On a terminal the line is rewritten every second. Elsewhere, where lines are kept, it is told at
the start, when something changes, and once a minute. What is logged meanwhile stands above it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from semel.bus import RouterStatus
from semel.cli import show
from semel.colour import ASYNC
from semel.health import Report, Watch
from semel.health.watch import Status
from semel.http.sse import GatewayStatus
from semel.relay import RelayStatus
from semel.rooms.status import RoomsStatus
from semel.worker import WorkerStatus

__all__ = ["Line", "opened", "tell"]

EVERY_S = 1.0
KEPT_EVERY_S = 60.0


class Line(Protocol):
    """Where a command tells of itself."""

    kept: bool
    """Does every line stay? Then the same thing is not said twice."""

    def say(self, text: str) -> None:
        """A line that stays."""
        ...

    def show(self, text: str) -> None:
        """The latest, in place of what was shown before."""
        ...


class _Terminal:
    kept = False

    def __init__(self, live: Live) -> None:
        self._live = live

    def say(self, text: str) -> None:
        self._live.console.print(Text(_lines(text)), soft_wrap=True)

    def show(self, text: str) -> None:
        self._live.update(Text(_lines(text), no_wrap=True, overflow="ellipsis"), refresh=True)


class _Kept:
    kept = True

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def say(self, text: str) -> None:
        sys.stderr.write(f"{show.when(datetime.now(UTC))} {_lines(text)}\n")
        sys.stderr.flush()

    def show(self, text: str) -> None:
        if not self._quiet:
            self.say(text)


def _lines(text: str) -> str:
    """A traceback keeps its lines; nothing in them reaches the terminal as a sequence."""
    return "\n".join(show.clean(line) for line in text.splitlines())


@contextlib.contextmanager
def opened(*, quiet: bool, redact: Callable[[str], str]) -> Iterator[Line]:
    """A line on stderr, and what is logged above it, unless somebody looks after logs already."""
    console = Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as stack:
        line: Line = _Kept(quiet=quiet)
        if console.is_terminal and not quiet:
            live = stack.enter_context(Live(console=console, auto_refresh=False, transient=True))
            console.show_cursor()  # a process that is killed would leave it hidden
            line = _Terminal(live)
        if not logging.getLogger("semel").hasHandlers():
            handler = _Handler(line, redact)
            logging.getLogger().addHandler(handler)
            stack.callback(logging.getLogger().removeHandler, handler)
        yield line


class _Handler(logging.Handler):
    def __init__(self, line: Line, redact: Callable[[str], str]) -> None:
        super().__init__(logging.WARNING)
        self._line = line
        self._redact = redact

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._line.say(self._redact(f"{record.levelname}: {self.format(record)}"))
        except Exception:  # noqa: BLE001 - a log that cannot be written must not end the work
            self.handleError(record)


# --- telling ------------------------------------------------------------------------------------


async def tell(watch: Watch, line: Line, redact: Callable[[str], str]) -> None:
    """Tell how it goes, for ever."""
    told_at, done, state = ASYNC.now(), 0, None
    while True:
        status, now = watch.status(), ASYNC.now()
        if not line.kept or _state(status) != state or now - told_at >= KEPT_EVERY_S:
            report = await watch.report()
            rate = (_done(report.status) - done) / max(now - told_at, EVERY_S)
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                line.show(redact(f"{watch.title}: {_told(report, rate)}"))
            told_at, done, state = now, _done(report.status), _state(report.status)
        await ASYNC.sleep(EVERY_S)


def _state(status: Status) -> tuple[Any, ...]:
    """What people want to hear of when it changes."""
    if isinstance(status, GatewayStatus | RoomsStatus):
        return (status.draining, bool(status.outage))
    state = (status.owned, status.members, status.waits_for, bool(status.outage))
    if isinstance(status, RelayStatus):
        return (*state, status.refused, tuple(status.held), tuple(status.stopped))
    return (*state, status.lost) if isinstance(status, RouterStatus) else state


def _done(status: Status) -> int:
    if isinstance(status, GatewayStatus):
        return status.events
    if isinstance(status, RoomsStatus):
        return status.accepted
    if isinstance(status, RelayStatus):
        return status.published
    if isinstance(status, RouterStatus):
        return status.routed
    return sum(topic.applied for topic in status.topics.values())


def _told(report: Report, rate: float) -> str:
    status = report.status
    if isinstance(status, GatewayStatus):
        said = _shown(status, rate)
    elif isinstance(status, RoomsStatus):
        said = _played(status, rate)
    else:
        said = _worked(report, status, rate)
    return ", ".join([*said, *(" ".join(why.split()) for why in report.why)])


def _shown(status: GatewayStatus, rate: float) -> list[str]:
    said = [f"{status.connections:,} connections to {status.streams:,} jobs"]
    said += [f"{status.events:,} events sent", f"{rate:,.0f}/s"]
    resets, slow = sum(status.resets.values()), status.closed.get("slow", 0)
    said += [f"{resets:,} resets"] if resets else []
    said += [f"{slow:,} cut off"] if slow else []
    return said


def _played(status: RoomsStatus, rate: float) -> list[str]:
    said = [f"{status.joined:,} clients in {status.rooms:,} rooms"]
    said += [f"{status.accepted:,} actions", f"{rate:,.0f}/s"]
    refused, slow = sum(status.refused.values()), status.closed.get("slow", 0)
    said += [f"{refused:,} refused"] if refused else []
    said += [f"{slow:,} cut off"] if slow else []
    return said


def _worked(
    report: Report, status: RelayStatus | WorkerStatus | RouterStatus, rate: float
) -> list[str]:
    said = [f"{len(status.owned)} of {status.shards} shards"]
    said += [f"waits for the lease of {each}" for each in status.waits_for]
    if isinstance(status, RelayStatus):
        said += [f"{status.published:,} published", f"{rate:,.0f}/s", *_behind(report)]
        said += [f"{status.refused:,} refused"] if status.refused else []
        said += [f"{topic} waits" for topic in status.held]
    elif isinstance(status, RouterStatus):
        refused = sum(status.refused.values())
        said += [f"{status.routed:,} routed", f"{rate:,.0f}/s"]
        said += [f"{refused:,} passed over"] if refused else []
        said += [f"events lost {status.lost:,} times"] if status.lost else []
        said += [] if status.lag_s is None else [f"lag {show.span(status.lag_s)}"]
    else:
        held = sum(topic.held for topic in status.topics.values())
        said += [f"{_done(status):,} applied", f"{rate:,.0f}/s", f"{held:,} held"]
        said += [] if status.lag_s is None else [f"lag {show.span(status.lag_s)}"]
    return said


def _behind(report: Report) -> list[str]:
    if report.lag is None:
        return ["lag unknown"]
    return [f"lag {show.span(report.lag.age_s)}", f"{report.lag.unpublished:,} unpublished"]
