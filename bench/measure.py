"""How it is measured: everybody in one run, in turns, in small blocks.

A machine's speed drifts while one measures. So the contestants take turns, block by block, the
first one changing each round, and a ratio is the median of the ratios within the rounds: what slows
one slows its neighbours too. A time is the median over the blocks; the best block says what the
machine can do when nothing disturbs it.

Each contestant is warmed up, and checked meanwhile: it must give the right result, and must not
run the body again for a replay. Blocks are sized by time; whoever is too slow for that plays every
fourth round only.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["floor", "us", "peer"]
Phase = Literal["first", "replay"]
PHASES: tuple[Phase, ...] = ("first", "replay")

# A block this many times as long as it should be is a slow one.
SLOW = 8


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    block_s: float
    most_calls: int = 5000

    def calls(self, each_s: float, callers: int) -> int:
        """How many calls make a block, for someone who needs this long for each."""
        fewest = max(callers, 5)
        return max(fewest, min(self.most_calls, int(self.block_s / max(each_s, 1e-9))))


@dataclass(frozen=True)
class Calls:
    """What a contestant offers, once open: a call by number, made the first time and again.

    `replay` is None when it cannot replay. `rows` is more than 1 when a call takes as many numbers
    at once.
    """

    first: Callable[[Any], Any]
    replay: Callable[[Any], Any] | None
    rows: int = 1


def guarded(call: Callable[[Any], Any]) -> Calls:
    """A guard is called the same way both times."""
    return Calls(call, call)


@dataclass(frozen=True)
class Contestant:
    """Somebody to be measured. `open` takes the place it works in."""

    name: str
    role: Role
    open: Callable[[Any], AbstractContextManager[Calls] | AbstractAsyncContextManager[Calls]] | None
    note: str = ""
    replay_name: str | None = None
    """What a floor does the second time."""

    def called(self, phase: Phase) -> str:
        return self.replay_name if self.replay_name and phase == "replay" else self.name


@dataclass
class Result:
    """One contestant's blocks: seconds per call, by phase and round; or why there are none."""

    contestant: Contestant
    blocks: dict[Phase, dict[int, float]] = field(default_factory=lambda: {p: {} for p in PHASES})
    error: str | None = None

    def median_s(self, phase: Phase) -> float:
        return statistics.median(self.blocks[phase].values())

    def best_s(self, phase: Phase) -> float:
        return min(self.blocks[phase].values())

    def has(self, phase: Phase) -> bool:
        return self.error is None and bool(self.blocks[phase])


def ratio(of: Result, to: Result, phase: Phase) -> float:
    """How many times as long `of` takes, compared within each round that both played."""
    ours, theirs = of.blocks[phase], to.blocks[phase]
    return statistics.median(ours[turn] / theirs[turn] for turn in ours if turn in theirs)


# --- the turns ----------------------------------------------------------------------------------


def measure(
    contestants: Sequence[Contestant],
    place: Any,
    effort: Effort,
    *,
    callers: int,
    is_async: bool,
    anew: bool,
) -> list[Result]:
    """Everybody's results, in the order given. `anew`: everybody starts empty each round."""
    results = [Result(contestant) for contestant in contestants]
    with asyncio.Runner() as runner:
        # Sync contestants must not find an event loop running; async ones share this one.
        run = runner.run if is_async else _drive
        seats = [_Seat(result, place, effort, callers, run) for result in results]
        try:
            for seat in seats:
                seat.sit_down()
            for turn in range(effort.rounds):
                first = turn % len(seats)
                for seat in seats[first:] + seats[:first]:
                    seat.play(turn, anew=anew)
        finally:
            for seat in reversed(seats):
                seat.leave()
    return results


def _drive(coroutine: Any) -> Any:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a sync contestant tried to suspend")


