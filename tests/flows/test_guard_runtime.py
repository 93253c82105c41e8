"""The guard under threads, forks, loops, signals and shutdown: rows of tests/edges.toml."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from semel import (
    ClaimLostError,
    InProgressError,
    StoreUnavailableError,
    current,
    idempotent,
    once,
    step,
)
from semel.colour import SYNC, AsyncColour, run
from semel.keys import make_key, new_attempt
from semel.stores.file import FileStore
from semel.stores.memory import MemoryStore
from semel.testing.clock import FakeClock
from semel.values import Outcome, State, Terms
from semel.waiting import ROOM
from support.threads import in_threads
from support.wrapped import WrappedStore

PATIENCE = 60  # seconds until a test that hangs says so; nothing is measured by it


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(clock):
    return WrappedStore(MemoryStore(clock=clock))


@pytest.fixture
def live():
    """A store on this machine's clock, for tests that wait for real renewals."""
    return WrappedStore(MemoryStore())


@pytest.fixture(autouse=True)
def room_is_empty_after():
    yield
    assert not ROOM._lines


def look(store, key="k"):
    return run(store.store.ledger(SYNC).look(make_key(key).id))


def elsewhere(store, key="k", operation="o", terms=None):
    """Another process claims the key."""
    answer = run(
        store.store.ledger(SYNC).claim(
            make_key(key, operation=operation), attempt=new_attempt(), terms=terms or Terms()
        )
    )
    return answer.claim


async def until(true):
    async with asyncio.timeout(PATIENCE):
        while not true():
            await asyncio.sleep(0.001)


def wait_until(true):
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def python(code, *args):
    """Run this code in a process of its own, and give back what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or "not renewed" in done.stderr  # no new thread at the very end
    return done.stdout.split()


def child(work):
    """Fork, run this in the child, and give back its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(work() or 0)
        except BaseException:  # noqa: BLE001
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- threads ------------------------------------------------------------------------------------


def test_functions_that_share_a_store_never_get_each_others_results(live):
    guarded = {
        name: idempotent(store=live, operation=name, on_duplicate="wait")(answer)
        for name in ("a", "b", "c")
        for answer in [lambda n, name=name: (name, n)]
    }

    def call():
        return [(name, n, fn(n)) for n in range(50) for name, fn in guarded.items()]

    for results in in_threads(call, 4):
        for name, n, result in results:
            assert result == (name, n)
    records = run(live.store.ledger(SYNC).records(limit=1000))
    assert len(records) == 150
    assert {record.number for record in records} == {1}


def test_sync_bodies_are_not_capped_by_a_pool(store):
    together = threading.Barrier(60)

    @idempotent(store=store)
    def work(n):
        together.wait(PATIENCE)  # passes only when all sixty run at once
        return n

    numbers = iter(range(60))
    assert sorted(in_threads(lambda: work(next(numbers)), 60)) == list(range(60))


def test_one_thread_keeps_every_lease(live):
    inside = threading.Barrier(9)

    @idempotent(store=live, lease=0.3, ttl=60)
    def work(n):
        inside.wait(PATIENCE)
        seen = live.line.count["renew"]
        wait_until(lambda: live.line.count["renew"] >= seen + 8)
        return [t.name for t in threading.enumerate()].count("semel-alarm")

    numbers = iter(range(9))
    assert set(in_threads(lambda: work(next(numbers)), 9)) == {1}


def test_a_busy_body_does_not_starve_its_renewal(live):
    @idempotent(store=live, key="k", lease=0.5, ttl=60)
    def work():
        n = 0
        while live.line.count["renew"] < 3:  # pure Python, never letting go by itself
            n += 1
        return current().number

    assert work() == 1
    assert look(live).number == 1


async def test_a_body_that_blocks_the_loop_past_its_lease_still_counts_if_nobody_came(live):
    @idempotent(store=live, key="k", lease=0.1, ttl=60)
    async def work():
        time.sleep(0.3)  # noqa: ASYNC251 - no renewal can run meanwhile
        return current().number

    assert await work() == 1
    assert await work() == 1
    assert look(live).state is State.COMPLETED


