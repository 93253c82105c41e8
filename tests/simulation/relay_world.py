"""The real relays and shards in a simulated world: an outbox, a broker, and hosts that fail.

`Outbox` is a model of the tables: writers get their ids before they commit, in any order, or roll
back; a reader is told how far everything is decided; cursors are fenced; a crash of the database
forgets the cursors' last moves, which nobody waits for. The broker is `MemoryBroker`, behind a
network that loses, delays and doubles; it loses its tail, is full, or is away, and now and then
there is an event that is too large for it. Hosts die at any await, freeze, and are cut off.

Whatever reaches a stream is checked at once: committed, in the order of its aggregate, without a
hole, once, as it was committed or, if it is too large, as a stand-in, and by nobody whom a later
owner has replaced. When everything is quiet, everything that was committed must be there.

    python tests/simulation/relay_world.py --seed 123
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

from party_world import CALM, LEASE_S, PartyWorld, Report, Store, main, silence

from semel import colour
from semel import relay as relay_module
from semel.brokers.memory import MemoryBroker
from semel.cloudevents import from_json
from semel.errors import BrokerUnavailableError, StoreUnavailableError
from semel.messages import Batch, Full, Message, Receipt, Refused, Tail, Taken, shard_of
from semel.relay import Relay
from semel.relay import shard as relay_shard
from semel.shards import Hold
from semel.stores.sql.outbox_reading import Cursor, Lane, Page
from semel.testing.simulator import FaultyLedger, Host, LivelockError, NoAnswerError

COMPARE_EVERY_S = 2.0

# When nothing fails any more: leases and pauses run out, circuits try again, tails are compared.
SETTLES_WITHIN_S = 30.0

# A page looks at no more positions than this.
SPAN = 8

TOPICS = ("orders", "bills")
AGGREGATES = 3
TIME = datetime(2026, 1, 1, tzinfo=UTC)

# What is too large for the broker: one in so many.
LARGE = '"large"'
LARGE_EVERY = 8

SOMETIMES = (
    "crash", "freeze", "stumble", "cut_off", "join", "stop", "lost_tail", "lost_fence", "full",
    "broker_away", "database_crash", "forgotten", "rolled_back", "swept", "request_lost",
    "reply_lost", "late", "doubled", "cursor_refused", "nothing_to_read", "waited_for_a_lock",
    "Taken", "Behind", "Full", "Fenced", "Refused", "repeated", "repeated_stand_in", "lane",
    "rejoined",
)  # fmt: skip


# --- an outbox ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Row:
    position: int
    slot: int
    topic: str
    aggregate: str
    seq: int
    id: str
    made_s: float
    large: bool
    committed: bool = False

    def message(self) -> Message:
        named = ("t", self.topic, "", "order", self.aggregate)
        payload = LARGE if self.large else "{}"
        return Message(self.position, self.id, *named, self.seq, payload, TIME)


@dataclass(slots=True)
class Place:
    """A shard's row."""

    fence: int = 0
    position: int = 0
    tails: Mapping[str, Tail] = field(default_factory=dict[str, Tail])
    lanes: Mapping[str, int] = field(default_factory=dict[str, int])


