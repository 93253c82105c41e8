"""What a log must do, as tests. Prove your own store by subclassing `LogContract`:

    class TestMyLog(LogContract):
        @pytest.fixture
        async def store(self):
            store = MyStore(...)
            yield store
            await store.aclose()

        async def age(self, store, seconds):
            ...make every stream `seconds` older...

The tests are `async def` and run in both colours; over the sync colour every verb is driven to its
end on this thread. A store that can be made to fail in the middle of an append subclasses
`BreakingLogContract`. Needs pytest-asyncio, in either mode, and hypothesis.

If a process may have several stores on one place, give another one; the contract closes it:

        async def another(self, store):
            return MyStore(...)  # the same place

Without `another`, the tests over several stores use the one store several times.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ClassVar

import pytest

from semel.colour import ASYNC, SYNC, Colour
from semel.entries import (
    Appended,
    Entry,
    Field,
    FieldValue,
    Keep,
    Position,
    Repeated,
    Replace,
    VersionConflict,
    beginning,
)
from semel.errors import SettingsError, StoreUnavailableError
from semel.testing.driven import at_once, opened, play_histories
from semel.testing.log_appending import STREAM, datas, log_of, put
from semel.testing.log_history import LogModel, LogMove, make_move, moves_of_a_log
from semel.testing.log_keeping import LITTLE_S, SHORT_S, KeepingContract

__all__ = ["BreakingLogContract", "LogContract"]

# For whatever must come: long, because only a failure waits for it.
WITHIN_S = 20.0


class LogContract(KeepingContract):
    """Every promise of the `Log` port, one test each."""

    examples: ClassVar[int] = 25

    async def another(self, store: Any) -> Any:
        """Return a second store on the same place; by default, the store itself."""
        return store

    @asynccontextmanager
    async def both(self, store: Any, colour: Colour) -> AsyncIterator[tuple[Any, Any]]:
        """The logs of two stores on one place."""
        async with opened(self, store) as other:
            yield log_of(store, colour), log_of(other, colour)

    # --- reading ------------------------------------------------------------------------------

    async def test_reading_begins_behind_the_position_and_stops_at_the_limit(
        self, log: Any
    ) -> None:
        positions = [await put(log, f"e{n}", b"%d" % n) for n in range(1, 6)]
        for after in (None, beginning(STREAM)):
            page = await log.read(STREAM, after, limit=2)
            assert [e.data for e in page.entries] == [b"1", b"2"]
            assert page.head == positions[4]
        page = await log.read(STREAM, positions[1], limit=2)
        assert [e.data for e in page.entries] == [b"3", b"4"]
        assert [e.data for e in (await log.read(STREAM, positions[3])).entries] == [b"5"]

    async def test_an_empty_page_still_has_a_head(self, log: Any) -> None:
        head = await put(log, "a")
        page = await log.read(STREAM, head)
        assert (list(page.entries), page.head, page.lost, page.life) == ([], head, False, "open")

    async def test_a_stream_that_is_not_there_has_a_position(self, log: Any) -> None:
        start = beginning(STREAM)
        for after in (None, start):
            page = await log.read(STREAM, after)
            assert (list(page.entries), page.head, page.lost) == ([], start, False)
            assert page.life == "unknown"
        snapshot = await log.load(STREAM)
        assert (snapshot.position, snapshot.life, snapshot.state) == (start, "unknown", None)
        assert dict(snapshot.fields) == {}
        await put(log, "a", b"1")
        assert await datas(log, start) == [b"1"]

    async def test_a_stream_without_an_entry_has_a_position(self, log: Any) -> None:
        await put(log, "r", None, reply=b"no")
        for after in (None, beginning(STREAM)):
            page = await log.read(STREAM, after)
            assert (page.head, page.lost, page.life) == (beginning(STREAM), False, "open")

    async def test_a_position_ahead_of_the_head_is_lost(self, log: Any) -> None:
        await log.append("job-2", b"1", id="a")
        ahead = (await log.append("job-2", b"2", id="b")).position
        assert (await log.read(STREAM, ahead)).lost
        head = await put(log, "a")
        page = await log.read(STREAM, ahead)
        assert (page.lost, list(page.entries), page.head) == (True, [], head)
        assert (await log.read(STREAM, Position(2, head.tag))).lost
        assert (await log.read(STREAM, Position(2**53 - 1, head.tag))).lost

    async def test_a_position_of_another_stream_or_tag_is_lost(self, log: Any) -> None:
        ours = [beginning(STREAM)] + [await put(log, f"e{n}") for n in range(3)]
        answers = [await log.append("job-2", b"x", id=f"e{n}") for n in range(3)]
        theirs = [beginning("job-2"), *(answer.position for answer in answers)]
        for mine, other in zip(ours, theirs, strict=True):
            assert not (await log.read(STREAM, mine)).lost
            page = await log.read(STREAM, other)
            assert (page.lost, list(page.entries), page.head) == (True, [], ours[3])

    async def test_a_position_stands_for_all_that_came_before_it(
        self, store: Any, log: Any
    ) -> None:
        """A failover may take entries back, and their offsets are given out again."""
        keep = Keep(idle_s=SHORT_S)
        histories = (
            [("a", b"1"), ("b", b"2"), ("c", b"3")],
            [("a", b"1"), ("b", b"other"), ("c", b"3")],
            [("a", b"1"), ("other", b"2"), ("c", b"3")],
            [("b", b"2"), ("a", b"1"), ("c", b"3")],
            [("a", b"1"), ("b", b"2"), ("c", b"3")],
        )
        given: list[list[Position]] = []
        for history in histories:
            given.append([await put(log, id, data, keep=keep) for id, data in history])
            for read in given:
                same = [r == g for r, g in zip(read, given[-1], strict=True)]
                lost = [(await log.read(STREAM, position)).lost for position in read]
                assert lost == [not is_ours for is_ours in same]
            await self.age(store, SHORT_S + LITTLE_S)
        assert given[0] == given[4]
        assert len({positions[2] for positions in given}) == 4
        assert given[0][0] == given[1][0] == given[2][0]

    async def test_heads_are_told_in_the_order_they_were_asked_for(self, log: Any) -> None:
        assert list(await log.heads([])) == []
        head = await put(log, "a")
        other = (await log.append("job-2", b"x", id="a")).position
        await log.append("ended", b"x", id="a", ends=True)
        ended = (await log.load("ended")).position
        names = ["job-2", "nobody", STREAM, "ended", "job-2"]
        assert list(await log.heads(names)) == [other, beginning("nobody"), head, ended, other]
        many = [f"nobody-{n}" for n in range(1500)]
        assert list(await log.heads([*many, STREAM])) == [*map(beginning, many), head]

    # --- many at once -------------------------------------------------------------------------

    async def test_many_writers_make_no_gap_and_no_twin(self, store: Any, colour: Colour) -> None:
        """Each id comes twice, by different writers; a reader meanwhile never sees a hole."""
        writers, each = 8, 6
        ids = [[f"w{n // 2}-{i}" for i in range(each)] for n in range(writers)]
        total = len({id for mine in ids for id in mine})
        async with self.both(store, colour) as logs:

            async def write(number: int) -> list[Any]:
                log = logs[number % 2]
                return [await log.append(STREAM, id.encode(), id=id) for id in ids[number]]

            async def read() -> list[Entry]:
                return await self._all(logs[0], total, colour)

            works = [*((lambda n=n: write(n)) for n in range(writers)), read, read]
            *answers, seen, seen_too = await at_once(colour, works)
            assert seen == seen_too
            assert seen == list((await logs[1].read(STREAM)).entries)
        assert [e.position.offset for e in seen] == list(range(1, total + 1))
        positions = {e.id: e.position for e in seen}
        assert len(positions) == total
        for mine, told in zip(ids, answers, strict=True):
            assert [a.position for a in told] == [positions[id] for id in mine]
        kinds = [type(answer) for told in answers for answer in told]
        assert kinds.count(Appended) == kinds.count(Repeated) == total

    async def _all(self, log: Any, total: int, colour: Colour) -> list[Entry]:
        seen: list[Entry] = []
        after = None
        deadline = time.monotonic() + WITHIN_S
        while len(seen) < total:
            assert time.monotonic() < deadline, f"only {len(seen)} of {total}"
            page = await log.read(STREAM, after, limit=5)
            assert not page.lost
            begin = len(seen) + 1
            offsets = [e.position.offset for e in page.entries]
            assert offsets == list(range(begin, begin + len(offsets)))
            assert page.head.offset >= len(seen) + len(offsets)
            seen += page.entries
            after = seen[-1].position if seen else None
            await colour.sleep(0)
        return seen

    async def test_of_many_repeats_at_once_one_is_appended(
        self, store: Any, colour: Colour
    ) -> None:
        async with self.both(store, colour) as logs:
            works = [
                lambda n=n: logs[n % 2].append(STREAM, b"x", id="a", reply=b"%d" % n)
                for n in range(16)
            ]
            answers = await at_once(colour, works)
        assert [type(a) for a in answers].count(Appended) == 1
        assert [type(a) for a in answers].count(Repeated) == 15
        assert len({(a.position, a.reply) for a in answers}) == 1

    async def test_of_many_at_one_version_one_is_appended(self, store: Any, colour: Colour) -> None:
        async with self.both(store, colour) as logs:
            works = [
                lambda n=n: logs[n % 2].append(STREAM, b"x", id=f"e{n}", expect=0)
                for n in range(16)
            ]
            answers = await at_once(colour, works)
            head = (await logs[0].load(STREAM)).position
        assert [type(a) for a in answers].count(Appended) == 1
        assert answers.count(VersionConflict(head)) == 15
        assert head.offset == 1

    async def test_many_streams_at_once_know_nothing_of_one_another(
        self, log: Any, colour: Colour
    ) -> None:
        works = [
            lambda n=n: log.append(f"s{n % 5}", b"%d" % n, id=f"e{n}", state=Replace(b"%d" % n))
            for n in range(20)
        ]
        answers = await at_once(colour, works)
        for stream in range(5):
            page = await log.read(f"s{stream}")
            assert {e.data for e in page.entries} == {b"%d" % n for n in range(stream, 20, 5)}
            positions = {e.position for e in page.entries}
            assert positions == {a.position for a in answers[stream::5]}
            assert (await log.load(f"s{stream}")).state == page.entries[-1].data

    async def test_a_snapshot_belongs_to_its_position(self, store: Any, colour: Colour) -> None:
        total = 30
        async with self.both(store, colour) as logs:

            async def write() -> None:
                for n in range(1, total + 1):
                    number = b"%d" % n
                    state = Replace(number) if n % 2 else Field("even", n, number)
                    await logs[0].append(STREAM, number, id=f"e{n}", expect=n - 1, state=state)
                    await colour.sleep(0)

            async def look() -> None:
                deadline = time.monotonic() + WITHIN_S
                offset = 0
                while offset < total:
                    assert time.monotonic() < deadline
                    snapshot = await logs[1].load(STREAM)
                    offset = snapshot.position.offset
                    odd = offset - 1 + offset % 2
                    assert snapshot.state == (b"%d" % odd if odd > 0 else None)
                    even = offset - offset % 2
                    field = {"even": FieldValue(even, b"%d" % even)} if even else {}
                    assert dict(snapshot.fields) == field
                    await colour.sleep(0)

            await at_once(colour, [write, look])

    # --- several stores on one place ----------------------------------------------------------

    async def test_appends_through_stores_of_both_colours_leave_no_gap(
        self, store: Any, colour: Colour
    ) -> None:
        opposite = ASYNC if colour is SYNC else SYNC
        last = opposite if opposite.name in self.colours else colour
        async with self.both(store, colour) as (one, two), opened(self, store) as third:
            logs = [one, two, log_of(third, last)]
            for n in range(9):
                answer = await logs[n % 3].append(STREAM, b"%d" % n, id=f"e{n}", expect=n)
                assert isinstance(answer, Appended)
            for log in logs:
                assert await datas(log) == [b"%d" % n for n in range(9)]
                assert isinstance(await log.append(STREAM, b"0", id="e0"), Repeated)

    async def test_closing_a_store_leaves_the_log_of_another_working(
        self, store: Any, log: Any, colour: Colour
    ) -> None:
        async with self.both(store, colour) as (_, stays):
            async with self.both(store, colour) as (_, goes):
                await put(goes, "a", b"1")
            await put(stays, "b", b"2")
            await put(log, "c", b"3")
            assert await datas(stays) == await datas(log) == [b"1", b"2", b"3"]

    # --- against a model ----------------------------------------------------------------------

    async def test_any_history_agrees_with_the_model(self, store: Any, log: Any) -> None:
        """Random histories, step by step against `LogModel`; a failure shrinks to its shortest."""
        serial = iter(range(10**9))

        async def play(moves: Sequence[LogMove]) -> None:
            model = LogModel(f"h{next(serial)}-")
            for move in moves:
                await make_move(self, store, log, model, move)

        await play_histories(moves_of_a_log(), play, examples=self.examples, least=12, most=18)


class BreakingLogContract(LogContract):
    """For a store that can be made to fail while it writes a part of an append."""

    parts: ClassVar[tuple[str, ...]]
    """What an append writes, one after another."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        super().pytest_generate_tests(metafunc)
        if "part" in metafunc.fixturenames:
            metafunc.parametrize("part", self.parts)

    def breaking(self, store: Any, part: str) -> AbstractAsyncContextManager[None]:
        """As long as this is entered, writing that part fails, or is refused for good."""
        raise NotImplementedError

    async def test_an_append_that_fails_leaves_nothing(
        self, store: Any, log: Any, part: str
    ) -> None:
        asked: dict[str, Any] = {"fences": {"p": 2}, "state": Field("f", 2, b"2")}
        failures = (StoreUnavailableError, SettingsError)
        head = await put(log, "a", b"1", fences={"p": 1}, state=Field("f", 1, b"1"))
        async with self.breaking(store, part):
            with pytest.raises(failures):
                await log.append(STREAM, b"2", id="b", keep=Keep(entries=1), ends=True, **asked)
            with pytest.raises(failures):
                await log.append("job-2", b"2", id="b", **asked)
        assert await datas(log) == [b"1"]
        snapshot = await log.load(STREAM)
        assert (snapshot.position, snapshot.life) == (head, "open")
        assert dict(snapshot.fields) == {"f": FieldValue(1, b"1")}
        assert (await log.read("job-2")).life == "unknown"
        await put(log, "c", b"3", fences={"p": 1})
        assert (await put(log, "b", b"2", **asked)).offset == 3
