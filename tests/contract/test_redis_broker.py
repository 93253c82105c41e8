"""The contract on Redis, Valkey, a cluster and behind Sentinel; and what only Redis has."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager

import pytest
import redis.asyncio

from semel.brokers.redis import RedisBroker
from semel.errors import BrokerUnavailableError
from semel.messages import Behind, Forked, Full, GroupBacklog, Refused, Tail, Taken
from semel.stores.redis.address import address_of, all_of
from semel.testing.brokers import BrokerContract, at
from semel.testing.traffic import Sender, message
from support import servers

pytestmark = pytest.mark.contract

TOPIC = "axiom:events"
HELPER = "semel:{axiom:events}:broker"


@asynccontextmanager
async def client_of(url):
    client = address_of(url, 5).open_async()
    try:
        yield client
    finally:
        for each in all_of(client):
            await each.aclose()


class OnRedis(BrokerContract):
    quiet_s = 0.02  # what is there is handed out before anybody waits

    async def make(self, *, shards, maxlen):
        return RedisBroker(self.url, shards=shards, maxlen=maxlen)

    async def put_raw(self, broker, topic, shard, position, raw):
        async with client_of(self.url) as admin:
            await admin.xadd(broker._stream(topic, shard).key, {"event": raw}, id=f"{position}-0")
        return True


class TestRedis(OnRedis):
    @pytest.fixture(autouse=True)
    def _place(self, redis_url):
        self.url = redis_url


class TestValkey(OnRedis):
    @pytest.fixture(autouse=True)
    def _place(self, valkey_url):
        self.url = valkey_url


class TestCluster(OnRedis):
    examples = 15

    @pytest.fixture(autouse=True)
    def _place(self, redis_cluster_url):
        self.url = redis_cluster_url


class TestSentinel(OnRedis):
    """In the other mode: attributes as fields."""

    examples = 15

    @pytest.fixture(autouse=True)
    def _place(self, redis_sentinel_url):
        self.url = redis_sentinel_url

    async def make(self, *, shards, maxlen):
        return RedisBroker(self.url, shards=shards, maxlen=maxlen, mode="binary")


# --- what only Redis has ------------------------------------------------------------------------


@pytest.fixture
async def opened(redis_url):
    brokers = []

    def open_broker(**settings):
        brokers.append(RedisBroker(redis_url, **settings))
        return brokers[-1]

    yield open_broker
    for broker in brokers:
        await broker.aclose()


@pytest.fixture
async def broker(opened):
    return opened()


@pytest.fixture
async def client(redis_url):
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def sender(broker):
    return Sender(broker, TOPIC)


async def consumer_of(broker, group="billing", *, fence=1, topic=TOPIC):
    return await broker.consumer(topic, group, 0, name=f"worker-{fence}", fence=fence)


async def calls(client):
    """How often each command was called since this was asked last, without asking itself."""
    stats = await client.info("commandstats")
    await client.config_resetstat()
    counts = {name.removeprefix("cmdstat_"): seen["calls"] for name, seen in stats.items()}
    return {name: n for name, n in counts.items() if not name.startswith(("info", "config"))}


async def test_anybody_finds_the_events_under_the_topics_own_name(broker, sender, client):
    await sender.send(7, 9)
    assert [id for id, _ in await client.xrange(TOPIC)] == ["7-0", "9-0"]
    ((_, fields),) = await client.xrange(TOPIC, "7-0", "7-0")
    assert list(fields) == ["event"]
    assert '"type":"order.placed"' in fields["event"]
    assert sorted(await client.keys()) == sorted([TOPIC, HELPER])


async def test_shards_are_streams_of_their_own_and_binary_entries_have_attributes(opened, client):
    broker = opened(shards=4, mode="binary")
    await Sender(broker, TOPIC, 3).send(1)
    ((id, fields),) = await client.xrange(f"{TOPIC}:3")
    assert id == "1-0"
    assert (fields["type"], fields["data"]) == ("order.placed", '{"n":1}')
    assert await client.exists("semel:{axiom:events:3}:broker")


async def test_a_request_to_begin_that_comes_twice_does_not_forget_what_was_handed_out(
    broker, sender
):
    await sender.send(1, 2, 3)
    consumer = await broker.consumer(TOPIC, "g", 0, name="a", fence=1)
    lost = await consumer.read(2)
    await consumer.begin()  # the same request once more, from a connection that was given up
    consumer._reads -= 1  # nobody has heard the answer
    assert await consumer.read(2) == lost


async def test_one_command_publishes_one_reads_and_one_acknowledges(broker, sender, client):
    consumer = await consumer_of(broker)
    for script_is in ("new", "known"):
        await calls(client)
        first = sender.follows.position + 1
        await sender.send(*range(first, first + 100))
        found = await consumer.read(1000)
        await consumer.ack(found)
        assert len(found) == 100
        seen = await calls(client)
        if script_is == "known":
            assert seen["evalsha"] == 3
            assert "eval" not in seen
            assert (seen["xadd"], seen["xreadgroup"], seen["xack"]) == (100, 1, 1)


async def test_a_client_that_was_given_is_left_open_and_may_decode(redis_url, client):
    broker = RedisBroker(client)
    consumer = await consumer_of(broker)
    large = message(TOPIC, 1, payload='"' + "x" * (1 << 20) + '"')
    sender = Sender(broker, TOPIC)
    assert await sender.send_all([large]) == Taken(1)
    assert [d.message for d in await consumer.read(10)] == [large]
    assert await consumer.read(10, wait_s=0.05) == []
    await broker.aclose()
    assert await client.ping()


async def test_a_key_that_is_no_stream_is_told_of(broker, sender, client):
    await client.set(TOPIC, "somebody else's")
    with pytest.raises(BrokerUnavailableError, match=r"'axiom:events' is no stream.*another name"):
        await sender.send(1)


# --- the tail


async def test_a_stream_that_was_deleted_is_filled_anew(broker, sender, client):
    await sender.send(1, 2, 3)
    await client.delete(TOPIC)
    assert await sender.send(4) == Behind(Tail())
    assert await sender.publish([message(TOPIC, p) for p in range(1, 5)], Tail()) == Taken(4)
    assert await broker.tail(TOPIC, 0) == Tail(4, f"{TOPIC}-4")


async def test_a_stream_that_has_less_than_was_published_says_so(broker, sender, client):
    """As after a failover; the hash beside it speaks of an entry that is not there."""
    await sender.send(1, 2, 3)
    entries = await client.xrange(TOPIC)
    await client.delete(TOPIC)
    for id, fields in entries[:2]:
        await client.xadd(TOPIC, fields, id=id)
    assert await sender.send(4) == Behind(Tail(2))
    again = [message(TOPIC, 3), message(TOPIC, 4)]
    assert await sender.publish(again, Tail(2, f"{TOPIC}-2")) == Taken(2)


async def test_without_the_hash_the_position_counts(broker, sender, client):
    await sender.send(1, 2, 3)
    await client.delete(HELPER)
    assert await broker.tail(TOPIC, 0) == Tail(3)
    assert await sender.publish([message(TOPIC, 4)], Tail(3, "unknown")) == Taken(1)
    assert await sender.publish([message(TOPIC, p) for p in (3, 4, 5)], Tail()) == Taken(1)


async def test_a_lost_hash_hides_no_fork_before_the_tail(broker, sender, client):
    await sender.send(1, 2, 3)
    await client.delete(HELPER)
    other = message(TOPIC, 2, id="other")
    assert await sender.publish([other], Tail()) == Forked(Tail(2, f"{TOPIC}-2"))
    assert await sender.publish([message(TOPIC, 2)], Tail()) == Taken(0)


@pytest.mark.parametrize("entry", ["*", "9-1"])
async def test_an_entry_of_a_stranger_stops_the_relay_loudly(broker, sender, client, caplog, entry):
    await sender.send(1)
    await client.xadd(TOPIC, {"by": "hand"}, id=entry)
    receipt = await sender.send(2)
    assert isinstance(receipt, Forked)
    assert receipt.tail.position >= 9
    assert "no relay has written" in caplog.text
    again = await sender.publish([message(TOPIC, 1)], Tail())
    assert isinstance(again, Forked)


async def test_an_entry_beside_ours_is_a_strangers_even_without_the_hash(broker, sender, client):
    await sender.send(1, 2)
    await client.xadd(TOPIC, {"by": "hand"}, id="2-1")
    await client.delete(HELPER)
    assert await sender.send(3) == Forked(Tail(2))


async def test_a_stream_that_strangers_began_is_not_carried_on(broker, sender, client):
    await client.xadd(TOPIC, {"by": "hand"})
    assert isinstance(await sender.send(1), Forked)
    assert await client.xlen(TOPIC) == 1


# --- trimming


async def test_nothing_that_any_group_needs_is_trimmed(opened, client):
    broker = opened(maxlen=10)
    sender = Sender(broker, TOPIC)
    quick, slow = await consumer_of(broker, "quick"), await consumer_of(broker, "slow")
    await client.xgroup_create(TOPIC, "strangers", "0")
    for first in range(1, 19, 3):
        # Positions are far apart, as where many topics share an outbox.
        assert await sender.send(*(1000 * p for p in range(first, first + 3))) == Taken(3)
        await quick.ack(await quick.read(100))
    held = await slow.read(5)
    theirs = await client.xreadgroup("strangers", "one of them", {TOPIC: ">"}, count=7)
    assert [len(entries) for _, entries in theirs] == [7]
    await slow.ack(held[:1])
    assert await sender.send(19_000) == Taken(1)
    assert (await client.xinfo_stream(TOPIC))["first-entry"][0] == "1000-0", "theirs are pending"
    await client.xack(TOPIC, "strangers", *(f"{p}000-0" for p in range(1, 8)))
    assert await sender.send(20_000) == Taken(1)
    assert (await client.xinfo_stream(TOPIC))["first-entry"][0] == "2000-0", "slow's is pending"
    await slow.ack(held)
    receipt = await sender.send(21_000)
    assert receipt == Taken(1)
    assert (await client.xinfo_stream(TOPIC))["first-entry"][0] == "6000-0", "slow has not read it"
    assert at(await slow.read(100)) == [1000 * p for p in range(6, 22)]
    await client.xgroup_destroy(TOPIC, "strangers")
    await slow.ack(await slow.read(100))
    backlog = await broker.backlog(TOPIC, 0)
    assert backlog.length == 16


async def test_trimming_keeps_as_many_as_the_target(opened, client):
    broker = opened(maxlen=10)
    sender = Sender(broker, TOPIC)
    consumer = await consumer_of(broker)
    for first in range(1, 200, 7):
        assert await sender.send(*range(first, first + 7)) == Taken(7)
        await consumer.ack(await consumer.read(100))
        assert min(first + 6, 10) <= await client.xlen(TOPIC) <= 17


@pytest.mark.parametrize("where", ["redis_url", "redis_cluster_url"])
async def test_last_ack_of_a_long_batch_trims_the_stream_to_the_target(where, request):
    url = request.getfixturevalue(where)
    relays = RedisBroker(url, maxlen=50, groups={TOPIC: ["quick", "slow"]})
    workers = RedisBroker(url)  # its own maxlen, 10,000, does not count
    async with client_of(url) as client:
        assert await Sender(relays, TOPIC).send(*range(1, 401)) == Taken(400)
        quick, slow = await consumer_of(workers, "quick"), await consumer_of(workers, "slow")
        await quick.ack(await quick.read(1000))
        assert await client.xlen(TOPIC) == 400, "slow has not read"
        first, *rest = await slow.read(1000)
        await slow.ack(rest)
        assert await client.xlen(TOPIC) == 400, "the first entry is pending"
        await slow.ack([first])
        assert await client.xlen(TOPIC) == 50
        assert await workers.tail(TOPIC, 0) == Tail(400, f"{TOPIC}-400")
    await relays.aclose()
    await workers.aclose()


async def test_ack_of_a_worker_with_a_target_trims_nothing_of_a_relay_without_one(opened, client):
    relays, workers = opened(maxlen=None), opened(maxlen=5)
    await Sender(relays, TOPIC).send(*range(1, 31))
    consumer = await consumer_of(workers)
    await consumer.ack(await consumer.read(100))
    await workers.tail(TOPIC, 0)
    await relays.tail(TOPIC, 0)
    assert await client.xlen(TOPIC) == 30


async def test_tail_of_a_relay_trims_what_other_processes_acknowledged(opened, client):
    relays, others = opened(maxlen=5, groups={TOPIC: ["strangers"]}), opened(maxlen=5)
    await Sender(relays, TOPIC).send(*range(1, 31))
    await client.xreadgroup("strangers", "one of them", {TOPIC: ">"})
    await client.xack(TOPIC, "strangers", *(f"{p}-0" for p in range(1, 31)))
    assert await others.tail(TOPIC, 0) == Tail(30, f"{TOPIC}-30")
    assert await client.xlen(TOPIC) == 30, "only the publishing broker trims"
    assert await relays.tail(TOPIC, 0) == Tail(30, f"{TOPIC}-30")
    assert await client.xlen(TOPIC) == 5


async def test_ack_trims_nothing_before_an_entry_of_a_stranger(opened, client):
    broker = opened(maxlen=5)
    consumer = await consumer_of(broker)
    await Sender(broker, TOPIC).send(*range(1, 31))
    found = await consumer.read(100)
    await client.xadd(TOPIC, {"by": "hand"}, id="30-1")
    await consumer.ack(found)
    assert await client.xlen(TOPIC) == 31


async def test_what_cannot_be_trimmed_is_not_looked_for_with_every_batch(opened, client):
    broker = opened(maxlen=100)
    sender = Sender(broker, TOPIC)
    await broker.join(TOPIC, "asleep")
    await sender.send(*range(1, 101))
    await calls(client)
    for position in range(101, 201):
        assert await sender.send(position) == Taken(1)
    # Until 7.0 the hundred looks at the stream itself are counted too.
    name, at_most = ("xinfo|groups", 12) if await newer(client) else ("xinfo", 112)
    assert (await calls(client))[name] <= at_most
    full = await sender.send(201)
    assert isinstance(full, Full)
    assert full.length == 200
    assert "'asleep' has 200 unread and 0 pending" in full.why


async def newer(client):
    """From 7.0 on, subcommands are counted apart."""
    return int((await client.info("server"))["redis_version"].partition(".")[0]) >= 7


async def test_declared_groups_are_there_before_the_first_message(opened, client):
    broker = opened(shards=2, groups={TOPIC: ["billing", "mail"]})
    await Sender(broker, TOPIC, 1).send(1, 2)
    groups = await client.xinfo_groups(f"{TOPIC}:1")
    assert [(g["name"], g["last-delivered-id"]) for g in groups] == [
        ("billing", "0-0"),
        ("mail", "0-0"),
    ]
    await client.flushall()
    sender = Sender(broker, TOPIC, 1)
    await sender.send(1, 2)
    assert len(await client.xinfo_groups(f"{TOPIC}:1")) == 2
    await calls(client)
    await sender.send(3)
    assert (await calls(client))["evalsha"] == 1


async def test_a_topic_without_declared_groups_needs_none(opened):
    broker = opened(groups={TOPIC: []})
    assert await Sender(broker, TOPIC).send(1) == Taken(1)


async def test_a_group_that_has_left_holds_nothing_up(opened, client):
    broker = opened(maxlen=5)
    sender = Sender(broker, TOPIC)
    await broker.join(TOPIC, "gone")
    consumer = await consumer_of(broker)
    for position in range(1, 11):
        await sender.send(position)
    await consumer.ack(await consumer.read(100))
    assert isinstance(await sender.send(11), Full)
    await broker.leave(TOPIC, "gone")
    await broker.leave(TOPIC, "never there")
    await broker.leave("never written to", "gone")
    assert await sender.send(11) == Taken(1)


# --- what Redis refuses


async def test_out_of_memory_is_full_and_readers_go_on(broker, sender, client):
    await sender.send(1, 2, 3)
    consumer = await consumer_of(broker)
    assert at(await consumer.read(1)) == [1]
    await client.config_set("maxmemory-policy", "noeviction")
    await client.config_set("maxmemory", 1)
    try:
        receipt = await sender.send(4)
        assert isinstance(receipt, Full)
        assert "maxmemory" in receipt.why
        assert await client.xlen(TOPIC) == 3
        deposed, consumer = consumer, await consumer_of(broker, fence=2)
        found = [*await consumer.left_over(), *await consumer.read(100)]
        assert at(found) == [1, 2, 3]
        await consumer.ack(found)
        assert await deposed.read(1) == []
        assert await sender.publish([message(TOPIC, 3)], Tail()) == Taken(0)
    finally:
        await client.config_set("maxmemory", 0)
    assert await sender.send(4) == Taken(1)


async def test_a_message_that_redis_cannot_take_is_refused(broker, sender, client):
    consumer = await consumer_of(broker)
    before = (await client.config_get("proto-max-bulk-len"))["proto-max-bulk-len"]
    await client.config_set("proto-max-bulk-len", 1 << 20)
    try:
        large = message(TOPIC, 2, payload='"' + "x" * (1 << 20) + '"')
        receipt = await sender.send_all([message(TOPIC, 1), large, message(TOPIC, 3)])
        assert isinstance(receipt, Refused)
        assert receipt.message is large
        assert "1048576" in receipt.why
    finally:
        await client.config_set("proto-max-bulk-len", before)
    assert at(await consumer.read(10)) == [1]


# --- readers


async def test_strangers_may_read_with_the_same_group(broker, sender, client):
    consumer = await consumer_of(broker)
    await sender.send(1, 2, 3)
    await client.xreadgroup("billing", "stranger", {TOPIC: ">"}, count=1)
    assert at(await consumer.read(1)) == [2]
    second = await consumer_of(broker, fence=2)
    assert at(await second.left_over()) == [2]
    assert at(await second.read(10)) == [3]
    backlog = await broker.backlog(TOPIC, 0)
    assert [(g.unread, g.pending) for g in backlog.groups] == [(0, 3)]


async def test_strangers_that_fell_silent_are_found_behind_all_others(
    broker, sender, client, caplog
):
    """`XPENDING - + 100` sees a busy owner's hundred lowest, for ever."""
    consumer = await consumer_of(broker)
    await sender.send(*range(1, 251))
    assert len(await consumer.read(200)) == 200
    await client.xreadgroup("billing", "stranger", {TOPIC: ">"}, count=40)
    await client.xclaim(TOPIC, "billing", "stranger", 0, ["230-0"], idle=400_000, retrycount=3)
    await client.xclaim(TOPIC, "billing", "stranger", 0, ["231-0"], idle=299_000)
    await client.xclaim(TOPIC, "billing", "semel:lost:7", 0, ["240-0"], idle=301_000)
    await sender.send(251)
    found = await consumer.reclaim(300.0)
    found += await consumer.reclaim(300.0)
    assert at(found) == [230, 240]
    first, second = found
    assert (first.count, first.consumer, second.consumer) == (4, "stranger", "lost")
    assert 400 <= first.idle_s < 410
    assert "230-0 was handed to stranger 400 s ago" in caplog.text
    assert "handed out 3 times before" in caplog.text
    assert caplog.text.count("taken over") == 2
    assert await consumer.reclaim(300.0) == [], "that was all"
    assert await consumer.reclaim(300.0) == [], "and they are ours, at work"
    assert at(await consumer.read(100)) == list(range(241, 252))
    await consumer.ack(found)
    assert {row["message_id"] for row in await pending_of(client)}.isdisjoint({"230-0", "240-0"})


