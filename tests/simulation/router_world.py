"""The real routers and publishers in a simulated world: two logs, and hosts that fail.

Both logs are `MemoryLog`, each behind a network that loses, delays and doubles; rings are lost. The
workers' log is away, or is brought back from an older copy, as by a failover: it has lost its end,
has entries again that were trimmed, and gives the same offsets again. The gateways' log is away.
Workers publish again and again until they are told that it is there; some are zombies, with an
attempt that was given up. Now and then there is something in a shard that is no event.

Whatever reaches a job's log is checked at once: published, once, behind what was published before
it, and by nobody whom a later owner has replaced. When everything is quiet, everything that was
published is there, but for what the workers' log has lost and what a job's log had to refuse.

    python tests/simulation/router_world.py --seed 123
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from party_world import CALM, LEASE_S, PartyWorld, Report, Store, main, silence

from semel import colour
from semel.bus import Publisher, Router, jobs
from semel.bus.jobs import Event, event_of
from semel.bus.shard import Shard
from semel.bus.sources import LogSource
from semel.bus.stages import STAGES
from semel.entries import Answer, Appended, Fenced, Page, Position, Snapshot
from semel.errors import StoreUnavailableError
from semel.shards import Hold
from semel.stores.bells import LocalBell, Tower
from semel.stores.log_rules import Append, LogVerbs
from semel.stores.memory_log import MemoryLog
from semel.testing.simulator import HOST, FaultyLedger, Host, LivelockError, NoAnswerError, SimClock

# When nothing fails any more: leases and pauses run out, circuits try again.
SETTLES_WITHIN_S = 30.0

SOMETIMES = (
    "crash", "freeze", "stumble", "fell", "cut_off", "join", "stop", "lost_tail", "noticed",
    "source_away", "target_away", "request_lost", "reply_lost", "late", "doubled", "ring_lost",
    "Appended", "Repeated", "Fenced", "former_owner", "Ended", "junk", "zombie", "refused",
)  # fmt: skip


# --- two logs -----------------------------------------------------------------------------------


class Workers(MemoryLog):
    """The workers' log, which remembers in which order everything came."""

    def __init__(self, world: World) -> None:
        super().__init__(SimClock(world.loop), Tower())
        self.world = world
        self.order: dict[tuple[str, str], int] = {}
        """By job and event, when it was published first."""
        self.again: set[tuple[str, str]] = set()
        """What was lost, and published once more; a router may have had it in hand meanwhile."""
        self._copy: dict[str, Any] | None = None

    async def perform(self, op: Append) -> Answer:
        answer = await super().perform(op)
        if isinstance(answer, Appended) and (event := _event(op.data)):
            key = event.job_id, event.id
            self.world.loop.note("published", *key, answer.position.offset)
            if key in self.order:
                self.again.add(key)
                self.world.lost.discard(key)
            self.order.setdefault(key, len(self.order))
        return answer

    def unread(self) -> set[tuple[str, str]]:
        events = (_event(e.data) for s in self._streams.values() for e in s.entries)
        return {(event.job_id, event.id) for event in events if event}

    def keep_a_copy(self) -> None:
        self._copy = copy.deepcopy(self._streams)

    def go_back(self) -> set[tuple[str, str]]:
        """To the copy; what is gone with that."""
        if self._copy is None:
            return set()
        before = self.unread()
        self._streams, self._copy = self._copy, None
        return before - self.unread()


class Gateways(MemoryLog):
    """The gateways' log, and what must hold of every entry."""

    def __init__(self, world: World) -> None:
        super().__init__(SimClock(world.loop), Tower())
        self.world = world
        self.there: dict[str, list[Event]] = defaultdict(list)
        self._owners: dict[str, int] = defaultdict(int)

    async def perform(self, op: Append) -> Answer:
        answer = await self.accept(op)
        is_former = isinstance(answer, Fenced) and ":" in answer.name
        self.world.hit("former_owner" if is_former else type(answer).__name__)
        if isinstance(answer, Appended):
            event = _event(op.data)
            assert event is not None
            self.world.loop.note("routed", event.job_id, event.id)
            self._check(event)
            self._check_owner(op)
            self.there[event.job_id].append(event)
        return answer

    async def accept(self, op: Append) -> Answer:
        return await super().perform(op)

    def _check(self, event: Event) -> None:
        order = self.world.workers.order
        if (event.job_id, event.id) not in order:
            self.world.wrong("something was routed that nobody published")
            return
        before = self.there[event.job_id]
        if any(event.id == other.id for other in before):
            self.world.wrong("an event is there twice")
        again = self.world.workers.again
        keys = [(event.job_id, each.id) for each in (*before, event)]
        came = [order[key] for key in keys if key not in again]
        if came != sorted(came):
            self.world.wrong("an event overtook another one of its job")

    def _check_owner(self, op: Append) -> None:
        for name, fence in self.world.owner_of(op).items():
            if self._owners[op.stream + name] > fence:
                self.world.wrong("a former owner was not refused, after a later one")
            self._owners[op.stream + name] = fence


