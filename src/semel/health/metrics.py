"""The same as Prometheus reads it, made from reports when it is asked for.

Nothing is counted here: relays, workers, routers, gateways and rooms count for themselves, and this
tells it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from semel.bus import RouterStatus
from semel.health.watch import Report, Status
from semel.http.sse.status import GatewayStatus
from semel.relay import RelayStatus
from semel.rooms.status import Histogram, RoomsStatus
from semel.worker import WorkerStatus

__all__ = ["TYPE", "written"]

TYPE = CONTENT_TYPE_LATEST


def written(reports: Sequence[Report]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(reports))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, reports: Sequence[Report]) -> None:
        self._reports = reports

    def collect(self) -> Iterable[Metric]:
        for kind, label, told in KINDS:
            reports = [report for report in self._reports if isinstance(report.status, kind)]
            if reports:
                yield from (one.family(label, reports) for one in told)


# --- what is told -------------------------------------------------------------------------------

Samples: TypeAlias = Iterable[tuple[Sequence[str], float]]
"""The values of `labels`, and the number; none where nothing can be told."""


class _Told(NamedTuple):
    name: str
    about: str
    samples: Callable[[Report], Samples]
    labels: tuple[str, ...] = ()
    counts: bool = False

    def family(self, owner: str, reports: Sequence[Report]) -> Metric:
        make = CounterMetricFamily if self.counts else GaugeMetricFamily
        family = make(self.name, self.about, labels=[owner, *self.labels])
        for report in reports:
            for values, number in self.samples(report):
                family.add_metric([getattr(report.status, owner), *values], number)
        return family


class _Timed(NamedTuple):
    """How long something took each time, as a histogram."""

    name: str
    about: str
    read: Callable[[Any], Histogram]

    def family(self, owner: str, reports: Sequence[Report]) -> Metric:
        family = HistogramMetricFamily(self.name, self.about, labels=[owner])
        for report in reports:
            times = self.read(report.status)
            family.add_metric([getattr(report.status, owner)], _buckets(times), times.sum_s)
        return family


def _buckets(times: Histogram) -> Sequence[tuple[str, float]]:
    """As Prometheus has them: each with all that were faster."""
    bounds = [*map(floatToGoString, times.bounds), "+Inf"]
    return list(zip(bounds, accumulate(times.counts), strict=True))


def _one(read: Callable[[Any], float | None]) -> Callable[[Report], Samples]:
    """A number of the status, if there is one."""

    def samples(report: Report) -> Samples:
        number = read(report.status)
        return [] if number is None else [((), number)]

    return samples


def _lag(name: str) -> Callable[[Report], Samples]:
    """Not told while the store does not answer: a zero would look like good news."""
    return lambda report: [] if report.lag is None else [((), getattr(report.lag, name))]


def _each(name: str) -> Callable[[Report], Samples]:
    """1 for each key of a mapping in the status."""
    return lambda report: [((str(key),), 1) for key in getattr(report.status, name)]


def _by(name: str, among: Iterable[str] = ()) -> Callable[[Report], Samples]:
    """The numbers of a mapping in the status.

    Those `among` are told also while they are 0: what is first heard of as 7 has, for Prometheus,
    not grown.
    """
    zeros = dict.fromkeys(among, 0)
    return lambda report: [((k,), n) for k, n in {**zeros, **getattr(report.status, name)}.items()]


def _topic(name: str) -> Callable[[Report], Samples]:
    def samples(report: Report) -> Samples:
        assert isinstance(report.status, WorkerStatus)
        return [((topic,), getattr(each, name)) for topic, each in report.status.topics.items()]

    return samples


def _party(kind: str) -> Iterator[_Told]:
    yield _Told(f"{kind}_shards", "Shards there are.", _one(lambda s: s.shards))
    yield _Told(f"{kind}_shards_owned", "Shards it owns.", _one(lambda s: len(s.owned)))
    yield _Told(f"{kind}_members", "How many share the shards.", _one(lambda s: s.members))
    yield _Told(
        f"{kind}_circuit_open",
        "1 while the store or the broker does not answer.",
        _one(lambda s: bool(s.outage)),
    )


RELAY = (
    _Told(
        "semel_relay_published",
        "Events the broker has taken.",
        _one(lambda s: s.published),
        counts=True,
    ),
    _Told(
        "semel_relay_repeated",
        "Events the broker had already when they were published.",
        _one(lambda s: s.repeated),
        counts=True,
    ),
    _Told(
        "semel_relay_refused",
        "Events the broker refused, published without their payload.",
        _one(lambda s: s.refused),
        counts=True,
    ),
    _Told(
        "semel_relay_swept",
        "Published events deleted from the outbox.",
        _one(lambda s: s.swept),
        counts=True,
    ),
    _Told(
        "semel_relay_lag_seconds", "Age of the oldest event that is not published.", _lag("age_s")
    ),
    _Told("semel_relay_unpublished", "Events that are not published.", _lag("unpublished")),
    _Told("semel_relay_topic_held", "1 for each topic that waits.", _each("held"), ("topic",)),
    _Told(
        "semel_relay_shard_stopped",
        "1 for each shard that stands still until people decide.",
        _each("stopped"),
        ("shard",),
    ),
    *_party("semel_relay"),
)

TOPIC = {
    "applied": "Messages that have had their effect.",
    "seen": "Messages that had their effect before.",
    "held": "Messages that wait in the parked store, or have waited there.",
    "failed": "Tries that failed.",
    "unreadable": "What is no event of ours.",
}

WORKER = (
    *(
        _Told(f"semel_worker_{name}", about, _topic(name), ("topic",), counts=True)
        for name, about in TOPIC.items()
    ),
    _Told(
        "semel_worker_lag_seconds",
        "How old the last message was when it was handled.",
        _one(lambda s: s.lag_s),
    ),
    *_party("semel_worker"),
)

ROUTER = (
    _Told(
        "semel_router_routed",
        "Events that were added to their jobs' logs.",
        _one(lambda s: s.routed),
        counts=True,
    ),
    _Told(
        "semel_router_repeated",
        "Events that were there when they came.",
        _one(lambda s: s.repeated),
        counts=True,
    ),
    _Told(
        "semel_router_refused",
        "Events that were passed over, by reason.",
        _by("refused"),
        ("why",),
        counts=True,
    ),
    _Told(
        "semel_router_lost",
        "How often a shard had lost events that may not have been routed.",
        _one(lambda s: s.lost),
        counts=True,
    ),
    _Told(
        "semel_router_lag_seconds",
        "Age of the oldest event that is being routed, or was last.",
        _one(lambda s: s.lag_s),
    ),
    *_party("semel_router"),
)

_SHOWN = {
    "opened": "Streams that were begun.",
    "resumed": "Streams that were begun with a cursor.",
    "events": "Events that were sent, to everybody.",
    "rings": "Rings of the bell that were heard.",
    "found": "Reads that found what no ring had told of.",
    "snapshots": "States that were loaded.",
}

GATEWAY = (
    _Told("semel_gateway_connections", "Streams that are open.", _one(lambda s: s.connections)),
    _Told("semel_gateway_streams", "Jobs that are followed.", _one(lambda s: s.streams)),
    *(
        _Told(f"semel_gateway_{name}", about, _one(attrgetter(name)), counts=True)
        for name, about in _SHOWN.items()
    ),
    _Told(
        "semel_gateway_resets",
        "Viewers that were told of a hole, by reason.",
        _by("resets"),
        ("reason",),
        counts=True,
    ),
    _Told(
        "semel_gateway_closed",
        "Streams that are over, by reason; slow ones were cut off.",
        _by("closed"),
        ("reason",),
        counts=True,
    ),
    _Told(
        "semel_gateway_refused",
        "Requests that were refused, by status.",
        _by("refused"),
        ("status",),
        counts=True,
    ),
    _Told(
        "semel_gateway_circuit_open",
        "1 while the log does not answer.",
        _one(lambda s: bool(s.outage)),
    ),
)

_PLAYED = {
    "requests": "Actions that have reached a room.",
    "repeated": "Actions that were answered from what is kept.",
    "accepted": "Actions that have changed a state.",
    "conflicts": "Actions that were applied again, since another process was faster.",
    "timeouts": "Turns that this process has timed out.",
    "updates": "Updates that were delivered, to everybody.",
    "gaps": "Gaps that clients have told of.",
}

# All but `join` say that a client had lost its place.
_SNAPSHOTS = (
    *("join", "reconnect", "gap", "manual", "stale"),
    *("trimmed", "ahead", "forked", "unreadable", "gone", "overrun"),
)

ROOMS: Sequence[_Told | _Timed] = (
    _Told("semel_rooms_rooms", "Rooms in memory.", _one(lambda s: s.rooms)),
    _Told("semel_rooms_connections", "Connections that are open.", _one(lambda s: s.connections)),
    _Told("semel_rooms_joined", "Clients that are in a room.", _one(lambda s: s.joined)),
    *(
        _Told(f"semel_rooms_{name}", about, _one(attrgetter(name)), counts=True)
        for name, about in _PLAYED.items()
    ),
    _Told(
        "semel_rooms_refused",
        "Actions that were refused, by code.",
        _by("refused"),
        ("code",),
        counts=True,
    ),
    _Told(
        "semel_rooms_snapshots",
        "Snapshots that were sent, by reason.",
        _by("snapshots", _SNAPSHOTS),
        ("reason",),
        counts=True,
    ),
    _Told(
        "semel_rooms_closed",
        "Connections that are over, by reason.",
        _by("closed"),
        ("reason",),
        counts=True,
    ),
    _Timed("semel_rooms_action_seconds", "From a request to its reply.", lambda s: s.action_s),
    _Told(
        "semel_rooms_circuit_open",
        "1 while the log does not answer.",
        _one(lambda s: bool(s.outage)),
    ),
    _Told(
        "semel_rooms_draining",
        "1 while it lets nobody in, and is about to end.",
        _one(lambda s: s.draining),
    ),
)

KINDS: Sequence[tuple[type[Status], str, Sequence[_Told | _Timed]]] = (
    (RelayStatus, "name", RELAY),
    (WorkerStatus, "group", WORKER),
    (RouterStatus, "name", ROUTER),
    (GatewayStatus, "domain", GATEWAY),
    (RoomsStatus, "name", ROOMS),
)
