"""Random traffic through a broker, and what its groups must see of it.

The model is written apart from the brokers' own rules on purpose: two descriptions of one
behaviour. A relay publishes, loses replies, begins anew from an older cursor and is deposed; groups
read, acknowledge some, and die.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeAlias

from hypothesis import strategies as st

from semel.messages import Batch, Delivery, Fenced, Message, Receipt, Tail, Taken
from semel.ports import Broker, Consumer

MOMENT = datetime(2026, 3, 1, 12, 30, 15, 250_000, tzinfo=UTC)


def message(topic: str, position: int, **fields: Any) -> Message:
    """An ordinary message; its id belongs to its topic and position alone."""
    ordinary: dict[str, Any] = {
        "id": f"{topic}-{position}",
        "type": "order.placed",
        "tenant": "acme",
        "aggregate_type": "order",
        "aggregate_id": "7",
        "seq": position,
        "payload": f'{{"n":{position}}}',
        "time": MOMENT,
        "source": "/shop",
    }
    return Message(position=position, topic=topic, **(ordinary | fields))


class Sender:
    """The owner of one shard, as a relay is: it sends one message behind the other."""

    def __init__(self, broker: Broker, topic: str, shard: int = 0, *, fence: int = 1) -> None:
        self.broker = broker
        self.topic = topic
        self.shard = shard
        self.fence = fence
        self.follows = Tail()

    async def send(self, *positions: int) -> Receipt:
        return await self.send_all([message(self.topic, position) for position in positions])

    async def send_all(self, messages: Sequence[Message]) -> Receipt:
        receipt = await self.publish(messages, self.follows)
        if isinstance(receipt, Taken):
            self.follows = Tail(messages[-1].position, messages[-1].id)
        return receipt

    async def publish(self, messages: Sequence[Message], follows: Tail) -> Receipt:
        batch = Batch(self.topic, self.shard, self.fence, follows, messages)
        return await self.broker.publish(batch)


# --- random traffic -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """One step. `lost`: the reply never came. `back`: from so many messages before the cursor."""

    verb: str
    group: int = 0
    count: int = 1
    back: int = 0
    lost: bool = False


def moves() -> st.SearchStrategy[Move]:
    group, count = st.integers(0, 1), st.integers(1, 4)
    return st.one_of(
        st.builds(
            Move,
            st.just("publish"),
            count=st.integers(0, 4),
            back=st.sampled_from([0, 0, 0, 1, 3, 9]),
            lost=st.booleans(),
        ),
        st.builds(Move, st.sampled_from(["depose", "zombie"])),
        st.builds(Move, st.sampled_from(["read", "read", "ack"]), group, count),
        st.builds(Move, st.just("take over"), group),
    )


@dataclass
class Reader:
    """One group on paper: what it has never seen, what it has in hand, what was handed back."""

    name: str
    consumer: Consumer
    fence: int = 1
    seen: dict[int, str] = field(default_factory=dict[int, str])
    in_hand: dict[int, Delivery] = field(default_factory=dict[int, Delivery])


Die: TypeAlias = Callable[[Any, Any], Awaitable[None]]
"""Called with the broker and a consumer whose process is killed."""


class Traffic:
    """Plays moves on one shard of a topic, and checks every answer.

    A broker that deduplicates and leaves readers to our leases is held to the letter. Of any other,
    each message must come at least once, each for the first time in order.
    """

    def __init__(
        self, broker: Broker, topic: str, shard: int, *, die: Die, patience_s: float
    ) -> None:
        self._broker = broker
        self._die = die
        self._topic = topic
        self._shard = shard
        self._patience_s = patience_s
        self._strict = broker.features.dedups != "none" and broker.features.leases
        self._outbox: list[Message] = []
        self._there = 0  # so many are in the broker
        self._cursor = 0  # so many are, as far as the relay knows
        self._fence = 1
        self._deposed = 0  # the largest fence that is smaller than one that has published
        self._readers: list[Reader] = []

    async def begin(self) -> None:
        for name in ("billing", "mail"):
            await self._broker.join(self._topic, name)
            self._readers.append(Reader(name, await self._consumer(name, 1)))

    async def play(self, move: Move) -> None:
        reader = self._readers[move.group]
        match move.verb:
            case "publish":
                await self._publish(move)
            case "depose":
                self._fence += 1
            case "zombie":
                await self._zombie()
            case "read":
                await self._read(reader, move.count)
            case "ack":
                await self._ack(reader, move.count)
            case "take over":
                await self._take_over(reader)
            case other:
                raise AssertionError(other)

    async def end(self) -> None:
        """Everything that was published is seen by every group, and once it is done, is done."""
        for reader in self._readers:
            await self._take_over(reader)
            while len(reader.seen) < self._there:
                await self._read(reader, 100)
            await self._ack(reader, len(reader.in_hand))
            await self._take_over(reader)
            assert not reader.in_hand or not self._strict, "what was acknowledged came back"
            await reader.consumer.close()

    # --- the relay

    async def _publish(self, move: Move) -> None:
        while len(self._outbox) < self._there + move.count:
            self._outbox.append(message(self._topic, 2 * len(self._outbox) + 1))
        start = max(0, self._cursor - move.back)
        if not (batch := self._outbox[start:]):
            return
        receipt = await self._broker.publish(self._batch(start, batch, self._fence))
        assert isinstance(receipt, Taken), receipt
        new = len(self._outbox) - self._there
        assert receipt.added == new or self._broker.features.dedups == "none", receipt
        self._there = len(self._outbox)
        self._deposed = self._fence - 1
        if not move.lost:
            self._cursor = self._there

    async def _zombie(self) -> None:
        """Somebody who was deposed sends what he still has in hand."""
        if not (batch := self._outbox[: self._there]) or self._deposed < 1:
            return
        receipt = await self._broker.publish(self._batch(0, batch, self._deposed))
        if self._broker.features.fenced:
            assert isinstance(receipt, Fenced), receipt
            assert receipt.fence > self._deposed

    def _batch(self, start: int, messages: Sequence[Message], fence: int) -> Batch:
        last = self._outbox[start - 1] if start else None
        follows = Tail() if last is None else Tail(last.position, last.id)
        return Batch(self._topic, self._shard, fence, follows, messages)

    # --- the groups

    async def _consumer(self, group: str, fence: int) -> Consumer:
        return await self._broker.consumer(
            self._topic, group, self._shard, name=f"{group}-{fence}", fence=fence
        )

    async def _read(self, reader: Reader, count: int) -> None:
        due = len(reader.seen) < self._there
        found = await reader.consumer.read(count, wait_s=self._patience_s if due else 0.0)
        assert len(found) <= count
        assert found or not due, f"{reader.name} was handed nothing within {self._patience_s} s"
        for delivery in found:
            again = self._see(reader, delivery)
            assert not (again and self._strict), f"{delivery} was handed out before"

    async def _take_over(self, reader: Reader) -> None:
        """The owner dies, the next one gets what it had in hand, in order."""
        await self._die(self._broker, reader.consumer)
        reader.fence += 1
        reader.consumer = await self._consumer(reader.name, reader.fence)
        before, reader.in_hand = reader.in_hand, {}
        while found := await reader.consumer.left_over(2):
            for delivery in found:
                again = self._see(reader, delivery)
                assert again or not self._strict, f"{delivery} was never handed out"
                assert delivery.count > 1 or not self._strict, delivery
        if self._strict:
            assert list(reader.in_hand) == sorted(before), "left over, in order"

    def _see(self, reader: Reader, delivery: Delivery) -> bool:
        """Was it seen before? For the first time, messages come in order."""
        found = delivery.message
        assert found is not None, delivery
        assert found in self._outbox, "to the byte as it was published"
        again = found.position in reader.seen
        if not again:
            assert found == self._outbox[len(reader.seen)], "in order, and none left out"
            reader.seen[found.position] = found.id
        reader.in_hand[found.position] = delivery
        return again

    async def _ack(self, reader: Reader, count: int) -> None:
        """The newest first: handlers end in any order."""
        order = sorted(reader.in_hand, reverse=True)
        await reader.consumer.ack([reader.in_hand.pop(position) for position in order[:count]])
