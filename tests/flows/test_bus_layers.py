"""The seed's four layers, each with its own test, every event sent twice.

Without the check of a layer, exactly the test of that layer fails: none leans on another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from semel.bus import Publisher, Router, jobs
from semel.bus.jobs import KEEP_JOB, event, event_of, shard_stream_of, state_of, stream_of
from semel.bus.watching import Watcher
from semel.colour import ASYNC
from semel.entries import Fenced, Repeated
from semel.stores import MemoryStore, RedisStore
from support.routing import running, until, waiting

JOB = "job-1"
STREAM = stream_of("scan", JOB)
SHARD = shard_stream_of("scan", 0)
EVENTS = [("vision", 10), ("vision", 11), ("rule", 20), ("answer", 30), ("done", 50)]
SEQS = [seq for _, seq in EVENTS]


@dataclass
class Bus:
    """Two stores, and how a job is watched."""

    workers: Any
    gateways: Any
    watcher: Callable[[Any], Watcher] = Watcher


@pytest.fixture(params=["memory", "redis", "cluster"])
async def bus(request) -> AsyncIterator[Bus]:
    if request.param == "memory":
        yield Bus(MemoryStore(), MemoryStore())
        return
    name = {"redis": "redis_url", "cluster": "redis_cluster_url"}[request.param]
    url = request.getfixturevalue(name)
    workers, gateways = (RedisStore(url, namespace=each) for each in ("workers", "gateways"))
    yield Bus(workers, gateways)
    await workers.aclose()
    await gateways.aclose()


async def seqs_in(store, stream):
    page = await store.log(ASYNC).read(stream)
    return [event_of(entry.data).seq for entry in page.entries]


def made(stage, seq, attempt=1):
    return event("scan", JOB, stage, seq, {"n": seq}, attempt)


async def append(store, one):
    ends = one.stage == "done"
    return await jobs.append(store.log(ASYNC), one, one.written(), ends=ends, keep=KEEP_JOB)


# --- the layers ---------------------------------------------------------------------------------


async def worker_to_shard(bus):
    """1: what a worker publishes twice is in its shard once."""
    publisher = Publisher(bus.workers, shards=1)
    for stage, seq in EVENTS:
        assert await publisher.publish(JOB, stage, seq, {"n": seq}) is True
        assert await publisher.publish(JOB, stage, seq, {"n": seq}) is False
    assert await seqs_in(bus.workers, SHARD) == SEQS


async def shard_to_state(bus):
    """2: what is in the shard twice changes the job's log and state once."""
    log = bus.workers.log(ASYNC)
    for stage, seq in EVENTS:
        for copy in ("first", "second"):
            await log.append(SHARD, made(stage, seq).written().entry, id=f"{seq} {copy}")
    router = Router(bus.workers, bus.gateways, shards=1, lease_s=2.0)

    async def is_drained():
        return await waiting(bus.workers, 1) == 0

    async with running(router):
        await until(is_drained, "the shard to be empty")
    assert await seqs_in(bus.gateways, STREAM) == SEQS
    state = state_of(await bus.gateways.log(ASYNC).load(STREAM))
    assert (state["seq"], state["life"]) == (50, "ended")
    status = router.status()
    assert (status.routed, status.repeated) == (len(EVENTS), len(EVENTS))


async def state_to_ring(bus):
    """3: it rings when the log and the state have changed, for that change, and only then."""
    log, bell, rings = bus.gateways.log(ASYNC), bus.gateways.bell(), []
    await bell.listen(STREAM, lambda: rings.append(1))
    try:
        for stage, seq in EVENTS:
            for _ in range(2):
                await append(bus.gateways, made(stage, seq, attempt=2))
            head = (await log.load(STREAM)).position.offset
            await until(lambda head=head: len(rings) >= head, "a ring")
            assert seq in await seqs_in(bus.gateways, STREAM)
            assert state_of(await log.load(STREAM))["stages"][stage]["seq"] == seq
            if stage == "vision":  # a zombie's changes nothing, and nobody hears of it
                assert isinstance(await append(bus.gateways, made(stage, 19)), Fenced)
                assert state_of(await log.load(STREAM))["stages"][stage]["seq"] == seq
                assert 19 not in await seqs_in(bus.gateways, STREAM)
        assert len(rings) == (await log.load(STREAM)).position.offset
    finally:
        await bell.aclose()


