"""The usual event bus on Redis, and what goes wrong with it.

A script publishes and marks, another one changes the state and marks, Pub/Sub tells whoever is
there, and a gateway leaves out what is not larger than the last number. Written that way it has
thirteen known defects. Here each of them is provoked, in that bus and in ours.
"""

from __future__ import annotations

import asyncio
import json

import pytest
import redis.asyncio
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import RedisClusterException, ResponseError

from semel.bus import BackPressureError, Publisher, Router
from semel.bus.jobs import shard_stream_of, state_of, stream_of
from semel.bus.watching import Watcher
from semel.colour import ASYNC
from semel.entries import Keep
from semel.errors import IdempotencyConflictError, StoreUnavailableError
from semel.feed import Feed, Reset, Update
from semel.stores import RedisStore
from semel.stores.redis.log_words import place_of
from support import seed_bus as seed
from support.routing import running, told, until

JOB = "job-1"
STREAM = stream_of("scan", JOB)
PLACE = place_of("default", STREAM)


@pytest.fixture
async def raw(redis_url):
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def store(redis_url):
    made = RedisStore(redis_url)
    yield made
    await made.aclose()


@pytest.fixture
def publisher(store):
    return Publisher(store)


async def seqs(store, job=JOB):
    return [seq for _, seq, _ in await told(store, job)]


async def ours(store, job=JOB):
    return state_of(await store.log(ASYNC).load(stream_of("scan", job)))


async def of(*events):
    for each in events:
        yield each


async def routed(store, *, count, **how):
    """By a router from the store's shards to another namespace; the status."""
    router = Router(store, how.pop("target"), shards=1, lease_s=2.0, **how)
    async with running(router):
        await until(lambda: router.status().routed + router.status().repeated == count, "them")
    return router.status()


@pytest.fixture
async def gateways(redis_url):
    made = RedisStore(redis_url, namespace="gateways")
    yield made
    await made.aclose()


# --- publishing ---------------------------------------------------------------------------------


async def test_01_all_that_one_call_touches_is_in_one_slot_of_a_cluster(redis_cluster_url):
    address = redis_cluster_url.replace("redis+cluster://", "redis://")
    async with RedisCluster.from_url(address) as cluster:
        with pytest.raises((RedisClusterException, ResponseError)):
            await seed.publish_event(cluster, JOB, "vision", 10)

    store = RedisStore(redis_cluster_url)
    assert await Publisher(store).publish(JOB, "vision", 10, None)
    assert await Publisher(store, shards=8).publish(JOB, "vision", 10, None)
    assert await seqs(store) == [10]
    await store.aclose()


async def test_02_what_is_refused_has_changed_nothing(raw, store, publisher):
    with pytest.raises(ResponseError, match="invalid expire"):
        await seed.publish_event(raw, JOB, "vision", 10, state_ttl=0)
    await seed.publish_event(raw, JOB, "vision", 10)
    assert await raw.xlen(seed.STREAM) == 2, "the defect"

    await publisher.publish(JOB, "vision", 10, None)
    await raw.rename(PLACE.state, "aside")
    await raw.set(PLACE.state, "of another type")
    with pytest.raises(StoreUnavailableError):
        await publisher.publish(JOB, "vision", 11, None)
    assert await seqs(store) == [10]
    await raw.rename("aside", PLACE.state)
    assert await publisher.publish(JOB, "vision", 11, None) is True
    assert await seqs(store) == [10, 11]


async def test_03_an_event_is_known_for_as_long_as_it_is_there(raw, store):
    await seed.publish_event(raw, JOB, "vision", 10)
    await raw.delete(f"published:{JOB}:vision:10")  # two hours later
    await seed.publish_event(raw, JOB, "vision", 10)
    assert await raw.xlen(seed.STREAM) == 2, "the defect"

    publisher = Publisher(store, keep=Keep(ids_s=0.001, idle_s=3600))
    await publisher.publish(JOB, "vision", 10, None)
    await asyncio.sleep(0.01)
    assert await publisher.publish(JOB, "vision", 10, None) is False
    assert await seqs(store) == [10]


