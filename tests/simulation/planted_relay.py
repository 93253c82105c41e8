"""Ways to relay that look right, each with one defect; the simulation has to find them all."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from relay_world import LARGE, Outbox, Place, Plan, Streams

from semel.errors import BrokerUnavailableError
from semel.messages import Batch, Message, Receipt, Tail
from semel.relay.shard import Sent, Shard
from semel.stores.sql.outbox_reading import Cursor, Lane, Page

# --- relays -------------------------------------------------------------------------------------


class MovesFirst(Shard):
    """The cursor first, then the broker: whoever dies in between passes something over."""

    async def _send(self, topic: str, messages: Sequence[Message]) -> Sent:
        self.__dict__.setdefault("unsent", []).append((topic, messages))
        return Sent(topic, Tail(messages[-1].position, messages[-1].id))

    async def _advance(
        self, position: int, sent: Sequence[Sent], lanes: Mapping[str, int | None]
    ) -> None:
        before = self._cursor
        await super()._advance(position, sent, lanes)
        unsent, self.__dict__["unsent"] = self.__dict__.get("unsent", []), []
        for topic, messages in unsent:
            follows = before.tails.get(topic, Tail())
            batch = Batch(topic, self._hold.shard, self._hold.fence, follows, messages)
            await self._broker.publish(batch)


class TakesAnOutageForSuccess(Shard):
    """No reply is not yet a publish."""

    async def _send(self, topic: str, messages: Sequence[Message]) -> Sent:
        try:
            return await super()._send(topic, messages)
        except BrokerUnavailableError:
            return Sent(topic, Tail(messages[-1].position, messages[-1].id))


class SkipsWhatWasLost(Shard):
    """Goes on from where the broker is, without what it has lost."""

    async def _rewound(self, topic: str, had: Tail, tail: Tail) -> Sent:
        return Sent(topic, tail)


class NeverCompares(Shard):
    """Finds out about a lost tail only when there is something new to publish."""

    async def _compare_now_and_then(self) -> None:
        pass


class RejoinsTooEarly(Shard):
    """A lane that has published something is not a lane that has caught up."""

    async def _lane_turn(self, topic: str) -> bool:
        lane = Lane(topic, self._cursor.lanes[topic])
        bound = self._cursor.position
        limit = self._relay.batch
        page = await self._reader.read(self._cursor, lane, limit=limit, bound=bound)
        sent = [await self._send(topic, page.messages)] if page.messages else []
        lane_at = sent[0].lane if sent else None
        await self._advance(self._cursor.position, sent, {topic: lane_at})
        if lane_at is None:
            self._let_rejoin(topic)
        return topic not in self._again_at


class TakesOldNewsForNew(Shard):
    """A page read ahead went as far as the news of then, not of now."""

    async def _next_page(self, news: int) -> tuple[int, Page]:
        _, page = await super()._next_page(news)
        return news, page


class LeavesOutWhatIsRefused(Shard):
    """Goes on behind it, and leaves its place empty."""

    async def _send(self, topic: str, messages: Sequence[Message]) -> Sent:
        fit = [message for message in messages if message.payload != LARGE]
        if not fit:
            return Sent(topic, self._cursor.tails.get(topic, Tail()))
        return await super()._send(topic, fit)


class ForgetsWhatFollowsAStandIn(Shard):
    """What stood behind it in the batch was not taken with it."""

    async def _send(self, topic: str, messages: Sequence[Message]) -> Sent:
        large = [n for n, message in enumerate(messages) if message.payload == LARGE]
        sent = await super()._send(topic, messages[: large[0] + 1] if large else messages)
        if sent.lane is not None:
            return sent
        return replace(sent, tail=Tail(messages[-1].position, messages[-1].id))


class _Remembering:
    """A reader that goes on from where this process was when it last had the shard."""

    def __init__(self, relay: Any) -> None:
        self._reader = relay.reader
        self._known: dict[int, Cursor] = relay.known

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._reader, verb)

    async def take(self, shard: int, fence: int) -> Cursor | None:
        cursor = await self._reader.take(shard, fence)
        if cursor is None or shard not in self._known:
            return cursor
        return replace(self._known[shard], fence=fence)

    async def advance(self, cursor: Cursor, **how: Any) -> Cursor | None:
        moved = await self._reader.advance(cursor, **how)
        if moved is not None:
            self._known[cursor.shard] = moved
        return moved


class TrustsItsMemory(Shard):
    """Somebody else had the shard meanwhile."""

    def __init__(self, relay: Any, hold: Any) -> None:
        super().__init__(relay, hold)
        self._reader = _Remembering(relay)


# --- tables -------------------------------------------------------------------------------------


class NoBound(Outbox):
    """Reads up to the newest row: what is committed later, with a smaller id, is never seen."""

    def decided(self) -> int:
        return self._last_id


class ByTransaction(Outbox):
    """In the order (transaction, id), as far as no older transaction is open."""

    def position_of(self, tx: int, number: int, id: int) -> int:
        return 8 * tx + number

    def decided(self) -> int:
        return 8 * min(self.active, default=self._last_tx + 1) - 1


class NoFenceOnTheCursor(Outbox):
    """Whoever wakes up moves it."""

    def may_move(self, cursor: Cursor) -> bool:
        return True


class SweepsPastLanes(Outbox):
    """What the shard has published, its slowest topic may not have."""

    def reached(self, place: Place) -> int:
        return place.position


class SweepsWhatIsRefused(Outbox):
    """A row is published, so it goes; but of this one only its stand-in was."""

    def keep(self, position: int) -> None:
        pass


# --- brokers ------------------------------------------------------------------------------------


class NoFence(Streams):
    """Takes everything that fits, whoever brings it."""

    def accept(self, batch: Batch) -> Receipt:
        self.broker._log(batch.topic, batch.shard).fence = 0
        return super().accept(batch)


class NoTail(Streams):
    """Takes what is new by its position, and does not ask what it follows."""

    def accept(self, batch: Batch) -> Receipt:
        tail = self.broker._log(batch.topic, batch.shard).tail
        new = [message for message in batch.messages if message.position > tail.position]
        return super().accept(replace(batch, follows=tail, messages=new))


PLANTS = {
    "the cursor moves before the publish": Plan(shard=MovesFirst),
    "an outage is taken for success": Plan(shard=TakesAnOutageForSuccess),
    "what the broker lost is skipped": Plan(shard=SkipsWhatWasLost),
    "nothing is compared": Plan(shard=NeverCompares),
    "a lane rejoins too early": Plan(shard=RejoinsTooEarly),
    "old news are taken for new": Plan(shard=TakesOldNewsForNew),
    "what is refused is left out": Plan(shard=LeavesOutWhatIsRefused),
    "what follows a stand-in is forgotten": Plan(shard=ForgetsWhatFollowsAStandIn),
    "a takeover trusts its memory": Plan(shard=TrustsItsMemory),
    "rows are read up to the newest": Plan(outbox=NoBound),
    "rows are read by transaction": Plan(outbox=ByTransaction),
    "the cursor has no fence": Plan(outbox=NoFenceOnTheCursor),
    "a sweep passes a lane": Plan(outbox=SweepsPastLanes),
    "a sweep takes what is refused": Plan(outbox=SweepsWhatIsRefused),
    "the broker has no fence": Plan(streams=NoFence),
    "the broker does not ask what a batch follows": Plan(streams=NoTail),
}
