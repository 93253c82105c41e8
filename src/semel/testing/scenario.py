"""A world that goes wrong, and the guard in it.

A seed draws a few keys, hosts that call guarded functions on them under various policies, a
receiver where the effects happen, and the faults of this run. The guard is the real one, and so
is the ledger's code behind the simulated network. `oracle` listens to the ledger's answers,
`promises` to how the calls end; a run is good when neither has anything to say.

A campaign is many seeds. It counts for nothing unless every fault and every rare branch was seen
(`SOMETIMES`), the unavoidable doubles among them: they show that the faults bite.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import logging
import multiprocessing
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from semel import call as guard_call
from semel import keys
from semel.codec import CODEC
from semel.errors import IdempotencyConflictError, OutcomeUnknownError
from semel.guard import CannotTell, Recovered, Retry, current, idempotent, once, step
from semel.testing.promises import (
    LEASE_S,
    MAX_RUN_S,
    Opaque,
    Promises,
    RefusedError,
    Subject,
    Visit,
)
from semel.testing.simulator import (
    HOST,
    DeadlockError,
    FaultyLedger,
    Host,
    LivelockError,
    Network,
    NoAnswerError,
    Server,
    SimLoop,
    Weather,
)
from semel.values import Outcome
from semel.waiting import WaitingRoom

HANG_S = 2 * MAX_RUN_S
SHORT_TTL_S = 1.25 * LEASE_S
PATIENCE_S = 300.0
QUIET_S = 2 * Weather().latest_s + LEASE_S + 0.5

SOMETIMES = (
    # faults
    "crash", "pause", "cancel", "cancel_again", "skew", "request_lost", "reply_lost", "doubled",
    "late", "cut_off", "hang", "sweep",
    # ledger
    "takeover", "orphan", "mismatch", "expired", "withdrawn", "claim_repeated",
    "complete_repeated", "late_claim_refused",
    # guard
    "value", "replay", "adopted", "adopted_after_failure", "claim_lost", "told_unknown",
    "told_busy", "told_duplicate", "told_conflict", "told_unavailable", "unrecorded",
    "result_lost", "failed", "failure_replayed", "cancelled", "waiter_served", "waiter_takeover",
    "renewed", "renewed_after_failure", "lost_noticed", "step_replayed", "recovered",
    "recover_retry", "cannot_tell", "resolved", "stale_refused", "two_ledgers_waited_for",
    # the impossible, where it is impossible
    "double retry/plain", "double retry/fenced",
)  # fmt: skip


# --- hosts --------------------------------------------------------------------------------------


class Machine(Host):
    """A host with what the guard keeps per process."""

    def __init__(self, name: str, ledger: FaultyLedger) -> None:
        super().__init__(name)
        self.ledger = ledger
        self.second: FaultyLedger | None = None
        """The ledger of a second store on the same place, for every other visit."""
        self.room = _Room()
        self.visits: list[Visit] = []

    def ledger_of(self, visit: Visit | None) -> FaultyLedger:
        if self.second is None or visit is None:
            return self.ledger
        return self.second if int(visit.id.rpartition("/")[2]) % 2 else self.ledger


WORLD: contextvars.ContextVar[World] = contextvars.ContextVar("semel_world")
VISIT: contextvars.ContextVar[Visit] = contextvars.ContextVar("semel_visit")


class _Room(WaitingRoom):
    def __init__(self) -> None:
        self._reset()

    def ring(self, id: bytes) -> None:
        if len(self._lines.get(id, ())) > 1 and (world := WORLD.get(None)) is not None:
            world.hit("two_ledgers_waited_for")
        super().ring(id)


class _Rooms:
    """A waiting room per host: here hosts share a process, and must not hear one another."""

    def seat(self, *args: Any) -> AbstractContextManager[Any]:
        return cast("Machine", HOST.get()).room.seat(*args)

    def ring(self, id: bytes) -> None:
        host = HOST.get()
        if isinstance(host, Machine):
            host.room.ring(id)


class _HostStore:
    """The store of every guard here: whoever asks gets the ledger of the host they are on."""

    def ledger(self, colour: Any) -> Any:
        host = HOST.get()
        return host.ledger_of(VISIT.get(None)) if isinstance(host, Machine) else None

    def close(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


STORE = _HostStore()


# --- the receiver -------------------------------------------------------------------------------


class Receiver:
    """Where effects happen. It may dedupe by key, compare fences, or do neither."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._receipts: dict[str, str] = {}
        self._top: dict[str, int] = {}
        self._count = itertools.count()
        self.effects: dict[tuple[str, str], list[int]] = {}

    def act(self, visit: Visit, name: str, child_key: str, fence: int) -> str | None:
        """Do it, and give a receipt; None refuses a fence that is behind."""
        subject = visit.subject
        place = subject.place
        if subject.receiver == "deduping" and child_key in self._receipts:
            return self._receipts[child_key]
        if subject.receiver == "fenced" and not self._in_time(place, fence):
            self._world.hit("stale_refused")
            return None
        self.effects.setdefault((place, name), []).append(fence)
        self._world.loop.note("effect", place, name, visit.id)
        self._receipts[child_key] = f"{place}:{name}:{next(self._count)}"
        return self._receipts[child_key]

    def _in_time(self, place: str, fence: int) -> bool:
        if fence < self._top.get(place, 0):
            return False
        self._top[place] = fence
        return True

    def find(self, subject: Subject, child_key: str, fence: int) -> str | None:
        """The receipt, if it happened. A fenced receiver refuses earlier fences from now on."""
        self._in_time(subject.place, fence)
        return self._receipts.get(child_key)


