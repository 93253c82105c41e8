"""Cut off at any await: cancelled, timed out, interrupted. Nothing leaks, nothing is doubled."""

from __future__ import annotations

import asyncio

import pytest

from semel import (
    OutcomeUnknownError,
    StoreUnavailableError,
    current,
    idempotent,
    once,
    step,
)
from semel.colour import SYNC, run
from semel.keys import make_key
from semel.stores.memory import MemoryStore
from semel.testing.clock import FakeClock
from semel.values import State
from support.wrapped import WrappedStore


@pytest.fixture
def store():
    return WrappedStore(MemoryStore(clock=FakeClock()))


def record(store, key="k"):
    return run(store.store.ledger(SYNC).look(make_key(key).id))


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("where", ["delay_before", "delay_after"])
async def test_cancelled_while_claiming_leaves_the_key_free(store, where):
    calls = []

    @idempotent(store=store, key="k")
    async def pay():
        calls.append(1)
        return "ok"

    getattr(store.line, where)["claim"] = 0.05
    task = asyncio.create_task(pay())
    await asyncio.sleep(0.01)
    await cancelled(task)
    getattr(store.line, where).clear()
    assert await pay() == "ok"
    assert calls == [1]


async def test_cancelled_in_the_body_with_retry_frees_the_key_at_once(store):
    entered = asyncio.Event()

    @idempotent(store=store, key="k")
    async def pay():
        if current().number == 1:
            entered.set()
            await asyncio.sleep(60)
        return "ok"

    task = asyncio.create_task(pay())
    await entered.wait()
    await cancelled(task)
    assert record(store).state is State.FAILED
    assert "CancelledError" in record(store).error
    assert await pay() == "ok"


async def test_cancelled_in_the_body_with_hold_is_unknown(store):
    entered = asyncio.Event()

    @idempotent(store=store, key="k", on_crash="hold")
    async def pay():
        entered.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(pay())
    await entered.wait()
    await cancelled(task)
    assert record(store).state is State.UNKNOWN
    with pytest.raises(OutcomeUnknownError):
        await pay()


@pytest.mark.parametrize("where", ["delay_before", "delay_after"])
async def test_cancelled_while_recording_is_recorded_all_the_same(store, where):
    calls = []

    @idempotent(store=store, key="k")
    async def pay():
        calls.append(1)
        return "ok"

    getattr(store.line, where)["complete"] = 0.05
    task = asyncio.create_task(pay())
    await asyncio.sleep(0.01)
    await cancelled(task)
    assert record(store).state is State.COMPLETED
    getattr(store.line, where).clear()
    assert await pay() == "ok"
    assert calls == [1]


async def test_a_second_cancel_during_the_cleanup_does_not_stop_it(store):
    @idempotent(store=store, key="k")
    async def pay():
        await asyncio.sleep(60)

    store.line.delay_before["release"] = 0.05
    task = asyncio.create_task(pay())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    await cancelled(task)
    assert record(store).state is State.FAILED


async def test_cancelled_while_failing_releases_all_the_same(store):
    @idempotent(store=store, key="k")
    async def pay():
        raise ValueError("x")

    store.line.delay_before["release"] = 0.05
    task = asyncio.create_task(pay())
    await asyncio.sleep(0.01)
    await cancelled(task)
    assert record(store).state is State.FAILED


async def test_a_timeout_around_the_call_is_a_cut_like_any_other(store):
    @idempotent(store=store, key="k")
    async def pay():
        if current().number == 1:
            await asyncio.sleep(60)
        return "ok"

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await pay()
    assert await pay() == "ok"


async def test_a_failing_sibling_in_a_task_group_cuts_it_too(store):
    @idempotent(store=store, key="k")
    async def pay():
        if current().number == 1:
            await asyncio.sleep(60)
        return "ok"

    async def fails():
        await asyncio.sleep(0.01)
        raise ValueError("sibling")

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(pay())
            group.create_task(fails())
    assert await pay() == "ok"


async def test_once_cut_off_follows_its_policy(store):
    async def block(key, policy):
        async with once(key, store=store, on_crash=policy):
            await asyncio.sleep(60)

    for key, policy, state in (("r", "retry", State.FAILED), ("h", "hold", State.UNKNOWN)):
        task = asyncio.create_task(block(key, policy))
        await asyncio.sleep(0.01)
        await cancelled(task)
        assert record(store, key).state is state


