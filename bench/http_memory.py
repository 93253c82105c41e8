"""How much memory a request takes while its handler runs: a crowd of them, in a new process.

The process is new each time, because one that has served before has room to spare, and requests
in flight would take none.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

from bench import http_load, http_server
from bench.http_bench import DOORS, shown
from bench.http_load import FailedError
from bench.http_server import PATIENCE_S, AppServer
from bench.machine import resident
from support.process import HOST, wait_until

CROWD = 200


@dataclass
class Taken:
    """Bytes per request in flight behind one door, each time; or why there are none."""

    door: str
    each: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.each) if self.each and self.error is None else None


def run(store: str, times: int) -> list[Taken]:
    """What each door takes; nothing where the system does not tell."""
    if not Path("/proc/self/status").exists():
        return []
    found = [Taken(door) for door in DOORS]
    for _ in range(times):
        for taken in found:
            _look(taken, store)
    return found


def _look(taken: Taken, store: str) -> None:
    if taken.error is not None:
        return
    try:
        taken.each.append(_crowded(taken.door, store))
    except (FailedError, OSError) as error:  # a TimeoutError is one too
        taken.error = shown(error)


def _crowded(door: str, store: str) -> float:
    server = http_server.start(door, store)
    try:
        server.record(http_load.new_stamp())
        server.count()
        before = resident(server.pid)
        with _held(server):
            return (resident(server.pid) - before) / CROWD
    finally:
        server.stop()


@contextlib.contextmanager
def _held(server: AppServer) -> Iterator[None]:
    """So many requests, each with a key and a connection of its own, whose handlers wait."""
    stamp = http_load.new_stamp()
    connections = [HTTPConnection(HOST, server.port, timeout=PATIENCE_S) for _ in range(CROWD)]
    try:
        for number, connection in enumerate(connections):
            connection.request("POST", "/held", *http_server.content(http_load.key(stamp, number)))
        wait_until(lambda: server.count()["waiting"] == CROWD, "every handler to run")
        yield
        server.ask("PUT", "/held")
        for connection in connections:
            connection.getresponse().read()
    finally:
        for connection in connections:
            connection.close()