def _event(data: bytes | None) -> Event | None:
    try:
        return event_of(data or b"")
    except ValueError:
        return None


class LogHere(LogVerbs):
    """A host's way to a log."""

    def __init__(self, world: World, log: MemoryLog, name: str) -> None:
        self._world = world
        self._log = log
        self._name = name

    async def _ask(self, serve: Callable[[], Any]) -> Any:
        await self._world.perhaps_stumble()
        if self._name in self._world.away:
            await asyncio.sleep(0.01)
            raise StoreUnavailableError("away")
        try:
            return await self._world.network.ask(lambda: colour.run(serve()))
        except NoAnswerError as error:
            raise StoreUnavailableError("no answer") from error

    async def perform(self, op: Append) -> Answer:
        await self._world.perhaps_fall(self._name)
        return await self._ask(lambda: self._log.perform(op))  # type: ignore[no-any-return]

    async def read(self, stream: str, after: Position | None = None, limit: int = 1000) -> Page:
        return await self._ask(lambda: self._log.read(stream, after, limit))  # type: ignore[no-any-return]

    async def load(self, stream: str) -> Snapshot:
        return await self._ask(lambda: self._log.load(stream))  # type: ignore[no-any-return]

    async def trim(self, stream: str, upto: int | Position) -> int:
        return int(await self._ask(lambda: self._log.trim(stream, upto)))

    async def heads(self, streams: Sequence[str]) -> Sequence[Position]:
        return await self._ask(lambda: self._log.heads(streams))  # type: ignore[no-any-return]

    async def sweep(self, limit: int = 1000) -> int:
        return 0


class BellHere(LocalBell):
    """Rings that are lost, for one in three worlds all of them."""

    def __init__(self, world: World, tower: Tower) -> None:
        super().__init__(tower)
        self._world = world

    def ring(self, stream: str) -> None:
        if self._world.chance.random() < self._world.deafness:
            self._world.hit("ring_lost")
        else:
            super().ring(stream)


class StoreHere(Store):
    def __init__(self, world: World, log: MemoryLog, name: str) -> None:
        super().__init__(FaultyLedger(world.server, world.network))
        self._world = world
        self._log = log
        self._name = name

    def log(self, colour: Any) -> Any:
        return LogHere(self._world, self._log, self._name)

    def bell(self) -> Any:
        return BellHere(self._world, self._log._tower)


