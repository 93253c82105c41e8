"""The real bus, feed, gateway and client rules in a world that cuts, loses, forgets and freezes.

A failure names its seed; `python tests/simulation/bus_world.py --seed N` shows what happened.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from bus_world import SOMETIMES, run_bus
from campaign import Campaign
from planted_bus import PLANTS

CAMPAIGN = Campaign(
    run_bus,
    seeds=int(os.environ.get("SEMEL_BUS_SEEDS", "120")),
    sometimes=SOMETIMES,
    plants=PLANTS,
    per_plant=100,
)
CHUNK = 60


@pytest.mark.parametrize("first", range(0, CAMPAIGN.seeds, CHUNK))
def test_everybody_is_shown_everything_once_and_in_order_or_a_reset(first: int) -> None:
    CAMPAIGN.check_chunk(first, CHUNK)


def test_the_campaign_sees_every_fault_and_every_ending() -> None:
    CAMPAIGN.check_seen()


def test_a_seed_runs_the_same_way_again() -> None:
    CAMPAIGN.check_repeats(5)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    CAMPAIGN.check_found(name)


def test_every_planted_defect_is_told_of() -> None:
    CAMPAIGN.check_told("log.md")


@pytest.mark.torture
def test_as_many_seeds_as_fit() -> None:
    CAMPAIGN.go_on()
