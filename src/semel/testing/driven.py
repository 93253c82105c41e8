"""How the contracts run one `async def` test in both colours, many at once, and over histories."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, TypeVar

import pytest

try:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "the contract needs hypothesis: pip install hypothesis", name="hypothesis"
    ) from missing

from semel.colour import ASYNC, SYNC, Colour, run

M = TypeVar("M")


class Driven:
    """A sync ledger or log as `async def` tests see it: each verb runs to its end."""

    def __init__(self, driven: Any) -> None:
        self._driven = driven

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._driven, name)

        async def to_its_end(*args: Any, **kwargs: Any) -> Any:
            return run(verb(*args, **kwargs))

        return to_its_end


class InBothColours:
    """Tests that ask for `colour` run once in each that the store has."""

    colours: ClassVar[tuple[str, ...]] = ("sync", "async")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "colour" in metafunc.fixturenames:
            chosen = [c for c in (SYNC, ASYNC) if c.name in self.colours]
            metafunc.parametrize("colour", chosen, ids=[c.name for c in chosen])


@asynccontextmanager
async def opened(contract: Any, store: Any) -> AsyncIterator[Any]:
    """Yield the contract's other store on the same place; close it, unless it is the same one."""
    other = await contract.another(store)
    try:
        yield other
    finally:
        if other is not store:
            await other.aclose()


async def at_once(colour: Colour, works: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> Any:
    """What each of them answers: as tasks, or each in a thread of its own."""
    if colour.name == "async":
        return await asyncio.gather(*(work() for work in works))
    return in_threads(lambda number: run(works[number]()), len(works))


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """What the work answers for 0, 1, 2 and so on, each in a thread of its own, in that order."""
    barrier = threading.Barrier(count)
    answers: list[Any] = [None] * count
    errors: list[BaseException] = []

    def one(number: int) -> None:
        barrier.wait()
        try:
            answers[number] = work(number)
        except BaseException as error:  # noqa: BLE001 - carried to the caller
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # or a gap of two lines would almost never be hit
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    return answers


async def play_histories(
    moves: st.SearchStrategy[M],
    play: Callable[[Sequence[M]], Coroutine[Any, Any, None]],
    *,
    examples: int,
    most: int,
    least: int = 0,
) -> None:
    """Play random histories on this loop; one that fails shrinks to its shortest."""
    loop = asyncio.get_running_loop()

    def sync_play(moves: list[M]) -> None:
        asyncio.run_coroutine_threadsafe(play(moves), loop).result()

    check = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )(given(st.lists(moves, min_size=least, max_size=most))(sync_play))
    await asyncio.to_thread(check)
