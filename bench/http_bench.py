"""What an `Idempotency-Key` door costs: an app without one, with ours, and with idemkit's.

Every app is a process of its own, all of them run at the same time, and they take turns: a second
of load for one, then for the next, the first one changing each round. A ratio is the median of the
ratios within the rounds. After each block the app is asked how often its handler ran: a door that
runs it for a replay, or answers without running it, has not been measured but has failed.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench import http_load, http_server
from bench.http_load import Block, FailedError, Phase
from bench.machine import Machine

BARE, OURS, PEER = "bare", "semel", "idemkit"
DOORS = (BARE, OURS, PEER)
MANY = 64


@dataclass(frozen=True)
class Effort:
    """How long to measure. wrk cannot be told less than a second."""

    rounds: int
    seconds: int
    crowds: int
    """How many times the memory of requests in flight is looked at."""


EFFORTS = {"quick": Effort(1, 1, 1), "usual": Effort(9, 1, 3), "full": Effort(15, 2, 5)}


@dataclass(frozen=True)
class Target:
    """So many times the requests per second of somebody."""

    times: float
    whom: str

    @property
    def text(self) -> str:
        return f"≥ {self.times:g} × {self.whom}"


@dataclass(frozen=True)
class Case:
    """A table: which requests, over how many connections, and what is to be reached."""

    place: str
    phase: Phase
    connections: int
    targets: tuple[Target, ...] = ()


CASES = (
    Case("Redis", "first", MANY, (Target(0.7, BARE), Target(2, PEER))),
    Case("Redis", "replay", MANY, (Target(0.9, BARE),)),
    Case("Redis", "unkeyed", MANY, (Target(0.98, BARE),)),
    Case("Redis", "first", 1),
    Case("Redis", "replay", 1),
    Case("Redis", "unkeyed", 1),
    Case("PostgreSQL", "first", MANY),
)


@dataclass
class Result:
    """One app's blocks in one case, by round; or why there are none."""

    door: str
    blocks: dict[int, Block] = field(default_factory=dict)
    error: str | None = None

    @property
    def measured(self) -> bool:
        return self.error is None and bool(self.blocks)

    def median(self, figure: str) -> float | None:
        """Over the blocks, of one of their figures."""
        found = [getattr(block, figure) for block in self.blocks.values()]
        return statistics.median(found) if None not in found else None


def ratios(of: Result, to: Result) -> list[float]:
    """Requests per second of one, in those of another, within each round."""
    return [of.blocks[turn].rate / to.blocks[turn].rate for turn in of.blocks if turn in to.blocks]


# --- the turns ----------------------------------------------------------------------------------


class Seat:
    """An app at the table, in every case of one place."""

    def __init__(self, door: str, store: str) -> None:
        self.door = door
        self._store = store
        self._running: http_server.AppServer | None = None
        self._recorded = ""

    @property
    def _server(self) -> http_server.AppServer:
        if self._running is None:
            self._running = http_server.start(self.door, self._store)
        return self._running

    def leave(self) -> None:
        if self._running is not None:
            self._running.stop()

    def sit_down(self) -> None:
        """Show that a request with a key that was used before is not run again."""
        self._recorded = http_load.new_stamp()
        before = self._server.count()["runs"]
        for _ in range(2):
            self._server.record(self._recorded)
        runs, once = self._server.count()["runs"] - before, http_load.RECORDED
        if runs != (2 * once if self.door == BARE else once):
            raise FailedError(f"{once} requests, each sent twice, ran {runs} times")

    def play(self, case: Case, seconds: int) -> Block:
        before = self._server.count()["runs"]
        stamp = self._recorded if case.phase == "replay" else http_load.new_stamp()
        block = http_load.run(
            self._server.port,
            self._server.pid,
            case.phase,
            connections=case.connections,
            seconds=seconds,
            stamp=stamp,
        )
        self._check(case, block, self._server.count()["runs"] - before)
        return block

    def _check(self, case: Case, block: Block, runs: int) -> None:
        replays = case.phase == "replay" and self.door != BARE
        least = 0 if replays else block.requests
        # wrk hangs up in the middle of the last request of each connection.
        most = 0 if replays else block.requests + case.connections
        if not least <= runs <= most:
            raise FailedError(f"{block.requests} requests ran the handler {runs} times")


@contextlib.contextmanager
def seats(store: str) -> Iterator[list[Seat]]:
    """An app behind each door, all in front of this store."""
    found = [Seat(door, store) for door in DOORS]
    try:
        yield found
    finally:
        for seat in found:
            seat.leave()


def take_turns(table: Sequence[Seat], case: Case, effort: Effort) -> list[Result]:
    results = {seat.door: Result(seat.door) for seat in table}
    # The warm-up pays for connections, scripts, plans and caches.
    for turn in range(-1, effort.rounds):
        first = turn % len(table)
        for seat in [*table[first:], *table[:first]]:
            _play(seat, results[seat.door], case, effort, turn)
    return list(results.values())


def _play(seat: Seat, result: Result, case: Case, effort: Effort, turn: int) -> None:
    if result.error is not None:
        return
    try:
        if turn < 0:
            seat.sit_down()
        block = seat.play(case, effort.seconds)
        if turn >= 0:
            result.blocks[turn] = block
    except (FailedError, OSError) as error:
        result.error = shown(error)


def shown(error: Exception) -> str:
    """An error on one line: what an app said last is the reason."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"


def run(machine: Machine, effort: Effort) -> Iterator[tuple[Case, list[Result]]]:
    """Every case with its results, in the order of the doors, as they come."""
    for place, store in _places(machine):
        with seats(store) as table:
            for case in CASES:
                if case.place == place:
                    yield case, take_turns(table, case, effort)


def _places(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "Redis", machine.empty_redis()
    yield "PostgreSQL", machine.database()
