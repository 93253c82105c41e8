"""What is measured: each scenario's floor, us, the peers, and what we want to reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bench import floor, ours, peers
from bench.machine import Machine
from bench.measure import Contestant, Effort, Phase, Result, measure, ratio

CALLERS = 100


# --- what we want -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """How we stand in one phase of one scenario."""

    to_floor: float | None
    """Our time, in the floor's times."""
    to_peer: float | None
    """The best peer's time, in our times: how much faster we are."""
    best_peer: str | None


@dataclass(frozen=True)
class Target:
    """What is to be reached, in words and as a test."""

    text: str
    figure: Callable[[Standing], float | None]
    reached: Callable[[float], bool]

    def judge(self, standing: Standing) -> str:
        figure = self.figure(standing)
        if figure is None:
            return "not measured"
        return f"{'reached' if self.reached(figure) else 'not reached'} ({figure:.2f})"


def at_most_floor(times: float) -> Target:
    return Target(f"≤ {times:g} × floor", lambda s: s.to_floor, lambda f: f <= times)


def faster_than_peers(times: float) -> Target:
    return Target(f"≥ {times:g} × best peer's calls/s", lambda s: s.to_peer, lambda f: f >= times)


def standing(results: list[Result], phase: Phase) -> Standing:
    us = next((r for r in results if r.contestant.role == "us" and r.has(phase)), None)
    if us is None:
        return Standing(None, None, None)
    floors = [r for r in results if r.contestant.role == "floor" and r.has(phase)]
    others = [r for r in results if r.contestant.role == "peer" and r.has(phase)]
    best = min(others, key=lambda r: r.median_s(phase), default=None)
    return Standing(
        to_floor=ratio(us, floors[0], phase) if floors else None,
        to_peer=ratio(best, us, phase) if best else None,
        best_peer=best.contestant.name if best else None,
    )


# --- the scenarios ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A table: who is measured, where, and what is to be reached."""

    name: str
    title: str
    place: Callable[[Machine], Any]
    contestants: list[Contestant]
    is_async: bool = False
    callers: int = 1
    targets: dict[Phase, Target] = field(default_factory=dict)
    most_records: int | None = None
    """Everybody starts empty in each round, and gets this far."""

    def run(self, machine: Machine, effort: Effort) -> list[Result]:
        if self.most_records is not None:
            effort = replace(effort, most_calls=self.most_records)
        return measure(
            self.contestants,
            self.place(machine),
            effort,
            callers=self.callers,
            is_async=self.is_async,
            anew=self.most_records is not None,
        )


def _redis(machine: Machine) -> str:
    return machine.empty_redis()


def _postgres(machine: Machine) -> str:
    return machine.database()


def _durable_postgres(machine: Machine) -> str:
    return machine.database(durable=True)


def _disk(machine: Machine) -> Any:
    return machine.folder()


def _memory(_: Machine) -> None:
    return None


QUARTER_MORE: dict[Phase, Target] = {"first": at_most_floor(1.25), "replay": at_most_floor(1.25)}
EIGHT_TIMES: dict[Phase, Target] = {"first": faster_than_peers(8)}
TWICE: dict[Phase, Target] = {"first": faster_than_peers(2), "replay": faster_than_peers(2)}

# idemkit's memory store looks at every record it has on each claim; its documentation calls the
# store one for tests, so it is measured at the size of one.
FEW = 200

SCENARIOS = [
    Scenario(
        "redis-sync",
        "Redis, one sync caller",
        _redis,
        [floor.REDIS_SYNC, ours.REDIS_SYNC, *peers.REDIS_SYNC],
        targets=QUARTER_MORE,
    ),
    Scenario(
        "redis-async",
        "Redis, one async caller",
        _redis,
        [floor.REDIS_ASYNC, ours.REDIS_ASYNC, *peers.REDIS_ASYNC],
        is_async=True,
        targets=QUARTER_MORE,
    ),
    Scenario(
        "redis-100",
        f"Redis, {CALLERS} async callers at once",
        _redis,
        [floor.REDIS_ASYNC, floor.REDIS_PIPELINE, ours.REDIS_ASYNC, *peers.REDIS_ASYNC],
        is_async=True,
        callers=CALLERS,
        targets=EIGHT_TIMES,
    ),
    Scenario(
        "postgres-sync",
        "PostgreSQL, one sync caller",
        _postgres,
        [floor.POSTGRES_SYNC, ours.POSTGRES_SYNC, *peers.POSTGRES_SYNC],
    ),
    Scenario(
        "postgres-async",
        "PostgreSQL, one async caller",
        _postgres,
        [floor.POSTGRES_ASYNC, ours.POSTGRES_ASYNC, *peers.POSTGRES_ASYNC],
        is_async=True,
    ),
    Scenario(
        "postgres-100",
        f"PostgreSQL, {CALLERS} async callers at once",
        _postgres,
        [floor.POSTGRES_POOL, floor.POSTGRES_ROWS, ours.POSTGRES_ASYNC, *peers.POSTGRES_ASYNC],
        is_async=True,
        callers=CALLERS,
        targets=EIGHT_TIMES,
    ),
    Scenario(
        "postgres-disk",
        f"PostgreSQL that waits for its disk, {CALLERS} async callers at once",
        _durable_postgres,
        [floor.POSTGRES_POOL, floor.POSTGRES_ROWS, ours.POSTGRES_ASYNC, *peers.POSTGRES_ASYNC],
        is_async=True,
        callers=CALLERS,
    ),
    Scenario(
        "memory-sync",
        "Memory, one sync caller",
        _memory,
        [floor.MEMORY_SYNC, ours.MEMORY_SYNC, *peers.MEMORY_SYNC],
        targets=TWICE,
        most_records=FEW,
    ),
    Scenario(
        "memory-async",
        "Memory, one async caller",
        _memory,
        [floor.MEMORY_ASYNC, ours.MEMORY_ASYNC, *peers.MEMORY_ASYNC],
        is_async=True,
        targets=TWICE,
        most_records=FEW,
    ),
    Scenario(
        "sqlite-sync",
        "SQLite on a disk, one sync caller",
        _disk,
        [floor.SQLITE, ours.SQLITE_SYNC, *peers.SQLITE_SYNC],
        targets={"first": at_most_floor(1.5)},
    ),
]