async def test_strangers_are_reclaimed_in_pages(broker, sender, client):
    consumer = await consumer_of(broker)
    await sender.send(*range(1, 26))
    await client.xreadgroup("billing", "stranger", {TOPIC: ">"})
    ids = [row["message_id"] for row in await pending_of(client)]
    await client.xclaim(TOPIC, "billing", "stranger", 0, ids, idle=400_000)
    pages = []
    while page := await consumer.reclaim(300.0, 10):
        pages.append(at(page))
    assert pages == [list(range(1, 11)), list(range(11, 21)), list(range(21, 26))]


async def pending_of(client):
    return await client.xpending_range(TOPIC, "billing", "-", "+", 1000)


@pytest.mark.parametrize("whose", ["ours", "a stranger's"])
async def test_pending_entries_that_somebody_deleted_are_told_of_once(
    broker, sender, client, caplog, whose
):
    first = await consumer_of(broker)
    await sender.send(1, 2, 3, 4)
    await first.read(4)
    if whose != "ours":
        ids = [f"{p}-0" for p in range(1, 5)]
        await client.xclaim(TOPIC, "billing", "stranger", 0, ids, idle=400_000)
    await client.xdel(TOPIC, "2-0", "3-0")
    second = await consumer_of(broker, fence=2)
    found = [*await second.left_over(), *await second.reclaim(300.0)]
    assert at(found) == [1, 4]
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 1
    assert "2 entries were handed out" in told[0].getMessage()
    assert "2-0, 3-0" in told[0].getMessage()
    assert [row["message_id"] for row in await pending_of(client)] == ["1-0", "4-0"]


