"""Rooms: actions a second beside the bare append, and how long it takes through the door."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import uvloop

from bench import rooms_acts, rooms_play, rooms_poker, rooms_servers
from bench.machine import Machine
from bench.realtime_servers import Missing
from bench.rooms_acts import Rates
from bench.rooms_play import Result, Spread, Turn
from bench.table import NOTHING, Found, rendered

# What is to be reached.
OF_FLOOR = 0.6
ACTION_P95_MS = 15.0
SPECTATORS_P99_MS = 150.0

# Each room acts once a second.
EACH_ROOM_S = 1.0
# It is looked no further where somebody is over this: people notice.
TOO_SLOW_MS = 100.0


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    block_s: float
    turns: int
    rooms: int
    clients: int
    play_s: float
    factors: tuple[int, ...]
    """How many times as many actions a second, to find where it ends."""
    factor_s: float
    spectators: int
    actions: int
    hands: int


USUAL = Effort(
    rounds=7,
    block_s=1.0,
    turns=3,
    rooms=200,
    clients=5,
    play_s=10.0,
    factors=(2, 4, 6, 8, 12, 16),
    factor_s=6.0,
    spectators=1000,
    actions=20,
    hands=40,
)
EFFORTS = {
    "quick": Effort(
        rounds=1,
        block_s=0.2,
        turns=1,
        rooms=20,
        clients=5,
        play_s=2.0,
        factors=(2,),
        factor_s=1.0,
        spectators=100,
        actions=5,
        hands=3,
    ),
    "usual": USUAL,
    "full": replace(USUAL, rounds=21, turns=7, play_s=30.0, actions=40, hands=100),
}


def run(machine: Machine, effort: Effort) -> Iterator[Found]:
    yield Found("rooms", [rooms_servers.versions()])
    yield from _acts(machine, effort)
    with rooms_play.started(rooms_servers.ENTRANTS, machine.empty_redis()) as table:
        yield _played(table, effort)
        yield _faster(table, effort)
        yield _watched(table, effort)
    yield _poker(machine, effort)


# --- without a door -----------------------------------------------------------------------------


def _acts(machine: Machine, effort: Effort) -> Iterator[Found]:
    one, many = "one room", f"{rooms_acts.ROOMS} rooms"
    for store, where, entrants in (
        ("Redis", one, rooms_acts.REDIS_ONE),
        ("Redis", many, rooms_acts.REDIS_MANY),
        ("PostgreSQL", one, rooms_acts.POSTGRES_ONE),
        ("PostgreSQL", many, rooms_acts.POSTGRES_MANY),
    ):
        url = machine.empty_redis() if store == "Redis" else machine.database()
        rates, sample = uvloop.run(
            rooms_acts.run(url, entrants, rounds=effort.rounds, seconds=effort.block_s)
        )
        found, title = Found("rooms"), f"Actions in {where}, {store}"
        sizes = [len(each) for each in (sample.entry, sample.state, sample.reply)]
        note = "An entry of {} bytes, a state of {}, a reply of {}.".format(*sizes)
        found.tables.append(f"### {title}\n\n{_rates_table(rates)}\n\n{note}")
        found.figures[title] = {each.entrant.name: each.by_round for each in rates}
        if store == "Redis":
            _judge_acts(found, title, rates)
        yield found


def _rates_table(rates: Sequence[Rates]) -> str:
    floors = [each for each in rates if each.entrant.role == "floor"]
    letters = "ABC"[: len(floors)]
    rows = [("", "actions/s", "best round", *(f"× floor {letter}" for letter in letters))]
    for n, each in enumerate(rates):
        name = each.entrant.name
        shown = f"floor {letters[n]}: {name}" if each in floors else f"**{name}**"
        ratios = (f"{each.to(floor):.2f}" for floor in floors)
        rows.append((shown, f"{each.median:,.0f}", f"{max(each.by_round):,.0f}", *ratios))
    return rendered(rows)


def _judge_acts(found: Found, title: str, rates: Sequence[Rates]) -> None:
    """By the first floor: the script over the driver that people use."""
    for ours in [each for each in rates if each.entrant.role == "us"]:
        times = ours.to(rates[0])
        what = f"{title}: {ours.entrant.name}"
        found.judge(what, "≥ 0.6 × floor A", times, times >= OF_FLOOR, " ×")


# --- through the door ---------------------------------------------------------------------------


def _played(table: rooms_play.Table, effort: Effort) -> Found:
    rate = effort.rooms / EACH_ROOM_S
    title = f"{effort.rooms} rooms of {effort.clients} clients, {rate:,.0f} actions/s in all"
    play = rooms_play.rooms(effort.rooms, effort.clients, rate, effort.play_s)
    results = rooms_play.take_turns(table, effort.turns, play)
    rows: list[Sequence[str]] = [
        (
            "",
            "answer p50 ms",
            "p95 ms",
            "p99 ms",
            "all told p50 ms",
            "p95 ms",
            "p99 ms",
            "CPU µs each",
            "all in after s",
        )
    ]
    rows += [_row(result, 8, _answers, _all_told, _cpu_us, _join_s) for result in results]
    found = Found("rooms", [f"### {title}\n\n{rendered(rows)}\n\n{_notes(results)}"])
    found.figures[title] = [_plain(result) for result in results]
    for ours in _ours(results):
        p95 = ours.median(lambda turn: _answer(turn).p95) if ours.turns else None
        reached = p95 is not None and p95 <= ACTION_P95_MS
        found.judge(f"{title}: answer", "p95 ≤ 15 ms", p95, reached, " ms")
        p95 = ours.median(lambda turn: turn.last.p95) if ours.turns else None
        reached = p95 is not None and p95 <= ACTION_P95_MS
        found.judge(f"{title}: all told", "p95 ≤ 15 ms", p95, reached, " ms")
    return found


def _faster(table: rooms_play.Table, effort: Effort) -> Found:
    """More and more actions a second, until somebody is too slow for people."""
    rates = [factor * effort.rooms / EACH_ROOM_S for factor in effort.factors]
    title = f"{effort.rooms} rooms of {effort.clients} clients, more actions/s: p95 of all told, ms"
    cells: list[list[str]] = [[] for _ in table]
    found = Found("rooms")
    for rate in rates:
        playing = [
            (result, server if "over" not in column else None)
            for (result, server), column in zip(table, cells, strict=True)
        ]
        play = rooms_play.rooms(effort.rooms, effort.clients, rate, effort.factor_s)
        results = rooms_play.take_turns(playing, 1, play, warm=True)
        for result, column in zip(results, cells, strict=True):
            column.append(_pace(result, is_out="over" in column))
            if column[-1] == "over" or result.error:
                column[-1] = "over"
        found.figures[f"{rate:g} actions/s"] = [_plain(result) for result in results]
    rows = [("", *(f"{rate:,.0f}/s" for rate in rates))]
    rows += [(_shown(result), *column) for (result, _), column in zip(table, cells, strict=True)]
    note = (
        f"In brackets, the server's processor time in % of a core. over: its p95 is over "
        f"{TOO_SLOW_MS:.0f} ms, or something did not come."
    )
    found.tables.append(f"### {title}\n\n{rendered(rows)}\n\n{note}")
    return found


def _pace(result: Result, *, is_out: bool) -> str:
    if is_out or not result.turns:
        return NOTHING if result.missing else "over"
    p95 = result.median(lambda turn: turn.last.p95)
    share = result.median(lambda turn: 100 * turn.cpu_s / turn.seconds)
    return f"{p95:.1f} ({share:.0f} %)" if p95 <= TOO_SLOW_MS else "over"


def _watched(table: rooms_play.Table, effort: Effort) -> Found:
    title = f"One room that {effort.spectators:,} watch, five actions a second"
    play = rooms_play.spectators(effort.spectators, effort.actions)
    results = rooms_play.take_turns(table, effort.turns, play)
    rows: list[Sequence[str]] = [
        ("", "told p50 ms", "p95 ms", "p99 ms", "max ms", "CPU µs each", "all in after s")
    ]
    rows += [_row(result, 6, _told, _cpu_us_each, _join_s) for result in results]
    found = Found("rooms", [f"### {title}\n\n{rendered(rows)}\n\n{_notes(results)}"])
    found.figures[title] = [_plain(result) for result in results]
    for ours in _ours(results):
        p99 = ours.median(lambda turn: turn.each.p99) if ours.turns else None
        reached = p99 is not None and p99 <= SPECTATORS_P99_MS
        found.judge(title, "p99 ≤ 150 ms", p99, reached, " ms")
    return found


def _ours(results: Sequence[Result]) -> Sequence[Result]:
    return [result for result in results if result.entrant.role == "us"]


def _answer(turn: Turn) -> Spread:
    """Where there is no answer but the update, that one."""
    return turn.answer or turn.each


def _answers(result: Result) -> list[str]:
    if any(turn.answer is None for turn in result.turns.values()):
        return [NOTHING] * 3
    return _spread(result, _answer)


def _all_told(result: Result) -> list[str]:
    return _spread(result, lambda turn: turn.last)


def _told(result: Result) -> list[str]:
    each = _spread(result, lambda turn: turn.each)
    return [*each, f"{result.median(lambda turn: turn.each.most):.1f}"]


def _spread(result: Result, of: Callable[[Turn], Spread]) -> list[str]:
    return [
        f"{result.median(figure):.1f}"
        for figure in (
            lambda turn: of(turn).p50,
            lambda turn: of(turn).p95,
            lambda turn: of(turn).p99,
        )
    ]


def _cpu_us(result: Result) -> list[str]:
    return [f"{result.median(lambda turn: turn.cpu_s / turn.actions * 1e6):,.0f}"]


def _cpu_us_each(result: Result) -> list[str]:
    return [f"{result.median(lambda turn: turn.cpu_s / turn.told * 1e6):,.1f}"]


def _join_s(result: Result) -> list[str]:
    return [f"{result.median(lambda turn: turn.join_s):.2f}"]


def _row(result: Result, columns: int, *cells: Any) -> Sequence[str]:
    if not result.turns:
        word = "MISSING" if result.missing else "failed"
        return (_shown(result), word, *[NOTHING] * (columns - 1))
    return (_shown(result), *(cell for each in cells for cell in each(result)))


def _shown(result: Result) -> str:
    name = result.entrant.name
    return {"us": f"**{name}**", "floor": f"floor: {name}"}.get(result.entrant.role, name)


def _notes(results: Sequence[Result]) -> str:
    notes = [f"{r.entrant.name}: {note}" for r in results if (note := r.error or r.entrant.note)]
    return ". ".join(notes) + "."


def _plain(result: Result) -> dict[str, Any]:
    return {
        "name": result.entrant.name,
        "role": result.entrant.role,
        "turns": {turn: asdict(each) for turn, each in result.turns.items()},
        "error": result.error,
    }


# --- rules that are worth the name --------------------------------------------------------------


def _poker(machine: Machine, effort: Effort) -> Found:
    found, title = Found("rooms"), "An action at a poker table of six, Redis"
    rows = [("", "µs", "of it apply", "seven views", "result", "state bytes", "entry bytes")]
    try:
        cost = uvloop.run(rooms_poker.run(machine.empty_redis(), effort.hands))
    except Missing as error:
        print(f"WARNING: no poker is played. {error}", file=sys.stderr)
        rows.append(("**semel, one after another**", "MISSING", *[NOTHING] * 5))
    else:
        parts = (f"{cost.median(part):,.0f}" for part in ("apply", "view", "result"))
        sizes = (f"{cost.state_bytes:,}", f"{cost.entry_median:,.0f}")
        rows.append(("**semel, one after another**", f"{cost.median():,.0f}", *parts, *sizes))
        found.figures["poker"] = asdict(cost)
    found.tables.append(f"### {title}\n\n{rendered(rows)}")
    return found
