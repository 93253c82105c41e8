"""What a broker must do, as tests. Prove your own broker by subclassing `BrokerContract`:

    class TestMyBroker(BrokerContract):
        async def make(self, *, shards, maxlen):
            return MyBroker("my://localhost", shards=shards, maxlen=maxlen)

`make` is called more than once in a test. Two brokers at the same place stand for two processes, or
for two parts of one, and see the same messages. Each is closed when the test ends. Topics have
new names every time, so the place need not be empty. What `make` needs of fixtures, an autouse
fixture puts on `self`.

A broker is held to what its `features` declare. Where it declares less, less is asserted, and
nothing is skipped: a broker that does not deduplicate still delivers a repeat at least once, with
the same id. Needs pytest-asyncio, in either mode, and hypothesis.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, ClassVar

import pytest

try:
    import pytest_asyncio
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"the contract needs {missing.name}: pip install pytest-asyncio hypothesis",
        name=missing.name,
    ) from missing

from semel.errors import BrokerUnavailableError, SettingsError
from semel.messages import (
    Behind,
    Delivery,
    Features,
    Fenced,
    Forked,
    Full,
    GroupBacklog,
    Refused,
    Tail,
    Taken,
)
from semel.ports import Broker, Consumer, TellsShards
from semel.testing.traffic import Move, Sender, Traffic, message, moves

Opened = Callable[..., Awaitable[Broker]]

one_or_three = pytest.mark.parametrize("shards", [1, 3])
"""Where it matters how many shards there are; the test uses the last of them."""

ODD: dict[str, dict[str, Any]] = {
    "plain": {},
    "no order asked for": {"seq": None},
    "no tenant": {"tenant": ""},
    "unicode": {
        "tenant": "Zürich",
        "type": "заказ.оплачен",
        "aggregate_id": "注文/7 ?#%",
        "payload": '{"name":"Łódź \U0001f980","quote":"\\"\\\\\\u0000"}',
    },
    "headers": {
        "headers": {
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "tracestate": "a=1,b=2",
            "x-name": 'Ürün "7"\n',
            "empty": "",
        }
    },
    "spaces in the payload": {"payload": '{ "b" : 1.0 ,\n  "a" : [ ] }'},
    "nested payload": {"payload": '{"a":[[{"data":{"b":[1,2.50,-0,1e3,null,true]}}]]}'},
    "payload that looks like an envelope": {"payload": '{"specversion":"1.0","data":{"id":"x"}}'},
    "payload null": {"payload": "null"},
    "a stand-in": {"payload": "null", "refused": 'über 1 MB, "zu groß" (100 %)'},
    "payload text": {"payload": '"text"'},
    "large numbers": {"payload": "12345678901234567890123", "seq": 2**62},
    "quotes everywhere": {"id": 'a"b\\c', "aggregate_type": "o'r\"d,er", "source": "/a b"},
    "another zone": {"time": datetime(2026, 3, 1, 1, 2, 3, 4, timezone(timedelta(hours=5)))},
    "a whole second": {"time": datetime(2026, 3, 1, tzinfo=UTC)},
}


class BrokerContract:
    """Every promise of the `Broker` and `Consumer` ports, one test each."""

    examples: ClassVar[int] = 50
    """How many random histories are played."""

    patience_s: ClassVar[float] = 5.0
    """How long a message may take to reach a reader that waits for it."""

    quiet_s: ClassVar[float] = 0.1
    """How long to listen before believing that nothing comes."""

    # --- yours

    async def make(self, *, shards: int, maxlen: int | None) -> Broker:
        """A broker at the place of this test. One that is not bounded has no use for `maxlen`."""
        raise NotImplementedError

    async def put_raw(self, broker: Any, topic: str, shard: int, position: int, raw: bytes) -> bool:
        """Put bytes that are no event behind everything in the shard; True when that was done."""
        return False

    async def die(self, broker: Any, consumer: Any) -> None:
        """What happens when the consumer's process is killed: by default, nobody hears of it.

        A broker that hands messages out by itself notices the broken connection: break it here.
        """

    # --- ours

    @pytest_asyncio.fixture
    async def opened(self) -> AsyncIterator[Opened]:
        made: list[Broker] = []

        async def open_broker(*, shards: int = 1, maxlen: int | None = 10_000) -> Broker:
            made.append(broker := await self.make(shards=shards, maxlen=maxlen))
            return broker

        yield open_broker
        for broker in made:
            await broker.aclose()

    @pytest.fixture
    def shards(self) -> int:
        return 1

    @pytest_asyncio.fixture
    async def broker(self, opened: Opened, shards: int) -> Broker:
        return await opened(shards=shards)

    @pytest.fixture
    def topic(self) -> str:
        return f"orders-{uuid.uuid4().hex[:12]}"

    async def consumer(
        self, broker: Broker, topic: str, shard: int = 0, *, group: str = "billing", fence: int = 1
    ) -> Consumer:
        await broker.join(topic, group)
        return await broker.consumer(topic, group, shard, name=f"{group}-{fence}", fence=fence)

    async def reads(self, consumer: Consumer, count: int) -> list[Delivery]:
        """The next so many: what was left over first, as a worker does it."""
        found: list[Delivery] = []
        while rest := await consumer.left_over():
            found += rest
        async with asyncio.timeout(self.patience_s):
            while len(found) < count:
                found += await consumer.read(count - len(found), wait_s=self.patience_s)
        return found

    async def reads_all(self, consumer: Consumer) -> list[Delivery]:
        """Whatever comes, until it is quiet."""
        found = list(await consumer.left_over())
        while more := await consumer.read(100, wait_s=self.quiet_s):
            found += more
        return found

    def sees(self, deliveries: Sequence[Delivery], features: Features, *expected: int) -> None:
        """These messages, in order: once each, or where repeats may come, at least once each."""
        positions = at(deliveries)
        if features.dedups == "none":
            ids = {(d.message.position, d.message.id) for d in deliveries if d.message}
            assert len(ids) == len({position for position, _ in ids}), "repeats have the same id"
            positions = list(dict.fromkeys(positions))
        assert positions == list(expected)

    # --- what is declared -------------------------------------------------------------------

    @one_or_three
    async def test_it_says_what_it_is(self, broker: Broker, shards: int) -> None:
        assert isinstance(broker.features, Features)
        assert broker.shards == shards

    # --- the message ------------------------------------------------------------------------

    @pytest.mark.parametrize("odd", ODD)
    async def test_a_message_arrives_to_the_byte(
        self, broker: Broker, topic: str, odd: str
    ) -> None:
        consumer = await self.consumer(broker, topic)
        sent = message(topic, 1, **ODD[odd])
        assert await Sender(broker, topic).send_all([sent]) == Taken(1)
        (delivery,) = await self.reads(consumer, 1)
        assert delivery.message == sent
        assert delivery.count == 1
        assert delivery.problem == ""

    async def test_a_message_of_a_mebibyte_arrives_or_is_refused(
        self, broker: Broker, topic: str
    ) -> None:
        consumer = await self.consumer(broker, topic)
        large = message(topic, 1, payload='{"text":"' + "ä" * (1 << 19) + '"}')
        receipt = await Sender(broker, topic).send_all([large])
        if isinstance(receipt, Refused):
            assert (receipt.message, bool(receipt.why)) == (large, True)
            assert await self.reads_all(consumer) == []
        else:
            assert receipt == Taken(1)
            assert [d.message for d in await self.reads(consumer, 1)] == [large]

    async def test_a_message_that_cannot_be_written_is_refused_and_a_stand_in_takes_its_place(
        self, broker: Broker, topic: str
    ) -> None:
        """A lone surrogate, which Python keeps in a text and no encoding has."""
        consumer = await self.consumer(broker, topic)
        sender = Sender(broker, topic)
        first, last = message(topic, 1), message(topic, 3)
        odd = message(topic, 2, payload='"\ud800"')
        receipt = await sender.publish([first, odd, last], Tail())
        if isinstance(receipt, Taken):
            assert [d.message for d in await self.reads(consumer, 3)] == [first, odd, last]
            return
        assert isinstance(receipt, Refused), receipt
        assert receipt.message == odd
        assert receipt.why
        stand_in = replace(odd, payload="null", refused=receipt.why)
        follows = Tail(first.position, first.id)
        assert await sender.publish([stand_in, last], follows) == Taken(2)
        found = await self.reads(consumer, 3)
        self.sees(found, broker.features, 1, 2, 3)
        assert [d.message for d in found if d.message and d.message.refused] == [stand_in]
        # The relay dies; the next one begins before all three, with the event itself.
        again = await sender.publish([first, odd, last], Tail())
        if isinstance(again, Refused):
            assert again.message == odd
            again = await sender.publish([stand_in, last], follows)
        assert isinstance(again, Taken)
        if broker.features.dedups != "none":
            assert again.added == 0
            assert await self.reads_all(consumer) == []

    async def test_an_entry_that_is_no_event_is_handed_out_as_such(
        self, broker: Broker, topic: str
    ) -> None:
        consumer = await self.consumer(broker, topic)
        await Sender(broker, topic).send(1)
        raw = b'\xff{"not": "an event"'
        there = await self.put_raw(broker, topic, 0, 2, raw)
        good, *bad = await self.reads(consumer, 2 if there else 1)
        assert good.message == message(topic, 1)
        for delivery in bad:
            assert delivery.message is None
            assert delivery.problem
            assert raw in delivery.raw
        await consumer.ack([good, *bad])
        await self.die(broker, consumer)
        nobody = await self.consumer(broker, topic, fence=2)
        assert await self.reads_all(nobody) == []

    # --- order ------------------------------------------------------------------------------

    @one_or_three
    async def test_messages_come_in_the_order_of_their_positions(
        self, broker: Broker, topic: str, shards: int
    ) -> None:
        consumer = await self.consumer(broker, topic, shards - 1)
        sender = Sender(broker, topic, shards - 1)
        assert await sender.send(*range(1, 40, 3)) == Taken(13)
        assert await sender.send(*range(41, 60)) == Taken(19)
        found = await self.reads(consumer, 32)
        assert at(found) == [*range(1, 40, 3), *range(41, 60)]
        assert await self.reads_all(consumer) == []

    async def test_a_read_hands_out_no_more_than_asked_for(
        self, broker: Broker, topic: str
    ) -> None:
        consumer = await self.consumer(broker, topic)
        await Sender(broker, topic).send(1, 2, 3, 4, 5)
        found: list[Delivery] = []
        async with asyncio.timeout(self.patience_s):
            while len(found) < 5:
                some = await consumer.read(2, wait_s=self.patience_s)
                assert len(some) <= 2
                found += some
        assert at(found) == [1, 2, 3, 4, 5]

    @pytest.mark.parametrize("shards", [3])
    async def test_shards_know_nothing_of_each_other(
        self, broker: Broker, topic: str, shards: int
    ) -> None:
        consumers = [await self.consumer(broker, topic, shard) for shard in range(shards)]
        for shard, fence in enumerate((7, 1, 3)):
            sender = Sender(broker, topic, shard, fence=fence)
            assert await sender.send(shard + 1, shard + 11) == Taken(2)
        for shard, consumer in enumerate(consumers):
            assert at(await self.reads(consumer, 2)) == [shard + 1, shard + 11]
            assert await self.reads_all(consumer) == []
            tail = await broker.tail(topic, shard)
            assert tail in {Tail(shard + 11, f"{topic}-{shard + 11}"), None}

    async def test_who_has_another_number_of_shards_is_refused_or_can_be_told(
        self, opened: Opened, topic: str
    ) -> None:
        """The last one who published is right: an outbox may be divided anew."""
        three = await opened(shards=3)
        if isinstance(three, TellsShards):
            assert await three.published_shards(topic) is None
        await three.join(topic, "billing")
        assert await Sender(three, topic, 2).send(1) == Taken(1)
        try:
            two = await opened(shards=2)
        except SettingsError:
            return
        if isinstance(three, TellsShards) and isinstance(two, TellsShards):
            await two.join(topic, "billing")
            assert await two.published_shards(topic) == 3
            assert await Sender(two, topic, 1, fence=2).send(7) == Taken(1)
            assert await three.published_shards(topic) == 2

    # --- publishing again -------------------------------------------------------------------

    @one_or_three
    async def test_publishing_again_adds_nothing(
        self, broker: Broker, topic: str, shards: int
    ) -> None:
        shard = shards - 1
        consumer = await self.consumer(broker, topic, shard)
        sender = Sender(broker, topic, shard)
        batch = [message(topic, position) for position in (1, 2, 5)]
        assert await sender.publish(batch, Tail()) == Taken(3)
        again = await sender.publish(batch, Tail())
        assert isinstance(again, Taken)
        longer = await sender.publish([*batch, message(topic, 9)], Tail())
        assert isinstance(longer, Taken)
        if broker.features.dedups != "none":
            assert (again.added, longer.added) == (0, 1)
        self.sees(await self.reads_all(consumer), broker.features, 1, 2, 5, 9)

    async def test_what_another_process_published_is_known(
        self, opened: Opened, topic: str
    ) -> None:
        one, other = await opened(), await opened()
        consumer = await self.consumer(other, topic)
        batch = [message(topic, 1), message(topic, 2)]
        assert await Sender(one, topic).publish(batch, Tail()) == Taken(2)
        await one.aclose()
        again = await Sender(other, topic, fence=2).publish(batch, Tail())
        assert again == Taken(0) or other.features.dedups == "none"
        assert await other.tail(topic, 0) in {Tail(2, f"{topic}-2"), None}
        self.sees(await self.reads_all(consumer), other.features, 1, 2)

    async def test_random_traffic_is_seen_by_every_group(self, opened: Opened, topic: str) -> None:
        broker = await opened(shards=3)
        loop, number = asyncio.get_running_loop(), 0

        async def play(history: Sequence[Move]) -> None:
            nonlocal number
            number += 1
            traffic = Traffic(
                broker,
                f"{topic}-{number}",
                number % 3,
                die=self.die,
                patience_s=self.patience_s,
            )
            await traffic.begin()
            for move in history:
                await traffic.play(move)
            await traffic.end()

        def sync_play(history: Sequence[Move]) -> None:
            asyncio.run_coroutine_threadsafe(play(history), loop).result()

        check = settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        )(given(st.lists(moves(), min_size=10, max_size=30))(sync_play))
        await asyncio.to_thread(check)

    # --- the tail ---------------------------------------------------------------------------

    async def test_the_tail_is_the_last_message(self, broker: Broker, topic: str) -> None:
        sender = Sender(broker, topic)
        before = await broker.tail(topic, 0)
        await broker.join(topic, "billing")
        await sender.send(3, 8)
        after = await broker.tail(topic, 0)
        expected = (Tail(), Tail(8, f"{topic}-8"))
        assert (before, after) == expected or not broker.features.heals

    @one_or_three
    async def test_a_broker_that_has_lost_its_tail_says_where_it_ends(
        self, broker: Broker, topic: str, shards: int
    ) -> None:
        shard = shards - 1
        consumer = await self.consumer(broker, topic, shard)
        sender = Sender(broker, topic, shard)
        lost, found = message(topic, 4), message(topic, 5)
        receipt = await sender.publish([found], Tail(lost.position, lost.id))
        if not broker.features.heals:
            assert receipt == Taken(1)
            self.sees(await self.reads_all(consumer), broker.features, 5)
            return
        assert receipt == Behind(Tail())
        await sender.send(2)
        tail = Tail(2, f"{topic}-2")
        assert await sender.publish([found], Tail(lost.position, lost.id)) == Behind(tail)
        assert await sender.publish([lost, found], tail) == Taken(2)
        assert at(await self.reads_all(consumer)) == [2, 4, 5]

    @pytest.mark.parametrize(
        ("follows", "positions", "where"),
        [
            (Tail(3, "other"), (4,), Tail(3)),
            (Tail(1), (2, 3, 4), Tail(3)),
            (Tail(), (1, 2, 3), Tail(3)),
            (Tail(1), (2, 4), Tail(3)),
            (Tail(1), (4, 5), Tail(3)),
            (Tail(), (1, 2), None),
        ],
        ids=[
            "follows another event at the tail's place",
            "another event at the tail's place, and more",
            "another event at the tail's place",
            "none at the tail's place",
            "begins behind the tail",
            "another event before the tail",
        ],
    )
    async def test_a_broker_with_other_events_than_the_outbox_says_so(
        self,
        broker: Broker,
        topic: str,
        follows: Tail,
        positions: tuple[int, ...],
        where: Tail | None,
    ) -> None:
        """The database was brought back from an older copy, and has had other events since."""
        consumer = await self.consumer(broker, topic)
        sender = Sender(broker, topic)
        await sender.send(1, 2, 3)
        if follows.position and not follows.id:
            follows = replace(follows, id=f"{topic}-{follows.position}")
        others = {2: "new-2"} if where is None else {3: "new-3"}
        batch = [
            message(topic, p, id=f"{topic}-{others[p]}" if p in others else f"{topic}-{p}")
            for p in positions
        ]
        receipt = await sender.publish(batch, follows)
        if not broker.features.heals:
            assert isinstance(receipt, Taken)
            return
        assert isinstance(receipt, Forked), receipt
        assert where is None or receipt.tail == Tail(3, f"{topic}-3")
        assert at(await self.reads_all(consumer)) == [1, 2, 3]

    @pytest.mark.parametrize("positions", [(3,), (2, 3), (3, 4), (2, 3, 4)])
    async def test_what_was_never_there_is_not_taken_for_published(
        self, broker: Broker, topic: str, positions: tuple[int, ...]
    ) -> None:
        """A restored database gives out a position again that this topic never had."""
        consumer = await self.consumer(broker, topic)
        sender = Sender(broker, topic)
        await sender.send(1, 2, 4)
        receipt = await sender.publish(
            [message(topic, p) for p in positions], Tail(1, f"{topic}-1")
        )
        if not broker.features.heals:
            assert isinstance(receipt, Taken)
            return
        assert isinstance(receipt, Forked), receipt
        assert at(await self.reads_all(consumer)) == [1, 2, 4]

    # --- fences -----------------------------------------------------------------------------

    @one_or_three
    async def test_a_deposed_owner_publishes_nothing(
        self, opened: Opened, topic: str, shards: int
    ) -> None:
        one, other = await opened(shards=shards), await opened(shards=shards)
        shard = shards - 1
        consumer = await self.consumer(one, topic, shard)
        zombie = Sender(one, topic, shard, fence=3)
        await zombie.send(1)
        owner = Sender(other, topic, shard, fence=7)
        owner.follows = zombie.follows
        await owner.send(2)
        late = await zombie.send_all([message(topic, 2), message(topic, 3)])
        if one.features.fenced:
            assert late == Fenced(7)
            assert await owner.send(4) == Taken(1)
            assert at(await self.reads_all(consumer)) == [1, 2, 4]
        else:
            assert isinstance(late, Taken)
            self.sees(await self.reads_all(consumer), one.features, 1, 2, 3)

    async def test_a_deposed_owner_reads_nothing(self, opened: Opened, topic: str) -> None:
        one, other = await opened(), await opened()
        zombie = await self.consumer(one, topic, fence=3)
        sender = Sender(one, topic)
        await sender.send(1, 2)
        had = await zombie.read(1, wait_s=self.patience_s)
        assert at(had) == [1]
        await self.die(one, zombie)
        owner = await self.consumer(other, topic, fence=7)
        if one.features.fenced:
            assert list(await zombie.read(10, wait_s=self.quiet_s)) == []
            assert list(await zombie.left_over()) == []
        self.sees(await self.reads(owner, 2), one.features, 1, 2)

    async def test_a_former_owner_that_comes_back_reads_nothing(
        self, broker: Broker, topic: str
    ) -> None:
        owner = await self.consumer(broker, topic, fence=7)
        await Sender(broker, topic).send(1)
        if broker.features.fenced:
            late = await self.consumer(broker, topic, fence=3)
            assert await self.reads_all(late) == []
        self.sees(await self.reads(owner, 1), broker.features, 1)

    # --- back-pressure ----------------------------------------------------------------------

    async def fills(self, broker: Broker, topic: str, begin: int = 1) -> tuple[int, Full]:
        """Send one by one until it is full: the last position that was taken, and the receipt."""
        sender = Sender(broker, topic)
        sender.follows = Tail(begin - 1, f"{topic}-{begin - 1}") if begin > 1 else Tail()
        for position in range(begin, 100):
            receipt = await sender.send(position)
            if isinstance(receipt, Full):
                return position - 1, receipt
            assert receipt == Taken(1)
        raise AssertionError("it is never full")

    async def takes_all(self, broker: Broker, topic: str) -> None:
        sender = Sender(broker, topic)
        for position in range(1, 40):
            assert await sender.send(position) == Taken(1)

    @one_or_three
    async def test_it_is_full_at_twice_its_target_until_its_readers_have_caught_up(
        self, opened: Opened, topic: str, shards: int
    ) -> None:
        broker = await opened(shards=shards, maxlen=5)
        consumer = await self.consumer(broker, topic)
        if not broker.features.bounded:
            await self.takes_all(broker, topic)
            self.sees(await self.reads_all(consumer), broker.features, *range(1, 40))
            return
        last, full = await self.fills(broker, topic)
        assert last == 10
        assert full.length == 10
        assert "billing" in full.why
        found = await self.reads(consumer, 10)
        assert at(found) == [*range(1, 11)]
        sender = Sender(broker, topic)
        sender.follows = Tail(10, f"{topic}-10")
        assert isinstance(await sender.send(11), Full), "in hand is not done"
        await consumer.ack(found)
        last, _ = await self.fills(broker, topic, begin=11)
        assert last == 20, "of 10 that are done, room is made by 10"
        assert at(await self.reads_all(consumer)) == [*range(11, 21)]

    async def test_what_is_there_already_is_taken_by_a_full_broker(
        self, opened: Opened, topic: str
    ) -> None:
        """Or a relay that lost a reply would wait for readers with nothing left to send."""
        broker = await opened(maxlen=2)
        await broker.join(topic, "billing")
        sender = Sender(broker, topic)
        batch = [message(topic, position) for position in range(1, 5)]
        assert await sender.publish(batch, Tail()) == Taken(4)
        again = await sender.publish(batch[1:], Tail(1, f"{topic}-1"))
        assert again == Taken(0) or broker.features.dedups == "none"

    async def test_the_slowest_group_is_named(self, opened: Opened, topic: str) -> None:
        broker = await opened(maxlen=5)
        quick = await self.consumer(broker, topic, group="quick")
        slow = await self.consumer(broker, topic, group="slow")
        if not broker.features.bounded:
            await self.takes_all(broker, topic)
            self.sees(await self.reads_all(slow), broker.features, *range(1, 40))
            return
        sender = Sender(broker, topic)
        for position in range(1, 11):
            await sender.send(position)
            await quick.ack(await self.reads(quick, 1))
        full = await sender.send(11)
        assert isinstance(full, Full)
        assert "slow" in full.why
        await slow.ack(await self.reads(slow, 10))
        assert await sender.send(11) == Taken(1)

    async def test_without_a_group_nothing_is_trimmed(self, opened: Opened, topic: str) -> None:
        broker = await opened(maxlen=5)
        if not broker.features.bounded:
            consumer = await self.consumer(broker, topic)
            await self.takes_all(broker, topic)
            self.sees(await self.reads_all(consumer), broker.features, *range(1, 40))
            return
        last, full = await self.fills(broker, topic)
        assert (last, full.length) == (10, 10)
        assert full.why
        consumer = await self.consumer(broker, topic)
        assert at(await self.reads_all(consumer)) == [*range(1, 11)]

    async def test_without_a_target_it_is_never_full(self, opened: Opened, topic: str) -> None:
        broker = await opened(maxlen=None)
        consumer = await self.consumer(broker, topic)
        await self.takes_all(broker, topic)
        self.sees(await self.reads_all(consumer), broker.features, *range(1, 40))

    async def test_what_all_have_done_is_trimmed_and_still_known(
        self, opened: Opened, topic: str
    ) -> None:
        broker = await opened(maxlen=5)
        consumer = await self.consumer(broker, topic)
        sender = Sender(broker, topic)
        for position in range(1, 40):
            assert await sender.send(position) == Taken(1)
            await consumer.ack(await self.reads(consumer, 1))
        length = (await broker.backlog(topic, 0)).length
        assert length <= 10 or not broker.features.bounded
        again = await sender.publish([message(topic, p) for p in range(1, 40)], Tail())
        if broker.features.dedups != "none":
            assert again == Taken(0)
            assert await self.reads_all(consumer) == []
        if broker.features.heals:
            assert await broker.tail(topic, 0) == Tail(39, f"{topic}-39")

    async def test_a_batch_beyond_the_target_is_trimmed_once_it_is_acknowledged(
        self, opened: Opened, topic: str
    ) -> None:
        """Without a further publish: by the last ack, or when the relay asks for the tail."""
        broker = await opened(maxlen=5)
        if not broker.features.bounded:
            return
        quick = await self.consumer(broker, topic, group="quick")
        slow = await self.consumer(broker, topic, group="slow")
        await Sender(broker, topic).send(*range(1, 31))
        await quick.ack(await self.reads(quick, 30))
        await broker.tail(topic, 0)
        first, *rest = await self.reads(slow, 30)
        assert at([first, *rest]) == [*range(1, 31)], "the other group had not read it"
        await slow.ack(rest)
        await broker.tail(topic, 0)
        assert (await broker.backlog(topic, 0)).length == 30
        await slow.ack([first])
        assert await broker.tail(topic, 0) == Tail(30, f"{topic}-30")
        assert (await broker.backlog(topic, 0)).length == 5

    # --- groups -----------------------------------------------------------------------------

    @one_or_three
    async def test_every_group_gets_every_message(
        self, broker: Broker, topic: str, shards: int
    ) -> None:
        shard = shards - 1
        billing = await self.consumer(broker, topic, shard, group="billing")
        mail = await self.consumer(broker, topic, shard, group="mail")
        await Sender(broker, topic, shard).send(1, 2, 3)
        await billing.ack(await self.reads(billing, 3))
        assert at(await self.reads(mail, 3)) == [1, 2, 3]
        assert await self.reads_all(billing) == []

    async def test_a_group_that_comes_late_begins_with_the_oldest_there_is(
        self, broker: Broker, topic: str
    ) -> None:
        early = await self.consumer(broker, topic, group="early")
        sender = Sender(broker, topic)
        await sender.send(1, 2)
        await early.ack(await self.reads(early, 2))
        late = await self.consumer(broker, topic, group="late")
        await sender.send(3, 4)
        found = at(await self.reads_all(late))
        # A broker that keeps nothing has nothing older than the group.
        assert found == ([1, 2, 3, 4] if broker.features.heals else [1, 2, 3, 4][-len(found) :])
        assert found[-2:] == [3, 4]

    async def test_joining_again_changes_nothing(self, opened: Opened, topic: str) -> None:
        one, other = await opened(), await opened()
        consumer = await self.consumer(one, topic)
        await Sender(one, topic).send(1, 2)
        await consumer.ack(await self.reads(consumer, 1))
        await asyncio.gather(one.join(topic, "billing"), other.join(topic, "billing"))
        assert at(await self.reads(consumer, 1)) == [2]

    async def test_a_topic_that_nobody_wrote_to_is_empty(self, broker: Broker, topic: str) -> None:
        consumer = await self.consumer(broker, topic)
        assert await self.reads_all(consumer) == []
        assert await broker.tail(topic, 0) in {Tail(), None}
        backlog = await broker.backlog(topic, 0)
        assert (backlog.topic, backlog.shard, backlog.length) == (topic, 0, 0)

    # --- pending ----------------------------------------------------------------------------

    @one_or_three
    @pytest.mark.parametrize("how", ["killed", "closed"])
    async def test_the_next_owner_gets_what_was_left_over_first_and_in_order(
        self, opened: Opened, topic: str, shards: int, how: str
    ) -> None:
        one, other = await opened(shards=shards), await opened(shards=shards)
        shard = shards - 1
        first = await self.consumer(one, topic, shard)
        await Sender(one, topic, shard).send(*range(1, 9))
        had = await self.reads(first, 6)
        await first.ack([had[1], had[4]])
        await (self.die(one, first) if how == "killed" else first.close())
        second = await self.consumer(other, topic, shard, fence=2)
        left = await self.reads(second, 6)
        self.sees(left, one.features, 1, 3, 4, 6, 7, 8)
        if one.features.leases:
            assert [d.count > 1 for d in left] == [True] * 4 + [False] * 2
            assert all(d.consumer == "billing-1" and d.idle_s >= 0 for d in left[:4])
        await second.ack(left)
        await self.die(other, second)
        third = await self.consumer(other, topic, shard, fence=3)
        assert await self.reads_all(third) == []

    async def test_what_is_left_over_is_counted_by_every_owner(
        self, broker: Broker, topic: str
    ) -> None:
        consumer = await self.consumer(broker, topic)
        await Sender(broker, topic).send(1)
        counts: list[int] = []
        for fence in range(2, 6):
            (delivery,) = await self.reads(consumer, 1)
            counts.append(delivery.count)
            await self.die(broker, consumer)
            consumer = await self.consumer(broker, topic, fence=fence)
        assert counts == [1, 2, 3, 4] or not broker.features.leases
        self.sees(await self.reads(consumer, 1), broker.features, 1)

    async def test_what_is_left_over_comes_in_pages(self, broker: Broker, topic: str) -> None:
        first = await self.consumer(broker, topic)
        await Sender(broker, topic).send(*range(1, 8))
        await self.reads(first, 7)
        await self.die(broker, first)
        second = await self.consumer(broker, topic, fence=2)
        pages: list[list[int]] = []
        while page := await second.left_over(3):
            pages.append(at(page))
        assert pages == [[1, 2, 3], [4, 5, 6], [7]] or not broker.features.leases
        assert await second.left_over(3) == []

    async def test_an_owner_that_begins_anew_gets_its_own_left_over(
        self, broker: Broker, topic: str
    ) -> None:
        """The same hold, the same fence: the worker only opened its consumer again."""
        first = await self.consumer(broker, topic, fence=4)
        await Sender(broker, topic).send(1, 2)
        await self.reads(first, 1)
        await first.close()
        second = await self.consumer(broker, topic, fence=4)
        self.sees(await self.reads(second, 2), broker.features, 1, 2)

    async def test_an_owner_whose_place_its_own_late_request_took_is_told_to_begin_anew(
        self, opened: Opened, topic: str
    ) -> None:
        """Its sender gave the request up, and nobody reads from what it opened."""
        broker, late = await opened(), await opened()
        reading = await self.consumer(broker, topic, fence=4)
        await self.consumer(late, topic, fence=4)
        await Sender(broker, topic).send(1, 2)
        if broker.features.leases:
            with pytest.raises(BrokerUnavailableError, match="begins anew"):
                await reading.read(2, wait_s=self.quiet_s)
            anew = await self.consumer(broker, topic, fence=4)
            self.sees(await self.reads(anew, 2), broker.features, 1, 2)

    async def test_acknowledging_twice_changes_nothing(self, broker: Broker, topic: str) -> None:
        consumer = await self.consumer(broker, topic)
        await Sender(broker, topic).send(1, 2)
        one, two = await self.reads(consumer, 2)
        await consumer.ack([one])
        await consumer.ack([one])
        await consumer.ack([])
        await self.die(broker, consumer)
        later = await self.consumer(broker, topic, fence=2)
        found = await self.reads(later, 1)
        assert [d.message for d in found] == [two.message]

    async def test_acknowledging_what_another_group_was_handed_changes_nothing_here(
        self, broker: Broker, topic: str
    ) -> None:
        billing = await self.consumer(broker, topic, group="billing")
        mail = await self.consumer(broker, topic, group="mail")
        await Sender(broker, topic).send(1, 2)
        theirs = await self.reads(billing, 2)
        if broker.features.leases:
            await mail.ack(theirs)
        assert at(await self.reads(mail, 2)) == [1, 2]

    async def test_a_late_acknowledgement_of_a_former_owner_loses_nothing(
        self, broker: Broker, topic: str
    ) -> None:
        first = await self.consumer(broker, topic)
        await Sender(broker, topic).send(1, 2)
        had = await self.reads(first, 2)
        if not broker.features.leases:
            await first.ack(had[:1])
        await self.die(broker, first)
        second = await self.consumer(broker, topic, fence=2)
        left = await self.reads(second, 2 if broker.features.leases else 1)
        if broker.features.leases:
            await first.ack(had[:1])
        await second.ack(left[-1:])
        await self.die(broker, second)
        third = await self.consumer(broker, topic, fence=3)
        assert at(await self.reads_all(third)) in ([1], [])

    async def test_nothing_is_reclaimed_from_an_owner(self, broker: Broker, topic: str) -> None:
        """What somebody outside our leases holds is the broker's own test."""
        consumer = await self.consumer(broker, topic)
        await Sender(broker, topic).send(1)
        await self.reads(consumer, 1)
        assert await consumer.reclaim(300.0) == []

    # --- waiting ----------------------------------------------------------------------------

    @pytest.mark.parametrize("who", ["this process", "another process"])
    async def test_a_reader_that_waits_is_woken(self, opened: Opened, topic: str, who: str) -> None:
        one = await opened()
        other = one if who == "this process" else await opened()
        consumer = await self.consumer(one, topic)
        waiting = asyncio.create_task(consumer.read(10, wait_s=60.0))
        await asyncio.sleep(self.quiet_s)
        assert not waiting.done()
        await Sender(other, topic).send(1)
        async with asyncio.timeout(self.patience_s):
            assert at(await waiting) == [1]

    async def test_a_reader_waits_no_longer_than_asked_for(
        self, broker: Broker, topic: str
    ) -> None:
        consumer = await self.consumer(broker, topic)
        begun = asyncio.get_running_loop().time()
        async with asyncio.timeout(self.patience_s):
            assert list(await consumer.read(10, wait_s=0.2)) == []
        assert asyncio.get_running_loop().time() - begun > 0.15

    async def test_a_read_that_is_cancelled_loses_nothing(self, broker: Broker, topic: str) -> None:
        """Whatever it was handed and could not give: the next owner gets it."""
        consumer = await self.consumer(broker, topic)
        sender = Sender(broker, topic)
        for position in range(1, 21):
            reading = asyncio.create_task(consumer.read(10, wait_s=60.0))
            publishing = asyncio.create_task(sender.send(position))
            for _ in range(position):
                await asyncio.sleep(0)
            reading.cancel()
            assert await publishing == Taken(1)
            await asyncio.gather(reading, return_exceptions=True)
        await self.die(broker, consumer)
        later = await self.consumer(broker, topic, fence=2)
        self.sees(await self.reads(later, 20), broker.features, *range(1, 21))

    async def test_closing_twice_is_no_error(self, opened: Opened, topic: str) -> None:
        broker = await opened()
        consumer = await self.consumer(broker, topic)
        await consumer.close()
        await consumer.close()
        await broker.aclose()
        await broker.aclose()

    async def test_closing_a_broker_leaves_another_at_the_same_place_working(
        self, opened: Opened, topic: str
    ) -> None:
        one, other, stays = await opened(), await opened(), await opened()
        consumer = await self.consumer(stays, topic)
        former, later = Sender(other, topic), Sender(one, topic)
        assert await former.send(1) == Taken(1)
        self.sees(await self.reads(consumer, 1), stays.features, 1)
        waiting = asyncio.create_task(consumer.read(10, wait_s=60.0))
        await asyncio.sleep(self.quiet_s)
        if other is not stays:  # one object in memory, for all
            await other.aclose()
        later.follows = former.follows
        assert await later.send(2) == Taken(1)
        async with asyncio.timeout(self.patience_s):
            assert at(await waiting) == [2]

    # --- for people -------------------------------------------------------------------------

    @one_or_three
    async def test_the_backlog_says_how_far_every_group_is(
        self, opened: Opened, topic: str, shards: int
    ) -> None:
        shard = shards - 1
        broker = await opened(shards=shards, maxlen=7)
        billing = await self.consumer(broker, topic, shard)
        await broker.join(topic, "mail")
        await Sender(broker, topic, shard).send(1, 2, 3, 4, 5)
        had = await self.reads(billing, 3)
        await billing.ack(had[:1])
        backlog = await broker.backlog(topic, shard)
        assert (backlog.topic, backlog.shard) == (topic, shard)
        assert backlog.tail in {Tail(5, f"{topic}-5"), None}
        if not broker.features.bounded:
            return
        assert (backlog.length, backlog.target) == (5, 7)
        groups = {group.group: group for group in backlog.groups}
        assert groups["mail"] == GroupBacklog("mail", unread=5, pending=0)
        assert (groups["billing"].unread, groups["billing"].pending) == (2, 2)
        assert 0 <= groups["billing"].oldest_pending_s < self.patience_s


def at(deliveries: Sequence[Delivery]) -> list[int]:
    """The positions of the messages."""
    return [each.message.position for each in deliveries if each.message]
