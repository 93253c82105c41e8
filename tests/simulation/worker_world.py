"""The real workers and inboxes in a simulated world: a broker, a store, and hosts that fail.

Messages are published to a `MemoryBroker`: some of aggregates with numbers, some alone, one that
cannot be handled, one that ends whoever runs it. Workers read them through a network that loses and
delays. The inbox is `MemoryInbox`, one for all hosts as a database is, with a way there and back
for every question and every commit. Handlers are slow, fail now and then, before and after their
effect, and need somebody who is away at times; outages last up to ten minutes. Hosts die at any
await, freeze for longer than their lease, and are cut off. The broker forgets what it was told, and
hands it out again.

Three kinds of effects: in the inbox' transaction (once), somewhere else (at least once), and
somewhere else through the guard (at least once). Whatever has its effect is checked at once: in the
order of its aggregate, and once where that is promised. So is whatever is acknowledged: it had its
effect, or it waits. When everything is quiet, everything else had its effect, and nobody waits but
who cannot be handled and the later ones of its aggregate; once people have mended the handler and
replayed it, these have had theirs too.

    python tests/simulation/worker_world.py --seed 123
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from unittest import mock

from party_world import CALM, LEASE_S, Line, PartyWorld, Report, Store, main, silence

from semel import colour, worker
from semel.brokers.memory import MemoryBroker, MemoryConsumer
from semel.errors import BrokerUnavailableError, StoreUnavailableError
from semel.inbox import PoisonError, Retry
from semel.messages import Batch, Delivery, Ending, Message, Taken, shard_of
from semel.parked import Parked
from semel.shards import Hold, Shards
from semel.stores.inbox_rules import Course, Failure, Known, number_of, sequence_of
from semel.stores.memory_inbox import MemoryInbox
from semel.testing.simulator import (
    HOST,
    DeadlockError,
    FaultyLedger,
    Host,
    LivelockError,
    NoAnswerError,
    SimClock,
)
from semel.worker import Worker
from semel.worker import shard as shard_module
from semel.worker.shard import Shard, _Lane

GROUP = "billing"
AGGREGATES = 3
TIME = datetime(2026, 1, 1, tzinfo=UTC)

# A message fails less often than it may; what ends a process so often is parked.
RETRY = Retry(attempts=4, first_s=0.5, jitter=0.0, crashes=2)

# When nothing fails any more: leases and pauses run out, circuits try again, what failed is due. A
# guarded effect that ends its process does so again after the guard's own lease, of 30 s.
SETTLES_WITHIN_S = 150.0

LONG_OUTAGE_S = 600.0

SOMETIMES = (
    "crash", "died_here", "freeze", "stumble", "cut_off", "join", "stop", "restart", "rewound",
    "broker_away", "inbox_away", "store_away", "handler_away", "long_outage", "asked_in_vain",
    "commit_lost", "reply_lost", "request_lost", "late", "left_over", "handed_again", "taken_over",
    "seen", "applied", "behind", "gap", "retry", "poison", "killed", "slow", "failed_before",
    "failed_after", "repeated", "not_committed", "alone", "full", "replayed", "begun_anew",
)  # fmt: skip


# --- a broker -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """What an owner of a shard has of the broker."""

    consumer: MemoryConsumer
    topic: str
    shard: int
    fence: int


class Streams:
    """The broker's side: the real rules, and what must hold of what is handed out and settled."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broker = MemoryBroker(shards=world.shards, maxlen=world.chance.choice([None, 3]))
        self._fences: dict[tuple[str, int], int] = defaultdict(int)
        self._handed: set[str] = set()

    def publish(self, message: Message) -> bool:
        _, slot = sequence_of(GROUP, message)
        shard = shard_of(slot, self.broker.shards)
        tail = self.broker._log(message.topic, shard).tail
        batch = Batch(message.topic, shard, 1, tail, [message])
        taken = isinstance(colour.run(self.broker.publish(batch)), Taken)
        if not taken:
            self.world.hit("full")
        return taken

    def open(self, topic: str, shard: int, name: str, fence: int) -> Opened:
        opening = self.broker.consumer(topic, GROUP, shard, name=name, fence=fence)
        self._fences[topic, shard] = max(fence, self._fences[topic, shard])
        return Opened(colour.run(opening), topic, shard, fence)

    def left_over(self, owner: Opened, limit: int) -> Sequence[Delivery]:
        found = colour.run(owner.consumer.left_over(limit))
        if found:
            self.world.hit("left_over")
        return self._to(owner, found)

    def read(self, owner: Opened, limit: int) -> Sequence[Delivery]:
        return self._to(owner, colour.run(owner.consumer.read(limit)))

    def _to(self, owner: Opened, found: Sequence[Delivery]) -> Sequence[Delivery]:
        if found and owner.fence < self._fences[owner.topic, owner.shard]:
            self.world.wrong("a former owner was handed messages, after a later one")
        for each in found:
            if each.message is not None:
                if each.message.id in self._handed:
                    self.world.hit("handed_again")
                self._handed.add(each.message.id)
        return found

    def ack(self, owner: Opened, deliveries: Sequence[Delivery]) -> None:
        for each in deliveries:
            assert each.message is not None
            self.world.loop.note("acknowledged", each.message.id)
            if not self.world.is_safe(each.message):
                self.world.wrong("what had no effect and does not wait was acknowledged")
        colour.run(owner.consumer.ack(deliveries))

    def rewind(self) -> None:
        """What a failover forgets: what was read lately, and acknowledged."""
        for log in self.broker._logs.values():
            for group in log.groups.values():
                to = int(group.read_to * self.world.chance.random())
                group.read_to = to
                group.pending = {at: held for at, held in group.pending.items() if at <= to}