class Outbox:
    """The tables, as PostgreSQL has them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rows: dict[int, Row] = {}
        self.by_id: dict[str, Row] = {}
        self.swept = 0
        self.kept: set[int] = set()
        self.places: dict[int, Place] = {}
        self._written: dict[int, Place] = {}
        self._last_id = 0
        self._last_tx = 0
        self._locks: set[tuple[str, str]] = set()
        self._seqs: Counter[tuple[str, str]] = Counter()
        self._open: dict[int, int] = {}
        """By transaction that has rows: the last id before them."""
        self.active: set[int] = set()

    # Writers.

    async def transact(self, wanted: Sequence[tuple[str, str]], *, commits: bool) -> None:
        """A transaction: its number, its locks in order, its rows, some time, and its end."""
        self._last_tx += 1
        tx = self._last_tx
        self.active.add(tx)
        await self.world.pause(0.2)
        keys = sorted(set(wanted))
        for key in keys:
            while key in self._locks:
                self.world.hit("waited_for_a_lock")
                await self.world.pause(0.1)
            self._locks.add(key)
        rows: list[Row] = []
        self._open[tx] = self._last_id
        for topic, aggregate in wanted:
            rows.append(self._insert(tx, rows, topic, aggregate))
            await self.world.pause(0.05)
        await self.world.pause(0.3)
        self._end(tx, rows, commits)
        self._locks -= set(keys)

    def _insert(self, tx: int, before: list[Row], topic: str, aggregate: str) -> Row:
        self._last_id += 1
        ours = sum((row.topic, row.aggregate) == (topic, aggregate) for row in before)
        seq = self._seqs[topic, aggregate] + ours + 1
        slot = int(aggregate) * 256 // AGGREGATES
        id = f"e{self._last_id}"
        at = self.position_of(tx, len(before), self._last_id)
        large = self._last_id % LARGE_EVERY == 0
        return Row(at, slot, topic, aggregate, seq, id, self.world.loop.clock_s, large)

    def _end(self, tx: int, rows: list[Row], commits: bool) -> None:
        del self._open[tx]
        self.active.discard(tx)
        self._flush()
        if not commits:
            self.world.hit("rolled_back")
            return
        for row in rows:
            row.committed = True
            self.rows[row.position] = self.by_id[row.id] = row
            self._seqs[row.topic, row.aggregate] = row.seq

    def position_of(self, tx: int, number: int, id: int) -> int:
        return id

    def decided(self) -> int:
        """Nothing up to here can appear any more."""
        return min(self._open.values(), default=self._last_id)

    # Readers.

    def take(self, shard: int, fence: int) -> Cursor | None:
        place = self.places.setdefault(shard, Place(position=self.swept))
        if place.fence > fence:
            self.world.hit("cursor_refused")
            return None
        self.places[shard] = place = replace(place, fence=fence)
        self._flush()
        return Cursor(shard, fence, place.position, place.tails, place.lanes)

    def owned(self, cursor: Cursor) -> bool:
        return self.places[cursor.shard].fence == cursor.fence

    def read(self, cursor: Cursor, lane: Lane, limit: int, bound: int) -> Page:
        bound = min(bound, cursor.position) if lane.topic else bound
        if bound <= lane.position:
            return Page((), lane.position, more=False)
        end = min(bound, lane.position + SPAN)
        rows = self._page(cursor, lane, end)[:limit] if self.owned(cursor) else []
        if rows and not lane.topic and lane.position < self.places[cursor.shard].position:
            self.world.wrong("an owner reads again what its shard has published")
        if not rows:
            self.world.hit("nothing_to_read")
        upto = rows[-1].position if len(rows) == limit else end
        return Page([row.message() for row in rows], upto, more=upto < bound)

    def _page(self, cursor: Cursor, lane: Lane, end: int) -> list[Row]:
        found = [self.rows[at] for at in sorted(self.rows) if lane.position < at <= end]
        return [
            row
            for row in found
            if shard_of(row.slot, self.world.shards) == cursor.shard
            and lane.topic in ("", row.topic)
        ]

    def advance(
        self,
        cursor: Cursor,
        position: int,
        tails: Mapping[str, Tail],
        lanes: Mapping[str, int | None],
    ) -> Cursor | None:
        if not self.may_move(cursor):
            self.world.hit("cursor_refused")
            return None
        if not self.owned(cursor):
            self.world.wrong("a former owner moved the cursor")
        place = self.places[cursor.shard]
        all_lanes = {**cursor.lanes, **lanes}
        moved = replace(
            cursor,
            position=position,
            tails={**cursor.tails, **tails},
            lanes={topic: at for topic, at in all_lanes.items() if at is not None},
        )
        for topic in lanes:
            self.world.hit("lane" if topic in moved.lanes else "rejoined")
        self.places[cursor.shard] = Place(place.fence, position, moved.tails, moved.lanes)
        return moved

    def may_move(self, cursor: Cursor) -> bool:
        return self.owned(cursor)

    # What else happens to tables.

    def keep(self, position: int) -> None:
        self.kept.add(position)
        self._flush()

    def sweep(self, keep_s: float) -> int:
        upto = min((self.reached(place) for place in self.places.values()), default=0)
        if len(self.places) < self.world.shards:
            upto = 0
        old = [
            row
            for row in self.rows.values()
            if row.position <= upto
            and row.made_s <= self.world.loop.clock_s - keep_s
            and row.position not in self.kept
        ]
        for row in old:
            if row.large:
                self.world.wrong("what only the outbox has was swept")
            self.world.hit("swept")
            del self.rows[row.position]
            self.swept = max(self.swept, row.position)
        self._flush()
        return len(old)

    def reached(self, place: Place) -> int:
        return min([place.position, *place.lanes.values()])

    def _flush(self) -> None:
        """Whoever waits for the disk waits for everything before."""
        self._written = dict(self.places)

    def crash(self) -> None:
        """Moves of cursors are committed without waiting for the disk."""
        if self._written != self.places:
            self.world.hit("forgotten")
        self.places = dict(self._written)


# --- hosts' ways to it --------------------------------------------------------------------------


class Reader:
    """What `OutboxReader` is, over the network of this world."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def _ask(self, serve: Callable[[], Any]) -> Any:
        try:
            return await self._world.line.ask(serve)
        except NoAnswerError:
            pass
        try:
            return await self._world.line.ask(serve)
        except NoAnswerError as error:
            raise StoreUnavailableError("the simulated database did not answer") from error

    async def news(self) -> int:
        return int(await self._ask(self._world.outbox.decided))

    async def take(self, shard: int, fence: int) -> Cursor | None:
        return await self._ask(lambda: self._world.outbox.take(shard, fence))  # type: ignore[no-any-return]

    async def read(self, cursor: Cursor, lane: Lane, *, limit: int, bound: int) -> Page:
        return await self._ask(lambda: self._world.outbox.read(cursor, lane, limit, bound))  # type: ignore[no-any-return]

    async def advance(
        self,
        cursor: Cursor,
        *,
        position: int,
        tails: Mapping[str, Tail],
        lanes: Mapping[str, int | None],
    ) -> Cursor | None:
        await self._world.perhaps_stumble()
        return await self._ask(  # type: ignore[no-any-return]
            lambda: self._world.outbox.advance(cursor, position, tails, lanes)
        )

    async def swept_to(self) -> int:
        return int(await self._ask(lambda: self._world.outbox.swept))

    async def keep(self, position: int) -> None:
        await self._ask(lambda: self._world.outbox.keep(position))

    async def sweep(self, *, keep_s: float, limit: int) -> int:
        return int(await self._ask(lambda: self._world.outbox.sweep(keep_s)))


