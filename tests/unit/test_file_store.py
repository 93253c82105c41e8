"""The ledger as files: format, damage, locks, forks, and what is refused at once."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from semel.colour import ASYNC, SYNC, run
from semel.errors import (
    CorruptRecordError,
    DamagedStoreError,
    SettingsError,
    StoreUnavailableError,
)
from semel.keys import make_key, new_attempt
from semel.stores.file import FileStore, shard
from semel.stores.file.disk import MARK
from semel.stores.file.form import pack
from semel.stores.rules import Claiming
from semel.testing.clock import FakeClock
from semel.values import Busy, Done, Kept, Key, Outcome, Terms, Won
from support.alarm import alarms

TERMS = Terms(lease_s=30, ttl_s=600)
VALUE = Outcome("value", b'{"paid":true}')
KEY = make_key("order-1", tenant="acme", operation="pay")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "ledger"


@pytest.fixture
def store(root, clock):
    return FileStore(root, clock=clock)


@pytest.fixture
def ledger(store):
    return store.ledger(SYNC)


def claim(ledger, key=KEY, attempt=None):
    return run(ledger.claim(key, attempt=attempt or new_attempt(), fingerprint=b"f", terms=TERMS))


def finished(ledger, key=KEY, outcome=VALUE):
    won = claim(ledger, key)
    assert run(ledger.complete(won.claim, outcome)) == Kept()
    return won.claim


def descriptors():
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def path_of(root, key=KEY, end="json"):
    return root / key.id.hex()[:2] / f"{key.id.hex()}.{end}"


# --- the format -----------------------------------------------------------------------------------


def test_a_record_is_a_line_people_can_read_and_a_checksum(root, ledger):
    finished(ledger)
    line, checksum = path_of(root).read_text().splitlines()
    record = json.loads(line)
    assert record["key"] == "order-1"
    assert record["tenant"] == "acme"
    assert record["state"] == "COMPLETED"
    assert record["outcome"]["text"] == '{"paid":true}'
    assert set(json.loads(checksum)) == {"sha256"}


def test_records_are_for_their_owner_alone(root, ledger):
    finished(ledger)
    assert path_of(root).stat().st_mode & 0o077 == 0
    assert root.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "text", ["a\x00b", "\ud800", "\ud83d\ude00", "😀", "x" * 255, "../../etc/passwd", "\n{}\n"]
)
def test_every_text_comes_back_to_the_character(ledger, text):
    key = Key(b"\x07" * 32, text, text, text)
    won = claim(ledger, key)
    run(ledger.note(won.claim, text, b"\xff\x00"))
    run(ledger.release(won.claim, error=text))
    record = run(ledger.look(key.id))
    assert record.key == key
    assert record.error == text
    assert record.steps == {text: b"\xff\x00"}


def test_nothing_of_a_key_gets_into_a_path(root, ledger):
    finished(ledger, make_key("../../../../tmp/escaped", operation="pay"))
    names = {p.name for p in root.rglob("*") if p.is_file()}
    assert not any("escaped" in name for name in names)


# --- damage ---------------------------------------------------------------------------------------


def test_a_changed_byte_anywhere_is_found(root, ledger):
    finished(ledger)
    path = path_of(root)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(CorruptRecordError, match=KEY.id.hex()):
            claim(ledger)
    path.write_bytes(whole)
    assert isinstance(claim(ledger), Done)


def test_a_record_cut_anywhere_is_found(root, ledger):
    finished(ledger)
    path = path_of(root)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptRecordError):
            claim(ledger)


def test_a_corrupt_record_stops_every_verb_and_stays(root, ledger):
    won = claim(ledger)
    path_of(root).write_bytes(b"")
    for verb in (
        ledger.complete(won.claim, VALUE),
        ledger.release(won.claim),
        ledger.renew(won.claim),
        ledger.note(won.claim, "a", b""),
        ledger.look(KEY.id),
        ledger.records(),
        ledger.forget(KEY.id),
        ledger.resolve(KEY.id, fence=won.claim.fence, outcome=VALUE, ttl_s=None),
    ):
        with pytest.raises(CorruptRecordError, match=r"\.json"):
            run(verb)
    assert path_of(root).read_bytes() == b""


def test_forgetting_by_force_is_the_way_out_of_a_corrupt_record(root, ledger):
    before = claim(ledger).claim
    path_of(root).write_bytes(b"rubbish")
    assert run(ledger.forget(KEY.id, force=True))
    assert claim(ledger).claim.fence > before.fence


def test_another_keys_file_is_not_taken_for_this_keys(root, ledger):
    finished(ledger)
    other = make_key("order-2", operation="pay")
    claim(ledger, other)
    path_of(root, other).write_bytes(path_of(root).read_bytes())
    with pytest.raises(CorruptRecordError, match="it is the record"):
        claim(ledger, other)


def test_a_record_of_a_later_format_is_refused(root, ledger):
    finished(ledger)
    fields = json.loads(path_of(root).read_text().splitlines()[0])
    path_of(root).write_bytes(pack({**fields, "format": 2}))
    with pytest.raises(CorruptRecordError, match="format is 2"):
        claim(ledger)


def test_a_sealed_record_without_its_fields_is_refused(root, ledger):
    claim(ledger)
    path_of(root).write_bytes(pack({"format": 1, "id": KEY.id.hex()}))
    with pytest.raises(CorruptRecordError, match="KeyError"):
        claim(ledger)


def test_a_corrupt_floor_is_refused(root, ledger):
    claim(ledger)
    run(ledger.forget(KEY.id, force=True))
    floor = path_of(root).with_name("floor.json")
    floor.write_bytes(pack({"format": 1}))
    with pytest.raises(CorruptRecordError, match="floor"):
        claim(ledger)


def test_a_sweep_goes_round_a_corrupt_record(root, ledger, clock, caplog):
    finished(ledger)
    finished(ledger, make_key("order-2", operation="pay"))
    path_of(root).write_bytes(b"")
    clock.advance(601)
    assert run(ledger.sweep()) == 1
    assert KEY.id.hex() in caplog.text
    assert path_of(root).exists()


# --- a change on its way in -----------------------------------------------------------------------


def test_a_whole_change_left_behind_is_finished(root, ledger):
    finished(ledger)
    done = path_of(root).read_bytes()
    run(ledger.forget(KEY.id))
    claim(ledger)
    path_of(root, end="next").write_bytes(done)
    assert run(ledger.look(KEY.id)).outcome == VALUE
    assert not path_of(root, end="next").exists()
    assert isinstance(claim(ledger), Done)


def test_a_whole_first_change_left_behind_is_finished(root, ledger):
    finished(ledger)
    path_of(root).rename(path_of(root, end="next"))
    assert [r.outcome for r in run(ledger.records())] == [VALUE]
    assert isinstance(claim(ledger), Done)


def test_a_torn_change_left_behind_is_dropped(root, ledger):
    won = claim(ledger)
    path_of(root, end="next").write_bytes(path_of(root).read_bytes()[:-1])
    assert isinstance(claim(ledger), Busy)
    assert run(ledger.complete(won.claim, VALUE)) == Kept()
    assert not path_of(root, end="next").exists()


# --- fences ---------------------------------------------------------------------------------------


def test_fences_grow_over_a_sweep_though_the_clock_went_back(ledger, clock):
    before = finished(ledger)
    clock.advance(601)
    assert run(ledger.sweep()) == 1
    clock.advance(-3600)
    assert claim(ledger).claim.fence > before.fence


def test_a_sweep_deletes_at_most_its_limit_and_leaves_no_file(root, clock):
    ledger = FileStore(root, clock=clock, fsync=False).ledger(SYNC)
    for n in range(150):
        finished(ledger, make_key(f"k{n}", operation="pay"))
    clock.advance(601)
    counts = []
    while count := run(ledger.sweep(limit=40)):
        counts.append(count)
    assert counts == [40, 40, 40, 30]
    assert {p.name for p in root.rglob("*") if p.is_file()} == {"semel.json", "floor.json"}


# --- what cannot work is said at once -------------------------------------------------------------


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="directory"):
        FileStore(tmp_path / "file")


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(SettingsError, match="a directory of its own"):
        FileStore(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


DAMAGED = {
    "another letter": MARK.replace(b"ledger", b"lodger"),
    "zeros": bytes(len(MARK)),
    "half of it lost at its beginning": MARK[9:],
    "more behind it": MARK + b"x",
    "twice": MARK * 2,
    "no text": b"\xff\xfe",
    "JSON of something else": b"[1]\n",
    "no format": b'{"semel": "ledger"}\n',
    "a format that is no number": b'{"semel": "ledger", "format": "1"}\n',
    "an older format than the first": b'{"semel": "ledger", "format": 0}\n',
    "line ends of Windows": MARK.replace(b"\n", b"\r\n"),
    "a thousand brackets": b"[" * 100_000,
}


@pytest.mark.parametrize("mark", DAMAGED.values(), ids=DAMAGED)
def test_damaged_mark_is_reported_with_the_content_it_should_have(mark, tmp_path):
    path = tmp_path / "a ledger"
    finished(FileStore(path).ledger(SYNC))
    (path / "semel.json").write_bytes(mark)
    with pytest.raises(DamagedStoreError, match="is damaged") as damaged:
        FileStore(path)
    assert (path / "semel.json").read_bytes() == mark
    # What the message says is what repairs it.
    repair = re.search(r"(echo .*?)\. Each record", str(damaged.value))[1]
    subprocess.run(["/bin/sh", "-c", repair], check=True, timeout=60)
    assert isinstance(claim(FileStore(path).ledger(SYNC)), Done)


def test_another_format_is_refused(tmp_path):
    (tmp_path / "semel.json").write_text('{"semel": "ledger", "format": 2}\n')
    with pytest.raises(SettingsError, match="another format"):
        FileStore(tmp_path)


def test_a_directory_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(SettingsError, match="may write"):
        FileStore(tmp_path / "ledger")


def test_without_posix_locks_it_is_refused():
    """As on Windows, where there is no fcntl."""
    code = (
        "import sys; sys.modules['fcntl'] = None\n"
        "import semel\n"
        "try: semel.connect('file:///nowhere')\n"
        "except semel.SettingsError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "SQLiteStore" in done.stdout


def test_a_mark_half_written_by_a_dead_process_is_completed(tmp_path):
    (tmp_path / "semel.json").write_bytes(MARK[:9])
    FileStore(tmp_path)
    assert (tmp_path / "semel.json").read_bytes() == MARK


def test_a_store_can_be_opened_again_anywhere_below(tmp_path):
    first = FileStore(tmp_path / "a" / "b" / "ledger")
    finished(first.ledger(SYNC))
    again = FileStore(str(tmp_path / "a" / "b" / "ledger"))
    assert isinstance(claim(again.ledger(SYNC)), Done)


def test_a_directory_that_was_deleted_is_not_an_empty_ledger(root, ledger):
    finished(ledger)
    shutil.rmtree(root)
    with pytest.raises(StoreUnavailableError):
        claim(ledger)


def test_a_relative_path_is_kept_when_the_process_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = FileStore("ledger")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    finished(store.ledger(SYNC))
    assert "ledger" in repr(store)
    assert not list((tmp_path / "elsewhere").iterdir())


# --- locks and forks ------------------------------------------------------------------------------


def test_a_replay_and_a_busy_answer_need_no_lock(root, ledger):
    finished(ledger)
    running = make_key("order-2", operation="pay")
    claim(ledger, running)
    fds = [os.open(path, os.O_RDONLY) for path in root.iterdir() if path.is_dir()]
    for fd in fds:
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        assert isinstance(claim(ledger), Done)
        assert isinstance(claim(ledger, running), Busy)
        assert run(ledger.look(KEY.id)) is not None
    finally:
        for fd in fds:
            os.close(fd)


def test_a_lock_that_is_never_free_is_reported(root, ledger, monkeypatch):
    monkeypatch.setattr(shard, "LOCK_WAIT_S", 0.05)
    finished(ledger)
    run(ledger.forget(KEY.id))
    fd = os.open(root / KEY.id.hex()[:2], os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(StoreUnavailableError, match="fuser"):
            claim(ledger)
    finally:
        os.close(fd)
    assert isinstance(claim(ledger), Won)


def test_no_descriptor_is_kept(ledger, root):
    finished(ledger)
    before = descriptors()
    for n in range(20):
        finished(ledger, make_key(f"k{n}", operation="pay"))
        claim(ledger, make_key(f"k{n}", operation="pay"))
    path_of(root).write_bytes(b"")
    with pytest.raises(CorruptRecordError):
        claim(ledger)
    assert descriptors() == before
    # The next test can leave an empty list, if its signal comes just before the removal.
    assert not any(shard._held.values())


def test_a_signal_that_raises_leaves_no_descriptor_and_no_lock(root):
    files = FileStore(root, fsync=False)._sync._files
    ops = [Claiming(make_key(f"k{n}"), new_attempt(), b"", TERMS) for n in range(7)]
    before = descriptors()
    with alarms() as struck:
        hit = sum(
            struck(20 + n % 150, lambda op=ops[n % 7]: files.replay(op) or files.perform(op))
            for n in range(3000)
        )
    gc.collect()
    assert hit > 100
    assert descriptors() == before
    for op in ops:
        assert isinstance(files.perform(op), Won)  # an error after ten seconds if it is locked


class Forgetful(dict):
    """As if every fork came between opening a descriptor and remembering it."""

    def __setitem__(self, key, fds):
        pass


class Slow:
    """A change that waits inside its lock until it may go on."""

    def __init__(self, monkeypatch):
        self.inside, self.go_on = threading.Event(), threading.Event()
        self._real = os.fsync
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, fd):
        self.inside.set()
        self.go_on.wait(10)
        self._real(fd)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestForks:
    @pytest.fixture
    def gate(self):
        """A child reads it to live on, and ends when the test does."""
        reader, writer = os.pipe()
        yield reader
        os.close(reader)
        os.close(writer)

    @pytest.mark.parametrize("held", [dict, Forgetful])
    def test_a_child_forked_during_a_change_does_not_keep_the_lock(
        self, ledger, monkeypatch, gate, held
    ):
        monkeypatch.setattr(shard, "_held", held())
        monkeypatch.setattr(shard, "LOCK_WAIT_S", 0.5)
        slow = Slow(monkeypatch)
        thread = threading.Thread(target=lambda: claim(ledger))
        thread.start()
        slow.inside.wait(10)
        child = os.fork()
        if child == 0:
            os.read(gate, 1)
            os._exit(0)
        slow.go_on.set()
        thread.join()
        try:
            assert isinstance(claim(ledger, Key(KEY.id[:1] + b"\x00" * 31, "same shard")), Won)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def test_a_child_does_not_keep_the_lock_of_a_killed_parent(self, ledger, monkeypatch, gate):
        monkeypatch.setattr(shard, "LOCK_WAIT_S", 0.5)
        reader, writer = os.pipe()
        parent = os.fork()
        if parent == 0:
            slow = Slow(monkeypatch)
            threading.Thread(target=lambda: claim(ledger), daemon=True).start()
            slow.inside.wait(10)
            child = os.fork()
            if child == 0:
                os.read(gate, 1)
                os._exit(0)
            os.write(writer, struct.pack("q", child))
            signal.pause()
        child = struct.unpack("q", os.read(reader, 8))[0]
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        try:
            assert isinstance(claim(ledger), Busy | Won)
        finally:
            os.kill(child, signal.SIGKILL)
            os.close(reader)
            os.close(writer)


# --- the event loop -------------------------------------------------------------------------------


async def test_the_event_loop_does_not_wait_for_the_disk(store, monkeypatch):
    loop_thread = threading.get_ident()
    callers = set()
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (callers.add(threading.get_ident()), real(fd)))
    ledger = store.ledger(ASYNC)
    won = await ledger.claim(KEY, attempt="a/1", fingerprint=b"f", terms=TERMS)
    await ledger.complete(won.claim, VALUE)
    assert callers
    assert loop_thread not in callers
    await store.aclose()


def test_one_loop_after_another_and_several_at_once(store):
    async def whole(name):
        ledger = store.ledger(ASYNC)
        key = make_key(name, operation="pay")
        won = await ledger.claim(key, attempt=new_attempt(), fingerprint=b"f", terms=TERMS)
        return await ledger.complete(won.claim, VALUE)

    assert asyncio.run(whole("one")) == Kept()
    asyncio.run(store.aclose())
    assert asyncio.run(whole("two")) == Kept()
    verdicts = []
    threads = [
        threading.Thread(target=lambda n=n: verdicts.append(asyncio.run(whole(f"t{n}"))))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [Kept()] * 4
    asyncio.run(store.aclose())


# --- guarantees -----------------------------------------------------------------------------------


def test_a_power_cut_is_survived_only_with_fsync(root, ledger):
    assert run(ledger.guarantees()).survives == {"process_crash", "power_loss"}
    fast = FileStore(root, fsync=False).ledger(SYNC)
    found = run(fast.guarantees())
    assert found.survives == {"process_crash"}
    assert found.shared
    finished(fast)
    assert isinstance(claim(ledger), Done)
