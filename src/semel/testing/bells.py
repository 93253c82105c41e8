"""What a bell must do, as tests. Prove your own store by subclassing `BellContract`:

    class TestMyBell(BellContract):
        @pytest.fixture
        async def store(self):
            ...

A ring may be lost or spurious, and no log depends on it. But a bell that is well and hears every
append is what makes a reader quick: so much is tested here. If a process may have several stores on
one place, give another one by `another`, as for `LogContract`. Needs pytest-asyncio, in either
mode, and hypothesis.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from semel.colour import Colour, run
from semel.ports import Bell, LogStore
from semel.testing.driven import InBothColours, opened
from semel.testing.log_appending import STREAM, log_of, put

__all__ = ["BellContract"]

# For a ring that must come: long, because only a failure waits for it.
WITHIN_S = 10.0


class Ear:
    """Counts rings, and waits for the next."""

    def __init__(self) -> None:
        self.rings = 0
        self._rung = asyncio.Event()
        self._home = asyncio.get_running_loop()

    def wake(self) -> None:
        assert asyncio.get_running_loop() is self._home
        self.rings += 1
        self._rung.set()

    async def hears(self) -> None:
        """Come back when it has rung since the last time."""
        await asyncio.wait_for(self._rung.wait(), WITHIN_S)
        self._rung.clear()


@asynccontextmanager
async def bell_of(store: LogStore) -> AsyncIterator[Bell]:
    bell = store.bell()
    try:
        yield bell
    finally:
        await bell.aclose()


class BellContract(InBothColours):
    """Every promise of the `Bell` port, one test each."""

    async def another(self, store: Any) -> Any:
        """Return a second store on the same place; by default, the store itself."""
        return store

    @asynccontextmanager
    async def other_log(self, store: Any, colour: Colour) -> AsyncIterator[Any]:
        """The log of that other store."""
        async with opened(self, store) as other:
            yield log_of(other, colour)

    @pytest.fixture
    def log(self, store: LogStore, colour: Colour) -> Any:
        return log_of(store, colour)

    @pytest.fixture
    async def bell(self, store: LogStore) -> AsyncIterator[Bell]:
        async with bell_of(store) as bell:
            yield bell

    async def test_an_append_rings(self, log: Any, bell: Bell) -> None:
        ear = Ear()
        await bell.listen(STREAM, ear.wake)
        for n in range(3):
            await put(log, f"e{n}")
            await ear.hears()

    async def test_the_end_of_a_stream_rings_also_without_an_entry(
        self, log: Any, bell: Bell
    ) -> None:
        ear = Ear()
        await put(log, "a")
        await bell.listen(STREAM, ear.wake)
        await put(log, "z", None, ends=True)
        await ear.hears()

    async def test_an_append_in_another_thread_rings_here(
        self, log: Any, bell: Bell, colour: Colour
    ) -> None:
        ear = Ear()
        await bell.listen(STREAM, ear.wake)
        await away(colour, put(log, "a"))
        await ear.hears()

    async def test_an_append_through_another_store_rings(
        self, store: Any, bell: Bell, colour: Colour
    ) -> None:
        ear = Ear()
        await bell.listen(STREAM, ear.wake)
        async with self.other_log(store, colour) as other:
            for n in range(3):
                await put(other, f"e{n}")
                await ear.hears()

    async def test_closing_a_store_and_its_bell_leaves_the_bells_of_others_ringing(
        self, store: Any, log: Any, bell: Bell, colour: Colour
    ) -> None:
        ear, beside = Ear(), Ear()
        async with opened(self, store) as stays, bell_of(stays) as its_bell:
            await bell.listen(STREAM, ear.wake)
            await its_bell.listen(STREAM, beside.wake)
            async with opened(self, store) as goes, bell_of(goes) as leaving:
                third = Ear()
                await leaving.listen(STREAM, third.wake)
                await put(log_of(goes, colour), "a")
                for each in (ear, beside, third):
                    await each.hears()
            for id, each in (("b", log), ("c", log_of(stays, colour))):
                await put(each, id)
                await ear.hears()
                await beside.hears()

    async def test_who_listens_before_reading_misses_nothing(
        self, log: Any, bell: Bell, colour: Colour
    ) -> None:
        """Nobody looks again of his own accord: a ring that is lost would end this."""
        total = 20
        ear = Ear()

        async def write() -> None:
            for n in range(total):
                await put(log, f"e{n}")
                await colour.sleep(0.001 * (n % 3))

        writing = asyncio.ensure_future(away(colour, write()))
        await bell.listen(STREAM, ear.wake)
        head = None
        while (page := await log.read(STREAM, head)).head.offset < total:
            head = page.head if page.life != "unknown" else None
            await ear.hears()
        await writing

    async def test_all_who_listen_are_woken_once_they_listen(
        self, store: LogStore, log: Any, bell: Bell
    ) -> None:
        first, second, third = Ear(), Ear(), Ear()
        async with bell_of(store) as other:
            await bell.listen(STREAM, first.wake)
            await bell.listen(STREAM, second.wake)
            await other.listen(STREAM, third.wake)
            await put(log, "a")
            for ear in (first, second, third):
                await ear.hears()
            await bell.leave(STREAM, first.wake)
            await put(log, "b")
            for ear in (second, third):
                await ear.hears()

    async def test_a_listener_that_fails_harms_nobody(
        self, store: Any, log: Any, bell: Bell, colour: Colour
    ) -> None:
        def fail() -> None:
            raise ZeroDivisionError("a fault of this listener alone")

        ear, other_ear = Ear(), Ear()
        await bell.listen(STREAM, fail)
        await bell.listen(STREAM, ear.wake)
        await bell.listen("other", other_ear.wake)
        async with self.other_log(store, colour) as other:
            for n, each in enumerate((log, other, other)):
                await put(each, f"e{n}")
                await ear.hears()
            await other.append("other", b"x", id="a")
            await other_ear.hears()

    async def test_every_stream_has_its_own(self, log: Any, bell: Bell) -> None:
        ears = {f"s{n}": Ear() for n in range(4)}
        for stream, ear in ears.items():
            await bell.listen(stream, ear.wake)
        for stream, ear in ears.items():
            await log.append(stream, b"x", id="a")
            await ear.hears()

    async def test_who_has_left_is_not_woken(self, log: Any, bell: Bell) -> None:
        ear, stays = Ear(), Ear()
        await bell.listen(STREAM, ear.wake)
        await bell.listen(STREAM, stays.wake)
        await put(log, "a")
        await ear.hears()
        await bell.leave(STREAM, ear.wake)
        await stays.hears()
        before = ear.rings
        await put(log, "b")
        await stays.hears()
        await bell.leave(STREAM, stays.wake)
        await bell.leave(STREAM, stays.wake)
        await put(log, "c")
        await bell.listen(STREAM, stays.wake)
        await put(log, "d")
        await stays.hears()
        assert ear.rings == before

    async def test_a_closed_bell_is_quiet(
        self, store: LogStore, log: Any, bell: Bell, colour: Colour
    ) -> None:
        ear, stays = Ear(), Ear()
        await bell.listen(STREAM, stays.wake)
        closed = store.bell()
        await closed.listen(STREAM, ear.wake)
        await closed.aclose()
        before = ear.rings
        async with self.other_log(store, colour) as other:
            for n, each in enumerate((log, other, other, other)):
                await put(each, f"e{n}")
                await stays.hears()
        await closed.leave(STREAM, ear.wake)
        await closed.aclose()
        assert ear.rings == before


async def away(colour: Colour, work: Coroutine[Any, Any, Any]) -> Any:
    """Let the work be done somewhere else: in a thread, where it never suspends."""
    return await (asyncio.to_thread(run, work) if colour.name == "sync" else work)