async def test_former_owners_are_forgotten_when_they_have_nothing_pending(broker, sender, client):
    await sender.send(1, 2, 3)
    for fence in (1, 2, 3):
        consumer = await consumer_of(broker, fence=fence)
        while await consumer.left_over():
            pass
        assert await consumer.read(1)
    await client.xgroup_createconsumer(TOPIC, "billing", "stranger")
    consumer = await consumer_of(broker, fence=4)
    assert at(await consumer.left_over(2)) == [1, 2]
    assert at(await consumer.left_over(2)) == [3]
    assert await consumer.left_over(2) == []
    names = {row["name"] for row in await client.xinfo_consumers(TOPIC, "billing")}
    assert names == {"semel:worker-4:4", "stranger"}


async def test_a_former_owner_that_has_something_pending_is_not_forgotten(broker, sender, client):
    """As after a failover that lost a takeover: what it has is found when it has been idle."""
    consumer = await consumer_of(broker, fence=2)
    await sender.send(1)
    await consumer.read(1)
    await client.xclaim(TOPIC, "billing", "semel:former:1", 0, ["1-0"])
    assert await consumer.left_over() == []
    (held,) = await pending_of(client)
    assert held["consumer"] == "semel:former:1"
    assert at(await consumer.reclaim(0.0)) == [1]


