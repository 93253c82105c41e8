"""The broker contract finds what is planted: each defect by the test that is about it."""

from __future__ import annotations

import asyncio
import functools
import inspect

import pytest
from hypothesis import Phase

from semel.brokers import memory, rules
from semel.brokers.memory import MemoryBroker
from semel.messages import Tail
from semel.testing import brokers
from semel.testing.brokers import BrokerContract

PLANTED = {}


def found_by(*tests):
    def note(defect):
        PLANTED[defect.__name__] = (defect, tests)
        return defect

    return note


# --- publishing ---------------------------------------------------------------------------------


@found_by("test_publishing_again_adds_nothing", "test_random_traffic_is_seen_by_every_group")
def a_repeat_is_added_again(patch):
    patch.setattr(rules, "behind_the_tail", lambda messages, tail, ids: messages)


@found_by("test_a_broker_with_other_events_than_the_outbox_says_so")
def it_passes_over_by_position_alone(patch):
    def passes(messages, tail, ids):
        return [message for message in messages if message.position > tail.position]

    patch.setattr(rules, "behind_the_tail", passes)


@found_by("test_a_broker_that_has_lost_its_tail_says_where_it_ends")
def it_does_not_notice_that_its_tail_is_gone(patch):
    fresh = rules.fresh
    patch.setattr(
        rules,
        "fresh",
        lambda batch, fence, tail, ids: (
            batch.messages
            if tail.position < batch.follows.position
            else fresh(batch, fence, tail, ids)
        ),
    )


@found_by("test_a_deposed_owner_publishes_nothing", "test_random_traffic_is_seen_by_every_group")
def it_knows_no_fence(patch):
    fresh = rules.fresh
    patch.setattr(rules, "fresh", lambda batch, fence, tail, ids: fresh(batch, 0, tail, ids))


@found_by("test_a_message_that_cannot_be_written_is_refused_and_a_stand_in_takes_its_place")
def one_that_cannot_be_written_takes_all_with_it(patch):
    def written(messages, documents):
        refused = [d for d in documents.values() if not isinstance(d, bytes)]
        if refused:
            return [], refused[0]
        return [(message, documents[message.position]) for message in messages], None

    patch.setattr(rules, "written", written)


# --- trimming -----------------------------------------------------------------------------------


@found_by("test_it_is_full_at_twice_its_target_until_its_readers_have_caught_up")
def it_trims_what_is_unread(patch):
    def trims(log, batch, maxlen):
        del log.entries[: max(0, len(log.entries) - maxlen)]

    patch.setattr(memory._Log, "_full", trims)


@found_by("test_it_is_full_at_twice_its_target_until_its_readers_have_caught_up")
def it_trims_what_is_in_hand(patch):
    patch.setattr(memory._Group, "done_to", property(lambda group: group.read_to))


@found_by("test_without_a_group_nothing_is_trimmed")
def it_trims_for_nobody(patch):
    full = memory._Log._full

    def trims(log, batch, maxlen):
        if not log.groups:
            del log.entries[: max(0, len(log.entries) - maxlen)]
        return full(log, batch, maxlen)

    patch.setattr(memory._Log, "_full", trims)


@found_by("test_what_is_there_already_is_taken_by_a_full_broker")
def it_is_full_even_for_what_is_there(patch):
    fresh = rules.fresh
    publish = memory._Log.publish

    def full_first(log, batch, maxlen):
        ours = fresh(batch, log.fence, log.tail, log._ids)
        if isinstance(ours, list) and maxlen and (full := log._full(batch, maxlen)):
            return full
        return publish(log, batch, maxlen)

    patch.setattr(memory._Log, "publish", full_first)


# --- reading ------------------------------------------------------------------------------------


@found_by(
    "test_the_next_owner_gets_what_was_left_over_first_and_in_order",
    "test_random_traffic_is_seen_by_every_group",
)
def nothing_is_left_over(patch):
    patch.setattr(memory._Log, "left_over", lambda *_: [])


@found_by("test_an_owner_whose_place_its_own_late_request_took_is_told_to_begin_anew")
def who_lost_its_place_reads_nothing_for_ever(patch):
    patch.setattr(memory._Log, "look", lambda *_: None)


