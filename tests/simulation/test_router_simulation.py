"""The real routers in a simulated world of crashes, pauses, outages and failovers.

A failure names its seed; `python tests/simulation/router_world.py --seed N` shows what happened.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from party_world import Report
from planted_router import PLANTS
from router_world import SOMETIMES, Plan, run_routers

SEEDS = int(os.environ.get("SEMEL_ROUTER_SEEDS", "60"))

# A planted defect must show within this many seeds.
SEEDS_PER_PLANT = 60


def world(seed: int) -> Report:
    """One in three has nothing in it but what is worst."""
    return run_routers(seed, Plan(only_falls=seed % 3 == 0))


def test_everything_published_arrives_once_and_in_order_and_every_fault_was_seen() -> None:
    """What nobody saw was not tested."""
    hits: Counter[str] = Counter()
    for seed in range(SEEDS):
        report = world(seed)
        assert not report.violations, f"seed {seed}: {report.violations[:3]}"
        hits += report.hits
    assert [name for name in SOMETIMES if not hits[name]] == []


def test_a_seed_runs_the_same_way_again() -> None:
    for seed in range(10):
        assert world(seed).digest == world(seed).digest, seed


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    for seed in range(SEEDS_PER_PLANT):
        report = run_routers(seed, PLANTS[name])
        if report.violations:
            print(f"{name}: seed {seed}: {report.violations[0]}")  # noqa: T201
            return
    pytest.fail(f"{name} was not found in {SEEDS_PER_PLANT} seeds: what is checked is too weak")


@pytest.mark.torture
def test_as_many_seeds_as_fit() -> None:
    until = time.monotonic() + 60 * float(os.environ.get("SEMEL_TORTURE_MINUTES", "30")) / 10
    seed = SEEDS
    while time.monotonic() < until:
        report = world(seed)
        assert not report.violations, f"seed {seed}: {report.violations[:3]}"
        seed += 1
    print(f"{seed - SEEDS} worlds")  # noqa: T201