# --- a broker -----------------------------------------------------------------------------------


class Streams:
    """The broker's side: the real rules, and what must hold of every entry."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broker = MemoryBroker(shards=world.shards, maxlen=None)
        self.full: set[str] = set()
        self.is_away = False
        self._fences: dict[tuple[str, int], list[int]] = defaultdict(list)
        """Of each entry, by whom it was added."""
        self._owners: dict[tuple[str, int], int] = defaultdict(int)

    def publish(self, batch: Batch) -> Receipt:
        if batch.topic in self.full:
            self.world.hit("Full")
            return Full(0, "full")
        log = self.broker._log(batch.topic, batch.shard)
        before = len(log.entries)
        receipt = self.accept(batch)
        self.world.hit(type(receipt).__name__)
        if isinstance(receipt, Taken) and receipt.added < len(batch.messages):
            self.world.hit("repeated_stand_in" if batch.messages[0].refused else "repeated")
        for entry in log.entries[before:]:
            self._check(entry.id, log.entries[:before])
            self._compare(from_json(entry.raw))
            before += 1
            self._fences[batch.topic, batch.shard].append(batch.fence)
        if isinstance(receipt, Taken | Refused):
            self._check_owner(batch)
        return receipt

    def accept(self, batch: Batch) -> Receipt:
        """As Redis does it: what is too large is refused before anybody looks what is there."""
        fit = list(takewhile(lambda message: message.payload != LARGE, batch.messages))
        receipt = colour.run(self.broker.publish(replace(batch, messages=fit)))
        if len(fit) == len(batch.messages) or not isinstance(receipt, Taken):
            return receipt
        return Refused(batch.messages[len(fit)], "large")

    def _check_owner(self, batch: Batch) -> None:
        if self._owners[batch.topic, batch.shard] > batch.fence:
            self.world.wrong("a former owner was not refused, after a later one")
        self._owners[batch.topic, batch.shard] = batch.fence

    def _check(self, id: str, before: Sequence[Any]) -> None:
        row = self.world.outbox.by_id.get(id)
        if row is None:
            self.world.wrong("something uncommitted was published")
            return
        rows = [self.world.outbox.by_id[entry.id] for entry in before if entry.id != id]
        if len(rows) < len(before):
            self.world.wrong("an event is there twice")
        last = max((r.seq for r in rows if r.aggregate == row.aggregate), default=0)
        if row.seq != last + 1:
            self.world.wrong(f"after number {last} of an aggregate came {row.seq}")

    def _compare(self, message: Message) -> None:
        row = self.world.outbox.by_id.get(message.id)
        if row is None:
            return
        event = replace(row.message(), source=message.source)
        if message != (replace(event, payload="null", refused="large") if row.large else event):
            self.world.wrong("an event is not there as it was committed")

    def tail(self, topic: str, shard: int) -> Tail:
        return colour.run(self.broker.tail(topic, shard))

    def lose(self, topic: str, shard: int, count: int, *, forgets_the_owner: bool) -> None:
        """What a failover loses: the last entries, and perhaps who it was that wrote them."""
        log, fences = self.broker._log(topic, shard), self._fences[topic, shard]
        if count == 0 or not log.entries:
            return
        self.world.hit("lost_tail")
        keep = max(0, len(log.entries) - count)
        del log.entries[keep:], fences[keep:]
        log.tail = Tail(log.entries[-1].position, log.entries[-1].id) if keep else Tail()
        if forgets_the_owner:
            self.world.hit("lost_fence")
            log.fence = self._owners[topic, shard] = fences[-1] if fences else 0

    def there(self) -> dict[str, int]:
        """How often each event is there."""
        entries = (entry for log in self.broker._logs.values() for entry in log.entries)
        return Counter(entry.id for entry in entries)


class Broker:
    """A host's way to the streams."""

    features = MemoryBroker.features

    def __init__(self, world: World) -> None:
        self._world = world
        self.shards = world.shards

    async def _ask(self, serve: Callable[[], Any]) -> Any:
        if self._world.streams.is_away:
            await asyncio.sleep(0.01)
            raise BrokerUnavailableError("away")
        try:
            return await self._world.network.ask(serve)
        except NoAnswerError as error:
            raise BrokerUnavailableError("no answer") from error

    async def publish(self, batch: Batch) -> Receipt:
        await self._world.perhaps_stumble()
        return await self._ask(lambda: self._world.streams.publish(batch))  # type: ignore[no-any-return]

    async def tail(self, topic: str, shard: int) -> Tail:
        return await self._ask(lambda: self._world.streams.tail(topic, shard))  # type: ignore[no-any-return]


