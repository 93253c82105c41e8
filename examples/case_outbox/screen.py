"""How it goes, for whoever watches: a table that stays in its place, or a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from semel.health import Report
from semel.relay import RelayStatus
from semel.worker import WorkerStatus

LINE_EVERY_S = 2.0

HEAD = ("group", "topic", "applied", "seen", "held", "lag")


class Screen(Protocol):
    """Where it is shown."""

    def show(self, relay: Report, workers: Sequence[WorkerStatus]) -> None: ...


@contextlib.contextmanager
def opened() -> Iterator[Screen]:
    """A table on a terminal, if rich is there to draw it."""
    try:
        from rich.live import Live
    except ModuleNotFoundError:
        yield Lines()
        return
    if not sys.stdout.isatty():
        yield Lines()
        return
    with Live(auto_refresh=False) as live:
        yield Table(live)


class Lines:
    """For a file, or for a terminal without rich."""

    def __init__(self) -> None:
        self._said_at = -LINE_EVERY_S

    def show(self, relay: Report, workers: Sequence[WorkerStatus]) -> None:
        if time.monotonic() - self._said_at < LINE_EVERY_S:
            return
        self._said_at = time.monotonic()
        groups = [f"{row[0]} {row[2]} applied, {row[4]} held" for row in rows(workers)]
        print("; ".join([title(relay), *groups]), flush=True)


class Table:
    """For a terminal."""

    def __init__(self, live: object) -> None:
        self._live = live

    def show(self, relay: Report, workers: Sequence[WorkerStatus]) -> None:
        from rich import box
        from rich.table import Table as RichTable

        table = RichTable(box=box.SIMPLE, title=title(relay), title_justify="left")
        for name in HEAD:
            table.add_column(name, justify="left" if name in {"group", "topic"} else "right")
        for row in rows(workers):
            table.add_row(*row)
        self._live.update(table, refresh=True)


def title(relay: Report) -> str:
    assert isinstance(relay.status, RelayStatus)
    published = relay.status.published
    if relay.lag is None:
        return f"{published:,} events published; the database does not say how many wait"
    waiting = relay.lag.unpublished
    lag = milliseconds(relay.lag.age_s)
    return f"{published + waiting:,} events committed, {published:,} published, lag {lag}"


def rows(workers: Sequence[WorkerStatus]) -> list[tuple[str, ...]]:
    return [
        (
            worker.group,
            topic,
            f"{count.applied:,}",
            f"{count.seen:,}",
            f"{count.held:,}",
            milliseconds(worker.lag_s),
        )
        for worker in workers
        for topic, count in worker.topics.items()
    ]


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.0f} ms"
