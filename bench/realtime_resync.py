"""Everybody is cut off at once, misses something and comes back: how long until each has it all?

A client waits for as long as its `retry:` said, asks with its cursor, and when it is sent away
comes back after `Retry-After`. Twice: once to the gateway they were cut from; and once to another
one, which has nothing in memory, and the log does not have what was missed, so that everybody is
told the state. The time counts from the cut.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

from bench.realtime_crowd import HOST
from bench.realtime_fanout import crowd
from bench.realtime_idle import jobs, seats
from bench.realtime_servers import STAGES, Listening, message_data
from semel.bus import BlockingPublisher

JOIN_WITHIN_S = 60.0
BACK_WITHIN_S = 60.0
MISSED = 5


@dataclass(frozen=True)
class Back:
    """When each was where the log ends, in seconds after the cut, and what that took."""

    took_s: list[float]
    sent_away: int
    snapshots: int
    streams: int
    resets: int


def run(
    server: Listening,
    redis: str,
    *,
    connections: int,
    streams: int,
    to: Listening | None = None,
) -> Back:
    """`to`: another gateway, which finds nothing in the log."""
    known, other = jobs(redis, streams), to or server
    with crowd() as listeners:
        listeners.ask("join", seats(server.port, known, connections), JOIN_WITHIN_S)
        time.sleep(1.0)
        before = status(other)
        began = time.monotonic()
        listeners.ask("cut")
        last = _missed(redis, known, trims=to is not None)
        late_s = time.monotonic() - began
        took, sent_away = listeners.ask("come_back", other.port, last, BACK_WITHIN_S)
        after = status(other)
    return Back(
        took_s=[late_s + each for each in took],
        sent_away=sent_away,
        snapshots=after["snapshots"] - before["snapshots"],
        streams=streams,
        resets=sum(after["resets"].values()) - sum(before["resets"].values()),
    )


def _missed(redis: str, known: list[str], *, trims: bool) -> dict[str, int]:
    """Say something to each job; by path, what was last."""
    last = {}
    first = STAGES.next_seq("vision", 1)
    with BlockingPublisher(redis, stages=STAGES) as publisher:
        for job_id in known:
            for seq in range(first, first + MISSED):
                stamp = time.monotonic_ns()
                publisher.publish(job_id, "vision", seq, message_data(stamp))
            last[f"/jobs/{job_id}"] = stamp
    if trims:
        _trim(redis, known)
    return last


def _trim(redis: str, known: list[str]) -> None:
    """All but the last entry of each: no cursor leads anywhere."""
    from semel.bus.jobs import stream_of
    from semel.colour import SYNC
    from semel.colour import run as driven
    from semel.settings import as_log_store

    store = as_log_store(redis)
    for job_id in known:
        driven(store.log(SYNC).trim(stream_of("scan", job_id), MISSED))
    store.close()


def status(server: Listening) -> dict[str, Any]:
    line = HTTPConnection(HOST, server.port, timeout=30)
    try:
        line.request("GET", "/status")
        found: dict[str, Any] = json.loads(line.getresponse().read())
        return found
    finally:
        line.close()