@found_by("test_the_next_owner_gets_what_was_left_over_first_and_in_order")
def what_is_left_over_comes_backwards(patch):
    left_over = memory._Log.left_over
    patch.setattr(memory._Log, "left_over", lambda *args: left_over(*args)[::-1])


@found_by(
    "test_the_next_owner_gets_what_was_left_over_first_and_in_order",
    "test_what_is_left_over_is_counted_by_every_owner",
)
def deliveries_are_not_counted(patch):
    delivery = rules.delivery
    patch.setattr(rules, "delivery", lambda *args, **more: delivery(*args, **(more | {"count": 1})))


@found_by(
    "test_the_next_owner_gets_what_was_left_over_first_and_in_order",
    "test_random_traffic_is_seen_by_every_group",
)
def one_acknowledgement_is_for_all_before_it(patch):
    async def ack(consumer, deliveries):
        pending = consumer._log.groups[consumer._group].pending
        upto = max((each.token for each in deliveries), default=0)
        for position in [each for each in pending if each <= upto]:
            del pending[position]

    patch.setattr(memory.MemoryConsumer, "ack", ack)


@found_by("test_a_deposed_owner_reads_nothing", "test_a_former_owner_that_comes_back_reads_nothing")
def a_zombie_reads_on(patch):
    patch.setattr(memory._Group, "owned_by", lambda group, owner: True)


@found_by("test_a_group_that_comes_late_begins_with_the_oldest_there_is")
def a_late_group_begins_with_what_comes_next(patch):
    async def join(broker, topic, group):
        for shard in range(broker.shards):
            log = broker._log(topic, shard)
            log.groups.setdefault(group, memory._Group(read_to=log.tail.position))

    patch.setattr(MemoryBroker, "join", join)


@found_by("test_joining_again_changes_nothing")
def joining_again_begins_anew(patch):
    async def join(broker, topic, group):
        for shard in range(broker.shards):
            broker._log(topic, shard).groups[group] = memory._Group()

    patch.setattr(MemoryBroker, "join", join)


@found_by("test_a_reader_that_waits_is_woken")
def nobody_is_woken(patch):
    log = memory._Log

    class Deaf(set):
        def add(self, waiter):
            pass

    patch.setattr(memory, "_Log", lambda: log(waiters=Deaf()))


@found_by("test_a_read_that_is_cancelled_loses_nothing")
def a_cancelled_read_has_done_what_it_took(patch):
    read = memory.MemoryConsumer.read

    async def reads(consumer, limit, *, wait_s=0.0):
        found = await read(consumer, limit, wait_s=wait_s)
        for each in found:
            consumer._log.groups[consumer._group].pending.pop(each.token)
        await asyncio.sleep(0)
        return found

    patch.setattr(memory.MemoryConsumer, "read", reads)


# --- running it ---------------------------------------------------------------------------------


class Contract(BrokerContract):
    examples = 60
    patience_s = 0.05
    quiet_s = 0.01


async def keeps(name):
    """Run one test of the contract on brokers in memory."""
    there = {}

    async def opened(*, shards=1, maxlen=10_000):
        return there.setdefault((shards, maxlen), MemoryBroker(shards=shards, maxlen=maxlen))

    given = {
        "opened": opened,
        "broker": await opened(),
        "topic": "orders",
        "shards": 1,
        "how": "killed",
        "who": "this process",
        "follows": Tail(1),
        "positions": (2, 3, 4),
        "where": Tail(3),
    }
    test = getattr(Contract(), name)
    await test(**{each: given[each] for each in inspect.signature(test).parameters})


@pytest.mark.parametrize(
    ("defect", "test"), [(name, test) for name, (_, tests) in PLANTED.items() for test in tests]
)
async def test_a_planted_defect_is_found(defect, test, monkeypatch):
    # Any history that shows it will do, the shortest takes its time.
    settings = functools.partial(brokers.settings, phases=[Phase.generate])
    monkeypatch.setattr(brokers, "settings", settings)
    await keeps(test)
    PLANTED[defect][0](monkeypatch)
    with pytest.raises((AssertionError, TimeoutError, pytest.fail.Exception)):
        await keeps(test)
