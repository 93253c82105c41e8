"""The broker on RabbitMQ: the contract, its own promises, and what it survives.

All of RabbitMQ's tests are in this file: it takes seconds to start, and one worker is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc

import aio_pika
import pytest
import pytest_asyncio

import semel.brokers.rabbit
from semel.brokers import RabbitBroker, connect
from semel.errors import BrokerUnavailableError, SettingsError
from semel.messages import Batch, Full, GroupBacklog, Refused, Tail, Taken
from semel.testing.brokers import ODD, BrokerContract
from semel.testing.traffic import Sender, message
from support import servers
from support.instance_world import Place, World
from support.proxy import Proxy

TOPIC = "axiom:events"


@pytest_asyncio.fixture(autouse=True)
async def _nothing_is_left():
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}
    gc.collect()  # an unclosed connection warns, and a warning is an error


class TestRabbitBroker(BrokerContract):
    examples = 5  # a history makes queues, and cuts connections

    @pytest.fixture(autouse=True)
    def _place(self, rabbit_server):
        rabbit_server.ensure_running()
        self.url = rabbit_server.url()

    async def make(self, *, shards, maxlen):
        return RabbitBroker(self.url, shards=shards)

    async def put_raw(self, broker, topic, shard, position, raw):
        async with broker._line.using() as link:
            exchange = await link.exchange(broker._exchange(topic))
            await exchange.publish(aio_pika.Message(raw), str(shard))
        return True

    async def die(self, broker, consumer):
        link = await broker._line.link()
        await link.end(cut=True)


@contextlib.asynccontextmanager
async def opened(url, **settings):
    broker = RabbitBroker(url, **settings)
    try:
        yield broker
    finally:
        await broker.aclose()


def batch(*positions, follows=0, **fields):
    tail = Tail(follows, f"{TOPIC}-{follows}") if follows else Tail()
    return Batch(TOPIC, 0, 1, tail, [message(TOPIC, p, **fields) for p in positions])


async def reads(broker, last, group="billing"):
    """The positions that come, each for the first time, until the last."""
    consumer = await broker.consumer(TOPIC, group, 0, name="reader", fence=1)
    found = []
    async with asyncio.timeout(20):
        while last not in found:
            some = await consumer.read(1000, wait_s=1.0)
            await consumer.ack(some)
            found += [each.message.position for each in some]
    return list(dict.fromkeys(found))


# --- the server ---------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [1, 2])
async def test_each_test_has_queues_of_its_own(rabbit_url, turn):
    async with opened(rabbit_url) as broker:
        await broker.join(TOPIC, "billing")
        assert (await broker.backlog(TOPIC, 0)).length == 0
        await broker.publish(batch(1))
        assert (await broker.backlog(TOPIC, 0)).length == 1


async def test_brokers_of_processes_that_come_and_go_lose_nothing(rabbit_url, tmp_path):
    urls = [rabbit_url, rabbit_url.replace("127.0.0.1", "localhost")]
    place = Place(tmp_path, urls, ["broker"], has_log=False)
    with World(place, seed=0) as world:
        await asyncio.to_thread(world.play, 4)


# --- messages -----------------------------------------------------------------------------------


async def test_messages_in_binary_mode_arrive_to_the_byte(rabbit_url):
    async with opened(rabbit_url, mode="binary") as broker:
        consumer = await broker.consumer(TOPIC, "billing", 0, name="a", fence=1)
        for odd in ODD.values():
            sent = message(TOPIC, 1, **odd)
            assert await Sender(broker, TOPIC).send_all([sent]) == Taken(1)
            (delivery,) = await consumer.read(1, wait_s=5.0)
            assert delivery.message == sent
        long = message(TOPIC, 1, id="x" * 300, tenant="y" * 300, type="z" * 300)
        assert await Sender(broker, TOPIC).send_all([long]) == Taken(1)
        (delivery,) = await consumer.read(1, wait_s=5.0)
        assert delivery.message == long
        refused = await broker.publish(batch(1, tenant="\ud800"))
        assert isinstance(refused, Refused)


async def test_a_message_of_somebody_else_is_read_when_it_is_a_cloudevent(rabbit_url):
    attributes = {"specversion": "1.0", "id": "7", "source": "/a", "type": "b", "seq": 3}
    headers = {f"cloudEvents_{name}": text for name, text in attributes.items()}
    async with opened(rabbit_url) as broker:
        consumer = await broker.consumer(TOPIC, "billing", 0, name="a", fence=1)
        async with broker._line.using() as link:
            exchange = await link.exchange(broker._exchange(TOPIC))
            await exchange.publish(aio_pika.Message(b"{}", headers=headers), "0")
        (delivery,) = await consumer.read(1, wait_s=5.0)
        assert (delivery.message.id, delivery.message.topic) == ("7", TOPIC)


async def test_a_message_that_is_too_large_is_refused_and_those_before_it_are_there(rabbit_url):
    large = message(TOPIC, 3, payload='"' + "x" * servers.RABBIT_TAKES + '"')
    async with opened(rabbit_url) as broker:
        await broker.join(TOPIC, "billing")
        await broker.publish(batch(1))
        some = [message(TOPIC, 2), large, message(TOPIC, 4)]
        refused = await broker.publish(Batch(TOPIC, 0, 1, Tail(1, f"{TOPIC}-1"), some))
        assert isinstance(refused, Refused)
        assert refused.message is large
        assert "size" in refused.why
        assert await broker.publish(batch(4, follows=2)) == Taken(1)
        found = await reads(broker, 4)
        assert sorted(found) == [1, 2, 4]


# --- publishing ---------------------------------------------------------------------------------


async def test_thousands_that_are_on_their_way_at_once_come_in_order(rabbit_url):
    async with opened(rabbit_url) as broker:
        await broker.join(TOPIC, "billing")
        assert await broker.publish(batch(*range(1, 1201))) == Taken(1200)
        assert await reads(broker, 1200) == [*range(1, 1201)]


async def test_before_a_group_has_joined_nothing_is_confirmed(rabbit_url):
    """RabbitMQ throws away what nobody is there for, and confirms it."""
    async with opened(rabbit_url) as relay, opened(rabbit_url) as worker:
        full = await relay.publish(batch(1, 2, 3))
        assert isinstance(full, Full)
        assert "no group has joined" in full.why
        await worker.join(TOPIC, "billing")
        assert await relay.publish(batch(1, 2, 3)) == Taken(3)
        assert await reads(worker, 3) == [1, 2, 3]
        await worker.leave(TOPIC, "billing")
        assert isinstance(await relay.publish(batch(4, follows=3)), Full)


async def test_groups_that_are_named_are_there_before_the_first_message(rabbit_url):
    async with opened(rabbit_url, groups={TOPIC: ["billing", "mail"]}) as broker:
        assert await broker.publish(batch(1, 2)) == Taken(2)
        backlog = await broker.backlog(TOPIC, 0)
        assert backlog.groups == [
            GroupBacklog("billing", unread=2, pending=0),
            GroupBacklog("mail", unread=2, pending=0),
        ]
        consumer = await broker.consumer(TOPIC, "mail", 0, name="a", fence=1)
        await consumer.read(1, wait_s=5.0)
        (_, mail) = (await broker.backlog(TOPIC, 0)).groups
        assert mail == GroupBacklog("mail", unread=1, pending=1)


async def test_a_full_queue_is_waited_for_and_nothing_overtakes_what_was_refused(rabbit_url):
    async with opened(rabbit_url, maxlen=3) as broker:
        await broker.join(TOPIC, "billing")
        full = await broker.publish(batch(*range(1, 9)))
        assert isinstance(full, Full)
        assert full.length == 3
        reading = asyncio.create_task(reads(broker, 8))
        async with asyncio.timeout(10):
            while await broker.publish(batch(*range(1, 9))) != Taken(8):
                await asyncio.sleep(0.01)
        assert await reading == [*range(1, 9)]


async def test_another_limit_for_the_same_queue_is_a_mistake_in_the_settings(rabbit_url):
    async with opened(rabbit_url, maxlen=3) as one, opened(rabbit_url, maxlen=4) as other:
        await one.join(TOPIC, "billing")
        with pytest.raises(SettingsError, match="same maxlen"):
            await other.join(TOPIC, "billing")
        await other.join(TOPIC, "mail")


# --- faults -------------------------------------------------------------------------------------


async def test_a_server_killed_in_the_middle_of_a_batch_loses_nothing(
    rabbit_server, rabbit_url, monkeypatch
):
    publish, sent = semel.brokers.rabbit._publish, []

    async def publish_or_kill(exchange, parcel, key):
        sent.append(parcel)
        if len(sent) == 700:
            rabbit_server.kill()
        await publish(exchange, parcel, key)

    whole = batch(*range(1, 1001))
    async with opened(rabbit_url) as broker, opened(rabbit_url) as worker:
        consumer = await worker.consumer(TOPIC, "billing", 0, name="a", fence=1)
        assert await consumer.left_over() == []
        with monkeypatch.context() as patch:
            patch.setattr("semel.brokers.rabbit._publish", publish_or_kill)
            with pytest.raises(BrokerUnavailableError, match="sending it again is right"):
                await broker.publish(whole)
        with pytest.raises(BrokerUnavailableError):
            await broker.publish(whole)
        rabbit_server.restart()
        found = {}  # in the order in which they came first
        async with asyncio.timeout(20):
            assert await in_the_end(lambda: consumer.read(0)) == []
            assert await broker.publish(whole) == Taken(1000)
            while 1000 not in found:
                with contextlib.suppress(BrokerUnavailableError):
                    some = await consumer.read(100, wait_s=1.0)
                    found.update({each.message.position: True for each in some})
                    await consumer.ack(some)
        assert list(found) == [*range(1, 1001)]


@pytest.mark.parametrize("who", ["the worker", "the relay that names its groups"])
async def test_a_binding_that_the_server_lost_is_made_again(rabbit_server, rabbit_url, who):
    """RabbitMQ 3.10 loses it, one time in twenty, when it is killed a second after it was made."""
    groups = {TOPIC: ["billing"]} if who != "the worker" else None
    with Proxy(rabbit_server.port) as proxy:
        through = rabbit_url.replace(f":{rabbit_server.port}", f":{proxy.port}")
        async with opened(through, groups=groups) as broker, opened(through) as worker:
            consumer = await worker.consumer(TOPIC, "billing", 0, name="a", fence=1)
            assert await broker.publish(batch(1)) == Taken(1)
            assert len(await consumer.read(1, wait_s=5.0)) == 1
            await lose_binding(rabbit_url, broker)
            proxy.cut()
            if who == "the worker":
                assert isinstance(await in_the_end(lambda: broker.publish(batch(2))), Full)
                await in_the_end(consumer.left_over)
            assert await in_the_end(lambda: broker.publish(batch(2))) == Taken(1)


async def test_nothing_is_published_over_a_connection_that_is_newer_than_the_joining(
    rabbit_server, rabbit_url, monkeypatch
):
    """Another group would get it, and this one would never hear of it."""
    with Proxy(rabbit_server.port) as proxy:
        through = rabbit_url.replace(f":{rabbit_server.port}/", f":{proxy.port}/")
        groups = {TOPIC: ["billing", "mail"]}
        async with opened(through, groups=groups) as broker, opened(rabbit_url) as worker:
            join, lost = broker.join, []

            async def join_and_lose(topic, group):
                link = await broker._line.link()
                await join(topic, group)
                if group == "mail" and not lost:
                    lost.append(link)
                    await lose_binding(rabbit_url, broker)
                    proxy.cut()
                    while not link.ended:
                        await asyncio.sleep(0)

            monkeypatch.setattr(broker, "join", join_and_lose)
            assert await in_the_end(lambda: broker.publish(batch(1))) == Taken(1)
            assert lost
            assert await reads(worker, 1) == [1]


async def lose_binding(url, broker):
    """As a server does that was killed."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        queue = await channel.get_queue(broker._queue(TOPIC, "billing", 0))
        await queue.unbind(broker._exchange(TOPIC), "0")