async def _act(name: str) -> str:
    """The effect, as a body causes it."""
    world, visit, attempt = WORLD.get(), VISIT.get(), current()
    child_key, fence = attempt.child_key(name), attempt.fence
    world.promises.about_to_act(visit, name)

    def act() -> str | None:
        return world.receiver.act(visit, name, child_key, fence)

    try:
        receipt = await world.outside.ask(act, patient=visit.subject.patient or visit.calm)
    except NoAnswerError:
        world.fail(visit, "timeout")
    if receipt is None:
        world.fail(visit, "stale")
    return receipt


async def _recover(attempt: Any) -> Any:
    world, visit = WORLD.get(), VISIT.get()
    child_key, fence = attempt.child_key("charge"), attempt.fence
    receipt = await world.outside.ask(
        lambda: world.receiver.find(visit.subject, child_key, fence), patient=visit.calm
    )
    if not visit.calm and world.chance() < 0.1:
        world.hit("cannot_tell")
        return CannotTell()
    if receipt is None:
        world.hit("recover_retry")
        return Retry()
    world.hit("recovered")
    visit.found = True
    return Recovered(f"{receipt} found by {visit.id}")


# --- guarded bodies -----------------------------------------------------------------------------


async def _body() -> Any:
    world, visit = WORLD.get(), VISIT.get()
    world.loop.note("body", visit.id)
    world.promises.body_begins(visit, current().fence)
    await asyncio.sleep(world.work_s(visit))
    world.maybe_fail(visit, "early")
    receipt = ""
    for name in visit.subject.steps:
        receipt = await (_stepped(visit, name) if visit.subject.stepped else _act(name))
        await asyncio.sleep(world.chance() * 0.05)
    await asyncio.sleep(world.work_s(visit))
    world.maybe_fail(visit, "late")
    visit.returned = world.result(visit, receipt)
    return visit.returned


async def _stepped(visit: Visit, name: str) -> str:
    acts = visit.acts
    receipt = await step(name, _act, name)
    if visit.acts == acts:
        WORLD.get().hit("step_replayed")
    return receipt


@functools.cache
def _guarded(on_duplicate: Any, on_failure: Any, crash: str, ttl_s: float) -> Any:
    @idempotent(
        key="{name}",
        scope=lambda name, tenant, amount: tenant,
        operation="charge",
        store=STORE,
        lease=LEASE_S,
        ttl=ttl_s,
        max_run=MAX_RUN_S,
        wait_timeout=2 * LEASE_S,
        on_duplicate=on_duplicate,
        on_failure=on_failure,
        on_crash=_on_crash(crash),
    )
    async def charge(name: str, tenant: str, amount: int) -> Any:
        return await _body()

    return charge


