"""What was broken once: each of these doubled an effect, hung a process or wedged a store."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

import semel
from semel import OutcomeUnknownError, StoreUnavailableError, colour, idempotent, step
from semel.colour import ASYNC, SYNC, run
from semel.keys import make_key, new_attempt
from semel.stores import SQLiteStore
from semel.stores.memory import MemoryStore
from semel.stores.sql import SQLStore, init
from semel.testing.clock import FakeClock
from semel.values import State, Terms, Won
from support.threads import in_threads
from support.wrapped import WrappedStore


@pytest.mark.parametrize("recorded", [True, False])
async def test_a_timeout_while_a_step_is_noted_never_doubles_it(recorded):
    store = WrappedStore(MemoryStore())
    charged = []

    @idempotent(store=store, key="k", on_crash="hold", lease=5, ttl=600)
    async def pay():
        async with asyncio.timeout(0.05):
            await step("charge", charged.append, 1)
        return "ok"

    store.line.delay_before["note"] = 0.2
    if not recorded:
        store.line.lose_request["note"] = 99
    with pytest.raises(TimeoutError):
        await pay()
    store.line.delay_before.clear()
    store.line.lose_request.clear()
    record = run(store.store.ledger(SYNC).look(make_key("k").id))
    if recorded:
        assert record.state is State.FAILED
        assert "charge" in record.steps
        assert await pay() == "ok"
    else:
        assert record.state is State.UNKNOWN
        with pytest.raises(OutcomeUnknownError):
            await pay()
    assert charged == [1]


def test_a_store_that_hangs_does_not_keep_another_from_renewing():
    stuck, release = threading.Event(), threading.Event()

    class Hanging(WrappedStore):
        def ledger(self, colour):
            ledger = super().ledger(colour)

            async def renew(*_args, **_kwargs):
                stuck.set()
                release.wait(30)

            ledger.renew = renew
            return ledger

    hanging, healthy = Hanging(MemoryStore()), WrappedStore(MemoryStore())

    @idempotent(store=hanging, key="a", lease=0.15, ttl=60)
    def on_hanging():
        release.wait(30)

    @idempotent(store=healthy, key="b", lease=0.15, ttl=60)
    def on_healthy():
        assert stuck.wait(10)
        before = healthy.line.count["renew"]
        while healthy.line.count["renew"] < before + 3:
            time.sleep(0.01)
        return "renewed"

    thread = threading.Thread(target=on_hanging)
    thread.start()
    try:
        assert on_healthy() == "renewed"
    finally:
        release.set()
        thread.join()


ENDING = """
import asyncio, sys, uuid, semel
store = semel.connect(sys.argv[1])

@semel.idempotent(store=store, key="c:{n}", lease=300)
async def work(n): pass

async def main(turns):
    await work(uuid.uuid4().hex)
    task = asyncio.ensure_future(work(uuid.uuid4().hex))
    for _ in range(turns):
        await asyncio.sleep(0)

for turns in range(20):
    asyncio.run(main(turns))
