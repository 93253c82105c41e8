"""Redis dies, freezes, loses replies, scripts, its tail and its slots while a broker uses it."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
import redis.asyncio

from semel.brokers.redis import RedisBroker, scripts
from semel.errors import BrokerUnavailableError
from semel.messages import Batch, Behind, Tail, Taken
from semel.testing.brokers import at
from semel.testing.traffic import Sender, message
from support import servers
from support.process import free_port, wait_until
from support.proxy import Proxy

TOPIC = "axiom:events"


@pytest.fixture
async def opened():
    brokers = []

    def open_broker(url, **settings):
        brokers.append(RedisBroker(url, **settings))
        return brokers[-1]

    yield open_broker
    for broker in brokers:
        await broker.aclose()
    # redis-py forgets, and leaves open, the nodes that it asked for the slots in vain.
    for node in gc.get_objects():
        if type(node) is redis.asyncio.cluster.ClusterNode:
            await node.disconnect()


@pytest.fixture
def proxy(redis_server, redis_url):
    with Proxy(redis_server.port) as proxy:
        yield proxy


def through(proxy):
    return f"redis://{proxy.host}:{proxy.port}/0"


async def consumer_of(broker, *, fence=1, topic=TOPIC):
    return await broker.consumer(topic, "billing", 0, name="worker", fence=fence)


async def patiently(verb):
    """Ask until the answer is not an outage, as a relay or a worker would."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return await verb()
        except BrokerUnavailableError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


# --- lost replies -------------------------------------------------------------------------------


async def test_a_batch_whose_reply_is_lost_is_there_once(proxy, opened):
    broker = opened(through(proxy))
    sender = Sender(broker, TOPIC)
    consumer = await consumer_of(broker)
    await sender.send(1)
    proxy.cut_after_request(b"EVALSHA")
    assert isinstance(await sender.send(2, 3), Taken)
    assert proxy.cuts == 1
    assert await sender.send(4) == Taken(1)
    assert at(await consumer.read(10)) == [1, 2, 3, 4]


async def test_a_read_whose_reply_is_lost_hands_out_the_same_again(proxy, opened):
    """Redis has noted them as handed out; whoever reads on would pass them over."""
    broker = opened(through(proxy))
    sender = Sender(broker, TOPIC)
    consumer = await consumer_of(broker)
    await sender.send(*range(1, 10))
    assert at(await consumer.read(3)) == [1, 2, 3]
    proxy.cut_after_request(b"EVALSHA")
    assert at(await consumer.read(3)) == [4, 5, 6]
    assert proxy.cuts == 1
    assert at(await consumer.read(3)) == [7, 8, 9]


async def test_reads_that_get_no_answer_at_all_lose_nothing(proxy, opened):
    broker = opened(through(proxy), timeout_s=0.3)
    sender = Sender(broker, TOPIC)
    consumer = await consumer_of(broker)
    await sender.send(1, 2, 3, 4)
    assert at(await consumer.read(1)) == [1]
    for _ in range(2):
        proxy.drop_replies()
        with pytest.raises(BrokerUnavailableError):
            await consumer.read(2)
        proxy.pass_through()
    found = await consumer.read(2)
    assert at(found) == [2, 3]
    assert [each.count for each in found] == [1, 1], "nobody has begun them"
    assert at(await consumer.read(2)) == [4]


def lose_reply(broker, script):
    """The next reply to this script is lost, and so is the one to its repetition."""
    link, ask = broker._link, broker._link.ask

    async def deaf(call):
        await ask(call)
        if call.script is script:
            link.ask = ask
            raise BrokerUnavailableError("lost")
        return await ask(call)

    link.ask = deaf


