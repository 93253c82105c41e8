"""One subject, many subscribers: how long a message takes from publishing it to each of them.

Everybody takes turns: the crowd sits down at one server, hears its messages and leaves. A
percentile is taken within a turn, and the median over the turns is shown; a ratio is the median of
the ratios within the rounds.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench import realtime_crowd
from bench.http_load import FailedError
from bench.realtime_crowd import Seat, Subscribers
from bench.realtime_servers import Entrant, Missing, Publish, Running, message

EVERY_S = 0.2
SETTLE_S = 0.3
JOIN_WITHIN_S = 60.0


class Crowd:
    """The process with the subscribers, as seen from here."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self.answer()

    def ask(self, verb: str, *words: Any) -> Any:
        self._pipe.send((verb, *words))
        return self.answer()

    def answer(self) -> Any:
        kind, said = self._pipe.recv()
        if kind == "error":
            raise FailedError(said)
        return said


@contextmanager
def crowd(kind: type[Subscribers] = Subscribers) -> Iterator[Crowd]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=realtime_crowd.serve, args=(theirs, kind), daemon=True)
    process.start()
    try:
        yield Crowd(ours)
    finally:
        ours.send(("end",))
        process.join(20)
        if process.is_alive():
            process.kill()


@dataclass(frozen=True)
class Turn:
    """What one turn found."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    join_s: float
    cpu_us: float
    """The server's processor time for each message that reached somebody."""


@dataclass
class Result:
    """One entrant's turns, by round; or why there are none."""

    entrant: Entrant
    turns: dict[int, Turn] = field(default_factory=dict)
    error: str = ""
    missing: bool = False

    def median(self, figure: str) -> float | None:
        found = [getattr(turn, figure) for turn in self.turns.values()]
        return statistics.median(found) if found else None


def ratio(of: Result, to: Result, figure: str) -> float | None:
    both = [
        getattr(of.turns[turn], figure) / getattr(to.turns[turn], figure)
        for turn in of.turns
        if turn in to.turns
    ]
    return statistics.median(both) if both else None


@contextmanager
def started(entrants: Sequence[Entrant], redis: str) -> Iterator[list[tuple[Result, Running]]]:
    """All of them at the same time. Who does not start is a result."""
    found: list[tuple[Result, Running | None]] = []
    try:
        for entrant in entrants:
            result, running = Result(entrant), None
            try:
                running = entrant.start(redis)
            except Missing as error:
                result.error, result.missing = str(error), True
                print(f"WARNING: {entrant.name} is not measured. {error}", file=sys.stderr)
            except Exception as error:  # noqa: BLE001
                result.error = f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
            found.append((result, running))
        yield found
    finally:
        for _, running in found:
            if running is not None:
                running.stop()


def take_turns(
    table: Sequence[tuple[Result, Running | None]], subscribers: int, rounds: int, messages: int
) -> list[Result]:
    results = [Result(r.entrant, error=r.error, missing=r.missing) for r, _ in table]
    with crowd() as listeners:
        for turn in range(-1, rounds):
            order = list(range(len(table)))
            first = turn % len(order)
            for n in order[first:] + order[:first]:
                running = table[n][1]
                if running is not None and not results[n].error:
                    _play(results[n], running, listeners, turn, subscribers, messages)
    return results


def _play(
    result: Result, running: Running, listeners: Crowd, turn: int, subscribers: int, messages: int
) -> None:
    warming_up = turn < 0
    try:
        found = one_turn(running, listeners, subscribers, 5 if warming_up else messages)
        if not warming_up:
            result.turns[turn] = found
    except Exception as error:  # noqa: BLE001 - a peer that loses messages is a result
        result.error = f"{type(error).__name__}: {error}"[:300]
    finally:
        listeners.ask("leave")


def one_turn(running: Running, listeners: Crowd, subscribers: int, messages: int) -> Turn:
    with running.place() as (seat, publish):
        join_s = listeners.ask("join", [seat] * subscribers, JOIN_WITHIN_S)
        time.sleep(SETTLE_S)
        listeners.ask("listen")
        cpu = running.server.cpu_s()
        took, wrong = _told(listeners, _sent(publish, messages))
        spent = running.server.cpu_s() - cpu
    if wrong:
        raise FailedError(f"{wrong} of {messages * subscribers} did not come, or not in order")
    p50, p99 = (statistics.quantiles(took, n=100)[n] / 1e6 for n in (49, 98))
    return Turn(p50, p99, max(took) / 1e6, join_s, spent / len(took) * 1e6)


def _sent(publish: Publish, messages: int) -> list[int]:
    sent = []
    begin = time.monotonic()
    for n in range(messages):
        if (wait_s := begin + n * EVERY_S - time.monotonic()) > 0:
            time.sleep(wait_s)
        sent.append(time.monotonic_ns())
        publish(message(sent[-1]))
    time.sleep(SETTLE_S)
    return sent


def _told(listeners: Crowd, sent: Sequence[int]) -> tuple[array[int], int]:
    """Asked again for a while: the slow ones may still be sending."""
    for _ in range(20):
        packed, wrong = listeners.ask("tell", sent)
        if not wrong:
            break
        time.sleep(0.25)
    took = array("q")
    took.frombytes(packed)
    return took, wrong


__all__ = ["Crowd", "Result", "Seat", "Turn", "crowd", "ratio", "started", "take_turns"]
