"""What the simulated worlds of relays and of workers have in common: a party on hosts that fail.

Its members share the shards of a broker by claims in a store, each on a host of its own, behind a
network that loses, delays and doubles. Hosts die at any await, freeze, stumble at the worst moment,
and are cut off. What is right or wrong in such a world is the world's own matter.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from semel.testing.simulator import HOST, FaultyLedger, Host, Network, Server, SimLoop, Weather

LEASE_S = 3.0

CALM = Weather(latency_s=0.01, timeout_s=0.5)


class Line(Network):
    """A network whose faults are counted."""

    def __init__(self, world: PartyWorld, weather: Weather) -> None:
        super().__init__(world.loop, weather)
        self._world = world

    def faulted(self, kind: str) -> None:
        self._world.hit(kind)


class Store:
    """A host's way to the store in which the party agrees on who owns what."""

    def __init__(self, ledger: FaultyLedger) -> None:
        self._ledger = ledger

    def ledger(self, colour: Any) -> Any:
        return self._ledger

    def close(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


class Member(Protocol):
    """A relay or a worker."""

    host: Host
    _stopping: asyncio.Event

    def run(self) -> Coroutine[Any, Any, None]: ...

    def stop(self) -> None: ...


class PartyWorld:
    def __init__(self, seed: int, *, server: type[Server] = Server, budget: int = 200_000) -> None:
        self.loop = SimLoop(seed, budget=budget)
        self.chance = self.loop.chance
        self.hits: Counter[str] = Counter()
        self.violations: list[str] = []
        self.shards = self.chance.randint(1, 2)
        self.server = server(self.loop)
        self.network = Line(self, self._weather())
        # A statement is never run twice, nor after the next one: it ends with its connection.
        self.line = Line(self, replace(self.network.weather, doubled=0.0, late=0.0))
        self.stumbles = 0.0
        self.members: list[tuple[Any, asyncio.Task[None]]] = []

    def _weather(self) -> Weather:
        bad = 0.04 * self.chance.random()
        return Weather(bad, bad, bad, bad, latency_s=0.03, timeout_s=0.2, latest_s=2 * LEASE_S)

    def hit(self, what: str) -> None:
        self.hits[what] += 1

    def wrong(self, what: str) -> None:
        self.loop.note("WRONG", what)
        self.violations.append(what)

    async def pause(self, most_s: float) -> None:
        await asyncio.sleep(self.chance.random() * most_s)

    # Its members, and what happens to them.

    def enter(self, make: Callable[[Host], Member]) -> None:
        self.hit("join")
        host = Host(f"host{len(self.members)}")
        member = make(host)
        self.members.append((member, self.loop.spawn(host, member.run())))

    def there(self) -> list[Any]:
        return [
            member
            for member, running in self.members
            if not (member.host.dead or running.done() or member._stopping.is_set())
        ]

    def somebody(self) -> Any:
        there = self.there()
        return self.chance.choice(there) if there else None

    def crash(self) -> None:
        if member := self.somebody():
            self.hit("crash")
            member.host.dead = True

    def freeze(self) -> None:
        if member := self.somebody():
            self.hit("freeze")
            member.host.paused_until = self.loop.clock_s + self.chance.random() * 2 * LEASE_S

    async def perhaps_stumble(self) -> None:
        """Freeze right here, for longer than a lease."""
        host = HOST.get()
        if host is not None and self.chance.random() < self.stumbles:
            self.hit("stumble")
            host.paused_until = self.loop.clock_s + (1 + self.chance.random()) * LEASE_S
            await asyncio.sleep(0)

    def cut(self) -> None:
        if member := self.somebody():
            member.host.cut_off_until = self.loop.clock_s + self.chance.random() * 2 * LEASE_S

    def stop(self) -> None:
        if member := self.somebody():
            self.hit("stop")
            member.stop()


# --- running one --------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    seed: int
    violations: list[str]
    hits: Counter[str]
    digest: str
    trace: list[tuple[Any, ...]]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    log = logging.getLogger("semel")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def main(run: Callable[[int], Report]) -> int:
    """Run the seed that was asked for, and say what happened."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    asked = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    report = run(asked.seed)
    for entry in report.trace:
        print(*entry)  # noqa: T201
    print(dict(report.hits), report.violations or "all is well")  # noqa: T201
    return bool(report.violations)