class ConsumerHere:
    """A host's view of one shard of a topic."""

    def __init__(self, broker: BrokerHere, opened: Opened) -> None:
        self.world = broker.world
        self.ask = broker.ask
        self.opened = opened

    async def left_over(self, limit: int = 1000) -> Sequence[Delivery]:
        return await self.ask(lambda: self.world.streams.left_over(self.opened, limit))

    async def read(self, limit: int, *, wait_s: float = 0.0) -> Sequence[Delivery]:
        await self.world.perhaps_stumble()
        found = await self.ask(lambda: self.world.streams.read(self.opened, limit))
        if not found:
            await asyncio.sleep(wait_s)
        return found

    async def reclaim(self, idle_s: float, limit: int = 100) -> Sequence[Delivery]:
        return []

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        await self.world.perhaps_stumble()
        await self.ask(lambda: self.world.streams.ack(self.opened, deliveries))

    async def close(self) -> None:
        pass


class BrokerHere:
    """A host's way to the streams."""

    features = MemoryBroker.features

    def __init__(self, world: World) -> None:
        self.world = world
        self.shards = world.shards

    async def ask(self, serve: Callable[[], Any]) -> Any:
        await self.world.perhaps_die()
        if "broker" in self.world.away:
            await asyncio.sleep(0.01)
            raise BrokerUnavailableError("away")
        try:
            answer = await self.world.wire.ask(lambda: _answer(serve))
        except NoAnswerError as error:
            raise BrokerUnavailableError("no answer") from error
        if isinstance(answer, BrokerUnavailableError):
            self.world.hit("begun_anew")
            raise answer
        return answer

    async def join(self, topic: str, group: str) -> None:
        await self.ask(lambda: colour.run(self.world.streams.broker.join(topic, group)))

    async def consumer(
        self, topic: str, group: str, shard: int, *, name: str, fence: int
    ) -> ConsumerHere:
        opened = await self.ask(lambda: self.world.streams.open(topic, shard, name, fence))
        return self.world.plan.consumer(self, opened)


def _answer(serve: Callable[[], Any]) -> Any:
    try:
        return serve()
    except BrokerUnavailableError as error:
        return error


# --- an inbox -----------------------------------------------------------------------------------