# --- relays -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Of what the world is made: the real thing, or one with a defect planted in it."""

    outbox: type[Outbox] = Outbox
    streams: type[Streams] = Streams
    shard: type[Any] = relay_shard.Shard

    @property
    def healthy(self) -> Plan:
        return Plan()


class RelayHere(Relay):
    def __init__(self, world: World, host: Host) -> None:
        super().__init__(
            Store(FaultyLedger(world.server, world.network)),
            Broker(world),  # type: ignore[arg-type]
            reader=Reader(world),  # type: ignore[arg-type]
            batch=world.chance.randint(1, 4),
            lease_s=LEASE_S,
            keep_s=world.keep_s,
        )
        for circuit in (self.broker_circuit, self.store_circuit):
            circuit._random = world.chance
        self.world = world
        self.host = host
        self.known: dict[int, Cursor] = {}

    async def _own(self, hold: Hold) -> None:
        await self.world.plan.shard(self, hold).run()


class World(PartyWorld):
    def __init__(self, seed: int, plan: Plan) -> None:
        super().__init__(seed)
        self.plan = plan
        self.outbox = plan.outbox(self)
        self.streams = plan.streams(self)
        # What is swept cannot be published again: either rows are kept, or tails are.
        self.keeps_tails = self.chance.random() < 0.5
        self.stumbles = self.chance.choice([0.0, 0.05, 0.1])
        self.keep_s = 0.5 if self.keeps_tails else 1e6

    # The story.

    async def story(self) -> None:
        producers = [asyncio.create_task(self._produce()) for _ in range(3)]
        for _ in range(self.chance.randint(1, 2)):
            self.join()
        for _ in range(self.chance.randint(2, 8)):
            await self.pause(1.5)
            self.chance.choice(self._misfortunes())()
        await asyncio.wait(producers)
        self._calm_down()
        await self._settle()

    async def _produce(self) -> None:
        for _ in range(self.chance.randint(1, 5)):
            await self.pause(1.5)
            wanted = [
                (self.chance.choice(TOPICS), str(self.chance.randrange(AGGREGATES)))
                for _ in range(self.chance.randint(1, 4))
            ]
            await self.outbox.transact(wanted, commits=self.chance.random() < 0.8)

    def _misfortunes(self) -> Sequence[Callable[[], None]]:
        tails = [] if self.keeps_tails else [self.lose_tail, self.lose_tail]
        hosts = [self.join, self.crash, self.crash, self.freeze, self.freeze, self.stop, self.cut]
        return [*hosts, *tails, self.fill, self.fill, self.away, self.crash_database]

    def join(self) -> None:
        self.enter(lambda host: RelayHere(self, host))

    def lose_tail(self) -> None:
        for topic in TOPICS:
            for shard in range(self.shards):
                forgets = self.chance.random() < 0.5
                count = self.chance.randint(0, 4)
                self.streams.lose(topic, shard, count, forgets_the_owner=forgets)

    def fill(self) -> None:
        self.hit("full")
        self.streams.full ^= {self.chance.choice(TOPICS)}

    def away(self) -> None:
        self.hit("broker_away")
        self.streams.is_away = not self.streams.is_away

    def crash_database(self) -> None:
        self.hit("database_crash")
        self.outbox.crash()

    # The end.

    def _calm_down(self) -> None:
        self.network.weather = self.line.weather = CALM
        self.stumbles = 0.0
        self.streams.full.clear()
        self.streams.is_away = False
        if self.somebody() is None or self.chance.random() < 0.3:
            self.join()

    async def _settle(self) -> None:
        """Everything that was committed is there, and stays there once."""
        until_s = self.loop.clock_s + SETTLES_WITHIN_S
        while self._missing() and self.loop.clock_s < until_s:
            await asyncio.sleep(0.5)
        # The last late request arrives.
        await asyncio.sleep(2 * LEASE_S)
        if missing := self._missing():
            self.wrong(f"{len(missing)} committed events are not there")

    def _missing(self) -> list[str]:
        there = self.streams.there()
        return [id for id in self.outbox.by_id if not there.get(id)]


