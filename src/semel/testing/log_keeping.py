"""The part of the log's contract that is about time: what is trimmed, ends, idles and is forgotten.

Time is not slept: `age` makes what is stored older. Every duration is far from its neighbours, so
that a store whose own clock runs on meanwhile gives the same answers.
"""

from __future__ import annotations

from typing import Any

from semel.entries import (
    LONGEST_S,
    Appended,
    Ended,
    Keep,
    Mismatch,
    Position,
    Repeated,
    Replace,
    beginning,
)
from semel.testing.log_appending import STREAM, AppendingContract, datas, put

SHORT_S = 100.0
LONG_S = 1000.0
LITTLE_S = 50.0


class KeepingContract(AppendingContract):
    """Trimming, ending, idling, forgetting and sweeping."""

    async def streams_left(self, store: Any) -> int | None:
        """How many streams the store still has anything of; None where nobody can tell."""
        return None

    async def ids_left(self, store: Any) -> int | None:
        """How many ids the store still remembers; None where nobody can tell."""
        return None

    # --- trimming -----------------------------------------------------------------------------

    async def test_a_trimmed_position_is_lost_and_the_floor_is_not(self, log: Any) -> None:
        positions = [beginning(STREAM)] + [await put(log, f"e{n}", b"%d" % n) for n in range(1, 6)]
        assert await log.trim(STREAM, 3) == 3
        for position in (None, *positions[:3]):
            page = await log.read(STREAM, position)
            assert page.lost, position
            assert not page.entries
            assert page.head == positions[5]
        assert await datas(log, positions[3]) == [b"4", b"5"]
        assert await datas(log, positions[4]) == [b"5"]
        assert await datas(log, positions[5]) == []

    async def test_another_history_that_ends_at_the_floor_is_lost(self, log: Any) -> None:
        positions = [await put(log, f"e{n}") for n in range(3)]
        await log.trim(STREAM, 2)
        assert (await log.read(STREAM, Position(2, positions[0].tag))).lost

    async def test_a_page_tells_where_what_is_kept_begins(self, store: Any, log: Any) -> None:
        assert (await log.read(STREAM)).floor is None
        positions = [await put(log, f"e{n}", b"%d" % n) for n in range(1, 6)]
        assert (await log.read(STREAM)).floor is None
        await log.trim(STREAM, 2)
        for after in (None, *positions):
            assert (await log.read(STREAM, after)).floor == positions[1]
        assert await datas(log, positions[1]) == [b"3", b"4", b"5"]
        await log.append(STREAM, None, id="z", ends=True, keep=Keep(ended_s=SHORT_S))
        await self.age(store, SHORT_S + LITTLE_S)
        for after in (None, positions[4]):
            page = await log.read(STREAM, after)
            assert (page.life, page.floor) == ("gone", positions[4])

    async def test_trimming_up_to_a_position_of_another_history_trims_nothing(
        self, log: Any
    ) -> None:
        positions = [await put(log, f"e{n}") for n in range(3)]
        other = positions[0].tag
        for offset in (1, 2, 3, 4):
            tag = positions[1].tag if offset == 1 else other
            assert await log.trim(STREAM, Position(offset, tag)) == 0
        assert await log.trim(STREAM, beginning(STREAM)) == 0
        assert await log.trim(STREAM, positions[1]) == 2
        assert await log.trim(STREAM, positions[0]) == 0
        assert await log.trim(STREAM, positions[1]) == 0
        assert await log.trim(STREAM, positions[2]) == 1
        assert await log.trim("nobody", beginning("nobody")) == 0

    async def test_trimming_counts_what_was_there(self, log: Any) -> None:
        assert await log.trim(STREAM, 5) == 0
        assert (await log.read(STREAM)).life == "unknown"
        for n in range(4):
            await put(log, f"e{n}")
        assert await log.trim(STREAM, 0) == 0
        assert await log.trim(STREAM, 2) == 2
        assert await log.trim(STREAM, 1) == 0
        assert await log.trim(STREAM, 2) == 0
        assert await log.trim(STREAM, 99) == 2
        assert await log.trim(STREAM, 99) == 0

    async def test_a_stream_with_all_its_entries_trimmed_goes_on(self, log: Any) -> None:
        await put(log, "a", b"1")
        head = await put(log, "b", b"2", state=Replace(b"s"))
        await log.trim(STREAM, 2)
        page = await log.read(STREAM, head)
        assert (page.lost, page.head, list(page.entries)) == (False, head, [])
        assert (await log.load(STREAM)).state == b"s"
        assert (await put(log, "c", b"3", expect=2)).offset == 3
        assert await datas(log, head) == [b"3"]

    async def test_a_stream_keeps_so_many_entries(self, log: Any) -> None:
        keep = Keep(entries=3)
        positions = [await put(log, f"e{n}", b"%d" % n, keep=keep) for n in range(1, 8)]
        assert (await log.read(STREAM, positions[2])).lost
        assert await datas(log, positions[3]) == [b"5", b"6", b"7"]

    async def test_a_reader_behind_what_is_kept_is_lost(self, log: Any) -> None:
        keep = Keep(entries=2)
        first = await put(log, "e0", keep=keep)
        await put(log, "e1", keep=keep)
        assert len(await datas(log, first)) == 1
        await put(log, "e2", keep=keep)
        assert len(await datas(log, first)) == 2
        await put(log, "e3", keep=keep)
        page = await log.read(STREAM, first)
        assert (page.lost, page.head.offset) == (True, 4)

    async def test_a_long_stream_is_cut_down_to_what_is_kept_a_few_at_a_time(
        self, log: Any
    ) -> None:
        for n in range(30):
            await put(log, f"e{n}")
        for n in range(30, 40):
            await put(log, f"e{n}", keep=Keep(entries=1))
        page = await log.read(STREAM)
        assert (page.lost, page.head.offset) == (True, 40)
        assert page.floor is not None
        assert page.floor.offset == 39
        assert len(await datas(log, page.floor)) == 1
        assert await log.trim(STREAM, 40) == 1

    # --- ids ----------------------------------------------------------------------------------

    async def test_an_id_is_remembered_as_long_as_its_entry(self, store: Any, log: Any) -> None:
        keep = Keep(ids_s=SHORT_S)
        first = await put(log, "a", b"1", keep=keep)
        refused = await log.append(STREAM, None, id="r", reply=b"no", keep=keep)
        await self.age(store, LONG_S)
        await put(log, "b", keep=keep)
        assert await log.append(STREAM, b"1", id="a", keep=keep) == Repeated(first)
        assert await log.append(STREAM, b"2", id="a", keep=keep) == Mismatch("fingerprint")
        again = await log.append(STREAM, None, id="r", keep=keep)
        assert again == Repeated(refused.position, b"no")

    async def test_an_id_outlives_its_entry_until_its_time_is_up(
        self, store: Any, log: Any
    ) -> None:
        keep = Keep(entries=1, ids_s=SHORT_S)
        first = await put(log, "a", b"1", keep=keep)
        await put(log, "b", keep=keep)
        await self.age(store, LITTLE_S)
        assert await log.append(STREAM, b"1", id="a", keep=keep) == Repeated(first)
        await self.age(store, SHORT_S)
        assert (await put(log, "a", b"other", keep=keep)).offset == 3
        assert await log.append(STREAM, b"1", id="a", keep=keep) == Mismatch("fingerprint")

    async def test_an_id_whose_time_is_up_is_not_remembered_again_when_the_stream_ends(
        self, store: Any, log: Any
    ) -> None:
        keep = Keep(entries=1, ids_s=SHORT_S)
        for id in "ab":
            await put(log, id, keep=keep)
        await self.age(store, SHORT_S + LITTLE_S)
        head = await put(log, "z", keep=keep, ends=True)
        assert await log.append(STREAM, b"x", id="a", keep=keep) == Ended(head)

    async def test_the_time_of_an_id_is_counted_from_its_own_append(
        self, store: Any, log: Any
    ) -> None:
        keep = Keep(entries=1, ids_s=SHORT_S)
        await put(log, "a", keep=keep)
        await self.age(store, SHORT_S - 20)
        second = await put(log, "b", keep=keep)
        await put(log, "c", keep=keep)
        await self.age(store, 40)
        assert await log.append(STREAM, b"x", id="b", keep=keep) == Repeated(second)
        assert isinstance(await log.append(STREAM, b"x", id="a", keep=keep), Appended)

    async def test_forgotten_ids_take_no_room(self, store: Any, log: Any) -> None:
        keep = Keep(entries=1, ids_s=SHORT_S)
        for n in range(20):
            await put(log, f"old{n}", keep=keep)
        await self.age(store, SHORT_S + LITTLE_S)
        for n in range(10):
            await put(log, f"new{n}", keep=keep)
        assert await self.ids_left(store) in (None, 10)

    # --- ending -------------------------------------------------------------------------------

    async def test_an_ended_stream_takes_nothing_and_is_read_as_before(self, log: Any) -> None:
        first = await put(log, "a", b"1")
        head = await put(log, "z", b"2", ends=True, state=Replace(b"s"), reply=b"r")
        for data in (b"3", None):
            assert await log.append(STREAM, data, id="c", state=Replace(b"t")) == Ended(head)
        assert await log.append(STREAM, b"2", id="z", ends=True) == Repeated(head, b"r")
        page = await log.read(STREAM, first)
        assert (page.life, page.lost, page.head) == ("ended", False, head)
        assert [e.data for e in page.entries] == [b"2"]
        snapshot = await log.load(STREAM)
        assert (snapshot.life, snapshot.state, snapshot.position) == ("ended", b"s", head)
        assert await log.trim(STREAM, 1) == 1

    async def test_a_stream_may_end_without_a_last_entry(self, log: Any) -> None:
        first = await put(log, "a", b"1")
        assert await put(log, "z", None, ends=True) == first
        assert await log.append(STREAM, b"2", id="b") == Ended(first)
        page = await log.read(STREAM, first)
        assert (page.life, page.lost) == ("ended", False)
        assert await datas(log) == [b"1"]

    async def test_entries_and_state_of_an_ended_stream_go_and_its_ids_stay(
        self, store: Any, log: Any
    ) -> None:
        keep = Keep(ended_s=SHORT_S, ids_s=LONG_S)
        first = await put(log, "a", b"1", state=Replace(b"s"), keep=keep)
        await self.age(store, SHORT_S + LITTLE_S)  # counted from the end, not from the beginning
        head = await put(log, "z", b"2", ends=True, reply=b"r", keep=keep)
        await self.age(store, LITTLE_S)
        assert (await log.read(STREAM)).life == "ended"
        await self.age(store, SHORT_S)
        for position, lost in ((None, True), (first, True), (head, False)):
            page = await log.read(STREAM, position)
            assert (page.life, page.lost, page.head) == ("gone", lost, head)
            assert not page.entries
        snapshot = await log.load(STREAM)
        assert (snapshot.life, snapshot.position) == ("gone", head)
        assert (snapshot.state, dict(snapshot.fields)) == (None, {})
        assert await log.append(STREAM, b"2", id="z", keep=keep) == Repeated(head, b"r")
        assert await log.append(STREAM, b"1", id="a", keep=keep) == Repeated(first)
        assert await log.append(STREAM, b"1", id="z", keep=keep) == Mismatch("fingerprint")
        assert await log.append(STREAM, b"3", id="c", keep=keep) == Ended(head)
        assert await log.trim(STREAM, 1) == 0
        assert list(await log.heads([STREAM])) == [head]

    async def test_a_gone_stream_is_unknown_in_the_end_and_begins_anew(
        self, store: Any, log: Any
    ) -> None:
        keep = Keep(ended_s=SHORT_S, ids_s=LONG_S)
        asked: dict[str, Any] = {"fences": {"p": 5}, "state": Replace(b"s"), "keep": keep}
        await put(log, "a", b"1", **asked)
        head = await put(log, "z", b"2", ends=True, keep=keep)
        await self.age(store, LONG_S - LITTLE_S)
        assert (await log.read(STREAM)).life == "gone"
        await self.age(store, 2 * LITTLE_S)
        start = beginning(STREAM)
        for position, lost in ((None, False), (start, False), (head, True)):
            page = await log.read(STREAM, position)
            assert (page.life, page.lost, page.head) == ("unknown", lost, start)
        snapshot = await log.load(STREAM)
        assert (snapshot.life, snapshot.position, snapshot.state) == ("unknown", start, None)
        assert list(await log.heads([STREAM])) == [start]
        assert await log.trim(STREAM, 1) == 0
        assert (await put(log, "a", b"other", fences={"p": 1}, expect=0)).offset == 1
        page = await log.read(STREAM)
        assert (page.life, [e.data for e in page.entries]) == ("open", [b"other"])
        snapshot = await log.load(STREAM)
        assert (snapshot.state, dict(snapshot.fields)) == (None, {})
        assert (await log.read(STREAM, head)).lost
        assert isinstance(await log.append(STREAM, b"2", id="z"), Appended)

    async def test_ids_stay_as_long_as_the_entries_of_an_ended_stream(
        self, store: Any, log: Any
    ) -> None:
        keep = Keep(ended_s=LONG_S, ids_s=SHORT_S)
        head = await put(log, "a", b"1", ends=True, keep=keep)
        await self.age(store, SHORT_S + LITTLE_S)
        assert await log.append(STREAM, b"1", id="a", keep=keep) == Repeated(head)
        page = await log.read(STREAM)
        assert (page.life, len(page.entries)) == ("ended", 1)
        await self.age(store, LONG_S)
        assert (await log.read(STREAM)).life == "unknown"

    # --- idling -------------------------------------------------------------------------------

    async def test_a_stream_that_gets_nothing_for_so_long_is_dropped(
        self, store: Any, log: Any
    ) -> None:
        keep = Keep(idle_s=SHORT_S, ids_s=LONG_S)
        await put(log, "a", state=Replace(b"s"), keep=keep)
        await self.age(store, SHORT_S - 20)
        head = await put(log, "b", keep=keep)
        await self.age(store, SHORT_S - 20)
        page = await log.read(STREAM)
        assert (page.life, len(page.entries)) == ("open", 2)
        await self.age(store, 40)
        page = await log.read(STREAM, head)
        assert (page.life, page.lost, page.head) == ("unknown", True, beginning(STREAM))
        assert (await put(log, "b", b"other", expect=0)).offset == 1
        assert (await log.load(STREAM)).state is None

    async def test_a_stream_is_kept_for_ever_unless_told_otherwise(
        self, store: Any, log: Any
    ) -> None:
        head = await put(log, "a", b"1", state=Replace(b"s"))
        await self.age(store, 100 * 24 * 3600)
        await log.sweep()
        assert await datas(log) == [b"1"]
        snapshot = await log.load(STREAM)
        assert (snapshot.position, snapshot.life, snapshot.state) == (head, "open", b"s")

    async def test_a_stream_is_kept_for_as_long_as_anybody_can_say(
        self, store: Any, log: Any
    ) -> None:
        most = 2**53 - 1
        keep = Keep(most, most, LONGEST_S, LONGEST_S, LONGEST_S)
        first = await put(log, "a", b"1", keep=keep)
        await put(log, "z", b"2", keep=keep, ends=True)
        await self.age(store, 100 * 24 * 3600)
        await log.sweep()
        assert await datas(log) == [b"1", b"2"]
        assert await log.append(STREAM, b"1", id="a", keep=keep) == Repeated(first)

    async def test_the_last_append_says_how_long_a_stream_is_kept(
        self, store: Any, log: Any
    ) -> None:
        await put(log, "a", keep=Keep(idle_s=SHORT_S))
        await put(log, "b")
        await self.age(store, LONG_S)
        assert (await log.read(STREAM)).life == "open"

    # --- sweeping -----------------------------------------------------------------------------

    async def test_sweeping_deletes_what_nobody_can_read_and_nothing_else(
        self, store: Any, log: Any
    ) -> None:
        short = Keep(idle_s=SHORT_S)
        for n in range(5):
            more: dict[str, Any] = {"state": Replace(b"s"), "fences": {"p": 1}, "keep": short}
            await log.append(f"old{n}", b"x", id="a", **more)
        gone = Keep(ended_s=SHORT_S, ids_s=LONG_S)
        await log.append("gone", b"x", id="a", keep=gone, ends=True)
        await log.append("open", b"x", id="a")
        await self.age(store, SHORT_S + LITTLE_S)
        assert await log.sweep(limit=2) <= 2
        await log.append("fresh", b"x", id="a", keep=short)
        assert await log.sweep() <= 5
        assert await log.sweep() == 0
        assert await self.streams_left(store) in (None, 3)
        lives = {name: (await log.read(name)).life for name in ("old0", "gone", "open", "fresh")}
        assert lives == {"old0": "unknown", "gone": "gone", "open": "open", "fresh": "open"}
        assert isinstance(await log.append("gone", b"x", id="a"), Repeated)
        assert len((await log.read("open")).entries) == 1

    async def test_what_was_swept_is_no_hole_when_the_clock_goes_back(
        self, store: Any, log: Any
    ) -> None:
        keep = Keep(ended_s=SHORT_S, ids_s=LONG_S)
        first = await put(log, "a", b"1", state=Replace(b"s"), keep=keep)
        head = await put(log, "z", b"2", ends=True, keep=keep)
        await self.age(store, SHORT_S + LITTLE_S)
        assert (await log.load(STREAM)).life == "gone"
        await log.sweep()
        await self.age(store, -2 * LITTLE_S)
        for after, left in ((None, 2), (first, 1), (head, 0)):
            page = await log.read(STREAM, after)
            assert page.head == head
            assert page.lost == (after != head) or len(page.entries) == left, page
        assert (await log.load(STREAM)).position == head
        assert await log.append(STREAM, b"1", id="a", keep=keep) == Repeated(first)
        assert await log.append(STREAM, b"3", id="c", keep=keep) == Ended(head)
        assert await log.trim(STREAM, 1) in (0, 1)
        assert not (await log.read(STREAM, head)).lost

    async def test_new_streams_make_room_for_themselves(self, store: Any, log: Any) -> None:
        """What nobody sweeps does not pile up."""
        for n in range(6):
            await log.append(f"old{n}", b"x", id="a", keep=Keep(idle_s=SHORT_S))
        await self.age(store, SHORT_S + LITTLE_S)
        for n in range(6):
            await log.append(f"new{n}", b"x", id="a")
        assert await self.streams_left(store) in (None, 6)