def test_a_body_has_the_thread_locals_of_its_caller(store):
    local = threading.local()

    @idempotent(store=store)
    def work(who):
        local.seen = local.value
        return local.value

    def call():
        local.value = threading.get_ident()
        return work(local.value) == local.seen == local.value

    assert in_threads(call, 4) == [True] * 4


async def test_context_changes_of_an_async_body_are_kept(store):
    var = contextvars.ContextVar("var", default=0)

    @idempotent(store=store)
    async def work():
        seen = var.get()
        var.set(seen + 1)
        return seen

    var.set(7)
    assert await work() == 7
    assert var.get() == 8
    assert await work() == 7
    assert var.get() == 8


async def test_current_is_known_in_a_worker_thread_and_gone_afterwards(store):
    @idempotent(store=store, key="k")
    async def work():
        return await asyncio.to_thread(lambda: current().key)

    assert await work() == "k"
    with pytest.raises(ValueError, match="no guarded call"):
        current()


async def test_a_sync_guard_in_a_running_loop_works_and_blocks_only_for_its_own_time(store):
    @idempotent(
        store=store,
        key="k",
        operation="o",
        fingerprint=None,
        on_duplicate="wait",
        wait_timeout=0.05,
    )
    def work():
        return 1

    claim = elsewhere(store)
    with pytest.raises(InProgressError):
        work()
    run(store.store.ledger(SYNC).release(claim))
    assert work() == 1


# --- interrupted --------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_an_interrupted_body_hangs_nothing(store, cut):
    calls = []

    @idempotent(store=store, key="k", on_duplicate="wait")
    def work():
        calls.append(1)
        if len(calls) == 1:
            raise cut
        return "ok"

    with pytest.raises(cut):
        work()
    assert in_threads(work, 4) == ["ok"] * 4
    assert len(calls) == 2


class Signalled(BaseException):
    pass


@pytest.fixture
def signalled():
    """SIGUSR1 interrupts the main thread like Ctrl-C would."""

    def interrupt(number, frame):
        raise Signalled

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield lambda: os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_a_waiting_caller_can_be_interrupted(store, signalled):
    elsewhere(store)

    @idempotent(store=store, key="k", operation="o", fingerprint=None, on_duplicate="wait")
    def work():
        raise AssertionError("must not run")

    def interrupt():
        wait_until(lambda: ROOM._lines)
        signalled()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Signalled):
        work()
    thread.join()
    assert look(store).state is State.PENDING  # the holder is as it was


@pytest.mark.parametrize(("policy", "state"), [("retry", "FAILED"), ("hold", "UNKNOWN")])
def test_sigterm_releases_or_holds_and_never_forgets(tmp_path, policy, state):
    code = """
        import os, signal, sys
        from semel import idempotent
        from semel.stores.file import FileStore

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

        @idempotent(store=FileStore(sys.argv[1]), key="k", on_crash=sys.argv[2])
        def work():
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()

        work()
    """
    python(code, tmp_path / "ledger", policy)
    store = FileStore(tmp_path / "ledger")
    record = run(store.ledger(SYNC).look(make_key("k").id))
    assert record.state == state
    store.close()


async def test_the_waiters_of_a_cancelled_leader_are_served(store):
    calls = []

    @idempotent(store=store, on_duplicate="wait")
    async def work():
        calls.append(1)
        if len(calls) == 1:
            await asyncio.Event().wait()
        return "ok"

    leader = asyncio.create_task(work())
    await until(lambda: calls)
    waiters = [asyncio.create_task(work()) for _ in range(5)]
    await until(lambda: store.line.count["claim"] >= 6)
    leader.cancel()
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.gather(*waiters) == ["ok"] * 5
    assert leader.cancelled() or leader.cancelling()
    assert len(calls) == 2