async def test_an_owner_that_is_deposed_in_the_middle_takes_nothing_more_over(
    broker, sender, client
):
    first = await consumer_of(broker, fence=1)
    await sender.send(1, 2, 3, 4)
    await first.read(3)
    await client.xreadgroup("billing", "stranger", {TOPIC: ">"})
    second = await consumer_of(broker, fence=2)
    assert at(await second.left_over(1)) == [1]
    third = await consumer_of(broker, fence=3)
    assert await second.left_over(1) == []
    assert await second.reclaim(0.0) == []
    assert at(await third.left_over()) == [1, 2, 3]
    assert at(await third.reclaim(0.0)) == [4]


async def test_a_group_that_is_gone_begins_again_with_the_oldest(broker, sender, client, caplog):
    consumer = await consumer_of(broker)
    await sender.send(1, 2)
    assert at(await consumer.read(10)) == [1, 2]
    await client.flushall()
    assert await consumer.read(10, wait_s=0.01) == []
    assert "lost the group billing" in caplog.text
    await sender.publish([message(TOPIC, p) for p in (1, 2, 3)], Tail())
    assert at(await consumer.read(10, wait_s=1)) == [1, 2, 3]
    assert await consumer.left_over() == []
    assert await consumer.reclaim(0.0) == []


async def test_a_former_owner_is_told_once_and_waits_as_long_as_it_asked_for(
    broker, sender, caplog
):
    former = await consumer_of(broker, fence=1)
    await consumer_of(broker, fence=2)
    await sender.send(1)
    assert await former.read(10, wait_s=0.05) == []
    assert await former.reclaim(0.0) == []
    assert await former.left_over() == []
    assert caplog.text.count("a later owner reads (its fence is 2, ours 1)") == 1


