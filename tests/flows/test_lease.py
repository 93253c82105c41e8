"""A lease is kept alive while the body runs, and no longer than it should be."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time

import pytest

from semel import InProgressError, current, idempotent
from semel.stores.memory import MemoryStore
from support.wrapped import WrappedStore

SHORT = {"lease": 0.15, "ttl": 60}


@pytest.fixture
def store():
    return WrappedStore(MemoryStore())


def test_a_long_body_keeps_its_key_in_a_thread(store):
    inside, go_on = threading.Event(), threading.Event()

    @idempotent(store=store, key="k", **SHORT)
    def pay():
        inside.set()
        go_on.wait(10)
        return "ok"

    thread = threading.Thread(target=pay)
    thread.start()
    inside.wait(10)
    while store.line.count["renew"] < 6:  # twice the lease has gone by
        with pytest.raises(InProgressError):
            pay()
        time.sleep(0.01)
    go_on.set()
    thread.join()
    assert pay() == "ok"


async def test_a_long_body_keeps_its_key_on_the_loop(store):
    @idempotent(store=store, key="k", **SHORT)
    async def pay():
        while store.line.count["renew"] < 6:
            await asyncio.sleep(0.01)
        return "ok"

    task = asyncio.create_task(pay())
    while not task.done():
        await asyncio.sleep(0.02)
        if not task.done():
            with pytest.raises(InProgressError):
                await pay()
    assert await task == "ok"


async def test_renewal_ends_with_the_body(store):
    @idempotent(store=store, **SHORT)
    async def pay(n):
        return n

    for n in range(20):
        await pay(n)
    await asyncio.sleep(0.2)
    assert store.line.count["renew"] == 0


async def test_a_failed_renewal_is_not_a_lost_lease(store):
    seen = []

    @idempotent(store=store, key="k", lease=0.4, ttl=60)
    async def pay():
        store.line.lose_request["renew"] = 1
        while store.line.count["renew"] < 4:
            await asyncio.sleep(0.01)
        seen.append(current().lost)
        return current().number

    assert await pay() == 1
    assert seen == [False]


async def test_a_lease_that_should_be_over_is_renewed_once_the_store_is_back(store, caplog):
    """Nobody took it: that we counted it as over is no reason to let go of it."""
    store.line.lose_request["renew"] = 20  # twelve tries fit into one lease

    @idempotent(store=store, key="k", **SHORT)
    async def pay():
        while store.line.count["renew"] < 22:
            await asyncio.sleep(0.01)
        return current().lost

    assert await pay() is False
    assert caplog.text.count("could not be renewed") == 1


async def test_a_hung_body_does_not_hold_its_key_for_ever(store):
    hung = asyncio.Event()

    @idempotent(store=store, key="k", lease=0.1, max_run=0.2, ttl=60)
    async def pay():
        if current().number == 1:
            await hung.wait()
            return "late"
        return "taken over"

    task = asyncio.create_task(pay())
    await asyncio.sleep(0)
    while True:
        try:
            assert await pay() == "taken over"
            break
        except InProgressError:
            await asyncio.sleep(0.02)
    hung.set()
    assert await task == "taken over"


async def test_the_body_can_learn_that_it_lost_its_claim(store):
    from semel.colour import ASYNC
    from semel.keys import make_key

    @idempotent(store=store, key="k", **SHORT)
    async def pay():
        await store.store.ledger(ASYNC).forget(make_key("k").id, force=True)
        while not current().lost:
            await asyncio.sleep(0.01)
        current().raise_if_lost()

    from semel import ClaimLostError

    with pytest.raises(ClaimLostError):
        await asyncio.wait_for(pay(), 5)


def test_fork_after_first_use(store):
    """gunicorn --preload, Celery prefork: the child has its own renewal thread and its own line."""

    @idempotent(store=store, **SHORT)
    def pay(n):
        if n == "slow":
            while store.line.count["renew"] < 3:
                time.sleep(0.01)
        return n

    assert pay("first") == "first"
    pid = os.fork()
    if pid == 0:  # the child
        store.line.count["renew"] = 0
        os._exit(0 if pay("slow") == "slow" and pay("first") == "first" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pay("slow") == "slow"


def test_a_second_event_loop(store):
    @idempotent(store=store, on_duplicate="wait")
    async def pay(n):
        await asyncio.sleep(0)
        return n

    for n in range(3):
        assert asyncio.run(pay(n)) == n
        assert asyncio.run(pay(n)) == n


def test_the_renewal_thread_does_not_keep_a_process_alive():
    code = (
        "import semel, os\n"
        "from semel.stores import MemoryStore\n"
        "@semel.idempotent(store=MemoryStore())\n"
        "def f(): return 1\n"
        "f(); print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.stdout == "done\n"
    assert done.stderr == ""
    assert done.returncode == 0


def test_quick_calls_under_a_long_lease_do_not_pile_up():
    from semel.colour import SYNC

    store = MemoryStore()

    @idempotent(store=store, lease=3000, ttl=3000)
    def pay(n):
        return n

    for n in range(5000):
        pay(n)
    assert not SYNC._alarm.entries


def test_context_variables_and_thread_stay_the_callers_own(store):
    import contextvars

    var = contextvars.ContextVar("var", default=0)

    @idempotent(store=store)
    def pay():
        var.set(var.get() + 1)
        return threading.get_ident()

    assert pay() == threading.get_ident()
    assert var.get() == 1