async def test_a_group_of_tasks_inside_a_body(store):
    done = []

    @idempotent(store=store)
    async def work():
        async with asyncio.TaskGroup() as group:
            group.create_task(step("a", done.append, "a"))
            group.create_task(step("b", done.append, "b"))
        if current().number == 1:
            raise ValueError("again")
        return sorted(done)

    with pytest.raises(ValueError, match="again"):
        await work()
    assert await work() == ["a", "b"]


async def test_one_step_twice_at_the_same_time_is_refused(store):
    @idempotent(store=store)
    async def work():
        started = asyncio.Event()

        async def slow():
            started.set()
            await asyncio.Event().wait()

        first = asyncio.create_task(step("s", slow))
        await started.wait()
        try:
            await step("s", lambda: 1)
        finally:
            first.cancel()

    with pytest.raises(ValueError, match="its own name"):
        await work()


# --- forks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", ["exits", "raises", "returns"])
def test_a_child_forked_inside_a_body_does_not_end_its_parents_attempt(tmp_path, leaves):
    store = FileStore(tmp_path / "ledger")
    parent = os.getpid()

    @idempotent(store=store, key="k")
    def work():
        pid = os.fork()
        if pid == 0:
            if leaves == "exits":
                sys.exit(3)
            if leaves == "raises":
                raise ValueError("in the child")
            return "from the child"
        os.waitpid(pid, 0)
        assert run(store.ledger(SYNC).look(make_key("k").id)).state is State.PENDING
        return "from the parent"

    try:
        assert work() == "from the parent"
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert work() == "from the parent"
    store.close()


def test_a_child_forked_while_another_thread_works_can_call(tmp_path):
    store = FileStore(tmp_path / "ledger")
    inside, go_on = threading.Event(), threading.Event()

    @idempotent(store=store, on_duplicate="wait", wait_timeout=0.05)
    def work(n):
        if n == "slow":
            inside.set()
            go_on.wait(PATIENCE)
        return n

    thread = threading.Thread(target=work, args=("slow",))
    thread.start()
    inside.wait(PATIENCE)

    def in_child():
        try:
            work("slow")
        except InProgressError:
            return 0 if work("other") == "other" else 1
        return 2

    try:
        assert child(in_child) == 0
    finally:
        go_on.set()
        thread.join()
    assert work("slow") == "slow"
    store.close()


def test_a_spawned_process_shares_the_records(tmp_path):
    code = """
        import sys
        from semel import idempotent
        from semel.stores.file import FileStore

        def work(n):
            print("ran")
            return n

        fn = idempotent(store=FileStore(sys.argv[1]), operation="work")(work)
        print(fn(7))
    """
    assert python(code, tmp_path / "ledger") == ["ran", "7"]
    assert python(code, tmp_path / "ledger") == ["7"]


# --- loops --------------------------------------------------------------------------------------


def waited(store):
    calls = []

    @idempotent(store=store, on_duplicate="wait")
    async def work(n):
        calls.append(n)
        await asyncio.sleep(0)
        if len(calls) == 1:
            raise ValueError("the first fails")
        return n

    async def together(n):
        results = await asyncio.gather(*(work(n) for _ in range(20)), return_exceptions=True)
        return [r for r in results if not isinstance(r, ValueError)]

    return together, calls


def test_waiting_in_one_loop_after_another(store):
    together, calls = waited(store)
    assert asyncio.run(together(1)) == [1] * 19
    assert asyncio.run(together(1)) == [1] * 20
    assert asyncio.run(together(2)) == [2] * 20
    assert calls == [1, 1, 2]


def test_under_uvloop(store):
    uvloop = pytest.importorskip("uvloop")
    together, calls = waited(store)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(together(1)) == [1] * 19
    assert asyncio.run(together(1)) == [1] * 20
    assert calls == [1, 1]


def test_loops_in_threads_wait_for_each_other(store):
    calls = []
    gate = threading.Event()

    @idempotent(store=store, on_duplicate="wait")
    async def work():
        calls.append(1)
        await asyncio.to_thread(gate.wait, PATIENCE)
        return "ok"

    def open_gate():
        wait_until(lambda: sum(map(len, next(iter(ROOM._lines.values()), {}).values())) == 3)
        gate.set()

    opener = threading.Thread(target=open_gate)
    opener.start()
    assert in_threads(lambda: asyncio.run(work()), 4) == ["ok"] * 4
    opener.join()
    assert calls == [1]


