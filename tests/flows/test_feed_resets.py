"""What those are told who cannot go on: never less than they have."""

from __future__ import annotations

from semel.entries import Position, Replace
from semel.feed import Feed
from semel.stores.memory import MemoryStore


async def test_a_state_that_was_read_for_somebody_else_is_not_told_to_who_has_more():
    feed = Feed(MemoryStore())
    following = feed.follow("s")
    await following.ready()
    reader = following.reader
    for n in range(1, 11):
        await feed.log.append("s", b"x", id=f"{n}", state=Replace(b"%d" % n))
        if n == 4:
            assert (await reader.snapshot(besides=Position(1, "0" * 12))).state == b"4"
    snapshot = await reader.snapshot(besides=Position(6, "0" * 12))
    assert snapshot.position.offset >= 6
    await feed.aclose()
