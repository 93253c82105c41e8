"""What an inbox decides."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import (
    BrokerUnavailableError,
    CorruptRecordError,
    SettingsError,
    StoreUnavailableError,
)
from semel.messages import Applied, Edit, Held, ParkedMessage, Replay, Seen, Skip
from semel.outbox import Event, Outbox
from semel.stores import inbox_rules as rules
from semel.stores.inbox_rules import Course, Failure, Known, Mark, PoisonError, Retry
from semel.stores.rules import moment
from semel.testing.inboxes import message

NOW = moment(1_700_000_000_000_000)
SEQUENCE = b"s" * 32


# --- identities ---------------------------------------------------------------------------------


def test_identities_are_a_format():
    """To change one is to forget what every consumer has done."""
    ordered, alone = message(3, tenant="acme"), message(None, id="e-1")
    assert rules.sequence_of("stock", ordered)[0].hex()[:16] == "5bbe14b01a4bb585"
    assert rules.sequence_of("stock", alone)[0].hex()[:16] == "14776c50d65bb928"
    assert rules.message_of("stock", ordered).hex()[:16] == "18a0d1437ab38a84"
    assert rules.baseline_of("stock", "orders").hex()[:16] == "0836b6529479d5f4"


def test_the_slot_is_the_one_that_the_outbox_gives():
    event = Event("placed", "order", "7", {}, topic="orders", tenant="acme")
    entry = Outbox()._entry(event)
    for seq in (1, None):
        each = message(seq, "7", tenant="acme")
        assert rules.sequence_of("anybody", each)[1] == entry.counter[0]


def test_every_part_of_an_identity_counts():
    first = message(1)
    others = [
        replace(first, tenant="a"),
        replace(first, topic="a"),
        replace(first, aggregate_type="a"),
        replace(first, aggregate_id="a"),
        replace(first, seq=None),
        replace(first, seq=None, id="a"),
        replace(first, seq=None, tenant="a"),
    ]
    found = {rules.sequence_of("stock", each)[0] for each in (first, *others)}
    assert len(found) == 8
    assert rules.sequence_of("other", first)[0] not in found
    assert rules.sequence_of("stock", replace(first, seq=9))[0] in found
    assert rules.baseline_of("a", "bc") != rules.baseline_of("ab", "c")


# --- failing ------------------------------------------------------------------------------------


def test_pauses_grow_up_to_a_limit_and_are_jittered():
    plain = Retry(first_s=1, factor=2, most_s=10, jitter=0)
    assert [plain.delay_s(n) for n in (1, 2, 3, 4, 5, 9999)] == [1, 2, 4, 8, 10, 10]
    jittered = Retry(first_s=1, factor=1, jitter=0.5)
    drawn = [jittered.delay_s(1) for _ in range(100)]
    assert 1 <= min(drawn) < max(drawn) <= 1.5


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"crashes": 0},
        {"first_s": -1},
        {"factor": 0.5},
        {"most_s": -1},
        {"jitter": -0.1},
        {"first_s": float("nan")},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(SettingsError):
        Retry(**wrong)


def test_a_failure_is_final_after_so_many_or_when_it_says_so():
    retry = Retry(attempts=2, first_s=3, jitter=0)
    assert retry.failed(ValueError("x"), 1) == Failure("retry", "ValueError: x", 1, 3)
    assert retry.failed(ValueError("x"), 2) == Failure("poison", "ValueError: x", 2)
    assert retry.failed(PoisonError("x"), 1).why == "poison"
    assert retry.failed(ValueError(), 1).error == "ValueError"
    assert Retry(crashes=7).crashed().why == "crash"
    assert "7 times" in Retry(crashes=7).crashed().error


def test_an_error_tells_where_it_comes_from_and_is_not_endless():
    try:
        raise ValueError("x" * 10_000)
    except ValueError as error:
        told = rules.told_of(error)
    assert told.startswith("ValueError: xxx")
    assert "test_inbox_rules.py:" in told[-80:]
    assert len(told) <= rules.ERROR_CHARS


def test_an_outage_is_known_by_what_it_comes_from():
    def caused(error, cause):
        error.__cause__ = cause
        return error

    assert rules.is_outage(StoreUnavailableError("x"))
    assert rules.is_outage(BrokerUnavailableError("x"))
    assert rules.is_outage(caused(ValueError("x"), StoreUnavailableError("x")))
    assert not rules.is_outage(ValueError("x"))
    assert not rules.is_outage(CorruptRecordError("x"))
    assert not rules.is_outage(caused(RuntimeError("x"), CorruptRecordError("x")))


def test_an_error_that_is_its_own_cause_is_asked_once():
    """`raise error from error` happens; whoever followed its causes would never come back."""
    itself, first, second = ValueError("x"), ValueError("1"), ValueError("2")
    itself.__cause__ = itself
    first.__cause__, second.__cause__ = second, first
    assert not rules.is_outage(itself)
    assert list(rules.causes_of(first)) == [first, second]
    assert list(rules.causes_of(None)) == []


def test_an_error_that_cannot_say_what_it_is_is_a_failure_like_others():
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError("no")

        @property
        def poison(self):
            raise RuntimeError("no")

    failure = Retry(attempts=2).failed(MuteError(), 1)
    assert (failure.why, failure.error) == ("retry", "MuteError")
    assert "MuteError" in str(rules.outage(message(1), MuteError()))


# --- a batch ------------------------------------------------------------------------------------


class Desk:
    """A store as small as can be, which believes nothing that it is told."""

    def __init__(self):
        self.marks = {}
        self.parked = {}
        self.seen = set()
        self.ran = []

    def batch(self, batch, fails):
        course = Course("stock", Known(dict(self.marks), self.seen, self.parked.keys()))
        for each in batch:
            ending = course.ask(each)
            if ending is None:
                self.ran.append((each.aggregate_id, each.seq))
                if (each.aggregate_id, each.seq) in fails:
                    course.failed(each, Failure("retry", "x", 1, 1.0))
                    self.ran.pop()
                else:
                    course.applied(each)
        self.keep(course)

    def keep(self, course):
        for id, _, mark in course.marks:
            assert mark.turn == self.marks.get(id, Mark()).turn + 1
            self.marks[id] = mark
        for each in course.parked:
            self.parked.setdefault(each.sequence, {}).setdefault(each.message.seq, each)
        self.check()
        for id, seq in course.woken:
            assert seq in self.parked[id]
            self.drain(id)
        self.check()

    def drain(self, id):
        """Run what waits and is next, as if everything was due."""
        while rows := self.parked.get(id):
            mark, seq = self.marks[id], min(rows)
            row = ParkedMessage(id, "stock", rows[seq].message, "waiting", "retry", 1, "", NOW)
            match rules.turn_of(mark, row, seen=False):
                case "run":
                    self.ran.append((row.message.aggregate_id, seq))
                case "gap":
                    return
                case "drop":
                    raise AssertionError("what had its effect does not wait")
            del rows[seq]
            self.marks[id], _ = rules.passed(mark, seq, rules.following(list(rows), seq))
        self.parked.pop(id, None)

    def check(self):
        for id, mark in self.marks.items():
            waits = self.parked.get(id, {})
            assert mark.head == min(waits, default=None)
            assert mark.head is None or mark.head > mark.seq


AGGREGATES, SEQS = ("a", "b"), range(1, 6)
EACH = st.tuples(st.sampled_from(AGGREGATES), st.sampled_from(SEQS))


@given(st.lists(st.tuples(st.lists(EACH, max_size=6), st.sets(EACH, max_size=2)), max_size=12))
def test_whatever_comes_is_run_once_in_order_and_nothing_is_left_behind(batches):
    desk = Desk()
    for batch, fails in batches:
        desk.batch([message(seq, aggregate) for aggregate, seq in batch], fails)
    desk.batch([message(seq, aggregate) for aggregate in AGGREGATES for seq in SEQS], set())
    for id in list(desk.parked):
        desk.drain(id)
    assert desk.parked == {}
    for aggregate in AGGREGATES:
        assert [seq for whose, seq in desk.ran if whose == aggregate] == list(SEQS)


def test_a_batch_tells_how_each_ends():
    course = Course("stock", Known({}))
    first, second, fourth = message(1), message(2), message(4)
    assert course.ask(first) is None
    assert course.applied(first) == Applied()
    assert course.ask(first) == Seen()
    assert course.ask(second) is None
    assert course.failed(second, Failure("poison", "bad", 1)) == Held("poison", "bad")
    assert course.ask(second) == Held("behind")
    assert course.ask(fourth) == Held("behind")
    [(id, _, mark)] = course.marks
    assert (id, mark) == (rules.sequence_of("stock", first)[0], Mark(1, 2, 1))
    assert [(each.message, each.why, each.state) for each in course.parked] == [
        (second, "poison", "parked"),
        (fourth, "behind", "waiting"),
    ]


def test_what_is_only_seen_changes_nothing():
    id, _ = rules.sequence_of("stock", message(1))
    course = Course("stock", Known({id: Mark(5, None, 9)}))
    assert course.ask(message(5)) == Seen()
    assert course.marks == []


# --- what waits ---------------------------------------------------------------------------------


def waits(seq, **more):
    row = ParkedMessage(SEQUENCE, "stock", message(seq), "parked", "poison", 3, "bad", NOW)
    return replace(row, **more)


def test_the_first_that_is_due_runs_unless_it_has_or_cannot():
    row = waits(5)
    assert rules.turn_of(Mark(4), row, seen=False) == "run"
    assert rules.turn_of(Mark(5), row, seen=False) == "drop"
    assert rules.turn_of(Mark(3), row, seen=False) == "gap"
    assert rules.turn_of(Mark(), waits(None), seen=False) == "run"
    assert rules.turn_of(Mark(), waits(None), seen=True) == "drop"


def test_the_next_one_may_run_if_nothing_is_missing_before_it():
    assert rules.passed(Mark(4, 5, 9), 5, 6) == (Mark(5, 6, 10), 6)
    assert rules.passed(Mark(4, 5, 9), 5, 8) == (Mark(5, 8, 10), None)
    assert rules.passed(Mark(4, 5, 9), 5, None) == (Mark(5, None, 10), None)


def view(head, mark=None, following=None, chosen=None, *, later_s=0.0):
    now = NOW + timedelta(seconds=later_s)
    return rules.View(mark, head, following, chosen, now, rules.RETENTION_S)


def test_what_does_not_wait_cannot_be_settled():
    for settlement in (Skip(), Replay(), Edit("e", "{}")):
        with pytest.raises(SettingsError, match="nothing of sequence 7373"):
            rules.settled(None, settlement, SEQUENCE)


def test_a_replay_is_due_at_once():
    change = rules.settled(view(waits(5), Mark(4, 5, 9), 6), Replay(), SEQUENCE)
    assert change.mark is None
    assert change.keep == waits(5, state="waiting", why="retry", attempts=0, due_at=NOW)
    named = "event orders-7-5 (placed, number 5)"
    behind = "and what waits behind it, in order"
    assert change.told == f"lets {named} run when a worker of stock does, {behind}"


def test_what_could_have_been_forgotten_is_replayed_by_force():
    late = {"later_s": rules.RETENTION_S + 1}
    with pytest.raises(SettingsError, match="7 days"):
        rules.settled(view(waits(None), **late), Replay(), SEQUENCE)
    assert rules.settled(view(waits(None), **late), Replay(force=True), SEQUENCE).keep is not None
    assert rules.settled(view(waits(5), Mark(4, 5, 1), **late), Replay(), SEQUENCE).keep is not None


def test_a_skip_moves_the_mark():
    change = rules.settled(view(waits(5), Mark(4, 5, 9), 6), Skip(), SEQUENCE)
    assert (change.mark, change.drop, change.woken) == (Mark(5, 6, 10), True, 6)
    change = rules.settled(view(waits(5), Mark(2, 5, 9), 6), Skip(), SEQUENCE)
    assert (change.mark, change.drop, change.woken) == (Mark(4, 5, 10), False, 5)
    change = rules.settled(view(waits(5), Mark(2, 5, 9), 6), Skip("orders-7-5"), SEQUENCE)
    assert (change.mark, change.drop, change.woken) == (Mark(5, 6, 10), True, 6)
    change = rules.settled(view(waits(None)), Skip(), SEQUENCE)
    assert (change.mark, change.drop, change.seen) == (None, True, True)


def test_what_is_only_due_is_skipped_by_its_name():
    due = view(waits(5, state="waiting", why="retry", attempts=0, due_at=NOW), Mark(4, 5, 9), 6)
    with pytest.raises(SettingsError, match="runs when a worker of stock does"):
        rules.settled(due, Skip(), SEQUENCE)
    assert rules.settled(due, Skip("orders-7-5"), SEQUENCE).drop
    failed = replace(due, head=replace(due.head, attempts=1))
    assert rules.settled(failed, Skip(), SEQUENCE).drop
    alone = view(waits(None, state="waiting", attempts=0, due_at=NOW))
    with pytest.raises(SettingsError, match="event id"):
        rules.settled(alone, Skip(), SEQUENCE)


def test_an_audit_tells_what_was_done():
    row = waits(5)
    settlement = Edit(row.message.id, '{"n": 6}')
    change = rules.settled(view(row, Mark(4, 5, 9), chosen=row), settlement, SEQUENCE)
    told = rules.audited(change, settlement, at=NOW, who="ann", note="typo")
    assert (told.verb, told.before, told.after) == ("edit", '{"n": 5}', '{"n": 6}')
    assert told.note == "gives event orders-7-5 (placed, number 5) another payload: typo"