async def test_entries_that_others_wrote_are_read_as_far_as_they_are_events(broker, sender, client):
    consumer = await consumer_of(broker)
    document = '{"specversion":"1.0","id":"a","source":"/x","type":"t","subject":"order/7"}'
    await client.xadd(TOPIC, {"event": document}, id="5-0")
    binary = {"specversion": "1.0", "id": "b", "source": "/x", "type": "t", "data": '{"a":1}'}
    await client.xadd(TOPIC, binary, id="6-0")
    await client.xadd(TOPIC, {"anything": "else"}, id="7-0")
    first, second, third = await consumer.read(10)
    assert (first.message.position, first.message.topic) == (5, TOPIC)
    assert (first.message.aggregate_id, second.message.data) == ("7", {"a": 1})
    assert third.message is None
    assert "neither" in third.problem
    assert third.raw == b"else"


async def test_the_backlog_tells_the_age_of_the_oldest_pending(broker, sender, client):
    consumer = await consumer_of(broker)
    await sender.send(1, 2, 3)
    await consumer.read(2)
    await client.xclaim(TOPIC, "billing", "stranger", 0, ["1-0"], idle=90_000, justid=True)
    (group,) = (await broker.backlog(TOPIC, 0)).groups
    assert group == GroupBacklog("billing", 1, 2, group.oldest_pending_s)
    assert 90 <= group.oldest_pending_s < 100


# --- a cluster


async def test_shards_lie_all_over_a_cluster(redis_cluster, redis_cluster_url):
    broker = RedisBroker(redis_cluster_url, shards=16, groups={TOPIC: ["billing"]})
    for shard in range(16):
        sender = Sender(broker, TOPIC, shard)
        assert await sender.send(1, 2, 3) == Taken(3)
        consumer = await broker.consumer(TOPIC, "billing", shard, name="w", fence=1)
        found = await consumer.read(10)
        assert at(found) == [1, 2, 3]
        await consumer.ack(found)
    await broker.aclose()
    held = [servers.command(node.port, "DBSIZE") for node in redis_cluster.nodes]
    assert sum(held) == 33  # and how many shards there are
    assert all(held)