class _Effects(list[Any]):
    """What was committed, looked at as it comes."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __iadd__(self, more: Any) -> Any:
        for id in more:
            self._world.happened(id, once=True)
        return super().__iadd__(more)


class InboxHere(MemoryInbox):
    """The inbox of all hosts. Questions and commits are lost on their way, and answers on theirs.

    A batch is one transaction, as it is in SQL, or one for each message.
    """

    def __init__(self, world: World) -> None:
        super().__init__(retry=RETRY, clock=SimClock(world.loop))
        self.effects = _Effects(world)
        self.world = world

    async def way(self, fault: str) -> None:
        """To the database or back."""
        world, host = self.world, HOST.get()
        await world.perhaps_die()
        cut = host is not None and host.cut_off_until > world.loop.clock_s
        await asyncio.sleep(world.chance.random() * world.line.weather.latency_s)
        if "inbox" in world.away or cut or world.chance.random() < world.line.weather.request_lost:
            world.hit(fault)
            raise StoreUnavailableError(f"the simulated inbox: {fault}")

    async def apply(
        self, consumer: str, messages: Sequence[Message], handle: Any, *, singly: bool = False
    ) -> Sequence[Ending]:
        await self.way("asked_in_vain")
        if singly or not self.world.in_batches:
            endings = await super().apply(consumer, messages, handle, singly=singly)
        else:
            endings = await self._apply_all(consumer, messages, handle)
        for each in endings:
            self.world.hit(getattr(each, "why", type(each).__name__.lower()))
        await self.way("reply_lost")
        return endings

    async def _apply_all(
        self, consumer: str, messages: Sequence[Message], handle: Any
    ) -> Sequence[Ending]:
        while True:
            course = Course(consumer, self._known_of(consumer, messages))
            endings: list[Ending] = []
            effects: list[Any] = []
            for message in messages:
                ending = course.ask(message)
                if ending is None:
                    failure, its = await self._run(consumer, message, handle, 1, counted=False)
                    ending = course.failed(message, failure) if failure else course.applied(message)
                    effects += its
                endings.append(ending)
            if self._commit(course):
                self.effects += effects
                return endings

    def _known_of(self, consumer: str, messages: Sequence[Message]) -> Known:
        ids = {sequence_of(consumer, message)[0] for message in messages}
        marks = {id: self._marks[id] for id in ids & self._marks.keys()}
        return Known(marks, ids & self._seen.keys(), ids & self._rows.keys())

    async def _run(
        self, consumer: str, message: Message, handle: Any, attempt: int, *, counted: bool
    ) -> tuple[Failure | None, list[Any]]:
        await self.way("asked_in_vain")
        self.world.cut_short[message.id] += 1
        try:
            ended = await super()._run(consumer, message, handle, attempt, counted=counted)
        finally:
            if not self.world.loop.is_closed():  # a host that dies ends nothing
                self.world.cut_short[message.id] -= 1
        await self.way("commit_lost")
        await self.world.perhaps_stumble()
        return ended

    def _commit(self, course: Course) -> bool:
        committed = super()._commit(course)
        if not committed:
            self.world.hit("not_committed")
        return committed

    async def retry(
        self, consumer: str, slots: tuple[int, int], handle: Any
    ) -> Sequence[tuple[Message, Ending]]:
        await self.way("asked_in_vain")
        ran = await super().retry(consumer, slots, handle)
        await self.way("reply_lost")
        return ran


# --- workers ------------------------------------------------------------------------------------


class LedgerHere(FaultyLedger):
    """A host's way to the store in which shards are owned, and effects elsewhere guarded."""

    def __init__(self, world: World) -> None:
        super().__init__(world.server, world.network)
        self.world = world

    async def ask(self, serve: Callable[[], Any]) -> Any:
        if "store" in self.world.away:
            await asyncio.sleep(0.01)
            raise StoreUnavailableError("away")
        return await super().ask(serve)


OUTAGES = ("broker", "inbox", "store", "handler")