def test_a_loop_that_ends_with_callers_inside_leaves_nothing_behind(store, clock):
    @idempotent(store=store, key="k", on_duplicate="wait")
    async def work():
        if current().number == 1:
            await asyncio.Event().wait()
        return current().number

    async def leave():
        tasks = [asyncio.create_task(work()) for _ in range(3)]
        await until(lambda: store.line.count["claim"] >= 3)
        del tasks  # asyncio.run cancels them

    asyncio.run(leave())
    assert asyncio.run(work()) in (2, 3, 4)


@pytest.mark.parametrize("where", ["body", "claim", "complete", "once"])
def test_a_loop_closed_under_a_caller_lets_the_lease_decide(store, clock, where):
    """Nothing can be awaited for a coroutine that the garbage collector closes."""
    never = asyncio.Event()
    settings = {"store": store, "key": "k", "operation": "o", "fingerprint": None}

    @idempotent(**settings)
    async def work():
        if where == "body" and current().number == 1:
            await never.wait()
        return current().number

    async def block():
        async with once("k", store=store, operation="o"):
            await never.wait()

    if where in ("claim", "complete"):
        store.line.delay_after[where] = 3600
    loop = asyncio.new_event_loop()
    task = loop.create_task(block() if where == "once" else work())
    for _ in range(3):
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    store.line.delay_after.clear()
    task._log_destroy_pending = False
    del task, loop, block
    gc.collect()
    if where == "complete":
        assert asyncio.run(work()) == 1
        return
    with pytest.raises(InProgressError):
        asyncio.run(work())
    clock.advance(31)
    assert asyncio.run(work()) == 2


def test_a_ring_to_a_closed_loop_is_nobodys_error():
    from semel.colour import ASYNC

    async def waiter():
        return ASYNC.waiter()

    left_over = asyncio.run(waiter())
    left_over.ring()


# --- the end of a process -----------------------------------------------------------------------


AT_EXIT = """
    import atexit, sys
    from semel import idempotent
    from semel.stores import MemoryStore

    @idempotent(store=MemoryStore())
    def work(n):
        return n

    @atexit.register
    def last():
        print(work(7), work(7))
"""


def test_a_call_while_python_shuts_down():
    assert python(AT_EXIT) == ["7", "7"]