async def test_04_what_is_known_of_events_is_not_evicted_before_them_and_readers_are_told(
    raw, store, publisher
):
    """Redis evicts what has a time to live first; there, that is the memory of what was sent."""
    await seed.publish_event(raw, JOB, "vision", 10)
    assert await raw.ttl(f"published:{JOB}:vision:10") > 0
    assert await raw.ttl(seed.STREAM) < 0, "the defect: the entry stays, and nobody knows of it"

    await publisher.publish(JOB, "vision", 10, None)
    head = (await store.log(ASYNC).load(STREAM)).position
    await raw.delete(PLACE.meta)
    assert await publisher.publish(JOB, "vision", 10, {"other": "history"}) is True
    assert await seqs(store) == [10]
    assert (await store.log(ASYNC).read(STREAM, head)).lost

    await Publisher(store, shards=1).publish(JOB, "vision", 10, None)
    shard = place_of("default", shard_stream_of("scan", 0))
    assert [await raw.ttl(key) for key in (shard.meta, shard.log)] == [-1, -1], "never evicted"

    await raw.config_set("maxmemory", "1gb")
    await raw.config_set("maxmemory-policy", "volatile-ttl")
    try:
        why = (await store.ledger(ASYNC).guarantees()).why
    finally:
        await raw.config_set("maxmemory", 0)
        await raw.config_set("maxmemory-policy", "noeviction")
    assert any("set maxmemory-policy noeviction" in reason for reason in why)


async def test_05_a_late_event_is_told_and_moves_the_state_nowhere(raw, store, publisher):
    await seed.publish_event(raw, JOB, "vision", 16)
    await seed.publish_event(raw, JOB, "vision", 15)
    assert (await seed.state_of(raw, JOB))["seq"] == 15, "the defect"

    await publisher.publish(JOB, "vision", 16, None)
    await publisher.publish(JOB, "vision", 15, None)
    assert (await ours(store))["seq"] == 16
    assert await seqs(store) == [16, 15]


async def test_06_a_worker_that_begins_anew_is_neither_swallowed_nor_mixed_up(
    raw, store, publisher
):
    await seed.publish_event(raw, JOB, "vision", 10, {"label": "can"})
    swallowed = await seed.publish_event(raw, JOB, "vision", 10, {"label": "bottle"})
    assert swallowed is False, "the defect: as if it were a repeat"

    await publisher.publish(JOB, "vision", 10, {"label": "can"})
    with pytest.raises(IdempotencyConflictError):
        await publisher.publish(JOB, "vision", 10, {"label": "bottle"})
    assert await publisher.publish(JOB, "vision", 10, {"label": "bottle"}, attempt=2) is True
    assert (await ours(store))["data"] == {"label": "bottle"}


async def test_07_what_nobody_has_read_is_never_trimmed(raw, store, gateways):
    script = seed.IDEMPOTENT_XADD.replace("'~', '10000'", "'10'")
    await raw.xgroup_create(seed.STREAM, "routers", mkstream=True)
    await seed.publish_event(raw, JOB, "vision", 10, script=script)
    await raw.xreadgroup("routers", "r1", {seed.STREAM: ">"})
    for n in range(10):
        await seed.publish_event(raw, f"noisy-{n}", "vision", 10, script=script)
    (_, pending), *_ = await raw.xreadgroup("routers", "r1", {seed.STREAM: "0"})
    assert [body for _, body in pending] in ([{}], [None]), "the defect: it is pending, and gone"

    publisher = Publisher(store, shards=1, keep=Keep(full=10))
    for n in range(10):
        await publisher.publish(f"job-{n}", "vision", 10, None)
    with pytest.raises(BackPressureError):
        await publisher.publish("noisy", "vision", 10, None)
    await routed(store, target=gateways, count=10)
    assert [await seqs(gateways, f"job-{n}") for n in range(10)] == [[10]] * 10
    assert await publisher.publish("noisy", "vision", 10, None) is True


# --- routing ------------------------------------------------------------------------------------


async def test_08_two_stages_may_use_the_same_number(raw, store, gateways):
    await seed.route(raw, seed.event(JOB, "a", 1))
    assert await seed.route(raw, seed.event(JOB, "b", 1)) is False, "the defect"

    publisher = Publisher(store, shards=1)
    for stage in ("a", "b"):
        await publisher.publish(JOB, stage, 1, None)
    await routed(store, target=gateways, count=2)
    assert [stage for stage, _, _ in await told(gateways, JOB)] == ["a", "b"]


async def test_09_an_event_that_nobody_heard_is_there_for_whoever_comes(raw, store, gateways):
    last = seed.event(JOB, "done", 50)
    await seed.route(raw, last)  # while the gateway is being deployed
    async with raw.pubsub() as gateway:
        await gateway.subscribe(f"scan:{JOB}")
        assert (await gateway.get_message(timeout=1))["type"] == "subscribe"
        assert await seed.route(raw, last) is False
        assert await gateway.get_message(timeout=0.05) is None, "the defect: nobody ever hears it"

    await Publisher(store, shards=1).publish(JOB, "done", 50, None)
    await routed(store, target=gateways, count=1)
    async with Watcher(gateways) as watcher:
        assert [each["seq"] async for each in watcher.subscribe(JOB)] == [50]


