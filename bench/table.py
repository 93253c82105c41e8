"""What is printed: Markdown tables, the same on the screen and in the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.measure import PHASES, Phase, Result, ratio
from bench.scenarios import Scenario, standing

NOTHING = "–"
WHOLE_US = 100  # from here on, a tenth of a microsecond is noise
TITLES: dict[Phase, str] = {"first": "first call", "replay": "replay"}

HEAD = ("", "µs per call", "best block", "calls/s", "÷ floor", "best peer ÷", "target")


@dataclass(frozen=True)
class Verdict:
    """One target, and whether it was reached."""

    what: str
    target: str
    outcome: str


@dataclass
class Found:
    """What a scenario found: tables, and what they say about the targets."""

    scenario: str
    tables: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "\n\n".join(self.tables)

    @property
    def plain(self) -> dict[str, Any]:
        return {"scenario": self.scenario, **self.figures}

    def judge(self, what: str, target: str, figure: float | None, reached: bool, unit: str) -> None:
        if figure is None:
            self.verdicts.append(Verdict(what, target, "not measured"))
            return
        word = "reached" if reached else "not reached"
        self.verdicts.append(Verdict(what, target, f"{word} ({figure:,.4g}{unit})"))


def rendered(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its columns in line; the first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        first = row[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|" + "|".join([":" + "-" * (widths[0] + 1)] + ["-" * (w + 1) + ":" for w in widths[1:]])
    return "\n".join([line(rows[0]), rule + "|", *map(line, rows[1:])])


# --- one scenario -------------------------------------------------------------------------------


def scenario_tables(scenario: Scenario, results: list[Result]) -> str:
    return "\n\n".join(
        f"### {scenario.title}: {TITLES[phase]}\n\n{_phase_table(scenario, results, phase)}"
        for phase in PHASES
    )


def _phase_table(scenario: Scenario, results: list[Result], phase: Phase) -> str:
    target = scenario.targets.get(phase)
    judged = "" if target is None else f"{target.text}: {target.judge(standing(results, phase))}"
    floors = [r for r in results if r.contestant.role == "floor" and r.has(phase)]
    peers = [r for r in results if r.contestant.role == "peer" and r.has(phase)]
    best = min(peers, key=lambda r: r.median_s(phase), default=None)
    rows: list[Sequence[str]] = [HEAD]
    for result in results:
        figures = _figures(result, floors, best, phase)
        rows.append(
            [_name(result, phase), *figures, judged if result.contestant.role == "us" else ""]
        )
    return rendered(rows) + _footnotes(results, phase)


def _name(result: Result, phase: Phase) -> str:
    contestant = result.contestant
    if contestant.role == "floor":
        return f"floor: {contestant.called(phase)}"
    return f"**{contestant.name}**" if contestant.role == "us" else contestant.name


def _figures(result: Result, floors: list[Result], best: Result | None, phase: Phase) -> list[str]:
    if result.error is not None:
        return ["failed", *[NOTHING] * 4]
    if not result.has(phase):
        return [NOTHING] * 5
    each_s = result.median_s(phase)
    return [
        micros(each_s),
        micros(result.best_s(phase)),
        f"{1 / each_s:,.0f}",
        f"{ratio(result, floors[0], phase):.2f}" if floors else NOTHING,
        f"{ratio(best, result, phase):.2f}" if best else NOTHING,
    ]


def micros(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:,.0f}" if us >= WHOLE_US else f"{us:.1f}"


def _footnotes(results: list[Result], phase: Phase) -> str:
    notes = []
    for result in results:
        name, note = result.contestant.name, result.contestant.note
        if result.error is not None:
            notes.append(f"{name} failed: `{result.error}`")
        elif note:
            notes.append(f"{name}: {note}")
    return "\n\n" + ". ".join(notes) + "." if notes and phase == "first" else ""


def verdicts(scenario: Scenario, results: list[Result]) -> list[Verdict]:
    return [
        Verdict(
            f"{scenario.title}: {TITLES[phase]}",
            target.text,
            target.judge(standing(results, phase)),
        )
        for phase, target in scenario.targets.items()
    ]


def summary(found: Sequence[Verdict]) -> str:
    rows = [("target", "wanted", "measured"), *((v.what, v.target, v.outcome) for v in found)]
    return f"### Targets\n\n{rendered(rows)}"


# --- for other programs, and for the documentation ----------------------------------------------


def plain(scenario: Scenario, results: list[Result]) -> dict[str, Any]:
    """The figures as JSON has them, every block included."""
    return {
        "scenario": scenario.name,
        "results": [
            {
                "name": r.contestant.name,
                "role": r.contestant.role,
                "error": r.error,
                "seconds_per_call": r.blocks,
            }
            for r in results
        ],
        "targets": [vars(v) for v in verdicts(scenario, results)],
    }


def write_docs(path: Path, text: str, of: str = "") -> None:
    """Put the tables where the last ones were; `of` names a scenario with a place of its own."""
    called = f"bench {of}" if of else "bench"
    opening, closing = f"<!-- {called}: begin -->", f"<!-- {called}: end -->"
    page = path.read_text("utf-8")
    before, begin, rest = page.partition(opening)
    _, end, after = rest.partition(closing)
    if not begin or not end:
        raise SystemExit(f"{path} has no place for the tables: {opening} ... {closing}")
    path.write_text(f"{before}{opening}\n\n{text}\n\n{closing}{after}", "utf-8")
