"""From a worker to everybody who watches: fan-out, crowds that are idle or cut, and publishing.

Every part says something of its own, and is printed when it is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from bench import realtime_fanout, realtime_servers
from bench.machine import Machine
from bench.realtime_fanout import Result, ratio
from bench.table import NOTHING, Found, rendered

# What is to be reached.
OF_SSE_STARLETTE, OF_NCHAN = 0.5, 2.0


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    messages: int
    crowds: tuple[int, ...]


EFFORTS = {
    "quick": Effort(1, 5, (100,)),
    "usual": Effort(3, 20, (500, 2000)),
    "full": Effort(7, 40, (500, 2000)),
}


def run(machine: Machine, effort: Effort) -> Iterator[Found]:
    yield from _fanout(machine, effort)


# --- fan-out ------------------------------------------------------------------------------------


def _fanout(machine: Machine, effort: Effort) -> Iterator[Found]:
    entrants = (realtime_servers.FLOOR, *realtime_servers.OURS, *realtime_servers.PEERS)
    with realtime_fanout.started(entrants, machine.empty_redis()) as table:
        for crowd in effort.crowds:
            found = Found("realtime")
            results = realtime_fanout.take_turns(table, crowd, effort.rounds, effort.messages)
            title = f"One message to {crowd:,} subscribers"
            found.tables.append(f"### {title}\n\n{_fanout_table(results)}")
            _judge_fanout(found, title, results)
            found.figures[f"fan-out to {crowd}"] = [
                {
                    "name": r.entrant.name,
                    "role": r.entrant.role,
                    "turns": {turn: asdict(each) for turn, each in r.turns.items()},
                    "error": r.error,
                }
                for r in results
            ]
            yield found


def _fanout_table(results: Sequence[Result]) -> str:
    floor = results[0]
    rows: list[Sequence[str]] = [
        ("", "p50 ms", "p99 ms", "best p99", "max ms", "all in after s", "p99 ÷ floor")
    ]
    for result in results:
        name = result.entrant.name
        shown = {"us": f"**{name}**", "floor": f"floor: {name}"}.get(result.entrant.role, name)
        if not result.turns:
            rows.append((shown, "MISSING" if result.missing else "failed", *[NOTHING] * 5))
            continue
        to_floor = ratio(result, floor, "p99_ms")
        rows.append(
            (
                shown,
                f"{result.median('p50_ms'):.1f}",
                f"{result.median('p99_ms'):.1f}",
                f"{min(turn.p99_ms for turn in result.turns.values()):.1f}",
                f"{max(turn.max_ms for turn in result.turns.values()):.1f}",
                f"{result.median('join_s'):.2f}",
                NOTHING if to_floor is None else f"{to_floor:.2f}",
            )
        )
    notes = [
        f"{r.entrant.name}: {r.error or r.entrant.note}"
        for r in results
        if r.error or r.entrant.note
    ]
    return rendered(rows) + ("\n\n" + ". ".join(notes) + "." if notes else "")


def _judge_fanout(found: Found, title: str, results: Sequence[Result]) -> None:
    by_name = {result.entrant.name: result for result in results}
    for ours in [result for result in results if result.entrant.role == "us"]:
        for peer, most, told in (
            (realtime_servers.SSE_STARLETTE, OF_SSE_STARLETTE, "≤ half of sse-starlette's p99"),
            (realtime_servers.NCHAN_ENTRANT, OF_NCHAN, "≤ 2 × nchan's p99"),
        ):
            times = ratio(ours, by_name[peer.name], "p99_ms")
            what = f"{title}: {ours.entrant.name}"
            found.judge(what, told, times, times is not None and times <= most, " ×")
