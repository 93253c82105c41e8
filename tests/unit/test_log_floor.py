"""Whoever keeps no cursor of its own goes on from the floor: everything that nobody has trimmed.

So what is trimmed must be what was read.
"""

from __future__ import annotations

import pytest

from semel.colour import ASYNC
from semel.entries import Keep
from semel.stores import MemoryStore
from semel.testing.clock import FakeClock

CLOCK = FakeClock()


@pytest.fixture
def log():
    return MemoryStore(clock=CLOCK).log(ASYNC)


async def fill(log, count, **how):
    for n in range(1, count + 1):
        await log.append("s", b"%d" % n, id=str(n), **how)


async def test_where_nothing_was_trimmed_the_floor_is_the_beginning(log):
    assert (await log.read("s")).floor is None
    await fill(log, 3)
    assert (await log.read("s")).floor is None


async def test_reading_behind_the_floor_gives_everything_that_is_kept(log):
    await fill(log, 5)
    await log.trim("s", 2)
    page = await log.read("s")
    assert page.lost
    kept = await log.read("s", page.floor)
    assert [entry.data for entry in kept.entries] == [b"3", b"4", b"5"]
    assert kept.floor == page.floor


async def test_of_a_stream_that_is_gone_the_floor_is_its_end(log):
    await fill(log, 2)
    await log.append("s", b"3", id="3", ends=True, keep=Keep(ended_s=10.0))
    CLOCK.advance(20)
    page = await log.read("s")
    assert page.lost
    again = await log.read("s", page.floor)
    assert (again.entries, again.lost, again.life) == ((), False, "gone")


async def test_trimming_up_to_a_position_needs_the_history_it_belongs_to(log):
    await fill(log, 3)
    read = (await log.read("s")).entries
    other = MemoryStore().log(ASYNC)  # as after a failover that has lost 2 and 3
    await other.append("s", b"1", id="1")
    await other.append("s", b"other", id="other")

    assert await other.trim("s", read[1].position) == 0
    assert await other.trim("s", read[2].position) == 0
    assert await other.trim("s", read[0].position) == 1
    assert await other.trim("s", read[0].position) == 0
    assert await log.trim("s", read[2].position) == 3
