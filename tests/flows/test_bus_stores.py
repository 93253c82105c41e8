"""Publishers in both colours on every engine, and routers from one engine to another."""

from __future__ import annotations

import pytest

from semel.bus import (
    BackPressureError,
    BlockingPublisher,
    JobEndedError,
    Publisher,
    Router,
    StaleAttemptError,
)
from semel.bus.jobs import state_of, stream_of
from semel.colour import ASYNC
from semel.entries import Keep
from semel.errors import IdempotencyConflictError
from semel.stores import connect
from support.routing import running, told, until, waiting

FIXTURES = {
    "postgres": "postgres_tables_url",
    "mariadb": "mariadb_tables_url",
    "redis": "redis_url",
    "cluster": "redis_cluster_url",
}


@pytest.fixture
async def opened(request, tmp_path):
    """Opens a store by the name of its engine."""
    stores = []

    def opens(engine):
        url = "memory://"
        if engine in FIXTURES:
            url = request.getfixturevalue(FIXTURES[engine])
        elif engine == "sqlite":
            url = f"sqlite:///{tmp_path}/semel.db"
        stores.append(connect(url))
        return stores[-1]

    yield opens
    for store in stores:
        await store.aclose()


async def awaited(publisher):
    """Every answer there is."""
    assert await publisher.publish("job-1", "vision", 10, {"n": 1}) is True
    assert await publisher.publish("job-1", "vision", 10, {"n": 1}) is False
    with pytest.raises(IdempotencyConflictError):
        await publisher.publish("job-1", "vision", 10, {"n": 2})
    assert await publisher.publish("job-1", "vision", 10, {"n": 2}, attempt=2) is True
    with pytest.raises(StaleAttemptError):
        await publisher.publish("job-1", "vision", 11, None)
    assert await publisher.fail("job-1", {"why": "é"}) is True
    with pytest.raises(JobEndedError):
        await publisher.publish("job-1", "rule", 20, None)


class Awaitable:
    """A blocking publisher, to be awaited as the other one is."""

    def __init__(self, publisher):
        self._publisher = publisher

    async def publish(self, *args, **how):
        return self._publisher.publish(*args, **how)

    async def fail(self, *args, **how):
        return self._publisher.fail(*args, **how)


@pytest.mark.parametrize("kind", [Publisher, BlockingPublisher])
@pytest.mark.parametrize("engine", ["memory", "sqlite", *FIXTURES])
async def test_a_publisher_gets_the_same_answers_everywhere(opened, engine, kind):
    store = opened(engine)
    publisher = kind(store)
    await awaited(publisher if kind is Publisher else Awaitable(publisher))
    assert [seq for _, seq, _ in await told(store, "job-1")] == [10, 10, 60]
    state = state_of(await store.log(ASYNC).load(stream_of("scan", "job-1")))
    assert (state["stage"], state["data"], state["life"]) == ("failed", {"why": "é"}, "ended")
    assert state["stages"]["vision"]["data"] == {"n": 2}


@pytest.mark.parametrize(
    ("workers", "gateways"),
    [("sqlite", "redis"), ("redis", "postgres"), ("mariadb", "cluster"), ("cluster", "sqlite")],
)
async def test_a_router_takes_events_from_any_engine_to_any_other(opened, workers, gateways):
    source, target = opened(workers), opened(gateways)
    publisher = Publisher(source, shards=2, keep=Keep(full=20))
    jobs = [f"job-{n}" for n in range(5)]
    router = Router(source, target, shards=2, lease_s=5.0)
    for job in jobs:
        for seq in (10, 11):
            await publisher.publish(job, "vision", seq, None)
    with pytest.raises(BackPressureError):
        for n in range(40):
            await publisher.publish("noisy", "vision", 10, None, attempt=n + 1)
    async with running(router):
        await until(lambda: none_wait(source), "what waited")
        for job in jobs:  # woken by the bell
            await publisher.publish(job, "done", 50, None)
        await until(lambda: all_there(target, jobs), "the rest")
    assert [[seq for _, seq, _ in await told(target, job)] for job in jobs] == [[10, 11, 50]] * 5


async def none_wait(source):
    return await waiting(source, 2) == 0


async def all_there(target, jobs):
    return all([len(await told(target, job)) == 3 for job in jobs])
