"""The real routers in a simulated world of crashes, pauses, outages and failovers.

A failure names its seed; `python tests/simulation/router_world.py --seed N` shows what happened.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from campaign import Campaign
from party_world import Report
from planted_router import PLANTS
from router_world import SOMETIMES, Plan, run_routers


def world(seed: int, plan: Plan | None = None) -> Report:
    """One in three of the healthy ones has nothing in it but what is worst."""
    return run_routers(seed, plan or Plan(only_falls=seed % 3 == 0))


CAMPAIGN = Campaign(
    world,
    seeds=int(os.environ.get("SEMEL_ROUTER_SEEDS", "60")),
    sometimes=SOMETIMES,
    plants=PLANTS,
    per_plant=60,
)
CHUNK = 30


@pytest.mark.parametrize("first", range(0, CAMPAIGN.seeds, CHUNK))
def test_everything_published_arrives_once_and_in_order(first: int) -> None:
    CAMPAIGN.check_chunk(first, CHUNK)


def test_the_campaign_sees_every_fault_and_every_ending() -> None:
    CAMPAIGN.check_seen()


def test_a_seed_runs_the_same_way_again() -> None:
    CAMPAIGN.check_repeats(10)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    CAMPAIGN.check_found(name)


def test_every_planted_defect_is_told_of() -> None:
    CAMPAIGN.check_told("log.md")


@pytest.mark.torture
def test_as_many_seeds_as_fit() -> None:
    CAMPAIGN.go_on()
