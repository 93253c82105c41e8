"""The real workers and inboxes in a simulated world of crashes, freezes, outages and redelivery.

A failure names its seed; `python tests/simulation/worker_world.py --seed N` shows what happened.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from campaign import Campaign
from planted_worker import PLANTS
from worker_world import SOMETIMES, run_workers

CAMPAIGN = Campaign(
    run_workers,
    seeds=int(os.environ.get("SEMEL_RELAY_SEEDS", "100")),
    sometimes=SOMETIMES,
    plants=PLANTS,
    per_plant=100,
)
CHUNK = 50


@pytest.mark.parametrize("first", range(0, CAMPAIGN.seeds, CHUNK))
def test_everything_published_has_its_effect_in_order_or_waits_for_people(first: int) -> None:
    CAMPAIGN.check_chunk(first, CHUNK)


def test_the_campaign_sees_every_fault_and_every_ending() -> None:
    CAMPAIGN.check_seen()


def test_a_seed_runs_the_same_way_again() -> None:
    CAMPAIGN.check_repeats(5)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    CAMPAIGN.check_found(name)


def test_every_planted_defect_is_told_of() -> None:
    CAMPAIGN.check_told("outbox.md")


@pytest.mark.torture
def test_as_many_seeds_as_fit() -> None:
    CAMPAIGN.go_on()
