"""Sync code in a worker thread, below an async call, takes steps without awaiting them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from semel import current, idempotent, once, step
from semel.stores import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


async def test_a_step_in_a_thread_is_done_and_recorded(store):
    done: list[str] = []

    def work() -> Any:
        assert step("charge", done.append, "charged") is None
        return step("add", lambda a, b: a + b, 1, b=2)

    @idempotent(key="k", store=store)
    async def pay(fail: bool) -> Any:
        value = await asyncio.to_thread(work)
        if fail and len(done) == 1 and current().number == 1:
            raise ConnectionError
        return value

    with pytest.raises(ConnectionError):
        await pay(True)
    assert await pay(True) == 3
    assert done == ["charged"]


async def test_the_loop_is_free_meanwhile_and_the_work_is_not_done_in_it(store):
    loop_thread = threading.current_thread()
    entered, free = threading.Event(), threading.Event()

    def slow() -> bool:
        entered.set()
        return free.wait(10) and threading.current_thread() is not loop_thread

    async with once("k", store=store):
        task = asyncio.create_task(asyncio.to_thread(step, "slow", slow))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        free.set()
        assert await task


async def test_an_async_step_may_be_asked_for_from_a_thread(store):
    async def answer() -> int:
        await asyncio.sleep(0)
        return 7

    async with once("k", store=store):
        assert await asyncio.to_thread(step, "ask", answer) == 7


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration("none left")])
async def test_an_error_of_the_step_reaches_the_thread(store, error):
    def broken() -> None:
        raise error

    def work() -> BaseException:
        try:
            step("broken", broken)
        except (ValueError, RuntimeError, StopIteration) as caught:
            return caught
        raise AssertionError

    async with once("k", store=store):
        caught = await asyncio.wait_for(asyncio.to_thread(work), 10)
    assert caught is error or caught.__cause__ is error


async def test_current_is_the_attempt_in_the_thread_too(store):
    async with once("k", store=store) as attempt:
        found = await asyncio.to_thread(step, "who", lambda: current().child_key("x"))
        assert found == attempt.child_key("x")