# --- the store goes away ------------------------------------------------------------------------


async def test_store_down_before_the_claim_runs_nothing(store):
    calls = []

    @idempotent(store=store, key="k")
    async def pay():
        calls.append(1)

    store.line.lose_request["claim"] = 99
    with pytest.raises(StoreUnavailableError) as caught:
        await pay()
    assert not caught.value.happened
    assert calls == []


async def test_a_held_claim_whose_reply_is_lost_is_withdrawn(store):
    """Nothing was begun: nobody should have to find out how it ended."""

    @idempotent(store=store, key="k", on_crash="hold")
    async def pay():
        return "ok"

    store.line.lose_reply["claim"] = 1
    with pytest.raises(StoreUnavailableError):
        await pay()
    assert record(store).state is State.FAILED
    assert await pay() == "ok"


async def test_a_claim_that_nobody_holds_on_to_costs_no_second_wait(store):
    @idempotent(store=store, key="k")
    async def pay():
        return "ok"

    store.line.lose_reply["claim"] = 1
    with pytest.raises(StoreUnavailableError):
        await pay()
    assert store.line.count == {"claim": 1}


async def test_on_unavailable_run_runs_unguarded_and_says_so(store, caplog):
    calls = []

    @idempotent(store=store, key="k", on_unavailable="run")
    async def pay():
        calls.append(1)
        return "ok"

    store.line.lose_request["claim"] = 1
    assert await pay() == "ok"
    assert "unguarded" in caplog.text
    assert await pay() == "ok"
    assert await pay() == "ok"
    assert len(calls) == 2


async def test_on_unavailable_run_never_reruns_a_body_that_raised_such_an_error(store):
    calls = []

    @idempotent(store=store, key="k", on_unavailable="run")
    async def pay():
        calls.append(1)
        raise StoreUnavailableError("some other store, in the body")

    with pytest.raises(StoreUnavailableError, match="some other store"):
        await pay()
    assert calls == [1]


@pytest.mark.parametrize("lost", ["lose_request", "lose_reply"])
async def test_recording_is_tried_again_after_a_blip(store, lost):
    calls = []

    @idempotent(store=store, key="k")
    async def pay():
        calls.append(1)
        return "ok"

    getattr(store.line, lost)["complete"] = 2
    assert await pay() == "ok"
    assert await pay() == "ok"
    assert calls == [1]


async def test_when_it_cannot_be_recorded_the_caller_learns_that_it_happened(store):
    @idempotent(store=store, key="k", lease=0.2, ttl=60)
    async def pay():
        return "charged"

    store.line.lose_request["complete"] = 99
    with pytest.raises(StoreUnavailableError, match="happened") as caught:
        await pay()
    assert caught.value.happened
    assert caught.value.result == "charged"


def test_the_same_for_sync(store):
    @idempotent(store=store, key="k", lease=0.2, ttl=60)
    def pay():
        return "charged"

    store.line.lose_request["complete"] = 99
    with pytest.raises(StoreUnavailableError, match="happened") as caught:
        pay()
    assert caught.value.result == "charged"


async def test_a_store_that_says_asking_again_is_no_use_is_not_asked_again(store):
    """A record in the caller's transaction dies with it: the effect has not happened."""

    @idempotent(store=store, key="k")
    async def pay():
        store.line.last_words = StoreUnavailableError("the transaction is dead", again=False)
        return "charged"

    with pytest.raises(StoreUnavailableError, match=r"^the transaction is dead$") as caught:
        await pay()
    assert not caught.value.happened
    assert store.line.count["complete"] == 1


async def test_a_failure_that_cannot_be_recorded_is_still_the_callers_error(store, caplog):
    @idempotent(store=store, key="k", lease=0.1, ttl=60)
    async def pay():
        raise ValueError("no funds")

    store.line.lose_request["release"] = 99
    with pytest.raises(ValueError, match="no funds"):
        await pay()
    assert "could not be recorded" in caplog.text


async def test_a_step_whose_record_blips_is_not_repeated(store):
    calls = []

    @idempotent(store=store, key="k")
    async def pay():
        await step("charge", lambda: calls.append(1))
        return "ok"

    store.line.lose_reply["note"] = 1
    assert await pay() == "ok"
    assert calls == [1]
