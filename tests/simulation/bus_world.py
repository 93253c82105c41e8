"""The real bus, feed, gateway and client rules in a simulated world, from a worker to a viewer.

Workers publish stages, die anywhere, and are replaced by a later attempt while the earlier one may
wake up; they send twice, and all again when they begin anew. In some worlds they have a store of
their own, and routers carry events over. The logs are `MemoryLog`, behind a network that loses,
delays and doubles; rings are lost, in some worlds all of them, and come for nothing. The gateways'
log is trimmed, is away, and fails over to an earlier copy, from which it gives the same offsets
again. Gateways die, freeze, drain and begin anew. Lines are cut at any byte, stick, lose a frame or
say it twice. Viewers come with cursors that are old, another job's, or none at all.

What must hold is in `bus_history` (of the log) and `bus_viewers` (of what is shown); and when
everything is calm: what was answered is there, once, each publisher's in its order; and everybody
has everything soon after it came, though no bell rang.

    python tests/simulation/bus_world.py --seed 123
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from bus_history import Node
from bus_members import BusRouter, FeedHere, GatewayHere, Plan, Workplace
from bus_viewers import GARBAGE, Viewer
from party_world import CALM, LEASE_S, Report, main, silence

from semel.bus.jobs import KEEP_JOB, stream_of
from semel.colour import run
from semel.entries import Keep, Position
from semel.errors import JobEndedError, StaleAttemptError
from semel.feed import Feed, subscription, window
from semel.http.sse import gateway as gateway_module
from semel.http.sse import viewer as viewer_module
from semel.stores.log_rules import Append
from semel.testing.simulator import LivelockError

JOBS = ("job-a", "job-b")

# When nothing fails any more: leases and pauses run out, circuits try again, everybody comes back.
SETTLES_WITHIN_S = 60.0

# The net's second, a sign of life, the client's patience, a pause, and the way.
SOON_S = 5.0

SOMETIMES = (
    "Appended", "Repeated", "Fenced", "Ended", "stale", "job_ended", "forked", "same_again",
    "taken_back", "trimmed", "worker_died", "gateway_died", "router_died", "freeze", "stumble",
    "cut_off", "drained", "cut", "cut_within", "slow", "stuck", "swallowed", "echoed", "silence",
    "nobody_there", "not_found", "status_200", "status_204", "status_404", "status_503",
    "reset_trimmed", "reset_ahead", "reset_forked", "reset_unreadable", "reset_gone",
    "reset_overrun", "end", "reloaded", "odd_cursor", "old_cursor", "ring_lost", "spurious",
    "last_ring_lost", "target_away", "source_away", "request_lost", "reply_lost", "late", "doubled",
    "told_twice", "at_once", "begun_anew", "superseded", "back_pressure", "failed",
    "source_failed_over", "in_another_order", "written_at_once",
)  # fmt: skip


# --- the world ----------------------------------------------------------------------------------


class World(Workplace):
    def __init__(self, seed: int, plan: Plan) -> None:
        super().__init__(seed)
        chance = self.chance
        self.plan = plan
        self.gateways = plan.jobs(self)
        self.workers = plan.workers(self)  # type: ignore[arg-type]
        self.lost: set[tuple[str, str]] = set()
        """What the workers' log has lost before it was routed."""
        self.is_routed = chance.random() < 0.3 if plan.routed is None else plan.routed
        self.away: set[str] = set()
        self.viewers: list[Viewer] = []
        self.unknown = chance.choice(["wait", "wait", "refuse"])
        self.deafness = self._if("rings", chance.choice([0.0, 0.2, 1.0]))
        self.stumbles = self._if("stumble", chance.choice([0.0, 0.0, 0.01]))
        self.boxes = self._if("boxes", chance.choice([0.0, 0.0, 0.15]))
        self.is_direct = chance.random() < 0.5
        self.box_faults = 1000
        """How many more there may be."""
        self.cuts = self._if("cut", chance.choice([0.0, 0.3, 0.7]))
        self.page = int(self._if("small", chance.choice([256, 2])) or 256)
        self.replay = chance.choice([3, 1000]) if self.page == 2 else 1000
        self.keep = Keep(entries=3) if self._if("trim", chance.random()) > 0.8 else KEEP_JOB
        self.full = chance.choice([4, 10_000])
        if not self._may("weather"):
            self.network.weather = CALM

    def _may(self, fault: str) -> bool:
        return self.plan.faults is None or fault in self.plan.faults

    def _if(self, fault: str, value: float) -> float:
        return value if self._may(fault) else 0.0

    async def perhaps_fall(self, name: str) -> None:
        """Of routers, in their own world."""

    def feed(self, store: Any, *, encode: Any) -> Feed:
        return (self.plan.feed or FeedHere)(self, store, encode)

    def past_send(self, send: Any) -> Any:
        """As under uvicorn, in some worlds: a way to write without being woken."""
        return send.__self__ if self.is_direct else None

    # Members.

    def somebody(self) -> Any:
        there = self.there()
        kinds = sorted({member.kind for member in there})
        if not kinds:
            return None
        kind = self.chance.choice(kinds)
        return self.chance.choice([member for member in there if member.kind == kind])

    def all(self, kind: str) -> list[Any]:
        return [member for member in self.there() if member.kind == kind]

    def some_gateway(self) -> Any:
        there = self.all("gateway")
        return self.chance.choice(there) if there else None

    def join(self) -> None:
        kind = "router" if self.is_routed and self.chance.random() < 0.5 else "gateway"
        if len(self.all(kind)) < 2:
            make = BusRouter if kind == "router" else GatewayHere
            self.enter(lambda host: make(self, host))  # type: ignore[arg-type]

    def crash(self) -> None:
        if member := self.somebody():
            self.hit(f"{member.kind}_died")
            member.host.dead = True
            for viewer in self.viewers:
                if viewer.line is not None and viewer.line.gateway is member:
                    viewer.line.cut()

    # Viewers.

    def visit(self) -> None:
        """Somebody comes: for the first time, or with some cursor."""
        job = self.chance.choice(JOBS)
        stream, drawn = stream_of("scan", job), self.chance.random()
        own = [key for key in self.gateways.places if key[0] == stream]
        if drawn < 0.6 or not self._may("odd"):
            self._arrive(job)
        elif drawn < 0.75:
            self.hit("old_cursor")
            key = self.chance.choice(own)
            self._with_cursor(job, self.gateways.places[key][0], key[1])
        else:
            self.hit("odd_cursor")
            others = [key[1] for key in self.gateways.places if key[0] != stream]
            self._with_cursor(job, None, self.chance.choice([*others, *GARBAGE]))

    def _with_cursor(self, job: str, node: Node | None, cursor: str) -> None:
        after = Position.parse(cursor)
        self.viewers.append(Viewer(self, job, node, after, None if after else cursor))

    def _arrive(self, job: str) -> None:
        root = self.gateways.roots[stream_of("scan", job)]
        self.viewers.append(Viewer(self, job, root, None, None))

    def come_again(self, job: str) -> None:
        self.loop.after(1.0, self._arrive, job, context=contextvars.Context())

    # Misfortunes.

    def fail_over(self) -> None:
        if self.is_routed and self.chance.random() < 0.5:
            self.hit("source_failed_over")
            self.lost |= {key for key in self.workers.go_back() if not self.is_done(*key)}
            self.workers.keep_a_copy()
        else:
            for gone in self.gateways.fail_over():
                self._send_again(gone)
        self.repeat()

    def _send_again(self, gone: list[Append]) -> None:
        """Those whose answers were lost with it say it again, the last one last."""
        if len(gone) > 2 and self.chance.random() < 0.5:
            self.hit("in_another_order")
            for op in (*self.chance.sample(gone[:-1], len(gone) - 1), gone[-1]):
                run(self.gateways.perform(op))

    def repeat(self) -> None:
        """Whoever hands out work does so again."""
        for work, attempt in self.finished:
            if self.chance.random() < 0.5:
                self.hit("begun_anew")
                self._hire(work, attempt)

    def toggle(self) -> None:
        name = self.chance.choice(["source", "target"] if self.is_routed else ["target"])
        self.hit(f"{name}_away")
        self.away ^= {name}

    def trim(self) -> None:
        stream = stream_of("scan", self.chance.choice(JOBS))
        run(self.gateways.trim(stream, self.chance.randrange(self.gateways.now[stream].offset + 1)))

    def ring(self) -> None:
        self.hit("spurious")
        self.gateways._tower.ring(stream_of("scan", self.chance.choice(JOBS)))

    def _watching(self) -> list[Viewer]:
        return [viewer for viewer in self.viewers if not viewer.is_over]

    def cut_lines(self) -> None:
        for viewer in self._watching():
            if viewer.line is not None and self.chance.random() < 0.6:
                self.chance.choice([viewer.line.cut, viewer.line.cut_soon])()

    def stick(self) -> None:
        """Somebody takes nothing for a while, or has closed its lid."""
        for each in self._watching():
            if self.chance.random() < 0.5:
                self.hit("stuck")
                each.stuck_until = self.loop.clock_s + 10.0 * self.chance.random()
                if each.line is not None and self.chance.random() < 0.5:
                    each.line.cut()

    def reload(self) -> None:
        for viewer in self._watching()[-1:]:
            viewer.reload()

    def _misfortunes(self) -> list[Callable[[], None]]:
        known: dict[str, tuple[Callable[[], None], ...]] = {
            "crash": (self.crash, self.crash, self.crash),
            "freeze": (self.freeze, self.freeze),
            "cut_off": (self.cut,),
            "stop": (self.stop,),
            "cut": (self.cut_lines, self.cut_lines),
            "stick": (self.stick, self.stick),
            "failover": (self.fail_over, self.fail_over, self.fail_over),
            "away": (self.toggle,),
            "trim": (self.trim,),
            "spurious": (self.ring,),
            "reload": (self.reload,),
            "repeat": (self.repeat,),
        }
        allowed = [each for fault, many in known.items() if self._may(fault) for each in many]
        return [*allowed, self.join, self.join, self.visit, self.visit]

    # The story.

    async def story(self) -> None:
        for job in JOBS:
            self.gateways.begin(stream_of("scan", job))
        self.enter(lambda host: GatewayHere(self, host))
        if self.is_routed:
            self.enter(lambda host: BusRouter(self, host))
        working = [self.loop.create_task(self.job(job)) for job in JOBS]
        for job in JOBS:
            self._arrive(job)
        for _ in range(self.chance.randint(6, 14)):
            await self.pause(1.2)
            self.chance.choice(self._misfortunes())()
        self._calm_down()
        await asyncio.gather(*working, asyncio.sleep(2 * LEASE_S))  # nobody is frozen any more
        await self._until(self._is_routed, "an event waits for ever")
        self.box_faults = 0
        await self._until(self._is_watched, "somebody does not come back")
        await self._until(self._is_shown, "somebody has not what the log has", SOON_S)
        self.box_faults = 1
        await self._last_words()
        await self._until(self._is_shown, "somebody has not heard of everything", SOON_S)
        self._return()
        await self._until(self._is_shown, "who comes later does not get everything", SOON_S)
        self._audit()

    def _return(self) -> None:
        """Those who have all come once more, and others for the first time."""
        for viewer in [viewer for viewer in self.viewers if not viewer.has_left][:3]:
            if viewer.is_over and viewer.node is not None:
                self._with_cursor(viewer.job, viewer.node, str(viewer.follower.position))
        for job in JOBS:
            self._arrive(job)

    def _calm_down(self) -> None:
        self.network.weather = self.line.weather = CALM
        self.stumbles = self.cuts = 0.0
        self.full = 10_000
        self.away.clear()
        for kind, make in (("gateway", GatewayHere), ("router", BusRouter)):
            if not self.all(kind) and (kind == "gateway" or self.is_routed):
                self.enter(lambda host, make=make: make(self, host))
        for each in self.viewers:
            each.stuck_until = 0.0

    async def _until(
        self, holds: Callable[[], bool], otherwise: str, within_s: float = SETTLES_WITHIN_S
    ) -> None:
        until = self.loop.clock_s + within_s
        while not holds():
            if self.loop.clock_s > until:
                self.wrong(otherwise)
                return
            await asyncio.sleep(0.05)

    def _is_routed(self) -> bool:
        return not self.is_routed or all(self.is_done(*key) for key in self.workers.unread())

    def _is_watched(self) -> bool:
        return all(viewer.is_open for viewer in self.viewers)

    def _is_shown(self) -> bool:
        return all(viewer.is_at_head for viewer in self.viewers)

    async def _last_words(self) -> None:
        """The last event of each job, of which perhaps no bell tells."""
        if self._may("rings") and self.chance.random() < 0.5:
            self.hit("last_ring_lost")
            self.deafness = 1.0
        publisher = self.publisher()
        for job in JOBS:
            with contextlib.suppress(JobEndedError, StaleAttemptError):
                drawn = self.chance.random()
                if drawn < 0.6:
                    await self.publish(publisher, job, "done", 0, 1)
                elif drawn < 0.8:
                    self.hit("failed")
                    await publisher.fail(job, "no")
                else:
                    await self.publish(publisher, job, "answer", 0, 1)
        await self._until(self._is_routed, "an event waits for ever")

    # What must hold in the end.

    def is_done(self, job: str, id: str) -> bool:
        """Is it there, or was it taken back, or refused with reason?"""
        key = stream_of("scan", job), id
        if key in self.gateways.taken_back or key in self.gateways.refused:
            return True
        return any(node.id == id for node in self.gateways.now[key[0]].line())

    def _audit(self) -> None:
        for job, id in sorted(self.told - self.lost - self.workers.unread()):
            if not self.is_done(job, id):
                self.wrong(f"what was answered is not there: {id} of {job}")
        for job in JOBS:
            stream = stream_of("scan", job)
            told: dict[str, int] = {}
            for node in reversed(list(self.gateways.now[stream].line())):
                publisher, _, seq = node.id.rpartition(":")
                again = (job, node.id) in self.workers.again
                if again or (stream, node.id) in self.gateways.taken_back:
                    continue
                if (stream, node.id) in self.gateways.refused:
                    continue  # it came too late for an end that a failover has taken back since
                place = self.groups.get((job, publisher.partition(":")[0], seq), 0)
                if place < told.get(publisher, 0):
                    self.wrong(f"a publisher's events are not in its order: {job} {node.id}")
                told[publisher] = place


# --- running one --------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_in(world: World, seed: int) -> Iterator[None]:
    """What the gateway has of chances and sizes, from this world."""
    before = random.getstate()
    random.seed(seed)
    patches: list[tuple[Any, str, Any]] = [
        (gateway_module, "Feed", world.feed),
        (window, "KEEP_ENTRIES", world.page),
        (subscription, "PAGE", world.page),
        (subscription, "REPLAY_MOST", world.replay),
        (viewer_module, "line_of", world.past_send),
        *world.plan.patches,
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
    random.setstate(before)


def run_bus(seed: int, plan: Plan | None = None) -> Report:
    world = World(seed, plan or Plan())
    with silence(), _as_in(world, seed):
        try:
            world.loop.run(world.story())
        except LivelockError as error:
            world.violations.append(str(error))
    told = repr((world.hits, world.violations, world.loop.steps, world.gateways.now))
    digest = hashlib.sha256(told.encode()).hexdigest()
    return Report(seed, world.violations, world.hits, digest, world.loop.trace)


if __name__ == "__main__":
    sys.exit(main(run_bus))