async def test_a_takeover_whose_reply_is_lost_takes_over_the_same_again(proxy, opened):
    broker = opened(through(proxy))
    sender = Sender(broker, TOPIC)
    first = await consumer_of(broker)
    await sender.send(*range(1, 10))
    assert len(await first.read(8)) == 8
    second = await consumer_of(broker, fence=2)
    assert at(await second.left_over(2)) == [1, 2]
    proxy.cut_after_request(scripts.CLAIM.sha)
    assert at(await second.left_over(2)) == [3, 4]
    assert proxy.cuts == 1
    lose_reply(broker, scripts.CLAIM)
    with pytest.raises(BrokerUnavailableError):
        await second.left_over(2)
    found = await second.left_over(2)
    assert at(found) == [5, 6]
    assert [each.count for each in found] == [2, 2]
    assert at(await second.left_over(2)) == [7, 8]
    assert await second.left_over(2) == []
    assert at(await second.read(10)) == [9]
    third = await consumer_of(broker, fence=3)
    assert [each.count for each in await third.left_over()] == [3] * 8 + [2]


async def test_what_was_reclaimed_by_a_call_without_an_answer_is_handed_out(
    opened, redis_server, redis_url
):
    broker = opened(redis_url)
    consumer = await consumer_of(broker)
    await Sender(broker, TOPIC).send(1, 2, 3)
    group = ("GROUP", "billing", "stranger")
    servers.command(redis_server.port, "XREADGROUP", *group, "STREAMS", TOPIC, ">")
    idle = ("1-0", "2-0", "3-0", "IDLE", 400_000, "JUSTID")
    servers.command(redis_server.port, "XCLAIM", TOPIC, "billing", "stranger", 0, *idle)
    lose_reply(broker, scripts.CLAIM)
    with pytest.raises(BrokerUnavailableError):
        await consumer.reclaim(300.0, 2)
    found = await consumer.reclaim(300.0, 2)
    assert at(found) == [1, 2]
    assert [(each.count, each.consumer) for each in found] == [(2, "stranger")] * 2
    assert at(await consumer.reclaim(300.0, 2)) == [3]
    assert await consumer.reclaim(300.0, 2) == []


async def test_a_server_that_forgot_the_scripts_is_taught_again(opened, redis_server, redis_url):
    broker = opened(redis_url)
    sender, consumer = Sender(broker, TOPIC), await consumer_of(broker)
    for position in (1, 2):
        servers.command(redis_server.port, "SCRIPT", "FLUSH")
        assert await sender.send(position) == Taken(1)
        assert at(await consumer.read(10)) == [position]


# --- death and silence --------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
async def test_a_server_that_is_not_there_is_unavailable_for_every_verb(opened, scheme):
    broker = opened(f"{scheme}://127.0.0.1:{free_port()}/{'mm' * ('s' in scheme[5:])}", timeout_s=1)
    for verb in (
        lambda: Sender(broker, TOPIC).send(1),
        lambda: broker.join(TOPIC, "billing"),
        lambda: broker.tail(TOPIC, 0),
        lambda: broker.backlog(TOPIC, 0),
        lambda: consumer_of(broker),
    ):
        with pytest.raises(BrokerUnavailableError):
            await verb()


async def test_a_killed_redis_is_unavailable_and_used_again_when_it_is_back(
    opened, redis_server, redis_url
):
    broker = opened(redis_url, timeout_s=2)
    sender, consumer = Sender(broker, TOPIC), await consumer_of(broker)
    await sender.send(1, 2)
    found = await consumer.read(1)
    redis_server.kill()
    with pytest.raises(BrokerUnavailableError, match="Check that the server runs"):
        await sender.send(3)
    for verb in (lambda: consumer.read(1, wait_s=1), lambda: consumer.ack(found)):
        with pytest.raises(BrokerUnavailableError):
            await verb()
    redis_server.start()
    assert await sender.send(3) == Taken(1)
    await consumer.ack(found)
    assert at(await consumer.read(10)) == [2, 3]
    second = await consumer_of(broker, fence=2)
    assert at(await second.left_over()) == [2, 3]


