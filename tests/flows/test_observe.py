"""The shipped rules in a real Prometheus that reads the real `/metrics`."""

from __future__ import annotations

import asyncio
import contextlib
import re

import pytest

from semel import observe
from semel.health import serve
from semel.rooms.status import Counts, RoomsStatus
from semel.stores import MemoryStore
from support import binaries
from support.prometheus import watching

RECORDED = (
    "idempotency_cache_hit_rate",
    "version_gap_count",
    "snapshot_request_rate",
    "action_processing_time_p95",
)

ACTIONS = {
    "SemelRoomsRequestsRepeated": "Look for a bug in the client",
    "SemelRoomsVersionGaps": "Check the network and the servers",
    "SemelRoomsSnapshotsRequested": "Performance needs work",
    "SemelRoomsActionsSlow": "Look at the store first",
    "SemelRoomsActionsVerySlow": "Look at the store first",
}


class Tables:
    """Rooms in which as much happens as is wished, fifty times a second."""

    shown = "rooms table"

    def __init__(self):
        self.store = MemoryStore()
        self.counts = Counts()
        self.bad = False

    def status(self):
        counts = self.counts
        return RoomsStatus(
            "table",
            joined=counts.joined,
            requests=counts.requests,
            repeated=counts.repeated,
            updates=counts.updates,
            gaps=counts.gaps,
            snapshots=dict(counts.snapshots),
            action_s=counts.action_s.seen(),
        )

    async def play(self):
        while True:
            self._happen(self.counts)
            await asyncio.sleep(0.02)

    def _happen(self, counts):
        counts.joined = 10 if self.bad else 100_000
        counts.requests += 100
        counts.repeated += 11 if self.bad else 9
        counts.updates += 100
        counts.gaps += 6 if self.bad else 4
        counts.snapshots["gap"] += 6 if self.bad else 4
        for _ in range(10):
            counts.action_s.add(0.9 if self.bad else 0.09)


@contextlib.asynccontextmanager
async def playing(tables):
    task = asyncio.create_task(tables.play())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def faster(rules):
    """The same in seconds."""
    return re.sub(r"for: \d+m", "for: 1s", rules.replace("[5m]", "[2s]"))


async def until(ask, met):
    async with asyncio.timeout(30):
        while not met(told := await ask()):
            await asyncio.sleep(0.05)
    return told


@pytest.mark.slow
async def test_each_alert_fires_when_it_goes_badly_and_ends_when_it_does_not():
    try:
        binaries.prometheus(binaries.find("promtool"))
    except binaries.Unavailable as absent:
        pytest.skip(str(absent))
    tables = Tables()
    async with serve(tables, at="127.0.0.1:0") as url, playing(tables):
        with watching(url, faster(observe.rules())) as prometheus:
            for name in RECORDED:
                await until(lambda name=name: prometheus.values(name), any)
            assert await prometheus.alerts() == {}

            tables.bad = True
            fired = await until(prometheus.alerts, lambda told: _firing(told) == ACTIONS.keys())
            for name, alert in fired.items():
                assert alert["annotations"]["action"].startswith(ACTIONS[name])
                assert (alert["labels"]["job"], alert["labels"]["name"]) == ("game", "table")

            tables.bad = False
            await until(prometheus.alerts, lambda told: told == {})


def _firing(told):
    return {name for name, alert in told.items() if alert["state"] == "firing"}