# --- routers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Of what the world is made: the real thing, or one with a defect planted in it.

    `only_falls`: nothing else happens, for a defect that is to be found by that alone.
    """

    only_falls: bool = False
    shard: type[Shard] = Shard
    source: type[LogSource] = LogSource
    gateways: type[Gateways] = Gateways

    @property
    def healthy(self) -> Plan:
        return Plan(only_falls=self.only_falls)


class RouterHere(Router):
    def __init__(self, world: World, host: Host) -> None:
        self.world = world
        super().__init__(
            StoreHere(world, world.workers, "source"),
            StoreHere(world, world.gateways, "target"),
            shards=world.shards,
            batch=world.chance.randint(1, 4),
            lease_s=LEASE_S,
        )
        for circuit in (self.source_circuit, self.target_circuit):
            circuit._random = world.chance
        self.source = world.plan.source(
            StoreHere(world, world.workers, "source"), "scan", world.shards, self._told_lost
        )
        self.host = host

    async def _own(self, hold: Hold) -> None:
        await self.world.plan.shard(self, hold).run()

    def _told_lost(self, shard: int, told: str) -> None:
        self.world.hit("noticed")

    def refuse(self, why: Any, told: str) -> None:
        self.world.hit("refused")
        super().refuse(why, told)


class World(PartyWorld):
    def __init__(self, seed: int, plan: Plan) -> None:
        super().__init__(seed)
        self.plan = plan
        self.workers = Workers(self)
        self.gateways = plan.gateways(self)
        self.away: set[str] = set()
        self.lost: set[tuple[str, str]] = set()
        self.is_armed = False
        self.pace_s = self.chance.choice([0.8, 0.8, 3.0])
        self.deafness = self.chance.choice([0.0, 0.2, 1.0])
        self.stumbles = self.chance.choice([0.0, 0.02, 0.05])
        if plan.only_falls:
            self.network.weather, self.stumbles = CALM, 0.0

    def owner_of(self, op: Append) -> dict[str, int]:
        return {name: fence for name, fence in op.fences.items() if ":" in name}

    # Workers.

    async def job(self, job_id: str) -> None:
        """One stage after the other; one of them is begun anew, and the first one goes on."""
        publisher = Publisher(StoreHere(self, self.workers, "source"), shards=self.shards)
        work: list[tuple[str, int, int]] = []
        for stage in ("vision", "rule"):
            count = self.chance.randint(1, 3)
            work += [(stage, n, 1) for n in range(count)]
            if self.chance.random() < 0.3:
                work += [(stage, n, 2) for n in range(count)]
                work += [(stage, count, 1)]
        work += [("done", 0, 1)] * (self.chance.random() < 0.5)
        if self.chance.random() < 0.2:
            work.append(("answer", 0, 1))
        for stage, n, attempt in work:
            await self.pause(self.pace_s)
            again = 1 + (self.chance.random() < 0.3)
            for _ in range(again):
                await self._publish(publisher, job_id, stage, STAGES.next_seq(stage, n), attempt)

    async def _publish(
        self, publisher: Publisher, job_id: str, stage: str, seq: int, attempt: int
    ) -> None:
        while True:
            try:
                await publisher.publish(job_id, stage, seq, None, attempt)
            except StoreUnavailableError:
                await self.pause(0.2)
            else:
                return

    async def junk(self) -> None:
        """Whoever else writes there."""
        for n in range(self.chance.randint(0, 2)):
            await self.pause(3.0)
            self.hit("junk")
            stream = jobs.shard_stream_of("scan", self.chance.randrange(self.shards))
            await self.workers.append(stream, b"no event", id=f"junk {n}")

    # Misfortunes.

    def fail_over(self) -> None:
        """Perhaps to an older copy: what came since is gone, unless it was routed."""
        gone = self.workers.go_back()
        if gone:
            self.hit("lost_tail")
            self.loop.note("lost_tail", *gone)
            there = {(e.job_id, e.id) for es in self.gateways.there.values() for e in es}
            self.lost |= gone - there
        else:
            self.workers.keep_a_copy()

    def arm(self) -> None:
        """Somebody who has an event in hand will freeze, while the workers' log fails over."""
        self.workers.keep_a_copy()
        self.is_armed = True

    async def perhaps_fall(self, name: str) -> None:
        host = HOST.get()
        if self.is_armed and name == "target" and host is not None:
            self.is_armed = False
            self.hit("fell")
            leases = self.chance.choice([0.5, 1 + self.chance.random()])
            host.paused_until = self.loop.clock_s + leases * LEASE_S
            self.join()
            nowhere = contextvars.Context()  # on no host: this one stands still
            self.loop.after(0.2 * self.chance.random(), self.fail_over, context=nowhere)
            await asyncio.sleep(0)

    def toggle(self, name: str) -> None:
        self.hit(f"{name}_away")
        self.away ^= {name}

    def join(self) -> None:
        if len(self.there()) < 3:
            self.enter(lambda host: RouterHere(self, host))

    # The story.

    async def story(self) -> None:
        publishing = [self.loop.create_task(self.job(f"job-{n}")) for n in range(3)]
        publishing.append(self.loop.create_task(self.junk()))
        self.join()
        for _ in range(self.chance.randint(3, 9)):
            await self.pause(2.0)
            self.chance.choice(self._misfortunes())()
        self._calm_down()
        await asyncio.gather(*publishing)
        await self._settle()

    def _misfortunes(self) -> Sequence[Callable[[], None]]:
        if self.plan.only_falls:
            return [self.arm, self.arm, self.join]
        return [
            self.join, self.join, self.crash, self.crash, self.freeze, self.freeze, self.stop,
            self.cut, self.fail_over, self.fail_over, self.arm, self.arm,
            lambda: self.toggle("source"), lambda: self.toggle("target"),
        ]  # fmt: skip

    def _calm_down(self) -> None:
        self.network.weather = self.line.weather = CALM
        self.stumbles = 0.0
        self.is_armed = False
        self.away.clear()
        if not self.there():
            self.join()

    async def _settle(self) -> None:
        until = self.loop.clock_s + SETTLES_WITHIN_S
        while self.loop.clock_s < until and not all(map(self._is_done, self.workers.unread())):
            await asyncio.sleep(0.5)
        for key in self.workers.order.keys() - self.lost:
            if not self._is_done(key):
                waits = key in self.workers.unread()
                self.wrong("an event waits for ever" if waits else "an event was lost")

    def _is_done(self, key: tuple[str, str]) -> bool:
        """Is it there, or was it refused with reason? It may be in its shard all the same, when
        that has lost how far it was trimmed.
        """
        there = self.gateways.there[key[0]]
        if any(event.id == key[1] for event in there):
            return True
        stage, attempt, _ = key[1].split(":")
        if any(event.stage == stage and event.attempt > int(attempt) for event in there):
            self.hit("zombie")
            return True
        return any(STAGES.ends(event.stage) for event in there)


# --- running one --------------------------------------------------------------------------------


def run_routers(seed: int, plan: Plan | None = None) -> Report:
    world = World(seed, plan or Plan())
    with silence():
        try:
            world.loop.run(world.story())
        except LivelockError as error:
            world.violations.append(str(error))
    told = repr((world.hits, world.violations, world.loop.steps, sorted(world.gateways.there)))
    digest = hashlib.sha256(told.encode()).hexdigest()
    return Report(seed, world.violations, world.hits, digest, world.loop.trace)


if __name__ == "__main__":
    sys.exit(main(run_routers))
