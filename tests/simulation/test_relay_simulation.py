"""The real relays in a simulated world of crashes, pauses, outages and lost tails.

A failure names its seed; `python tests/simulation/relay_world.py --seed N` shows what happened.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from planted_relay import PLANTS
from relay_world import SOMETIMES, run_relays

SEEDS = int(os.environ.get("SEMEL_RELAY_SEEDS", "300"))
CHUNK = 100

# A planted defect must show within this many seeds; the campaign runs as many.
SEEDS_PER_PLANT = 300


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_everything_committed_arrives_once_and_in_order(first: int) -> None:
    for seed in range(first, first + CHUNK):
        report = run_relays(seed)
        assert not report.violations, f"seed {seed}: {report.violations[:3]}"


def test_the_campaign_sees_every_fault_and_every_receipt() -> None:
    """What nobody saw was not tested."""
    hits: Counter[str] = Counter()
    for seed in range(SEEDS):
        hits += run_relays(seed).hits
        if all(hits[name] for name in SOMETIMES):
            return
    pytest.fail(f"never seen: {[name for name in SOMETIMES if not hits[name]]}")


def test_a_seed_runs_the_same_way_again() -> None:
    for seed in range(25):
        assert run_relays(seed).digest == run_relays(seed).digest, seed


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    for seed in range(SEEDS_PER_PLANT):
        report = run_relays(seed, PLANTS[name])
        if report.violations:
            print(f"{name}: seed {seed}: {report.violations[0]}")  # noqa: T201
            return
    pytest.fail(f"{name} was not found in {SEEDS_PER_PLANT} seeds: what is checked is too weak")


def test_every_planted_defect_is_told_of() -> None:
    page = Path(__file__).parents[2] / "docs" / "explanation" / "outbox.md"
    told = page.read_text(encoding="utf-8")
    assert [name for name in PLANTS if f"| {name} |" not in told] == []


@pytest.mark.torture
def test_as_many_seeds_as_fit() -> None:
    until = time.monotonic() + 60 * float(os.environ.get("SEMEL_TORTURE_MINUTES", "30")) / 10
    seed = SEEDS
    while time.monotonic() < until:
        report = run_relays(seed)
        assert not report.violations, f"seed {seed}: {report.violations[:3]}"
        seed += 1
    print(f"{seed - SEEDS} worlds")  # noqa: T201
