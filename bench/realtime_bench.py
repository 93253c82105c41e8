"""From a worker to everybody who watches: fan-out, crowds that are idle or cut, and publishing.

Every part says something of its own, and is printed when it is done.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench import (
    realtime_browser,
    realtime_fanout,
    realtime_idle,
    realtime_publish,
    realtime_resync,
    realtime_servers,
)
from bench.machine import Machine
from bench.realtime_fanout import Result, ratio
from bench.realtime_idle import Idle
from bench.realtime_servers import Missing
from bench.table import NOTHING, Found, rendered

# What is to be reached.
OF_SSE_STARLETTE, OF_NCHAN = 0.5, 2.0
IDLE_BYTES, IDLE_STREAMS, IDLE_SHARE = 20_000, 1000, 0.02
BACK_P95_S = 3.0
OF_SCRIPT, AT_ONCE, PUBLISHED = 0.8, 100, 15_000
BROWSER_P50_MS = 10.0

FANOUT_HEAD = (
    "",
    "p50 ms",
    "p99 ms",
    "best p99",
    "max ms",
    "p99 ÷ floor",
    "CPU µs each",
    "all in after s",
)


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    messages: int
    crowds: tuple[int, ...]
    idle: int
    """Connections."""
    idle_s: float
    cut: int
    subjects: int
    publishing: int
    """Rounds."""
    publishing_s: float
    shown: int
    """Messages to a browser."""


USUAL = Effort(
    rounds=3,
    messages=20,
    crowds=(500, 2000),
    idle=10_000,
    idle_s=20.0,
    cut=2000,
    subjects=20,
    publishing=7,
    publishing_s=1.0,
    shown=100,
)
EFFORTS = {
    "quick": Effort(
        rounds=1,
        messages=5,
        crowds=(100,),
        idle=300,
        idle_s=1.0,
        cut=100,
        subjects=5,
        publishing=1,
        publishing_s=0.3,
        shown=10,
    ),
    "usual": USUAL,
    "full": replace(USUAL, rounds=7, messages=40, idle_s=60.0, publishing=15, shown=300),
}


def run(machine: Machine, effort: Effort) -> Iterator[Found]:
    yield from _fanout(machine, effort)
    yield _idle(machine, effort)
    yield _resync(machine, effort)
    yield _publish(machine, effort)
    yield _browser(machine, effort)


def _percentile(found: Sequence[float], of: int) -> float:
    return statistics.quantiles(found, n=100)[of - 1]


# --- fan-out ------------------------------------------------------------------------------------


def _fanout(machine: Machine, effort: Effort) -> Iterator[Found]:
    yield Found("realtime", [realtime_servers.versions()])
    entrants = (realtime_servers.FLOOR, *realtime_servers.OURS, *realtime_servers.PEERS)
    with realtime_fanout.started(entrants, machine.empty_redis()) as table:
        for crowd in effort.crowds:
            found = Found("realtime")
            results = realtime_fanout.take_turns(table, crowd, effort.rounds, effort.messages)
            title = f"One message to {crowd:,} subscribers"
            found.tables.append(f"### {title}\n\n{_fanout_table(results)}")
            _judge_fanout(found, title, results)
            found.figures[f"fan-out to {crowd}"] = [_plain(result) for result in results]
            yield found


def _fanout_table(results: Sequence[Result]) -> str:
    rows: list[Sequence[str]] = [FANOUT_HEAD]
    for result in results:
        if not result.turns:
            word = "MISSING" if result.missing else "failed"
            rows.append((_shown(result), word, *[NOTHING] * 6))
            continue
        to_floor = ratio(result, results[0], "p99_ms")
        rows.append(
            (
                _shown(result),
                f"{result.median('p50_ms'):.1f}",
                f"{result.median('p99_ms'):.1f}",
                f"{min(turn.p99_ms for turn in result.turns.values()):.1f}",
                f"{max(turn.max_ms for turn in result.turns.values()):.1f}",
                NOTHING if to_floor is None else f"{to_floor:.2f}",
                f"{result.median('cpu_us'):.1f}",
                f"{result.median('join_s'):.2f}",
            )
        )
    notes = [f"{r.entrant.name}: {note}" for r in results if (note := r.error or r.entrant.note)]
    return rendered(rows) + "\n\n" + ". ".join(notes) + "."


def _shown(result: Result) -> str:
    name = result.entrant.name
    return {"us": f"**{name}**", "floor": f"floor: {name}"}.get(result.entrant.role, name)


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


def _plain(result: Result) -> dict[str, Any]:
    return {
        "name": result.entrant.name,
        "role": result.entrant.role,
        "turns": {turn: asdict(each) for turn, each in result.turns.items()},
        "error": result.error,
    }


# --- idle ---------------------------------------------------------------------------------------


def _idle(machine: Machine, effort: Effort) -> Found:
    """Many connections to some streams, and some connections to as many streams."""
    found, redis = Found("realtime"), machine.empty_redis()
    streams = min(IDLE_STREAMS, effort.idle)
    looks = {}
    for name, connections in (("crowd", effort.idle), ("streams", streams)):
        known = realtime_idle.jobs(redis, streams)
        with realtime_servers.gateway(redis) as server:
            seats = realtime_idle.seats(server.port, known, connections)
            looks[name] = realtime_idle.run(server, seats, seconds=effort.idle_s)
    rows = [("", "connections", "streams", "KB each", "CPU, % of a core", "all in after s")]
    rows += [_idle_row("**semel gateway, Redis**", look) for look in looks.values()]
    for entrant in (realtime_servers.FLOOR, *realtime_servers.PEERS[:2]):
        rows.append(_idle_peer(entrant, redis, effort))
    found.tables.append(f"### Connections on which nothing happens\n\n{rendered(rows)}")
    found.figures["idle"] = {name: asdict(look) for name, look in looks.items()}
    crowd, many = looks["crowd"], looks["streams"]
    found.judge(
        f"{crowd.connections:,} idle connections",
        "≤ 20 KB each",
        crowd.bytes_each / 1000,
        crowd.bytes_each <= IDLE_BYTES,
        " KB",
    )
    share = many.cpu_share
    found.judge(f"{many.streams:,} idle streams", "< 2 %", 100 * share, share < IDLE_SHARE, " %")
    return found


def _idle_row(name: str, look: Idle) -> tuple[str, ...]:
    return (
        name,
        f"{look.connections:,}",
        f"{look.streams:,}",
        f"{look.bytes_each / 1000:.1f}",
        f"{100 * look.cpu_share:.2f}",
        f"{look.join_s:.1f}",
    )


def _idle_peer(entrant: realtime_servers.Entrant, redis: str, effort: Effort) -> tuple[str, ...]:
    name = f"floor: {entrant.name}" if entrant.role == "floor" else entrant.name
    try:
        running = entrant.start(redis)
        try:
            with running.place() as (seat, _):
                look = realtime_idle.run(
                    running.server, [seat] * effort.idle, seconds=min(5.0, effort.idle_s)
                )
        finally:
            running.stop()
    except Missing as error:
        print(f"WARNING: {entrant.name} is not measured. {error}", file=sys.stderr)
        return name, "MISSING", *[NOTHING] * 4
    except Exception as error:  # noqa: BLE001 - a peer that cannot is a result
        print(f"WARNING: {entrant.name} failed. {error}", file=sys.stderr)
        return name, "failed", *[NOTHING] * 4
    return _idle_row(name, look)


# --- everybody comes back -----------------------------------------------------------------------


def _resync(machine: Machine, effort: Effort) -> Found:
    found, redis = Found("realtime"), machine.empty_redis()
    rows = [("", "p50 s", "p95 s", "max s", "sent away", "told the state", "snapshots read")]
    title = f"{effort.cut:,} clients cut at once, {effort.subjects} subjects"
    with (
        realtime_servers.app("semel", redis) as one,
        realtime_servers.app("semel", redis) as other,
    ):
        for name, to in (("to the same gateway", None), ("to another one, all trimmed", other)):
            back = realtime_resync.run(
                one, redis, connections=effort.cut, streams=effort.subjects, to=to
            )
            p50, p95 = (_percentile(back.took_s, n) for n in (50, 95))
            rows.append(
                (
                    f"**{name}**",
                    f"{p50:.2f}",
                    f"{p95:.2f}",
                    f"{max(back.took_s):.2f}",
                    f"{back.sent_away:,}",
                    f"{back.resets:,}",
                    f"{back.snapshots:,}",
                )
            )
            found.figures[f"back {name}"] = asdict(back)
            what = f"{title}: {name}"
            found.judge(what, "p95 ≤ 3 s", p95, p95 <= BACK_P95_S, " s")
            few = back.snapshots <= back.streams
            found.judge(what, f"≤ {back.streams} snapshots read", back.snapshots, few, "")
    found.tables.append(f"### {title}\n\n{rendered(rows)}")
    return found


# --- publishing ---------------------------------------------------------------------------------


def _publish(machine: Machine, effort: Effort) -> Found:
    found, redis = Found("realtime"), machine.empty_redis()
    for at_once in (1, AT_ONCE):
        rates = asyncio.run(
            realtime_publish.run(
                redis, at_once=at_once, rounds=effort.publishing, seconds=effort.publishing_s
            )
        )
        who = "one publisher" if at_once == 1 else f"{at_once} publishers at once"
        title = f"Publishing, {who}"
        floor, ours = rates.values()
        rows = [("", "events/s", "best round", "× floor")]
        rows += [
            (
                name,
                f"{each.median:,.0f}",
                f"{max(each.by_round):,.0f}",
                f"{realtime_publish.ratio(each, floor):.2f}",
            )
            for name, each in rates.items()
        ]
        found.tables.append(f"### {title}\n\n{rendered(rows)}")
        found.figures[title] = {name: each.by_round for name, each in rates.items()}
        if at_once == 1:
            times = realtime_publish.ratio(ours, floor)
            found.judge(title, "≥ 0.8 × the bare script", times, times >= OF_SCRIPT, " ×")
        else:
            rate = ours.median
            found.judge(title, "≥ 15,000 events/s", rate, rate >= PUBLISHED, "/s")
    return found


# --- to a browser -------------------------------------------------------------------------------


def _browser(machine: Machine, effort: Effort) -> Found:
    found, title = Found("realtime"), "From publishing to a page in Chromium"
    p50: float | None = None
    rows = [("", "p50 ms", "p99 ms", "max ms", "messages")]
    running = realtime_servers.OURS[0].start(machine.empty_redis())
    try:
        took = realtime_browser.run(running, effort.shown)
        p50, p99 = (_percentile(took, n) for n in (50, 99))
        shown = (f"{p50:.1f}", f"{p99:.1f}", f"{max(took):.1f}", f"{len(took):,}")
        rows.append(("**semel gateway, Redis**", *shown))
        found.figures["browser_ms"] = took
    except Missing as error:
        print(f"WARNING: nothing is measured in a browser. {error}", file=sys.stderr)
        rows.append(("**semel gateway, Redis**", "MISSING", *[NOTHING] * 3))
    finally:
        running.stop()
    found.tables.append(f"### {title}\n\n{rendered(rows)}")
    found.judge(title, "p50 ≤ 10 ms", p50, p50 is not None and p50 <= BROWSER_P50_MS, " ms")
    return found
