"""The real HTTP door in a simulated world of bad lines, crashes, pauses and lost messages.

A failure names its seed; `python tests/simulation/web_world.py --seed N` shows what happened, and
so does `sql_world.py` for the table.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sql_world
import web_world
from planted_http import PLANTS
from planted_sql import DEFECTS, Careful, Seed
from sql_world import Door

# A planted defect must show within this many seeds; the honest door lives through more of them.
SEEDS_PER_PLANT = 1_000
SEEDS = 1_500
CHUNK = 250


def by(handler: type[Any]) -> Callable[[int], Any]:
    return lambda seed: sql_world.run_seed(seed, handler)


def found(run: Callable[[int], Any], breaks: str) -> int:
    """The first seed under which this promise is seen broken."""
    for seed in range(SEEDS_PER_PLANT):
        told = run(seed).violations
        assert not any("the door itself raised" in each for each in told), "the plant is broken"
        if any(breaks in each for each in told):
            return seed
    pytest.fail(f"not seen in {SEEDS_PER_PLANT} seeds: {breaks}")


# --- the door -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_the_door_keeps_its_promises(first: int) -> None:
    tally = web_world.tally(first, CHUNK)
    assert not tally.violations, tally.violations[:5]


def test_the_campaign_sees_every_fault_and_every_rare_answer() -> None:
    """What nobody saw was not tested; the unavoidable doubles show that faults bite."""
    tally = web_world.Tally()
    while (unseen := _unseen(tally, web_world.SOMETIMES)) and tally.seeds < SEEDS:
        tally.add(web_world.tally(tally.seeds, 100))
    assert not unseen


def _unseen(tally: web_world.Tally, wanted: tuple[str, ...]) -> list[str]:
    return [name for name in wanted if not tally.hits[name]]


@pytest.mark.torture
def test_as_many_seeds_as_fit() -> None:
    until = time.monotonic() + 60 * float(os.environ.get("SEMEL_TORTURE_MINUTES", "30"))
    first = SEEDS
    while time.monotonic() < until:
        for run in (web_world.run_seed, by(Door)):
            tally = web_world.tally(first, CHUNK, run)
            assert not tally.violations, tally.violations[:5]
        first += CHUNK


@pytest.mark.parametrize("name", PLANTS)
def test_a_defect_planted_in_the_door_is_found(name: str) -> None:
    plant, breaks = PLANTS[name]
    found(lambda seed: web_world.run_seed(seed, plant), breaks)


def test_a_seed_runs_the_same_way_again() -> None:
    for seed in range(60):
        assert web_world.run_seed(seed).digest == web_world.run_seed(seed).digest, seed
        first, again = by(Door)(seed), by(Door)(seed)
        assert first.digest == again.digest, seed


def test_what_a_dead_process_leaves_behind_is_dropped_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(40):
            web_world.run_seed(seed)
            by(Door)(seed)
        gc.collect()


# --- a table with transactions ------------------------------------------------------------------


@pytest.mark.parametrize("handler", [Door, Careful])
@pytest.mark.parametrize("first", range(0, SEEDS // 2, CHUNK))
def test_rows_and_response_are_one(handler: type[Any], first: int) -> None:
    """The door with a bound session, and a handler that does all of it by hand."""
    tally = web_world.tally(first, CHUNK, by(handler))
    assert not tally.violations, tally.violations[:5]


def test_the_table_is_seen_under_every_fault() -> None:
    tally = web_world.Tally()
    while (unseen := _unseen(tally, sql_world.SOMETIMES)) and tally.seeds < SEEDS:
        tally.add(web_world.tally(tally.seeds, 50, by(Door)))
        tally.add(web_world.tally(tally.seeds, 50, by(Careful)))
    assert not unseen


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_planted_in_a_careful_handler_is_found(name: str) -> None:
    handler, breaks = DEFECTS[name]
    found(by(handler), breaks)


@pytest.mark.parametrize(
    "breaks",
    [
        "another tenant's response",
        "the response for another payload",
        "answered 500, and nothing had failed",
        "half of a transfer was committed",
        "a duplicate had to wait for the first",
        "a last client was told 500",
    ],
)
def test_the_seeds_own_handler_breaks_it(breaks: str) -> None:
    found(by(Seed), breaks)
