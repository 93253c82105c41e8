"""Killed processes, full disks and failing system calls, for the stores without a server."""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import resource
import signal
import struct
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from semel.colour import SYNC, run
from semel.errors import StoreUnavailableError
from semel.keys import make_key, new_attempt
from semel.stores.file import FileStore
from semel.stores.sqlite import SQLiteStore
from semel.testing.clock import FakeClock
from semel.values import Busy, Done, Kept, Outcome, State, Terms, Won
from support.child import Child

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

TERMS = Terms(lease_s=30, ttl_s=600)
VALUE = Outcome("value", b'{"paid":true}')
KEY = make_key("order-1", operation="pay")


@pytest.fixture(params=[FileStore, SQLiteStore], ids=["file", "sqlite"])
def opened(request, tmp_path):
    """Opens the same records again and again, each time as a fresh process would."""
    stores = []

    def open_store(**settings):
        stores.append(request.param(tmp_path / "ledger", **settings))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def claim(store, key=KEY, terms=TERMS):
    ledger = store.ledger(SYNC)
    return run(ledger.claim(key, attempt=new_attempt(), fingerprint=b"f", terms=terms))


def look(store, key=KEY):
    return run(store.ledger(SYNC).look(key.id))


def now_us():
    return time.time_ns() // 1000


# --- processes ----------------------------------------------------------------------------------


def test_many_processes_have_one_winner_per_key(opened):
    """Six processes go through the same hundred keys; they start together."""
    opened()
    keys = [make_key(f"k{n}", operation="pay") for n in range(100)]
    gate, go = os.pipe()
    reader, writer = os.pipe()

    def race():
        store = opened()
        os.close(go)
        os.read(gate, 1)
        for n, key in enumerate(keys):
            answer = claim(store, key)
            assert isinstance(answer, Won | Busy)
            if isinstance(answer, Won):
                os.write(writer, bytes([n]))

    with ExitStack() as stack:
        children = [stack.enter_context(Child(race)) for _ in range(6)]
        for fd in (gate, go, writer):
            os.close(fd)
        assert [one.end() for one in children] == [0] * 6
    assert sorted(os.read(reader, 1000)) == list(range(100))
    os.close(reader)


def test_a_killed_holder_is_taken_over_with_a_larger_fence(opened):
    reader, writer = os.pipe()

    def hold():
        won = claim(opened())
        os.write(writer, struct.pack("q", won.claim.fence))
        signal.pause()

    with Child(hold):
        fence = struct.unpack("q", os.read(reader, 8))[0]
    os.close(reader)
    os.close(writer)
    assert isinstance(claim(opened()), Busy)
    later = opened(clock=FakeClock(now_us() + 31_000_000))
    won = claim(later)
    assert won.claim.fence > fence
    assert won.claim.number == 2
    assert won.orphan.fence == fence
    assert run(later.ledger(SYNC).complete(won.claim, VALUE)) == Kept()
    assert isinstance(claim(opened()), Done)


@pytest.mark.slow
def test_a_process_killed_while_writing_leaves_the_old_record_or_the_new(opened):
    """Forty kills at random moments. What was answered before the kill is there after it."""
    store = opened()
    won = claim(store)
    chance = random.Random(20)
    noted = -1

    for _ in range(40):
        reader, writer = os.pipe()
        begin = noted + 1

        def write(begin=begin, writer=writer):
            ledger = opened().ledger(SYNC)
            for n in range(begin, begin + 10_000):
                assert run(ledger.note(won.claim, "n", b"%d" % n)) == Kept()
                os.write(writer, struct.pack("q", n))

        with Child(write):
            first = struct.unpack("q", os.read(reader, 8))[0]
            time.sleep(chance.uniform(0, 0.01))
        os.close(writer)
        answered = max([first, *(n for (n,) in struct.iter_unpack("q", _rest(reader)))])
        os.close(reader)
        noted = int(look(store).steps["n"])
        assert answered <= noted <= answered + 1
    assert run(store.ledger(SYNC).complete(won.claim, VALUE)) == Kept()


def _rest(fd):
    parts = []
    while part := os.read(fd, 65_536):
        parts.append(part)
    whole = b"".join(parts)
    return whole[: len(whole) // 8 * 8]


# --- a full disk --------------------------------------------------------------------------------


def test_a_file_that_may_not_grow_leaves_the_old_record(opened):
    """The size limit cuts a write in the middle, as a full disk does."""
    store = opened()
    won = claim(store)
    size = max(path.stat().st_size for path in Path(store._path).parent.rglob("*"))

    def fill():
        mine = opened()
        assert look(mine) is not None
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5_000, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        ledger = mine.ledger(SYNC)
        with pytest.raises(StoreUnavailableError):
            run(ledger.complete(won.claim, Outcome("value", b"x" * 1_000_000)))
        assert isinstance(claim(mine), Busy)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert run(ledger.complete(won.claim, VALUE)) == Kept()

    with Child(fill) as filling:
        assert filling.end() == 0
    assert look(store).outcome == VALUE


# --- failing system calls -----------------------------------------------------------------------


class Failing:
    """Makes the n-th call of one function of `os` fail, and counts the calls."""

    def __init__(self, monkeypatch, name, nth, code):
        self.calls = 0
        self._nth = nth
        self._error = OSError(code, os.strerror(code))
        real = getattr(os, name)

        @functools.wraps(real)
        def call(*args, **kwargs):
            self.calls += 1
            if self.calls == self._nth:
                raise self._error
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)


