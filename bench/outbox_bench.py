"""From commit to effect: relays, the way an event takes, what it costs its producer, and workers.

Everybody takes turns, block by block, the first one changing each round; a ratio is the median of
the ratios within the rounds. A block is so many events put first and then drained; the slow ones
get fewer of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import outbox_producers, outbox_relays, outbox_sizes, outbox_way, outbox_workers
from bench.machine import Machine
from bench.outbox_relays import Entrant, Open
from bench.table import NOTHING, Found, rendered

# What is to be reached.
RELAYED, TIMES_PEER = 25_000, 8
P50_MS, P99_MS = 10, 50
KEPT_RATE = 0.8
WORKED, TIMES_FASTSTREAM = 3_000, 1.5
GROWN = 1.25

# Longer than the slowest block there is.
BLOCK_WITHIN_S = 120.0


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    events: int
    producing_s: float
    way_s: float
    kept: int
    """Events of the run that shows that tables and streams stay bounded."""


EFFORTS = {
    "quick": Effort(1, 2_000, 0.5, 2.0, 20_000),
    "usual": Effort(7, 20_000, 1.0, 20.0, 2_000_000),
    "full": Effort(11, 20_000, 2.0, 60.0, 4_000_000),
}


@dataclass
class Rates:
    """One entrant's events per second, by round; or why there are none."""

    entrant: Entrant
    by_round: dict[int, float] = field(default_factory=dict)
    error: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.by_round.values()) if self.by_round else None


def ratio(of: Rates, to: Rates) -> float | None:
    both = [of.by_round[turn] / to.by_round[turn] for turn in of.by_round if turn in to.by_round]
    return statistics.median(both) if both else None


def run(machine: Machine, effort: Effort) -> Found:
    found = Found("outbox")
    _relays(found, machine, effort)
    _way(found, machine, effort)
    _producers(found, machine, effort)
    _workers(found, machine, effort)
    _sizes(found, machine, effort)
    return found


# --- turns --------------------------------------------------------------------------------------


async def take_turns(
    entrants: Sequence[Entrant], machine: Machine, effort: Effort, events: int
) -> list[Rates]:
    found = [Rates(entrant) for entrant in entrants]
    url = machine.empty_redis()
    async with contextlib.AsyncExitStack() as stack:
        opened: dict[str, Open] = {}
        for rates in found:
            try:
                place = rates.entrant.open(machine.database(), url)
                opened[rates.entrant.name] = await stack.enter_async_context(place)
            except Exception as error:  # noqa: BLE001 - a peer that does not start is a result
                rates.error = f"{type(error).__name__}: {error}"[:200]
        for turn in range(-1, effort.rounds):
            first = turn % len(found)
            for rates in [*found[first:], *found[:first]]:
                if not rates.error:
                    await _block(rates, opened[rates.entrant.name], events, turn)
    return found


async def _block(rates: Rates, entrant: Open, events: int, turn: int) -> None:
    many = max(50, int(events * rates.entrant.share))
    try:
        await entrant.load(many)
        began = time.perf_counter()
        async with asyncio.timeout(BLOCK_WITHIN_S):
            await entrant.drain(many)
        if turn >= 0:  # the one before pays for connections, scripts and plans
            rates.by_round[turn] = many / (time.perf_counter() - began)
    except Exception as error:  # noqa: BLE001 - as above
        rates.error = f"{type(error).__name__}: {error}"[:200]


def rates_table(title: str, found: Sequence[Rates], floor: Rates, peers: Sequence[Rates]) -> str:
    best = max((p for p in peers if p.median), key=lambda p: p.median or 0, default=None)
    rows: list[Sequence[str]] = [("", "events/s", "best round", "× floor", "× best peer")]
    for rates in found:
        name = f"**{rates.entrant.name}**" if rates.entrant.role == "us" else rates.entrant.name
        if rates.median is None:
            rows.append((name, "failed", *[NOTHING] * 3))
            continue
        to_best = None if best is None else ratio(rates, best)
        rows.append(
            (
                name,
                f"{rates.median:,.0f}",
                f"{max(rates.by_round.values()):,.0f}",
                f"{ratio(rates, floor) or 0:.3f}",
                NOTHING if to_best is None else f"{to_best:.2f}",
            )
        )
    notes = [
        f"{r.entrant.name}: {r.error or r.entrant.note}" for r in found if r.error or r.entrant.note
    ]
    return "\n\n".join([f"### {title}", rendered(rows), ". ".join(notes) + "."])


def _plain(found: Sequence[Rates]) -> list[dict[str, Any]]:
    return [
        {"name": r.entrant.name, "role": r.entrant.role, "rates": r.by_round, "error": r.error}
        for r in found
    ]


# --- the parts ----------------------------------------------------------------------------------


