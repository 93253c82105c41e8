"""Through the door: rooms in which people act, and a room that a crowd watches.

Everybody takes turns: the clients sit down at one server, play, and leave. A percentile is taken
within a turn, and the median over the turns is shown.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.http_load import FailedError
from bench.realtime_fanout import Crowd, crowd
from bench.realtime_servers import Listening, Missing
from bench.rooms_crowd import Clients
from bench.rooms_servers import Entrant

JOIN_WITHIN_S = 60.0
SETTLE_S = 1.0
EVERY_S = 0.2

_games = itertools.count(1)


@dataclass(frozen=True)
class Spread:
    """How long something took: milliseconds."""

    p50: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, packed: bytes) -> Spread | None:
        took = array("q")
        took.frombytes(packed)
        if not took:
            return None
        cuts = statistics.quantiles(took, n=100)
        return cls(*(each / 1e6 for each in (cuts[49], cuts[94], cuts[98], max(took))))


@dataclass(frozen=True)
class Turn:
    """What one turn found. `answer` is None where there is none but the update."""

    actions: int
    told: int
    """How often somebody was told of one."""
    seconds: float
    answer: Spread | None
    each: Spread
    last: Spread
    cpu_s: float
    """Of the server's processes."""
    join_s: float
    late_ms: float = 0.0
    """By how much the crowd itself was, at most."""


@dataclass
class Result:
    """One entrant's turns, by round; or why there are none."""

    entrant: Entrant
    turns: dict[int, Turn] = field(default_factory=dict)
    error: str = ""
    missing: bool = False

    def median(self, figure: Callable[[Turn], float]) -> float:
        return statistics.median(map(figure, self.turns.values()))


Table = Sequence[tuple[Result, Listening | None]]


@contextmanager
def started(entrants: Sequence[Entrant], redis: str) -> Iterator[Table]:
    """All of them at the same time. Who does not start is a result."""
    found: list[tuple[Result, Listening | None]] = []
    try:
        for entrant in entrants:
            result, server = Result(entrant), None
            try:
                server = entrant.start(redis)
            except Missing as error:
                result.error, result.missing = str(error), True
                print(f"WARNING: {entrant.name} is not measured. {error}", file=sys.stderr)
            except Exception as error:  # noqa: BLE001 - a peer that cannot is a result
                result.error = f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
            found.append((result, server))
        yield found
    finally:
        for _, server in found:
            if server is not None:
                server.stop()


Play = Callable[[Entrant, Listening, Crowd], Turn]


def take_turns(table: Table, rounds: int, play: Play, *, warm: bool = False) -> list[Result]:
    """`warm`: they have played before, and need no round that does not count."""
    results = [Result(r.entrant, error=r.error, missing=r.missing) for r, _ in table]
    with crowd(Clients) as clients:
        for turn in range(0 if warm else -1, rounds):
            order = list(range(len(table)))
            first = turn % len(order)
            for n in order[first:] + order[:first]:
                server = table[n][1]
                if server is not None and not results[n].error:
                    _play(results[n], server, clients, turn, play)
    return results


def _play(result: Result, server: Listening, clients: Crowd, turn: int, play: Play) -> None:
    try:
        found = play(result.entrant, server, clients)
        if turn >= 0:
            result.turns[turn] = found
    except Exception as error:  # noqa: BLE001 - a peer that loses messages is a result
        result.error = f"{type(error).__name__}: {error}"[:300]
    finally:
        clients.ask("leave")


# --- what is played -----------------------------------------------------------------------------


def rooms(count: int, users: int, rate: float, seconds: float) -> Play:
    """So many rooms of so many users each, and so many actions a second in all."""

    def play(entrant: Entrant, server: Listening, clients: Crowd) -> Turn:
        game = next(_games)
        names = [f"r{game}-{n}" for n in range(count)]
        seats = [seat for name in names for seat in entrant.seats(server.port, name, users)]
        return _turn(server, clients, seats, seconds, lambda: clients.ask("play", rate, seconds))

    return play


def spectators(count: int, actions: int) -> Play:
    """One room with one who acts, and so many who watch."""

    def play(entrant: Entrant, server: Listening, clients: Crowd) -> Turn:
        seats = entrant.seats(server.port, f"r{next(_games)}", 1, count)
        seconds = actions * EVERY_S
        return _turn(
            server, clients, seats, seconds, lambda: clients.ask("act_each", EVERY_S, actions)
        )

    return play


def _turn(
    server: Listening,
    clients: Crowd,
    seats: Sequence[object],
    seconds: float,
    go: Callable[[], float | None],
) -> Turn:
    join_s = clients.ask("join", seats, JOIN_WITHIN_S)
    time.sleep(SETTLE_S)
    clients.ask("listen")
    cpu_s = server.cpu_s()
    late_s = go() or 0.0
    cpu_s = server.cpu_s() - cpu_s
    results, each, last, wrong = _told(clients)
    if wrong:
        raise FailedError(", ".join(f"{what}: {count}" for what, count in wrong.items()))
    spreads = Spread.of(each), Spread.of(last)
    assert spreads[0] is not None
    assert spreads[1] is not None
    counts = len(last) // 8, len(each) // 8
    return Turn(*counts, seconds, Spread.of(results), *spreads, cpu_s, join_s, late_s * 1000)


def _told(clients: Crowd) -> tuple[bytes, bytes, bytes, dict[str, int]]:
    """Asked again for a while: the slow ones may still be sending."""
    for _ in range(10):
        told: tuple[bytes, bytes, bytes, dict[str, int]] = clients.ask("told")
        if not told[3]:
            break
        time.sleep(0.5)
    return told
