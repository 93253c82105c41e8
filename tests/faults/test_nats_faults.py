"""NATS is killed, frozen, cut off and meddled with: nothing is lost, doubled or out of order."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest
import pytest_asyncio

from semel.brokers import NatsBroker
from semel.brokers.nats.line import Wire
from semel.errors import BrokerUnavailableError, SettingsError
from semel.messages import Batch, Behind, Fenced, Full, Refused, Tail, Taken
from semel.testing.traffic import Sender, message
from support.proxy import Proxy

TOPIC = "axiom:events"


@pytest_asyncio.fixture(autouse=True)
async def _nothing_is_left():
    yield
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    gc.collect()  # an unclosed connection warns, and a warning is an error


@contextlib.asynccontextmanager
async def opened(url, **settings):
    broker = NatsBroker(url, **settings)
    try:
        yield broker
    finally:
        await broker.aclose()


@pytest.fixture
def proxy(nats_server, nats_url):
    with Proxy(nats_server.port) as proxy:
        yield proxy


def url_of(proxy):
    return f"nats://{proxy.host}:{proxy.port}"


async def everything(url, group="reader"):
    """The positions that lie there, in their order."""
    async with opened(url) as broker:
        consumer = await broker.consumer(TOPIC, group, 0, name="reader", fence=1)
        found = []
        while some := [*await consumer.left_over(), *await consumer.read(1000)]:
            found += [each.message.position for each in some]
        return found


def batch(*positions, follows=0, fence=1, **fields):
    tail = Tail(follows, f"{TOPIC}-{follows}") if follows else Tail()
    return Batch(TOPIC, 0, fence, tail, [message(TOPIC, p, **fields) for p in positions])


# --- publishing ---------------------------------------------------------------------------------


async def test_a_server_killed_in_the_middle_of_a_batch_has_its_beginning(
    nats_server, nats_url, monkeypatch
):
    send, sent = Wire.send, []

    async def send_or_kill(wire, request):
        sent.append(request)
        if len(sent) == 1500:
            nats_server.kill()
        return await send(wire, request)

    whole = batch(*range(1, 2001))
    async with opened(nats_url, maxlen=None) as broker:
        with monkeypatch.context() as patch:
            patch.setattr(Wire, "send", send_or_kill)
            with pytest.raises(BrokerUnavailableError, match="sending it again is right"):
                await broker.publish(whole)
        with pytest.raises(BrokerUnavailableError):
            await broker.publish(whole)
        nats_server.restart()
        receipt = await broker.publish(whole)
        assert isinstance(receipt, Taken)
        assert 0 < receipt.added < 2000, "some of it was there"
    assert await everything(nats_url) == [*range(1, 2001)]


@pytest.mark.parametrize("size", [10, 10_000], ids=["small", "more than is on the way at once"])
async def test_a_frozen_server_is_unavailable_and_then_goes_on(nats_server, nats_url, size):
    messages = [message(TOPIC, p, payload='"' + "x" * size + '"') for p in range(1, 801)]
    async with opened(nats_url, timeout_s=0.4) as broker:
        await broker.publish(batch(1))
        with nats_server.paused():
            begun = asyncio.get_running_loop().time()
            for _ in range(2):  # over the connection there is, and when opening another
                with pytest.raises(BrokerUnavailableError, match="silent"):
                    await broker.publish(Batch(TOPIC, 0, 1, Tail(), messages))
            assert asyncio.get_running_loop().time() - begun < 4
        broker._line.timeout_s = 5.0
        assert isinstance(await broker.publish(batch(1)), Taken)
        assert isinstance(await broker.publish(Batch(TOPIC, 0, 1, Tail(), messages)), Taken)
    assert await everything(nats_url) == [*range(1, 801)]


@pytest.mark.parametrize("when", ["before it is stored", "when it is confirmed"])
async def test_a_batch_whose_confirmation_is_lost_is_there_once(nats_url, proxy, when):
    async with opened(url_of(proxy)) as broker:
        await broker.publish(batch(1, 2))
        cut = proxy.cut_before_request if when == "before it is stored" else proxy.cut_after_request
        cut(b"Nats-Msg-Id")
        with pytest.raises(BrokerUnavailableError):
            await broker.publish(batch(3, 4, 5, follows=2))
        assert proxy.cuts == 1
        assert isinstance(await broker.publish(batch(3, 4, 5, follows=2)), Taken)
        assert await broker.publish(batch(6, follows=5)) == Taken(1)
    assert await everything(nats_url) == [1, 2, 3, 4, 5, 6]


async def test_two_who_both_believe_to_be_the_owner_publish_one_sequence(nats_url):
    """Whatever the one sends between any two messages of the other."""

    async def relay(fence):
        async with opened(nats_url) as broker:
            sent = 0
            while sent < 140:
                some = batch(*range(sent + 1, sent + 8), follows=sent, fence=fence)
                try:
                    receipt = await broker.publish(some)
                except BrokerUnavailableError:
                    continue  # the other two were faster, again and again
                if isinstance(receipt, Fenced):
                    return "fenced"
                assert isinstance(receipt, Taken), receipt
                sent += 7
            return "done"

    ends = await asyncio.gather(relay(1), relay(2), relay(2))
    assert ends[1:] == ["done", "done"]
    assert await everything(nats_url) == [*range(1, 141)]


async def test_a_former_owner_is_out_before_the_new_one_has_sent_anything(nats_url):
    async with opened(nats_url) as old, opened(nats_url) as new:
        assert await old.publish(batch(1, fence=1)) == Taken(1)
        assert await new.publish(batch(1, fence=2)) == Taken(0)
        assert await old.publish(batch(2, follows=1, fence=1)) == Fenced(2)


@pytest.mark.parametrize("late", [(2, 3), (2, 3, 4), (2, 3, 4, 5, 6)])
async def test_nothing_of_a_former_owners_batch_fits_behind_what_the_new_one_wrote(nats_url, late):
    """Its later messages expect numbers that the new owner's entries have."""
    async with opened(nats_url) as old, opened(nats_url) as new:
        assert await old.publish(batch(1, fence=1)) == Taken(1)
        assert await new.publish(batch(2, follows=1, fence=2)) == Taken(1)
        assert await old.publish(batch(*late, follows=1, fence=1)) == Fenced(2)
        assert await new.publish(batch(3, follows=2, fence=2)) == Taken(1)
    assert await everything(nats_url) == [1, 2, 3]


