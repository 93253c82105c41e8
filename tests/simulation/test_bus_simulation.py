"""The real bus, feed, gateway and client rules in a world that cuts, loses, forgets and freezes.

A failure names its seed; `python tests/simulation/bus_world.py --seed N` shows what happened.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import planted_router
from bus_world import SOMETIMES, run_bus
from party_world import Report
from planted_bus import PLANTS

SEEDS = int(os.environ.get("SEMEL_BUS_SEEDS", "120"))
CHUNK = 60

# A planted defect must show within this many seeds.
SEEDS_PER_PLANT = 100


@functools.cache
def campaign(seed: int) -> Report:
    return replace(run_bus(seed), trace=[])


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_everybody_is_shown_everything_once_and_in_order_or_a_reset(first: int) -> None:
    for seed in range(first, min(SEEDS, first + CHUNK)):
        report = campaign(seed)
        assert not report.violations, f"seed {seed}: {report.violations[:3]}"


def test_the_campaign_sees_every_fault_and_every_ending() -> None:
    """What nobody saw was not tested."""
    hits: Counter[str] = Counter()
    for seed in range(SEEDS):
        hits += campaign(seed).hits
        if all(hits[name] for name in SOMETIMES):
            return
    pytest.fail(f"never seen: {[name for name in SOMETIMES if not hits[name]]}")


def test_a_seed_runs_the_same_way_again() -> None:
    for seed in range(5):
        assert campaign(seed).digest == run_bus(seed).digest, seed


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    """And what is found is the defect: without it, all is well in the same worlds."""
    for seed in range(SEEDS_PER_PLANT):
        report = run_bus(seed, PLANTS[name])
        if report.violations:
            print(f"{name}: seed {seed}: {report.violations[0]}")  # noqa: T201
            healthy = run_bus(seed, PLANTS[name].healthy)
            assert not healthy.violations, f"seed {seed}: {healthy.violations[:3]}"
            return
    pytest.fail(f"{name} was not found in {SEEDS_PER_PLANT} seeds: what is checked is too weak")


def test_every_planted_defect_is_told_of() -> None:
    page = Path(__file__).parents[2] / "docs" / "explanation" / "log.md"
    told = page.read_text(encoding="utf-8")
    planted = [*PLANTS, *planted_router.PLANTS]
    assert [name for name in planted if f"| {name} |" not in told] == []


@pytest.mark.torture
def test_as_many_seeds_as_fit() -> None:
    until = time.monotonic() + 60 * float(os.environ.get("SEMEL_TORTURE_MINUTES", "30")) / 10
    seed = SEEDS
    while time.monotonic() < until:
        report = run_bus(seed)
        assert not report.violations, f"seed {seed}: {report.violations[:3]}"
        seed += 1
    print(f"{seed - SEEDS} worlds")  # noqa: T201
