"""From the workers' store to that of whoever watches: each event once, and a job's in order.

    router = Router("redis://workers", "redis://gateways", shards=8)
    await router.run()

Without a router, workers write to the store that gateways read. With one, they have a store of
their own, and publish to shards there (`Publisher(shards=8)`); or an outbox is relayed to a broker,
whose messages are events (`topic=`).

Any number of routers may run. Each shard has one owner at a time (`semel.shards`), who reads what
waits there, appends each event to its job's log, which changes the job's state and rings, and then
acknowledges: for a log, by trimming it. Who dies in between appends again, and the job's log knows
what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, get_args

from semel.bus import jobs
from semel.bus.jobs import KEEP_JOB, Event
from semel.bus.shard import OUTAGE, Shard
from semel.bus.sources import BrokerSource, LogSource, Source
from semel.bus.stages import STAGES, Stages
from semel.circuit import Circuit
from semel.colour import ASYNC
from semel.entries import Keep
from semel.errors import SettingsError, StoreUnavailableError
from semel.ports import Broker, LogStore, Store
from semel.settings import as_broker, as_log_store, as_store
from semel.shards import LEASE_S, Hold, Shards
from semel.stores.log_rules import name_of
from semel.values import value

__all__ = ["Router", "RouterStatus"]

log = logging.getLogger("semel")

T = TypeVar("T")

BATCH = 500

SHARDS = 8

# No shard's number has more digits.
LONGEST = 10**9

# How often the source is asked whether it has more shards than we read.
CHECK_EVERY_S = 10.0

Why = Literal["unreadable", "conflict", "stale", "ended", "corrupt", "too_large"]
"""Why an event was passed over: it is none; it came before with other data; a later attempt at its
stage has begun; its job has ended; its job's log cannot be read; the target cannot keep one as
large."""


@value
class RouterStatus:
    """What a router is doing, for people and probes.

    `waits_for` are those who may have shards that fall to it, by host and process, until they let
    go or their leases run out. `refused` counts by reason what was passed over. `lost` counts how
    often a shard's history was another one than what was read of it: events are gone. `lag_s` is
    how old the oldest event is that is being routed, or the last such one was when that was done.
    `turning` is False when it has not done anything for so long that only a restart can help.
    """

    name: str
    shards: int
    owned: tuple[int, ...] = ()
    members: int = 0
    waits_for: tuple[str, ...] = ()
    routed: int = 0
    repeated: int = 0
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    lost: int = 0
    outage: str = ""
    lag_s: float | None = None
    turning: bool = True

    @property
    def ready(self) -> bool:
        return not self.outage


class Router:
    """Takes a domain's events from a source to their jobs' logs in a target.

    The source is a store with `shards` shards, or, with `topic=` or given as it is, a broker, which
    has its own. `stages` are those of the publishers: the last one ends a job. `keep` says how long
    a job is kept. `name` tells routers apart that have different sources and the same target.
    `store` is where routers agree on who owns which shard, by default the target.
    """

    def __init__(
        self,
        source: LogStore | Broker | str,
        target: LogStore | str,
        *,
        domain: str = "scan",
        shards: int | None = None,
        topic: str | None = None,
        stages: Stages = STAGES,
        keep: Keep = KEEP_JOB,
        name: str | None = None,
        store: Store | str | None = None,
        batch: int = BATCH,
        lease_s: float = LEASE_S,
    ) -> None:
        self.domain = jobs.checked_domain(domain)
        self.name = domain if name is None else name
        self.shown = f"router {self.name}"
        named = "" if self.name == domain else f":{self.name}"
        self._party = f"router:{domain}{named}"
        """Who shares its shards with us, and a broker's name for all of us. No domain has a colon,
        so that no other domain's routers are among them, however they are named."""
        if shards is not None and shards < 1:
            raise SettingsError(f"shards={shards}: as many as the publishers have, from 1")
        if keep.full is not None:
            raise SettingsError(
                "keep=: nobody trims a job's log, so with full it would take no more for ever; "
                "leave that out"
            )
        name_of(self.fence_of(LONGEST), "name")
        self.stages = stages
        self.keep = keep
        self.batch = batch
        self._opened: list[Any] = []
        """What was given by its URL, and is closed with the run."""
        try:
            self.source = self._source(source, shards, topic)
            self.log = (opened := self._kept(target, as_log_store(target))).log(ASYNC)
            self.store: Store = opened if store is None else self._kept(store, as_store(store))
        except BaseException:
            for each in self._opened:
                if isinstance(each, Store):
                    each.close()
            raise
        self.source_circuit = Circuit(f"{self.source.shown}, of {self.shown},")
        self.target_circuit = Circuit(f"the target of {self.shown}")
        self._shards = Shards(self.store, self._party, self.source.shards, lease_s=lease_s)
        self._stopping = asyncio.Event()
        self._fault: Exception | None = None
        self.counts = {"routed": 0, "repeated": 0}
        self._refused: dict[str, int] = dict.fromkeys(get_args(Why), 0)
        self._lost = 0
        self._lag_s: float | None = None
        self._in_hand: dict[int, Event] = {}
        """By shard, the first event of the batch that is being routed."""

    def _source(
        self, source: LogStore | Broker | str, shards: int | None, topic: str | None
    ) -> Source:
        if isinstance(source, LogStore) or (isinstance(source, str) and topic is None):
            opened = self._kept(source, as_log_store(source))
            return LogSource(opened, self.domain, shards or SHARDS, self._told_lost)
        broker = self._kept(source, as_broker(source))
        if shards not in (None, broker.shards):
            raise SettingsError(
                f"shards={shards}, and the broker has {broker.shards}: leave shards= out, a "
                "broker has its own"
            )
        name = f"{platform.node()[:40]}:{os.getpid()}"
        return BrokerSource(broker, topic or self.domain, self._party, name)

    def _kept(self, given: object, opened: T) -> T:
        self._opened += [opened] if isinstance(given, str) else []
        return opened

    def fence_of(self, shard: int) -> str:
        """What a job's log calls the owner of the shard; no stage's name has a colon."""
        return f"{self._party}:{shard}"

    # --- running ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Route until `stop`. What is in hand is finished, and every shard handed over.

        A store or a broker that does not answer is waited for. What no waiting mends, such as
        missing tables or another number of shards, raises `SettingsError`.
        """
        checking: asyncio.Task[None] | None = None
        try:
            await self._reach()
            checking = asyncio.create_task(self._check())
            await self._shards.run(self._own)
        finally:
            if checking is not None:
                checking.cancel()
                await asyncio.wait([checking])
            for each in (self.source, *self._opened):
                await each.aclose()
        if self._fault is not None:
            raise self._fault

    def stop(self) -> None:
        """Begin nothing more; `run` returns when what is in hand is finished."""
        self._stopping.set()
        self._shards.stop()

    async def _reach(self) -> None:
        """Until the target has answered: so it is known that what we need is there."""
        while not self._stopping.is_set():
            try:
                await self.store.ledger(ASYNC).look(bytes(32))
                await self.log.heads([jobs.stream_of(self.domain, "nobody's")])
            except StoreUnavailableError as error:
                self.target_circuit.failed(error)
                await self.target_circuit.wait(self._stopping)
            else:
                self.target_circuit.passed()
                break
        self.target_circuit.gave_up()

    async def _check(self) -> None:
        while True:
            try:
                await self.source.check()
            except OUTAGE:
                pass  # the shards tell of that
            except Exception as error:  # noqa: BLE001 - nobody would look any more, and not know
                self._end_with(error)
                return
            await ASYNC.sleep(CHECK_EVERY_S)

    async def _own(self, hold: Hold) -> None:
        try:
            await Shard(self, hold).run()
        except SettingsError as error:
            self._end_with(error)

    def _end_with(self, error: Exception) -> None:
        self._fault = self._fault or error
        self.stop()

    # --- telling ----------------------------------------------------------------------------

    def status(self) -> RouterStatus:
        return RouterStatus(
            self.name,
            self.source.shards,
            tuple(self._shards.owned),
            self._shards.members,
            self._shards.waits_for,
            **self.counts,
            refused=dict(self._refused),
            lost=self._lost,
            outage=self.source_circuit.error or self.target_circuit.error,
            lag_s=self._age_s(self._in_hand.values()),
            turning=self._shards.turning,
        )

    def check(self, event: Event) -> None:
        """`ValueError` for an event that is not ours to route, or that no log could keep."""
        if event.domain != self.domain:
            raise ValueError(f"{jobs.named(event)} is of domain {event.domain!r:.80}")
        jobs.check_names(event)

    def refuse(self, why: Why, told: str) -> None:
        """Pass an event over: whoever published it has gone on, or is mistaken."""
        self._refused[why] += 1
        level = logging.WARNING if why in {"stale", "ended"} else logging.ERROR
        log.log(level, "semel: %s: passed over (%s): %s", self.shown, why, told)

    def _told_lost(self, shard: int, told: str) -> None:
        self._lost += 1
        log.critical(
            "semel: %s: shard %d has lost events: %s. What was published there and not routed is "
            "gone, unless its publishers send it again",
            self.shown,
            shard,
            told,
        )

    @contextlib.contextmanager
    def in_hand(self, shard: int, oldest: Event | None) -> Iterator[None]:
        """While a batch of the shard is routed; None: there is no event in it."""
        if oldest is None:
            yield
            return
        self._in_hand[shard] = oldest
        try:
            yield
            self._lag_s = self._age_s([oldest])
        finally:
            del self._in_hand[shard]

    def _age_s(self, events: Iterable[Event]) -> float | None:
        """Of the oldest of them; the last that was told, where there is none."""
        now, ages = datetime.now(UTC), list[float]()
        for event in events:
            with contextlib.suppress(ValueError, TypeError):  # a time that is none, or of nowhere
                ages.append((now - datetime.fromisoformat(event.timestamp)).total_seconds())
        return max(ages, default=self._lag_s)
