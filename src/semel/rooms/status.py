"""What the rooms of a process are doing, for people and probes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import field

from semel.values import value

__all__ = ["Counts", "Histogram", "RoomsStatus", "Times"]

# In seconds: from what memory takes to where people think that nothing happens any more.
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)


@value
class Histogram:
    """How many took how long: up to each bound, and, last, longer than all of them."""

    bounds: tuple[float, ...] = BOUNDS_S
    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    sum_s: float = 0.0


class Times:
    """A histogram while it grows."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def seen(self) -> Histogram:
        return Histogram(BOUNDS_S, tuple(self._counts), self._sum_s)


class Counts:
    """What has happened so far in the rooms of one process, and at their door."""

    def __init__(self) -> None:
        self.connections = 0
        self.joined = 0
        self.requests = 0
        self.repeated = 0
        self.accepted = 0
        self.conflicts = 0
        self.timeouts = 0
        self.updates = 0
        self.gaps = 0
        self.refused: Counter[str] = Counter()
        self.snapshots: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()
        self.action_s = Times()


@value
class RoomsStatus:
    """`rooms` are those in memory, `joined` the clients that are in one, by any connection.

    `requests` are the actions that have reached a room. Of these, `repeated` were answered from
    what is kept, `accepted` have changed a state, and `refused` tells the others by code, with what
    was refused at the door.
    `conflicts`: another process was faster, and the action was applied again. `timeouts` are turns
    that this process has timed out. `updates` were delivered, to everybody; `gaps` were told of by
    clients. `action_s`: from a request to its reply.
    """

    name: str
    rooms: int = 0
    connections: int = 0
    joined: int = 0
    requests: int = 0
    repeated: int = 0
    accepted: int = 0
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    conflicts: int = 0
    timeouts: int = 0
    updates: int = 0
    snapshots: Mapping[str, int] = field(default_factory=dict[str, int])
    gaps: int = 0
    closed: Mapping[str, int] = field(default_factory=dict[str, int])
    action_s: Histogram = Histogram()
    outage: str = ""
    draining: bool = False
    turning: bool = True

    @property
    def ready(self) -> bool:
        return not self.outage and not self.draining
