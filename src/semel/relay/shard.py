"""One shard of a relay, for as long as it is ours: read, publish, move the cursor, and again.

Gaps, and how they end: dead between publish and cursor, the next owner publishes again, and the
broker knows what it has; dead before, nothing has happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from semel.brokers.rules import TopicError
from semel.cloudevents import is_clean
from semel.colour import ASYNC, answers_of
from semel.errors import BrokerUnavailableError, StoreUnavailableError
from semel.messages import (
    CANARY,
    Batch,
    Behind,
    Fenced,
    Forked,
    Full,
    Message,
    Refused,
    Tail,
    Taken,
)
from semel.shards import Hold
from semel.values import value

if TYPE_CHECKING:
    from semel.circuit import Circuit
    from semel.relay import Relay
    from semel.stores.sql.outbox_reading import Cursor, Page

log = logging.getLogger("semel")

# How often a broker is asked whether it still has what it was given.
COMPARE_EVERY_S = 10.0

# A topic that is full is asked again after this, and then less often.
FULL_S = 0.05
MOST_FULL_S = 1.0

# What a stand-in tells of why: enough for people, and small enough for any broker.
WHY_CHARS = 500

# What a broker is asked for that has been given nothing: it has no message either.
NOTHING_YET = {f"{CANARY}nothing": Tail()}

OUTAGE = (BrokerUnavailableError, StoreUnavailableError)


class _PutDownError(Exception):
    """The shard is to be handed over, or its lease has run out."""


class _LostError(Exception):
    """A later owner of the shard is at work."""


class _ForkedError(Exception):
    """The outbox and the broker tell different stories."""


@value
class Sent:
    """What became of a batch: the topic's tail, and where a lane of its own begins.

    `had` is what the broker had, where it has lost that.
    """

    topic: str
    tail: Tail
    lane: int | None = None
    had: Tail | None = None


class Shard:
    """One shard, for as long as it is ours."""

    def __init__(self, relay: Relay, hold: Hold) -> None:
        self._relay = relay
        self._hold = hold
        self._reader = relay.reader
        self._broker = relay.broker
        self._cursor: Cursor
        self._read_at = -1
        """The news up to which everything was read."""
        self._ahead: tuple[int, asyncio.Task[Page]] | None = None
        """The page behind the one that is being published, and how far it may go."""
        self._again_at: dict[str, tuple[float, float]] = {}
        """By topic that is full: when to ask again, and the pause after that."""
        self._told_to: dict[str, int] = {}
        """By topic: up to where it was told what the broker has refused."""
        self._compared_at = -COMPARE_EVERY_S

    async def run(self) -> None:
        try:
            while self._hold.live:
                try:
                    await self._relay_on()
                except BrokerUnavailableError as error:
                    await self._wait(self._relay.broker_circuit, error)
                except StoreUnavailableError as error:
                    await self._wait(self._relay.store_circuit, error)
                except _ForkedError as fork:
                    await self._stand_still(str(fork))
        except _PutDownError:
            pass
        except _LostError as lost:
            log.warning("semel: %s: shard %d: %s", self._relay.name, self._hold.shard, lost)
        finally:
            await self._drop_ahead()
            self._relay.broker_circuit.gave_up(self._hold.shard)
            self._relay.store_circuit.gave_up(self._hold.shard)
            self._forget_status()

    async def _wait(self, circuit: Circuit, error: Exception) -> None:
        circuit.failed(error, self._hold.shard)
        await circuit.wait(self._hold.ending, self._hold.shard)

    async def _stand_still(self, why: str) -> None:
        if self._relay.stopped.get(self._hold.shard) != why:
            log.critical("semel: %s: %s", self._relay.name, why)
        self._relay.stopped[self._hold.shard] = why
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMPARE_EVERY_S):
                await self._hold.ending.wait()

    async def _relay_on(self) -> None:
        cursor = await self._reader.take(self._hold.shard, self._hold.fence)
        if cursor is None:
            raise _LostError("a later owner has its cursor")
        self._cursor = cursor
        self._read_at = -1
        self._compared_at = -COMPARE_EVERY_S
        await self._drop_ahead()
        while self._hold.live:
            await self._compare_now_and_then()
            since = self._relay.news
            moved = await self._main_turn(since)
            for topic in list(self._cursor.lanes):
                moved |= await self._lane_turn(topic)
            self._relay.broker_circuit.passed(self._hold.shard)
            self._relay.store_circuit.passed(self._hold.shard)
            self._relay.stopped.pop(self._hold.shard, None)
            if not moved:
                await self._relay.until_news(since, self._hold, self._pause_s())

    def _pause_s(self) -> float:
        now = ASYNC.now()
        again = [at - now for at, _ in self._again_at.values()]
        return max(0.0, min([*again, COMPARE_EVERY_S]))

    # --- the shard's own lane ---------------------------------------------------------------

    async def _main_turn(self, news: int) -> bool:
        if self._read_at == news:
            return False
        await self._refuse_old_ids(news)
        bound, page = await self._next_page(news)
        if page.more:
            self._read_ahead(page, bound)
        else:
            self._read_at = bound
        if not page.messages and page.upto == self._cursor.position:
            return False
        by_topic: dict[str, list[Message]] = {}
        for message in page.messages:
            if message.topic not in self._cursor.lanes:
                by_topic.setdefault(message.topic, []).append(message)
        ours = [(topic, some) for topic, some in by_topic.items() if self._is_ours(topic, some[0])]
        sent = await answers_of([self._send(topic, some) for topic, some in ours])
        lanes = {one.topic: one.lane for one in sent if one.lane is not None}
        await self._advance(page.upto, sent, lanes)
        return True

    async def _refuse_old_ids(self, news: int) -> None:
        """Ids only grow. Below the cursor nobody looks, so what gets one there is not published."""
        reached = self._cursor.position
        # Whom we took the shard over from may have heard later news than we.
        if 0 <= news < reached and (given_out := await self._reader.news()) < reached:
            raise _ForkedError(
                f"shard {self._hold.shard} has published up to position {reached}, and the outbox "
                f"has given out {given_out}: its ids began anew, as after TRUNCATE ... RESTART "
                "IDENTITY or in a copy without its sequences. Nothing is published in this shard "
                f"until they go on behind {reached}: give the counter behind the ids that value, "
                "and the rows that are not published new ids"
            )

    def _is_ours(self, topic: str, message: Message) -> bool:
        """A canary's aggregate type is the name of the relays that are examined.

        On the brokers of others nobody would read it, and nothing of it could ever be trimmed.
        """
        return not topic.startswith(CANARY) or message.aggregate_type == self._relay.name

    async def _next_page(self, news: int) -> tuple[int, Page]:
        """And how far it may have gone: one that was read ahead knows older news."""
        from semel.stores.sql.outbox_reading import Lane

        if self._ahead is not None:
            (bound, reading), self._ahead = self._ahead, None
            return bound, await reading
        lane = Lane("", self._cursor.position)
        limit = self._relay.batch
        return news, await self._reader.read(self._cursor, lane, limit=limit, bound=news)

    def _read_ahead(self, page: Page, bound: int) -> None:
        from semel.stores.sql.outbox_reading import Lane

        lane, limit = Lane("", page.upto), self._relay.batch
        reading = self._reader.read(self._cursor, lane, limit=limit, bound=bound)
        self._ahead = bound, asyncio.create_task(reading)

    async def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[1].cancel()
            await asyncio.gather(ahead[1], return_exceptions=True)

    # --- lanes of their own -----------------------------------------------------------------

    async def _lane_turn(self, topic: str) -> bool:
        from semel.stores.sql.outbox_reading import Lane

        again_at, _ = self._again_at.get(topic, (0.0, 0.0))
        if ASYNC.now() < again_at:
            return False
        position = self._cursor.lanes[topic]
        page = await self._reader.read(
            self._cursor,
            Lane(topic, position),
            limit=self._relay.batch,
            bound=self._cursor.position,
        )
        sent = [await self._send(topic, page.messages)] if page.messages else []
        lane = sent[0].lane if sent else None
        stays = lane if lane is not None else page.upto if page.more else None
        await self._advance(self._cursor.position, sent, {topic: stays})
        if stays is None:
            self._let_rejoin(topic)
        return topic not in self._again_at

    def _let_rejoin(self, topic: str) -> None:
        log.info("semel: %s: %s has caught up", self._relay.name, self._called(topic))
        self._again_at.pop(topic, None)
        self._relay.held.pop((self._hold.shard, topic), None)

    # --- the broker -------------------------------------------------------------------------

    async def _send(self, topic: str, messages: Sequence[Message]) -> Sent:
        try:
            return await self._publish(topic, messages)
        except TopicError as error:
            self._hold_back(topic, str(error))
            return Sent(topic, self._cursor.tails.get(topic, Tail()), messages[0].position - 1)

    async def _publish(self, topic: str, messages: Sequence[Message]) -> Sent:
        follows = self._cursor.tails.get(topic) or await self._left_there(topic, messages[0])
        while True:
            if not self._hold.live:
                raise _PutDownError
            batch = Batch(topic, self._hold.shard, self._hold.fence, follows, messages)
            receipt = await self._broker.publish(batch)
            match receipt:
                case Taken(added):
                    self._took(topic, messages, added)
                    self._again_at.pop(topic, None)
                    return Sent(topic, _end_of(messages, follows))
                case Behind(tail):
                    return await self._rewound(topic, follows, tail)
                case Full(_, why):
                    self._hold_back(topic, why)
                    return Sent(topic, follows, messages[0].position - 1)
                case Fenced(fence):
                    raise _LostError(f"a later owner (fence {fence}) has published")
                case Forked(tail):
                    raise _ForkedError(self._fork(topic, tail))
                case Refused(refused, why):
                    before = [each for each in messages if each.position < refused.position]
                    event, *behind = messages[len(before) :]
                    self._took(topic, before, len(before))
                    follows = _end_of(before, follows)
                    if event.refused:
                        self._hold_back(topic, _impossible(event, why))
                        return Sent(topic, follows, event.position - 1)
                    await self._reader.keep(event.position)
                    messages = [_stand_in(event, why), *behind]

    def _took(self, topic: str, messages: Sequence[Message], added: int) -> None:
        self._relay.counts["published"] += added
        self._relay.counts["repeated"] += len(messages) - added
        for message in messages:
            if message.refused and message.position > self._told_to.get(topic, 0):
                self._told_to[topic] = message.position
                self._say_refused(message)

    def _say_refused(self, message: Message) -> None:
        self._relay.counts["refused"] += 1
        log.error(
            "semel: %s: the broker refuses event %s (%s) of %s/%s in %s: %s. Published without its "
            "payload, it is parked, and its aggregate behind it. Take the payload from "
            "event_outbox, where it is kept, and give it to each group with `semel parked edit` "
            "and `semel parked replay`",
            self._relay.name,
            message.id,
            message.type,
            message.aggregate_type,
            message.aggregate_id,
            self._called(message.topic),
            message.refused,
        )

    async def _left_there(self, topic: str, first: Message) -> Tail:
        """What to follow in a topic that this shard has never published to.

        Others may have: relays of another name, or of another number of shards. All of theirs
        lies before our first message. What does not is compared by the broker, one by one.
        """
        tail = await self._broker.tail(topic, self._hold.shard)
        return tail if tail is not None and tail.position < first.position else Tail()

    async def _rewound(self, topic: str, had: Tail, tail: Tail) -> Sent:
        """The broker has lost its tail: where a lane begins that publishes it again."""
        from semel.stores.sql.outbox_reading import Lane

        lane = Lane(topic, max(0, tail.position - 1))
        page = await self._reader.read(self._cursor, lane, limit=1, bound=tail.position)
        if any(message.id != tail.id for message in page.messages):
            raise _ForkedError(self._fork(topic, tail))
        return Sent(topic, tail, tail.position, had)

    def _fork(self, topic: str, tail: Tail) -> str:
        there = f"another event ({tail.id})" if tail.id else "no event, or another one,"
        return (
            f"at position {tail.position} of {self._called(topic)} the broker has {there} than "
            "the outbox: one of the two was restored from an older copy. Nothing is published in "
            "this shard until they agree: bring back the right copy, or delete the broker's stream "
            "to have it filled anew from the outbox, when the inboxes of its consumers are as old "
            "as the outbox (`After a restore`, reference/relay)"
        )

    async def _say_lost(self, sent: Sent, had: Tail) -> None:
        """Log the loss, after its lane is stored: from then on nothing of it is swept."""
        swept = await self._reader.swept_to()
        log.error(
            "semel: %s: %s; what the outbox still has is published again%s",
            self._relay.name,
            self._loss(sent, had) if sent.tail.position else self._absence(sent, had),
            f". Events up to {swept} may be deleted there and are lost"
            if swept > sent.tail.position
            else "",
        )

    def _loss(self, sent: Sent, had: Tail) -> str:
        return (
            f"the broker has lost the end of {self._called(sent.topic)}, from position "
            f"{had.position} back to {sent.tail.position} (or the URL names another broker, which "
            "has an older part of it: a second broker needs a relay with a name of its own)"
        )

    def _absence(self, sent: Sent, had: Tail) -> str:
        """Describe a broker without any event of the topic: it may be another broker."""
        return (
            f"this relay has published {self._called(sent.topic)} up to position {had.position}, "
            "and this broker has no event of it. Either the URL names another broker than before, "
            "or the broker has lost its data. A second broker beside the first needs a relay with "
            f"a name of its own: {self._relay.name!r} is taken (name=, or --name)"
        )

    def _hold_back(self, topic: str, why: str) -> None:
        _, pause_s = self._again_at.get(topic, (0.0, FULL_S))
        self._again_at[topic] = ASYNC.now() + pause_s, min(MOST_FULL_S, 2 * pause_s)
        if (self._hold.shard, topic) not in self._relay.held:
            log.warning("semel: %s: %s waits: %s", self._relay.name, self._called(topic), why)
        self._relay.held[self._hold.shard, topic] = why

    def _called(self, topic: str) -> str:
        return topic if self._broker.shards == 1 else f"{topic} (shard {self._hold.shard})"

    # --- has it still got what it was given? ------------------------------------------------

    async def _compare_now_and_then(self) -> None:
        """A broker that lost its tail is found out also where nothing new is published.

        And so is one that does not answer where nothing ever was: a wrong URL, for instance.
        """
        if ASYNC.now() - self._compared_at < COMPARE_EVERY_S:
            return
        self._compared_at = ASYNC.now()
        lost: list[Sent] = []
        for topic, known in (self._cursor.tails or NOTHING_YET).items():
            tail = await self._broker.tail(topic, self._hold.shard)
            if tail is not None and tail.position < known.position:
                lost.append(await self._rewound(topic, known, tail))
        if lost:
            lanes = {one.topic: one.lane for one in lost}
            await self._advance(self._cursor.position, lost, lanes)

    # --- the cursor -------------------------------------------------------------------------

    async def _advance(
        self, position: int, sent: Sequence[Sent], lanes: Mapping[str, int | None]
    ) -> None:
        tails = {one.topic: one.tail for one in sent}
        cursor = await self._reader.advance(
            self._cursor, position=position, tails=tails, lanes=lanes
        )
        if cursor is None:
            raise _LostError("a later owner has moved its cursor")
        self._cursor = cursor
        for one in sent:
            if one.had is not None:
                await self._say_lost(one, one.had)

    def _forget_status(self) -> None:
        self._relay.stopped.pop(self._hold.shard, None)
        for shard, topic in list(self._relay.held):
            if shard == self._hold.shard:
                del self._relay.held[shard, topic]


def _end_of(messages: Sequence[Message], before: Tail) -> Tail:
    return Tail(messages[-1].position, messages[-1].id) if messages else before


def _stand_in(message: Message, why: str) -> Message:
    """The same without its payload. An attribute has to be able to hold why."""
    told = "".join(each if is_clean(each) else " " for each in why[:WHY_CHARS]).strip()
    return replace(message, payload="null", refused=told or "it did not say why")


def _impossible(message: Message, why: str) -> str:
    told = f"the broker refuses event {message.id} ({message.refused})"
    return f"{told}, and a stand-in without its payload too: {why}"
