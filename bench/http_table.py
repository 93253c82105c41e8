"""What the HTTP scenario prints, on the screen and in the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import http_load, http_memory, table
from bench.http_bench import BARE, OURS, PEER, Case, Result, Target, ratios
from bench.http_load import Phase
from bench.http_memory import Taken
from bench.machine import version
from bench.table import NOTHING, Verdict, micros, rendered

TITLES: dict[Phase, str] = {
    "first": "first requests, each with a key of its own",
    "replay": f"replays of {http_load.RECORDED} recorded responses",
    "unkeyed": "requests without a key",
}

HEAD = (
    "",
    "req/s",
    "best round",
    "p50 ms",
    "p99 ms",
    "app's CPU µs",
    "× bare",
    "middle half",
    "× idemkit",
    "target",
)

DISTRIBUTIONS = ("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "idemkit")
FEW = 2  # of which no middle half can be taken


def versions() -> str:
    found = [f"{name} {version(name)}" for name in DISTRIBUTIONS]
    return f"- HTTP: {', '.join(found)}, one worker; wrk {http_load.version()}, one thread"


# --- one case -----------------------------------------------------------------------------------


def case_table(case: Case, results: Sequence[Result]) -> str:
    by_door = {result.door: result for result in results}
    judged = "; ".join(f"{t.text}: {_outcome(t, by_door)}" for t in case.targets)
    rows: list[Sequence[str]] = [HEAD]
    for result in results:
        name = f"**{result.door}**" if result.door == OURS else result.door
        rows.append([name, *_figures(result, by_door), judged if result.door == OURS else ""])
    return "\n\n".join([f"### {title(case)}", rendered(rows), *_failures(results)])


def title(case: Case) -> str:
    many = "one connection" if case.connections == 1 else f"{case.connections} connections"
    return f"HTTP, {case.place}, {many}: {TITLES[case.phase]}"


def _figures(result: Result, by_door: Mapping[str, Result]) -> list[str]:
    if not result.measured:
        return ["failed" if result.error else NOTHING, *[NOTHING] * (len(HEAD) - 3)]
    blocks = result.blocks.values()
    cpu_s = result.median("cpu_each_s")
    to_bare = _ratios(result, by_door[BARE])
    to_peer = _ratios(result, by_door[PEER])
    return [
        f"{statistics.median(b.rate for b in blocks):,.0f}",
        f"{max(b.rate for b in blocks):,.0f}",
        f"{statistics.median(b.p50_s for b in blocks) * 1e3:.2f}",
        f"{statistics.median(b.p99_s for b in blocks) * 1e3:.2f}",
        NOTHING if cpu_s is None else micros(cpu_s),
        f"{statistics.median(to_bare):.2f}" if to_bare else NOTHING,
        _middle_half(to_bare),
        f"{statistics.median(to_peer):.2f}" if to_peer else NOTHING,
    ]


def _ratios(of: Result, to: Result) -> list[float]:
    return ratios(of, to) if of.measured and to.measured else []


def _middle_half(found: list[float]) -> str:
    if len(found) <= FEW:
        return NOTHING
    low, _, high = statistics.quantiles(found, n=4, method="inclusive")
    return f"{low:.2f} to {high:.2f}"


def _outcome(target: Target, by_door: Mapping[str, Result]) -> str:
    found = _ratios(by_door[OURS], by_door[target.whom])
    if not found:
        return "not measured"
    figure = statistics.median(found)
    return f"{'reached' if figure >= target.times else 'not reached'} ({figure:.2f})"


def verdicts(case: Case, results: Sequence[Result]) -> list[Verdict]:
    by_door = {result.door: result for result in results}
    return [Verdict(title(case), t.text, _outcome(t, by_door)) for t in case.targets]


# --- memory -------------------------------------------------------------------------------------


def memory_table(found: Sequence[Taken]) -> str:
    heading = f"### HTTP, Redis: memory per request while {http_memory.CROWD} handlers wait"
    if not found:
        return f"{heading}\n\nThis system does not say how much memory a process has."
    bare = next(taken.median for taken in found if taken.door == BARE)
    rows: list[Sequence[str]] = [("", "bytes each", "more than bare")]
    for taken in found:
        each, name = taken.median, f"**{taken.door}**" if taken.door == OURS else taken.door
        more = NOTHING if each is None or bare is None else f"{each - bare:,.0f}"
        rows.append((name, "failed" if each is None else f"{each:,.0f}", more))
    return "\n\n".join([heading, rendered(rows), *_failures(found)])


def _failures(found: Sequence[Result] | Sequence[Taken]) -> list[str]:
    return [f"{each.door} failed: `{each.error}`." for each in found if each.error is not None]


# --- for other programs, and for the documentation ----------------------------------------------


def plain(found: Mapping[Case, Sequence[Result]], memory: Sequence[Taken]) -> dict[str, Any]:
    """The figures as JSON has them, every block included."""
    return {
        "scenario": "http",
        "cases": [
            {
                "case": asdict(case),
                "results": [asdict(result) for result in results],
                "targets": [vars(verdict) for verdict in verdicts(case, results)],
            }
            for case, results in found.items()
        ],
        "bytes_in_flight": [asdict(taken) for taken in memory],
    }


def write_docs(path: Path, text: str) -> None:
    """Put these tables where the last ones of the HTTP scenario were."""
    table.write_docs(path, text, "http")