STEPS = {
    "note": (lambda ledger, claim: ledger.note(claim, "a", b"1")),
    "complete": (lambda ledger, claim: ledger.complete(claim, VALUE)),
    "release": (lambda ledger, claim: ledger.release(claim)),
    "renew": (lambda ledger, claim: ledger.renew(claim, lease_s=99)),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_a_failing_call_leaves_the_old_record_and_can_be_repeated(
    tmp_path, monkeypatch, call, code, step
):
    """Every single call of a change fails once. The record is what it was, and the change works
    when it is asked for again."""
    store = FileStore(tmp_path / "ledger", clock=FakeClock())
    ledger = store.ledger(SYNC)
    for nth in range(1, 20):
        key = make_key(f"k{nth}", operation="pay")
        won = claim(store, key)
        before = look(store, key)
        with monkeypatch.context() as patch:
            failing = Failing(patch, call, nth, code)
            try:
                run(STEPS[step](ledger, won.claim))
            except StoreUnavailableError:
                pass
            else:
                assert failing.calls < nth
                break
        assert look(store, key) == before
        assert run(STEPS[step](ledger, won.claim)) == Kept()
    else:
        pytest.fail("a change of one record makes fewer calls than that")
    assert not list((tmp_path / "ledger").rglob("*.next"))


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace", "mkdir"])
def test_a_first_claim_that_fails_leaves_no_record(tmp_path, monkeypatch, call):
    for nth in range(1, 20):
        store = FileStore(tmp_path / f"ledger{nth}", clock=FakeClock())
        with monkeypatch.context() as patch:
            failing = Failing(patch, call, nth, errno.ENOSPC)
            try:
                claim(store)
            except StoreUnavailableError:
                pass
            else:
                assert failing.calls < nth
                return
        assert look(store) is None
        assert isinstance(claim(store), Won)
    pytest.fail("a first claim makes fewer calls than that")


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace", "unlink"])
def test_deleting_fails_whole_or_not_at_all(tmp_path, monkeypatch, call):
    store = FileStore(tmp_path / "ledger", clock=FakeClock())
    ledger = store.ledger(SYNC)
    for nth in range(1, 20):
        key = make_key(f"k{nth}", operation="pay")
        fence = claim(store, key).claim.fence
        with monkeypatch.context() as patch:
            failing = Failing(patch, call, nth, errno.EIO)
            try:
                run(ledger.forget(key.id, force=True))
            except StoreUnavailableError:
                pass
            else:
                assert failing.calls < nth
                return
        found = look(store, key)
        assert found is None or found.state is State.PENDING
        run(ledger.forget(key.id, force=True))
        assert claim(store, key).claim.fence > fence
    pytest.fail("deleting makes fewer calls than that")


def test_a_clean_up_that_fails_too_is_made_good_by_the_next_change(tmp_path, monkeypatch):
    store = FileStore(tmp_path / "ledger", clock=FakeClock())
    ledger = store.ledger(SYNC)
    won = claim(store)
    with monkeypatch.context() as patch:
        Failing(patch, "replace", 1, errno.EIO)
        Failing(patch, "unlink", 1, errno.EIO)
        with pytest.raises(StoreUnavailableError):
            run(ledger.complete(won.claim, VALUE))
    # Nobody knows how that ended, so either is right; it must be one of them, and stay so.
    assert run(ledger.complete(won.claim, VALUE)) == Kept()
    assert isinstance(claim(store), Done)


def test_a_disk_that_takes_one_byte_at_a_time_loses_none(tmp_path, monkeypatch):
    store = FileStore(tmp_path / "ledger", clock=FakeClock())
    won = claim(store)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:1]))
    assert run(store.ledger(SYNC).complete(won.claim, VALUE)) == Kept()
    assert isinstance(claim(store), Done)


def test_a_change_is_durable_with_its_name_before_it_can_be_seen(tmp_path, monkeypatch):
    store = FileStore(tmp_path / "ledger", clock=FakeClock())
    won = claim(store)
    order = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(fd):
        order.append("fsync " + Path(f"/proc/self/fd/{fd}").readlink().suffix)
        fsync(fd)

    def seen_replace(old, new):
        order.append("replace")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    run(store.ledger(SYNC).complete(won.claim, VALUE))
    assert order == ["fsync .next", "fsync ", "replace"]


def test_a_power_cut_that_takes_back_the_rename_loses_nothing(tmp_path):
    """The name of the change is on disk, its rename need not be."""
    store = FileStore(tmp_path / "ledger", clock=FakeClock())
    won = claim(store)
    (path,) = (tmp_path / "ledger").glob("??/*.json")
    old = path.read_bytes()
    run(store.ledger(SYNC).complete(won.claim, VALUE))
    path.rename(path.with_suffix(".next"))
    path.write_bytes(old)
    orphaned = FakeClock()
    orphaned.advance(TERMS.lease_s + 1)
    again = FileStore(tmp_path / "ledger", clock=orphaned)
    assert claim(again) == Done(VALUE, won.claim.fence)
    assert json.loads(path.read_text().splitlines()[0])["state"] == "COMPLETED"