async def test_10_two_routers_do_not_put_a_jobs_events_out_of_order(raw, store, gateways):
    five, six = seed.event(JOB, "vision", 15), seed.event(JOB, "vision", 16)
    for each in (six, five):  # two of one group, and the second one was faster
        await seed.route(raw, each)
    assert (await seed.state_of(raw, JOB))["seq"] == 15, "the defect"
    assert [each["seq"] async for each in seed.subscribe(of(six, five))] == [16], "and a hole"

    jobs = [f"job-{n}" for n in range(6)]
    publisher = Publisher(store, shards=2)
    routers = [Router(store, gateways, shards=2, lease_s=1.0, batch=3) for _ in range(2)]
    async with running(*routers):
        for seq in range(10, 20):
            await asyncio.gather(*(publisher.publish(job, "vision", seq, None) for job in jobs))

        async def are_there():
            return all([len(await seqs(gateways, job)) == 10 for job in jobs])

        await until(are_there, "all of them")
    assert [await seqs(gateways, job) for job in jobs] == [list(range(10, 20))] * len(jobs)


# --- watching -----------------------------------------------------------------------------------


async def test_11_what_happens_between_reading_and_listening_is_not_missed(
    raw, store, publisher, monkeypatch
):
    await seed.route(raw, seed.event(JOB, "vision", 15))
    assert (await seed.state_of(raw, JOB))["seq"] == 15
    await seed.route(raw, seed.event(JOB, "vision", 16))
    async with raw.pubsub() as gateway:
        await gateway.subscribe(f"scan:{JOB}")
        await gateway.get_message(timeout=1)
        assert await gateway.get_message(timeout=0.05) is None, "the defect: 16 is missed"

    await publisher.publish(JOB, "vision", 15, None)
    log, hurried = store.log(ASYNC), []
    read = log.read

    async def read_and_be_overtaken(*asked):
        page = await read(*asked)
        if not hurried:
            hurried.append(await publisher.publish(JOB, "vision", 16, None))
        return page

    monkeypatch.setattr(log, "read", read_and_be_overtaken)
    async with Watcher(store) as watcher:
        got = []
        async with asyncio.timeout(20):
            async for each in watcher.subscribe(JOB):
                got.append(each["seq"])
                if len(got) == 2:
                    break
    assert got == [15, 16]


async def test_12_another_history_is_not_taken_for_the_one_that_was_read(raw, store, publisher):
    """A failover: the new primary has not heard of 16, and numbers go on with another one."""
    had, other = seed.event(JOB, "vision", 16, "had"), seed.event(JOB, "vision", 16, "other")
    after = seed.event(JOB, "vision", 17)
    got = [each async for each in seed.subscribe(of(other, after), last_seq=had["seq"])]
    assert got == [after], "the defect: 17 stands on a 16 that nobody has seen"

    await publisher.publish(JOB, "vision", 15, None)
    replica = {key: await raw.dump(key) for key in await raw.keys("semel:*")}
    await publisher.publish(JOB, "vision", 16, "had")
    cursor = (await store.log(ASYNC).load(STREAM)).position
    await raw.flushall()
    for key, held in replica.items():
        await raw.restore(key, 3_600_000, held)
    await publisher.publish(JOB, "vision", 16, "other")
    await publisher.publish(JOB, "vision", 17, None)
    async with Feed(store) as feed:
        news = aiter(feed.subscribe(STREAM, cursor))
        reset = await anext(news)
        assert isinstance(reset, Reset)
        assert reset.reason == "forked"
        assert state_of(reset.snapshot)["seq"] == 17
        await publisher.publish(JOB, "vision", 18, None)
        update = await anext(news)
        assert isinstance(update, Update)
        assert json.loads(update.entry.data)["seq"] == 18
        await news.aclose()


async def test_13_the_state_is_there_as_long_as_the_events_and_scripts_may_be_forgotten(
    raw, store, publisher
):
    await seed.publish_event(raw, JOB, "vision", 10)
    await raw.pexpire(f"scan:state:{JOB}", 0)  # an hour later
    assert await raw.xlen(seed.STREAM) == 1
    assert await seed.state_of(raw, JOB) is None, "the defect: events, and no state to begin with"

    await publisher.publish(JOB, "vision", 10, None)
    await raw.script_flush()
    await publisher.publish(JOB, "vision", 11, None)
    lives = [await raw.pttl(key) for key in (PLACE.log, PLACE.state, PLACE.meta)]
    assert max(lives) - min(lives) < 1000
    assert min(lives) > 23 * 3_600_000
    assert (await ours(store))["seq"] == 11
