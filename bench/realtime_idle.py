"""A crowd that hears nothing: what a connection takes of memory, and all of them of a processor.

The server is new, and has served a few before anybody counts. What the kernel keeps for a socket is
not in the figure, and is the same for everybody.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.http_load import FailedError
from bench.machine import resident
from bench.realtime_crowd import Seat
from bench.realtime_fanout import crowd
from bench.realtime_servers import STAGES, Listening, message_data, new_job
from semel.bus import BlockingPublisher
from support.process import family

JOIN_WITHIN_S = 120.0
WARM = 200
SETTLE_S = 1.0


@dataclass(frozen=True)
class Idle:
    """What `connections` to `streams` took, in one process."""

    connections: int
    streams: int
    bytes_each: float
    cpu_share: float
    """Of one core, over the whole time, heartbeats and looks at the log included."""
    join_s: float


def jobs(redis: str, count: int) -> list[str]:
    """So many jobs that somebody can watch."""
    with BlockingPublisher(redis, stages=STAGES) as publisher:
        found = [new_job() for _ in range(count)]
        for job_id in found:
            publisher.publish(job_id, "vision", STAGES.next_seq("vision"), message_data(0))
    return found


def seats(port: int, of: Sequence[str], count: int) -> list[Seat]:
    return [Seat(port, f"/jobs/{of[n % len(of)]}") for n in range(count)]


def run(server: Listening, taken: Sequence[Seat], *, seconds: float) -> Idle:
    with crowd() as listeners:
        listeners.ask("join", taken[:WARM], JOIN_WITHIN_S)
        listeners.ask("leave")
        time.sleep(SETTLE_S)
        before = _resident(server)
        join_s = listeners.ask("join", taken, JOIN_WITHIN_S)
        time.sleep(SETTLE_S)
        more = _resident(server) - before
        cpu, began = server.cpu_s(), time.monotonic()
        time.sleep(seconds)
        share = (server.cpu_s() - cpu) / (time.monotonic() - began)
        if lost := listeners.ask("lost"):
            raise FailedError(f"{lost} of {len(taken)} were cut off while nothing happened")
    return Idle(len(taken), len({seat.path for seat in taken}), more / len(taken), share, join_s)


def _resident(server: Listening) -> int:
    return sum(map(resident, family(server.pid)))
