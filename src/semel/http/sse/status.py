"""What a gateway is doing, and has done, for people and probes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from semel.values import value

__all__ = ["GatewayCounts", "GatewayStatus"]


@dataclass(slots=True)
class GatewayCounts:
    """What a gateway has done so far."""

    opened: int = 0
    resumed: int = 0
    events: int = 0
    resets: Counter[str] = field(default_factory=Counter[str])
    closed: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[int] = field(default_factory=Counter[int])


@value
class GatewayStatus:
    """What a gateway is doing, for people and probes.

    `connections` there are now, to `streams` jobs. Counted from its start: `opened` streams,
    `resumed` of them with a cursor; `events` sent, to all; `resets` by reason; `closed` by reason,
    of which `slow` are those that were cut off; `refused` by status. `rings` of the bell were
    heard, and `found` is what no ring has told of; `snapshots` were loaded. `outage`
    says why the log cannot be read.
    """

    domain: str
    connections: int
    streams: int
    opened: int
    resumed: int
    events: int
    resets: Mapping[str, int]
    closed: Mapping[str, int]
    refused: Mapping[str, int]
    rings: int
    found: int
    snapshots: int
    outage: str = ""
    draining: bool = False
    turning: bool = True

    @property
    def ready(self) -> bool:
        return not self.outage and not self.draining
