"""What is asked of every simulated world: nothing wrong, everything seen, every defect found."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from party_world import Report

PAGES = Path(__file__).parents[2] / "docs" / "explanation"


class Campaign:
    """Worlds by their seeds. `run(seed)` is a healthy one, `run(seed, plan)` one with a defect.

    A defect must show within `per_plant` seeds. `sometimes` names what some world must have seen.
    """

    def __init__(
        self,
        run: Callable[..., Report],
        *,
        seeds: int,
        sometimes: Iterable[str],
        plants: Mapping[str, Any],
        per_plant: int,
    ) -> None:
        self.seeds = seeds
        self._run = run
        self._sometimes = tuple(sometimes)
        self._plants = plants
        self._per_plant = per_plant
        self._reports: dict[int, Report] = {}

    def report(self, seed: int) -> Report:
        if seed not in self._reports:
            self._reports[seed] = replace(self._run(seed), trace=[])
        return self._reports[seed]

    def check(self, seeds: Iterable[int]) -> None:
        for seed in seeds:
            report = self.report(seed)
            assert not report.violations, f"seed {seed}: {report.violations[:3]}"

    def check_chunk(self, first: int, size: int) -> None:
        self.check(range(first, min(self.seeds, first + size)))

    def check_seen(self) -> None:
        """What nobody saw was not tested."""
        hits: Counter[str] = Counter()
        for seed in range(self.seeds):
            hits += self.report(seed).hits
            if all(hits[name] for name in self._sometimes):
                return
        pytest.fail(f"never seen: {[name for name in self._sometimes if not hits[name]]}")

    def check_repeats(self, seeds: int) -> None:
        for seed in range(seeds):
            assert self.report(seed).digest == self._run(seed).digest, seed

    def check_found(self, name: str) -> None:
        """And what is found is the defect: without it, all is well in the same world."""
        plan = self._plants[name]
        for seed in range(self._per_plant):
            report = self._run(seed, plan)
            if report.violations:
                print(f"{name}: seed {seed}: {report.violations[0]}")  # noqa: T201
                healthy = self._run(seed, plan.healthy)
                assert not healthy.violations, f"seed {seed}: {healthy.violations[:3]}"
                return
        pytest.fail(f"{name} was not found in {self._per_plant} seeds: what is checked is too weak")

    def check_told(self, page: str) -> None:
        told = (PAGES / page).read_text(encoding="utf-8")
        assert [name for name in self._plants if f"| {name} |" not in told] == []

    def go_on(self) -> None:
        """With worlds that nobody has seen yet, for a tenth of what torture takes."""
        until = time.monotonic() + 60 * float(os.environ.get("SEMEL_TORTURE_MINUTES", "30")) / 10
        seed = self.seeds
        while time.monotonic() < until:
            report = self._run(seed)
            assert not report.violations, f"seed {seed}: {report.violations[:3]}"
            seed += 1
        print(f"{seed - self.seeds} worlds")  # noqa: T201
