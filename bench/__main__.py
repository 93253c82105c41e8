"""`python -m bench`: measure, and print what was found. `make bench` sets everything up first."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import http_load, http_table, machine, table
from bench.measure import Effort
from bench.scenarios import SCENARIOS

DOCS = machine.ROOT / "docs" / "explanation" / "speed.md"

QUICK = Effort(rounds=3, block_s=0.02)
USUAL = Effort(rounds=15, block_s=0.06)
FULL = Effort(rounds=41, block_s=0.1)

VOLUME, HTTP, OUTBOX, REALTIME, ROOMS = "volume", "http", "outbox", "realtime", "rooms"


def main() -> int:
    names = [scenario.name for scenario in SCENARIOS] + [VOLUME, HTTP, OUTBOX, REALTIME, ROOMS]
    wishes = _parsed(names)
    chosen = wishes.scenarios or names
    alone = ([HTTP], [OUTBOX], [REALTIME], [ROOMS])
    if wishes.write_docs and (wishes.quick or wishes.scenarios not in ([], *alone)):
        raise SystemExit(
            "--write-docs needs every scenario, or http, outbox, realtime or rooms, and not --quick"
        )
    if HTTP in chosen:
        http_load.wrk()  # missing, it is better missed now than after ten minutes
    report = Report(_facts())
    with machine.Machine(wishes.disk) as places:
        for scenario in SCENARIOS:
            if scenario.name in chosen:
                report.add_scenario(scenario, places, _effort(wishes))
        if VOLUME in chosen:
            report.add_volume(places, wishes)
        if HTTP in chosen:
            report.add_http(places, wishes)
        if OUTBOX in chosen:
            report.add_outbox(places, wishes)
        if REALTIME in chosen:
            report.add_realtime(places, wishes)
        if ROOMS in chosen:
            report.add_rooms(places, wishes)
    report.close(wishes)
    return 0


def _parsed(names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="scenario", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="does it run? the figures are noise")
    parser.add_argument("--full", action="store_true", help="four times as long")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every block, for programs")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="a folder on the disk to measure")
    parser.add_argument(
        "--write-docs", action="store_true", help=f"replace the tables in {DOCS.name}"
    )
    wishes = parser.parse_args()
    if unknown := set(wishes.scenarios) - set(names):
        parser.error(f"no scenario is called {', '.join(sorted(unknown))}: {', '.join(names)}")
    return wishes


def _effort(wishes: argparse.Namespace) -> Effort:
    if wishes.quick:
        return QUICK
    return FULL if wishes.full else USUAL


def _facts() -> str:
    busy = machine.load()
    if busy > machine.QUIET_LOAD:
        print(
            f"WARNING: the load is {busy:.2f}. Something else is running here, and these figures "
            f"will be about that. Wait until it is below {machine.QUIET_LOAD}.",
            file=sys.stderr,
        )
    return "\n".join(f"- {name}: {value}" for name, value in machine.facts().items())


class Part:
    """Tables and targets that have a place of their own in the documentation."""

    def __init__(self, write: Callable[[Path, str], None]) -> None:
        self.write = write
        self.text: list[str] = []
        self.verdicts: list[table.Verdict] = []

    def say(self, text: str) -> None:
        self.text.append(text)
        print(text, end="\n\n", flush=True)


class Report:
    """What has been found so far, printed as it comes."""

    def __init__(self, facts: str) -> None:
        self._facts = facts
        self._guards = Part(table.write_docs)
        self._http = Part(http_table.write_docs)
        self._outbox = Part(functools.partial(table.write_docs, of=OUTBOX))
        self._realtime = Part(functools.partial(table.write_docs, of=REALTIME))
        self._rooms = Part(functools.partial(table.write_docs, of=ROOMS))
        self._plain: list[Any] = []
        self._disturbed: list[str] = []
        self._start = time.monotonic()
        print(facts, end="\n\n", flush=True)

    def add_scenario(self, scenario: Any, places: machine.Machine, effort: Effort) -> None:
        others = machine.Others()
        results = scenario.run(places, effort)
        self._guards.say(table.scenario_tables(scenario, results))
        self._note(self._guards, scenario.title, others)
        self._guards.verdicts += table.verdicts(scenario, results)
        self._plain.append(table.plain(scenario, results))

    def add_volume(self, places: machine.Machine, wishes: argparse.Namespace) -> None:
        from bench import volume

        others = machine.Others()
        found = volume.run(places, volume.SIZES[_size(wishes)])
        self._guards.say(found.text)
        self._note(self._guards, "Volume", others)
        self._guards.verdicts += found.verdicts
        self._plain.append(found.plain)

    def add_http(self, places: machine.Machine, wishes: argparse.Namespace) -> None:
        from bench import http_bench, http_memory

        others, effort = machine.Others(), http_bench.EFFORTS[_size(wishes)]
        self._http.say(http_table.versions())
        found = {}
        for case, results in http_bench.run(places, effort):
            self._http.say(http_table.case_table(case, results))
            self._http.verdicts += http_table.verdicts(case, results)
            found[case] = results
        memory = http_memory.run(places.empty_redis(), effort.crowds)
        self._http.say(http_table.memory_table(memory))
        self._note(self._http, "HTTP", others)
        self._plain.append(http_table.plain(found, memory))

    def add_outbox(self, places: machine.Machine, wishes: argparse.Namespace) -> None:
        from bench import outbox_bench

        others = machine.Others()
        found = outbox_bench.run(places, outbox_bench.EFFORTS[_size(wishes)])
        self._outbox.say(found.text)
        self._note(self._outbox, "Outbox", others)
        self._outbox.verdicts += found.verdicts
        self._plain.append(found.plain)

    def add_realtime(self, places: machine.Machine, wishes: argparse.Namespace) -> None:
        from bench import realtime_bench

        others = machine.Others()
        for found in realtime_bench.run(places, realtime_bench.EFFORTS[_size(wishes)]):
            self._realtime.say(found.text)
            self._realtime.verdicts += found.verdicts
            self._plain.append(found.plain)
        self._note(self._realtime, "Realtime", others)

    def add_rooms(self, places: machine.Machine, wishes: argparse.Namespace) -> None:
        from bench import rooms_bench

        others = machine.Others()
        for found in rooms_bench.run(places, rooms_bench.EFFORTS[_size(wishes)]):
            self._rooms.say(found.text)
            self._rooms.verdicts += found.verdicts
            self._plain.append(found.plain)
        self._note(self._rooms, "Rooms", others)

    @property
    def _parts(self) -> tuple[Part, ...]:
        return self._guards, self._http, self._outbox, self._realtime, self._rooms

    def _note(self, part: Part, title: str, others: machine.Others) -> None:
        cores = others.cores()
        if cores is None:
            return
        part.say(f"Other processes used {cores:.2f} cores meanwhile.")
        if cores > machine.QUIET_CORES:
            self._disturbed.append(title)

    def close(self, wishes: argparse.Namespace) -> None:
        for part in self._parts:
            if part.verdicts:
                part.say(table.summary(part.verdicts))
        if wishes.json:
            wishes.json.write_text(json.dumps({"facts": machine.facts(), "found": self._plain}))
        print(f"{time.monotonic() - self._start:.0f} s; load now {machine.load():.2f}")
        if wishes.write_docs:
            self._write_docs()

    def _write_docs(self) -> None:
        if self._disturbed:
            raise SystemExit(
                f"{DOCS.name} was left as it is: other processes used more than "
                f"{machine.QUIET_CORES} cores during {'; '.join(self._disturbed)}"
            )
        for part in self._parts:
            if part.text:
                part.write(DOCS, "\n\n".join([self._facts, *part.text]))


def _size(wishes: argparse.Namespace) -> str:
    return "quick" if wishes.quick else "full" if wishes.full else "usual"


if __name__ == "__main__":
    sys.exit(main())
