from __future__ import annotations

from semel.rooms import RoomsStatus
from semel.rooms.status import BOUNDS_S, Histogram, Times


def test_times_are_counted_up_to_each_bound_and_beyond():
    times = Times()
    for seconds in (0.0, 0.001, 0.0011, 10.0, 10.1, 999.0):
        times.add(seconds)
    seen = times.seen()
    assert seen.bounds == BOUNDS_S
    assert len(seen.counts) == len(BOUNDS_S) + 1
    assert (seen.counts[0], seen.counts[1], seen.counts[-2], seen.counts[-1]) == (2, 1, 1, 2)
    assert sum(seen.counts) == 6
    assert seen.sum_s == sum((0.0, 0.001, 0.0011, 10.0, 10.1, 999.0))


def test_what_was_seen_does_not_grow():
    times = Times()
    before = times.seen()
    times.add(1)
    assert sum(before.counts) == 0
    assert sum(Histogram().counts) == 0


def test_it_is_ready_unless_the_store_is_away_or_it_is_about_to_end():
    assert RoomsStatus("t").ready
    assert not RoomsStatus("t", outage="gone").ready
    assert not RoomsStatus("t", draining=True).ready