class _Seat:
    """A contestant at the table: opened once, played each round, closed at the end."""

    def __init__(
        self, result: Result, place: Any, effort: Effort, callers: int, run: Callable[[Any], Any]
    ) -> None:
        self.result = result
        self._place = place
        self._effort = effort
        self._callers = callers
        self._run = run
        self._numbers = itertools.count()
        self._open: Any = None
        self._calls: Calls | None = None
        self._sizes: dict[Phase, int] = {}
        self._every = 1

    def sit_down(self) -> None:
        if self.result.contestant.open is None:
            return
        try:
            self._warm_up(self._enter())
        except Exception as error:  # noqa: BLE001 - a peer that fails is shown as failed
            self._fail(error)

    def _enter(self) -> Calls:
        assert self.result.contestant.open is not None
        self._open = self.result.contestant.open(self._place)
        if hasattr(self._open, "__aenter__"):
            calls = self._run(self._open.__aenter__())
        else:
            calls = self._open.__enter__()
        assert isinstance(calls, Calls)
        self._calls = calls
        return calls

    def _warm_up(self, calls: Calls) -> None:
        least = self._effort.calls(1.0, self._callers)
        each_s: dict[Phase, float] = {}
        # Twice: the first time pays for connections, scripts, plans and caches.
        for size in (least * 2, least):
            done = self._take(size)
            each_s = {p: self._time(p, done) for p in PHASES if getattr(calls, p) is not None}
        self._sizes = {p: self._effort.calls(s, self._callers) for p, s in each_s.items()}
        if calls.replay is not None:
            # Only what was called before can be replayed.
            self._sizes["replay"] = min(self._sizes["replay"], self._sizes["first"])
        slow = (
            sum(each_s[p] * size for p, size in self._sizes.items()) > SLOW * self._effort.block_s
        )
        self._every = 4 if slow else 1

    def _take(self, size: int) -> list[int]:
        """The next numbers: as many, or the next larger multiple of the rows."""
        rows = self._rows
        return list(itertools.islice(self._numbers, -(-size // rows) * rows))

    @property
    def _rows(self) -> int:
        return self._calls.rows if self._calls is not None else 1

    def play(self, turn: int, *, anew: bool) -> None:
        if self.result.error is not None or self._calls is None or turn % self._every:
            return
        try:
            if anew:
                self.leave()
                self._enter()
            done = self._take(self._sizes["first"])
            for phase, size in self._sizes.items():
                self.result.blocks[phase][turn] = self._time(phase, done[:size])
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _time(self, phase: Phase, numbers: Sequence[int]) -> float:
        call, rows = getattr(self._calls, phase), self._rows
        asked: Sequence[Any] = numbers
        if rows > 1:
            asked = [numbers[at : at + rows] for at in range(0, len(numbers), rows)]
        gc.collect()
        spent = self._run(_block(call, asked, self._callers if rows == 1 else 1))
        return float(spent) / len(numbers)

    def _fail(self, error: Exception) -> None:
        self.result.error = f"{type(error).__name__}: {error}".splitlines()[0][:160]

    def leave(self) -> None:
        if self._calls is None:
            return
        self._calls = None
        # Whoever cannot be closed properly has been measured all the same.
        with contextlib.suppress(Exception):
            if hasattr(self._open, "__aexit__"):
                self._run(self._open.__aexit__(None, None, None))
            else:
                self._open.__exit__(None, None, None)


async def _block(call: Callable[[Any], Any], numbers: Sequence[Any], callers: int) -> float:
    if not inspect.iscoroutinefunction(call):
        return _one_by_one(call, numbers)
    if callers == 1:
        return await _one_by_one_async(call, numbers)
    return await _together(call, numbers, callers)


def _one_by_one(call: Callable[[Any], Any], numbers: Sequence[Any]) -> float:
    start = time.perf_counter()
    for number in numbers:
        call(number)
    return time.perf_counter() - start


async def _one_by_one_async(call: Callable[[Any], Any], numbers: Sequence[Any]) -> float:
    start = time.perf_counter()
    for number in numbers:
        await call(number)
    return time.perf_counter() - start


async def _together(call: Callable[[Any], Any], numbers: Sequence[Any], callers: int) -> float:
    """So many callers at once, each taking the next number when it is done with one."""
    left = iter(numbers)

    async def caller() -> None:
        for number in left:
            await call(number)

    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return time.perf_counter() - start


# --- the body -----------------------------------------------------------------------------------


class CheatedError(Exception):
    """A contestant gave a wrong result, or ran the body for a replay."""


class Body:
    """What everybody guards: the same result, and a count of how often it was asked for."""

    def __init__(self) -> None:
        self.runs = 0

    def charge(self, n: int, amount: int) -> dict[str, int]:
        self.runs += 1
        return {"id": n, "amount": amount}

    def check_sync(self, call: Callable[[int], Any]) -> None:
        """Call twice with a number nobody else uses."""
        self._judge([call(-1), call(-1)])

    async def check(self, call: Callable[[int], Any]) -> None:
        self._judge([await call(-1), await call(-1)])

    def _judge(self, answers: list[Any]) -> None:
        if answers != [{"id": -1, "amount": 5}] * 2 or self.runs != 1:
            raise CheatedError(f"two calls gave {answers!r} and ran the body {self.runs} times")