# --- running one --------------------------------------------------------------------------------


@contextlib.contextmanager
def _here() -> Iterator[None]:
    """Comparing more often, and silently."""
    every_s, sweep_s = relay_shard.COMPARE_EVERY_S, relay_module.SWEEP_EVERY_S
    relay_shard.COMPARE_EVERY_S, relay_module.SWEEP_EVERY_S = COMPARE_EVERY_S, 1.0
    try:
        with silence():
            yield
    finally:
        relay_shard.COMPARE_EVERY_S, relay_module.SWEEP_EVERY_S = every_s, sweep_s


REAL = Plan()


def run_relays(seed: int, plan: Plan = REAL) -> Report:
    with _here():
        world = World(seed, plan)
        try:
            world.loop.run(world.story())
        except LivelockError as error:
            world.wrong(str(error))
    entries = [entry for log in world.streams.broker._logs.values() for entry in log.entries]
    told = f"{world.loop.steps} {world.loop.clock_s} {[(e.position, e.id) for e in entries]}"
    digest = hashlib.sha256(told.encode()).hexdigest()
    return Report(seed, world.violations, world.hits, digest, world.loop.trace)


__all__ = ["REAL", "SOMETIMES", "Outbox", "Plan", "Report", "Streams", "run_relays"]

if __name__ == "__main__":
    sys.exit(main(run_relays))
