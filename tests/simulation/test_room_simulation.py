"""The real rooms, their door and the client rules in a world that cuts, loses, forgets and freezes.

A failure names its seed; `python tests/simulation/room_world.py --seed N` shows what happened.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from campaign import Campaign
from planted_rooms import PLANTS
from room_world import SOMETIMES, run_rooms

CAMPAIGN = Campaign(
    run_rooms,
    seeds=int(os.environ.get("SEMEL_ROOM_SEEDS", "70")),
    sometimes=SOMETIMES,
    plants=PLANTS,
    per_plant=60,
)
CHUNK = 35


@pytest.mark.parametrize("first", range(0, CAMPAIGN.seeds, CHUNK))
def test_every_request_is_done_once_and_everybody_is_shown_what_came_of_it(first: int) -> None:
    CAMPAIGN.check_chunk(first, CHUNK)


def test_the_campaign_sees_every_fault_and_every_answer() -> None:
    CAMPAIGN.check_seen()


def test_a_seed_runs_the_same_way_again() -> None:
    CAMPAIGN.check_repeats(3)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    CAMPAIGN.check_found(name)


def test_every_planted_defect_is_told_of() -> None:
    CAMPAIGN.check_told("rooms.md")


@pytest.mark.torture
def test_as_many_seeds_as_fit() -> None:
    CAMPAIGN.go_on()