async def in_the_end(call):
    """What it answers once it has noticed that its connection is gone."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(BrokerUnavailableError):
                return await call()


@pytest.mark.parametrize("size", [10, 10_000], ids=["small", "more than is on the way at once"])
async def test_a_frozen_server_is_unavailable_and_then_goes_on(rabbit_server, rabbit_url, size):
    whole = batch(*range(1, 801), payload='"' + "x" * size + '"')
    async with opened(rabbit_url, timeout_s=0.4) as broker:
        broker._line.timeout_s = 5.0
        await broker.join(TOPIC, "billing")
        await broker.publish(batch(1))
        consumer = await broker.consumer(TOPIC, "billing", 0, name="a", fence=1)
        assert len(await consumer.read(1, wait_s=5.0)) == 1
        broker._line.timeout_s = 0.4
        with rabbit_server.paused():
            begun = asyncio.get_running_loop().time()
            for _ in range(2):  # over the connection there is, and when opening another
                with pytest.raises(BrokerUnavailableError, match="silent"):
                    await broker.publish(whole)
            with pytest.raises(BrokerUnavailableError):
                await consumer.read(1, wait_s=0.1)
            assert asyncio.get_running_loop().time() - begun < 6
        broker._line.timeout_s = 10.0
        assert await broker.publish(whole) == Taken(800)
        assert await reads(broker, 800) == [*range(1, 801)]


@pytest.mark.parametrize("when", ["before it is there", "when it is confirmed"])
async def test_a_batch_whose_confirmation_is_lost_is_sent_again(rabbit_server, rabbit_url, when):
    with Proxy(rabbit_server.port) as proxy:
        through = rabbit_url.replace(f":{rabbit_server.port}/", f":{proxy.port}/")
        async with opened(through) as broker, opened(rabbit_url) as worker:
            await worker.join(TOPIC, "billing")
            await broker.publish(batch(1, 2))
            cut = proxy.cut_before_request if "before" in when else proxy.cut_after_request
            cut(f"{TOPIC}-3".encode())
            with pytest.raises(BrokerUnavailableError):
                await broker.publish(batch(3, 4, 5, follows=2))
            assert proxy.cuts == 1
            assert await broker.publish(batch(3, 4, 5, follows=2)) == Taken(3)
            assert await reads(worker, 5) == [1, 2, 3, 4, 5]


async def test_a_reader_whose_connection_is_lost_goes_on(rabbit_server, rabbit_url):
    with Proxy(rabbit_server.port) as proxy:
        through = rabbit_url.replace(f":{rabbit_server.port}/", f":{proxy.port}/")
        async with opened(through) as broker, opened(rabbit_url) as relay:
            consumer = await broker.consumer(TOPIC, "billing", 0, name="a", fence=1)
            await relay.publish(batch(1, 2, 3))
            had = await consumer.read(2, wait_s=5.0)
            await consumer.ack(had[:1])
            waiting = asyncio.create_task(_until_empty(consumer))
            proxy.cut()
            await waiting
            await consumer.ack(had[1:])  # of the lost channel: it comes again
            await relay.publish(batch(4, follows=3))
            found = []
            async with asyncio.timeout(10):
                while not found or found[-1].message.position != 4:
                    with contextlib.suppress(BrokerUnavailableError):
                        found += await consumer.read(10, wait_s=1.0)
            assert [each.message.position for each in found] == [2, 3, 4]
            assert found[0].count == 2


async def _until_empty(consumer):
    """Until the loss is noticed."""
    with contextlib.suppress(BrokerUnavailableError):
        while not consumer._channel.is_closed:
            await consumer.read(10, wait_s=0.05)
            await asyncio.sleep(0)


async def test_the_next_reader_waits_until_the_one_before_is_gone(rabbit_url):
    """Whatever a former owner has in hand, nothing overtakes it."""
    async with opened(rabbit_url) as one, opened(rabbit_url) as other:
        first = await one.consumer(TOPIC, "billing", 0, name="a", fence=1)
        await one.publish(batch(1, 2, 3))
        assert len(await first.read(2, wait_s=5.0)) == 2
        second = await other.consumer(TOPIC, "billing", 0, name="b", fence=2)
        assert await second.left_over() == []
        assert await second.read(10, wait_s=0.2) == []
        await first.close()
        found = []
        async with asyncio.timeout(10):
            while len(found) < 3:
                found += await second.read(10, wait_s=1.0)
        assert [each.message.position for each in found] == [1, 2, 3]


async def test_closing_while_it_connects_ends_both(rabbit_server, rabbit_url):
    async with opened(rabbit_url) as broker:
        with rabbit_server.paused():
            publishing = asyncio.create_task(broker.publish(batch(1)))
            await asyncio.sleep(0.05)
            await broker.aclose()
            with pytest.raises(BrokerUnavailableError):
                await publishing


# --- settings -----------------------------------------------------------------------------------


async def test_any_topic_and_group_is_a_name(rabbit_url):
    async with opened(rabbit_url, shards=2) as broker:
        for topic in ("a.b", "a b", "a/b", "a%2Fb", "#2F", "~", "Größe/7"):
            consumer = await broker.consumer(topic, topic, 1, name=topic, fence=1)
            assert await Sender(broker, topic, 1).send(1) == Taken(1)
            (delivery,) = await consumer.read(9, wait_s=5.0)
            assert delivery.message.topic == topic
        with pytest.raises(SettingsError, match="shorter"):
            await broker.join("x" * 300, "billing")


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("http://localhost", {}),
        ("amqp://localhost", {"mode": "text"}),
        ("amqp://localhost", {"timeout_s": 0}),
        ("amqp://localhost", {"groups": {"orders": "billing"}}),
    ],
)
def test_settings_that_cannot_work_are_refused(url, settings):
    with pytest.raises(SettingsError):
        RabbitBroker(url, **settings)


async def test_a_server_that_is_not_there_is_told_of_before_anything_is_published(
    unused_tcp_port,
):
    async with opened(f"amqp://127.0.0.1:{unused_tcp_port}/") as broker:
        with pytest.raises(BrokerUnavailableError):
            await broker.tail(TOPIC, 0)


def test_a_password_is_not_shown():
    assert "secret" not in repr(RabbitBroker("amqp://me:secret@localhost/"))


def test_settings_may_stand_in_the_url_and_the_drivers_stay_there():
    broker = connect("amqp://me@localhost/shop?shards=4&maxlen=9&heartbeat=3")
    assert (broker.shards, broker._maxlen) == (4, 9)
    assert broker._line._url == "amqp://me@localhost/shop?heartbeat=3"
    assert connect("amqp://localhost?maxlen=none")._maxlen is None


def test_a_driver_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr("semel.brokers.rabbit._driver", "9.6.2")
    with pytest.raises(SettingsError, match=r"aio-pika 10\.0 or later"):
        RabbitBroker("amqp://localhost")