async def test_whoever_waits_when_redis_is_killed_is_told(opened, redis_server, redis_url):
    broker = opened(redis_url, timeout_s=2)
    consumer = await consumer_of(broker)
    waiting = asyncio.create_task(consumer.read(10, wait_s=60))
    await asyncio.to_thread(wait_until, lambda: blocked(redis_server) == 1, "the reader to wait")
    redis_server.kill()
    with pytest.raises(BrokerUnavailableError):
        async with asyncio.timeout(10):
            await waiting


def blocked(server):
    info = servers.command(server.port, "INFO", "clients")
    return int(info.partition("blocked_clients:")[2].split()[0])


async def test_a_frozen_redis_is_unavailable_within_the_timeout(opened, redis_server, redis_url):
    broker = opened(redis_url, timeout_s=0.3)
    sender, consumer = Sender(broker, TOPIC), await consumer_of(broker)
    await sender.send(1)
    with redis_server.paused():
        began = time.monotonic()
        with pytest.raises(BrokerUnavailableError, match="unknown"):
            await sender.send(2)
        with pytest.raises(BrokerUnavailableError):
            await consumer.read(10, wait_s=5)
        assert time.monotonic() - began < 2
    assert isinstance(await patiently(lambda: sender.send(2)), Taken)
    assert at(await consumer.read(10)) == [1, 2]


async def test_a_replica_is_unavailable_not_full(opened, redis_server, redis_url):
    broker = opened(redis_url)
    sender = Sender(broker, TOPIC)
    await sender.send(1)
    servers.command(redis_server.port, "REPLICAOF", "127.0.0.1", free_port())
    try:
        with pytest.raises(BrokerUnavailableError):
            await sender.send(2)
    finally:
        servers.command(redis_server.port, "REPLICAOF", "NO", "ONE")
    assert await sender.send(2) == Taken(1)


async def test_a_bell_that_cannot_be_heard_costs_a_moment_only(opened, redis_server, redis_url):
    """Somebody's rules forbid XREAD: the stream is looked at instead."""
    rules = ("on", "nopass", "~*", "+@all", "-xread")
    servers.command(redis_server.port, "ACL", "SETUSER", "deaf", *rules)
    try:
        broker = opened(redis_url.replace("redis://", "redis://deaf:any@"))
        consumer = await consumer_of(broker)
        waiting = asyncio.create_task(consumer.read(10, wait_s=60))
        await asyncio.sleep(0.05)
        await Sender(broker, TOPIC).send(1)
        async with asyncio.timeout(5):
            assert at(await waiting) == [1]
    finally:
        servers.command(redis_server.port, "ACL", "DELUSER", "deaf")


async def test_a_user_who_may_not_use_streams_is_told_what_is_missing(
    opened, redis_server, redis_url
):
    rules = ("on", "nopass", "~*", "+@all", "-xadd")
    servers.command(redis_server.port, "ACL", "SETUSER", "poor", *rules)
    try:
        broker = opened(redis_url.replace("redis://", "redis://poor:any@"))
        with pytest.raises(BrokerUnavailableError, match=r"ACL SETUSER <user> .*\+xadd"):
            await Sender(broker, TOPIC).send(1)
    finally:
        servers.command(redis_server.port, "ACL", "DELUSER", "poor")


# --- sentinel and cluster -----------------------------------------------------------------------


