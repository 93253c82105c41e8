"""The log contract finds what is planted: each defect by the test that is about it.

Among them are those of a log made of a marker with a time to live, a capped stream and a key for
the state, as it is often built on Redis.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace

import pytest
from hypothesis import Phase

from semel.colour import ASYNC
from semel.entries import Appended, Position
from semel.stores import log_rules as rules
from semel.stores import memory_log
from semel.stores.bells import LocalBell, Tower
from semel.stores.memory import MemoryStore
from semel.testing import bells, driven
from semel.testing.bells import BellContract, bell_of
from semel.testing.clock import FakeClock
from semel.testing.logs import LogContract

PLANTED = {}
ANY_HISTORY = "test_any_history_agrees_with_the_model"


def found_by(*tests):
    def note(defect):
        PLANTED[defect.__name__] = (defect, tests)
        return defect

    return note


def decided(patch, seen_as):
    """Let the rules see something else than there is."""
    decide = rules.decide
    patch.setattr(rules, "decide", lambda seen, op, now_us: decide(*seen_as(seen, op), now_us))


# --- appending ----------------------------------------------------------------------------------


@found_by("test_a_repeat_hears_of_itself_whatever_came_between", ANY_HISTORY)
def the_id_is_checked_last(patch):
    decide = rules.decide

    def late(seen, op, now_us):
        refusal = seen.row and rules._refusal(seen.row, seen.fences, op)
        return (refusal, None) if refusal else decide(seen, op, now_us)

    patch.setattr(rules, "decide", late)


@found_by("test_the_same_id_with_another_payload_is_refused", ANY_HISTORY)
def a_marker_says_only_that_the_id_was_there(patch):
    patch.setattr(
        rules, "mark_of", lambda id, fingerprint: rules.hashlib.sha1(id.encode()).hexdigest()
    )


@found_by("test_an_id_is_remembered_as_long_as_its_entry")
def a_marker_expires_while_its_entry_is_there(patch):
    patch.setattr(rules, "is_forgotten", lambda mark, row, now_us: mark.until_us <= now_us)


@found_by("test_an_id_outlives_its_entry_until_its_time_is_up")
def an_id_goes_with_its_entry(patch):
    forgotten = lambda mark, row, now_us: mark.position.offset <= row.floor.offset  # noqa: E731
    patch.setattr(rules, "is_forgotten", forgotten)


@found_by("test_a_lower_rank_never_moves_the_state_back", ANY_HISTORY)
def the_last_writer_has_the_state(patch):
    patch.setattr(rules, "moved", lambda state, rank: state)


@found_by("test_a_stale_fence_is_refused_and_changes_nothing", ANY_HISTORY)
def it_knows_no_fence(patch):
    decided(patch, lambda seen, op: (replace(seen, fences={}), op))


@found_by("test_of_many_at_one_version_one_is_appended", ANY_HISTORY)
def the_version_is_not_compared(patch):
    decided(patch, lambda seen, op: (seen, replace(op, expect=None)))


@found_by("test_an_expected_position_is_of_one_history")
def of_an_expected_position_only_the_number_counts(patch):
    def by_number(seen, op):
        expect = op.expect.offset if isinstance(op.expect, Position) else op.expect
        return seen, replace(op, expect=expect)

    decided(patch, by_number)


@found_by("test_a_rising_number_is_taken_once", ANY_HISTORY)
def a_number_may_be_taken_twice(patch):
    decided(patch, lambda seen, op: (seen, replace(op, rising=frozenset())))


@found_by("test_a_gone_stream_is_unknown_in_the_end_and_begins_anew")
def what_is_over_goes_on(patch):
    patch.setattr(rules, "is_over", lambda row, now_us: False)


# --- reading ------------------------------------------------------------------------------------


@found_by("test_a_position_stands_for_all_that_came_before_it")
def a_tag_is_made_of_the_id_alone(patch):
    """A failover that takes one entry back, and gets it again behind another one."""

    def following(head, mark):
        return Position(head.offset + 1, mark[:12])

    patch.setattr(rules, "following", following)


@found_by("test_a_trimmed_position_is_lost_and_the_floor_is_not")
def a_capped_stream_goes_on_behind_the_hole(patch):
    opened = rules.opened

    def goes_on(stream, row, after, tag_at, now_us):
        if row is not None and (after is None or after.offset < row.floor.offset):
            after = row.floor
        return opened(stream, row, after, tag_at, now_us)

    patch.setattr(rules, "opened", goes_on)


@found_by("test_another_history_that_ends_at_the_floor_is_lost")
def the_floor_has_no_tag(patch):
    is_ours = rules.is_ours
    patch.setattr(
        rules,
        "is_ours",
        lambda row, after, tag_at: after.offset == row.floor.offset or is_ours(row, after, tag_at),
    )


@found_by("test_a_position_ahead_of_the_head_is_lost")
def a_position_ahead_waits_for_the_log_to_catch_up(patch):
    is_ours = rules.is_ours
    patch.setattr(
        rules,
        "is_ours",
        lambda row, after, tag_at: after.offset > row.head.offset or is_ours(row, after, tag_at),
    )


@found_by("test_a_snapshot_belongs_to_its_position")
def state_and_position_are_two_reads(patch):
    load = memory_log.MemoryLog.load

    async def twice(log, stream):
        first = await load(log, stream)
        await driven.asyncio.sleep(0)
        return replace(await load(log, stream), position=first.position)

    patch.setattr(memory_log.MemoryLog, "load", twice)


@found_by("test_many_writers_make_no_gap_and_no_twin")
def an_offset_is_taken_before_the_entry_is_there(patch):
    perform = memory_log.MemoryLog.perform

    async def slowly(log, op):
        found = log._streams.get(op.stream)
        head = found.row.head if found else rules.beginning(op.stream)
        await driven.asyncio.sleep(0)
        answer = await perform(log, op)
        taken = rules.following(head, op.mark)
        return replace(answer, position=taken) if isinstance(answer, Appended) else answer

    patch.setattr(memory_log.MemoryLog, "perform", slowly)


# --- the bell -----------------------------------------------------------------------------------


@found_by("test_an_append_rings", "test_who_listens_before_reading_misses_nothing")
def nobody_rings(patch):
    patch.setattr(Tower, "ring", lambda tower, stream: None)


@found_by("test_who_has_left_is_not_woken")
def nobody_leaves(patch):
    async def stays(bell, stream, wake):
        pass

    patch.setattr(LocalBell, "leave", stays)


@found_by("test_a_closed_bell_is_quiet")
def a_closed_bell_goes_on(patch):
    patch.setattr(Tower, "remove", lambda tower, bell: None)


# --- running it ---------------------------------------------------------------------------------


class Contract(LogContract, BellContract):
    examples = 60
    clock = FakeClock()

    async def age(self, store, seconds):
        self.clock.advance(seconds)


async def keeps(name):
    """Run one test of the contract on a log in memory."""
    store = MemoryStore(clock=Contract.clock)
    async with bell_of(store) as bell:
        given = {"store": store, "log": store.log(ASYNC), "colour": ASYNC, "bell": bell}
        test = getattr(Contract(), name)
        await test(**{each: given[each] for each in inspect.signature(test).parameters})


@pytest.mark.parametrize(
    ("defect", "test"), [(name, test) for name, (_, tests) in PLANTED.items() for test in tests]
)
async def test_a_planted_defect_is_found(defect, test, monkeypatch):
    # Any history that shows it will do, the shortest takes its time.
    settings = functools.partial(driven.settings, phases=[Phase.generate])
    monkeypatch.setattr(driven, "settings", settings)
    monkeypatch.setattr(bells, "WITHIN_S", 0.05)
    PLANTED[defect][0](monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        await keeps(test)


@pytest.mark.parametrize("test", sorted({t for _, tests in PLANTED.values() for t in tests}))
async def test_without_a_defect_nothing_is_found(test):
    await keeps(test)