def _relays(found: Found, machine: Machine, effort: Effort) -> None:
    rates = asyncio.run(take_turns(outbox_relays.ENTRANTS, machine, effort, effort.events))
    floor, ours, *others = rates
    peers = [r for r in others if r.entrant.role == "peer"]
    title = "Relay, PostgreSQL to Redis Streams, 200 B"
    found.tables.append(rates_table(title, rates, floor, peers))
    found.figures["relays"] = _plain(rates)
    rate = ours.median
    found.judge(title, "≥ 25,000 events/s", rate, (rate or 0) >= RELAYED, "/s")
    best = max((p for p in peers if p.median), key=lambda p: p.median or 0, default=None)
    times = None if best is None else ratio(ours, best)
    found.judge(title, "≥ 8 × the best peer", times, (times or 0) >= TIMES_PEER, " ×")


def _way(found: Found, machine: Machine, effort: Effort) -> None:
    times = asyncio.run(
        outbox_way.run(machine.database(), machine.empty_redis(), seconds=effort.way_s)
    )
    p50, p99 = (statistics.quantiles(times, n=100)[n] * 1e3 for n in (49, 98))
    title = f"From commit to stream, {outbox_way.RATE} events/s"
    rows = [("", "p50 ms", "p99 ms", "max ms", "events")]
    rows.append(
        ("**semel**", f"{p50:.1f}", f"{p99:.1f}", f"{max(times) * 1e3:.1f}", f"{len(times):,}")
    )
    found.tables.append(f"### {title}\n\n{rendered(rows)}")
    found.figures["way_s"] = times
    found.judge(title, "p50 ≤ 10 ms", p50, p50 <= P50_MS, " ms")
    found.judge(title, "p99 ≤ 50 ms", p99, p99 <= P99_MS, " ms")


def _producers(found: Found, machine: Machine, effort: Effort) -> None:
    for durable in (True, False):
        url = machine.database(durable=durable)
        outbox_producers.prepare(url)
        rates: dict[str, list[float]] = {kind: [] for kind in outbox_producers.KINDS}
        with outbox_producers.clients(url) as clients:
            for turn in range(-1, effort.rounds):
                for kind in outbox_producers.KINDS:
                    rate = clients.rate(kind, effort.producing_s)
                    if turn >= 0:
                        rates[kind].append(rate)
        where = "a disk that is waited for" if durable else "no disk waited for"
        title = f"Producer, {outbox_producers.CLIENTS} clients, {where}"
        kept = {
            kind: statistics.median(a / b for a, b in zip(rates[kind], rates["bare"], strict=True))
            for kind in rates
        }
        rows = [("", "commits/s", "× bare")]
        for kind, name in (
            ("bare", "no event"),
            ("event", "**an event**"),
            ("unordered", "**an unordered event**"),
        ):
            rows.append((name, f"{statistics.median(rates[kind]):,.0f}", f"{kept[kind]:.2f}"))
        found.tables.append(f"### {title}\n\n{rendered(rows)}")
        found.figures[f"producers durable={durable}"] = rates
        if durable:
            found.judge(title, "≥ 0.8 × bare", kept["event"], kept["event"] >= KEPT_RATE, " ×")


def _workers(found: Found, machine: Machine, effort: Effort) -> None:
    entrants = outbox_workers.ENTRANTS
    rates = asyncio.run(take_turns(entrants, machine, effort, effort.events // 2))
    floor, *_ = rates
    peers = [r for r in rates if r.entrant.role == "peer"]
    found.tables.append(rates_table("Workers on a Redis stream", rates, floor, peers))
    found.figures["workers"] = _plain(rates)
    for ours in [r for r in rates if "inbox, a row" in r.entrant.name]:
        title = f"Worker, batches of 100: {ours.entrant.name.removeprefix('semel, inbox, ')}"
        rate, times = ours.median, ratio(ours, peers[0])
        found.judge(title, "≥ 3,000 messages/s", rate, (rate or 0) >= WORKED, "/s")
        found.judge(
            title, "≥ 1.5 × FastStream doing nothing", times, (times or 0) >= TIMES_FASTSTREAM, " ×"
        )


def _sizes(found: Found, machine: Machine, effort: Effort) -> None:
    looks = asyncio.run(
        outbox_sizes.run(machine.database(), machine.empty_redis(), many=effort.kept)
    )
    title = f"Sizes over {effort.kept:,} events"
    rows = [
        ("events published", "rows in event_outbox", "table MiB", "stream entries", "Redis MiB")
    ]
    rows += [
        (
            f"{look.published:,}",
            f"{look.rows:,}",
            f"{look.table_mib:.1f}",
            f"{look.entries:,}",
            f"{look.redis_mib:.1f}",
        )
        for look in looks
    ]
    found.tables.append(f"### {title}\n\n{rendered(rows)}")
    found.figures["sizes"] = [vars(look) for look in looks]
    half = looks[len(looks) // 2]
    grown = looks[-1].table_mib / max(half.table_mib, 0.1)
    found.judge(title, "the second half adds ≤ 25 % to the table", grown, grown <= GROWN, " ×")