async def test_an_owner_that_comes_back_looks_at_what_others_have_published(nats_url):
    async with opened(nats_url) as one, opened(nats_url) as other:
        assert await one.publish(batch(1, fence=1)) == Taken(1)
        assert await other.publish(batch(2, follows=1, fence=2)) == Taken(1)
        assert await one.publish(batch(3, follows=2, fence=3)) == Taken(1)


async def test_what_is_published_while_one_looks_is_seen(nats_url):
    async with opened(nats_url) as one, opened(nats_url) as other:
        await other.publish(batch(1))
        stream = one._stream(TOPIC, 0)
        info, seen = stream._info, []

        async def info_then_more():
            answer = await info()
            if not seen:
                seen.append(await other.publish(batch(2, follows=1)))
            return answer

        stream._info = info_then_more
        end = await stream.look()
        assert seen == [Taken(1)]
        assert (end.tail.position, end.tail_seq) == (2, end.seq)


async def test_the_last_message_is_never_trimmed(nats_url):
    """It says where the stream ends, to a relay that comes next."""
    async with opened(nats_url, maxlen=2) as broker:
        consumer = await broker.consumer(TOPIC, "billing", 0, name="a", fence=1)
        await broker.publish(batch(1, 2, 3, 4))
        await consumer.ack(await consumer.read(9))
        large = batch(5, follows=4, payload='"' + "x" * 2**20 + '"')
        assert isinstance(await broker.publish(large), Refused)
        backlog = await broker.backlog(TOPIC, 0)
        assert (backlog.length, backlog.tail) == (2, Tail(4, f"{TOPIC}-4"))


async def test_a_message_that_was_deleted_is_sent_again_although_nats_remembers_it(nats_url):
    async with opened(nats_url) as broker:
        await broker.publish(batch(1, 2, 3))
        stream = broker._stream(TOPIC, 0)
        end = await stream.look()
        await broker._line.api(f"STREAM.MSG.DELETE.{stream.name}", {"seq": end.tail_seq})
    async with opened(nats_url) as broker:
        lost = await broker.publish(batch(4, follows=3))
        assert lost == Behind(Tail(2, f"{TOPIC}-2"))
        assert await broker.publish(batch(3, 4, follows=2)) == Taken(2)
    assert await everything(nats_url) == [1, 2, 3, 4]