print("all ended")
"""


@pytest.fixture(params=["sqlite", "redis", "redis-cluster", "postgres", "mariadb"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    url = request.getfixturevalue(request.param.replace("-", "_") + "_url")
    if request.param in ("postgres", "mariadb"):
        init(url)
    return url


def test_a_loop_that_ends_in_the_middle_of_a_call_ends(url):
    done = subprocess.run(
        [sys.executable, "-c", ENDING, url], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "all ended\n", done.stderr


async def test_a_caller_cancelled_while_claiming_leaves_the_key_free(url):
    store = semel.connect(url)
    ran = []

    @idempotent(store=store, key="c:{n}", lease=300, ttl=600)
    async def work(n):
        ran.append(n)
        await asyncio.sleep(60)

    try:
        for n in range(60):
            task = asyncio.ensure_future(work(n))
            for _ in range(n % 15):
                await asyncio.sleep(0)
            if n % 4 == 0:
                await asyncio.sleep(0.001 * (n % 7))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        ledger = store.ledger(ASYNC)
        found = await ledger.records(limit=200)
        assert {r.state for r in found} <= {State.FAILED}
    finally:
        await store.aclose()


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_a_signal_that_raises_while_sqlite_waits_leaves_the_store_usable(tmp_path, error):
    store = SQLiteStore(tmp_path / "ledger.db")

    @idempotent(store=store, key="c:{n}")
    def work(n):
        return n

    def interrupt(*_):
        raise error

    assert work(0) == 0
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    freed = threading.Timer(0.5, lambda: other.execute("COMMIT"))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        freed.start()
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(error):
            work(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        freed.join()
    assert work(2) == 2
    other.execute("BEGIN IMMEDIATE")  # nothing of ours is left open
    other.execute("COMMIT")
    other.close()
    store.close()


def test_recording_is_tried_until_the_lease_ends_although_renewals_succeed():
    store = WrappedStore(MemoryStore())

    @idempotent(store=store, key="k", lease=0.3, max_run=600, ttl=600)
    def pay():
        return "charged"

    store.line.lose_request["complete"] = 10**6
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        pay()
    assert time.monotonic() - began < 20


def test_event_loops_in_several_threads_share_one_store(postgres_url):
    init(postgres_url)
    store = SQLStore(postgres_url)

    @idempotent(store=store, key="c:{n}")
    async def work(n):
        return n

    async def some(start):
        return [await work(n) for n in range(start, start + 5)]

    counter = iter(range(0, 1000, 5))
    lock = threading.Lock()

    def in_a_loop():
        with lock:
            start = next(counter)
        return asyncio.run(some(start))

    results = in_threads(in_a_loop, 6)
    assert sorted(n for result in results for n in result) == list(range(30))
    store.close()


def test_a_lapsed_key_has_one_winner_however_many_reach_for_it(postgres_url):
    """The conditions are checked again under the row's lock: without that, two won."""
    init(postgres_url)
    store = SQLStore(postgres_url)
    ledger = store.ledger(SYNC)
    keys = [make_key(f"k{n}", operation="o") for n in range(100)]
    for key in keys:
        run(ledger.claim(key, attempt=new_attempt(), terms=Terms(lease_s=0.001, ttl_s=60)))
    time.sleep(0.05)
    barrier = threading.Barrier(6)

    def reach():
        won = []
        for key in keys:
            barrier.wait()
            answer = run(ledger.claim(key, attempt=new_attempt(), terms=Terms(30, 60)))
            if isinstance(answer, Won):
                won.append(key.id)
        return won

    winners = [id for won in in_threads(reach, 6) for id in won]
    assert len(winners) == len(set(winners)) == len(keys)
    store.close()


class SoftTimeLimitError(Exception):
    """What a handler of a signal raises, wherever the program happens to be."""


@pytest.fixture
def cut_at():
    """Raise right after the named function, once: a signal that comes at the worst moment."""

    def arm(name):
        def hook(frame, event, arg):
            if event == "return" and frame.f_code.co_name == name:
                sys.setprofile(None)
                raise SoftTimeLimitError

        sys.setprofile(hook)

    yield arm
    sys.setprofile(None)


@pytest.mark.parametrize("where", ["begin", "_keep_lease", "later", "at"])
@pytest.mark.parametrize("how", ["function", "block"])
def test_a_signal_while_an_attempt_begins_leaves_nobody_renewing(cut_at, where, how):
    clock = FakeClock()
    store = WrappedStore(MemoryStore(clock=clock))
    before = set(SYNC._alarm.entries)

    @idempotent(store=store, key="k", operation="once", fingerprint=None)
    def work():
        return "done"

    cut_at(where)
    with pytest.raises(SoftTimeLimitError):
        if how == "function":
            work()
        else:
            with semel.once("k", store=store):
                pass
    for entry in SYNC._alarm.entries - before:
        run(entry.work())
    assert store.line.count["renew"] == 0
    clock.advance(31)
    assert work() == "done"


