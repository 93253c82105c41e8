"""Slots and shards: every slot in one shard, whichever way it is asked."""

from __future__ import annotations

from datetime import UTC, datetime

from semel.messages import SLOTS, Message, Tail, shard_of, slots_of


def test_every_slot_is_in_one_shard_whichever_way_it_is_asked() -> None:
    for shards in range(1, SLOTS + 1):
        asked = [shard_of(slot, shards) for slot in range(SLOTS)]
        spans = [slots_of(shard, shards) for shard in range(shards)]
        told = [shard for shard, (first, last) in enumerate(spans) for _ in range(first, last + 1)]
        assert asked == told


def test_shards_have_nearly_as_many_slots_each() -> None:
    for shards in range(1, SLOTS + 1):
        sizes = [last - first + 1 for first, last in (slots_of(s, shards) for s in range(shards))]
        assert max(sizes) - min(sizes) <= 1


def test_nothing_is_there_before_the_first_message() -> None:
    assert Tail() == Tail(0, "")


def test_the_payload_is_read_when_it_is_asked_for() -> None:
    now = datetime.now(UTC)
    assert Message(1, "1", "t", "o", "", "a", "1", 1, '{"n": 1}', now).data == {"n": 1}
