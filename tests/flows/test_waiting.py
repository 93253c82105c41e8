"""Many callers, one key: one runs, the others wait, and one of them takes over when it must."""

from __future__ import annotations

import asyncio
import threading

import pytest

from semel import InProgressError, idempotent
from semel.colour import SYNC, run
from semel.keys import make_key, new_attempt
from semel.stores.memory import MemoryStore
from semel.testing.clock import FakeClock
from semel.values import Terms
from semel.waiting import ROOM
from support.threads import in_threads
from support.wrapped import WrappedStore


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(clock):
    return WrappedStore(MemoryStore(clock=clock))


@pytest.fixture(autouse=True)
def room_is_empty_after():
    yield
    assert not ROOM._lines


def test_64_threads_one_run(store):
    calls = []
    gate = threading.Event()

    @idempotent(store=store, on_duplicate="wait")
    def pay(order):
        calls.append(order)
        gate.wait(5)
        return {"order": order}

    timer = threading.Timer(0.05, gate.set)
    timer.start()
    results = in_threads(lambda: pay("o"), 64)
    timer.join()
    assert results == [{"order": "o"}] * 64
    assert calls == ["o"]


async def test_64_tasks_one_run(store):
    calls = []

    @idempotent(store=store, on_duplicate="wait")
    async def pay(order):
        calls.append(order)
        await asyncio.sleep(0.02)
        return {"order": order}

    assert await asyncio.gather(*(pay("o") for _ in range(64))) == [{"order": "o"}] * 64
    assert calls == ["o"]


async def test_waiting_is_shared_so_the_store_is_asked_little(store):
    release = asyncio.Event()

    @idempotent(store=store, on_duplicate="wait")
    async def pay():
        await release.wait()
        return 1

    tasks = [asyncio.create_task(pay()) for _ in range(50)]
    await asyncio.sleep(0.3)
    # Each asks once on arrival; of all the waiters, one polls (at most 30 times in 0.3 s).
    assert store.line.count["claim"] <= 50 + 30
    release.set()
    assert await asyncio.gather(*tasks) == [1] * 50
    assert store.line.count["claim"] <= 50 + 30 + 2 * 50


async def test_a_waiter_takes_over_when_the_holder_fails(store):
    calls = []

    @idempotent(store=store, on_duplicate="wait")
    async def pay():
        calls.append(1)
        await asyncio.sleep(0.01)
        if len(calls) == 1:
            raise ValueError("the first fails")
        return "ok"

    results = await asyncio.gather(*(pay() for _ in range(10)), return_exceptions=True)
    assert [type(r) for r in results].count(ValueError) == 1
    assert results.count("ok") == 9
    assert len(calls) == 2


def test_a_waiting_thread_takes_over_when_the_holder_fails(store):
    calls = []
    lock = threading.Lock()

    @idempotent(store=store, on_duplicate="wait")
    def pay():
        with lock:
            calls.append(1)
            first = len(calls) == 1
        if first:
            raise ValueError("the first fails")
        return "ok"

    def attempt():
        try:
            return pay()
        except ValueError:
            return "failed"

    results = in_threads(attempt, 10)
    assert sorted(results) == ["failed"] + ["ok"] * 9
    assert len(calls) == 2


async def test_a_waiter_takes_over_from_a_dead_holder_elsewhere(store, clock):
    calls = []

    @idempotent(store=store, on_duplicate="wait", key="k", operation="o", fingerprint=None)
    async def pay():
        calls.append(1)
        return "ok"

    key = make_key("k", operation="o")
    run(store.store.ledger(SYNC).claim(key, attempt=new_attempt(), terms=Terms()))
    tasks = [asyncio.create_task(pay()) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in tasks)
    clock.advance(31)
    assert await asyncio.gather(*tasks) == ["ok"] * 5
    assert calls == [1]


async def test_a_record_that_expires_mid_wait_is_claimed_again(store, clock):
    @idempotent(store=store, on_duplicate="wait", key="k", operation="o", fingerprint=None, ttl=60)
    async def pay():
        return "fresh"

    key = make_key("k", operation="o")
    run(store.store.ledger(SYNC).claim(key, attempt=new_attempt(), terms=Terms(30, 60)))
    task = asyncio.create_task(pay())
    await asyncio.sleep(0.02)
    clock.advance(1000)
    assert await task == "fresh"


