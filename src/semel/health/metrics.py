"""The same as Prometheus reads it, made from reports when it is asked for.

Nothing is counted here: relays, workers, routers and gateways count for themselves, and this tells
it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from semel.bus import RouterStatus
from semel.health.watch import Report
from semel.http.sse.status import GatewayStatus
from semel.relay import RelayStatus
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
                yield from (_family(one, label, reports) for one in told)


# --- what is told -------------------------------------------------------------------------------

Samples: TypeAlias = Iterable[tuple[Sequence[str], float]]
"""The values of `labels`, and the number; none where nothing can be told."""


class _Told(NamedTuple):
    name: str
    about: str
    samples: Callable[[Report], Samples]
    labels: tuple[str, ...] = ()
    counts: bool = False


def _family(told: _Told, owner: str, reports: Sequence[Report]) -> Metric:
    make = CounterMetricFamily if told.counts else GaugeMetricFamily
    family = make(told.name, told.about, labels=[owner, *told.labels])
    for report in reports:
        for values, number in told.samples(report):
            family.add_metric([getattr(report.status, owner), *values], number)
    return family


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


def _by(name: str) -> Callable[[Report], Samples]:
    """The numbers of a mapping in the status."""
    return lambda report: [((key,), n) for key, n in getattr(report.status, name).items()]


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

KINDS = (
    (RelayStatus, "name", RELAY),
    (WorkerStatus, "group", WORKER),
    (RouterStatus, "name", ROUTER),
    (GatewayStatus, "domain", GATEWAY),
)
