"""The guard on stores that last: sharing, sweeping, short lives, other versions' records."""

from __future__ import annotations

import json
import threading

import pytest

from semel import ResultLostError, idempotent, once, step
from semel.colour import SYNC, run
from semel.errors import CorruptRecordError
from semel.keys import make_key, new_attempt
from semel.stores.file import FileStore
from semel.stores.file.form import pack
from semel.stores.memory import MemoryStore
from semel.stores.sqlite import SQLiteStore
from semel.testing.clock import FakeClock
from semel.values import Busy, Outcome, State, Terms, Won
from support.threads import in_threads


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture(params=["memory", "file", "sqlite"])
def store(request, tmp_path, clock):
    store = {
        "memory": lambda: MemoryStore(clock=clock),
        "file": lambda: FileStore(tmp_path / "ledger", clock=clock),
        "sqlite": lambda: SQLiteStore(tmp_path / "ledger.db", clock=clock),
    }[request.param]()
    yield store
    store.close()


def test_half_a_second_is_a_lifetime(store, clock):
    calls = []

    @idempotent(store=store, ttl=0.5, lease=0.5, max_run=3600)
    def work():
        calls.append(1)
        return len(calls)

    assert work() == 1
    clock.advance(0.4)
    assert work() == 1
    clock.advance(0.2)
    assert work() == 2


def test_two_functions_in_two_threads_share_a_store(store):
    """Each function has its own record for the same argument, whoever comes first."""
    fns = {
        name: idempotent(store=store, operation=name, on_duplicate="wait")(
            lambda n, name=name: f"{name}{n}"
        )
        for name in ("pay", "refund")
    }
    names = iter(["pay", "refund"] * 2)

    def call():
        name = next(names)
        return [fns[name](n) == f"{name}{n}" for n in range(15)]

    assert in_threads(call, 4) == [[True] * 15] * 4


def test_a_sweep_never_takes_what_is_claimed_meanwhile(store, clock):
    ledger = store.ledger(SYNC)
    keys = [make_key(f"k{n}") for n in range(20)]
    for key in keys:
        won = run(ledger.claim(key, attempt=new_attempt(), terms=Terms(ttl_s=60)))
        run(ledger.complete(won.claim, Outcome("value", b"1")))
    clock.advance(61)
    together = threading.Barrier(2)
    answers = []

    def sweep():
        together.wait(60)
        for _ in range(10):
            run(ledger.sweep(limit=3))

    def claim():
        together.wait(60)
        answers.extend(run(ledger.claim(key, attempt=new_attempt(), terms=Terms())) for key in keys)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    claim()
    sweeper.join()
    assert all(isinstance(answer, Won) for answer in answers)
    run(ledger.sweep())
    for key in keys:
        again = run(ledger.claim(key, attempt=new_attempt(), terms=Terms()))
        assert isinstance(again, Busy)


def test_sweeping_takes_the_steps_along(store, clock):
    calls = []

    @idempotent(store=store, key="k", ttl=60)
    def work():
        return step("s", lambda: calls.append(1) or len(calls))

    assert work() == 1
    clock.advance(61)
    run(store.ledger(SYNC).sweep())
    assert run(store.ledger(SYNC).look(make_key("k").id)) is None
    assert work() == 2


def test_a_returned_object_is_not_shared_with_the_store(store):
    kept = {"n": [1]}
    fn = idempotent(store=store, operation="o")(lambda: kept)
    assert fn() is kept
    kept["n"].append(2)
    assert fn() == {"n": [1]}


def test_an_error_text_of_any_kind_can_be_recorded(store):
    for n, text in enumerate(("\x00", "\ud800", "\U0001f600" * 2000, "")):
        with pytest.raises(ValueError), once(f"k{n}", store=store):
            raise ValueError(text)
        assert run(store.ledger(SYNC).look(make_key(f"k{n}").id)).state is State.FAILED


# --- records of another version -----------------------------------------------------------------


@pytest.fixture
def on_disk(tmp_path, clock):
    store = FileStore(tmp_path / "ledger", clock=clock)
    key = make_key("k", operation="o")
    path = tmp_path / "ledger" / key.id.hex()[:2] / f"{key.id.hex()}.json"

    def rewrite(**changes):
        fields = json.loads(path.read_text().splitlines()[0])
        path.write_bytes(pack({**fields, **changes}))

    yield store, rewrite
    store.close()


@pytest.fixture
def calls():
    return []


@pytest.fixture
def work(on_disk, calls):
    store, _ = on_disk

    @idempotent(store=store, key="k", operation="o")
    def work():
        calls.append(1)
        return "done"

    return work


def test_a_field_that_a_newer_version_added_is_no_obstacle(on_disk, work, calls):
    work()
    on_disk[1](colour="blue")
    assert work() == "done"
    assert calls == [1]


def test_a_record_of_a_newer_format_runs_nothing(on_disk, work, calls):
    work()
    on_disk[1](format=2)
    with pytest.raises(CorruptRecordError, match="format"):
        work()
    assert calls == [1]


def test_a_result_of_a_newer_codec_runs_nothing(on_disk, work, calls):
    work()
    on_disk[1](outcome={"kind": "value", "status": None, "text": '{"$":"quaternion","v":1}'})
    with pytest.raises(ResultLostError, match="newer"):
        work()
    assert calls == [1]


def test_a_corrupt_record_runs_nothing_even_where_outages_may(on_disk, calls):
    store, rewrite = on_disk

    @idempotent(store=store, key="k", operation="o", on_unavailable="run")
    def work():
        calls.append(1)

    work()
    rewrite(state="NONSENSE")
    with pytest.raises(CorruptRecordError):
        work()
    assert calls == [1]