async def test_a_stream_that_is_gone_is_filled_again(nats_url):
    async with opened(nats_url) as broker:
        await broker.publish(batch(1, 2))
        consumer = await broker.consumer(TOPIC, "billing", 0, name="a", fence=1)
        await consumer.ack(await consumer.read(1))
        await broker._line.api(f"STREAM.DELETE.{broker._stream(TOPIC, 0).name}")
        with pytest.raises(BrokerUnavailableError):
            await broker.publish(batch(3, follows=2))
        with pytest.raises(BrokerUnavailableError):
            await consumer.read(1)
        assert await broker.publish(batch(3, follows=2)) == Behind(Tail())
        assert await broker.publish(batch(1, 2, 3)) == Taken(3)
        consumer = await broker.consumer(TOPIC, "billing", 0, name="a", fence=1)
        assert [d.message.position for d in await consumer.read(9)] == [1, 2, 3]


async def test_a_limit_that_people_set_on_a_stream_is_full_and_loses_nothing(nats_url):
    async with opened(nats_url) as broker:
        await broker.publish(batch(1))
        stream = broker._stream(TOPIC, 0)
        config = (await broker._line.api(f"STREAM.INFO.{stream.name}"))["config"]
        await broker._line.api(f"STREAM.UPDATE.{stream.name}", config | {"max_msgs": 4})
        full = await broker.publish(batch(2, 3, 4, 5, 6, follows=1))
        assert isinstance(full, Full)
        assert "maximum messages" in full.why
        await broker._line.api(f"STREAM.UPDATE.{stream.name}", config)
        assert isinstance(await broker.publish(batch(2, 3, 4, 5, 6, follows=1)), Taken)
    assert await everything(nats_url) == [1, 2, 3, 4, 5, 6]


# --- reading ------------------------------------------------------------------------------------


async def test_a_server_that_restarts_is_read_on(nats_server, nats_url):
    async with opened(nats_url) as broker:
        await broker.publish(batch(*range(1, 7)))
        consumer = await broker.consumer(TOPIC, "billing", 0, name="a", fence=1)
        had = await consumer.read(4)
        await consumer.ack(had[:2])
        nats_server.restart()
        with pytest.raises(BrokerUnavailableError):
            await consumer.ack(had[2:])
            await consumer.ack(had[2:])
        found = [d.message.position for d in await consumer.read(9)]
        # JetStream writes down who was handed what, and who has acknowledged what, a little later:
        # repeats may come.
        assert found[-2:] == [5, 6]
        assert found == sorted(found)
        await broker.publish(batch(7, follows=6))
        # A server that is just back may have taken it and not be ready to hand it out.
        async with asyncio.timeout(20):
            while 7 not in found:
                found += [d.message.position for d in await consumer.read(9, wait_s=1.0)]
        assert [position for position in found if position > 4] == [5, 6, 7]


async def test_what_was_lost_on_the_way_comes_before_anything_new(nats_url, proxy):
    async with opened(nats_url) as relay, opened(url_of(proxy)) as broker:
        await relay.publish(batch(1, 2, 3))
        consumer = await broker.consumer(TOPIC, "billing", 0, name="a", fence=1)
        assert [d.message.position for d in await consumer.read(1)] == [1]
        proxy.cut_on_reply(b"HMSG")  # the server has handed it out, and we never hear
        with pytest.raises(BrokerUnavailableError):
            await consumer.read(1)
        assert proxy.cuts == 1
        await relay.publish(batch(4, follows=3))
        found = await consumer.read(9)
        assert [d.message.position for d in found] == [2, 3, 4]
        assert [d.count for d in found] == [2, 1, 1]


async def test_a_reader_that_froze_while_it_waited_steals_nothing(nats_url):
    """What it has asked for is still asked for: the server gives to both."""
    async with opened(nats_url) as one, opened(nats_url) as other:
        await other.join(TOPIC, "billing")
        frozen = await one.consumer(TOPIC, "billing", 0, name="frozen", fence=1)
        waiting = asyncio.create_task(frozen.read(10, wait_s=60.0))
        while not frozen._waiting:
            await asyncio.sleep(0.01)
        owner = await other.consumer(TOPIC, "billing", 0, name="owner", fence=2)
        assert await owner.left_over() == []
        await other.publish(batch(1, 2, 3))
        found = []
        while len(found) < 3:
            found += await owner.read(10, wait_s=5.0)
        assert [d.message.position for d in found] == [1, 2, 3]
        await frozen.close()
        assert await waiting == []


