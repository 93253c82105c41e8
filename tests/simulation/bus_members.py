"""Who is there in the simulated world of the bus, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bus_history import Jobs, Shards
from party_world import PartyWorld
from router_world import BellHere, RouterHere, StoreHere

from semel.bus import Publisher
from semel.bus.jobs import KEEP_SHARD
from semel.bus.shard import Shard
from semel.bus.sources import LogSource
from semel.bus.stages import STAGES
from semel.client.feed_rules import Follower
from semel.entries import Keep, Page, Position
from semel.errors import BackPressureError, JobEndedError, StaleAttemptError, StoreUnavailableError
from semel.feed import Feed
from semel.http.sse import Gateway, Limits
from semel.http.sse.view import Everything
from semel.stores.bells import LocalBell
from semel.testing.simulator import Host

if TYPE_CHECKING:
    from bus_world import World


# "crop" and "ocr" are stages that nobody has named: their numbers are the same.
STAGES_HERE = ("crop", "ocr", "vision")


@dataclass(frozen=True)
class Plan:
    """Of what the world is made: the real thing, or one with a defect planted in it.

    `faults` are the only ones there are; None is all of them. `routed` says whether workers have a
    store of their own; None is now and then.
    """

    jobs: type[Jobs] = Jobs
    workers: type[Shards] = Shards
    feed: Callable[..., Feed] | None = None
    follower: type[Follower] = Follower
    publisher: type[Publisher] = Publisher
    everything: type[Everything] = Everything
    shard: type[Shard] = Shard
    source: type[LogSource] = LogSource
    faults: tuple[str, ...] | None = None
    routed: bool | None = None
    patches: tuple[tuple[Any, str, Any], ...] = ()
    sound: Callable[..., Feed] | None = None
    """What is there instead of the feed when the defect is taken out."""

    @property
    def healthy(self) -> Plan:
        return Plan(faults=self.faults, routed=self.routed, feed=self.sound)


class FeedHere(Feed):
    """Reads a few entries at a time, in some worlds."""

    def __init__(self, world: World, store: Any, encode: Any) -> None:
        super().__init__(store, encode=encode)
        self.world = world
        self._random = world.chance

    async def read(self, stream: str, after: Position, limit: int = 256) -> Page:
        return await super().read(stream, after, min(limit, self.world.page))


class Bell(BellHere):
    """Rings late, too; and it takes a while to listen."""

    async def listen(self, stream: str, wake: Any) -> None:
        await asyncio.sleep(0.02 * self._world.chance.random())
        await super().listen(stream, wake)

    def ring(self, stream: str) -> None:
        if self._world.chance.random() < self._world.deafness:
            self._world.hit("ring_lost")
        else:
            late_s = 0.05 * self._world.chance.random()
            self._world.loop.after(late_s, LocalBell.ring, self, stream)


class BusStore(StoreHere):
    def bell(self) -> Any:
        return Bell(self._world, self._log._tower)


# --- who is there -------------------------------------------------------------------------------


class GatewayHere:
    """A process with a gateway."""

    kind = "gateway"

    def __init__(self, world: World, host: Host) -> None:
        self.world = world
        self.host = host
        self._stopping = asyncio.Event()
        self.app = Gateway(
            BusStore(world, world.gateways, "target"),
            unknown=world.unknown,
            heartbeat_s=1.5,
            max_age_s=world.chance.choice([600.0, 8.0]),
            retry_ms=(100, 300),
            limits=Limits(write_within_s=3.0, behind_events=3),
        )
        self.app._everything = world.plan.everything()

    async def run(self) -> None:
        await self._stopping.wait()
        await self.app.drain(1.0)
        self.world.hit("drained")
        await self.app.aclose()

    def stop(self) -> None:
        self._stopping.set()


class BusRouter(RouterHere):
    kind = "router"


class WorkerHere:
    """An attempt at a stage: sends its events, in groups that are sent at once, until answered."""

    kind = "worker"

    def __init__(self, world: Workplace, host: Host, work: Work, attempt: int) -> None:
        self.world = world
        self.host = host
        self.work = work
        self.attempt = attempt
        self.is_finished = False
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        publisher = self.world.publisher()
        with contextlib.suppress(StaleAttemptError, JobEndedError):
            for group in self.work.groups:
                await self.world.pause(self.work.pace_s)
                if len(group) > 1:
                    self.world.hit("at_once")
                await asyncio.gather(*(self._send(publisher, n) for n in group))
        self.is_finished = True

    async def _send(self, publisher: Publisher, n: int) -> None:
        for _ in range(1 + (self.world.chance.random() < 0.3)):
            await self.world.publish(publisher, self.work.job, self.work.stage, n, self.attempt)

    def stop(self) -> None:
        self.host.dead = True


@dataclass(frozen=True)
class Work:
    job: str
    stage: str
    groups: list[list[int]]
    pace_s: float


class Workplace(PartyWorld):
    """Jobs, and those who work on them."""

    plan: Plan
    gateways: Jobs
    workers: Shards
    is_routed: bool
    keep: Keep
    full: int

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.told: set[tuple[str, str]] = set()
        """Jobs and events whose publisher was told that they are there."""
        self.finished: list[tuple[Work, int]] = []
        self.groups: dict[tuple[str, str, str], int] = {}
        """By job, stage and number, when its publisher sends it."""

    def publisher(self) -> Publisher:
        if not self.is_routed:
            store = BusStore(self, self.gateways, "target")
            return self.plan.publisher(store, keep=self.keep)
        store = BusStore(self, self.workers, "source")
        keep = Keep(full=self.full, ids_s=KEEP_SHARD.ids_s)
        return self.plan.publisher(store, shards=self.shards, keep=keep)

    async def publish(
        self, publisher: Publisher, job: str, stage: str, n: int, attempt: int
    ) -> None:
        seq = STAGES.next_seq(stage, n)
        while True:
            try:
                is_new = await publisher.publish(job, stage, seq, {"n": n, "of": job}, attempt)
            except StoreUnavailableError:
                await self.pause(0.3)
            except BackPressureError:
                self.hit("back_pressure")
                await self.pause(0.3)
            except StaleAttemptError:
                self.hit("stale")
                raise
            except JobEndedError:
                self.hit("job_ended")
                raise
            else:
                if not is_new:
                    self.hit("told_twice")
                self.told.add((job, f"{stage}:{attempt}:{seq}"))
                return

    async def stage(self, job: str, stage: str) -> None:
        """Until an attempt at it has finished. One that takes too long is given up."""
        groups: list[list[int]] = [[]]
        for n in range(self.chance.randint(1, 4)):
            groups += [[]] * (self.chance.random() < 0.6 and bool(groups[-1]))
            groups[-1] = [*groups[-1], n]
        work = Work(job, stage, groups, self.chance.choice([0.2, 1.5]))
        for place, group in enumerate(groups):
            self.groups |= {(job, stage, str(STAGES.next_seq(stage, n))): place for n in group}
        attempt = 1
        while True:
            worker = self._hire(work, attempt)
            until = self.loop.clock_s + 3.0 + 3.0 * self.chance.random()
            while not worker.is_finished and self.loop.clock_s < until:
                await asyncio.sleep(0.2)
            if worker.is_finished:
                self.finished.append((work, attempt))
                return
            if worker.host.dead and self.chance.random() < 0.3:
                self.hit("begun_anew")
            else:
                self.hit("superseded")
                attempt += 1

    def _hire(self, work: Work, attempt: int) -> WorkerHere:
        hired: list[WorkerHere] = []

        def make(host: Host) -> Any:
            hired.append(WorkerHere(self, host, work, attempt))
            return hired[0]

        self.enter(make)
        return hired[0]

    async def job(self, job: str) -> None:
        first, second, last = self.chance.sample(STAGES_HERE, 3)
        if self.chance.random() < 0.2:
            self.loop.create_task(self.give_up(job, last))
        if self.chance.random() < 0.5:
            await asyncio.gather(self.stage(job, first), self.stage(job, second))
        else:
            await self.stage(job, first)
            await self.stage(job, second)
        await self.stage(job, last)

    async def give_up(self, job: str, stage: str) -> None:
        """Somebody has the job fail while others are still at it."""
        await self.pause(8.0)
        with contextlib.suppress(JobEndedError, StaleAttemptError, StoreUnavailableError):
            await self.publisher().fail(job, "no", stage=stage)
            self.hit("failed")