ALL = (
    "crash", "die_here", "freeze", "stumble", "cut", "stop", "join", "rewind", "weather", "killer",
    *OUTAGES,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Of what the world is made: the real thing, or one with a defect planted in it.

    `faults` are those that happen, for a defect that is to be found by one of them alone.
    """

    inbox: type[InboxHere] = InboxHere
    streams: type[Streams] = Streams
    consumer: type[ConsumerHere] = ConsumerHere
    ledger: type[LedgerHere] = LedgerHere
    shards: type[Shards] = Shards
    shard: type[Shard] = Shard
    lane: type[_Lane] = _Lane
    faults: tuple[str, ...] = ALL

    @property
    def healthy(self) -> Plan:
        """The real thing, in the same world."""
        return Plan(faults=self.faults)


class WorkerHere(Worker):
    def __init__(self, world: World, host: Host) -> None:
        super().__init__(
            BrokerHere(world),  # type: ignore[arg-type]
            GROUP,
            world.inbox,
            Store(world.plan.ledger(world)),
            name="worker",
            batch=world.chance.randint(1, 4),
            lease_s=LEASE_S,
            grace_s=world.chance.choice([1.0, 2 * LEASE_S]),
        )
        for circuit in (self.broker_circuit, self.store_circuit):
            circuit._random = world.chance
        self.world = world
        self.host = host
        for topic in world.topics:
            self.on(topic=topic, outside=topic == "mails")(getattr(world, f"on_{topic}"))

    async def _own(self, hold: Hold) -> None:
        self.world.taken(self, hold)
        await super()._own(hold)

    def believes_in(self, shard: int) -> bool:
        """Does it work on the shard, by all that it can know?"""
        holds = self._shards._holds if self._shards else {}
        if self.host.dead or shard not in holds:
            return False
        now = self.host.offset + self.world.loop.clock_s
        return min(holds[shard]._good_until, holds[shard]._ends_at) > now


class World(PartyWorld):
    def __init__(self, seed: int, plan: Plan) -> None:
        super().__init__(seed, budget=400_000)
        chance = self.chance
        self.plan = plan
        self.away: set[str] = set()
        self.topics = ("orders", *chance.choice([(), (), ("bills",), ("mails",)]))
        self.in_batches = chance.random() < 0.5
        self.inbox = plan.inbox(self)
        self.streams = plan.streams(self)
        if not self._may("weather"):
            self.network.weather = self.line.weather = CALM
        # A request may come late, when its sender has given up; nobody sends it twice.
        self.wire = Line(self, replace(self.network.weather, doubled=0.0))
        # Where few faults happen, they happen often.
        often = [1.0] if plan.faults != ALL else [0.0, 0.3, 1.0]
        self.stumbles = 0.15 * chance.choice(often) * self._may("stumble")
        self.deaths = 0.01 * chance.choice(often) * self._may("die_here")
        self.wanted = chance.randint(1, 3)
        self.is_mended = False
        self.is_wrong = asyncio.Event()
        self.sent: dict[str, Message] = {}
        self.effects: Counter[str] = Counter()
        self.cut_short: Counter[str] = Counter()
        """How often each message was begun and not ended."""
        self.disorder = chance.choice([0.0, 0.0, 0.3])
        self._position = 0
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._last: Counter[tuple[str, str]] = Counter()
        self._kinds: dict[str, str] = {}
        self._failures: dict[str, list[str]] = {}
        self._owned: dict[int, int] = {}

    # Messages.

    async def _publish(self) -> None:
        """One now and then before its predecessor, as where nobody sees to the order."""
        held: list[Message] = []
        for kind in self._a_day():
            await self.pause(1.0)
            message = self._message(self.chance.choice(self.topics), kind)
            if self.disorder and not held and self.chance.random() < self.disorder:
                held.append(message)
                continue
            for each in [message, *held]:
                await self._put(each)
            held.clear()
        for each in held:
            await self._put(each)

    def _a_day(self) -> Sequence[str]:
        kinds = ["plain"] * self.chance.randint(6, 12) + ["slow"]
        kinds += ["poison"] * (self.chance.random() < 0.5)
        kinds += ["killer"] * (self.chance.random() < 0.4 and self._may("killer"))
        self.chance.shuffle(kinds)
        return kinds

    def _message(self, topic: str, kind: str) -> Message:
        aggregate = str(self.chance.randrange(AGGREGATES))
        seq = None
        if self.chance.random() < 0.8:
            self._numbers[topic, aggregate] += 1
            seq = self._numbers[topic, aggregate]
        id = f"e{len(self.sent) + 1}"
        self._kinds[id] = kind
        often = self.chance.choice([0, 0, 0, 1, 2])
        self._failures[id] = self.chance.choices(["before", "after"], k=often)
        self.sent[id] = message = Message(
            0, id, "t", topic, "", "order", aggregate, seq, "{}", TIME
        )
        return message

    async def _put(self, message: Message) -> None:
        self._position += 1
        while not self.streams.publish(replace(message, position=self._position)):
            await self.pause(1.0)

    # What handlers do.

    async def on_orders(self, message: Message, session: list[str]) -> None:
        await self._handle(message, lambda: session.append(message.id))

    async def on_bills(self, message: Message) -> None:
        await self._handle(message, lambda: None)
        self.happened(message.id, once=False)

    async def on_mails(self, message: Message) -> None:
        await self._handle(message, lambda: None)
        self.happened(message.id, once=False)

    async def _handle(self, message: Message, put: Callable[[], None]) -> None:
        kind, failures = self._kinds[message.id], self._failures[message.id]
        failure = failures.pop() if failures else ""
        await self.pause(0.1)
        if kind == "killer" and not self.is_mended:
            self._kill(message)
            await asyncio.sleep(0)
        if "handler" in self.away:
            raise StoreUnavailableError("what the handler needs is away")
        if failure == "before":
            self.hit("failed_before")
            await self.perhaps_stumble()
            raise ValueError(failure)
        put()
        if kind == "slow":
            self.hit("slow")
            await asyncio.sleep(1.5 * LEASE_S)
        await self.pause(0.1)
        if failure:
            self.hit("failed_after")
            await self.perhaps_stumble()
            raise ValueError(failure)
        if kind == "poison" and not self.is_mended:
            raise PoisonError("nobody can handle this")

    def _kill(self, message: Message) -> None:
        host = HOST.get()
        assert host is not None
        host.dead = True
        self.hit("killed")
        # Once in a batch, which is not counted; then counted, alone, and with an outage in between.
        if self.cut_short[message.id] > RETRY.crashes + 6:
            self.wrong("a message ends one process after the other")

    # What must hold.

    def happened(self, id: str, *, once: bool) -> None:
        message = self.sent[id]
        self.loop.note("effect", message.topic, message.aggregate_id, message.seq, id)
        self.effects[id] += 1
        if self.effects[id] > 1:
            self.hit("repeated")
            if once:
                self.wrong("an effect happened twice")
            return
        if (seq := number_of(message)) == 0:
            self.hit("alone")
            return
        last = self._last[message.topic, message.aggregate_id]
        if seq != last + 1:
            self.wrong(f"after number {last} of an aggregate, {seq} had its effect")
        self._last[message.topic, message.aggregate_id] = seq

    def is_safe(self, message: Message) -> bool:
        return bool(self.effects[message.id]) or self._waits(message)

    def _waits(self, message: Message) -> bool:
        rows = (row for sequence in self.inbox._rows.values() for row in sequence.values())
        return any(row.message.id == message.id for row in rows)

    def taken(self, worker: WorkerHere, hold: Hold) -> None:
        self.loop.note("took", hold.shard, hold.fence)
        if hold.shard in self._owned:
            self.hit("taken_over")
        self._owned[hold.shard] = hold.fence
        for other, _ in self.members:
            if other is not worker and other.believes_in(hold.shard):
                self.wrong("a shard has two owners at once")

    def wrong(self, what: str) -> None:
        super().wrong(what)
        self.is_wrong.set()

    # The story.

    async def until_wrong(self) -> None:
        """To the end, or to the first thing that is not as it must be."""
        ends = [asyncio.create_task(each) for each in (self.story(), self.is_wrong.wait())]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()

    async def story(self) -> None:
        publishing = asyncio.create_task(self._publish())
        watching = asyncio.create_task(self._restart())
        for _ in range(self.wanted):
            self.join()
        for _ in range(self.chance.randint(2, 8)):
            await self.pause(2.0)
            self.chance.choice(self._misfortunes())()
        if self.chance.random() < 0.07:
            await self._long_outage()
        self._calm_down()
        await self._until(publishing.done)
        if not publishing.done():
            self.wrong("nobody reads: the topic stays full")
        await self._settle()
        watching.cancel()

    def _misfortunes(self) -> Sequence[Callable[[], None]]:
        hosts = ["join", "crash", "crash", "freeze", "freeze", "stop", "cut", "rewind", "rewind"]
        mishaps = [getattr(self, name) for name in hosts if self._may(name)]
        outages = [partial(self._toggle, name) for name in OUTAGES if self._may(name)]
        return [*mishaps, *outages, self._nothing]

    def _nothing(self) -> None:
        pass

    def _may(self, fault: str) -> bool:
        return fault in self.plan.faults

    def join(self) -> None:
        if len(self.there()) <= self.wanted:
            self.enter(self._worker)

    def _worker(self, host: Host) -> WorkerHere:
        host.offset = 100 * self.chance.random()
        return WorkerHere(self, host)

    async def _restart(self) -> None:
        """Whoever has died is started again, as processes are."""
        while True:
            await asyncio.sleep(0.5 + self.chance.random())
            while len(self.there()) < self.wanted:
                self.hit("restart")
                self.join()

    async def perhaps_die(self) -> None:
        """Right here."""
        host = HOST.get()
        if host is not None and self.deaths and self.chance.random() < self.deaths:
            self.hit("died_here")
            host.dead = True
            await asyncio.sleep(0)

    def rewind(self) -> None:
        self.hit("rewound")
        self.streams.rewind()

    def _toggle(self, what: str) -> None:
        self.hit(f"{what}_away")
        self.away ^= {what}

    async def _long_outage(self) -> None:
        names = [name for name in OUTAGES if self._may(name)]
        if names:
            self.hit("long_outage")
            self.away |= set(self.chance.sample(names, self.chance.randint(1, len(names))))
            await asyncio.sleep(LONG_OUTAGE_S)

    # The end.

    def _calm_down(self) -> None:
        self.network.weather = self.line.weather = self.wire.weather = CALM
        self.stumbles = self.deaths = 0.0
        self.away.clear()

    async def _settle(self) -> None:
        await self._until(lambda: not self._missing())
        await asyncio.sleep(2 * LEASE_S)  # the last late request arrives
        for message in self._missing():
            self.wrong(
                f"{self._kinds[message.id]} {message.id} had no effect, and waits for nobody"
            )
        self._check_parked()
        self.is_mended = True
        for settled in await Parked(self.inbox, who="somebody").replay_all(state="parked"):
            self.hit("replayed")
            if isinstance(settled, Exception):
                self.wrong(f"what is parked cannot be replayed: {settled}")
        await self._until(lambda: len(self.effects) == len(self.sent))
        if len(self.effects) < len(self.sent):
            self.wrong("what was replayed had no effect")

    async def _until(self, is_so: Callable[[], bool]) -> None:
        until_s = self.loop.clock_s + SETTLES_WITHIN_S
        while not is_so() and self.loop.clock_s < until_s:
            await asyncio.sleep(0.5)

    def _parked(self) -> dict[bytes, Any]:
        """The sequences that wait for people, and what they wait with."""
        heads = {id: self.inbox._head(id) for id in self.inbox._rows}
        return {id: head for id, head in heads.items() if head and head.state == "parked"}

    def _missing(self) -> list[Message]:
        """What should have had its effect by now."""
        parked = self._parked()
        return [
            message
            for id, message in self.sent.items()
            if not self.effects[id] and sequence_of(GROUP, message)[0] not in parked
        ]

    def _check_parked(self) -> None:
        for head in self._parked().values():
            id = head.message.id
            crashed = head.why == "crash" and self.cut_short[id] >= RETRY.crashes
            if self.effects[id]:
                self.wrong("what had its effect is parked")
            elif self._kinds[id] != "poison" and not crashed:
                self.wrong(f"{self._kinds[id]} {id} is parked ({head.why}): {head.error}")
            for row in self.inbox._rows[head.sequence].values():
                if row is not head and row.state == "parked":
                    self.wrong("what waits behind another one is parked itself")


# --- running one --------------------------------------------------------------------------------


@contextlib.contextmanager
def _here(plan: Plan) -> Iterator[None]:
    """Silently, and with what is planted."""
    with (
        silence(),
        mock.patch.object(worker, "Shards", plan.shards),
        mock.patch.object(worker, "Shard", plan.shard),
        mock.patch.object(shard_module, "_Lane", plan.lane),
    ):
        yield


REAL = Plan()


def run_workers(seed: int, plan: Plan = REAL) -> Report:
    with _here(plan):
        world = World(seed, plan)
        try:
            world.loop.run(world.until_wrong())
        except (LivelockError, DeadlockError) as error:
            world.wrong(str(error))
    told = f"{world.loop.steps} {world.loop.clock_s} {[*world.effects.items()]}"
    digest = hashlib.sha256(told.encode()).hexdigest()
    return Report(seed, world.violations, world.hits, digest, world.loop.trace)


__all__ = [
    "GROUP",
    "REAL",
    "SOMETIMES",
    "BrokerHere",
    "ConsumerHere",
    "InboxHere",
    "LedgerHere",
    "Opened",
    "Plan",
    "Report",
    "Streams",
    "run_workers",
]

if __name__ == "__main__":
    sys.exit(main(run_workers))