async def test_a_frozen_server_does_not_hold_a_reader_for_ever(nats_server, nats_url):
    async with opened(nats_url, timeout_s=0.4) as broker:
        await broker.publish(batch(1))
        consumer = await broker.consumer(TOPIC, "billing", 0, name="a", fence=1)
        reading = asyncio.create_task(consumer.read(1, wait_s=0.2))
        assert await reading
        waiting = asyncio.create_task(consumer.read(1, wait_s=0.2))
        await asyncio.sleep(0.05)
        with nats_server.paused(), pytest.raises(BrokerUnavailableError, match="silent"):
            async with asyncio.timeout(3):
                await waiting
        broker._line.timeout_s = 5.0
        await broker.publish(batch(2, follows=1))
        assert [d.message.position for d in await consumer.read(9, wait_s=5.0)] == [2]


# --- settings and silence -----------------------------------------------------------------------


async def test_nobody_there_is_told_within_the_timeout(nats_server, nats_url):
    async with opened(nats_url, timeout_s=0.5) as broker:
        nats_server.kill()
        calls = (broker.publish(batch(1)), broker.tail(TOPIC, 0), broker.join(TOPIC, "billing"))
        told = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in told] == [BrokerUnavailableError] * 3
        assert "Connect call failed" in str(told[0])


async def test_closing_while_it_connects_ends_both(nats_server, nats_url):
    async with opened(nats_url) as broker:
        with nats_server.paused():
            publishing = asyncio.create_task(broker.publish(batch(1)))
            await asyncio.sleep(0.05)
            await broker.aclose()
            with pytest.raises(BrokerUnavailableError):
                await publishing


async def test_what_nats_will_not_do_is_a_mistake_in_the_settings(nats_url):
    async with opened(nats_url, replicas=3) as broker:
        with pytest.raises(SettingsError, match="replicas"):
            await broker.publish(batch(1))


@pytest.mark.parametrize("topic", ["a.b", "a b", "a*", ">", "Größe/7", "a%2Eb", "x-1"])
async def test_any_topic_and_group_is_a_name(nats_url, topic):
    async with opened(nats_url, shards=2) as broker:
        assert await Sender(broker, topic, 1).send(1, 2) == Taken(2)
        consumer = await broker.consumer(topic, topic, 1, name=topic, fence=1)
        assert [d.message.topic for d in await consumer.read(9)] == [topic, topic]
        backlog = await broker.backlog(topic, 1)
        assert [group.group for group in backlog.groups] == [topic]
        with pytest.raises(SettingsError, match="shorter"):
            await broker.tail(topic * 300, 0)


async def test_groups_that_are_named_are_there_before_the_first_message(nats_url):
    async with opened(nats_url, groups={TOPIC: ["billing", "mail"]}, maxlen=2) as broker:
        assert await broker.publish(batch(1, 2, 3, 4)) == Taken(4)
        assert isinstance(await broker.publish(batch(5, follows=4)), Full)
        backlog = await broker.backlog(TOPIC, 0)
        assert sorted(group.group for group in backlog.groups) == ["billing", "mail"]
        for group in ("billing", "mail"):
            await broker.leave(TOPIC, group)
        full = await broker.publish(batch(5, follows=4))
        assert isinstance(full, Full)
        assert "no group" in full.why


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("http://localhost", {}),
        ("nats://", {}),
        ("nats://localhost", {"mode": "text"}),
        ("nats://localhost", {"prefix": "a.b"}),
        ("nats://localhost", {"replicas": 0}),
        ("nats://localhost", {"timeout_s": 0}),
        ("nats://localhost", {"groups": {"orders": "billing"}}),
    ],
)
def test_settings_that_cannot_work_are_refused(url, settings):
    with pytest.raises(SettingsError):
        NatsBroker(url, **settings)


def test_a_password_is_not_shown():
    assert "secret" not in repr(NatsBroker("nats://me:secret@a:1,b:2"))


def test_a_driver_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr("semel.brokers.nats._driver", "2.9.1")
    with pytest.raises(SettingsError, match=r"nats-py 2\.15 or later"):
        NatsBroker("nats://localhost")