async def test_waiting_ends_at_its_timeout(store):
    @idempotent(
        store=store,
        on_duplicate="wait",
        key="k",
        operation="o",
        wait_timeout=0.05,
        fingerprint=None,
    )
    async def pay():
        raise AssertionError("must not run")

    key = make_key("k", operation="o")
    run(store.store.ledger(SYNC).claim(key, attempt=new_attempt(), terms=Terms()))
    results = await asyncio.gather(*(pay() for _ in range(5)), return_exceptions=True)
    assert [type(r) for r in results] == [InProgressError] * 5


def test_waiting_in_threads_ends_at_its_timeout(store):
    @idempotent(
        store=store,
        on_duplicate="wait",
        key="k",
        operation="o",
        wait_timeout=0.05,
        fingerprint=None,
    )
    def pay():
        raise AssertionError("must not run")

    key = make_key("k", operation="o")
    run(store.store.ledger(SYNC).claim(key, attempt=new_attempt(), terms=Terms()))
    with pytest.raises(InProgressError):
        pay()


async def test_too_many_waiters_are_turned_away(store):
    release = asyncio.Event()

    @idempotent(store=store, on_duplicate="wait", max_waiters=3)
    async def pay():
        await release.wait()
        return 1

    tasks = [asyncio.create_task(pay()) for _ in range(6)]
    await asyncio.sleep(0.02)
    release.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results.count(1) == 4
    assert [type(r) for r in results].count(InProgressError) == 2


async def test_a_cancelled_waiter_leaves_the_others_and_the_holder_alone(store):
    release = asyncio.Event()
    calls = []

    @idempotent(store=store, on_duplicate="wait")
    async def pay():
        calls.append(1)
        await release.wait()
        return 1

    tasks = [asyncio.create_task(pay()) for _ in range(6)]
    await asyncio.sleep(0.02)
    tasks[1].cancel()  # the one in front
    tasks[3].cancel()
    await asyncio.sleep(0.02)
    release.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results.count(1) == 4
    assert calls == [1]


async def test_if_the_one_in_front_leaves_the_next_takes_up_its_duty(store, clock):
    @idempotent(store=store, on_duplicate="wait", key="k", operation="o", fingerprint=None)
    async def pay():
        return "ok"

    key = make_key("k", operation="o")
    run(store.store.ledger(SYNC).claim(key, attempt=new_attempt(), terms=Terms()))
    first = asyncio.create_task(pay())
    await asyncio.sleep(0)
    second = asyncio.create_task(pay())
    await asyncio.sleep(0.02)
    first.cancel()
    await asyncio.sleep(0.02)
    clock.advance(31)
    assert await asyncio.wait_for(second, 5) == "ok"


async def test_nobody_gives_up_without_asking_when_the_one_in_front_hangs(store, clock):
    @idempotent(
        store=store,
        on_duplicate="wait",
        key="k",
        operation="o",
        wait_timeout=0.1,
        fingerprint=None,
    )
    async def pay():
        return "ok"

    key = make_key("k", operation="o")
    run(store.store.ledger(SYNC).claim(key, attempt=new_attempt(), terms=Terms()))
    first = asyncio.create_task(pay())
    await asyncio.sleep(0)
    second = asyncio.create_task(pay())
    await asyncio.sleep(0)
    store.line.delay_before["claim"] = 30  # the first one hangs in its next question
    while store.line.count["claim"] < 3:
        await asyncio.sleep(0)
    del store.line.delay_before["claim"]
    clock.advance(31)
    assert await asyncio.wait_for(second, 5) == "ok"
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_threads_and_tasks_wait_for_each_other(store):
    """One store, both colours: a sync holder finishing wakes an async waiter."""
    started, finish = threading.Event(), threading.Event()
    settings = {"store": store, "key": "k", "operation": "o", "on_duplicate": "wait"}

    @idempotent(**settings)
    def holder():
        started.set()
        finish.wait(5)
        return "from the thread"

    @idempotent(**settings)
    async def waiter():
        raise AssertionError("must not run")

    running = asyncio.create_task(asyncio.to_thread(holder))
    await asyncio.to_thread(started.wait, 5)
    waiting = asyncio.create_task(waiter())
    await asyncio.sleep(0.02)
    finish.set()
    assert await asyncio.wait_for(waiting, 5) == "from the thread"
    assert await running == "from the thread"


async def test_a_waiter_with_other_arguments_gets_its_own_answer(store):
    from semel import IdempotencyConflictError

    release = asyncio.Event()

    @idempotent(store=store, key="k", on_duplicate="wait")
    async def pay(amount):
        await release.wait()
        return amount

    right = [asyncio.create_task(pay(1)) for _ in range(3)]
    await asyncio.sleep(0.01)
    with pytest.raises(IdempotencyConflictError):
        await pay(2)
    release.set()
    assert await asyncio.gather(*right) == [1, 1, 1]
