"""The real guard in a simulated world of crashes, pauses, cuts and lost messages.

A failure names its seed; `python -m semel.testing.simulator --seed N --trace` shows what happened.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from planted import PLANTS

from semel.testing import scenario
from semel.testing.promises import DOUBLES_HAPPEN
from semel.testing.scenario import SOMETIMES, run_scenario
from semel.testing.simulator import DeadlockError, Host, LivelockError, SimLoop, main

SEEDS = 10_000
CHUNK = 2_500

# A planted defect must show within this many seeds; the campaign runs more than twice as many.
SEEDS_PER_PLANT = 8_000


# --- the campaign -------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_the_guard_keeps_its_promises(first: int) -> None:
    tally = scenario.tally(first, CHUNK)
    assert not tally.violations, tally.told(1.0)
    doubles = {name for name in tally.hits if name.startswith("double ")}
    assert doubles <= {f"double {crash}/{to}" for crash, to in DOUBLES_HAPPEN}


def test_the_campaign_sees_every_fault_and_every_rare_branch() -> None:
    """What nobody saw was not tested; the unavoidable doubles show that faults bite."""
    tally = scenario.Tally()
    while tally.never_seen() and tally.seeds < SEEDS:
        tally.add(scenario.tally(tally.seeds, 250))
    assert not tally.never_seen()


@pytest.mark.parametrize("first", [0, 100, 200])
def test_a_seed_runs_the_same_way_again(first: int) -> None:
    for seed in range(first, first + 100):
        assert run_scenario(seed).digest == run_scenario(seed).digest, seed


@pytest.mark.torture
def test_as_many_seeds_as_fit() -> None:
    minutes = os.environ.get("SEMEL_TORTURE_MINUTES", "30")
    assert main(["--seeds", "1000000", "--first", str(SEEDS), "--minutes", minutes]) == 0


# --- planted defects ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    for seed in range(SEEDS_PER_PLANT):
        report = run_scenario(seed, PLANTS[name])
        if report.violations:
            assert "call ended with" not in report.violations[0], "the plant itself is broken"
            print(f"{name}: seed {seed}: {report.violations[0]}")  # noqa: T201
            return
    pytest.fail(f"{name} was not found in {SEEDS_PER_PLANT} seeds: what is checked is too weak")


# --- the simulator itself -----------------------------------------------------------------------


def test_time_passes_only_when_nothing_else_can_happen() -> None:
    loop = SimLoop(1)

    async def sleeper() -> float:
        await asyncio.sleep(3600)
        return loop.time()

    assert loop.run(sleeper()) == 3600


def test_the_order_of_what_is_ready_depends_on_the_seed() -> None:
    def order(seed: int) -> tuple[int, ...]:
        ran: list[int] = []

        async def run(number: int) -> None:
            ran.append(number)

        async def all_of_them() -> None:
            await asyncio.gather(*(run(number) for number in range(4)))

        SimLoop(seed).run(all_of_them())
        return tuple(ran)

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(50)}) > 10


def test_a_dead_host_runs_no_cleanup() -> None:
    loop, host, ran = SimLoop(1), Host("a"), []

    async def work() -> None:
        try:
            await asyncio.sleep(1)
        finally:
            ran.append("cleanup")

    async def crash() -> None:
        loop.spawn(host, work())
        await asyncio.sleep(0.5)
        host.dead = True
        await asyncio.sleep(10)
        assert ran == []

    loop.run(crash())


def test_what_a_dead_host_leaves_behind_is_dropped_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(60):
            run_scenario(seed)
        gc.collect()


def test_a_paused_host_goes_on_later() -> None:
    loop, host = SimLoop(1), Host("a")

    async def work() -> float:
        await asyncio.sleep(1)
        return loop.clock_s

    async def pause() -> float:
        task = loop.spawn(host, work())
        await asyncio.sleep(0.5)
        host.paused_until = 5.0
        return await task

    assert loop.run(pause()) == 5.0


def test_a_host_has_its_own_clock() -> None:
    loop, host = SimLoop(1), Host("slow")
    host.offset, host.rate = 100.0, 0.5

    async def work() -> tuple[float, float]:
        await asyncio.sleep(1)
        return loop.time(), loop.clock_s

    async def outside() -> tuple[float, float]:
        return await loop.spawn(host, work())

    assert loop.run(outside()) == (101.0, 2.0)


def test_nobody_left_to_run_is_a_deadlock() -> None:
    loop = SimLoop(1)

    async def wait() -> None:
        await loop.create_future()

    with pytest.raises(DeadlockError):
        loop.run(wait())


def test_going_round_in_circles_is_a_livelock() -> None:
    async def circle() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0.1)

    with pytest.raises(LivelockError):
        SimLoop(1, budget=100).run(circle())


def test_one_seed_can_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--trace"]) == 0
    told = capsys.readouterr().out
    assert "Claiming" in told
    assert "seed 3: all promises kept" in told


def test_a_campaign_says_what_it_never_saw(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--jobs", "1"]) == 1
    told = capsys.readouterr().out
    assert "2 scenarios" in told
    assert f"NEVER SEEN: {SOMETIMES[-1]}" in told