def _on_crash(crash: str) -> Any:
    return _recover if crash == "recover" else crash


async def _call_guarded(visit: Visit) -> Any:
    subject = visit.subject
    charge = _guarded(visit.on_duplicate, visit.on_failure, subject.crash, subject.ttl_s)
    return await charge(subject.name, subject.tenant, visit.amount)


async def _call_once(visit: Visit) -> Any:
    subject = visit.subject
    async with once(
        subject.name,
        scope=subject.tenant,
        operation="charge",
        fingerprint=visit.amount,
        store=STORE,
        lease=LEASE_S,
        ttl=subject.ttl_s,
        max_run=MAX_RUN_S,
        wait_timeout=2 * LEASE_S,
        on_duplicate=cast("Any", visit.on_duplicate),
        on_failure=cast("Any", visit.on_failure),
        on_crash=_on_crash(subject.crash),
    ) as attempt:
        if not attempt.replayed:
            attempt.done(await _body())
    return attempt.result


# --- the world ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plant:
    """What a test replaces to see whether the campaign notices."""

    server: type[Server] = Server
    ledger: type[FaultyLedger] = FaultyLedger
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext


HONEST = Plant()


class World:
    """One seed's world: it draws what happens, and checks what must hold."""

    def __init__(self, seed: int, plant: Plant = HONEST) -> None:
        self.loop = loop = SimLoop(seed)  # type: ignore[abstract]
        self.chance = loop.chance.random
        self.receiver = Receiver(self)
        self.server = plant.server(loop)
        self.promises = Promises(self.server, self.receiver.effects)
        self.hit = self.promises.hit
        self._faults = self._draw_faults()
        self.network = _watched(Network(loop, self._draw_weather()), self)
        self.outside = _watched(Network(loop, self._draw_weather(), can_be_cut=False), self)
        self.outside.weather.doubled = 0.0
        self.subjects = self._draw_subjects()
        self._ledger = plant.ledger
        self._has_second_stores = seed % 3 == 0
        self.machines = [self._machine(n) for n in range(loop.chance.randint(2, 3))]
        self._crowded = self.chance() < 0.15
        self._strikes = 0.05 if self.chance() < 0.5 else 0.0
        self._count = itertools.count(1)
        self.quiet = False

    # What happens.

    def _draw_faults(self) -> list[str]:
        """A different mixture for every seed: a rare pair of faults is not rare in all of them."""
        kinds = ("crash", "pause", "cancel", "cut_off", "skew", "network", "failure", "hang")
        if self.chance() < 0.1:
            return []
        return [kind for kind in kinds if self.chance() < 0.5]

    def _draw_weather(self) -> Weather:
        if "network" not in self._faults:
            return Weather()
        chances = [self.chance() * self.loop.chance.choice((0.0, 0.1, 0.3)) for _ in range(4)]
        return Weather(*chances)

    def _draw_subjects(self) -> list[Subject]:
        subjects = [self._draw_subject("bill-0", "acme")]
        if self.chance() < 0.3:
            subjects.append(self._draw_subject("bill-0", "globex"))
        return subjects

    def _draw_subject(self, name: str, tenant: str) -> Subject:
        choose = self.loop.chance.choice
        crash, receiver = (
            choose(("retry", "hold", "recover")),
            choose(("plain", "fenced", "deduping")),
        )
        return Subject(
            name,
            tenant,
            crash,
            receiver,
            stepped=self.chance() < 0.4 and (crash != "recover" or receiver == "deduping"),
            ttl_s=SHORT_TTL_S if self.chance() < 0.15 else 86_400.0,
            by_once=self.chance() < 0.25,
        )

    def _machine(self, number: int) -> Machine:
        machine = Machine(f"h{number}", self._ledger(self.server, self.network))
        if self._has_second_stores:
            machine.second = self._ledger(self.server, self.network)
        machine.offset = 1000.0 * self.chance()
        if "skew" in self._faults:
            self.hit("skew")
            machine.rate = 0.95 + 0.1 * self.chance()
            machine.skew_s = self.loop.chance.choice((-30.0, 0.0, 30.0))
        return machine

    async def live(self) -> None:
        """All of it: trouble, then quiet, then the questions."""
        WORLD.set(self)
        self.loop.create_task(self._nemesis())
        clients = {
            self.loop.spawn(machine, self._client(machine)): machine
            for machine in self.machines
            for _ in range(3 if self._crowded else self.loop.chance.randint(1, 2))
        }
        await self._until_done(clients)
        self._calm_down()
        await asyncio.sleep(QUIET_S)
        for subject in self.subjects:
            await self._settle(subject)

    async def _until_done(self, clients: dict[asyncio.Task[Any], Machine]) -> None:
        left = set(clients)
        while left and self.loop.clock_s < PATIENCE_S:
            await asyncio.wait(left, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
            left = {c for c in left if not (c.done() or clients[c].dead)}
        if left:
            self.promises.wrong("a call on a living host never ended")

    def _calm_down(self) -> None:
        self.quiet = True
        self.network.weather = self.outside.weather = Weather()
        self.network.can_be_cut = False

    async def _client(self, machine: Machine) -> None:
        await asyncio.sleep(self.chance() * self.loop.chance.choice((0.05, 0.5, 1.5)))
        for _ in range(self.loop.chance.choice((1, 1, 2))):
            visit = self._draw_visit(machine)
            await self.make(visit)
            await asyncio.sleep(self.chance() * self.loop.chance.choice((0.1, LEASE_S)))

    def _draw_visit(self, machine: Machine) -> Visit:
        choose = self.loop.chance.choice
        return self._visit(
            machine,
            choose(self.subjects),
            amount=2 if self.chance() < 0.06 else 1,
            on_duplicate="wait" if self._crowded else choose(("return", "raise", "wait")),
            on_failure=choose(("unlock", "lock")),
        )

    def _visit(self, machine: Machine, subject: Subject, **settings: Any) -> Visit:
        visit = Visit(machine, subject, f"{machine.name}/{next(self._count)}", **settings)
        self.promises.visits[visit.id] = visit
        machine.visits.append(visit)
        return visit

    def new_attempt(self) -> str:
        return VISIT.get().id

    async def _nemesis(self) -> None:
        for _ in range(self.loop.chance.randint(0, 4)):
            await asyncio.sleep(self.chance() * LEASE_S)
            self._strike(self.loop.chance.choice(self.machines))
            if self.chance() < 0.3:
                self.hit("sweep")
                await self.server.sweep()

    def _strike(self, machine: Machine) -> None:
        kinds = [kind for kind in ("crash", "pause", "cancel", "cut_off") if kind in self._faults]
        if not kinds or self.quiet or machine.dead:
            return
        kind = self.loop.chance.choice(kinds)
        for visit in machine.visits:
            if not visit.over:
                visit.subject.troubled = True
        self.loop.note(kind, machine.name)
        getattr(self, f"_{kind}")(machine)

    def _crash(self, machine: Machine) -> None:
        self.hit("crash")
        machine.dead = True

    def _pause(self, machine: Machine) -> None:
        self.hit("pause")
        until = self.loop.clock_s + self.chance() * 3 * LEASE_S
        machine.paused_until = max(machine.paused_until, until)
        for visit in machine.visits:
            visit.paused = visit.paused or not visit.over

    def _cut_off(self, machine: Machine) -> None:
        machine.cut_off_until = self.loop.clock_s + self.chance() * 2 * LEASE_S
        for visit in machine.visits:
            visit.cut_off = visit.cut_off or not visit.over

    def _cancel(self, machine: Machine) -> None:
        running = [visit for visit in machine.visits if not visit.over]
        if not running:
            return
        self.hit("cancel")
        visit = self.loop.chance.choice(running)
        self._cut(visit)
        if self.chance() < 0.5:
            self.hit("cancel_again")
            self.loop.after(self.chance() * 0.1, self._cut, visit)

    def _cut(self, visit: Visit) -> None:
        if not visit.over and visit.task is not None:
            visit.cancelled = True
            visit.task.cancel()

    def faulted(self, kind: str) -> None:
        self.hit(kind)
        visit = VISIT.get()
        visit.faults += 1
        visit.faults_since_lease += 1
        visit.subject.troubled = True
        self.loop.note(kind)

    def arrived(self, host: Host | None) -> None:
        if self._strikes and self.chance() < self._strikes:
            self._strike(cast("Machine", host))

    # What bodies ask.

    def work_s(self, visit: Visit) -> float:
        if visit.calm:
            return 0.0
        if "hang" in self._faults and self.chance() < 0.05:
            self.hit("hang")
            visit.subject.troubled = True
            return HANG_S
        return self.chance() * self.loop.chance.choice((0.02, 0.02, 0.3, 2 * LEASE_S))

    def maybe_fail(self, visit: Visit, when: str) -> None:
        """A body that fails after its effect asks to be run again, unless failures lock."""
        likely = 0.4 if visit.faults or visit.paused else 0.15  # troubles come together
        if visit.calm or "failure" not in self._faults or self.chance() > likely:
            return
        if when == "early" or visit.on_failure == "lock" or not visit.subject.patient:
            self.fail(visit, when)

    def fail(self, visit: Visit, why: str) -> NoReturn:
        visit.subject.troubled = True
        visit.raised = f"{visit.id} {why}"
        raise RefusedError(visit.raised)

    def result(self, visit: Visit, receipt: str) -> Any:
        if "cancel" in self._faults and not visit.calm and self.chance() < 0.05:
            self.loop.after(self.chance() * 0.05, self._cut, visit)  # while this is recorded
        if not visit.calm and self.chance() < 0.03:
            return Opaque()
        return f"{receipt} for {visit.id}"

    # What callers do.

    async def make(self, visit: Visit) -> BaseException | None:
        """Make the call, have it checked, and say what it raised."""
        token = VISIT.set(visit)
        visit.task = asyncio.current_task()
        self.loop.note("call", visit.id, visit.on_duplicate, visit.on_failure)
        value, raised = None, None
        try:
            value = await (_call_once if visit.subject.by_once else _call_guarded)(visit)
        except BaseException as error:  # noqa: BLE001  (a cancelled caller goes on with its life)
            raised = error
        finally:
            visit.over = True
            VISIT.reset(token)
        self.loop.note("end", visit.id, type(raised).__name__ if raised else "value")
        self.promises.ended(visit, value, raised)
        return raised

    # When all is quiet.

    async def _settle(self, subject: Subject) -> None:
        """Every key comes to an end, and whoever asks now gets an answer."""
        self.promises.check_free(subject)
        amount, last = 1, await self._last_visit(subject, 1)
        if isinstance(last, IdempotencyConflictError):
            amount, last = 2, await self._last_visit(subject, 2)
        if isinstance(last, OutcomeUnknownError):
            await self._resolve(subject)
            last = await self._last_visit(subject, amount)
        self.promises.check_completed(subject, last)
        self.promises.check_effects(subject)

    async def _last_visit(self, subject: Subject, amount: int) -> BaseException | None:
        machine = Machine("last", self._ledger(self.server, self.network))
        visit = self._visit(machine, subject, calm=True, amount=amount)
        return await self.loop.spawn(machine, self.make(visit))

    async def _resolve(self, subject: Subject) -> None:
        """What a person does about an unknown outcome: ask the receiver, and write it down."""
        key, outcome = subject.key, self._found_out(subject)
        row = self.server.row(key.id)
        fence = 0 if row is None else row.fence
        if not await self.server.resolve(key.id, fence=fence, outcome=outcome, ttl_s=None):
            self.promises.wrong("an unknown outcome could not be resolved")
        self.hit("resolved")
        self.promises.resolved(key.id, outcome)

    def _found_out(self, subject: Subject) -> Outcome | None:
        """None if nothing happened; half of it is finished by hand."""
        effects = self.receiver.effects
        happened = [name for name in subject.steps if (subject.place, name) in effects]
        if not happened:
            return None
        for name in set(subject.steps) - set(happened):
            effects[subject.place, name] = [0]
        return Outcome("value", CODEC.encode("found out by hand"))


def _watched(network: Network, world: World) -> Network:
    network.faulted = world.faulted  # type: ignore[method-assign]
    network.arrived = world.arrived  # type: ignore[method-assign]
    return network


# --- runs ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """How one seed went."""

    seed: int
    violations: list[str]
    hits: Counter[str]
    steps: int
    trace: list[tuple[Any, ...]]

    @property
    def digest(self) -> int:
        """A number that two runs share when they were the same to the last event."""
        return zlib.crc32(repr(self.trace).encode())

    def told(self, *, trace: bool = False) -> str:
        lines = [
            f"{at:10.3f}  {who!s:6} {' '.join(map(str, what))}" for at, who, *what in self.trace
        ]
        verdict = [f"seed {self.seed}: {wrong}" for wrong in self.violations]
        verdict = verdict or [f"seed {self.seed}: all promises kept"]
        return "\n".join((lines if trace else []) + verdict)


class _Ear(logging.Handler):
    """Background work that dies is a violation; everything else the guard says is expected."""

    def __init__(self, promises: Promises) -> None:
        super().__init__(logging.ERROR)
        self._promises = promises

    def emit(self, record: logging.LogRecord) -> None:
        self._promises.wrong(f"background work failed: {record.exc_info}")


@contextmanager
def _simulated(world: World) -> Iterator[None]:
    """Put the world's chances and rooms in the place of the process's own."""
    log = logging.getLogger("semel")
    ear = _Ear(world.promises)
    new_attempt, room, propagate = keys.new_attempt, guard_call.ROOM, log.propagate  # type: ignore[attr-defined]
    keys.new_attempt = world.new_attempt
    guard_call.ROOM = cast("Any", _Rooms())  # type: ignore[attr-defined]
    log.propagate = False
    log.addHandler(ear)
    try:
        yield
    finally:
        keys.new_attempt, guard_call.ROOM = new_attempt, room  # type: ignore[attr-defined]
        log.propagate = propagate
        log.removeHandler(ear)


def run_scenario(seed: int, plant: Plant = HONEST) -> Report:
    """Live through one seed's world."""
    world = World(seed, plant)
    with _simulated(world), plant.patch():
        try:
            world.loop.run(world.live())
        except (LivelockError, DeadlockError) as error:
            world.promises.wrong(str(error))
    promises, loop = world.promises, world.loop
    return Report(seed, promises.violations, promises.hits, loop.steps, loop.trace)


@dataclass
class Tally:
    """How many seeds went."""

    seeds: int = 0
    steps: int = 0
    hits: Counter[str] = field(default_factory=Counter[str])
    violations: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.steps += other.steps
        self.hits.update(other.hits)
        self.violations += other.violations

    def never_seen(self) -> list[str]:
        """Faults and branches this campaign never came across: it proves nothing about them."""
        return [name for name in SOMETIMES if not self.hits[name]]

    def told(self, took_s: float) -> str:
        rates = f"{self.seeds / took_s:,.0f} scenarios/s, {self.steps / took_s:,.0f} steps/s"
        lines = [f"{self.seeds:,} scenarios, {self.steps:,} steps in {took_s:.1f}s: {rates}"]
        lines += [f"  {name:24} {count:,}" for name, count in sorted(self.hits.items())]
        lines += [f"NEVER SEEN: {name}" for name in self.never_seen()]
        lines += [f"seed {seed}: {wrong}" for seed, wrong in self.violations[:20]]
        return "\n".join(lines)


def tally(first: int, count: int, plant: Plant = HONEST) -> Tally:
    """Run `count` seeds, one after another."""
    total = Tally()
    for seed in range(first, first + count):
        report = run_scenario(seed, plant)
        total.seeds += 1
        total.steps += report.steps
        total.hits.update(report.hits)
        total.violations += [(seed, wrong) for wrong in report.violations]
    return total


def _chunk(first_and_count: tuple[int, int]) -> Tally:
    return tally(*first_and_count)


def campaign(first: int, count: int, *, jobs: int, until: float, chunk: int = 500) -> Tally:
    """Run many seeds in several processes, until they are done or the time is up."""
    chunks = [(at, min(chunk, first + count - at)) for at in range(first, first + count, chunk)]
    total = Tally()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for done in pool.imap_unordered(_chunk, chunks):
            total.add(done)
            if time.perf_counter() > until:
                pool.terminate()
                break
    return total