async def gateway_to_client(bus):
    """4: whoever comes back gets what it has not had, by its number or by its cursor."""
    for stage, seq in EVENTS:
        for _ in range(2):
            await append(bus.gateways, made(stage, seq))
    async with bus.watcher(bus.gateways) as watcher:
        had = await some(watcher.subscribe(JOB), upto=20)
        assert sorted(set(had)) == [10, 11, 20]
        missed = await some(watcher.subscribe(JOB, last_seq=had[-1]))
        assert sorted(set(missed)) == [30, 50]
        page = await bus.gateways.log(ASYNC).read(STREAM)
        seqs = [event_of(entry.data).seq for entry in page.entries]
        for n, entry in enumerate(page.entries, start=1):
            assert await some(watcher.subscribe(JOB, after=entry.position)) == seqs[n:]


async def some(events, upto=None):
    seqs = []
    async for told in events:
        seqs.append(told["seq"])
        if told["seq"] == upto:
            break
    await events.aclose()
    return seqs


LAYERS = [worker_to_shard, shard_to_state, state_to_ring, gateway_to_client]


async def test_layer_1_a_worker_puts_an_event_into_its_shard_once(bus):
    await worker_to_shard(bus)


async def test_layer_2_a_router_changes_a_jobs_log_and_state_once(bus):
    await shard_to_state(bus)


async def test_layer_3_a_ring_comes_with_each_change_and_with_nothing_else(bus):
    await state_to_ring(bus)


async def test_layer_4_a_client_that_comes_back_gets_nothing_twice(bus):
    await gateway_to_client(bus)


# --- without their checks -----------------------------------------------------------------------


class Around:
    """Something with one verb replaced."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


class StoreAround(Around):
    """What a store is known by, as it is."""

    def ledger(self, colour):
        return self._inner.ledger(colour)

    def bell(self):
        return self._inner.bell()

    def close(self):
        self._inner.close()

    async def aclose(self):
        await self._inner.aclose()


class WithoutIds(StoreAround):
    """Its log takes every append for a new one."""

    def log(self, colour):
        return _LogWithoutIds(self._inner.log(colour))


class _LogWithoutIds(Around):
    _numbers = count()

    async def append(self, stream, data, *, id, **how):
        return await self._inner.append(stream, data, id=f"{id} {next(self._numbers)}", **how)


class RingsAlways(StoreAround):
    """Its log rings for a repeat, too."""

    def __init__(self, inner):
        super().__init__(inner)
        self.wakes = {}

    def log(self, colour):
        return _LogThatRings(self, self._inner.log(colour))

    def bell(self):
        return _BellToo(self, self._inner.bell())


class _LogThatRings(Around):
    def __init__(self, store, inner):
        super().__init__(inner)
        self._store = store

    async def append(self, stream, data, **how):
        answer = await self._inner.append(stream, data, **how)
        if isinstance(answer, Repeated):
            for wake in self._store.wakes.get(stream, []):
                wake()
        return answer


class _BellToo(Around):
    def __init__(self, store, inner):
        super().__init__(inner)
        self._store = store

    async def listen(self, stream, wake):
        self._store.wakes.setdefault(stream, []).append(wake)
        await self._inner.listen(stream, wake)


class FromTheBeginning(Watcher):
    """A gateway that does not ask what its client has had."""

    async def subscribe(self, job_id, last_seq=0, *, after=None):
        async for told in super().subscribe(job_id):
            yield told


def without_layer(number: int, bus: Bus) -> None:
    match number:
        case 1:
            bus.workers = WithoutIds(bus.workers)
        case 2:
            bus.gateways = WithoutIds(bus.gateways)
        case 3:
            bus.gateways = RingsAlways(bus.gateways)
        case 4:
            bus.watcher = FromTheBeginning


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("removed", [1, 2, 3, 4])
async def test_without_a_layers_check_exactly_its_test_fails(bus, layer, removed):
    without_layer(removed, bus)
    if LAYERS.index(layer) + 1 == removed:
        with pytest.raises(AssertionError):
            await layer(bus)
    else:
        await layer(bus)