@pytest.mark.slow
async def test_a_failover_that_loses_the_tail_is_noticed_and_healed(
    redis_sentinel, redis_sentinel_url, opened
):
    broker = opened(redis_sentinel_url, timeout_s=1)
    topic = f"orders-{time.time_ns()}"
    sender, consumer = Sender(broker, topic), await consumer_of(broker, topic=topic)
    await sender.send(1, 2, 3)
    assert at(await consumer.read(2)) == [1, 2]
    master, replica = redis_sentinel.master, redis_sentinel.replica
    wait_until(lambda: length(replica, topic) == 3, "the first three to be copied")
    # The replica is cut off before the rest, and too frozen to come back for it.
    with replica.paused():
        servers.command(master.port, "CLIENT", "KILL", "TYPE", "replica")
        assert await sender.send(4, 5) == Taken(2)
        found = await consumer.read(10)
        assert at(found) == [3, 4, 5]
        await consumer.ack(found)
        master.kill()

    receipt = await patiently(lambda: sender.send(6))
    assert redis_sentinel.master is replica
    assert receipt == Behind(Tail(3, f"{topic}-3"))
    again = [message(topic, position) for position in (4, 5, 6)]
    batch = Batch(topic, 0, 1, receipt.tail, again)
    assert await patiently(lambda: broker.publish(batch)) == Taken(3)
    # What it was handed before the failover, and forgot with it, comes again: inboxes know it.
    assert at(await patiently(lambda: consumer.read(10, wait_s=1))) == [3, 4, 5, 6]
    second = await consumer_of(broker, fence=2, topic=topic)
    assert at(await second.left_over()) == [1, 2, 3, 4, 5, 6]


def length(server, topic):
    return servers.command(server.port, "XLEN", topic)


async def test_one_dead_server_of_a_cluster_takes_its_own_shards_along_only(
    redis_cluster, redis_cluster_url, opened
):
    broker = opened(redis_cluster_url, shards=16, timeout_s=2)
    senders = [Sender(broker, TOPIC, shard) for shard in range(16)]
    for sender in senders:
        await sender.send(1)
    dead = redis_cluster.nodes[0]
    its = {int(k.rpartition(":")[2]) for k in servers.command(dead.port, "KEYS", f"{TOPIC}:*")}
    assert 0 < len(its) < 16
    one = min(its)
    for node in redis_cluster.nodes[1:]:
        servers.command(node.port, "CONFIG", "SET", "cluster-require-full-coverage", "no")
    dead.kill()
    try:
        for shard, sender in enumerate(senders):
            if shard == one:
                with pytest.raises(BrokerUnavailableError):
                    await sender.send(2)
            elif shard not in its:
                assert await patiently(lambda s=sender: s.send(2)) == Taken(1)
    finally:
        redis_cluster.ensure_running()
        for node in redis_cluster.nodes:
            servers.command(node.port, "CONFIG", "SET", "cluster-require-full-coverage", "yes")
    for shard in its:
        assert await patiently(lambda s=senders[shard]: s.send(2)) == Taken(1)


async def test_a_stream_that_moves_to_another_server_is_followed(
    redis_cluster, redis_cluster_url, opened
):
    broker = opened(redis_cluster_url)
    sender, consumer = Sender(broker, TOPIC), await consumer_of(broker)
    await sender.send(1)
    slot = servers.command(redis_cluster.nodes[0].port, "CLUSTER", "KEYSLOT", TOPIC)
    source = redis_cluster.nodes[slot * 3 // 16_384]
    target = next(node for node in redis_cluster.nodes if node is not source)
    move(redis_cluster, slot, source, target)
    try:
        assert await sender.send(2) == Taken(1)
        assert at(await consumer.read(10, wait_s=1)) == [1, 2]
        waiting = asyncio.create_task(consumer.read(10, wait_s=20))
        await asyncio.sleep(0.05)
        assert await sender.send(3) == Taken(1)
        assert at(await waiting) == [3]
    finally:
        move(redis_cluster, slot, target, source)
    assert await sender.send(4) == Taken(1)


def move(cluster, slot, source, target):
    ids = {node.port: servers.command(node.port, "CLUSTER", "MYID") for node in cluster.nodes}
    setslot = ("CLUSTER", "SETSLOT", slot)
    servers.command(target.port, *setslot, "IMPORTING", ids[source.port])
    servers.command(source.port, *setslot, "MIGRATING", ids[target.port])
    for key in servers.command(source.port, "CLUSTER", "GETKEYSINSLOT", slot, 100):
        servers.command(source.port, "MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
    for node in (target, source, *cluster.nodes):
        servers.command(node.port, *setslot, "NODE", ids[target.port])