def test_without_a_thread_to_spare_the_call_is_made_all_the_same(store, monkeypatch, caplog):
    from semel import colour

    def cannot(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(SYNC, "_alarm", colour._Alarm())
    monkeypatch.setattr(threading.Thread, "start", cannot)

    @idempotent(store=store)
    def work():
        return 1

    assert work() == 1
    assert "not renewed" in caplog.text
    assert not SYNC._alarm.entries


def test_a_process_that_ends_in_the_middle_of_a_daemon_thread_ends():
    code = """
        import threading
        from semel import idempotent
        from semel.stores import MemoryStore

        inside = threading.Event()

        @idempotent(store=MemoryStore(), lease=0.05, ttl=60)
        def work():
            inside.set()
            threading.Event().wait()

        threading.Thread(target=work, daemon=True).start()
        inside.wait()
        print("end")
    """
    assert python(code) == ["end"]


# --- many callers -------------------------------------------------------------------------------


async def test_a_thousand_callers_of_one_key(store):
    calls = []
    go_on = asyncio.Event()

    @idempotent(store=store, on_duplicate="wait", max_waiters=1000, wait_timeout=PATIENCE)
    async def work():
        calls.append(1)
        await go_on.wait()
        if len(calls) == 1:
            raise ValueError("the first fails")
        return "ok"

    tasks = [asyncio.create_task(work()) for _ in range(1000)]
    await until(lambda: store.line.count["claim"] >= 1000)
    go_on.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results.count("ok") == 999
    assert len(calls) == 2
    # Each asks when it comes and when it is rung, never in a loop of its own.
    assert store.line.count["claim"] < 5 * 1000


async def test_two_chains_that_wait_for_each_other_end_at_their_timeout(store):
    both = asyncio.Barrier(2)

    @idempotent(store=store, key="{key}", fingerprint=None, on_duplicate="wait", wait_timeout=0.1)
    async def work(key, then):
        if then is not None:
            await both.wait()
            await work(then, None)
        return key

    async with asyncio.timeout(PATIENCE):
        results = await asyncio.gather(work("a", "b"), work("b", "a"), return_exceptions=True)
    assert any(isinstance(result, InProgressError) for result in results)
    assert {look(store, key).state for key in "ab"} <= {State.FAILED, State.COMPLETED}


@pytest.mark.parametrize("policy", ["raise", "run"])
async def test_a_waiter_whose_store_goes_away_is_told_and_runs_nothing(store, policy):
    calls = []
    go_on = asyncio.Event()

    @idempotent(store=store, key="k", on_duplicate="wait", on_unavailable=policy)
    async def work():
        calls.append(1)
        await go_on.wait()
        return "ok"

    holder = asyncio.create_task(work())
    await until(lambda: calls)
    waiter = asyncio.create_task(work())
    await until(lambda: ROOM._lines)
    store.line.lose_request["claim"] = 10**6
    with pytest.raises(StoreUnavailableError):
        await asyncio.wait_for(waiter, PATIENCE)
    store.line.lose_request.clear()
    go_on.set()
    assert await holder == "ok"
    assert await work() == "ok"
    assert calls == [1]


# --- the lease against the store's own pace -----------------------------------------------------


class Late:
    """Time for the guard, in which the first replies to a claim take longer than a lease."""

    def __init__(self, store, clock, replies):
        self.now = 0.0
        self._store = store
        self._clock = clock
        self._left = replies
        self._carry = store.line.carry
        store.line.carry = self.carry

    async def carry(self, verb, call):
        answer = await self._carry(verb, call)
        if verb == "claim" and self._left > 0:
            self._left -= 1
            self.now += 31
            self._clock.advance(31)
            self.meanwhile()
        return answer

    def meanwhile(self):
        """What others do until the reply arrives."""


@pytest.fixture
def late(store, clock, monkeypatch):
    def make(replies):
        late = Late(store, clock, replies)
        monkeypatch.setattr(AsyncColour, "now", lambda self: late.now)
        return late

    return make


async def test_a_claim_that_arrives_after_its_lease_is_asked_for_again(store, late):
    calls = []

    @idempotent(store=store, key="k")
    async def work():
        calls.append(current().number)
        return "ok"

    late(2)
    assert await work() == "ok"
    assert calls == [1]
    assert store.line.count["claim"] == 3


async def test_a_store_slower_than_the_lease_runs_nothing(store, late):
    calls = []

    @idempotent(store=store, key="k")
    async def work():
        calls.append(1)

    late(99)
    with pytest.raises(StoreUnavailableError, match="Make lease longer") as caught:
        await work()
    assert not caught.value.happened
    assert calls == []
    assert look(store).state is State.FAILED


async def test_taken_over_before_it_began_it_does_not_begin(store, late):
    """The reply to the claim is stuck in the network while somebody else does the work."""

    @idempotent(store=store, key="k", operation="o", fingerprint=None)
    async def work():
        raise AssertionError("must not run")

    def take_over():
        claim = elsewhere(store)
        run(store.store.ledger(SYNC).complete(claim, Outcome("value", b'"theirs"')))

    late(1).meanwhile = take_over
    assert await work() == "theirs"


async def test_a_holder_forgotten_in_the_middle_learns_it_at_its_next_step(store):
    @idempotent(store=store, key="k")
    async def work():
        run(store.store.ledger(SYNC).forget(make_key("k").id, force=True))
        await step("s", lambda: 1)

    with pytest.raises(ClaimLostError):
        await work()
