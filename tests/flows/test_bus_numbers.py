"""Events without a given number: on every engine, through a router, up to a viewer."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
import redis.asyncio

from semel.bus import BlockingPublisher, Publisher, Router, Stages, Watcher, publish_event
from semel.bus.jobs import state_of, stream_of
from semel.colour import ASYNC
from semel.errors import JobEndedError, SettingsError, StoreUnavailableError
from semel.http.sse import Gateway
from semel.stores import MemoryStore, RedisStore, connect
from support.routing import running, told, until
from support.viewers import Connection

JOB = "job-1"
ENGINES = {"postgres": "postgres_tables_url", "mariadb": "mariadb_tables_url", "redis": "redis_url"}
PERCENT = [4 * n for n in range(25)]


@pytest.fixture(params=["memory", "sqlite", *ENGINES])
async def store(request, tmp_path):
    url = "memory://"
    if request.param in ENGINES:
        url = request.getfixturevalue(ENGINES[request.param])
    elif request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/semel.db"
    made = connect(url)
    yield made
    await made.aclose()


class Awaitable:
    """A blocking publisher, to be awaited as the other one is."""

    def __init__(self, publisher):
        self._publisher = publisher

    async def publish(self, *what, **how):
        return await asyncio.to_thread(self._publisher.publish, *what, **how)


@pytest.fixture(params=[Publisher, BlockingPublisher])
def opens(request):
    """Makes a publisher of one colour."""
    if request.param is Publisher:
        return Publisher
    return lambda store, **how: Awaitable(BlockingPublisher(store, **how))


async def progress(publisher):
    for percent in PERCENT:
        assert await publisher.publish(JOB, stage="progress", data={"percent": percent}) is True
    assert await publisher.publish(JOB, "done", data={"percent": 100}) is True


async def seqs_and_data(store):
    return [(seq, data) for _, seq, data in await told(store, JOB)]


# --- directly -----------------------------------------------------------------------------------


async def test_progress_without_seq_is_heard_once_and_in_order(store, opens):
    async with Watcher(store) as watcher:
        published = asyncio.create_task(progress(opens(store)))
        await until(lambda: told(store, JOB), "the first event")
        async with asyncio.timeout(30):
            heard = [event async for event in watcher.subscribe(JOB)]
        await published
        assert [event["data"]["percent"] for event in heard] == [*PERCENT, 100]
        assert [event["seq"] for event in heard] == [*range(1, 26), 50]
        again = [event["seq"] async for event in watcher.subscribe(JOB, last_seq=20)]
        assert again == [21, 22, 23, 24, 25, 50]
        assert (await watcher.state(JOB))["data"] == {"percent": 100}


async def test_new_publisher_continues_and_two_in_turns_never_go_back(store, opens):
    one, other = opens(store), opens(store)
    order = [one, one, one, other, one, other, other, other, other, one, one, other]
    for n, publisher in enumerate(order):
        assert await publisher.publish(JOB, "progress", data=n) is True
    found = await seqs_and_data(store)
    assert [data for _, data in found] == list(range(len(order)))
    assert [seq for seq, _ in found] == list(range(1, len(order) + 1))
    assert state_of(await store.log(ASYNC).load(stream_of("scan", JOB)))["data"] == len(order) - 1


async def test_new_publishers_of_a_shard_leave_no_gap(store, opens):
    for n in range(6):
        publisher = opens(store, shards=1)
        for m in range(3):
            assert await publisher.publish(JOB, "progress", data=3 * n + m) is True
    page = await store.log(ASYNC).read("scan:events:0")
    found = [json.loads(entry.data) for entry in page.entries]
    assert [event["seq"] for event in found] == [*range(1, 19)]
    assert [event["data"] for event in found] == [*range(18)]


async def test_twenty_at_once_are_there_once_each_with_growing_numbers(store, opens):
    publisher = opens(store)
    done = await asyncio.gather(*(publisher.publish(JOB, "progress", data=n) for n in range(20)))
    assert done == [True] * 20
    found = await seqs_and_data(store)
    assert sorted(data for _, data in found) == list(range(20))
    seqs = [seq for seq, _ in found]
    assert seqs == sorted(set(seqs))


async def test_repeat_of_a_call_whose_answer_was_lost_is_there_once(store, monkeypatch):
    log, publisher = store.log(ASYNC), Publisher(store)
    append = log.append

    async def lost(*what, **how):
        await append(*what, **how)
        raise StoreUnavailableError("the answer was lost")

    await publisher.publish(JOB, "progress", data=1)
    with monkeypatch.context() as away:
        away.setattr(log, "append", lost)
        with pytest.raises(StoreUnavailableError):
            await publisher.publish(JOB, "progress", data=2)
    assert await publisher.publish(JOB, "progress", data=2) is False
    assert await publisher.publish(JOB, "progress", data=3) is True
    assert await seqs_and_data(store) == [(1, 1), (2, 2), (3, 3)]


async def test_job_with_a_final_number_ends_there(store, opens):
    publisher = opens(store, stages=Stages(final=51))
    assert await publisher.publish(JOB, "done", 50, "nearly") is True
    assert await publisher.publish(JOB, "done", 51, "really") is True
    with pytest.raises(JobEndedError):
        await publisher.publish(JOB, "done", 52, "too late")


async def test_gateway_shows_progress_without_seq_in_order(store):
    await progress(Publisher(store))
    seqs = [*range(1, 26), 50]
    told = [*enumerate(seqs, start=1), "end"]
    async with showing(store) as gateway:
        assert await frames_of(gateway, f"/{JOB}") == told
        assert await frames_of(gateway, f"/{JOB}", query=b"last_seq=24") == told[24:]


@contextlib.asynccontextmanager
async def showing(store):
    gateway = Gateway(store)
    yield gateway
    await gateway.aclose()


async def frames_of(gateway, path, **request):
    connection = Connection(gateway, path, **request)
    await connection.ended()
    return connection.told


# --- through a router ---------------------------------------------------------------------------


@pytest.fixture
async def workers(redis_url):
    made = RedisStore(redis_url, namespace="workers")
    yield made
    await made.aclose()


@pytest.fixture
async def gateways(redis_url):
    made = RedisStore(redis_url, namespace="gateways")
    yield made
    await made.aclose()


async def test_progress_without_seq_is_routed_once_and_in_order(workers, gateways):
    router = Router(workers, gateways, shards=2, lease_s=2.0)
    async with running(router), Watcher(gateways) as watcher:
        await progress(Publisher(workers, shards=2))
        await until(lambda: told(gateways, JOB), "the first event")
        async with asyncio.timeout(30):
            heard = [event async for event in watcher.subscribe(JOB)]
    assert [event["data"]["percent"] for event in heard] == [*PERCENT, 100]
    assert [event["seq"] for event in heard] == [*range(1, 26), 50]
    assert router.status().routed == 26
    assert not any(router.status().refused.values())


async def test_publishers_in_turns_for_a_router_lose_nothing(workers, gateways):
    one, other = (Publisher(workers, shards=1) for _ in range(2))
    router = Router(workers, gateways, shards=1, lease_s=2.0)
    async with running(router):
        for n in range(30):
            await (one, other)[n % 2].publish(JOB, "progress", data=n)
        new = Publisher(workers, shards=1)
        assert await new.publish(JOB, "progress", data=30) is True
        await until(lambda: has(gateways, 31), "all of them")
    found = await seqs_and_data(gateways)
    assert [data for _, data in found] == list(range(31))
    seqs = [seq for seq, _ in found]
    assert seqs == sorted(set(seqs))
    assert not any(router.status().refused.values())


async def has(store, count):
    return len(await told(store, JOB)) == count


async def test_router_ends_a_job_at_the_final_number(workers, gateways):
    stages = Stages(final=51)
    publisher = Publisher(workers, shards=1, stages=stages)
    for seq in (50, 51):
        await publisher.publish(JOB, "done", seq, None)
    async with running(Router(workers, gateways, shards=1, stages=stages, lease_s=2.0)):
        await until(lambda: has(gateways, 2), "both events")
    assert (await gateways.log(ASYNC).load(stream_of("scan", JOB))).life == "ended"


# --- the function with a client -----------------------------------------------------------------


@pytest.fixture
async def client(redis_url):
    async with redis.asyncio.Redis.from_url(redis_url) as made:
        yield made


async def test_idempotent_publish(client):
    """As in the document that has asked for it; the stream has another name."""
    result1 = await publish_event(client, "scan", "job-1", "vision", 10, {"status": "done"})
    assert result1 is True
    result2 = await publish_event(client, "scan", "job-1", "vision", 10, {"status": "done"})
    assert result2 is False

    messages = await client.xrange("semel:default:{scan:job:job-1}:log")
    job1_events = [m for m in messages if b"job-1" in m[1][b"d"]]
    assert len(job1_events) == 1


async def test_other_data_under_a_published_number_return_false(client):
    assert await publish_event(client, "scan", JOB, "vision", 10, {"n": 1}) is True
    assert await publish_event(client, "scan", JOB, "vision", 10, {"n": 2}) is False


async def test_events_of_a_client_are_shown_by_a_gateway_until_51(client):
    for stage, seq in (("vision", 10), ("done", 50), ("done", 51)):
        assert await publish_event(client, "scan", JOB, stage, seq, {}) is True
    with pytest.raises(JobEndedError):
        await publish_event(client, "scan", JOB, "done", 52, {})
    async with showing(RedisStore(client)) as gateway:
        assert await frames_of(gateway, f"/{JOB}") == [(1, 10), (2, 50), (3, 51), "end"]


async def test_many_events_of_a_client_use_one_connection(client):
    await publish_event(client, "scan", JOB, "vision", 10, {})
    before = (await client.info("stats"))["total_connections_received"]
    for n in range(50):
        await publish_event(client, f"domain{n}", JOB, "vision", 10, {})
    assert (await client.info("stats"))["total_connections_received"] == before


async def test_client_that_decodes_publishes_the_same(redis_url):
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        assert await publish_event(client, "scan", JOB, "vision", 10, {"sees": "é"}) is True
        assert await publish_event(client, "scan", JOB, "vision", 10, {"sees": "é"}) is False
        [(_, entry)] = await client.xrange("semel:default:{scan:job:job-1}:log")
        assert json.loads(entry["d"])["data"] == {"sees": "é"}


async def test_events_of_a_client_with_shards_are_routed(client, redis_url, gateways):
    assert await publish_event(client, "scan", JOB, "vision", 10, {}, shards=4) is True
    store = RedisStore(redis_url)
    async with running(Router(store, gateways, shards=4, lease_s=2.0)):
        await until(lambda: has(gateways, 1), "the event")
    await store.aclose()


async def test_store_in_place_of_a_client_is_taken_and_a_url_is_refused():
    store = MemoryStore()
    assert await publish_event(store, "scan", JOB, "vision", 10, {}) is True
    assert await publish_event(store, "scan", JOB, "vision", 10, {}) is False
    with pytest.raises(SettingsError, match=r"keep a Publisher\(url\)"):
        await publish_event("redis://localhost", "scan", JOB, "vision", 10, {})
