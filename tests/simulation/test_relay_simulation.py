"""The real relays in a simulated world of crashes, pauses, outages and lost tails.

A failure names its seed; `python tests/simulation/relay_world.py --seed N` shows what happened.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from campaign import Campaign
from planted_relay import PLANTS
from relay_world import SOMETIMES, run_relays

CAMPAIGN = Campaign(
    run_relays,
    seeds=int(os.environ.get("SEMEL_RELAY_SEEDS", "300")),
    sometimes=SOMETIMES,
    plants=PLANTS,
    per_plant=300,
)
CHUNK = 100


@pytest.mark.parametrize("first", range(0, CAMPAIGN.seeds, CHUNK))
def test_everything_committed_arrives_once_and_in_order(first: int) -> None:
    CAMPAIGN.check_chunk(first, CHUNK)


def test_the_campaign_sees_every_fault_and_every_ending() -> None:
    CAMPAIGN.check_seen()


def test_a_seed_runs_the_same_way_again() -> None:
    CAMPAIGN.check_repeats(25)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    CAMPAIGN.check_found(name)


def test_every_planted_defect_is_told_of() -> None:
    CAMPAIGN.check_told("outbox.md")


@pytest.mark.torture
def test_as_many_seeds_as_fit() -> None:
    CAMPAIGN.go_on()