class Cut:
    """Raise at the nth thing that happens inside of this code."""

    def __init__(self, code, n):
        self.code = code
        self.left = n
        self.has_struck = False

    def __call__(self, frame, event, arg):
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        if frame is None:
            return
        self.left -= 1
        if self.left < 0:
            sys.setprofile(None)
            self.has_struck = True
            raise SoftTimeLimitError


def test_a_signal_anywhere_in_setting_an_alarm_does_not_wedge_it():
    """An Event has its lock in Python: cut off there, every later call of the process hung."""
    for n in itertools.count():
        alarm = colour._Alarm()
        alarm._thread = threading.current_thread()  # nobody has to run what falls due
        cut = Cut(colour._Alarm.at.__code__, n)
        sys.setprofile(cut)
        with contextlib.suppress(SoftTimeLimitError):
            alarm.at(60.0, None)
        sys.setprofile(None)
        if not cut.has_struck:
            break
        later = threading.Thread(target=alarm.at, args=(30.0, None), daemon=True)
        later.start()
        later.join(10)
        assert not later.is_alive(), f"wedged when cut off at {n}"
    assert n > 3


async def test_one_block_entered_by_two_tasks_is_refused_and_the_first_is_recorded():
    store = MemoryStore()
    block = semel.once("k", store=store)

    async def use():
        async with block as attempt:
            await asyncio.sleep(0.01)
            attempt.done("first")

    answers = await asyncio.gather(use(), use(), return_exceptions=True)
    assert answers[0] is None
    assert isinstance(answers[1], semel.SettingsError)
    record = await store.ledger(ASYNC).look(make_key("k").id)
    assert record.state is State.COMPLETED


class Tenant(enum.StrEnum):
    ACME = "acme"


@pytest.mark.parametrize("url", ["sqlite_url", "postgres_url", "mariadb_url", "redis_url"])
async def test_members_of_an_enum_are_names_like_any_other(request, tmp_path, url):
    """They failed alone, or everybody in their batch, or were taken for one another under -O."""
    where = f"sqlite:///{tmp_path}/once.db" if url == "sqlite_url" else request.getfixturevalue(url)
    store = SQLStore(where, create=True) if "sql:" in where else semel.connect(where)

    @idempotent(store=store, key="k:{n}", scope=Tenant.ACME, operation=Tenant.ACME)
    async def pay(n):
        return await step(Tenant.ACME, lambda: n)

    run_id = new_attempt()
    plain = idempotent(store=store, key="k:{n}", scope="acme", operation="acme")(_again)
    try:
        assert await asyncio.gather(*(pay(f"{run_id}{i}") for i in range(8))) == [
            f"{run_id}{i}" for i in range(8)
        ]
        assert await plain(f"{run_id}0") == f"{run_id}0"
    finally:
        await store.aclose()


async def _again(n):
    raise AssertionError("must not run")


async def test_a_codec_that_gives_no_bytes_loses_its_own_result_only(tmp_path):
    class Texts:
        def encode(self, value):
            return str(value)

        def decode(self, data):
            return data

    store = SQLiteStore(tmp_path / "once.db")
    ran = []

    @idempotent(store=store, key="odd", codec=Texts())
    async def odd():
        ran.append("odd")
        return 1

    @idempotent(store=store, key="{n}")
    async def even(n):
        ran.append(n)
        return n

    assert await asyncio.gather(odd(), *(even(n) for n in range(5))) == [1, 0, 1, 2, 3, 4]
    with pytest.raises(semel.ResultLostError, match="instead of bytes"):
        await odd()
    assert await asyncio.gather(*(even(n) for n in range(5))) == [0, 1, 2, 3, 4]
    assert len(ran) == 6
    await store.aclose()
